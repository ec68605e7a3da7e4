"""Verbs on tiles of halves: S = Q K^T, the online softmax in fragments, O = alpha O + P V.

A warp owns whole rows. S[i, j, r] and O[i, j, r] are register r of the fragment (see `fragments`) of rows 16 i .. + 15
and columns 8 j .. + 7; a value per row is [i, h] for row 16 i + 8 h + lane // 4, the same in the four lanes of a row.
Operands are images in shared memory (see `split_half`).

Every product of fp32 numbers is three of halves, small ones first: they meet a small sum. The tensor core truncates its
sums, so each sum starts from zero after a few steps and is added up in fp32, where it rounds to nearest. What scores
lose on average is made up for at no cost (`lost_by_scores`). For class tf32 the product of hi and hi is all, and what
sums are truncated by does not show.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, int32

from numba_attn.device.fragments import K, M, N
from numba_attn.device.split_half import CHUNK, ROW_BYTES, plane_bytes, split
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb


@verb
def lane_of_rows(lane):
    """This lane's part of the addresses of four 8 x 8 matrices, stacked by rows first, then by chunks."""
    r = lane & 7
    return ((lane >> 3 & 1) * 8 + r) * ROW_BYTES + (((lane >> 4) ^ r) << 4)


@verb
def lane_of_chunks(lane):
    """The same for four matrices that stand side by side by chunks first, then by rows."""
    r = lane & 7
    return ((lane >> 4) * 8 + r) * ROW_BYTES + (((lane >> 3 & 1) ^ r) << 4)


def halves_of(products: int) -> int:
    """Halves that so many products take of each number."""
    return 1 if products == 1 else 2


def load_matrices(
    e, address, rows: int, columns: int, row: int, chunk: int, halves: int, transposed: bool = False
) -> list:
    """hi, or hi and lo, of four 8 x 8 matrices of an image, from a row and an even chunk on."""
    # The lane's part holds its chunk's place in bits 4 to 6: another chunk of the block is one exclusive or away.
    block, place = divmod(chunk, CHUNK)
    start = (address ^ (place << 4)) + (block * rows + row) * ROW_BYTES
    return [e.ldmatrix(start + half * plane_bytes(rows, columns), transposed) for half in range(halves)]


def half_of(halves, n: int) -> list:
    """hi, or hi and lo, of the n-th of the two B fragments that four matrices make."""
    return [half[2 * n : 2 * n + 2] for half in halves]


SHORT = 64
"""Columns of a short sum."""
LOST_ONCE = 0.5 / math.log(2) * 2.0**-24
"""What a sum loses by one truncation to 24 bits, relative to it: half an ulp, averaged over mantissas."""


def lost_by_scores(columns: int, chain: int, small_first: bool) -> float:
    """What a sum of `scores` loses by truncation, on average, relative to it: the factor of Q makes up for it.

    This is `fragments.multiply_add` averaged over sums of one sign, of numbers spread evenly between 0 and any limit.
    Each step of 16 columns loses, in `LOST_ONCE` of the sum of a whole step:

        after - before / 4             the sum after hi hi is truncated; two bits behind the sum before were kept so far
        1.5 before                     the same for two small products, unless those of all steps came first
        before^2 (0.842 - log2(before) / 6) part    each product is cut two bits behind the sum before: where it has k
                                       bits further down, it loses 1 - (k + 2) / 2^(k + 1) of half a unit

    before, after: the sum's size, in whole steps; part: of a step that columns fill. Where signs differ the last loss
    cancels. Sums of O are left as they are: one key that has all the weight loses nothing.
    """

    def of_sum(columns: int) -> float:
        lost = before = 0.0
        for start in range(0, columns, K):
            part = min(K, columns - start) / K
            lost += before + part - before / 4
            if before:
                lost += before**2 * (0.842 - math.log2(before) / 6) * part + (0 if small_first else 1.5 * before)
            before += part
        return lost

    whole, rest = divmod(columns, K * chain)
    return LOST_ONCE * (whole * of_sum(K * chain) + of_sum(rest)) * K / max(columns, 1)


