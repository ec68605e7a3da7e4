"""Verbs on the panels of a warp's patch, once its product is done: masks, P as an image, statistics, O.

A patch C[p m + i, j, r] is as in `mma_product`: panels of 64 columns stand where rows do.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numba import cuda, int32

from numba_attn.device import mma_epilogue
from numba_attn.device.fragments import M, N
from numba_attn.device.mma_product import HALVES, TILE, TILE_WORDS
from numba_attn.device.split_half import ROW_BYTES, WORD_BYTES, split
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb


def four_columns(e, odd, left: tuple, right: tuple) -> list:
    """Four neighbouring columns of two fragments that stand side by side, this lane having two of each.

    Lanes 0 and 2 of a row get columns 0 .. 3 and 4 .. 7 of the left one, lanes 1 and 3 those of the right one.
    """
    theirs = [e.shfl_xor(e.where(odd, x, y), 1) for x, y in zip(left, right, strict=True)]
    first = [e.where(odd, x, y) for x, y in zip(theirs, left, strict=True)]
    return first + [e.where(odd, x, y) for x, y in zip(right, theirs, strict=True)]


def masked(m_rows: int, panels: int, end_of_row):
    """The verb `mask(S, row0, col0, Lk, lane)`: as `mma_tile.masked`, over panels."""
    m_tiles = m_rows // M
    shape = (m_tiles, 2)

    @unrolled
    def select(e, S, ends):
        for p, i, j, r in product(range(panels), range(m_tiles), range(TILE // N), range(4)):
            place = p * m_tiles + i, j, r
            S[place] = e.where(ends[i, r // 2] > TILE * p + N * j + r % 2, S[place], -np.inf)

    @verb
    def mask(S, row0, col0, Lk, lane):
        ends = cuda.local.array(shape, int32)  # counted from this lane's first column
        for i in range(m_tiles):
            for h in range(2):
                ends[i, h] = end_of_row(row0 + (lane >> 2) + M * i + 8 * h, Lk) - col0 - 2 * (lane & 3)
        select(S, ends)

    return mask


def store_image(m_rows: int, panels: int):
    """The verb `store(image, word, P, lane)`: a patch of P as halves, both planes, each panel in its own tile.

    image: 1-D tensor of words; word: where the first panel's plane of hi has the patch's first row.
    """
    m_tiles = m_rows // M

    @unrolled
    def put(e, image, word, place, odd, P):
        for p, i, h, j in product(range(panels), range(m_tiles), range(2), range(0, TILE // N, 2)):
            rows = ((P[p * m_tiles + i, k, 2 * h], P[p * m_tiles + i, k, 2 * h + 1]) for k in (j, j + 1))
            four = four_columns(e, odd, *rows)
            pairs = [split(e, *four[:2], 1.0), split(e, *four[2:], 1.0)]
            behind = p * TILE_WORDS + (M * i + 8 * h) * (ROW_BYTES // WORD_BYTES)
            for plane, words in enumerate(zip(*pairs, strict=True)):
                e.store(image, (word + (place ^ (4 * j)),), words, behind=behind + plane * TILE_WORDS // HALVES)

    @verb
    def store(image, word, P, lane):
        # Row lane // 4 has chunk j at j ^ lane // 4, and in it this lane's four columns.
        row, odd = lane >> 2, lane & 1
        start, place = word + row * (ROW_BYTES // WORD_BYTES), ((row ^ odd) << 2) + (lane & 2)
        put(image, start, place, odd == 1, P)

    return store


def store_statistics(m_rows: int, panels: int):
    """The verb `store(gM, gL, m, l, group, row0, lane)`: m and the sum of l over the four lanes of a row.

    gM[group + p, row0 + row] belongs to panel p.
    """
    m_tiles, sum_lanes = m_rows // M, mma_epilogue.sum_lanes(panels * m_rows // M)

    @verb
    def store(gM, gL, m, l, group, row0, lane):
        sum_lanes(l)
        if lane & 3 == 0:
            for p in range(panels):
                for i in range(m_tiles):
                    for h in range(2):
                        row = row0 + (lane >> 2) + M * i + 8 * h
                        gM[group + p, row] = m[p * m_tiles + i, h]
                        gL[group + p, row] = l[p * m_tiles + i, h]

    return store


def store_outputs(m_rows: int, panels: int, vector: int):
    """The verb `store(gO, C, unit, row0, col0, lane)`: gO[row0 + row, col0 + column] = unit C, within gO.

    vector: elements (4, or 1) of an access to the rows of gO.
    """
    m_tiles = m_rows // M

    @unrolled
    def put(e, gO, C, unit, row, col, odd, rows, columns):
        for p, i, h, j in product(range(panels), range(m_tiles), range(2), range(0, TILE // N, 2)):
            at, first = row + (M * i + 8 * h), TILE * p + N * j
            left, right = ([C[p * m_tiles + i, k, 2 * h + r] * unit for r in range(2)] for k in (j, j + 1))
            four = four_columns(e, odd, left, right)
            if vector == 4:
                # Columns follow each other: one address for all of a row.
                e.store_if((at < rows) & (col + first < columns), gO, (at, col), four, behind=first)
                continue
            for c, x in enumerate(four):
                place = at, col + (first + c)
                e.store(gO, place, [x], (at < rows) & (place[1] < columns))

    @verb
    def store(gO, C, unit, row0, col0, lane):
        odd = lane & 1
        put(gO, C, unit, row0 + (lane >> 2), col0 + odd * N + 2 * (lane & 2), odd == 1, gO.shape[0], gO.shape[1])

    return store
