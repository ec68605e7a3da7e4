"""One warp per query, one lane per key: online softmax with shuffles and shared tiles.

Third rung of the ladder. To the second, warp_streaming_fp32, it adds tiles in shared memory and a key per lane: the
lanes sum 32 scores side by side, so that 32 keys take 42 shuffles, not 160. Bound by shared loads: an element of Q and
one of K for each FMA of Q K^T, one of V for each of P V.

Algorithm. For each query, over tiles of 32 keys, lane t having key t of the tile:

    1.  s_t = scale q . k_t                      lane t alone, D walked in slices of BLOCK_D
    2.  m_new = max(m, max_t s_t)                five shuffles
    3.  alpha = exp(m - m_new)   p_t = exp(s_t - m_new)
    4.  l = alpha l + sum_t p_t                  five shuffles
    5.  acc = alpha acc + sum_t p_t v_t          p_t broadcast from lane t's register, one shuffle a key
    and after the last tile O = acc / l, lse = m + ln l.

Work split. One block per (batch, head, WARPS query rows); each warp has one row, all warps share the tiles of K and
V. In step 5 lane t owns the columns t + 32 i of O.

Memory. Slices staged in shared memory: 4 (WARPS + 32) (BLOCK_D + 4) bytes for Q and K, 4 V_KEYS DV_BUCKET for V; Q
again in every tile of keys. Q and K are read 16 bytes at a time, which the compiler does where rows start on 16
bytes; a row stride of 4 words times an odd number puts the reads of eight successive keys into 32 banks. acc:
DV_BUCKET / 32 registers per lane.

Numerics. One fp32 FMA chain per score over D and per output over the keys. Against float64, normwise, at D = 1024:
4e-7 on uniform inputs, 1.2e-6 on normal ones. A key that does not count is skipped by its position, never multiplied
with zero.

Limits. Dv up to 1024 (acc in registers), a grid below 2^31 blocks.

Source. Online softmax: Milakov and Gimelshein 2018. Tiles of keys: FlashAttention (Dao et al. 2022), algorithm 1, with
one lane per key of a block of 32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import cuda, float32, uint32

from numba_attn.device.mask import Mask
from numba_attn.device.math import cdiv
from numba_attn.device.softmax import ALL_LANES, NEG_INF, ONE, ZERO
from numba_attn.device.tile import WARP
from numba_attn.kernel import Kernel, Launch
from numba_attn.problem import MAX_GRID, Device, Problem

DV_BUCKETS = (32, 64, 128, 256, 512, 1024)
PAD = 4  # words per row


@dataclass(frozen=True)
class Config:
    warps: int
    block_d: int  # columns of a slice of Q and K
    v_keys: int  # keys of a slice of V
    dv_bucket: int  # Dv rounded up: what a warp accumulates
    is_causal: bool
    min_blocks: int = 1

    def __post_init__(self):
        if self.dv_bucket % WARP or self.block_d % WARP or WARP % self.v_keys or WARP % self.warps:
            raise ValueError(
                f"{WARP} must divide {self.dv_bucket=} and {self.block_d=}; {self.v_keys=} and {self.warps=} it"
            )
        if self.v_keys * self.dv_bucket % self.threads:
            raise ValueError(f"{self.threads=} do not share {self.v_keys=} rows of {self.dv_bucket=} evenly")

    @property
    def threads(self) -> int:
        return WARP * self.warps


# 16 warps share each tile, and two such blocks an SM: one computes while the other waits for a tile. V takes at most
# 32 KB of the 48 KB of static shared memory.
WARPS, MIN_BLOCKS, BLOCK_D, V_WORDS = 16, 2, 32, 8192


def supports(problem: Problem, device: Device) -> str | None:
    if problem.Dv > DV_BUCKETS[-1]:
        return f"keeps Dv in registers, up to {DV_BUCKETS[-1]}: Dv={problem.Dv}"
    blocks = problem.B * problem.H * cdiv(problem.Lq, WARPS)
    if blocks > MAX_GRID:
        return f"needs {blocks} blocks, a grid holds {MAX_GRID}"
    return None


def suits(problem: Problem, device: Device) -> str | None:
    return "one or two elements from shared memory per FMA: flash_fp32 is four times faster"


def dv_bucket(Dv: int) -> int:
    return next(bucket for bucket in DV_BUCKETS if bucket >= Dv)


def _config(bucket: int, is_causal: bool) -> Config:
    return Config(WARPS, BLOCK_D, min(WARP, V_WORDS // bucket), bucket, is_causal, MIN_BLOCKS)


def configs():
    for bucket in DV_BUCKETS:
        for is_causal in (False, True):
            yield _config(bucket, is_causal)


def config(problem: Problem, device: Device) -> Config:
    return _config(dv_bucket(problem.Dv), problem.is_causal)


def small_config(problem: Problem) -> Config:
    return Config(2, WARP, 8, dv_bucket(problem.Dv), problem.is_causal)


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    grid = problem.B * problem.H * cdiv(problem.Lq, config.warps)
    args = ("Q", "K", "V", "O", "lse", "scale")
    return (Launch(build, config, args, grid, config.threads, min_blocks=config.min_blocks),)


def build(config: Config):
    WARPS, BLOCK_D = config.warps, config.block_d
    end_of_row = Mask(config.is_causal).end  # the first key past a row's last one
    DV_BUCKET, V_KEYS = config.dv_bucket, config.v_keys
    ROW_STRIDE = BLOCK_D + PAD
    ACC = DV_BUCKET // WARP
    V_WIDTH = min(DV_BUCKET, config.threads)  # threads side by side on a row of V
    V_HEIGHT = config.threads // V_WIDTH

    @cuda.jit
    def warp_tile_fp32(Q, K, V, O, lse, scale):
        # who am I: block -> batch, head, WARPS query rows; one row per warp, one key per lane
        H, Lq, D = Q.shape[1], Q.shape[2], Q.shape[3]
        Lk, Dv = K.shape[2], V.shape[3]
        m_blocks = (Lq + WARPS - 1) // WARPS
        head = cuda.blockIdx.x // m_blocks
        m0 = cuda.blockIdx.x % m_blocks * WARPS
        b, h = head // H, head % H
        # So made, indices are known not to be negative: no test for Python's x[-1] at each access of a shared array.
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        row = m0 + warp
        gQ, gK, gV = Q[b, h], K[b, h], V[b, h]
        sQ = cuda.shared.array((WARPS, ROW_STRIDE), float32, alignment=16)
        sK = cuda.shared.array((WARP, ROW_STRIDE), float32, alignment=16)
        sV = cuda.shared.array((V_KEYS, DV_BUCKET), float32)
        acc = cuda.local.array(ACC, float32)
        for i in range(ACC):
            acc[i] = ZERO
        m, l = NEG_INF, ZERO
        n_end = end_of_row(min(m0 + WARPS, Lq) - 1, Lk)
        # Unsigned, positions past the end of the longest tensor do not wrap before they are clamped.
        last_row, last_key, last_d, last_dv = uint32(Lq - 1), uint32(n_end - 1), uint32(D - 1), uint32(Dv - 1)

        for n0 in range(0, n_end, WARP):
            # S: lane t sums the whole score of key n0 + t, slice by slice of D
            s = ZERO
            for d0 in range(0, D, BLOCK_D):
                cuda.syncthreads()  # everybody is done with the last slice
                for c0 in range(0, BLOCK_D, WARP):
                    # Positions are clamped, not tested: loads without a branch are issued together.
                    c = c0 + lane
                    d = uint32(d0 + c)
                    q = gQ[min(uint32(row), last_row), min(d, last_d)]
                    sQ[warp, c] = q if d <= last_d else ZERO
                    # Past D zeros in K do: where Q's last column is not finite, its row of O is NaN anyway.
                    for i in range(0, WARP, WARPS):
                        k = gK[min(uint32(n0 + warp + i), last_key), min(d, last_d)]
                        sK[warp + i, c] = k if d <= last_d else ZERO
                cuda.syncthreads()  # the slice is there for everybody
                for c in range(BLOCK_D):
                    s += sQ[warp, c] * sK[lane, c]

            # online softmax over the 32 lanes
            n_keys = min(WARP, end_of_row(row, Lk) - n0)
            s = s * scale if lane < n_keys else NEG_INF
            m_new = s
            for offset in (16, 8, 4, 2, 1):
                m_new = max(m_new, cuda.shfl_xor_sync(ALL_LANES, m_new, offset))
            m_new = max(m, m_new)
            base = m_new if m_new > NEG_INF else ZERO  # exp(-inf - -inf) is NaN
            p = float32(math.exp(s - base))
            alpha = float32(math.exp(m - base))
            total = p
            for offset in (16, 8, 4, 2, 1):
                total += cuda.shfl_xor_sync(ALL_LANES, total, offset)
            m = m_new
            l = l * alpha + total

            # acc = alpha acc + P V, V_KEYS keys at a time; a warp stops at its last key, so no other is ever read
            for i in range(ACC):
                acc[i] *= alpha
            for k0 in range(0, min(WARP, n_end - n0), V_KEYS):
                cuda.syncthreads()  # everybody is done with the last keys
                for i in range(0, V_KEYS, V_HEIGHT):
                    for j in range(0, DV_BUCKET, V_WIDTH):
                        k, d = tid // V_WIDTH + i, tid % V_WIDTH + j
                        sV[k, d] = gV[min(uint32(n0 + k0 + k), last_key), min(uint32(d), last_dv)]
                cuda.syncthreads()  # the keys are there for everybody
                for k in range(V_KEYS):
                    if k0 + k < n_keys:
                        p_k = cuda.shfl_sync(ALL_LANES, p, k0 + k)
                        for i in range(ACC):
                            acc[i] += p_k * sV[uint32(k), lane + WARP * i]

        # finish: O = acc / l, lse = m + ln l; a row without keys is 0 and -inf
        if row < Lq:
            inverse = ONE / l if n_end > 0 else ZERO
            for i in range(ACC):
                if lane + WARP * i < Dv:
                    O[b, h, row, lane + WARP * i] = acc[i] * inverse
            if lane == 0 and row < lse.shape[2]:
                lse[b, h, row] = m + float32(math.log(l))

    return warp_tile_fp32


KERNEL = Kernel(
    name="warp_tile_fp32",
    summary="one warp per query, one lane per key: online softmax with shuffles and shared tiles",
    accuracy="fp32",
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
)
