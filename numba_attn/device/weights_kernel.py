"""The launch between the two products of an unfused kernel: what each group of keys weighs in each row.

    m = max_g m_g      l = sum_g 2^(m_g - m) l_g      w_g = 2^(m_g - m) / l      lse = m + ln l

A thread has one row, groups follow each other. What a group of keys is, and that its m and l are exponents of 2 and
sums of 2^(S - m), is up to the launch before.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from numba import cuda, float32

from numba_attn.device.mask import Mask
from numba_attn.device.math import LN2, LN2_REST, fma
from numba_attn.device.rescue_kernel import FEW_KEYS
from numba_attn.device.softmax import NEG_INF, ONE, ZERO, exp2, finite_max
from numba_attn.device.split_half import SLACK as SLACKS
from numba_attn.device.split_half import extremes, is_safe


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
        head, m_block = cuda.blockIdx.x // m_blocks, cuda.blockIdx.x % m_blocks
        tid = cuda.threadIdx.x
        lane, row = tid & 31, m_block * BLOCK_M + tid
        rQ, rK, rV, gM, gL = Q_record[head], K_record[head], V_record[head], M[head], L[head]

        # halves only where they lose nothing
        q_tiles = rQ.shape[0] // m_blocks
        q_amax, q_level, _ = extremes(rQ, m_block * q_tiles, (m_block + 1) * q_tiles, lane)
        k_amax, k_level, _ = extremes(rK, 0, rK.shape[0], lane)
        v_amax, _, v_min = extremes(rV, 0, rV.shape[0], lane)
        safe = is_safe(float32(D), q_amax, q_level, k_amax, k_level, v_amax, v_min, SLACK) and Lk >= FEW_KEYS
        if tid == 0:
            unsafe[head, m_block] = 0 if safe else 1
            V_amax[head] = v_amax
        if not safe:
            return

        # m, l
        last_row = first_row + min((m_block + 1) * BLOCK_M, Lq) - 1
        groups = (end_of_row(last_row, Lk) + GROUP - 1) // GROUP
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
            lse[head // H, head % H, row] = fma(m, LN2, fma(m, LN2_REST, log(l)))

    return weights
