"""The launch that splits: tiles of Q, K and V become images of one or two halves, each with its scale and record.

One block per tile, whatever the operand; a thread keeps a few chunks of eight columns in registers while the tile's
largest number is found, so that everything is read once and travels 16 bytes at a time. All of a row is with some
neighbouring lanes of one warp. Operands that are wider than a tile are cut into slabs of columns: the tiles of one row
of tiles follow each other.

Bound by bytes, as many written as read, where a tile takes few enough instructions: those of a number count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numba import cuda, float32, int32

from numba_attn.device.math import bits, quotient
from numba_attn.device.smem import vector_load
from numba_attn.device.softmax import ONE, ZERO
from numba_attn.device.split_half import (
    AMAX,
    CHUNK,
    DENSE,
    INF,
    LEVEL,
    ROW_BYTES,
    ROW_MIN,
    UNSCALE,
    WORD_BYTES,
    image_word,
    image_words,
    of_log2e,
    padded,
    plane_bytes,
    scales,
    split,
)
from numba_attn.device.tile import WARP
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb

VECTOR = 4
"""Elements of an access, where lengths and strides allow for it."""
LEAST_HALF = np.float32(2.0**-24)
"""Above 0: no zero counts as large."""
HALF = np.float32(0.5)


@dataclass(frozen=True)
class SplitConfig:
    rows: int
    columns: int
    vector: int
    lost: float = 0.0
    """Of a sum of Q K^T, see `mma_tile.lost_by_scores`."""
    halves: int = 2

    @property
    def lanes(self) -> int:
        """Neighbours that share rows; each has every lanes-th chunk of them."""
        return 4 if padded(self.columns) == 64 else 8

    @property
    def chunks(self) -> int:
        """Of one thread in a row."""
        return padded(self.columns) // CHUNK // self.lanes

    @property
    def turns(self) -> int:
        """Rows of one thread, `step` apart: four chunks in all, or a few less."""
        return max(1, 4 // self.chunks)

    @property
    def step(self) -> int:
        return self.rows // self.turns

    @property
    def threads(self) -> int:
        return self.step * self.lanes

    @property
    def min_blocks(self) -> int:
        """Loads of one under the arithmetic and the stores of others, with the registers that a thread needs."""
        return max(2, 768 // self.threads)


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
    head = quotient(tile, tiles)
    return X, image, record, head, int32(tile - head * tiles), is_q


def load_tile(config: SplitConfig):
    """The verb `load(x, gX, row, row0, col0, chunk)`: x[i, ..] are this thread's chunks of row `row` + i step of gX.

    The tile starts at row0 and col0; what lies outside of gX is 0.
    """
    ROWS, COLUMNS, STEP, TURNS, CHUNKS = config.rows, config.columns, config.step, config.turns, config.chunks
    WIDE, NEXT, N = padded(COLUMNS), CHUNK * config.lanes, config.vector
    load_vector = vector_load(N)

    @unrolled
    def load_inside(e, x, gX, row, col):
        for i in range(TURNS):
            for c in range(CHUNKS):
                for k in range(0, CHUNK, VECTOR):
                    for n, number in enumerate(e.load(gX, (row + STEP * i, col), VECTOR, behind=NEXT * c + k)):
                        x[i, CHUNK * c + k + n] = number

    @verb
    def load(x, gX, row, row0, col0, chunk):
        L, D = gX.shape
        col = col0 + CHUNK * chunk
        if N == VECTOR and row0 + ROWS <= L and col0 + WIDE <= D:
            load_inside(x, gX, row, col)
        else:
            for i in range(TURNS):
                at = row + STEP * i
                for c in range(CHUNKS):
                    for k in range(0, CHUNK, N):
                        column = col + NEXT * c + k
                        # Read from a place inside.
                        load_vector(x, (i, CHUNK * c + k), gX, (min(at, L - 1), min(column, D - N)))
                        is_inside = (at < L) & (column < min(D, col0 + COLUMNS))
                        for n in range(N):
                            own = CHUNK * c + k + n
                            x[i, own] = x[i, own] if is_inside else ZERO

    return load


def largest(config: SplitConfig):
    """The verbs of magnitudes, of which NaN is the largest.

    of_rows(peak, x): peak[i], the largest of each row; peak[TURNS], of all rows of the warp.
    of_warps(peak): peak[0], the largest of the words of `warps` neighbouring lanes.
    smallest(peak): peak[TURNS], the smallest row of the warp but zero rows, or inf.
    """
    TURNS, LANES, WARPS = config.turns, config.lanes, config.threads // WARP

    def distances(first: int, last: int):
        while first < last:
            yield first
            first *= 2

    def over_lanes(e, x, first: int, last: int, combine):
        return reduce(lambda x, distance: combine(x, e.shfl_xor(x, distance)), distances(first, last), x)

    def over(e, values: list):
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=False)
            values = [*(e.max_magnitude(a, b) for a, b in pairs), *values[len(values) // 2 * 2 :]]
        return values[0]

    @unrolled
    def of_rows(e, peak, x):
        peaks = []
        for i in range(TURNS):
            own = over(e, [x[i, c] for c in range(CHUNK * config.chunks)])
            peaks.append(over_lanes(e, own, 1, LANES, e.max_magnitude))
            peak[i] = peaks[i]
        peak[TURNS] = over_lanes(e, over(e, peaks), LANES, WARP, e.max_magnitude)

    @unrolled
    def of_warps(e, peak):
        peak[0] = over_lanes(e, peak[0], 1, WARPS, e.max_magnitude)

    @unrolled
    def smallest(e, peak):
        least = e.number(-INF)  # of negative numbers the largest
        for i in range(TURNS):
            least = e.max(least, e.where(peak[i] > 0.0, -peak[i], -INF))
        peak[TURNS] = -over_lanes(e, least, LANES, WARP, e.max)

    @unrolled
    def sums_of_rows(e, count):
        for i in range(TURNS):
            count[i] = over_lanes(e, count[i], 1, LANES, lambda a, b: a + b)

    return of_rows, of_warps, smallest, sums_of_rows


def write_image(config: SplitConfig):
    """The verb `write(image, word, x, scale, rest, least, count)`: the planes of a tile, this thread's chunks.

    They are of scale + rest times x, `rest` being below a rounding of `scale`. word: where the first chunk of row i = 0
    is in the image, a 1-D tensor of words, two halves each. count[i]: how many of a row reach the magnitude `least`.
    """
    rows, columns, halves, lanes = config.rows, config.columns, config.halves, config.lanes
    row_words, plane_words = ROW_BYTES // WORD_BYTES, plane_bytes(rows, columns) // WORD_BYTES

    def place(word, chunk: int) -> tuple:
        """Word of a thread's chunk: the first it is based on, and how far behind; see `image_word`."""
        blocks, rest = divmod(lanes * chunk, CHUNK)
        return word ^ (rest * CHUNK * 2 // WORD_BYTES), blocks * rows * row_words

    @unrolled
    def write(e, image, word, x, scale, rest, least, count):
        threshold = e.halves(least, least)
        for i in range(config.turns):
            counts = e.halves(0.0, 0.0)
            for chunk in range(config.chunks):
                numbers = [x[i, CHUNK * chunk + c] for c in range(CHUNK)]
                pairs = [split(e, *numbers[c : c + 2], scale, rest, halves) for c in range(0, CHUNK, 2)]
                base, behind = place(word, chunk)
                for plane, words in enumerate(zip(*pairs, strict=True)):
                    e.store(image, (base,), words, behind=behind + i * config.step * row_words + plane * plane_words)
                for hi, *_ in pairs:
                    counts = e.count_magnitudes(counts, hi, threshold)
            low, high = e.unpack(counts)
            count[i] = low + high

    return write


def build_split(config: SplitConfig):
    """`split_halves(Q, K, V, Q_image, .., V_record, scale)`: Q is taken times scale log2(e) (1 + lost)."""
    ROWS, COLUMNS, LANES, TURNS, WARPS = config.rows, config.columns, config.lanes, config.turns, config.threads // WARP
    X_SHAPE, TILE_WORDS = (TURNS, CHUNK * config.chunks), image_words(ROWS, COLUMNS, config.halves)
    load, write, word = load_tile(config), write_image(config), image_word(ROWS)
    (of_rows, of_warps, smallest, sums_of_rows), factor = largest(config), of_log2e(config.lost)
    PEAKS = TURNS + 1

    @cuda.jit
    def split_halves(Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record, scale):
        # who am I: block -> operand, head, tile; LANES neighbours -> every STEP-th row
        X, image, record, head, tile, is_q = locate(
            cuda.blockIdx.x, Q, K, V, Q_image, K_image, V_image, Q_record, K_record, V_record
        )
        tid, H, D = cuda.threadIdx.x, X.shape[1], X.shape[3]
        chunk, row, warp = tid & (LANES - 1), quotient(tid, LANES), quotient(tid, WARP)
        times, rest = ONE, ZERO
        if is_q:
            times, rest = factor(scale)
        slabs = quotient(D + (COLUMNS - 1), COLUMNS)
        b, row_tile = quotient(head, H), quotient(tile, slabs)
        row0, col0 = int32(row_tile * ROWS), int32((tile - row_tile * slabs) * COLUMNS)
        x = cuda.local.array(X_SHAPE, float32)
        load(x, X[b, head - b * H], row0 + row, row0, col0, chunk)

        # the largest magnitude of each row, and of all
        of_warp = cuda.shared.array(WARPS, float32)
        smallest_of_warp = cuda.shared.array(WARPS, float32)
        peak = cuda.local.array(PEAKS, float32)
        amax = cuda.local.array(1, float32)
        of_rows(peak, x)
        if tid & (WARP - 1) == 0:
            of_warp[warp] = peak[TURNS]
        cuda.syncthreads()
        amax[0] = of_warp[tid & (WARPS - 1)]
        of_warps(amax)

        # its image
        count = cuda.local.array(TURNS, float32)
        highest, level = amax[0] * abs(times), DENSE * amax[0] * abs(times)
        up, down = scales(bits(highest))
        at = tile * TILE_WORDS + word(row, chunk)
        write(image[head], at, x, times * up, rest * up, max(level * up, LEAST_HALF), count)

        # its record
        sums_of_rows(count)
        smallest(peak)
        is_sparse, half = False, float32(min(D - col0, COLUMNS)) * HALF
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
            record[head, tile, AMAX] = highest if finite else INF
            record[head, tile, LEVEL] = ZERO if is_sparse else level if amax[0] > ZERO else INF
            record[head, tile, ROW_MIN] = row_min
            record[head, tile, UNSCALE] = down

    return split_halves
