"""fp32 numbers as pairs of fp16 halves: scales, images of tiles, and when a split loses nothing.

    x 2^e = hi + lo     hi = fp16(x 2^e)     lo = fp16(x 2^e - hi)     a b = hi hi + hi lo + lo hi (+ lo lo, dropped)

Q is taken times scale log2(e), to more digits than fp32's, and times what makes up for the truncation of the sums.

One exponent e serves a tile, some rows and up to 256 columns: its largest number comes to lie in [2^14, 2^15). Then
hi + lo is off by 2^-23 of x, or by 2^-39 of the tile's largest number where x is small; the dropped product is 2^-22 of
a b at most.

The image of a tile, in global and in shared memory: first the plane of hi, then that of lo. A plane is a sequence of
column blocks of 64 halves; in a block each row takes 128 bytes, in eight chunks of 16; chunk c of row r is at
position c ^ (r % 8). Eight rows of one chunk, what `ldmatrix` reads at once, so lie in different banks.

Halves are as good as fp32 where no sum is made of numbers that lost digits alone. Each tile has a record of what
decides that (`AMAX` ..), and `is_safe` holds for a block of rows of Q against all keys if

  - every number is finite;
  - D >= 16: a score of few products has few rounding errors in fp32, fewer than halves bring along;
  - D max|Q| max|K| <= 2^11, Q being scaled: what is lost of that is less than a rounding of the score's exponential;
    or else most elements of each row of Q and K reach 2^-7 of the largest one, so that many large ones meet in each
    score, and its rounding errors in fp32 are larger than what was lost;
  - no row of V but zero rows is smaller than 2^-12 of the largest: P is split together with its tile's scale.

Rows with fewer than 32 keys are left to fp32 in any case, see `rescue_kernel`.

One half, for results of class tf32: fp16(x 2^e) alone has the 11 significant bits of TF32, and is off by 2^-12 of x,
or as before by 2^-39 of the tile's largest number. So it loses digits below 2^-28 of that where two halves do below
2^-16, and what it must not lose is 2^12 times as large: blocks are safe with rows of V down to 2^-24 of the largest
(`SLACK`). D max|Q| max|K| <= 2^11 has to hold in any case: beyond, TF32's own rounding decides between keys that nearly
tie, and no two evaluations agree.
"""

from __future__ import annotations

import numpy as np
from numba import cuda, float32

from numba_attn.device.math import LOG2E, fma, from_bits
from numba_attn.device.ptx import opaque
from numba_attn.device.softmax import NEG_INF, ONE, ZERO
from numba_attn.device.tile import WARP
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb

CHUNK = 8
"""Halves in 16 bytes."""
BLOCK_COLUMNS = 64
ROW_BYTES = 2 * BLOCK_COLUMNS
WORD_BYTES = 4
PEAK_LOG2 = 14
"""Exponent of a tile's largest number: its half stays finite, whatever it rounds to."""
PEAK = np.float32(2.0**PEAK_LOG2)
"""What a probability of 1 is split as."""

AMAX, LEVEL, ROW_MIN, UNSCALE = range(4)
"""The record of a tile: its largest magnitude, inf if an element is not finite; the magnitude that more than half of
the elements of each row but zero rows reach, 0 if there is none; the largest magnitude of the smallest row but zero
rows; 2^-e."""
RECORD = 4
DENSE = np.float32(2.0**-5)
"""Of a tile's largest magnitude: what more than half of a row must reach for LEVEL to be that."""
Q_LEVEL, K_LEVEL, V_SPREAD = np.float32(2.0**-7), np.float32(2.0**-7), np.float32(2.0**-12)
MAX_SCORE = np.float32(2.0**11)
SLACK = {1: np.float32(2.0**12), 2: np.float32(1)}
"""By halves: how much larger what is lost may be."""
INF = np.float32(np.inf)
LEAST_RATIO = np.float32(2.0**-100)
"""Of the scales of V's tiles: one that is smaller holds zeros alone, where a block is safe."""
LOWEST = np.float32(2.0**-126)
FEW_COLUMNS = 16
LOG2E_64 = float(np.log2(np.e))
LOG2E_REST = np.float32(LOG2E_64 - float(LOG2E))
LOST_UNIT = np.float32(2.0**-48)
"""Of what sums lose, where a kernel is given it as an integer: up to 2^-17."""


