"""Contract under test: reductions over a warp and the online softmax, against softmax over all columns at once."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32
from toys import nans, randn

from numba_attn.device.softmax import (
    NEG_INF,
    ZERO,
    exp,
    finite_max,
    log_sum_exp,
    of_row,
    reciprocal,
    warp_max,
    warp_sum,
)
from numba_attn.device.tile import online_softmax

INF, NAN = np.inf, np.nan


def reduced(run, verb, x):
    """The verb of each row of x [n, 32], as all lanes have it: [n, 32]."""

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        for i in range(A.shape[0]):
            O[i, t] = verb(A[i, t])

    o = nans(*x.shape)
    run(kernel, x, o)
    assert np.all((o.view(np.uint32) == o[:, :1].view(np.uint32)) | np.isnan(o)), "lanes that differ"
    return o[:, 0]


def one_lane_each(values, fill):
    """Row i has values[i] in lane 7 i mod 32 and `fill` in the others."""
    x = np.full((len(values), 32), fill, np.float32)
    for i, value in enumerate(values):
        x[i, 7 * i % 32] = value
    return x


def test_warp_max(run):
    x = np.concatenate([randn(4, 32), one_lane_each([5, INF, -INF, 0], -1), np.full((1, 32), -INF, np.float32)])
    np.testing.assert_array_equal(reduced(run, warp_max, x), x.max(axis=1))


def test_warp_max_passes_nan_over(run):
    x = one_lane_each([NAN] * 32, 0) + randn(32, 32)
    x = np.concatenate([x, one_lane_each([-3, INF], NAN), np.full((1, 32), NAN, np.float32)])
    np.testing.assert_array_equal(reduced(run, warp_max, x), [*np.nanmax(x[:-1], axis=1), NAN])


def test_warp_sum(run):
    x = np.concatenate([randn(4, 32), np.arange(64, dtype=np.float32).reshape(2, 32), one_lane_each([7, INF, NAN], 0)])
    o = reduced(run, warp_sum, x)
    exact = x.astype(np.float64).sum(axis=1)
    # Five additions follow one another, each within half an ulp of what it adds.
    bound = 5 * 2.0**-24 * np.abs(x[:4]).sum(axis=1)
    assert np.all(np.abs(o[:4] - exact[:4]) <= bound)
    np.testing.assert_array_equal(o[4:], exact[4:])


def test_of_row(run):
    @cuda.jit
    def kernel(A, O):
        for i in range(32):
            O[i, cuda.threadIdx.x] = of_row(A[cuda.threadIdx.x], i)

    x, o = randn(32), nans(32, 32)
    run(kernel, x, o)
    np.testing.assert_array_equal(o, np.broadcast_to(x[:, None], (32, 32)))


def mapped(run, verb, x):
    """The verb of each element of x [n]."""

    @cuda.jit
    def kernel(A, O):
        for i in range(cuda.threadIdx.x, A.shape[0], 32):
            O[i] = verb(A[i])

    o = nans(*x.shape)
    run(kernel, x, o)
    return o


def test_finite_max(run):
    x = np.array([-INF, -3, 0, 5, INF], np.float32)
    np.testing.assert_array_equal(mapped(run, finite_max, x), [0, -3, 0, 5, INF])


def test_exp(run):
    x = -np.concatenate([np.linspace(0, 87, 200), np.logspace(-8, 1, 50)]).astype(np.float32)
    o, exact = mapped(run, exp, x), np.exp(x.astype(np.float64))
    assert np.all(np.abs(o - exact) <= exact * (2.0**-22 + np.abs(x) * 2.0**-24))
    special = np.array([0, -0.0, -INF, -1e30, NAN, -100], np.float32)
    o = mapped(run, exp, special)
    np.testing.assert_array_equal(o[:5], [1, 1, 0, 0, NAN])
    assert 0 < o[5] < np.finfo(np.float32).tiny, "a denormal result"


def test_end_of_a_row(run):
    @cuda.jit
    def kernel(M, L, O):
        i = cuda.threadIdx.x
        if i < M.shape[0]:
            O[0, i] = reciprocal(L[i], True)
            O[1, i] = reciprocal(L[i], False)
            O[2, i] = log_sum_exp(M[i], L[i])

    m = np.array([0.5, -80, 3, -INF, NAN], np.float32)
    l = np.array([1, 7.25, 1e30, 0, NAN], np.float32)
    o = nans(3, 5)
    run(kernel, m, l, o)
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(o[0], 1 / l)
        np.testing.assert_allclose(o[2], m + np.log(l.astype(np.float64)), rtol=1e-6)
    np.testing.assert_array_equal(o[1], np.zeros(5))


def streamed(run, S, columns):
    """P, alpha, m, l of `online_softmax` over S [R, C], 32 `columns` columns at a time, lane i holding row i's."""
    R, C = S.shape
    chunk = 32 * columns

    @cuda.jit
    def kernel(A, P, ALPHA, M, L):
        lane = cuda.threadIdx.x
        patch = cuda.local.array((R, columns), float32)
        m, l = NEG_INF, ZERO
        for step in range(C // chunk):
            for i in range(R):
                for j in range(columns):
                    patch[i, j] = A[i, step * chunk + lane + 32 * j]
            m, l, alpha = online_softmax(patch, m, l, lane)
            for i in range(R):
                for j in range(columns):
                    P[i, step * chunk + lane + 32 * j] = patch[i, j]
            if lane < R:
                ALPHA[step, lane] = alpha
        if lane < R:
            M[lane] = m
            L[lane] = l

    P, ALPHA, M, L = nans(R, C), nans(C // chunk, R), nans(R), nans(R)
    run(kernel, S, P, ALPHA, M, L)
    return P, ALPHA, M, L


@pytest.mark.parametrize("columns", [1, 2])
def test_online_softmax(run, columns):
    S = randn(5, 192) * 10
    S[1] = np.sort(S[1])  # a new maximum in every step
    S[2] = -np.sort(-S[2])  # and in none but the first
    S[3, :100] = -INF
    P, alpha, m, l = streamed(run, S, columns)
    exact = S.astype(np.float64)
    np.testing.assert_array_equal(m, S.max(axis=1))
    np.testing.assert_allclose(l, np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1), rtol=1e-5)
    # What a step made is multiplied with the alpha of each later step.
    later = np.cumprod(np.vstack([alpha[1:], np.ones(5)])[::-1], axis=0)[::-1]
    weights = P.reshape(5, len(alpha), -1) * later.T[..., None] / l[:, None, None]
    expected = np.exp(exact - exact.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights.reshape(5, -1), expected, rtol=2e-5, atol=1e-30)
    assert np.all(np.isfinite(alpha))


def test_online_softmax_without_keys(run):
    S = np.full((2, 64), -INF, np.float32)
    S[1, 40] = 3  # nothing in the first step, one key in the second
    P, alpha, m, l = streamed(run, S, 1)
    np.testing.assert_array_equal(m, [-INF, 3])
    np.testing.assert_array_equal(l, [0, 1])
    np.testing.assert_array_equal(P, np.isfinite(S))
    np.testing.assert_array_equal(alpha, np.zeros((2, 2)))


def test_online_softmax_of_nan_and_inf(run):
    S = randn(3, 64)
    S[0, 5], S[1, 40], S[2, 5] = NAN, NAN, INF
    _, _, m, l = streamed(run, S, 1)
    assert np.all(np.isnan(l)), "a NaN score, or one of infinity, makes the row NaN"
    assert m[2] == INF
