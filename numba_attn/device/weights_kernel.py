"""The launch between the two products of an unfused kernel: what each group of keys weighs in each row.

    m = max_g m_g      l = sum_g 2^(m_g - m) l_g      w_g = 2^(m_g - m) / l      lse = m + ln l

A thread has one row, groups follow each other. What a group of keys is, and that its m and l are exponents of 2 and
sums of 2^(S - m), is up to the launch before.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from numba import cuda

from numba_attn.device.mask import Mask
from numba_attn.device.math import LN2, LN2_REST, fma, quotient
from numba_attn.device.rescue_kernel import FEW_KEYS
from numba_attn.device.softmax import NEG_INF, ONE, ZERO, exp2, finite_max
from numba_attn.device.split_half import SLACK as SLACKS
from numba_attn.device.split_half import verdict


@dataclass(frozen=True)
class WeightsConfig:
    rows: int
    """Of a block of query rows, threads too."""
    group: int
    """Keys of a group."""
    is_causal: bool
    halves: int = 2


def build_weights(config: WeightsConfig):
    """`weights(Q, K, Q_record, K_record, V_record, M, L, V_amax, unsafe, lse, first_row)`.

    M[head, group, row] becomes w, V_amax[head] the largest magnitude of V, unsafe[head, m_block] 1 where halves would
    lose digits: such blocks are left as they are.
    """
    BLOCK_M, GROUP, SLACK = config.rows, config.group, SLACKS[config.halves]
    end_of_row = Mask(config.is_causal).end

    @cuda.jit
    def weights(Q, K, Q_record, K_record, V_record, M, L, V_amax, unsafe, lse, first_row):
        # who am I: block -> batch, head, m_block; a thread has a row
        H, Lq, D, Lk = Q.shape[1], Q.shape[2], Q.shape[3], K.shape[2]
        m_blocks = unsafe.shape[1]
        head = quotient(cuda.blockIdx.x, m_blocks)
        m_block = cuda.blockIdx.x - head * m_blocks
        tid = cuda.threadIdx.x
        lane, row = tid & 31, m_block * BLOCK_M + tid
        gM, gL = M[head], L[head]

        # halves only where they lose nothing
        q_tiles = quotient(Q_record.shape[1], m_blocks)
        safe, v_amax = verdict(Q_record, K_record, V_record, head, m_block * q_tiles, q_tiles, D, SLACK, lane)
        safe &= Lk >= FEW_KEYS
        if tid == 0:
            unsafe[head, m_block] = not safe
            V_amax[head] = v_amax
        if not safe:
            return

        # m, l
        last_row = first_row + min((m_block + 1) * BLOCK_M, Lq) - 1
        groups = quotient(end_of_row(last_row, Lk) + (GROUP - 1), GROUP)
        m, l = NEG_INF, ZERO
        for g in range(groups):
            m = max(m, gM[g, row])
        base = finite_max(m)
        for g in range(groups):
            l = fma(exp2(gM[g, row] - base), gL[g, row], l)

        # w, lse
        inverse = ONE / l
        for g in range(groups):
            gM[g, row] = exp2(gM[g, row] - base) * inverse
        if row < lse.shape[2]:
            b = quotient(head, H)
            lse[b, head - b * H, row] = fma(m, LN2, fma(m, LN2_REST, log(l)))

    return weights