def padded(columns: int) -> int:
    """Columns of an image: whole blocks."""
    return -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS


def plane_bytes(rows: int, columns: int) -> int:
    return 2 * rows * padded(columns)


def image_bytes(rows: int, columns: int, halves: int = 2) -> int:
    """All planes of one tile: that of hi, and with two halves that of lo."""
    return halves * plane_bytes(rows, columns)


def image_words(rows: int, columns: int, halves: int = 2) -> int:
    return image_bytes(rows, columns, halves) // WORD_BYTES


@verb
def scales(peak):
    """(2^e, 2^-e) of a tile whose largest magnitude has the bits `peak`.

    e is at most 126: numbers below 2^-112 keep all their bits at that.
    """
    exponent = min(PEAK_LOG2 + 127 - (peak >> 23), 126)
    return from_bits((127 + exponent) << 23), from_bits((127 - exponent) << 23)


@verb
def unit_of(q_unscale, k_unscale):
    """The power of two that makes exponents of 2 of the products of two tiles; not 0, so that 0 times inf is 0."""
    return max(q_unscale * k_unscale, LOWEST)


def units_of(lost: float) -> int:
    """As kernels are given it: an integer, that their machine code does not depend on."""
    return round(lost / float(LOST_UNIT))


@verb
def of_log2e(scale, lost):
    """(hi, lo) of scale log2(e) (1 + lost); lost: in `units_of`."""
    hi, rest = scale * LOG2E, fma(LOG2E, float32(lost) * LOST_UNIT, LOG2E_REST)
    return hi, fma(scale, rest, fma(scale, LOG2E, -hi))


@verb
def peak_of(unscale, head_scale):
    """What a probability of 1 is split as: P makes up for a tile of V that is smaller than the head's largest."""
    return PEAK * max(unscale * head_scale, LEAST_RATIO)


Q_AMAX, Q_LEAST, K_AMAX, K_LEAST, V_AMAX, V_LEAST = range(6)
"""Largest AMAX of tiles of Q, K and V; the least LEVEL, LEVEL and ROW_MIN, negated, so that all are found as maxima."""
EXTREMES = 6


@unrolled
def over_warp(e, x):
    """The largest of each x[i] over the lanes of a warp, in place; all at a time, for none waits for another."""
    distance = WARP // 2
    while distance:
        for i, other in enumerate([e.shfl_xor(x[i], distance) for i in range(EXTREMES)]):
            x[i] = e.max(x[i], other)
        distance //= 2


@verb
def extremes(x, rQ, first, tiles, rK, rV, lane):
    """x[Q_AMAX] .., of so many tiles of Q from `first` on and of all of K and V; the same in every lane."""
    k_tiles, v_tiles = rK.shape[0], rV.shape[0]
    for i in range(0, EXTREMES, 2):
        x[i], x[i + 1] = ZERO, NEG_INF
    most = max(tiles, max(k_tiles, v_tiles)) if min(k_tiles, v_tiles) > 0 else 0
    for tile in range(lane, most, WARP):
        # Loaded together; past the last tile the last once more, which changes no extreme.
        q, k, v = first + min(tile, tiles - 1), min(tile, k_tiles - 1), min(tile, v_tiles - 1)
        x[Q_AMAX], x[Q_LEAST] = max(x[Q_AMAX], rQ[q, AMAX]), max(x[Q_LEAST], -rQ[q, LEVEL])
        x[K_AMAX], x[K_LEAST] = max(x[K_AMAX], rK[k, AMAX]), max(x[K_LEAST], -rK[k, LEVEL])
        x[V_AMAX], x[V_LEAST] = max(x[V_AMAX], rV[v, AMAX]), max(x[V_LEAST], -rV[v, ROW_MIN])
    over_warp(x)


