"""Operands of Hopper's warpgroup products: descriptors of matrices in shared memory, and which register is where.

`wgmma.m64nNk16` computes C[64, N] += A[64, 16] B[16, N] by 128 threads; warp w has the rows 16 w .. + 15 of A and C, in
the layout of `fragments`: four registers of A, and N / 2 of C, column 8 j + .. in the registers 4 j .. 4 j + 3.

A matrix in shared memory is named by a descriptor of 64 bits, in the image's layout ("128-byte swizzle"): rows of 128
bytes, in eight chunks of 16, chunk c of the row at address r * 128 being at chunk c ^ (r % 8).

    bits   0 .. 13  address / 16       A and K^T: a row of the image is a row of the operand, 16 halves of it a step
          16 .. 29  leading / 16           start + 32 step;  eight rows further: + stride
          32 .. 45  stride / 16        V: a row of the image is one of the 16 in the sum ("transposed")
          62 .. 63  1: 128 bytes           start + 2048 step;  eight rows further: + stride;  64 columns: + leading

Adding to an address keeps the layout: what is exchanged depends on the address itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_attn.device.fragments import C_COL, C_ROW, M, gather_a, multiply_add

STEP = 16
"""Columns (of Q and K) or rows (of V) of one product."""
GROUP_ROWS = 64
"""Rows of one product: of a warpgroup."""
GROUP_THREADS = 128
ROW_BYTES, BLOCK_COLUMNS, CHUNK = 128, 64, 8
STRIDE_BYTES = 8 * ROW_BYTES
_HIGH_WORD = 1 << 30 | STRIDE_BYTES >> 4


class Matrix(NamedTuple):
    """An operand in shared memory."""

    address: Any
    """Run-time part of the address of its first element, in bytes."""
    offset: int
    """What is added to that, in bytes."""
    leading: int = 0
    """Bytes from one block of 64 columns to the next, where the operand is transposed."""
    transposed: bool = False

    @property
    def words(self) -> tuple[int, int]:
        """What the descriptor's words are, but for address / 16 in the lower one."""
        return self.offset >> 4 | self.leading >> 4 << 16, _HIGH_WORD

    def chunks(self, n: int) -> np.ndarray:
        """Addresses of the chunks of n rows of A or columns of B, [n, 2], or of a transposed one, [16, n / 8]."""
        start = self.address + self.offset
        if self.transposed:
            row, column = np.ogrid[:STEP, :n:CHUNK]
            start = start + column // BLOCK_COLUMNS * self.leading
        else:
            row, column = np.ogrid[:n, :STEP:CHUNK]
        at = start + row // 8 * STRIDE_BYTES + row % 8 * ROW_BYTES + column % BLOCK_COLUMNS * 2
        return at ^ (at // ROW_BYTES % 8 * 16)

    def of_chunks(self, halves: np.ndarray) -> np.ndarray:
        """[n, 16] of the chunks' halves."""
        matrix = halves.reshape(len(halves), -1)
        return matrix.T if self.transposed else matrix


def of_registers(registers) -> np.ndarray:
    """A[64, 16] of the packed registers [128, 4]."""
    return np.concatenate([gather_a(of_warp) for of_warp in np.split(np.asarray(registers), GROUP_ROWS // M)])


def sum_of_products(lefts, rights) -> np.ndarray:
    """Registers [128, columns / 2] of sum_k A_k B_k^T: lists of A_k[64, 16] and B_k[columns, 16], summed in order."""
    total = np.zeros((GROUP_ROWS, len(rights[0])), np.float32)
    for A, B in zip(lefts, rights, strict=True):
        total = multiply_add(A, B.T, total)
    tiles = total.reshape(GROUP_ROWS // M, M, -1, 8)  # [warp, row, tile of columns, column]
    registers = tiles[:, C_ROW, :, C_COL]  # [lane, register, warp, tile]
    return np.ascontiguousarray(registers.transpose(2, 0, 3, 1)).reshape(GROUP_THREADS, -1)
