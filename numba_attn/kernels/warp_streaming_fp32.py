"""One warp per query, one key at a time: online softmax in registers, no shared memory and no barrier.

Second rung of the ladder. To the first, block_per_head_fp32, it adds registers and shuffles: Q and acc never leave
the lanes, a score crosses them, and no warp waits for another. What the rows of a block share, they share through the
L1 cache. Bound by issue slots: for each FMA one load from L1 and two additions for its address.

Algorithm. For each query, over its keys:

    1.  s = scale q . k                          each lane its own columns, then five shuffles
    2.  if s > m:  alpha = exp(m - s)   l = alpha l   acc = alpha acc   m = s
    3.  p = exp(s - m)   l = l + p   acc = acc + p v
    and after the last key O = acc / l, lse = m + ln l.

m grows about ln Lk times where keys come in no order, so that step 2 costs next to nothing. v is loaded before the
shuffles of step 1 and arrives under them.

Work split. One block per (batch, head, WARPS query rows), one row a warp. All warps walk the same keys: the first one
to ask brings a row of K or V into L1 for the others. Lane t owns the columns t + 32 i of Q, K, V and O.

Memory. Registers of a lane: bucket / 32 each for q, acc and the row of K or V that is under way; the bucket covers
both D and Dv. Columns come in batches of 32 BATCH: those inside the row without a test, the others one predicate a
load.

Numerics. Per score two fp32 FMA chains over the lane's columns, then a tree over the lanes; per output one chain over
the keys. Against float64, normwise, at D = 1024: 4e-7 on uniform inputs, 6e-7 on normal ones. A key that does not
count is never read.

Limits. D and Dv up to 1024 (q and acc in registers), a grid below 2^31 blocks.

Source. Online softmax: Milakov and Gimelshein 2018, algorithm 3, with sums of p v beside those of p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import cuda, float32

from numba_attn.device.mask import Mask
from numba_attn.device.math import cdiv
from numba_attn.device.softmax import ALL_LANES, NEG_INF, ONE, ZERO
from numba_attn.device.tile import WARP
from numba_attn.device.verb import verb
from numba_attn.kernel import Kernel, Launch
from numba_attn.problem import MAX_GRID, Device, Problem

MIN_BLOCKS = {64: 3, 128: 3, 256: 2, 512: 1, 1024: 1}
"""Blocks that an SM holds, by bucket of D and Dv: as many as leave a lane the registers for q, acc and a row."""

BUCKETS = tuple(MIN_BLOCKS)


@dataclass(frozen=True)
class Config:
    warps: int
    bucket: int  # D and Dv rounded up
    batch: int  # columns of a lane that are loaded without a test in between
    is_causal: bool
    min_blocks: int = 1

    def __post_init__(self):
        if self.bucket % (2 * WARP) or self.bucket // WARP % self.batch:
            raise ValueError(f"{self.bucket=} is no even number of columns a lane, in batches of {self.batch=}")

    @property
    def threads(self) -> int:
        return WARP * self.warps


# 16 rows share each row of K and V through L1, and 512 threads an SM leave 128 registers a lane: 64 for q and acc.
WARPS, BATCH = 16, 16


def supports(problem: Problem, device: Device) -> str | None:
    if max(problem.D, problem.Dv) > BUCKETS[-1]:
        return f"keeps Q and O in registers, head dims up to {BUCKETS[-1]}: D={problem.D} Dv={problem.Dv}"
    blocks = problem.B * problem.H * cdiv(problem.Lq, WARPS)
    if blocks > MAX_GRID:
        return f"needs {blocks} blocks, a grid holds {MAX_GRID}"
    return None


def suits(problem: Problem, device: Device) -> str | None:
    return "one load from L1 per FMA: flash_fp32 is several times faster"


def bucket(problem: Problem) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= max(problem.D, problem.Dv))


def _config(bucket: int, is_causal: bool) -> Config:
    return Config(WARPS, bucket, min(BATCH, bucket // WARP), is_causal, MIN_BLOCKS[bucket])


def configs():
    for bucket in BUCKETS:
        for is_causal in (False, True):
            yield _config(bucket, is_causal)


def config(problem: Problem, device: Device) -> Config:
    return _config(bucket(problem), problem.is_causal)


def small_config(problem: Problem) -> Config:
    return Config(2, bucket(problem), 1, problem.is_causal)


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    grid = problem.B * problem.H * cdiv(problem.Lq, config.warps)
    args = ("Q", "K", "V", "O", "lse", "scale")
    return (Launch(build, config, args, grid, config.threads, min_blocks=config.min_blocks),)


def build(config: Config):
    WARPS, BATCH = config.warps, config.batch
    COLUMNS = config.bucket // WARP
    end_of_row = Mask(config.is_causal).end  # the first key past a row's last one

    @verb
    def load_columns(x, gX, row, D, lane):
        """x[i] = gX[row, lane + 32 i], 0 past D; by whole warps."""
        # A shuffle hides that this is `lane`: column offsets, hoisted out of the key loop, would fill the registers.
        first = cuda.shfl_sync(ALL_LANES, lane, lane) & 31
        for i0 in range(0, COLUMNS, BATCH):
            if WARP * (i0 + BATCH) <= D:
                for i in range(i0, i0 + BATCH):
                    x[i] = gX[row, first + WARP * i]
            else:
                for i in range(i0, i0 + BATCH):
                    x[i] = gX[row, first + WARP * i] if first + WARP * i < D else ZERO

    @cuda.jit
    def warp_streaming_fp32(Q, K, V, O, lse, scale):
        # who am I: block -> batch, head, WARPS query rows; one row per warp, columns lane + 32 i per lane
        H, Lq, D = Q.shape[1], Q.shape[2], Q.shape[3]
        Lk, Dv = K.shape[2], V.shape[3]
        m_blocks = (Lq + WARPS - 1) // WARPS
        head = cuda.blockIdx.x // m_blocks
        b, h = head // H, head % H
        tid = cuda.threadIdx.x
        # Shift and mask: // and % would mind negative numbers, as Python's do, and // take 64 bits.
        lane = tid & 31
        row = cuda.blockIdx.x % m_blocks * WARPS + (tid >> 5)
        own_row = min(row, Lq - 1)  # a warp past the last row repeats it and stores nothing
        gQ, gK, gV = Q[b, h], K[b, h], V[b, h]
        q = cuda.local.array(COLUMNS, float32)
        k = cuda.local.array(COLUMNS, float32)
        v = cuda.local.array(COLUMNS, float32)
        acc = cuda.local.array(COLUMNS, float32)
        load_columns(q, gQ, own_row, D, lane)
        for i in range(COLUMNS):
            acc[i] = ZERO
        m, l = NEG_INF, ZERO
        n_end = end_of_row(own_row, Lk)

        for n in range(n_end):
            # s = scale q . k: the lane's columns in two chains; v travels while the lanes add up
            load_columns(k, gK, n, D, lane)
            s, s_odd = ZERO, ZERO
            for i in range(0, COLUMNS, 2):
                s += q[i] * k[i]
                s_odd += q[i + 1] * k[i + 1]
            load_columns(v, gV, n, Dv, lane)
            s += s_odd
            for offset in (16, 8, 4, 2, 1):
                s += cuda.shfl_xor_sync(ALL_LANES, s, offset)
            s *= scale

            # online softmax: all lanes have the same s, so a warp takes the branch as one
            if s > m:
                alpha = float32(math.exp(m - s))
                m = s
                l *= alpha
                for i in range(COLUMNS):
                    acc[i] *= alpha
            p = float32(math.exp(s - (m if m > NEG_INF else ZERO)))  # exp(-inf - -inf) is NaN
            l += p
            for i in range(COLUMNS):
                acc[i] += p * v[i]

        # finish: O = acc / l, lse = m + ln l; a row without keys is 0 and -inf
        if row < Lq:
            inverse = ONE / l if n_end > 0 else ZERO
            for i in range(COLUMNS):
                if lane + WARP * i < Dv:
                    O[b, h, row, lane + WARP * i] = acc[i] * inverse
            if lane == 0 and row < lse.shape[2]:
                lse[b, h, row] = m + float32(math.log(l))

    return warp_streaming_fp32


KERNEL = Kernel(
    name="warp_streaming_fp32",
    summary="one warp per query, one key at a time: Q and O in registers, shuffles and no barrier",
    accuracy="fp32",
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
)
