"""Verbs on register patches and shared tiles.

A warp owns `R` whole rows of a tile; lane t owns the same columns of each, so a patch is a local array [R, C] and a
row is reduced with shuffles alone. Two column maps occur: S takes columns `t + 32 j` (its operand K is read by rows,
one row a lane), O takes the vectors `VECTOR t + 32 VECTOR u .. + VECTOR - 1` (its operand V is read along rows).

    patch[i, j]  of S   is row i of the warp, column lane + 32 j
    patch[i, c]  of O   is row i of the warp, column VECTOR (lane + 32 (c // VECTOR)) + c % VECTOR

A value per row (m, l, alpha) is kept by one lane each: lane i holds row i's.
"""

from __future__ import annotations

from numba import cuda, float32, int32, uint32

from numba_attn.device.math import fma
from numba_attn.device.ptx import opaque
from numba_attn.device.smem import async_copy, vector_load, vector_store
from numba_attn.device.softmax import NEG_INF, ZERO, exp, finite_max, of_row, warp_max, warp_sum
from numba_attn.device.verb import verb

WARP = 32
K_STEP = 4
"""Elements of the summed dimension that one vector load of an operand fetches."""

ROWS_AHEAD = 4
"""Rows of the left operand that are loaded together: the next four arrive under the FMAs of these."""

load4 = vector_load(4)


@verb
def fill(patch, value):
    """patch = value"""
    for i in range(patch.shape[0]):
        for j in range(patch.shape[1]):
            patch[i, j] = value


