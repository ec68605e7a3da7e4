"""The launch that splits: tiles of Q, K and V become images of one or two halves, each with its scale and record.

One block per tile, whatever the operand; a thread has one chunk of eight columns in four of its rows, kept in registers
while the tile's largest number is found, so that everything is read once and travels 16 bytes at a time. Operands that
are wider than a tile are cut into slabs of columns: the tiles of one row of tiles follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, float32, int32

from numba_attn.device.math import bits, from_bits
from numba_attn.device.smem import vector_load
from numba_attn.device.softmax import ALL_LANES, ONE, ZERO, warp_max
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
    padded,
    row_step,
    scales,
    write_image,
)
from numba_attn.device.tile import WARP
from numba_attn.device.verb import verb

NEIGHBOURS, LANES = (1, 2, 4), (1, 2, 4, 8, 16)
"""Lane distances within eight lanes, which always have chunks of one row."""


@dataclass(frozen=True)
class SplitConfig:
    rows: int
    columns: int
    vector: int
    lost: float = 0.0
    """Of a sum of Q K^T, see `mma_tile.lost_by_scores`."""
    halves: int = 2

    @property
    def threads(self) -> int:
        return row_step(self.rows) * padded(self.columns) // CHUNK

    @property
    def min_blocks(self) -> int:
        return max(1, 1024 // self.threads)  # 64 registers a thread: loads of one block under the stores of others


@verb
def locate(block, Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record):
    """Operand, image, record, head, tile of a tile's number, and is it Q: Q's come first, then K's, then V's."""
    q_blocks, k_blocks = Q_record.shape[0] * Q_record.shape[1], K_record.shape[0] * K_record.shape[1]
    tile, tiles, is_q = block, K_record.shape[1], block < q_blocks
    if is_q:
        X, image, record, tiles = Q, Q_image, Q_record, Q_record.shape[1]
    elif block < q_blocks + k_blocks:
        X, image, record, tile = K, K_image, K_record, block - q_blocks
    else:
        X, image, record, tile = V, V_image, V_record, block - q_blocks - k_blocks
        tiles = V_record.shape[1]
    return X, image, record, tile // tiles, tile % tiles, is_q


def load_tile(config: SplitConfig):
    """The verb `load(x, X, head, tile, tid)`: this thread's chunks of a tile; what lies outside of X is 0."""
    ROWS, VECTOR, COLUMNS, CHUNKS = config.rows, config.vector, config.columns, padded(config.columns) // CHUNK
    STEP = row_step(ROWS)
    TURNS = ROWS // STEP
    load_vector = vector_load(VECTOR)

    @verb
    def load(x, X, head, tile, tid):
        H, L, D = X.shape[1], X.shape[2], X.shape[3]
        slabs = (D + COLUMNS - 1) // COLUMNS
        row0, col0 = tile // slabs * ROWS, tile % slabs * COLUMNS
        d_left = min(D - col0, COLUMNS)
        gX = X[head // H, head % H]
        chunk, row = tid % CHUNKS, tid // CHUNKS
        for i in range(TURNS):
            at = row0 + row + STEP * i
            for c in range(0, CHUNK, VECTOR):
                col = CHUNK * chunk + c
                # Read from a place inside.
                load_vector(x, (i, c), gX, (min(at, L - 1), min(col0 + col, D - VECTOR)))
                for k in range(c, c + VECTOR):
                    x[i, k] = x[i, k] if (at < L) & (col < d_left) else ZERO

    return load


def store_tile(config: SplitConfig):
    """The verb `store(x, image, record, head, tile, times, rest, D, peaks, counts, tid)`: image and record of a tile.

    peaks, counts: shared, by row.
    """
    ROWS, COLUMNS, CHUNKS, THREADS = config.rows, config.columns, padded(config.columns) // CHUNK, config.threads
    TILE_WORDS = image_words(ROWS, config.columns, config.halves)
    STEP = row_step(ROWS)
    TURNS = ROWS // STEP
    write = write_image(ROWS, config.columns, config.halves)
    word = image_word(ROWS)

    @verb
    def store(x, image, record, head, tile, times, rest, D, peaks, counts, tid):
        d_left = min(D - tile % ((D + COLUMNS - 1) // COLUMNS) * COLUMNS, COLUMNS)
        chunk, row = tid % CHUNKS, tid // CHUNKS
        for r in range(tid, ROWS, THREADS):
            peaks[r] = 0
            counts[r] = 0
        cuda.syncthreads()

        # the largest magnitude of each row and of all; bits of magnitudes are ordered as these are, NaN being the last
        for i in range(TURNS):
            peak = int32(0)
            for c in range(CHUNK):
                peak = max(peak, bits(abs(x[i, c])))
            for distance in NEIGHBOURS:
                peak = max(peak, cuda.shfl_xor_sync(ALL_LANES, peak, distance))
            if tid & 7 == 0:
                cuda.atomic.max(peaks, row + STEP * i, peak)
        cuda.syncthreads()
        peak = int32(0)
        for r in range(tid & 31, ROWS, WARP):
            peak = max(peak, peaks[r])
        for distance in LANES:
            peak = max(peak, cuda.shfl_xor_sync(ALL_LANES, peak, distance))
        amax = from_bits(peak)

        # its image
        up, down = scales(bits(amax * abs(times)))
        write(image[head], tile * TILE_WORDS + word(row, chunk), x, times * up, rest * up)

        # its record
        for i in range(TURNS):
            near = int32(0)
            for c in range(CHUNK):
                near += int32(abs(x[i, c]) >= DENSE * amax)
            for distance in NEIGHBOURS:
                near += cuda.shfl_xor_sync(ALL_LANES, near, distance)
            if tid & 7 == 0:
                cuda.atomic.add(counts, row + STEP * i, near)
        cuda.syncthreads()
        if tid < WARP:
            row_min, sparse = INF, ZERO
            for r in range(tid, ROWS, WARP):
                if peaks[r] > 0:
                    row_min = min(row_min, from_bits(peaks[r]))
                    sparse = sparse if 2 * counts[r] > d_left else ONE
            row_min, sparse = -warp_max(-row_min), warp_max(sparse)
            if tid == 0:
                level = ZERO if sparse > ZERO else DENSE * amax if peak > 0 else INF
                # A factor out of range is no scale: then fp32 has to do.
                finite = (amax < INF) & (abs(times) * up < INF)
                record[head, tile, AMAX] = amax * abs(times) if finite else INF
                record[head, tile, LEVEL] = level * abs(times)
                record[head, tile, ROW_MIN] = row_min
                record[head, tile, UNSCALE] = down

    return store


def build_split(config: SplitConfig):
    """`split_halves(Q, K, V, Q_image, .., V_record, scale)`: Q is taken times scale log2(e) (1 + lost)."""
    X_SHAPE, ROWS = (config.rows // row_step(config.rows), CHUNK), config.rows
    load, store, factor = load_tile(config), store_tile(config), of_log2e(config.lost)

    @cuda.jit
    def split_halves(Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record, scale):
        # who am I: block -> operand, head, tile; thread -> one chunk of every row_step-th row
        X, image, record, head, tile, is_q = locate(
            cuda.blockIdx.x, Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record
        )
        times, rest = ONE, ZERO
        if is_q:
            times, rest = factor(scale)
        peaks = cuda.shared.array(ROWS, int32)  # of each row, the bits of its largest magnitude
        counts = cuda.shared.array(ROWS, int32)  # of each row, how many elements come near the tile's largest
        x = cuda.local.array(X_SHAPE, float32)
        load(x, X, head, tile, cuda.threadIdx.x)
        store(x, image, record, head, tile, times, rest, X.shape[3], peaks, counts, cuda.threadIdx.x)

    return split_halves
