"""Verbs on tiles of halves in a product whose operands are both images: C += factor A B, and what follows it.

A warp owns a patch of C, fragments C[i, j, r] as in `mma_tile`, the columns too. Its operands are tiles of `TILE` rows
and `TILE` columns in shared memory, images of `split_half`.
"""

from __future__ import annotations

from numba_attn.device import mma_epilogue
from numba_attn.device.fragments import K, M, N
from numba_attn.device.mma_tile import half_of, load_matrices, products_of
from numba_attn.device.split_half import (
    BLOCK_COLUMNS,
    ROW_BYTES,
    WORD_BYTES,
    copy_image,
    image_bytes,
    plane_bytes,
    split,
)
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb

HALVES, PRODUCTS = 2, 3
TILE = BLOCK_COLUMNS
"""Rows and columns of a tile: one block of columns."""
TILE_BYTES = image_bytes(TILE, TILE)
TILE_WORDS = TILE_BYTES // WORD_BYTES


def copy_tiles(left: int, right: int, threads: int):
    """The verb `copy(target, A, a, a_step, B, b, b_step, tid)`: tiles of A, and behind them those of B, asynchronously.

    A, B: 1-D tensors of words; a, b: where the first tile starts in them, a_step, b_step: from each tile to the next.
    """
    copy_tile = copy_image(TILE_BYTES, threads)

    @verb
    def copy(target, A, a, a_step, B, b, b_step, tid):
        for i in range(left):
            copy_tile(target + i * TILE_BYTES, A, a + i * a_step, tid)
        for i in range(right):
            copy_tile(target + (left + i) * TILE_BYTES, B, b + i * b_step, tid)

    return copy


def fill(m_rows: int):
    """The verb `fill(factor, x)`: the same for all rows."""

    @unrolled
    def fill(e, factor, x):
        for i in range(m_rows // M):
            for h in range(2):
                factor[i, h] = x

    return fill


def load_factors(m_rows: int):
    """The verb `load(factor, gW, times, row0, lane)`: gW[row0 + row] times `times`."""

    @verb
    def load(factor, gW, times, row0, lane):
        for i in range(m_rows // M):
            for h in range(2):
                factor[i, h] = gW[row0 + (lane >> 2) + M * i + 8 * h] * times

    return load


def multiply(m_rows: int, n_columns: int, chain: int, transposed: bool):
    """The verb `multiply(C, a, b, factor)`: C += factor A B^T, or `transposed`, factor A B, over one tile of each.

    a: shared address of the patch's first row plus `lane_of_rows`; b: that of the patch's first row of B (or column)
    plus `lane_of_chunks` (`lane_of_rows`). factor[i, h] is that of a row. A sum moves on to fp32 after `chain` steps
    of 16.
    """
    m_tiles, steps = range(m_rows // M), TILE // K

    @unrolled
    def multiply(e, C, a, b, factor):
        for first in range(0, steps, chain):
            now = range(first, min(first + chain, steps))
            lefts = [[load_matrices(e, a, TILE, TILE, M * i, 2 * step, HALVES) for step in now] for i in m_tiles]
            for j in range(0, n_columns // N, 2):
                places = [(K * step, j) if transposed else (N * j, 2 * step) for step in now]
                pairs = [load_matrices(e, b, TILE, TILE, *place, HALVES, transposed) for place in places]
                sums = products_of(e, lefts, [[half_of(pair, n) for pair in pairs] for n in range(2)], PRODUCTS)
                for (i, n), registers in sums.items():
                    for r, x in enumerate(registers):
                        C[i, j + n, r] = e.fma(x, factor[i, r // 2], C[i, j + n, r])

    return multiply


def store_image(m_rows: int, n_columns: int):
    """The verb `store(image, word, P, lane)`: a patch of P as halves, both planes.

    image: 1-D tensor of words; word: where the plane of hi has the patch's first row.
    """

    @unrolled
    def put(e, image, word, lane, P):
        for i in range(m_rows // M):
            for h in range(2):
                for j in range(n_columns // N):
                    hi, lo = split(e, P[i, j, 2 * h], P[i, j, 2 * h + 1], 1.0)
                    # Row lane // 4 has chunk j at j ^ lane // 4, and there this lane's two columns.
                    at = word + (M * i + 8 * h) * (ROW_BYTES // WORD_BYTES) + (lane ^ (4 * j))
                    e.store(image, (at,), [hi])
                    e.store(image, (at + plane_bytes(TILE, TILE) // WORD_BYTES,), [lo])

    @verb
    def store(image, word, P, lane):
        put(image, word + (lane >> 2) * (ROW_BYTES // WORD_BYTES), lane, P)

    return store


def store_statistics(m_rows: int):
    """The verb `store(gM, gL, m, l, row0, lane)`: m and the sum of l over the four lanes of a row, at row0 + row."""
    m_tiles, sum_lanes = m_rows // M, mma_epilogue.sum_lanes(m_rows // M)

    @verb
    def store(gM, gL, m, l, row0, lane):
        sum_lanes(l)
        if lane & 3 == 0:
            for i in range(m_tiles):
                for h in range(2):
                    row = row0 + (lane >> 2) + M * i + 8 * h
                    gM[row] = m[i, h]
                    gL[row] = l[i, h]

    return store


def store_outputs(m_rows: int, n_columns: int):
    """The verb `store(gO, C, unit, row0, col0, lane)`: gO[row0 + row, col0 + column] = unit C, within gO."""

    @unrolled
    def put(e, gO, C, unit, row, col, rows, columns):
        for i in range(m_rows // M):
            for h in range(2):
                for j in range(n_columns // N):
                    for r in range(2):
                        place = row + (M * i + 8 * h), col + (N * j + r)
                        inside = (place[0] < rows) & (place[1] < columns)
                        e.store(gO, place, [C[i, j, 2 * h + r] * unit], inside)

    @verb
    def store(gO, C, unit, row0, col0, lane):
        put(gO, C, unit, row0 + (lane >> 2), col0 + 2 * (lane & 3), gO.shape[0], gO.shape[1])

    return store
