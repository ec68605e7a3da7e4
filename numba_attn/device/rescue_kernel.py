"""The launch that does what halves would not serve: blocks left undone, and rows with few keys.

In a sum of few terms fp32 makes few rounding errors, fewer than halves bring along: under causality the first rows of
each head are done again, by all blocks of the head, and all rows where there are few keys or columns. A warp takes a
row, four keys at a time; lane t has the columns t + 32 i. Keys that do not count are never read, so a NaN or Inf stays
where it is. Blocks with nothing to do return at once.

Scores have twice fp32's digits until their difference is taken. Beside one of 2^20 the rounding errors of fp32 are as
large as what the exponential sees, and a row in which two such scores nearly tie decides the error of its head: as
likely as not it would be larger than that of another fp32 evaluation. The rest is plain fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import cuda, float32

from numba_attn.device.mask import Mask
from numba_attn.device.math import add_product, fma, product_of
from numba_attn.device.softmax import ALL_LANES, NEG_INF, ONE, ZERO, finite_max, warp_two_sum
from numba_attn.device.tile import WARP

FEW_KEYS = 32
KEYS = 4
"""At a time: as many rows of K and of V are on their way together."""
WIDTHS = (256, 1024)
"""Columns that a row is taken to have: what is rare needs no machine code for each width."""
SMALLER = np.float32(2.0**-32)
"""Times V a sum over all its keys stays finite."""
INF, LARGEST = np.float32(np.inf), np.finfo(np.float32).max


@dataclass(frozen=True)
class RescueConfig:
    is_causal: bool
    columns: int = WIDTHS[0]
    threads: int = 512

    @classmethod
    def of(cls, is_causal: bool, widest: int) -> RescueConfig:
        columns = next((columns for columns in WIDTHS if columns >= widest), widest)
        return cls(is_causal, columns, 512 if columns == WIDTHS[0] else 256)


def build_rescue(config: RescueConfig):
    """`rescue(Q, K, V, unsafe, O, lse, scale, block_m, first_row)`: blocks [head, m_block] where `unsafe` is not 0.

    Row 0 of Q is row `first_row` of the problem.
    """
    REGISTERS, WARPS = config.columns // WARP, config.threads // WARP
    IS_CAUSAL, end_of_row = config.is_causal, Mask(config.is_causal).end

    @cuda.jit
    def rescue(Q, K, V, unsafe, O, lse, scale, block_m, first_row):
        # who am I: block -> batch, head, m_block; a warp takes every WARPS-th row of it
        H, Lq, D, Lk, Dv = Q.shape[1], Q.shape[2], Q.shape[3], K.shape[2], O.shape[3]
        m_blocks = unsafe.shape[1]
        head, m_block = cuda.blockIdx.x // m_blocks, cuda.blockIdx.x % m_blocks
        n_own = min(block_m, Lq - m_block * block_m) if unsafe[head, m_block] != 0 else 0
        few_end = 0
        if IS_CAUSAL:
            # Rows with few keys, where the block that owns them leaves them: every m_blocks-th one.
            few_end = min(FEW_KEYS - first_row, Lq) if unsafe[head, 0] == 0 else 0
        rows = n_own + max(0, (few_end - m_block + m_blocks - 1) // m_blocks)
        b, h = head // H, head % H
        tid = cuda.threadIdx.x
        warp, lane = tid >> 5, tid & 31
        gQ, gK, gV = Q[b, h], K[b, h], V[b, h]
        q = cuda.local.array(REGISTERS, float32)
        acc = cuda.local.array(REGISTERS, float32)
        s = cuda.local.array(KEYS, float32)
        rest = cuda.local.array(KEYS, float32)
        p = cuda.local.array(KEYS, float32)

        for i_row in range(warp, rows, WARPS):
            row = m_block * block_m + i_row if i_row < n_own else m_block + (i_row - n_own) * m_blocks
            for i in range(REGISTERS):
                d = lane + WARP * i
                q[i] = gQ[row, d] if d < D else ZERO
            n_end = end_of_row(first_row + row, Lk)

            # O, unnormalised, overflows where V is near the largest number: then once more, of smaller values
            for down in (ONE, SMALLER):
                m, m_rest, l, overflows = NEG_INF, ZERO, ZERO, False
                for i in range(REGISTERS):
                    acc[i] = ZERO

                for col in range(0, n_end, KEYS):
                    for k in range(KEYS):
                        s[k], rest[k] = ZERO, ZERO
                    for i in range(REGISTERS):
                        d = lane + WARP * i
                        for k in range(KEYS):
                            if d < D:
                                s[k], rest[k] = add_product(s[k], rest[k], q[i], gK[min(col + k, n_end - 1), d])
                    m_old, m_rest_old = m, m_rest
                    for k in range(KEYS):
                        sum_of_k, rest_of_k = warp_two_sum(s[k], rest[k])
                        score = product_of(sum_of_k, scale)
                        rest_of_k = fma(sum_of_k, scale, -score) + rest_of_k * scale
                        s[k], rest[k] = score, rest_of_k if abs(rest_of_k) < INF else ZERO
                        # Keys behind the last one stand for it: they change no maximum.
                        m, m_rest = max(m, score), rest[k] if score > m else m_rest
                    base = finite_max(m)
                    alpha = float32(math.exp((m_old - base) + (m_rest_old - m_rest)))
                    l *= alpha
                    for k in range(KEYS):
                        p[k] = float32(math.exp((s[k] - base) + (rest[k] - m_rest))) if col + k < n_end else ZERO
                        l += p[k]
                    for i in range(REGISTERS):
                        d = lane + WARP * i
                        acc[i] *= alpha
                        for k in range(KEYS):
                            # Of a key that is not there nothing, not 0 times Inf.
                            if (d < Dv) & (col + k < n_end):
                                acc[i] += p[k] * (gV[col + k, d] * down)

                for i in range(REGISTERS):
                    overflows |= not abs(acc[i]) < INF
                if not cuda.any_sync(ALL_LANES, overflows):
                    break

            # finish: O = acc / l, lse = m + ln l
            for i in range(REGISTERS):
                d = lane + WARP * i
                if d < Dv:
                    mean = acc[i] / l / down if n_end > 0 else ZERO
                    # No mean of finite values is infinite.
                    O[b, h, row, d] = max(-LARGEST, min(mean, LARGEST)) if abs(acc[i]) < INF else mean
            if lane == 0 and row < lse.shape[2]:
                lse[b, h, row] = m + (m_rest + math.log(l))

    return rescue
