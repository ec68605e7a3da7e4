"""Lane maps of the tensor core's fragments: which element of a matrix is in which register of which lane.

`mma.m16n8k16` computes C[16, 8] += A[16, 16] B[16, 8] with g = lane // 4 and t = lane % 4. A register of A or B
holds two halves, the lower one first; a register of C one fp32.

      A[row, k]       k = 2t, 2t+1   2t+8, 2t+9        B[k, n]        n = g        C[row, n]   n = 2t   2t+1
      row = g         A0             A2                k = 2t,2t+1    B0           row = g     C0       C1
      row = g + 8     A1             A3                k = 2t+8,+9    B1           row = g+8   C2       C3

`ldmatrix.x4` reads four 8 x 8 matrices of halves; the lanes 8 i .. 8 i + 7 hold the addresses of the rows of matrix i,
and lane 4 g + t receives row g, columns 2t and 2t+1 (transposed: rows 2t and 2t+1, column g) in its register i.

Two neighbouring C fragments of S have the layout of one A fragment of P: C0 C1 | C2 C3 of columns 0..7 are A0 | A1, of
columns 8..15 A2 | A3. So P is split in the registers that S was summed in.
"""

from __future__ import annotations

import numpy as np

M, N, K = 16, 8, 16
"""Shape of one product."""

_lane = np.arange(32)
_g, _t = _lane // 4, _lane % 4

A_ROW = np.stack([_g, _g + 8, _g, _g + 8], axis=1)
"""[lane, register]: row of A."""
A_COL = np.stack([2 * _t, 2 * _t, 2 * _t + 8, 2 * _t + 8], axis=1)
"""[lane, register]: column of the lower half; the upper one is next to it."""
B_ROW = np.stack([2 * _t, 2 * _t + 8], axis=1)
"""[lane, register]: row of the lower half of B; the upper one is below it."""
B_COL = np.stack([_g, _g], axis=1)
C_ROW = np.stack([_g, _g, _g + 8, _g + 8], axis=1)
C_COL = np.stack([2 * _t, 2 * _t + 1, 2 * _t, 2 * _t + 1], axis=1)


def halves(registers) -> np.ndarray:
    """[..., 2] halves of packed 32-bit registers, the lower one first."""
    return np.asarray(registers, np.uint32)[..., None].view(np.float16)


def gather_a(registers) -> np.ndarray:
    """A[16, 16] of the packed registers [32, 4]."""
    A = np.empty((M, K), np.float16)
    pairs = halves(registers)
    for half in range(2):
        A[A_ROW, A_COL + half] = pairs[..., half]
    return A


def gather_b(registers) -> np.ndarray:
    """B[16, 8] of the packed registers [32, 2]."""
    B = np.empty((K, N), np.float16)
    pairs = halves(registers)
    for half in range(2):
        B[B_ROW + half, B_COL] = pairs[..., half]
    return B


def gather_c(registers) -> np.ndarray:
    """C[16, 8] of the fp32 registers [32, 4]."""
    C = np.empty((M, N), np.float32)
    C[C_ROW, C_COL] = registers
    return C


def scatter_c(C: np.ndarray) -> np.ndarray:
    """The registers [32, 4] of C[16, 8]."""
    return C[C_ROW, C_COL]


def mma(a, b, c) -> np.ndarray:
    """Registers [32, 4] of C + A B, as Hopper's tensor cores sum them."""
    return scatter_c(multiply_add(gather_a(a), gather_b(b), gather_c(c)))


def multiply_add(A, B, C) -> np.ndarray:
    """C + A B in fp32 as Hopper's tensor cores sum, of halves A [rows, 16] and B [16, columns], however many they are.

    The 16 products and C are aligned to the largest exponent among them and truncated to `SUM_BITS` bits behind the
    point; their sum is truncated to fp32. Source: MMA-Sim (arXiv 2511.10909); Ampere keeps one bit less, and sums 8
    products at a time.
    """
    C = C.astype(np.float64)
    terms = A.astype(np.float64)[:, None, :] * B.T.astype(np.float64)[None, :, :]  # [row, n, k], exact
    exponents = _exponent(A)[:, None, :] + _exponent(B).T[None, :, :]
    exponents = np.where(terms == 0, _NO_EXPONENT, exponents).max(-1)
    exponents = np.maximum(exponents, np.where(C == 0, _NO_EXPONENT, _exponent(C)))
    unit = np.ldexp(1.0, exponents - SUM_BITS)
    # The sum of what is left is exact in float64.
    total = (np.trunc(terms / unit[..., None]).sum(-1) + np.trunc(C / unit)) * unit
    return _toward_zero(total)


SUM_BITS = 25
_NO_EXPONENT = -300


def _exponent(x: np.ndarray) -> np.ndarray:
    """floor(log2 |x|)"""
    return np.frexp(x.astype(np.float64))[1] - 1


def _toward_zero(x: np.ndarray) -> np.ndarray:
    """fp32 numbers, truncated."""
    nearest = x.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)


def ldmatrix(rows, transposed: bool) -> np.ndarray:
    """Packed registers [32, 4] of the 32 rows of eight halves that the lanes point at."""
    matrices = np.asarray(rows, np.float16).reshape(4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    pairs = matrices[:, _g[:, None], 2 * _t[:, None] + np.arange(2)]  # [matrix, lane, half]
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0].T
