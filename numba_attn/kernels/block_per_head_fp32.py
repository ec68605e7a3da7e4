"""One block per head: online softmax with scores, probabilities and O in shared memory.

First rung of the ladder, where it starts from: the tiled algorithm with all that outlives a step in shared memory,
and single sums in registers. Bound by shared memory: two loads of it per FMA of Q K^T, one per FMA of P V.

Algorithm. For each group of WARPS queries, over tiles of 16 keys:

    1.  S = scale Q K^T                          [WARPS, 16], D walked in slices of BLOCK_D
    2.  m_new = max(m, max_k S_k)   alpha = exp(m - m_new)   P = exp(S - m_new)
    3.  l = alpha l + sum_k P_k
    4.  O = alpha O + P V                        Dv walked in slices of BLOCK_D
    and after the last tile O = O / l, lse = m + ln l.

Work split. One block per (batch, head), which walks all groups of queries: K and V of a head come from memory once,
and from L2 after that as long as the heads under way fit it. Each warp has one query of a group. In step 1 lanes t
and t + 16 share key t of the tile and sum half of a slice each; one shuffle joins them. In step 4 lane t owns the
columns t + 32 i of a slice.

Memory. O of a group, 4 WARPS Dv bytes of dynamic shared memory, Dv rounded up to slices. Static: slices of Q and K,
with rows BLOCK_D + 2 words apart and one word between the halves, so that the lanes of step 1 read 32 banks; slices
of V; S, then P in its place; m and l. Q too is read again in every tile of keys: only a slice of it is kept.

Numerics. Per score two fp32 FMA chains over the halves of all slices; per output one chain over the keys. Against
float64, normwise, at D = 1024: 4e-7 on uniform inputs, 1e-6 on normal ones. A key that does not count is skipped by
its position, never multiplied with zero.

Limits. The shared memory of O: Dv up to some 6900 with 227 KB. A grid below 2^31 blocks.

Source. Online softmax: Milakov and Gimelshein 2018. Tiles of keys: FlashAttention (Dao et al. 2022), algorithm 1,
with its loops exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import cuda, float32, int32, uint32

from numba_attn.device.mask import Mask
from numba_attn.device.math import cdiv
from numba_attn.device.softmax import ALL_LANES, NEG_INF, ONE, ZERO
from numba_attn.device.tile import WARP
from numba_attn.kernel import Kernel, Launch
from numba_attn.problem import ITEM_BYTES, MAX_GRID, Device, Problem

BLOCK_N = WARP // 2  # two lanes a key


@dataclass(frozen=True)
class Config:
    warps: int
    block_d: int
    is_causal: bool
    min_blocks: int = 1

    def __post_init__(self):
        if self.block_d % WARP or BLOCK_N % self.warps:
            raise ValueError(f"{WARP} must divide {self.block_d=}, and {self.warps=} {BLOCK_N}")

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def static_smem_bytes(self) -> int:
        """Slices of Q, K and V, P, m and l."""
        words = (self.warps + BLOCK_N) * (self.block_d + 2) + BLOCK_N * self.block_d + self.warps * (BLOCK_N + 2)
        return ITEM_BYTES * words

    def smem_bytes(self, Dv: int) -> int:
        """O of one group."""
        return ITEM_BYTES * self.warps * self.block_d * cdiv(Dv, self.block_d)


# Four blocks an SM, at Dv = 1024 too: one computes while others wait at their barriers.
WARPS, BLOCK_D, MIN_BLOCKS = 8, 64, 4


def supports(problem: Problem, device: Device) -> str | None:
    chosen = config(problem, device)
    needed = chosen.static_smem_bytes + chosen.smem_bytes(problem.Dv)
    if needed > device.smem_per_block_bytes:
        has = device.smem_per_block_bytes
        return f"keeps O in shared memory: {needed} bytes for Dv={problem.Dv}, a block has {has}"
    blocks = problem.B * problem.H
    if blocks > MAX_GRID:
        return f"needs {blocks} blocks, a grid holds {MAX_GRID}"
    return None


def suits(problem: Problem, device: Device) -> str | None:
    return "one block a head, everything through shared memory: flash_fp32 is several times faster"


def _config(is_causal: bool) -> Config:
    return Config(WARPS, BLOCK_D, is_causal, MIN_BLOCKS)


def configs():
    yield _config(False)
    yield _config(True)


def config(problem: Problem, device: Device) -> Config:
    return _config(problem.is_causal)


def small_config(problem: Problem) -> Config:
    return Config(2, WARP, problem.is_causal)


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    grid = problem.B * problem.H
    args = ("Q", "K", "V", "O", "lse", "scale")
    smem_bytes = config.smem_bytes(problem.Dv)
    return (Launch(build, config, args, grid, config.threads, smem_bytes, min_blocks=config.min_blocks),)


def build(config: Config):
    WARPS, BLOCK_D = config.warps, config.block_d
    end_of_row = Mask(config.is_causal).end  # the first key past a row's last one
    HALF, ROW_STRIDE = BLOCK_D // 2, BLOCK_D + 2
    COLUMNS, K_LOADS = BLOCK_D // WARP, BLOCK_N // WARPS

    @cuda.jit
    def block_per_head_fp32(Q, K, V, O, lse, scale):
        # who am I: block -> batch, head; one query of each group per warp
        H, Lq, D = Q.shape[1], Q.shape[2], Q.shape[3]
        Lk, Dv = K.shape[2], V.shape[3]
        b, h = cuda.blockIdx.x // H, cuda.blockIdx.x % H
        tid = cuda.threadIdx.x
        # So made, indices are known not to be negative: no test for Python's x[-1] at each access of a shared array.
        warp, lane = tid >> 5, tid & 31
        key, half = lane & 15, lane >> 4  # of step 1: a key of the tile, half of its slice
        gQ, gK, gV = Q[b, h], K[b, h], V[b, h]
        sQ = cuda.shared.array((WARPS, ROW_STRIDE), float32)
        sK = cuda.shared.array((BLOCK_N, ROW_STRIDE), float32)
        sV = cuda.shared.array((BLOCK_N, BLOCK_D), float32)
        sP = cuda.shared.array((WARPS, BLOCK_N), float32)
        sM = cuda.shared.array(WARPS, float32)
        sL = cuda.shared.array(WARPS, float32)
        sO = cuda.shared.array(0, float32)  # [WARPS, all slices of Dv]: only the lane that owns a column touches it
        o_columns = (Dv + BLOCK_D - 1) // BLOCK_D * BLOCK_D
        o0 = warp * o_columns + lane
        p = cuda.local.array(BLOCK_N, float32)
        o = cuda.local.array(COLUMNS, float32)

        for m0 in range(0, Lq, WARPS):
            row = m0 + warp
            own_row = min(row, Lq - 1)  # a warp past the last row repeats it and stores nothing
            n_end = end_of_row(min(m0 + WARPS, Lq) - 1, Lk)
            cuda.syncwarp()  # all lanes have read the last group's m and l
            if lane == 0:
                sM[warp] = NEG_INF
                sL[warp] = ZERO
            for d in range(0, o_columns, WARP):
                sO[uint32(o0 + d)] = ZERO

            for n0 in range(0, n_end, BLOCK_N):
                # S: half the columns of key n0 + key, slice by slice of D
                s = ZERO
                for d0 in range(0, D, BLOCK_D):
                    cuda.syncthreads()  # everybody is done with the last slice
                    for i in range(COLUMNS):
                        d = lane + WARP * i
                        inside = d0 + d < D
                        at = d + d // HALF  # a word between the halves
                        sQ[warp, at] = gQ[own_row, d0 + d] if inside else ZERO
                        for r in range(K_LOADS):
                            k = warp + WARPS * r
                            sK[k, at] = gK[n0 + k, d0 + d] if inside & (n0 + k < n_end) else ZERO
                    cuda.syncthreads()  # the slice is there for everybody
                    for i in range(HALF):
                        at = uint32(half * (HALF + 1) + i)  # an unsigned index is not tested for wrap-around
                        s += sQ[warp, at] * sK[key, at]
                s += cuda.shfl_xor_sync(ALL_LANES, s, 16)

                # online softmax: S, then P, for the whole warp to read
                # Of the tile, 0 or less if the row ends before it; in 32 bits, else Numba carries 64.
                n_keys = int32(min(BLOCK_N, end_of_row(own_row, Lk) - n0))
                s = s * scale if key < n_keys else NEG_INF
                if half == 0:
                    sP[warp, key] = s
                cuda.syncwarp()  # the scores are there
                m_old = sM[warp]
                m = m_old
                for k in range(BLOCK_N):
                    m = max(m, sP[warp, uint32(k)])
                base = m if m > NEG_INF else ZERO  # exp(-inf - -inf) is NaN
                alpha = float32(math.exp(m_old - base))
                cuda.syncwarp()  # all lanes have read the scores and m
                if half == 0:
                    sP[warp, key] = float32(math.exp(s - base))
                cuda.syncwarp()  # the probabilities are there
                total = ZERO
                for k in range(BLOCK_N):
                    p[k] = sP[warp, uint32(k)]
                    total += p[k]
                if lane == 0:
                    sM[warp] = m
                    sL[warp] = sL[warp] * alpha + total

                # O = alpha O + P V, slice by slice of Dv; a warp stops at its last key, so no other is ever read
                for d0 in range(0, Dv, BLOCK_D):
                    cuda.syncthreads()  # everybody is done with the last slice
                    for i in range(COLUMNS):
                        d = lane + WARP * i
                        for r in range(K_LOADS):
                            k = warp + WARPS * r
                            sV[k, d] = gV[n0 + k, d0 + d] if (d0 + d < Dv) & (n0 + k < n_end) else ZERO
                    cuda.syncthreads()  # the slice is there for everybody
                    for i in range(COLUMNS):
                        o[i] = sO[uint32(o0 + d0 + WARP * i)] * alpha
                    for k in range(BLOCK_N):
                        if int32(k) < n_keys:
                            for i in range(COLUMNS):
                                o[i] += p[k] * sV[uint32(k), lane + WARP * i]
                    for i in range(COLUMNS):
                        sO[uint32(o0 + d0 + WARP * i)] = o[i]

            # finish: O = acc / l, lse = m + ln l; a row without keys is 0 and -inf
            cuda.syncwarp()  # m and l are there
            if row < Lq:
                m, l = sM[warp], sL[warp]
                inverse = ONE / l if n_end > 0 else ZERO
                for d in range(0, Dv, WARP):
                    if lane + d < Dv:
                        O[b, h, row, lane + d] = sO[uint32(o0 + d)] * inverse
                if lane == 0 and row < lse.shape[2]:
                    lse[b, h, row] = m + float32(math.log(l))

    return block_per_head_fp32


KERNEL = Kernel(
    name="block_per_head_fp32",
    summary="one block per head: online softmax with scores, probabilities and O in shared memory",
    accuracy="fp32",
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
)
