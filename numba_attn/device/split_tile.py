"""Verbs on a tile of fp32 numbers that becomes an image of halves: what one thread loads, compares and writes.

A tile is `rows` rows of whole blocks of 64 columns. All of a row is with `lanes` neighbouring lanes of one warp, each
of which has every lanes-th chunk of eight columns, in `turns` rows: x[i, 8 c + k] is element k of chunk c in row i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from numba_attn.device.smem import vector_load
from numba_attn.device.split_half import CHUNK, INF, ROW_BYTES, WORD_BYTES, padded, plane_bytes, split
from numba_attn.device.tile import WARP
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb

VECTOR = 4
"""Elements of an access, where lengths and strides allow for it."""


@dataclass(frozen=True)
class SplitConfig:
    rows: int
    columns: int
    vector: int
    halves: int = 2
    tiles: int = 1
    """Of one operand of a head, that a block splits one after the other."""
    is_beside: bool = False
    """Beside another launch, see `kernel.Launch`."""
    chunks_a_thread: int = 4
    """In all its rows, or a few less."""

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
        """Rows of one thread, `step` apart."""
        return max(1, self.chunks_a_thread // self.chunks)

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

    @unrolled
    def clear(e, x, rows, columns):
        """Nothing but zeros from so many rows and columns on."""
        for i in range(TURNS):
            for c in range(CHUNKS):
                for k in range(CHUNK):
                    is_inside = (rows > STEP * i) & (columns > NEXT * c + k)
                    x[i, CHUNK * c + k] = e.where(is_inside, x[i, CHUNK * c + k], 0.0)

    @verb
    def load(x, gX, row, row0, col0, chunk):
        L, D = gX.shape
        col = col0 + CHUNK * chunk
        if N == VECTOR and row0 + ROWS <= L and col0 + WIDE <= D:
            load_inside(x, gX, row, col)
        else:
            for i in range(TURNS):
                for c in range(CHUNKS):
                    for k in range(0, CHUNK, N):
                        # Read from a place inside.
                        at, column = min(row + STEP * i, L - 1), min(col + NEXT * c + k, D - N)
                        load_vector(x, (i, CHUNK * c + k), gX, (at, column))
            clear(x, min(L - row, ROWS), min(D, col0 + COLUMNS) - col)

    return load


def over_lanes_of(config: SplitConfig):
    """Four verbs over the lanes of a row, a warp or a block; of magnitudes, NaN is the largest.

    of_rows(peak, x): peak[i], the largest of each row; peak[TURNS], of all rows of the warp.
    of_warps(peak): peak[0], the largest of the words of `warps` neighbouring lanes.
    smallest(peak): peak[TURNS], the smallest row of the warp but zero rows, or inf.
    sums_of_rows(count): count[i], over the lanes of a row.
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


def halves_of_chunk(e, x, i: int, chunk: int, scale, rest, halves: int = 2) -> list:
    """For each plane the four words of a thread's chunk in row i, of scale + rest times x."""
    numbers = [x[i, CHUNK * chunk + c] for c in range(CHUNK)]
    return list(zip(*(split(e, *numbers[c : c + 2], scale, rest, halves) for c in range(0, CHUNK, 2)), strict=True))


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
                planes = halves_of_chunk(e, x, i, chunk, scale, rest, halves)
                base, behind = place(word, chunk)
                for plane, words in enumerate(planes):
                    e.store(image, (base,), words, behind=behind + i * config.step * row_words + plane * plane_words)
                for hi in planes[0]:
                    counts = e.count_magnitudes(counts, hi, threshold)
            low, high = e.unpack(counts)
            count[i] = low + high

    return write
