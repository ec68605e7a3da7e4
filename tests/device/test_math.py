"""Contract under test: sums and products that keep what rounding loses, against exact fractions."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
from numba import cuda
from toys import nans, ptx_of

from numba_attn.device.math import add_product, product_of, two_sum
from numba_attn.device.softmax import ZERO, warp_two_sum

INF = np.float32(np.inf)


def spread(*shape: int, seed=0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)).astype(np.float32)


def exact(x) -> Fraction:
    return Fraction(float(x))


def test_two_sum(run):
    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        O[t, 0], O[t, 1] = two_sum(A[t, 0], A[t, 1])

    A, O = spread(32, 2), nans(32, 2)
    A[:2] = [[2.0**24, 1], [1, -(2.0**24)]]
    run(kernel, A, O)
    np.testing.assert_array_equal(O[:, 0], A[:, 0] + A[:, 1])
    assert all(exact(o[0]) + exact(o[1]) == exact(a[0]) + exact(a[1]) for a, o in zip(A, O, strict=True))


@cuda.jit
def dot_kernel(A, B, O):
    t = cuda.threadIdx.x
    total, rest = ZERO, ZERO
    for i in range(A.shape[1]):
        total, rest = add_product(total, rest, A[t, i], B[t, i])
    O[t, 0], O[t, 1] = total, rest


def test_add_product(run):
    A, B, O = spread(32, 8), spread(32, 8, seed=1), nans(32, 2)
    B[:4, -1] = -np.sum(A[:4, :-1].astype(np.float64) * B[:4, :-1], axis=1) / A[:4, -1]  # what cancels
    run(dot_kernel, A, B, O)
    for a, b, o in zip(A, B, O, strict=True):
        products = [exact(x) * exact(y) for x, y in zip(a, b, strict=True)]
        assert abs(exact(o[0]) + exact(o[1]) - sum(products)) <= Fraction(2) ** -44 * sum(map(abs, products))


def test_add_product_of_what_is_not_finite(run):
    A, B, O = np.ones((32, 2), np.float32), np.ones((32, 2), np.float32), nans(32, 2)
    A[0, 0], A[1, 1], A[2, 0], A[3] = INF, -INF, np.nan, [3e38, 3e38]
    B[3] = [3, -3]
    run(dot_kernel, A, B, O)
    np.testing.assert_array_equal(O[:4, 0], [INF, -INF, np.nan, np.nan])
    assert not np.isfinite(O[:4, 1]).any() and np.all(O[4:] == [2, 0])


def test_products_are_not_contracted():
    # A product of `*` may become part of an fma with the sum after it; then its rounding is taken off twice.
    @cuda.jit
    def difference(A):
        score = product_of(A[0], A[1])
        A[2] = score - A[3]

    for ptx in (ptx_of(dot_kernel, 2, 2, 2), ptx_of(difference, 1)):
        assert "fma.rn.f32" in ptx and not re.search(r"mul\.(rn\.)?f32", ptx)


def test_warp_two_sum(run):
    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        for i in range(A.shape[0]):
            O[i, t, 0], O[i, t, 1] = warp_two_sum(A[i, t, 0], A[i, t, 1])

    A, O = spread(4, 32, 2), nans(4, 32, 2)
    A[..., 1] = 2.0**-26 * A[..., 0]
    run(kernel, A, O)
    for a, o in zip(A, O, strict=True):
        assert np.all(o.view(np.uint32) == o[:1].view(np.uint32)), "lanes that differ"
        size = sum(abs(exact(x)) for x in a.ravel())
        assert abs(exact(o[0, 0]) + exact(o[0, 1]) - sum(map(exact, a.ravel()))) <= Fraction(2) ** -44 * size
