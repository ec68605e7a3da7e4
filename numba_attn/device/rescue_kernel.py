"""The launch that does in plain fp32 what halves would not serve: blocks left undone, and rows with few keys.

In a sum of few terms fp32 makes few rounding errors, fewer than halves bring along: under causality the first rows of
each head are done again. A warp takes a row, one key at a time; lane t has the columns t + 32 i. Keys that do not count
are never read, so a NaN or Inf stays where it is. Blocks with nothing to do return at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import cuda, float32

from numba_attn.device.mask import Mask
from numba_attn.device.softmax import NEG_INF, ZERO, finite_max, log_sum_exp, warp_sum
from numba_attn.device.tile import WARP

FEW_KEYS = 32
WIDTHS = (256, 1024)
"""Columns that a row is taken to have: what is rare needs no machine code for each width."""


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
        row_end = min((m_block + 1) * block_m, Lq)
        if unsafe[head, m_block] == 0:
            row_end = min(row_end, FEW_KEYS - first_row) if IS_CAUSAL else 0
        b, h = head // H, head % H
        tid = cuda.threadIdx.x
        warp, lane = tid >> 5, tid & 31
        gQ, gK, gV = Q[b, h], K[b, h], V[b, h]
        q = cuda.local.array(REGISTERS, float32)
        acc = cuda.local.array(REGISTERS, float32)

        for row in range(m_block * block_m + warp, row_end, WARPS):
            # load Q, reset m, l, acc
            for i in range(REGISTERS):
                d = lane + WARP * i
                q[i] = gQ[row, d] if d < D else ZERO
                acc[i] = ZERO
            m, l = NEG_INF, ZERO
            n_end = end_of_row(first_row + row, Lk)

            for col in range(n_end):
                s = ZERO
                for i in range(REGISTERS):
                    d = lane + WARP * i
                    s += q[i] * gK[col, d] if d < D else ZERO
                s = warp_sum(s) * scale
                m_new = max(m, s)
                base = finite_max(m_new)
                alpha, p = float32(math.exp(m - base)), float32(math.exp(s - base))
                m, l = m_new, l * alpha + p
                for i in range(REGISTERS):
                    d = lane + WARP * i
                    acc[i] = acc[i] * alpha + (p * gV[col, d] if d < Dv else ZERO)

            # finish: O = acc / l, lse = m + ln l
            for i in range(REGISTERS):
                d = lane + WARP * i
                if d < Dv:
                    O[b, h, row, d] = acc[i] / l if n_end > 0 else ZERO
            if lane == 0 and row < lse.shape[2]:
                lse[b, h, row] = log_sum_exp(m, l)

    return rescue
