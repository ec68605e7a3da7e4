"""Verbs on the panels of a warpgroup's patch, once its product is done: masks, P as an image, statistics, O.

A patch has 64 rows and panels of 64 columns: C[i, j, r] is register r of the fragment of panel i, see `wgmma_product`.
"""

from __future__ import annotations

import numpy as np
from numba import cuda, int32

from numba_attn.device import mma_epilogue
from numba_attn.device.fragments import N
from numba_attn.device.mma_patch import four_columns
from numba_attn.device.mma_product import TILE
from numba_attn.device.split_half import ROW_BYTES, WORD_BYTES, plane_bytes, split
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb

PLANE_WORDS = plane_bytes(TILE, TILE) // WORD_BYTES


def masked(panels: int, end_of_row):
    """The verb `mask(S, row0, col0, Lk, lane)`: as `mma_tile.masked`, over panels."""

    @unrolled
    def select(e, S, ends):
        for i in range(panels):
            for j in range(TILE // N):
                for r in range(4):
                    S[i, j, r] = e.where(ends[r // 2] > TILE * i + N * j + r % 2, S[i, j, r], -np.inf)

    @verb
    def mask(S, row0, col0, Lk, lane):
        ends = cuda.local.array(2, int32)  # counted from this lane's first column
        for h in range(2):
            ends[h] = end_of_row(row0 + (lane >> 2) + 8 * h, Lk) - col0 - 2 * (lane & 3)
        select(S, ends)

    return mask


def store_image(panels: int, halves: int):
    """The verb `store(image, word, P, n, lane)`: P as halves, each panel in its own tile.

    n: all panels are stored, or half of them. image: 1-D tensor of words; word: where the first panel's plane of hi has
    the warp's first row.
    """

    def of_panels(first: int, last: int):
        @unrolled
        def put(e, image, word, place, odd, P):
            for i in range(first, last):
                for h in range(2):
                    for j in range(0, TILE // N, 2):
                        p = four_columns(e, odd, *((P[i, k, 2 * h], P[i, k, 2 * h + 1]) for k in (j, j + 1)))
                        pairs = [split(e, *p[:2], 1.0, halves=halves), split(e, *p[2:], 1.0, halves=halves)]
                        behind = halves * PLANE_WORDS * i + 8 * h * (ROW_BYTES // WORD_BYTES)
                        for plane, words in enumerate(zip(*pairs, strict=True)):
                            e.store(image, (word + (place ^ (4 * j)),), words, behind=behind + plane * PLANE_WORDS)

        return put

    put_first, put_rest = of_panels(0, panels // 2), of_panels(panels // 2, panels)

    @verb
    def store(image, word, P, n, lane):
        # Row lane // 4 has chunk j at j ^ lane // 4, and in it this lane's four columns.
        row, odd = lane >> 2, lane & 1
        start, place = word + row * (ROW_BYTES // WORD_BYTES), ((row ^ odd) << 2) + (lane & 2)
        put_first(image, start, place, odd == 1, P)
        if n == panels:
            put_rest(image, start, place, odd == 1, P)

    return store


def store_statistics(panels: int):
    """The verb `store(gM, gL, m, l, group, n, row0, lane)`: m and the sum of l over the lanes of a row.

    gM[group + i, row0 + row] belongs to panel i, of the first n.
    """

    sum_lanes = mma_epilogue.sum_lanes(panels)

    @verb
    def store(gM, gL, m, l, group, n, row0, lane):
        sum_lanes(l)
        if lane & 3 == 0:
            for i in range(panels):
                if i < n:
                    for h in range(2):
                        row = row0 + (lane >> 2) + 8 * h
                        gM[group + i, row] = m[i, h]
                        gL[group + i, row] = l[i, h]

    return store


def store_outputs(panels: int, vector: int):
    """The verb `store(gO, C, unit, row0, col0, lane)`: gO[row0 + row, col0 + column] = unit C, within gO.

    vector: elements (4, or 1) of an access to the rows of gO.
    """

    @unrolled
    def put(e, gO, C, unit, row, col, odd, rows, columns):
        for i in range(panels):
            for h in range(2):
                at = row + 8 * h
                for j in range(0, TILE // N, 2):
                    left, right = ([C[i, k, 2 * h + r] * unit for r in range(2)] for k in (j, j + 1))
                    four = four_columns(e, odd, left, right)
                    first = TILE * i + N * j
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
        col = col0 + odd * N + 2 * (lane & 2)
        put(gO, C, unit, row0 + (lane >> 2), col, odd == 1, gO.shape[0], gO.shape[1])

    return store
