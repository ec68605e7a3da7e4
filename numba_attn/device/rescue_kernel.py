"""The launch that does what halves would not serve: blocks left undone, and rows with few keys.

In a sum of few terms fp32 makes few rounding errors, fewer than halves bring along: under causality the first rows of
each head are done again, by its first blocks, and all rows where there are few keys or columns. A warp takes a
row, 32 keys at a time, of which it loads four; lane t has the columns t + 32 i. Between them O is kept in place, so
that no row is too wide. Keys that do not count are never read, so a NaN or Inf stays where it is.

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
from numba_attn.device.math import add_product, cdiv, fma, product_of, quotient
from numba_attn.device.softmax import (
    ALL_LANES,
    NEG_INF,
    ONE,
    ZERO,
    finite_max,
    of_row,
    warp_max,
    warp_sum,
    warp_two_sum,
)
from numba_attn.device.tile import WARP
from numba_attn.device.verb import verb

FEW_KEYS = 32
KEYS, COLUMNS = 4, 8
"""Of K or V, and of a lane, that are on their way together."""
STEP = WARP * COLUMNS
SMALLER = np.float32(2.0**-32)
"""Times V a sum over all its keys stays finite."""
INF, LARGEST = np.float32(np.inf), np.finfo(np.float32).max

MOST_BLOCKS = 263
"""Of a launch: two for each SM of an H200, and a prime, so that the first blocks of all heads are shared out evenly."""


@dataclass(frozen=True)
class RescueConfig:
    is_causal: bool
    threads: int = 256


@verb
def attend_row(gQ, gK, gV, gO, lse, row, n_end, scale, lane, q, x, s, rest):
    """One row of one head, n_end keys of it, by a warp.

    q, x: a lane's columns of Q or O, and of `KEYS` rows of K or V; s, rest: scores of these, to twice the digits.
    """
    D, Dv = gQ.shape[1], gO.shape[1]
    # O, unnormalised, overflows where V is near the largest number: then once more, of smaller values
    for down in (ONE, SMALLER):
        m, m_rest, l, overflows = NEG_INF, ZERO, ZERO, False
        for col0 in range(0, n_end, WARP):
            n = min(WARP, n_end - col0)
            # lane j: score of key col0 + j
            own, own_rest = NEG_INF, ZERO
            for j in range(0, n, KEYS):
                for k in range(KEYS):
                    s[k], rest[k] = ZERO, ZERO
                for d0 in range(lane, D + lane, STEP):
                    # Read from a place inside, and all before any is used.
                    for i in range(COLUMNS):
                        d = d0 + WARP * i
                        q[i] = gQ[row, min(d, D - 1)]
                        for k in range(KEYS):
                            x[k, i] = gK[col0 + min(j + k, n - 1), min(d, D - 1)]
                    for i in range(COLUMNS):
                        is_there = d0 + WARP * i < D
                        for k in range(KEYS):
                            a, b_k = q[i] if is_there else ZERO, x[k, i] if is_there else ZERO
                            s[k], rest[k] = add_product(s[k], rest[k], a, b_k)
                for k in range(KEYS):
                    total, rest_of_total = warp_two_sum(s[k], rest[k])
                    score = product_of(total, scale)
                    rest_of_score = fma(total, scale, -score) + rest_of_total * scale
                    if lane == j + k and lane < n:
                        own, own_rest = score, rest_of_score if abs(rest_of_score) < INF else ZERO

            # m, l, P: of scores that tie in their first digits the rest decides, one of them will do for m
            m_new = max(m, warp_max(own))
            m_rest_new = m_rest
            if m_new > m:
                m_rest_new = warp_max(own_rest if own == m_new else NEG_INF)
            base = finite_max(m_new)
            alpha = float32(math.exp((m - base) + (m_rest - m_rest_new)))
            p = float32(math.exp((own - base) + (own_rest - m_rest_new))) if lane < n else ZERO
            m, m_rest, l = m_new, m_rest_new, l * alpha + warp_sum(p)

            # O = alpha O + P V, kept in place
            for d0 in range(lane, Dv + lane, STEP):
                for i in range(COLUMNS):
                    d = d0 + WARP * i
                    q[i] = gO[row, d] * alpha if d < Dv and col0 > 0 else ZERO
                for j in range(0, n, KEYS):
                    for k in range(KEYS):
                        s[k] = of_row(p, min(j + k, n - 1))
                        for i in range(COLUMNS):
                            x[k, i] = gV[col0 + min(j + k, n - 1), min(d0 + WARP * i, Dv - 1)]
                    for k in range(KEYS):
                        for i in range(COLUMNS):
                            # Of a key that is not there nothing, not 0 times Inf.
                            q[i] += s[k] * (x[k, i] * down) if j + k < n else ZERO
                for i in range(COLUMNS):
                    d = d0 + WARP * i
                    if d < Dv:
                        gO[row, d] = q[i]
                        overflows |= not abs(q[i]) < INF
        if not cuda.any_sync(ALL_LANES, overflows):
            break

    # finish: O = O / l, lse = m + ln l
    for d in range(lane, Dv, WARP):
        total = gO[row, d] if n_end > 0 else ZERO
        mean = total / l / down if n_end > 0 else ZERO
        # No mean of finite values is infinite; where all scores are -inf, l is 0 and the mean NaN.
        gO[row, d] = max(-LARGEST, min(mean, LARGEST)) if (l > ZERO) & (abs(total) < INF) else mean
    if lane == 0 and row < lse.shape[0]:
        lse[row] = m + (m_rest + math.log(l))


def in_turns(warps: int):
    """The verb `turn(i, n)`: i of 0 .. n - 1, in another order: every second turn of all warps, if whole, is backwards.

    So each warp has a long row with a short one. warps: a power of two.
    """

    @verb
    def turn(i, n):
        return i ^ (warps - 1) if (i & warps) != 0 and (i | (warps - 1)) < n else i

    return turn


def build_rescue(config: RescueConfig):
    """`rescue(Q, K, V, unsafe, O, lse, scale, block_m)`: blocks [head, m_block] where `unsafe` is not 0."""
    WARPS = config.threads // WARP
    IS_CAUSAL, end_of_row = config.is_causal, Mask(config.is_causal).end
    PATCH_SHAPE, SHARING = (KEYS, COLUMNS), cdiv(FEW_KEYS, 2 * WARPS)
    turn = in_turns(WARPS)

    @cuda.jit
    def rescue(Q, K, V, unsafe, O, lse, scale, block_m):
        # who am I: every gridDim-th block of query rows; a warp takes every WARPS-th row of it
        H, Lq, Lk, (heads, m_blocks) = Q.shape[1], Q.shape[2], K.shape[2], unsafe.shape
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        sharing, few_keys = min(SHARING, m_blocks), min(FEW_KEYS, Lq) if IS_CAUSAL else 0
        q = cuda.local.array(COLUMNS, float32)
        x = cuda.local.array(PATCH_SHAPE, float32)  # of K or V
        s = cuda.local.array(KEYS, float32)
        rest = cuda.local.array(KEYS, float32)
        blocks, step = heads * m_blocks, cuda.gridDim.x

        for first in range(cuda.blockIdx.x, blocks, WARP * step):
            # of the next 32 blocks those left undone: a lane looks at one
            own = min(first + lane * step, blocks - 1)
            own_head = quotient(own, m_blocks)
            left_undone = cuda.ballot_sync(ALL_LANES, unsafe[own_head, own - own_head * m_blocks] != 0)
            for i in range(min(WARP, quotient(blocks - first + step - 1, step))):
                block = first + i * step
                head = quotient(block, m_blocks)
                m_block = block - head * m_blocks
                n_own, few_end = 0, 0
                if left_undone >> i & 1:
                    n_own = min(block_m, Lq - m_block * block_m)
                if IS_CAUSAL and m_block < SHARING:
                    # Rows with few keys, where their block leaves them: two for each warp of the first blocks.
                    few_end = few_keys if unsafe[head, 0] == 0 else 0
                few = quotient(few_end - m_block + sharing - 1, sharing) if few_end > m_block else 0
                b = quotient(head, H)
                h = head - b * H
                for i_row in range(warp, n_own + few, WARPS):
                    row = m_block * block_m + i_row
                    if i_row >= n_own:
                        row = m_block + turn(i_row - n_own, few) * sharing
                    n_end = end_of_row(row, Lk)
                    attend_row(Q[b, h], K[b, h], V[b, h], O[b, h], lse[b, h], row, n_end, scale, lane, q, x, s, rest)

    return rescue