SMALL_FIRST = ((1, 1), (1, 0), (0, 1), (0, 0))
"""The four products, as which half (0: hi, 1: lo) of the left and of the right operand they take."""


def products_of(e, lefts: list, rights: list, products: int) -> list:
    """sum_k lefts[i][k] rights[n][k] for all i and n, from zero: lists over k of fragments by half.

    Small products first; neighbours in the code belong to different sums, so that none waits for the one before it.
    """
    sums = {(i, n): [e.number(0.0)] * 4 for i in range(len(lefts)) for n in range(len(rights))}
    steps = range(len(lefts[0]))
    order = [(k, a, b) for k in steps for a, b in SMALL_FIRST[-products:-1]] + [(k, 0, 0) for k in steps]
    for k, a, b in order:
        for i, n in sums:
            sums[i, n] = e.mma(lefts[i][k][a], rights[n][k][b], sums[i, n])
    return sums


def scores(q_rows: int, q_image_rows: int, k_rows: int, columns: int, chain: int, products: int):
    """The verb `qk(S, q, k)`: S = Q K^T, in units of both tiles' scales.

    q, k: shared addresses of the images plus `lane_of_rows` and `lane_of_chunks`; that of Q may hold more rows than
    the warp's. `products` are three, four with that of lo and lo, or one: then images have one plane. A sum moves on to
    fp32 after `chain` steps of 16 columns. In short sums, where few truncations show, the small products of all columns
    come before those of hi and hi; in longer ones each step's do: the operands are read once, and registers last.
    """
    m_tiles, n_tiles, steps = range(q_rows // M), range(k_rows // N), range(-(-columns // K))
    planes = halves_of(products)
    order = [(step, SMALL_FIRST[-products:]) for step in steps]
    if columns <= SHORT and products > 1:
        order = [(step, halves[:-1]) for step, halves in order] + [(step, halves[-1:]) for step, halves in order]

    @unrolled
    def qk(e, S, q, k):
        zero = [e.number(0.0)] * 4
        places = [(i, j) for j in n_tiles for i in m_tiles]
        sums, total = dict.fromkeys(places, zero), {}

        for step, halves in order:
            rows = [load_matrices(e, q, q_image_rows, columns, M * i, 2 * step, planes) for i in m_tiles]
            for j in n_tiles[::2]:
                keys = load_matrices(e, k, k_rows, columns, N * j, 2 * step, planes)
                for a, b in halves:
                    for i in m_tiles:
                        for n in range(2):
                            sums[i, j + n] = e.mma(rows[i][a], half_of(keys, n)[b], sums[i, j + n])
            if halves[-1] == SMALL_FIRST[-1] and ((step + 1) % chain == 0 or step == steps[-1]):
                for place in places:
                    before = total.get(place)
                    total[place] = [a + b for a, b in zip(before, sums[place], strict=True)] if before else sums[place]
                    sums[place] = zero
        for i, j in places:
            for r in range(4):
                S[i, j, r] = total[i, j][r]

    return qk


def masked(q_rows: int, k_rows: int, end_of_row):
    """The verb `mask(S, row0, col0, Lk, lane)`: -inf where column col0 + .. is end_of_row(row0 + .., Lk) or more."""
    m_tiles = q_rows // M
    shape = (m_tiles, 2)

    @unrolled
    def select(e, S, ends):
        for i in range(m_tiles):
            for j in range(k_rows // N):
                for r in range(4):
                    S[i, j, r] = e.where(ends[i, r // 2] > N * j + r % 2, S[i, j, r], -np.inf)

    @verb
    def mask(S, row0, col0, Lk, lane):
        ends = cuda.local.array(shape, int32)  # counted from this lane's first column
        for i in range(m_tiles):
            for h in range(2):
                ends[i, h] = end_of_row(row0 + (lane >> 2) + M * i + 8 * h, Lk) - col0 - 2 * (lane & 3)
        select(S, ends)

    return mask


def softmax(q_rows: int, k_rows: int, of_rows: bool = False):
    """The verb `step(S, m, l, alpha, unit, peak)`: one step of the online softmax.

    unit, a power of two, makes exponents of 2 of S; `of_rows`: unit[i, h], those of eight rows. So all products with it
    are exact, and the only rounding before the exponential is that of a difference, which is small where it counts:

        m_new = max(m, unit max S)     alpha = 2^(m - m_new)     P = 2^(unit S - m_new)
        l = alpha l + sum P, over this lane's own columns        S becomes peak P
    """

    @unrolled
    def step(e, S, m, l, alpha, unit, peak):
        for i in range(q_rows // M):
            for h in range(2):
                own = unit[i, h] if of_rows else unit
                places = [(i, j, 2 * h + r) for j in range(k_rows // N) for r in range(2)]
                highest = _tree(e.max, [S[place] for place in places])
                for distance in (1, 2):
                    highest = e.max(highest, e.shfl_xor(highest, distance))
                m_old, m_new = m[i, h], e.max(m[i, h], highest * own)
                # For a row that has met no key: 2^(-inf - 0) is 0 where 2^(-inf - -inf) is NaN.
                base = e.where(m_new > -np.inf, m_new, 0.0)
                alpha[i, h] = e.ex2(m_old - base)
                m[i, h] = m_new
                probabilities = [e.ex2(e.fma(S[place], own, -base)) for place in places]
                for place, p in zip(places, probabilities, strict=True):
                    S[place] = p * peak
                l[i, h] = e.fma(l[i, h], alpha[i, h], _tree(lambda a, b: a + b, probabilities))

    return step


def _tree(combine, values: list):
    """All values combined, in pairs."""
    while len(values) > 1:
        left = values[-1:] if len(values) % 2 else []
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + left
    return values[0]


def outputs(q_rows: int, k_rows: int, columns: int, chain: int, products: int = 3):
    """The verb `pv(O, P, alpha, v)`: O = alpha O + P V, P split in the registers that S was summed in.

    v: shared address of the image plus `lane_of_rows`. A sum starts anew after `chain` steps of 16 keys. `products` are
    three or one.
    """
    m_tiles, halves = range(q_rows // M), halves_of(products)

    @unrolled
    def pv(e, O, P, alpha, v):
        lefts = [[left_fragment(e, P, i, step, halves) for step in range(k_rows // K)] for i in m_tiles]
        for j in range(0, -(-columns // K) * 2, 2):
            for first in range(0, k_rows // K, chain):
                steps = range(first, min(first + chain, k_rows // K))
                values = [load_matrices(e, v, k_rows, columns, K * step, j, halves, transposed=True) for step in steps]
                rights = [[half_of(pair, n) for pair in values] for n in range(2)]
                sums = products_of(e, [[left[step] for step in steps] for left in lefts], rights, products)
                for (i, n), registers in sums.items():
                    for r, x in enumerate(registers):
                        before = O[i, j + n, r]
                        O[i, j + n, r] = before + x if first else e.fma(before, alpha[i, r // 2], x)

    return pv


def left_fragment(e, P, i: int, step: int, halves: int = 2) -> list:
    """hi, or hi and lo, of P's columns 16 step .. + 15 as a left operand."""
    places = [(j, 2 * h) for j in (2 * step, 2 * step + 1) for h in range(2)]
    return list(zip(*(split(e, P[i, j, r], P[i, j, r + 1], 1.0, halves=halves) for j, r in places), strict=True))


def start(q_rows: int, columns: int):
    """The verb `start(O, m, l)`: O = 0, m = -inf, l = 0."""

    @unrolled
    def start(e, O, m, l):
        for i in range(q_rows // M):
            for h in range(2):
                m[i, h], l[i, h] = -np.inf, 0.0
            for j in range(-(-columns // K) * 2):
                for r in range(4):
                    O[i, j, r] = 0.0

    return start


def ring(slots: int):
    """The verb `following(slot)`: the next slot of a ring."""

    @verb
    def following(slot):
        return slot + 1 if slot < slots - 1 else 0

    return following
