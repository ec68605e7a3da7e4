"""Contract under test: the lane maps are those of the PTX manual, and the numpy twins compute what they say."""

from __future__ import annotations

import numpy as np
import pytest

from numba_attn.device import fragments
from numba_attn.device.fragments import A_COL, A_ROW, B_COL, B_ROW, C_COL, C_ROW, K, M, N


def pack(low, high) -> np.ndarray:
    """32-bit registers of two arrays of halves."""
    return np.stack([low, high], axis=-1).astype(np.float16).view(np.uint32)[..., 0]


def registers_of_a(A) -> np.ndarray:
    return pack(A[A_ROW, A_COL], A[A_ROW, A_COL + 1])


def registers_of_b(B) -> np.ndarray:
    return pack(B[B_ROW, B_COL], B[B_ROW + 1, B_COL])


def test_maps_are_bijections():
    for rows, cols, step, shape in ((A_ROW, A_COL, (0, 1), (M, K)), (C_ROW, C_COL, (0, 0), (M, N))):
        count = np.zeros(shape, int)
        for half in range(1 + step[1]):
            np.add.at(count, (rows, cols + half), 1)
        assert np.all(count == 1)
    count = np.zeros((K, N), int)
    for half in range(2):
        np.add.at(count, (B_ROW + half, B_COL), 1)
    assert np.all(count == 1)