@verb
def extremes_of_keys(x, rK, rV, lane):
    """The same over this lane's tiles of K and V alone; those of Q, and `over_warp`, are still to come."""
    for i in range(0, EXTREMES, 2):
        x[i], x[i + 1] = ZERO, NEG_INF
    k_tiles, v_tiles = rK.shape[0], rV.shape[0]
    for tile in range(lane, max(k_tiles, v_tiles) if min(k_tiles, v_tiles) > 0 else 0, WARP):
        k, v = min(tile, k_tiles - 1), min(tile, v_tiles - 1)
        x[K_AMAX], x[K_LEAST] = max(x[K_AMAX], rK[k, AMAX]), max(x[K_LEAST], -rK[k, LEVEL])
        x[V_AMAX], x[V_LEAST] = max(x[V_AMAX], rV[v, AMAX]), max(x[V_LEAST], -rV[v, ROW_MIN])


@verb
def is_safe(D, q_amax, q_level, k_amax, k_level, v_amax, v_min, slack):
    """Whether halves lose nothing that their class of accuracy keeps.

    The arguments are `extremes` of the rows and keys involved, and the `SLACK` of the halves.
    """
    highest_score = D * q_amax * k_amax
    finite = (q_amax < INF) & (k_amax < INF) & (v_amax < INF) & (highest_score < INF)
    dense = (q_level >= Q_LEVEL * q_amax) & (k_level >= K_LEVEL * k_amax)
    scores = (highest_score <= MAX_SCORE) | (dense & (slack == ONE))
    return finite & (D >= FEW_COLUMNS) & scores & (slack * v_min >= V_SPREAD * v_amax)


@verb
def verdict(Q_record, K_record, V_record, head, first, tiles, D, slack, lane):
    """(whether halves lose nothing in so many tiles of Q, from `first` on, for all keys; largest magnitude of V)."""
    x = cuda.local.array(EXTREMES, float32)
    # The lane of unknown origin: addresses are else found ahead, and kept.
    extremes(x, Q_record[head], first, tiles, K_record[head], V_record[head], opaque(lane))
    q, k = (x[Q_AMAX], -x[Q_LEAST]), (x[K_AMAX], -x[K_LEAST])
    return is_safe(float32(D), q[0], q[1], k[0], k[1], x[V_AMAX], -x[V_LEAST], slack), x[V_AMAX]


def split(e, low, high, scale, rest=None, halves: int = 2) -> tuple:
    """(hi, lo), or (hi,) alone, of scale + rest times two numbers, packed; that is not rounded before it is split."""
    hi = e.halves(low * scale, high * scale)
    if halves == 1:
        return (hi,)
    los = [e.fma(x, scale, -half) for x, half in zip((low, high), e.unpack(hi), strict=True)]
    if rest is not None:
        los = [e.fma(x, rest, lo) for x, lo in zip((low, high), los, strict=True)]
    return hi, e.halves(*los)


def image_word(rows: int):
    """The verb `word(row, chunk)`: where chunk `chunk` of row `row` starts in the plane of hi, in words."""

    @verb
    def word(row, chunk):
        place = (chunk & 7) ^ (row & 7)
        return ((chunk >> 3) * rows + row) * (ROW_BYTES // WORD_BYTES) + place * 4

    return word


def copy_image(n_bytes: int, threads: int):
    """The verb `copy(target, image, word, tid)`: n_bytes of an image to shared memory, asynchronously, by all threads.

    target: shared address; word: first word in `image`, a 1-D tensor.
    """
    per_turn = 16 * threads
    if n_bytes % per_turn:
        raise ValueError(f"{threads} threads do not share {n_bytes} bytes evenly, 16 bytes each")

    @unrolled
    def copy(e, target, image, word, tid):
        source, target = e.address(image, word + tid * 4), target + tid * 16
        for start in range(0, n_bytes, per_turn):
            e.copy_async(target, source, start)

    return copy
