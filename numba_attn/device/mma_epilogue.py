"""Verbs that write what a warp has in fragments when its last tile is done: O and lse.

O[i, j, r] and values per row as in `mma_tile`.
"""

from __future__ import annotations

from math import log

from numba_attn.device.fragments import M, N
from numba_attn.device.math import LN2, LN2_REST, fma
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb


def over_lanes(e, x):
    """The sum of x over the four lanes of a row, in each of them."""
    for distance in (1, 2):
        x = x + e.shfl_xor(x, distance)
    return x


def sum_lanes(tiles: int):
    """The verb `sum_lanes(l)`: l[i, h], over the four lanes of a row."""

    @unrolled
    def sum_lanes(e, l):
        for i in range(tiles):
            for h in range(2):
                l[i, h] = over_lanes(e, l[i, h])

    return sum_lanes


def finish(q_rows: int, columns: int, vector: int = 1):
    """The verb `finish(gO, O, l, unit, row0, lane)`: gO[row0 + row, column] = unit O / l, within gO.

    l is summed over the four lanes of a row first, in place. vector: elements (2, or 1) of an access to gO.
    """

    @unrolled
    def store(e, gO, O, l, unit, row, col, rows, columns_left):
        for i in range(q_rows // M):
            for h in range(2):
                l[i, h] = total = over_lanes(e, l[i, h])
                inverse = e.where(total > 0.0, e.number(1.0) / total, 0.0)
                at = row + (M * i + 8 * h)
                for j in range(-(-columns // N)):
                    pair = []
                    for x in (O[i, j, 2 * h + r] for r in range(2)):
                        quotient = x * inverse
                        # What its rounding, and that of the inverse, left over.
                        rest = e.fma(-quotient, total, x)
                        pair.append(e.fma(rest, inverse, quotient) * unit)
                    if vector == 2:
                        # Columns follow each other: one address for all.
                        is_inside = (at < rows) & (col + N * j < columns_left)
                        e.store_if(is_inside, gO, (at, col), pair, behind=N * j)
                        continue
                    for r in range(2):
                        place = at, col + (N * j + r)
                        e.store(gO, place, pair[r : r + 1], (at < rows) & (place[1] < columns_left))

    @verb
    def finish(gO, O, l, unit, row0, lane):
        store(gO, O, l, unit, row0 + (lane >> 2), 2 * (lane & 3), gO.shape[0], gO.shape[1])

    return finish


def finish_wide(q_rows: int, columns: int):
    """The verb `finish(gO, O, l, unit, row0, lane, vector)`: the same, two elements an access where `vector` allows."""
    single, double = finish(q_rows, columns, 1), finish(q_rows, columns, 2)

    @verb
    def finish_wide(gO, O, l, unit, row0, lane, vector):
        if vector > 1:
            double(gO, O, l, unit, row0, lane)
        else:
            single(gO, O, l, unit, row0, lane)

    return finish_wide


def store_lse(q_rows: int):
    """The verb `store(gLse, m, l, row0, lane)`: gLse[row0 + row] = m in base e + ln l, within gLse."""
    m_tiles = q_rows // M

    @verb
    def store(gLse, m, l, row0, lane):
        for i in range(m_tiles):
            for h in range(2):
                row = row0 + (lane >> 2) + M * i + 8 * h
                if lane & 3 == 0 and row < gLse.shape[0]:
                    gLse[row] = fma(m[i, h], LN2, fma(m[i, h], LN2_REST, log(l[i, h])))

    return store
