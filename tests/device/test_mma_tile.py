"""Contract under test: verbs on tiles of halves give, in fragments, what plain numpy gives of the matrices."""

from __future__ import annotations

import numpy as np
import pytest
from half_images import gathered, image_of, of_rows, scattered
from numba import cuda, float32
from toys import nans, randn, simulate

from numba_attn import sim
from numba_attn.device import mma_epilogue, mma_tile
from numba_attn.device.fragments import C_COL, C_ROW, multiply_add
from numba_attn.device.mask import Mask
from numba_attn.device.mma_tile import SMALL_FIRST, lane_of_chunks, lane_of_rows
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import shared_memory
from numba_attn.device.split_half import ROW_BYTES, copy_image, image_bytes

INF, NAN = np.float32(np.inf), np.float32(np.nan)
wait_all = cp_async_wait(0)

TILES = [(16, 16, 16), (16, 32, 48), (32, 16, 64), (32, 32, 128), (16, 16, 128), (32, 32, 16)]
each_tile = pytest.mark.parametrize(("q_rows", "k_rows", "columns"), TILES)


def n_fragments(columns: int) -> int:
    return -(-columns // 16) * 2


def scores_of(run, Q, K, chain=4, products=3, first_row=0, q_rows=None) -> np.ndarray:
    """S by the verb, from the images of Q and K; rows first_row .. of Q."""
    q_rows = q_rows or len(Q)
    q_image_rows, (k_rows, columns) = len(Q), K.shape
    halves = mma_tile.halves_of(products)
    q_bytes, k_bytes = image_bytes(q_image_rows, columns, halves), image_bytes(k_rows, columns, halves)
    copy_q, copy_k = copy_image(q_bytes, 32), copy_image(k_bytes, 32)
    qk = mma_tile.scores(q_rows, q_image_rows, k_rows, columns, chain, products)
    shape = (q_rows // 16, k_rows // 8, 4)

    @cuda.jit
    def kernel(Q_image, K_image, O):
        lane = cuda.threadIdx.x
        smem = shared_memory()
        copy_q(smem, Q_image, 0, lane)
        copy_k(smem + q_bytes, K_image, 0, lane)
        cp_async_commit()
        wait_all()
        cuda.syncthreads()
        S = cuda.local.array(shape, float32)
        qk(S, smem + first_row * ROW_BYTES + lane_of_rows(lane), smem + q_bytes + lane_of_chunks(lane))
        for i in range(shape[0]):
            for j in range(shape[1]):
                for r in range(4):
                    O[lane, i, j, r] = S[i, j, r]

    O = nans(32, *shape)
    run(kernel, image_of(Q, halves=halves), image_of(K, halves=halves), O, smem_bytes=q_bytes + k_bytes)
    return gathered(O)


def integers(*shape: int, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def spread(X) -> np.ndarray:
    """Numbers below 2^15, as an image holds them."""
    return (np.float32(2.0**12) * X).astype(np.float32)


@each_tile
def test_scores(run, q_rows, k_rows, columns):
    Q, K = integers(q_rows, columns), integers(k_rows, columns, seed=1)
    np.testing.assert_array_equal(scores_of(run, Q, K), Q @ K.T)
    Q, K = spread(randn(q_rows, columns)), spread(randn(k_rows, columns, seed=1))
    exact, size = Q.astype(np.float64) @ K.T, np.abs(Q).astype(np.float64) @ np.abs(K).T
    assert np.all(np.abs(scores_of(run, Q, K) - exact) <= 2.0**-21 * size)


def rounded(X) -> np.ndarray:
    return X.astype(np.float16).astype(np.float64)


@each_tile
def test_scores_of_one_half(run, q_rows, k_rows, columns):
    Q, K = spread(randn(q_rows, columns)), spread(randn(k_rows, columns, seed=1))
    size = np.abs(Q).astype(np.float64) @ np.abs(K).T
    S = scores_of(run, Q, K, chain=columns, products=1)
    assert np.all(np.abs(S - rounded(Q) @ rounded(K).T) <= 2.0**-20 * size)
    S = scores_of(run, Q, K, products=1, first_row=q_rows - 16, q_rows=16)
    assert np.all(np.abs(S - rounded(Q[-16:]) @ rounded(K).T) <= 2.0**-20 * size[-16:])


def test_scores_of_some_rows_of_an_image(run):
    Q, K = integers(32, 80), integers(16, 80, seed=1)
    np.testing.assert_array_equal(scores_of(run, Q, K, first_row=16, q_rows=16), Q[16:] @ K.T)


@pytest.mark.parametrize("chain", [1, 2, 3, 8])
def test_scores_of_any_chain(run, chain):
    Q, K = spread(randn(16, 112)), spread(randn(16, 112, seed=1))
    exact, size = Q.astype(np.float64) @ K.T, np.abs(Q).astype(np.float64) @ np.abs(K).T
    assert np.all(np.abs(scores_of(run, Q, K, chain) - exact) <= 2.0**-21 * size)


def test_long_chains_truncate_and_short_ones_round(run):
    # 15 times 3/4 of an ulp on top of 1: each step toward zero loses it, a sum of its own keeps it.
    Q, K = np.zeros((16, 256), np.float32), np.full((16, 256), 2.0**-11, np.float32)
    Q[:, 0], Q[:, 16::16], K[:, 0] = 1, 0.75 * 2.0**-12, 1
    assert np.all(scores_of(run, Q, K, chain=16) == 1)
    assert np.all(scores_of(run, Q, K, chain=1) == 1 + 15 * 2.0**-23)  # each rounds up


def test_small_products_of_short_sums_come_first(run):
    # lo hi of column 2 is 3/4 of an ulp of the rest: one sum with it is truncated, two would round up.
    Q, K = np.zeros((16, 32), np.float32), np.zeros((16, 32), np.float32)
    Q[:, 0], Q[:, 2], Q[:, 3] = 1, 1 + 2.0**-12, -1
    K[:, 0], K[:, 2], K[:, 3] = 1, 0.75 * 2.0**-11, 0.75 * 2.0**-11
    assert np.all(scores_of(run, Q, K, chain=2) == 1)


def test_products_of_halves(run):
    # x = hi + lo with lo = 2^-11: x x = 1 + 2^-10 + 2^-22, all of which fp32 holds.
    Q, K = np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float32)
    Q[:, 3] = K[:, 3] = 1 + 2.0**-11
    assert np.all(scores_of(run, Q, K, products=4) == 1 + 2.0**-10 + 2.0**-22)
    assert np.all(scores_of(run, Q, K, products=3) == 1 + 2.0**-10)
    assert np.all(scores_of(run, Q, K, products=1) == 1)
    # Each half meets the other operand's whole number.
    K[:, 3] = 3
    assert np.all(scores_of(run, Q, K) == 3 + 3 * 2.0**-11)
    assert np.all(scores_of(run, K, Q) == 3 + 3 * 2.0**-11)


@pytest.mark.parametrize(("q_rows", "k_rows"), [(16, 16), (32, 32)])
@pytest.mark.parametrize(
    ("is_causal", "row0", "col0", "Lk"), [(True, 16, 16, 99), (True, 0, 8, 99), (False, 5, 16, 29)]
)
def test_masked(run, q_rows, k_rows, is_causal, row0, col0, Lk):
    mask = mma_tile.masked(q_rows, k_rows, Mask(is_causal).end)
    shape = (q_rows // 16, k_rows // 8, 4)

    @cuda.jit
    def kernel(A):
        lane = cuda.threadIdx.x
        S = cuda.local.array(shape, float32)
        for i in range(shape[0]):
            for j in range(shape[1]):
                for r in range(4):
                    S[i, j, r] = A[lane, i, j, r]
        mask(S, row0, col0, Lk, lane)
        for i in range(shape[0]):
            for j in range(shape[1]):
                for r in range(4):
                    A[lane, i, j, r] = S[i, j, r]

    S = randn(q_rows, k_rows)
    A = scattered(S)
    run(kernel, A)
    rows, columns = row0 + np.arange(q_rows)[:, None], col0 + np.arange(k_rows)
    counts = (columns < Lk) & ((columns <= rows) | (not is_causal))
    assert counts.any() and not counts.all()
    np.testing.assert_array_equal(A, scattered(np.where(counts, S, np.float32(-INF))))


def test_store_lse(run):
    store = mma_epilogue.store_lse(32)

    @cuda.jit
    def kernel(gLse, M, L):
        lane = cuda.threadIdx.x
        m, l = cuda.local.array((2, 2), float32), cuda.local.array((2, 2), float32)
        for i in range(2):
            for h in range(2):
                m[i, h], l[i, h] = M[lane, i, h], L[lane, i, h]
        store(gLse, m, l, 3, lane)

    rows = (np.arange(32) // 4)[:, None, None] + 16 * np.arange(2)[:, None] + 8 * np.arange(2)
    m, l = randn(32) * 20, 1 + np.abs(randn(32, seed=1))
    m[0], l[0] = -INF, 0  # no key
    m[1:3] = [2.0**40, -(2.0**40)]
    lse = nans(30)
    run(kernel, lse, m[rows], l[rows])
    assert np.isnan(lse[:3]).all() and lse[3] == -INF
    expected = m[1:27] * np.log(2.0) + np.log(l[1:27].astype(np.float64))
    np.testing.assert_allclose(lse[4:], expected, rtol=2.0**-23, atol=2.0**-23)


def of_one_sign(n: int, columns: int, seed=0) -> np.ndarray:
    """Sums of such rows have mantissas of all sizes."""
    rng = np.random.default_rng(seed)
    return spread(rng.random((n, columns)) * 2.0 ** np.linspace(0, 1, n, endpoint=False)[:, None])


def missing(S, Q, K) -> float:
    exact = Q.astype(np.float64) @ K.T.astype(np.float64)
    return np.mean((exact - S) / exact) * 2.0**24


@pytest.mark.parametrize("small_first", [True, False])
@pytest.mark.parametrize(("columns", "chain"), [(16, 4), (32, 2), (40, 4), (48, 3), (64, 4), (96, 6), (96, 4)])
def test_what_truncation_takes_off(columns, chain, small_first):
    """`lost_by_scores` is what sums by the tensor core's rules lose; those of 96 columns in four steps start anew."""
    Q, K = of_one_sign(96, columns), of_one_sign(96, columns, seed=1)
    q, k = ([hi, (X - hi).astype(np.float16)] for X in (Q, K) for hi in [X.astype(np.float16)])
    total = 0
    for first in range(0, columns, 16 * chain):
        end = min(first + 16 * chain, columns)
        steps = [np.s_[:, step : min(step + 16, end)] for step in range(first, end, 16)]
        order = [(step, halves) for step in steps for halves in SMALL_FIRST[-3:]]
        if small_first:
            order.sort(key=lambda product: product[1] == (0, 0))
        part = np.zeros((96, 96), np.float32)
        for step, (a, b) in order:
            part = multiply_add(q[a][step], k[b][step].T, part)
        total += part
    assert missing(total, Q, K) == pytest.approx(mma_tile.lost_by_scores(columns, chain, small_first) * 2**24, abs=0.2)


@pytest.mark.parametrize(("columns", "chain"), [(16, 2), (64, 2), (64, 4), (96, 2), (96, 4), (256, 4)])
def test_what_truncation_takes_off_is_made_up_for(run, columns, chain):
    Q, K = of_one_sign(32, columns), of_one_sign(32, columns, seed=1)
    lost = mma_tile.lost_by_scores(columns, chain, small_first=columns <= mma_tile.SHORT) * 2**24
    assert missing(scores_of(run, Q, K, chain), Q, K) == pytest.approx(lost, abs=0.35)


def softmax_of(run, S, m, l, unit, peak, by_eights=False):
    """(peak P, m, l by lane, alpha) by the verb; l is the same in the four lanes of a row.

    by_eights: `unit` is that of the first eight of 16 rows, and half of it that of the others.
    """
    q_rows, k_rows = S.shape
    step = mma_tile.softmax(q_rows, k_rows, by_eights)
    shape, row_shape = (q_rows // 16, k_rows // 8, 4), (q_rows // 16, 2)

    @cuda.jit
    def kernel(A, M, L, ALPHA, factors):
        lane = cuda.threadIdx.x
        S = cuda.local.array(shape, float32)
        m, l = cuda.local.array(row_shape, float32), cuda.local.array(row_shape, float32)
        alpha = cuda.local.array(row_shape, float32)
        for i in range(shape[0]):
            for h in range(2):
                m[i, h], l[i, h] = M[lane, i, h], L[lane, i, h]
            for j in range(shape[1]):
                for r in range(4):
                    S[i, j, r] = A[lane, i, j, r]
        if by_eights:
            unit = cuda.local.array(row_shape, float32)
            for i in range(shape[0]):
                unit[i, 0], unit[i, 1] = factors[0], factors[0] / 2
            step(S, m, l, alpha, unit, factors[1])
        else:
            step(S, m, l, alpha, factors[0], factors[1])
        for i in range(shape[0]):
            for h in range(2):
                M[lane, i, h], L[lane, i, h], ALPHA[lane, i, h] = m[i, h], l[i, h], alpha[i, h]
            for j in range(shape[1]):
                for r in range(4):
                    A[lane, i, j, r] = S[i, j, r]

    A, M, L = scattered(S), of_rows(m), of_rows(l)
    ALPHA = nans(*M.shape)
    run(kernel, A, M, L, ALPHA, np.array([unit, peak], np.float32))
    return gathered(A), M, L, ALPHA


def by_rows(x) -> np.ndarray:
    """[rows, 4] of what the lanes have [32, i, h] of values per row: the four lanes of each."""
    return x.reshape(8, 4, -1).transpose(2, 0, 1).reshape(-1, 4)


@pytest.mark.parametrize(("q_rows", "k_rows"), [(16, 16), (16, 32), (16, 48), (32, 32)])
@pytest.mark.parametrize("by_eights", [False, True])
@pytest.mark.parametrize("unit", [1, 2.0**-30])
def test_softmax(run, q_rows, k_rows, unit, by_eights):
    exponents = 6 * randn(q_rows, k_rows).astype(np.float64)
    m, l = 8 * randn(q_rows, seed=1), np.abs(randn(q_rows, seed=2))
    exponents[2] = m[2] = -INF  # no key yet, and none now
    m[3] = -INF  # none yet
    exponents[4] = -INF  # none now
    exponents[5, ::2] = -INF  # some now
    l[:4] *= np.isfinite(m[:4])
    units = np.where(by_eights & (np.arange(q_rows) % 16 >= 8), unit / 2, unit)[:, None]
    S = (exponents / units).astype(np.float32)
    P, M, L, alpha = softmax_of(run, S, m, l, unit, 2.0**14, by_eights)

    x = S.astype(np.float64) * units
    new = np.maximum(m, x.max(1))
    np.testing.assert_array_equal(by_rows(M), np.repeat(new.astype(np.float32)[:, None], 4, axis=1))
    base = np.where(np.isfinite(new), new, 0)
    difference = x - base[:, None]
    exact, factor = np.exp2(difference), np.exp2(m - base)
    # The difference is rounded, and its exponential is off by 2^-22.
    known = np.where(np.isfinite(difference), 2.0**-22 + 2.0**-24 * np.abs(difference), 0)
    assert np.all(np.abs(P / 2.0**14 - exact) <= known * exact)
    np.testing.assert_allclose(by_rows(alpha), np.repeat(factor[:, None], 4, axis=1), rtol=2.0**-19)
    # Each lane sums its own columns: 2t and 2t + 1 of every 8.
    own = exact.reshape(q_rows, -1, 4, 2).sum((1, 3))
    np.testing.assert_allclose(by_rows(L), l[:, None] * factor[:, None] + own, rtol=2.0**-20)
    assert np.all(by_rows(L)[2] == 0) and np.all(P[2] == 0) and np.all(by_rows(alpha)[2:4] == 0)


def test_softmax_rounds_the_difference_only(run):
    # Scores near 2^20, an eighth apart.
    S = np.full((16, 16), -(2.0**20), np.float32)
    S[:, 0], S[:, 1] = 2.0**20, 2.0**20 - 0.125
    P, *_ = softmax_of(run, S, np.full(16, -INF), np.zeros(16, np.float32), 1, 1)
    assert np.all(P[:, 0] == 1) and np.all(P[:, 2:] == 0)
    np.testing.assert_allclose(P[:, 1], 2.0**-0.125, rtol=2.0**-22)


def outputs_of(run, P, V, O, alpha, chain=2, products=3) -> np.ndarray:
    """O by the verb, from the image of V."""
    (q_rows, k_rows), columns, halves = P.shape, V.shape[1], mma_tile.halves_of(products)
    n_bytes = image_bytes(k_rows, columns, halves)
    copy = copy_image(n_bytes, 32)
    pv = mma_tile.outputs(q_rows, k_rows, columns, chain, products)
    m_tiles, k_tiles, n_tiles = q_rows // 16, k_rows // 8, n_fragments(columns)
    p_shape, o_shape, row_shape = (m_tiles, k_tiles, 4), (m_tiles, n_tiles, 4), (m_tiles, 2)

    @cuda.jit
    def kernel(A, V_image, ALPHA, B):
        lane = cuda.threadIdx.x
        smem = shared_memory()
        copy(smem, V_image, 0, lane)
        cp_async_commit()
        wait_all()
        cuda.syncthreads()
        P, O = cuda.local.array(p_shape, float32), cuda.local.array(o_shape, float32)
        alpha = cuda.local.array(row_shape, float32)
        for i in range(m_tiles):
            for h in range(2):
                alpha[i, h] = ALPHA[lane, i, h]
            for r in range(4):
                for j in range(k_tiles):
                    P[i, j, r] = A[lane, i, j, r]
                for j in range(n_tiles):
                    O[i, j, r] = B[lane, i, j, r]
        pv(O, P, alpha, smem + lane_of_rows(lane))
        for i in range(m_tiles):
            for j in range(n_tiles):
                for r in range(4):
                    B[lane, i, j, r] = O[i, j, r]

    B = scattered(O)
    run(kernel, scattered(P), image_of(V, halves=halves), of_rows(alpha), B, smem_bytes=n_bytes)
    return gathered(B)


@each_tile
def test_outputs(run, q_rows, k_rows, columns):
    P, V, O = integers(q_rows, k_rows), integers(k_rows, columns, seed=1), integers(q_rows, columns, seed=2)
    alpha = (2.0 ** (np.arange(q_rows) % 3)).astype(np.float32)
    np.testing.assert_array_equal(outputs_of(run, P, V, O, alpha), alpha[:, None] * O + P @ V)
    P = (np.float32(2.0**14) * np.random.default_rng(0).random((q_rows, k_rows))).astype(np.float32)
    V, O, alpha = spread(randn(k_rows, columns)), randn(q_rows, columns, seed=1), np.abs(randn(q_rows, seed=2))
    exact = alpha[:, None].astype(np.float64) * O + P.astype(np.float64) @ V
    size = alpha[:, None] * np.abs(O) + P.astype(np.float64) @ np.abs(V)
    assert np.all(np.abs(outputs_of(run, P, V, O, alpha) - exact) <= 2.0**-21 * size)


@each_tile
def test_outputs_of_one_half(run, q_rows, k_rows, columns):
    P = (np.float32(2.0**14) * np.random.default_rng(0).random((q_rows, k_rows))).astype(np.float32)
    V, O, alpha = spread(randn(k_rows, columns)), randn(q_rows, columns, seed=1), np.abs(randn(q_rows, seed=2))
    exact = alpha[:, None].astype(np.float64) * O + rounded(P) @ rounded(V)
    size = alpha[:, None] * np.abs(O) + P.astype(np.float64) @ np.abs(V)
    assert np.all(np.abs(outputs_of(run, P, V, O, alpha, products=1) - exact) <= 2.0**-20 * size)


@pytest.mark.parametrize("chain", [1, 2, 3])
def test_outputs_of_any_chain(run, chain):
    P, V, O = integers(16, 48), integers(48, 24, seed=1), integers(16, 32, seed=2)
    O[:, 24:] = 0
    alpha = np.full(16, 0.5, np.float32)
    expected = 0.5 * O
    expected[:, :24] += P @ V
    np.testing.assert_array_equal(outputs_of(run, P, V, O, alpha, chain), expected)


def test_outputs_keep_both_halves(run):
    P, V, O = np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float32)
    P[:, 5] = 2.0**14 + 2.0**1 + 2.0**-8
    V[5] = 2.0**14 + 2.0**2 + 2.0**-6
    o = outputs_of(run, P, V, O, np.zeros(16, np.float32))
    exact = float(P[0, 5]) * float(V[5, 0])
    assert np.all(np.abs(o - exact) <= 2.0**-22 * exact)


@pytest.mark.parametrize(("q_rows", "columns"), [(16, 16), (32, 40)])
def test_start(run, q_rows, columns):
    start = mma_tile.start(q_rows, columns)
    o_shape, row_shape = (q_rows // 16, n_fragments(columns), 4), (q_rows // 16, 2)

    @cuda.jit
    def kernel(B, M, L):
        lane = cuda.threadIdx.x
        O = cuda.local.array(o_shape, float32)
        m, l = cuda.local.array(row_shape, float32), cuda.local.array(row_shape, float32)
        start(O, m, l)
        for i in range(o_shape[0]):
            for h in range(2):
                M[lane, i, h], L[lane, i, h] = m[i, h], l[i, h]
            for j in range(o_shape[1]):
                for r in range(4):
                    B[lane, i, j, r] = O[i, j, r]

    B, M, L = nans(32, *o_shape), nans(32, *row_shape), nans(32, *row_shape)
    run(kernel, B, M, L)
    assert np.all(B == 0) and np.all(M == -INF) and np.all(L == 0)


def finish_kernel(q_rows: int, columns: int, row0: int):
    finish = mma_epilogue.finish(q_rows, columns)
    o_shape, row_shape = (q_rows // 16, n_fragments(columns), 4), (q_rows // 16, 2)

    @cuda.jit
    def kernel(gO, B, L, units):
        lane = cuda.threadIdx.x
        O, l = cuda.local.array(o_shape, float32), cuda.local.array(row_shape, float32)
        for i in range(o_shape[0]):
            for h in range(2):
                l[i, h] = L[lane, i, h]
            for j in range(o_shape[1]):
                for r in range(4):
                    O[i, j, r] = B[lane, i, j, r]
        finish(gO, O, l, units[0], row0, lane)
        for i in range(o_shape[0]):
            for h in range(2):
                L[lane, i, h] = l[i, h]

    return kernel


@pytest.mark.parametrize(("q_rows", "columns"), [(16, 16), (16, 48), (32, 64), (32, 128)])
@pytest.mark.parametrize("tail", ["none", "rows", "columns", "both", "outside"])
def test_finish(run, q_rows, columns, tail):
    row0, unit = 2, np.float32(2.0**-9)
    Lq = row0 + {"rows": q_rows - 3, "both": 5, "outside": 0}.get(tail, q_rows + 1)
    Dv = {"columns": columns - 3, "both": columns // 2 + 1}.get(tail, columns)
    surrounding = np.full((Lq + 3, Dv + 5), 77, np.float32)
    O, parts = randn(q_rows, columns), np.abs(randn(32, q_rows // 16, 2, seed=1))
    parts.reshape(8, 4, -1)[2] = 0  # rows 2, 10, ..: no key
    totals = by_rows(parts).astype(np.float64).sum(1)
    L = parts.copy()
    run(finish_kernel(q_rows, columns, row0), surrounding[:Lq, 1 : 1 + Dv], scattered(O), L, np.array([unit]))

    np.testing.assert_allclose(by_rows(L), np.repeat(totals[:, None], 4, axis=1), rtol=2.0**-22)
    l = by_rows(L)[:, :1].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(l > 0, O / l, 0)
    n = max(0, min(q_rows, Lq - row0))
    expected = np.full(surrounding.shape, 77.0)
    expected[row0 : row0 + n, 1 : 1 + Dv] = (quotient.astype(np.float32) * unit)[:n, :Dv]
    inside = np.zeros(surrounding.shape, bool)
    inside[row0 : row0 + n, 1 : 1 + Dv] = True
    np.testing.assert_array_equal(surrounding[~inside], 77)
    if n:
        # The quotient is rounded correctly but for what is nearly a tie.
        ulps = np.abs(surrounding - expected) / np.spacing(np.abs(expected).astype(np.float32))
        assert np.all(ulps[inside] <= 1) and np.mean(ulps[inside] > 0) < 0.01
        assert np.all(surrounding[row0 + 2, 1 : 1 + Dv] == 0)


def test_finish_beside_the_tensor():
    B, L, unit = scattered(randn(16, 16)), np.ones((32, 1, 2), np.float32), np.ones(1, np.float32)
    simulate(finish_kernel(16, 16, 0), nans(16, 9), B, L.copy(), unit)
    with pytest.raises(sim.SimulationError, match="index out of range"):
        simulate(finish_kernel(16, 16, -1), nans(16, 9), B, L.copy(), unit)


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_ring(run, slots):
    following = mma_tile.ring(slots)

    @cuda.jit
    def kernel(O):
        slot = 0
        for i in range(O.shape[0]):
            O[i] = slot
            slot = following(slot)

    O = np.full(9, -1, np.int32)
    run(kernel, O)
    np.testing.assert_array_equal(O, np.arange(9) % slots)


def test_helpers_are_inverse():
    X = np.arange(32 * 24, dtype=np.float32).reshape(32, 24)
    np.testing.assert_array_equal(gathered(scattered(X)), X)
    rows = of_rows(np.arange(32))
    for lane, i, h in np.ndindex(rows.shape):
        assert rows[lane, i, h] == 16 * i + 8 * h + lane // 4 == 16 * i + C_ROW[lane, 2 * h]
        assert C_COL[lane, 2 * h] == 2 * (lane % 4)
    np.testing.assert_array_equal(by_rows(rows), np.repeat(np.arange(32)[:, None], 4, axis=1))