def test_maps_are_those_of_the_manual():
    # PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": a0..a7, b0..b3, c0..c3.
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(8):
            row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
            col = thread * 2 + (i & 1) + (0 if i < 4 else 8)
            assert (A_ROW[lane, i // 2], A_COL[lane, i // 2] + i % 2) == (row, col)
        for i in range(4):
            row = thread * 2 + (i & 1) + (0 if i < 2 else 8)
            assert (B_ROW[lane, i // 2] + i % 2, B_COL[lane, i // 2]) == (row, group)
            assert (C_ROW[lane, i], C_COL[lane, i]) == (group if i < 2 else group + 8, thread * 2 + (i & 1))


def test_halves():
    pair = fragments.halves([0xC0003C00, 0x00017BFF])
    np.testing.assert_array_equal(pair, [[1, -2], [65504, 2.0**-24]])
    assert pair.dtype == np.float16
    assert fragments.halves(np.uint32(0xFC007C00)).tolist() == [np.inf, -np.inf]


def test_gather_and_scatter(rng):
    A, B = (rng.standard_normal(shape).astype(np.float16) for shape in ((M, K), (K, N)))
    C = rng.standard_normal((M, N)).astype(np.float32)
    np.testing.assert_array_equal(fragments.gather_a(registers_of_a(A)), A)
    np.testing.assert_array_equal(fragments.gather_b(registers_of_b(B)), B)
    np.testing.assert_array_equal(fragments.gather_c(fragments.scatter_c(C)), C)


def multiplied(A, B, C) -> np.ndarray:
    """C + A B by the twin."""
    A, B = np.asarray(A, np.float16), np.asarray(B, np.float16)
    C = np.asarray(C, np.float32)
    return fragments.gather_c(fragments.mma(registers_of_a(A), registers_of_b(B), fragments.scatter_c(C)))


def test_mma_of_integers_is_exact(rng):
    A, B, C = (rng.integers(-60, 60, shape) for shape in ((M, K), (K, N), (M, N)))
    np.testing.assert_array_equal(multiplied(A, B, C), C + A @ B)


@pytest.mark.parametrize("size", [1, 2.0**-10, 100])
def test_mma_is_a_product(rng, size):
    A, B = ((size * rng.standard_normal(shape)).astype(np.float16) for shape in ((M, K), (K, N)))
    C = rng.standard_normal((M, N)).astype(np.float32)
    exact = C + A.astype(np.float64) @ B.astype(np.float64)
    largest = np.maximum(np.abs(C), (np.abs(A[:, :, None].astype(np.float64) * B[None])).max(1))
    # Each of 17 terms loses less than 2^-25 of the largest one's power of two, the sum less than 2^-23 of its own.
    assert np.all(np.abs(multiplied(A, B, C) - exact) <= 17 * 2.0**-24 * largest + 2.0**-23 * np.abs(exact))


def test_mma_of_zeros():
    np.testing.assert_array_equal(multiplied(np.zeros((M, K)), np.zeros((K, N)), np.zeros((M, N))), 0)


def sum_of(c: float, *products: tuple[float, float]) -> float:
    """The one sum c + sum a b by the twin, in every element."""
    A, B = np.zeros((M, K)), np.zeros((K, N))
    for k, (a, b) in enumerate(products):
        A[:, k], B[k] = a, b
    result = multiplied(A, B, np.full((M, N), c))
    assert np.all(result == result[0, 0])
    return float(result[0, 0])


ULP = 2.0**-23  # of 1


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_are_truncated(sign):
    def total(c, *products):
        return sign * sum_of(sign * c, *((sign * a, b) for a, b in products))

    # Rounded to nearest, it were 1 + ULP.
    assert total(1, (0.75 * 2.0**-12, 2.0**-11)) == 1
    assert total(1, (2.0**-12, 2.0**-11)) == 1 + ULP
    # Toward zero, not down: 1 - ULP / 4 lies between 1 - ULP / 2 and 1.
    assert total(1, (-(2.0**-14), 2.0**-11)) == 1 - ULP / 2
    # A product below 2^-25 of the largest term is lost before it is summed, however many there are ..
    assert total(1, *[(2.0**-13, 2.0**-13)] * 16) == 1
    # .. and one that reaches that is summed: 16 quarters of an ulp.
    assert total(1, *[(2.0**-13, 2.0**-12)] * 16) == 1 + 4 * ULP
    # The largest term may be a product, and may cancel.
    assert total(0, (32, 32), (-32, 32), (2.0**-8, 2.0**-7)) == 2.0**-15
    assert total(0, (32, 32), (-32, 32), (2.0**-8, 2.0**-8)) == 0
    assert total(2.0**-16, (32, 32), (-32, 32)) == 0


def test_small_sums_keep_all_their_bits():
    # Among themselves the smallest halves are exact: zeros have no exponent to align to.
    assert sum_of(0, (2.0**-24, 2.0**-24)) == 2.0**-48
    assert sum_of(2.0**-126, (0, 60000)) == 2.0**-126


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    matrices = np.arange(4 * 8 * 8).reshape(4, 8, 8)
    registers = fragments.ldmatrix(matrices.reshape(32, 8), transposed)
    assert registers.shape == (32, 4) and registers.dtype == np.uint32
    for lane in range(32):
        row, col = lane // 4, 2 * (lane % 4)
        for i, matrix in enumerate(matrices):
            pair = (matrix[col, row], matrix[col + 1, row]) if transposed else (matrix[row, col], matrix[row, col + 1])
            assert tuple(fragments.halves(registers[lane, i])) == pair


def test_four_matrices_are_one_left_operand(rng):
    A = rng.standard_normal((M, K)).astype(np.float16)
    by_rows = [A[8 * i : 8 * i + 8, 8 * j : 8 * j + 8] for j in range(2) for i in range(2)]
    np.testing.assert_array_equal(fragments.ldmatrix(np.concatenate(by_rows), False), registers_of_a(A))


def test_four_matrices_are_two_right_operands(rng):
    B = rng.standard_normal((K, 2 * N)).astype(np.float16)
    both = np.concatenate([registers_of_b(B[:, :N]), registers_of_b(B[:, N:])], axis=1)
    # Rows of B^T, as keys lie in K; rows of B, as they lie in V, transposed on the way.
    keys = [B.T[8 * n : 8 * n + 8, 8 * k : 8 * k + 8] for n in range(2) for k in range(2)]
    values = [B[8 * k : 8 * k + 8, 8 * n : 8 * n + 8] for n in range(2) for k in range(2)]
    np.testing.assert_array_equal(fragments.ldmatrix(np.concatenate(keys), False), both)
    np.testing.assert_array_equal(fragments.ldmatrix(np.concatenate(values), True), both)


def test_neighbouring_sums_are_a_left_operand(rng):
    P = rng.standard_normal((M, K)).astype(np.float16)
    left, right = (fragments.scatter_c(P[:, cols].astype(np.float32)) for cols in (slice(0, 8), slice(8, 16)))
    pairs = [pack(side[:, r], side[:, r + 1]) for side in (left, right) for r in (0, 2)]
    np.testing.assert_array_equal(np.stack(pairs, axis=1), registers_of_a(P))
