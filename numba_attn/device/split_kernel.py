"""The launch that splits: tiles of Q, K and V become images of halves, each with its scale and record.

One block per tile, whatever the operand; a thread has one chunk of eight columns in every eighth row, kept in registers
while the tile's largest number is found, so that everything is read once and travels 16 bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, float32, int32

from numba_attn.device.math import bits, from_bits
from numba_attn.device.smem import vector_load
from numba_attn.device.softmax import ALL_LANES, ONE, ZERO
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
    scales,
    write_image,
)

NEIGHBOURS = (1, 2, 4)
"""Lane distances within eight lanes, which always have chunks of one row."""


@dataclass(frozen=True)
class SplitConfig:
    rows: int
    columns: int
    vector: int
    lost: float
    """Of a sum of Q K^T, see `mma_tile.lost_by_scores`."""

    @property
    def threads(self) -> int:
        return 8 * padded(self.columns) // CHUNK

    @property
    def min_blocks(self) -> int:
        return 1024 // self.threads  # 64 registers a thread: loads of one block under the stores of others


def build_split(config: SplitConfig):
    """`split_halves(Q, K, V, Q_image, .., V_record, scale)`: Q is taken times scale log2(e) (1 + lost)."""
    ROWS, VECTOR, CHUNKS = config.rows, config.vector, padded(config.columns) // CHUNK
    TILE_WORDS = image_words(ROWS, config.columns)
    TURNS = ROWS // 8
    X_SHAPE = (TURNS, CHUNK)
    write = write_image(ROWS, config.columns)
    word = image_word(ROWS)
    load = vector_load(VECTOR)
    factor = of_log2e(config.lost)

    @cuda.jit
    def split_halves(Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record, scale):
        # who am I: block -> operand, batch, head, tile; thread -> one chunk of every eighth row
        q_tiles, k_tiles = Q_record.shape[1], K_record.shape[1]
        q_blocks, k_blocks = Q_record.shape[0] * q_tiles, K_record.shape[0] * k_tiles
        block, tiles, times, rest = cuda.blockIdx.x, k_tiles, ONE, ZERO
        if block < q_blocks:
            X, image, record, tiles = Q, Q_image, Q_record, q_tiles
            times, rest = factor(scale)
        elif block < q_blocks + k_blocks:
            X, image, record, block = K, K_image, K_record, block - q_blocks
        else:
            X, image, record, block = V, V_image, V_record, block - q_blocks - k_blocks
        H, L, D = X.shape[1], X.shape[2], X.shape[3]
        head, tile = block // tiles, block % tiles
        gX = X[head // H, head % H]
        tid = cuda.threadIdx.x
        chunk, row = tid % CHUNKS, tid // CHUNKS
        peaks = cuda.shared.array(ROWS, int32)  # of each row, the bits of its largest magnitude
        counts = cuda.shared.array(ROWS, int32)  # of each row, how many elements come near the tile's largest
        x = cuda.local.array(X_SHAPE, float32)
        for r in range(tid, ROWS, cuda.blockDim.x):
            peaks[r] = 0
            counts[r] = 0

        # the tile; what lies outside of X is 0, read from a place inside
        for i in range(TURNS):
            at = tile * ROWS + row + 8 * i
            for c in range(0, CHUNK, VECTOR):
                col = CHUNK * chunk + c
                load(x, (i, c), gX, (min(at, L - 1), min(col, D - VECTOR)))
                for k in range(c, c + VECTOR):
                    x[i, k] = x[i, k] if (at < L) & (col < D) else ZERO
        cuda.syncthreads()

        # the largest magnitude of each row and of all; bits of magnitudes are ordered as these are, NaN being the last
        for i in range(TURNS):
            peak = int32(0)
            for c in range(CHUNK):
                peak = max(peak, bits(abs(x[i, c])))
            for distance in NEIGHBOURS:
                peak = max(peak, cuda.shfl_xor_sync(ALL_LANES, peak, distance))
            if tid & 7 == 0:
                cuda.atomic.max(peaks, row + 8 * i, peak)
        cuda.syncthreads()
        peak = int32(0)
        for r in range(ROWS):
            peak = max(peak, peaks[r])
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
                cuda.atomic.add(counts, row + 8 * i, near)
        cuda.syncthreads()
        if tid == 0:
            level, row_min = DENSE * amax if peak > 0 else INF, INF
            for r in range(ROWS):
                if peaks[r] > 0:
                    row_min = min(row_min, from_bits(peaks[r]))
                    level = level if 2 * counts[r] > D else ZERO
            # A factor out of range is no scale: then fp32 has to do.
            finite = (amax < INF) & (abs(times) * up < INF)
            record[head, tile, AMAX] = amax * abs(times) if finite else INF
            record[head, tile, LEVEL] = level * abs(times)
            record[head, tile, ROW_MIN] = row_min
            record[head, tile, UNSCALE] = down

    return split_halves
