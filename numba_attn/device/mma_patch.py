"""Verbs on a warp's patch, once its product is done: P as an image, statistics, O. C[i, j, r] as in `mma_product`."""

from __future__ import annotations

from itertools import product

from numba_attn.device import mma_epilogue
from numba_attn.device.fragments import M, N
from numba_attn.device.mma_product import HALVES, M_TILES, TILE, TILE_WORDS
from numba_attn.device.split_half import ROW_BYTES, WORD_BYTES, split
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb

PIECES = list(product(range(M_TILES), range(2), range(0, TILE // N, 2)))
"""Of a patch: a row of two fragments that stand side by side."""
sum_lanes = mma_epilogue.sum_lanes(M_TILES)


def four_columns(e, odd, left: tuple, right: tuple) -> list:
    """Four neighbouring columns of two fragments that stand side by side, this lane having two of each.

    Lanes 0 and 2 of a row get columns 0 .. 3 and 4 .. 7 of the left one, lanes 1 and 3 those of the right one.
    """
    theirs = [e.shfl_xor(e.where(odd, x, y), 1) for x, y in zip(left, right, strict=True)]
    first = [e.where(odd, x, y) for x, y in zip(theirs, left, strict=True)]
    return first + [e.where(odd, x, y) for x, y in zip(right, theirs, strict=True)]


@unrolled
def _put_image(e, image, word, place, odd, P):
    for i, h, j in PIECES:
        four = four_columns(e, odd, *((P[i, k, 2 * h], P[i, k, 2 * h + 1]) for k in (j, j + 1)))
        pairs = [split(e, *four[:2], 1.0), split(e, *four[2:], 1.0)]
        behind = (M * i + 8 * h) * (ROW_BYTES // WORD_BYTES)
        for plane, words in enumerate(zip(*pairs, strict=True)):
            e.store(image, (word + (place ^ (4 * j)),), words, behind=behind + plane * TILE_WORDS // HALVES)


@verb
def store_image(image, word, P, lane):
    """P as halves, the tile of an image that starts at a word."""
    # Row lane // 4 has chunk j at j ^ lane // 4, and in it this lane's four columns.
    row, odd = lane >> 2, lane & 1
    start, place = word + row * (ROW_BYTES // WORD_BYTES), ((row ^ odd) << 2) + (lane & 2)
    _put_image(image, start, place, odd == 1, P)


@verb
def store_statistics(gM, gL, m, l, row0, lane):
    """m and the sum of l over the four lanes of a row, at row0 + row."""
    sum_lanes(l)
    if lane & 3 == 0:
        for i in range(M_TILES):
            for h in range(2):
                row = row0 + (lane >> 2) + M * i + 8 * h
                gM[row] = m[i, h]
                gL[row] = l[i, h]


def store_outputs(vector: int):
    """The verb `store(gO, C, unit, row0, col0, lane)`: gO[row0 + row, col0 + column] = unit C, within gO.

    vector: elements (4, or 1) of an access to the rows of gO.
    """

    @unrolled
    def put(e, gO, C, unit, row, col, odd, rows, columns):
        for i, h, j in PIECES:
            at, first = row + (M * i + 8 * h), N * j
            left, right = ([C[i, k, 2 * h + r] * unit for r in range(2)] for k in (j, j + 1))
            four = four_columns(e, odd, left, right)
            if vector == 4:
                # Columns follow each other: one address for all of a row.
                e.store_if((at < rows) & (col + first < columns), gO, (at, col), four, behind=first)
                continue
            for c, x in enumerate(four):
                place = at, col + (first + c)
                e.store_if((at < rows) & (place[1] < columns), gO, place, [x])

    @verb
    def store(gO, C, unit, row0, col0, lane):
        odd = lane & 1
        put(gO, C, unit, row0 + (lane >> 2), col0 + odd * N + 2 * (lane & 2), odd == 1, gO.shape[0], gO.shape[1])

    return store
