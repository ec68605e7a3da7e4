"""The launch that splits: tiles of Q, K and V become images of one or two halves, each with its scale and record.

One block per tile, whatever the operand, or per few tiles of one head; a thread keeps a few chunks in registers while
the tile's largest number is found, so that everything is read once and travels 16 bytes at a time. Operands that are
wider than a tile are cut into slabs of columns: the tiles of one row of tiles follow each other.

Bound by bytes, as many written as read, where a tile takes few enough instructions: those of a number count.
"""

from __future__ import annotations

import numpy as np
from numba import cuda, float32, int32

from numba_attn.device.math import bits, quotient
from numba_attn.device.ptx_sm90 import wait_for_launch_before
from numba_attn.device.softmax import ONE, ZERO
from numba_attn.device.split_half import (
    AMAX,
    CHUNK,
    DENSE,
    INF,
    LEVEL,
    ROW_MIN,
    UNSCALE,
    image_word,
    image_words,
    of_log2e,
    scales,
)
from numba_attn.device.split_tile import SplitConfig, load_tile, over_lanes_of, write_image
from numba_attn.device.tile import WARP
from numba_attn.device.verb import verb

LEAST_HALF = np.float32(2.0**-24)
"""Above 0: no zero counts as large."""
HALF = np.float32(0.5)


@verb
def locate(block, of_block, Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record):
    """Operand, image, record, head, first tile of a block, and is it Q: Q's blocks come first, then K's, then V's."""
    of_q = quotient(Q_record.shape[1] + (of_block - 1), of_block)
    of_k = quotient(K_record.shape[1] + (of_block - 1), of_block)
    q_blocks, k_blocks = Q_record.shape[0] * of_q, K_record.shape[0] * of_k
    own, of_head, is_q = block, of_k, block < q_blocks
    if is_q:
        X, image, record, of_head = Q, Q_image, Q_record, of_q
    elif block < q_blocks + k_blocks:
        X, image, record, own = K, K_image, K_record, block - q_blocks
    else:
        X, image, record, own = V, V_image, V_record, block - q_blocks - k_blocks
        of_head = quotient(V_record.shape[1] + (of_block - 1), of_block)
    head = quotient(own, of_head)
    return X, image, record, head, int32(own - head * of_head) * of_block, is_q


def build_split(config: SplitConfig):
    """`split_halves(Q, K, V, Q_image, .., V_record, scale, lost, first)`: tiles of blocks from `first` on (`locate`).

    Q is taken times scale log2(e) (1 + lost), see `of_log2e`.
    """
    ROWS, COLUMNS, LANES, TURNS, WARPS = config.rows, config.columns, config.lanes, config.turns, config.threads // WARP
    X_SHAPE, TILE_WORDS = (TURNS, CHUNK * config.chunks), image_words(ROWS, COLUMNS, config.halves)
    load, write, word = load_tile(config), write_image(config), image_word(ROWS)
    of_rows, of_warps, smallest, sums_of_rows = over_lanes_of(config)
    PEAKS, TILES, IS_BESIDE = TURNS + 1, config.tiles, config.is_beside

    @cuda.jit
    def split_halves(Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record, scale, lost, first):
        # who am I: block -> operand, head, tiles; LANES neighbours -> every STEP-th row
        X, image, record, head, tile, is_q = locate(
            first + cuda.blockIdx.x, TILES, Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record
        )
        tid, H, D = cuda.threadIdx.x, X.shape[1], X.shape[3]
        chunk, row, warp = tid & (LANES - 1), quotient(tid, LANES), quotient(tid, WARP)
        times, rest = ONE, ZERO
        if is_q:
            times, rest = of_log2e(scale, lost)
        slabs = quotient(D + (COLUMNS - 1), COLUMNS)
        b, row_tile = quotient(head, H), quotient(tile, slabs)
        row0, col0 = int32(row_tile * ROWS), int32((tile - row_tile * slabs) * COLUMNS)
        gX, at = X[b, head - b * H], word(row, chunk)
        x = cuda.local.array(X_SHAPE, float32)
        load(x, gX, row0 + row, row0, col0, chunk)

        of_warp = cuda.shared.array(WARPS, float32)
        smallest_of_warp = cuda.shared.array(WARPS, float32)
        peak = cuda.local.array(PEAKS, float32)
        amax = cuda.local.array(1, float32)
        count = cuda.local.array(TURNS, float32)
        for own in range(tile, min(tile + TILES, record.shape[1])):
            # the largest magnitude of each row, and of all
            of_rows(peak, x)
            if tid & (WARP - 1) == 0:
                of_warp[warp] = peak[TURNS]
            cuda.syncthreads()
            amax[0] = of_warp[tid & (WARPS - 1)]
            of_warps(amax)

            # its image
            highest, level = amax[0] * abs(times), DENSE * amax[0] * abs(times)
            # Tiles of zeros must not take Q's factor out of range.
            up, down = scales(bits(ONE if is_q and highest == ZERO else highest))
            write(image[head], own * TILE_WORDS + at, x, times * up, rest * up, max(level * up, LEAST_HALF), count)
            half = float32(min(D - col0, COLUMNS)) * HALF

            if TILES > 1:
                # the next tile, on its way while this one's record is made
                col0 += COLUMNS
                if col0 >= D:
                    row0, col0 = row0 + ROWS, int32(0)
                if own + 1 < min(tile + TILES, record.shape[1]):
                    load(x, gX, row0 + row, row0, col0, chunk)

            # its record
            sums_of_rows(count)
            smallest(peak)
            is_sparse = False
            for i in range(TURNS):
                is_sparse |= (peak[i] > ZERO) & (count[i] <= half)
            if tid & (WARP - 1) == 0:
                smallest_of_warp[warp] = peak[TURNS]
            is_sparse = cuda.syncthreads_or(int32(is_sparse))
            if tid == 0:
                row_min = INF
                for i in range(WARPS):
                    row_min = min(row_min, smallest_of_warp[i])
                # A factor out of range is no scale: then fp32 has to do.
                finite = (amax[0] < INF) & (abs(times) * up < INF)
                record[head, own, AMAX] = highest if finite else INF
                record[head, own, LEVEL] = ZERO if is_sparse else level if amax[0] > ZERO else INF
                record[head, own, ROW_MIN] = row_min
                record[head, own, UNSCALE] = down
        if IS_BESIDE and cuda.blockIdx.x == 0:
            # So that whatever follows may count on both launches.
            wait_for_launch_before()

    return split_halves
