"""Several queries per warp, one lane per key: each element of K and V read from shared memory serves them all.

Fourth rung of the ladder. To the third, warp_tile_fp32, it adds rows per warp: ROWS queries share each element of K and
V that a warp reads, and the next slice waits in registers while this one is used. Bound by shared loads and issue slots
together: an element of Q is still broadcast for each FMA of Q K^T, and few warps are there to overlap the two.

Algorithm. For ROWS queries r of a warp, over tiles of 32 keys, lane t having key t of the tile:

    1.  s_rt = scale q_r . k_t                   lane t alone, D walked in slices of 32
    2.  m_new_r = max(m_r, max_t s_rt)           five shuffles
    3.  alpha_r = exp(m_r - m_new_r)             p_rt = exp(s_rt - m_new_r), to shared memory
    4.  l_r = alpha_r l_r + sum_t p_rt           five shuffles
    5.  acc_r = alpha_r acc_r + sum_t p_rt v_t   p_rt of all r by one broadcast a key
    and after the last tile O_r = acc_r / l_r, lse_r = m_r + ln l_r.

Work split. One block per (batch, head, WARPS ROWS query rows); each warp has ROWS rows, all warps share the tiles of
K and V. In step 5 lane t owns VECTOR neighbouring columns of every 32 VECTOR, from VECTOR t on.

Memory. Two slots of each slice, one filled while the other is read, so that a slice costs one barrier: 8 (WARPS ROWS +
32) 36 bytes for Q and K, 8 V_KEYS DV_BUCKET for V; and 128 WARPS ROWS for P. All are read 16 bytes at a time, which
the compiler does where rows start on 16 bytes; rows 36 words apart put the reads of eight successive keys into 32
banks. Registers per lane: ROWS DV_BUCKET / 32 for acc, ROWS for scores.

Numerics. One fp32 FMA chain per score over D and per output over the keys. Against float64, normwise, at D = 1024:
4e-7 on uniform inputs, 1.2e-6 on normal ones. A key that does not count for a query is skipped by its position, never
multiplied with zero.

Limits. Dv up to 1024 (acc in registers), a grid below 2^31 blocks.

Source. Online softmax: Milakov and Gimelshein 2018. Tiles of keys: FlashAttention (Dao et al. 2022), algorithm 1.
Several queries for each read: register blocking as in Volkov and Demmel 2008.
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
BLOCK_D = WARP  # one column a lane when a slice is staged
PAD = 4  # words per row


@dataclass(frozen=True)
class Config:
    warps: int
    rows: int  # of a warp
    v_keys: int  # keys of a slice of V
    dv_bucket: int  # Dv rounded up: what a warp accumulates for each row
    is_causal: bool
    min_blocks: int = 1

    def __post_init__(self):
        if self.dv_bucket % WARP or WARP % self.v_keys or WARP % self.warps:
            raise ValueError(f"{WARP} must divide {self.dv_bucket=}; {self.v_keys=} and {self.warps=} it")
        if self.v_keys * self.dv_bucket % self.threads:
            raise ValueError(f"{self.threads=} do not share {self.v_keys=} rows of {self.dv_bucket=} evenly")

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def block_m(self) -> int:
        return self.warps * self.rows


# Four queries a warp: at Dv = 1024 their 128 accumulators leave an SM room for 8 warps, two a scheduler; below that for
# 16, of which two blocks hide each other's barriers. V takes 16 KB, so that a thread has 8 loads in flight.
WARPS, ROWS, V_WORDS = 8, 4, 2048


def supports(problem: Problem, device: Device) -> str | None:
    if problem.Dv > DV_BUCKETS[-1]:
        return f"keeps Dv in registers, up to {DV_BUCKETS[-1]}: Dv={problem.Dv}"
    blocks = problem.B * problem.H * cdiv(problem.Lq, WARPS * ROWS)
    if blocks > MAX_GRID:
        return f"needs {blocks} blocks, a grid holds {MAX_GRID}"
    return None


def suits(problem: Problem, device: Device) -> str | None:
    return "one key a lane, so each FMA needs a new element of Q: flash_fp32 is over twice as fast"


def _config(Dv: int, is_causal: bool) -> Config:
    bucket = next(bucket for bucket in DV_BUCKETS if bucket >= Dv)
    min_blocks = 1 if bucket == 1024 else 2
    return Config(WARPS, ROWS, min(WARP, V_WORDS // bucket), bucket, is_causal, min_blocks)


def configs():
    for bucket in DV_BUCKETS:
        for is_causal in (False, True):
            yield _config(bucket, is_causal)


def config(problem: Problem, device: Device) -> Config:
    return _config(problem.Dv, problem.is_causal)


def small_config(problem: Problem) -> Config:
    bucket = next(bucket for bucket in DV_BUCKETS if bucket >= problem.Dv)
    return Config(2, 2, 8, bucket, problem.is_causal)


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    grid = problem.B * problem.H * cdiv(problem.Lq, config.block_m)
    args = ("Q", "K", "V", "O", "lse", "scale")
    return (Launch(build, config, args, grid, config.threads, min_blocks=config.min_blocks),)


def build(config: Config):
    WARPS, ROWS, BLOCK_M = config.warps, config.rows, config.block_m
    DV_BUCKET, V_KEYS = config.dv_bucket, config.v_keys
    SELECT = config.is_causal
    end_of_row = Mask(config.is_causal).end  # the first key past a row's last one
    ACC = DV_BUCKET // WARP
    VECTOR = min(4, ACC)
    ROW_STRIDE = BLOCK_D + PAD
    K_LOADS = WARP // WARPS
    V_WIDTH = min(DV_BUCKET, config.threads)  # threads side by side on a row of V
    V_HEIGHT = config.threads // V_WIDTH
    V_DOWN, V_ACROSS = V_KEYS // V_HEIGHT, DV_BUCKET // V_WIDTH
    Q_SLOTS, K_SLOTS, V_SLOTS = 2 * BLOCK_M, 2 * WARP, 2 * V_KEYS  # rows of both slots

    @cuda.jit
    def warp_tile_multi_fp32(Q, K, V, O, lse, scale):
        # who am I: block -> batch, head, BLOCK_M query rows; ROWS rows per warp, one key per lane
        H, Lq, D = Q.shape[1], Q.shape[2], Q.shape[3]
        Lk, Dv = K.shape[2], V.shape[3]
        m_blocks = (Lq + BLOCK_M - 1) // BLOCK_M
        head = cuda.blockIdx.x // m_blocks
        m0 = cuda.blockIdx.x % m_blocks * BLOCK_M
        b, h = head // H, head % H
        # So made, indices are known not to be negative: no test for Python's x[-1] at each access of a shared array.
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        row_in_block = warp * ROWS
        row0 = m0 + row_in_block
        gQ, gK, gV = Q[b, h], K[b, h], V[b, h]
        sQ = cuda.shared.array((Q_SLOTS, ROW_STRIDE), float32, alignment=16)
        sK = cuda.shared.array((K_SLOTS, ROW_STRIDE), float32, alignment=16)
        sP = cuda.shared.array((WARPS, WARP, ROWS), float32, alignment=16)
        sV = cuda.shared.array((V_SLOTS, DV_BUCKET), float32, alignment=16)
        # Elements of the next slice, on their way from global to shared memory.
        q = cuda.local.array(ROWS, float32)
        k = cuda.local.array(K_LOADS, float32)
        v = cuda.local.array((V_DOWN, V_ACROSS), float32)
        s = cuda.local.array(ROWS, float32)
        p = cuda.local.array(ROWS, float32)
        m_new = cuda.local.array(ROWS, float32)
        m = cuda.local.array(ROWS, float32)
        l = cuda.local.array(ROWS, float32)
        acc = cuda.local.array((ROWS, ACC), float32)
        for r in range(ROWS):
            m[r], l[r] = NEG_INF, ZERO
            for i in range(ACC):
                acc[r, i] = ZERO
        n_end = end_of_row(min(m0 + BLOCK_M, Lq) - 1, Lk)
        d_blocks = (uint32(D) + BLOCK_D - 1) // BLOCK_D
        # Unsigned, positions past the end of the longest tensor do not wrap before they are clamped.
        last_row, last_key, last_d, last_dv = uint32(Lq - 1), uint32(n_end - 1), uint32(D - 1), uint32(Dv - 1)

        for n0 in range(0, n_end, WARP):
            # S: lane t sums the whole scores of key n0 + t; slice `step` of D is loaded while the one before is summed
            for r in range(ROWS):
                s[r] = ZERO
            for step in range(d_blocks + 1):  # the first only loads; what the last loads is for nobody
                # Positions are clamped, not tested: loads without a branch are issued together.
                d = uint32(step * BLOCK_D + lane)
                for r in range(ROWS):
                    q[r] = gQ[min(uint32(row0 + r), last_row), min(d, last_d)]
                for i in range(K_LOADS):
                    k[i] = gK[min(uint32(n0 + warp + WARPS * i), last_key), min(d, last_d)]
                filled, used = step & 1, (step + 1) & 1
                if step > 0:
                    for r in range(ROWS):
                        for c in range(BLOCK_D):
                            s[r] += sQ[used * BLOCK_M + row_in_block + r, c] * sK[used * WARP + lane, c]
                for r in range(ROWS):
                    sQ[filled * BLOCK_M + row_in_block + r, lane] = q[r] if d <= last_d else ZERO
                # Past D zeros in K do: where Q's last column is not finite, its row of O is NaN anyway.
                for i in range(K_LOADS):
                    sK[filled * WARP + warp + WARPS * i, lane] = k[i] if d <= last_d else ZERO
                cuda.syncthreads()  # the slice is there for everybody, and everybody is done with the last one

            # online softmax over the 32 lanes, the rows side by side
            for r in range(ROWS):
                s[r] = s[r] * scale if lane < end_of_row(row0 + r, Lk) - n0 else NEG_INF
                m_new[r] = s[r]
            for offset in (16, 8, 4, 2, 1):
                for r in range(ROWS):
                    m_new[r] = max(m_new[r], cuda.shfl_xor_sync(ALL_LANES, m_new[r], offset))
            for r in range(ROWS):
                m_new[r] = max(m[r], m_new[r])
                base = m_new[r] if m_new[r] > NEG_INF else ZERO  # exp(-inf - -inf) is NaN
                p[r] = float32(math.exp(s[r] - base))
                sP[warp, lane, r] = p[r]  # read behind the barrier of the first keys of V
                alpha = float32(math.exp(m[r] - base))
                m[r] = m_new[r]
                l[r] *= alpha
                for i in range(ACC):
                    acc[r, i] *= alpha
            for offset in (16, 8, 4, 2, 1):
                for r in range(ROWS):
                    p[r] += cuda.shfl_xor_sync(ALL_LANES, p[r], offset)
            for r in range(ROWS):
                l[r] += p[r]

            # acc += P V, V_KEYS keys at a time, loaded while those before are used
            n_all = end_of_row(row0, Lk) - n0  # keys of the tile that all rows of the warp attend
            for step in range((min(WARP, n_end - n0) + V_KEYS - 1) // V_KEYS + 1):
                for i in range(V_DOWN):
                    for j in range(V_ACROSS):
                        key = uint32(n0 + step * V_KEYS + tid // V_WIDTH + V_HEIGHT * i)
                        d = uint32(tid % V_WIDTH + V_WIDTH * j)
                        v[i, j] = gV[min(key, last_key), min(d, last_dv)]
                filled, used = step & 1, (step + 1) & 1
                if step > 0:
                    k0 = (step - 1) * V_KEYS
                    for j in range(V_KEYS):
                        key, slot = uint32(k0 + j), uint32(used * V_KEYS + j)
                        if key < n_all:
                            for u in range(0, ACC, VECTOR):
                                for c in range(VECTOR):
                                    for r in range(ROWS):
                                        acc[r, u + c] += sP[warp, key, r] * sV[slot, VECTOR * lane + WARP * u + c]
                    if SELECT:  # keys that later rows of the warp attend, but not all
                        for r in range(1, ROWS):
                            for j in range(max(n_all - k0, 0), min(V_KEYS, end_of_row(row0 + r, Lk) - n0 - k0)):
                                key, slot = uint32(k0 + j), uint32(used * V_KEYS + j)
                                for u in range(0, ACC, VECTOR):
                                    for c in range(VECTOR):
                                        acc[r, u + c] += sP[warp, key, r] * sV[slot, VECTOR * lane + WARP * u + c]
                for i in range(V_DOWN):
                    for j in range(V_ACROSS):
                        sV[filled * V_KEYS + tid // V_WIDTH + V_HEIGHT * i, tid % V_WIDTH + V_WIDTH * j] = v[i, j]
                cuda.syncthreads()  # the keys are there for everybody, and everybody is done with the last ones

        # finish: O = acc / l, lse = m + ln l; a row without keys is 0 and -inf
        for r in range(ROWS):
            row = row0 + r
            if row < Lq:
                inverse = ONE / l[r] if n_end > 0 else ZERO
                for u in range(0, ACC, VECTOR):
                    for c in range(VECTOR):
                        d = uint32(VECTOR * lane + WARP * u + c)
                        if d <= last_dv:
                            O[b, h, row, d] = acc[r, u + c] * inverse
                if lane == 0 and row < lse.shape[2]:
                    lse[b, h, row] = m[r] + float32(math.log(l[r]))

    return warp_tile_multi_fp32


KERNEL = Kernel(
    name="warp_tile_multi_fp32",
    summary="several queries per warp, one lane per key: each element of K and V read serves them all",
    accuracy="fp32",
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
)