def copy_tile_async(rows: int, columns: int, threads: int, vector: int):
    """The verb `copy(sA, gA, row0, col0, end, tid)`: sA[r, c] = gA[row0 + r, col0 + c], by all threads of the block.

    Rows from `end` on and columns past gA's own are filled with zeros, whatever memory holds there. It only issues
    the copies: commit, wait and a barrier follow. `vector` elements travel at once (see `Problem.vector`); gA's
    columns are a multiple of it.
    """
    chunks = columns // vector  # of a row
    across = min(chunks, threads)
    down = threads // across
    if columns % vector or chunks % across or threads % across or rows % down:
        raise ValueError(f"{threads} threads do not share a tile of {rows} x {columns} evenly, {vector} elements each")
    copy = async_copy(vector, range(0, rows, down), range(0, columns, across * vector))

    @verb
    def copy_tile(sA, gA, row0, col0, end, tid):
        # In 32 bits, else Numba carries 64. Past the end of a tensor a position may wrap, but nothing is left there.
        thread = opaque(tid)
        r, c = int32(thread // across), int32(thread % across * vector)
        rows_left = min(end - row0, rows) - r
        columns_left = min(gA.shape[1] - col0, columns) - c
        copy(sA, (r, c), gA, (int32(row0 + r), int32(col0 + c)), rows_left, columns_left)

    return copy_tile


def mma_ABt(rows: int, columns: int):
    """The verb `mma(S, sA, row0, sB, lane)`: S[i, j] += sum_d sA[row0 + i, d] sB[lane + 32 j, d], in order of d."""

    @verb
    def mma(S, sA, row0, sB, lane):
        a = cuda.local.array((ROWS_AHEAD, K_STEP), float32)
        b = cuda.local.array((columns, K_STEP), float32)
        for d in range(0, sA.shape[1], K_STEP):
            for j in range(columns):
                load4(b, (j, 0), sB, (lane + WARP * j, d))
            for i0 in range(0, rows, ROWS_AHEAD):
                for i in range(ROWS_AHEAD):
                    load4(a, (i, 0), sA, (row0 + i0 + i, d))
                for r in range(K_STEP):
                    for i in range(ROWS_AHEAD):
                        for j in range(columns):
                            S[i0 + i, j] = fma(a[i, r], b[j, r], S[i0 + i, j])

    return mma


def mma_AB(rows: int, columns: int, vector: int):
    """The verb `mma(O, sA, row0, a_col0, sB, lane)`, in order of k over the rows of sB:

    O[i, c] += sA[row0 + i, a_col0 + k] sB[k, column c of this lane]
    """
    load = vector_load(vector)

    @verb
    def mma(O, sA, row0, a_col0, sB, lane):
        a = cuda.local.array((ROWS_AHEAD, K_STEP), float32)
        b = cuda.local.array((K_STEP, columns), float32)
        for k in range(0, sB.shape[0], K_STEP):
            for r in range(K_STEP):
                for u in range(columns // vector):
                    load(b, (r, vector * u), sB, (k + r, vector * (lane + WARP * u)))
            for i0 in range(0, rows, ROWS_AHEAD):
                for i in range(ROWS_AHEAD):
                    load4(a, (i, 0), sA, (row0 + i0 + i, a_col0 + k))
                for r in range(K_STEP):
                    for i in range(ROWS_AHEAD):
                        for c in range(columns):
                            O[i0 + i, c] = fma(a[i, r], b[r, c], O[i0 + i, c])

    return mma


def mma_AB_where(rows: int, columns: int, vector: int, attends):
    """The verb `mma(O, sA, row0, a_col0, sB, lane, row, col, Lk)`: as `mma_AB`, of the pairs that count.

    Row i meets key k where attends(row + i, col + k, Lk). A pair that does not count is left out, not multiplied with
    zero, so that a NaN or Inf in sB stays where it is. One key at a time: for the blocks on the edge of a mask.
    """
    load = vector_load(vector)

    @verb
    def mma(O, sA, row0, a_col0, sB, lane, row, col, Lk):
        b = cuda.local.array((1, columns), float32)
        for k in range(sB.shape[0]):
            for u in range(columns // vector):
                load(b, (0, vector * u), sB, (k, vector * (lane + WARP * u)))
            for i in range(rows):
                p = sA[row0 + i, a_col0 + k]
                counts = attends(row + i, col + k, Lk)
                for c in range(columns):
                    total = fma(p, b[0, c], O[i, c])
                    O[i, c] = total if counts else O[i, c]

    return mma


@verb
def scale_and_mask(S, scale, attends, row0, col0, Lk, lane):
    """S[i, j] = scale S[i, j] where the pair counts, else -inf."""
    for i in range(S.shape[0]):
        for j in range(S.shape[1]):
            S[i, j] = S[i, j] * scale if attends(row0 + i, col0 + lane + WARP * j, Lk) else NEG_INF


@verb
def online_softmax(S, m, l, lane):
    """One step over the columns of S, which become P = exp(S - m); returns the new (m, l) and alpha.

    m, l and alpha are kept per row: lane i holds row i's.
    """
    m_old = m
    total = ZERO
    for i in range(S.shape[0]):
        highest = S[i, 0]
        for j in range(1, S.shape[1]):
            highest = max(highest, S[i, j])
        m_row = max(of_row(m_old, i), warp_max(highest))
        base = finite_max(m_row)
        row_total = ZERO
        for j in range(S.shape[1]):
            S[i, j] = exp(S[i, j] - base)
            row_total += S[i, j]
        row_total = warp_sum(row_total)
        m = m_row if lane == i else m
        total = row_total if lane == i else total
    alpha = exp(m_old - finite_max(m))
    return m, fma(l, alpha, total), alpha


@verb
def store_rows(sP, P, row0, lane):
    """sP[row0 + i, lane + 32 j] = P[i, j]"""
    for i in range(P.shape[0]):
        for j in range(P.shape[1]):
            sP[row0 + i, lane + WARP * j] = P[i, j]


def output_rows(rows: int, columns: int, vector: int, travels: int):
    """The verbs `load(O, gO, row0, dv0, alpha, lane)` and `store(gO, O, row0, dv0, beta, lane)` of one slice of Dv:

        O[i, c] = alpha_i gO[row0 + i, dv0 + column c of this lane]        and back: gO[..] = beta_i O[i, c]

    alpha and beta are per row (lane i holds row i's). Elements past gO's own are not written. `travels` elements move
    at once; gO's columns are a multiple of it.
    """
    vload = vector_load(travels)
    vstore = vector_store(travels)

    @verb
    def load(O, gO, row0, dv0, alpha, lane):
        last_row, last_col = gO.shape[0] - 1, gO.shape[1] - travels
        for i in range(rows):
            factor = of_row(alpha, i)
            for c in range(0, columns, travels):
                # What lies past gO's own is never stored: read anything in its place.
                col = min(dv0 + vector * (lane + WARP * (c // vector)) + c % vector, last_col)
                vload(O, (i, c), gO, (min(row0 + i, last_row), col))
            for c in range(columns):
                O[i, c] *= factor

    @verb
    def store(gO, O, row0, dv0, beta, lane):
        for i in range(rows):
            factor = of_row(beta, i)
            for c in range(0, columns, travels):
                col = dv0 + vector * (lane + WARP * (c // vector)) + c % vector
                if row0 + i < gO.shape[0] and col < gO.shape[1]:
                    vstore(gO, (row0 + i, col), factor, O, (i, c))

    return load, store


def register_rows(vector: int, travels: int):
    """The verbs `column(c, lane)` and `load(patch, gA, row0, end, lane)` of rows that all lanes of a warp share:

        patch[i, c] = gA[row0 + i, column c of this lane], column c = vector (lane + 32 (c // vector)) + c % vector

    Rows from `end` on and columns past gA's own are filled with others of gA: leave them out by their position.
    `travels` elements move at once; gA's columns are a multiple of it.
    """
    vload = vector_load(travels)

    @verb
    def column(c, lane):
        return vector * (lane + WARP * (c // vector)) + c % vector

    @verb
    def load(patch, gA, row0, end, lane):
        # In 32 bits, else Numba carries 64; unsigned, since a position past the end may pass 2^31.
        last_row, last_col = uint32(end - 1), uint32(gA.shape[1] - travels)
        own = opaque(lane)
        for i in range(patch.shape[0]):
            row = min(uint32(row0 + i), last_row)
            for c in range(0, patch.shape[1], travels):
                vload(patch, (i, c), gA, (row, min(uint32(column(c, own)), last_col)))

    return column, load
