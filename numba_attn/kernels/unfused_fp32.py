"""Two products by the caller's library with the softmax between them: what fusion is measured against.

Sixth rung of the ladder. To the others it adds S in memory: the fused kernels never write it. Here it is written twice
and read three times or more, and O is written twice, but the products are as fast as the library's. Bound by those two
products.

Algorithm. In rounds of four launches, each with so many rows of S that these stay below a bound:

    1.  S = Q K^T                    a batched product of torch or CuPy
    2.  m = rowmax (scale S)         P = exp(scale S - m) in place, 0 where the key does not count
        l = rowsum P                 lse = m + ln l
    3.  O = P V                      as 1
    4.  O = O / l                    under causality, what is NaN is first summed again over the keys that count

Work split. A round has several heads of one batch index (where B is larger, one head of several), or, if the S of one
head alone passes the bound, some rows of it. In steps 2 and 4 a block has one row, a thread every THREADS-th key or
column.

Memory. S and l: at most WORKSPACE_BYTES of workspace. The library may copy operands whose strides its product does not
take. Shared: 8 WARPS bytes, a maximum and a sum per warp.

Numerics. The products sum in fp32 in the library's order, with TF32 off whatever its flags say; the order may depend on
strides and shape. Dividing O, not P, by l saves a rounding of each P, and small V their digits. Step 4 sums again
because 0 times NaN and 0 times Inf are NaN: they would else reach the rows that do not attend them.

Limits. torch or CuPy arrays; one row of S within the bound, and no more than MOST_ROUNDS rounds.

Source. The definition; safe softmax as in Milakov and Gimelshein 2018, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import cuda, float32

from numba_attn.device.mask import Mask
from numba_attn.device.math import cdiv, fma
from numba_attn.device.softmax import NEG_INF, ZERO, finite_max, log_sum_exp, reciprocal, warp_max, warp_sum
from numba_attn.device.tile import WARP
from numba_attn.kernel import Kernel, Launch, Matmul, Part, Workspace
from numba_attn.problem import ITEM_BYTES, Device, Problem


@dataclass(frozen=True)
class Config:
    warps: int  # that share a row
    workspace_bytes: int
    is_causal: bool

    @property
    def threads(self) -> int:
        return WARP * self.warps


WARPS, WORKSPACE_BYTES = 4, 512 * 10**6
MOST_ROUNDS = 4096  # of four launches each: beyond, the host's time and memory are what counts


def supports(problem: Problem, device: Device) -> str | None:
    if (row_bytes := ITEM_BYTES * (problem.Lk + 1)) > WORKSPACE_BYTES:
        return f"needs {row_bytes} bytes of workspace for one row, more than {WORKSPACE_BYTES}"
    if 0 in (problem.B, problem.H, problem.Lq):
        return None  # no row to share out
    heads, rows = heads_and_rows(problem, WORKSPACE_BYTES)
    outer, inner = sorted((problem.B, problem.H))
    rounds = outer * cdiv(inner, heads) * cdiv(problem.Lq, rows)
    if rounds > MOST_ROUNDS:
        return f"needs {rounds} rounds of up to {WORKSPACE_BYTES} bytes of workspace, more than {MOST_ROUNDS}"
    return None


def suits(problem: Problem, device: Device) -> str | None:
    return "the yardstick for what fusion buys: it writes and reads all scores"


def configs():
    for is_causal in (False, True):
        yield Config(WARPS, WORKSPACE_BYTES, is_causal)


def config(problem: Problem, device: Device) -> Config:
    return Config(WARPS, WORKSPACE_BYTES, problem.is_causal)


def small_config(problem: Problem) -> Config:
    return Config(2, ITEM_BYTES * max(400, problem.Lk + 1), problem.is_causal)


def heads_and_rows(problem: Problem, workspace_bytes: int) -> tuple[int, int]:
    """Those of a round: whole heads if one is within the bound; all rounds of about the same size."""
    rows = workspace_bytes // (ITEM_BYTES * (problem.Lk + 1))
    if rows < problem.Lq:
        return 1, cdiv(problem.Lq, cdiv(problem.Lq, rows))
    inner = max(problem.B, problem.H)
    return cdiv(inner, cdiv(inner, rows // problem.Lq)), problem.Lq


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    sizes = heads_and_rows(problem, config.workspace_bytes)
    return {"S": Workspace((*sizes, problem.Lk)), "l": Workspace(sizes)}


def launches(problem: Problem, config: Config) -> tuple[Launch | Matmul, ...]:
    heads, rows = heads_and_rows(problem, config.workspace_bytes)
    outer, inner = sorted((problem.B, problem.H))
    steps = []
    for i in range(outer):
        for j in range(0, inner, heads):
            some = slice(j, min(j + heads, inner))
            bh = (i, some) if problem.B == outer else (some, i)
            for row0 in range(0, problem.Lq, rows):
                steps += steps_of_round(config, bh, some.stop - j, row0, min(row0 + rows, problem.Lq))
    return tuple(steps)


def steps_of_round(config: Config, bh: tuple, heads: int, row0: int, row_end: int) -> list[Launch | Matmul]:
    here = (*bh, slice(row0, row_end))
    Q, K, V, O, lse = Part("Q", here), Part("K", bh), Part("V", bh), Part("O", here), Part("lse", here)
    used = (slice(0, heads), slice(0, row_end - row0))
    S, l, grid = Part("S", used), Part("l", used), heads * (row_end - row0)
    return [
        Matmul(Q, K, S, transpose_right=True),
        Launch(build, config, (S, l, lse, row0, "scale"), grid, config.threads),
        Matmul(S, V, O),
        Launch(build_finish, config, (S, V, O, l, row0), grid, config.threads),
    ]


def build(config: Config):
    WARPS, THREADS = config.warps, config.threads
    end_of_row = Mask(config.is_causal).end  # the first key past a row's last one

    @cuda.jit
    def unfused_softmax(S, l, lse, row0, scale):
        # who am I: block -> head and row of the round
        head, i = cuda.blockIdx.x // S.shape[1], cuda.blockIdx.x % S.shape[1]
        tid = cuda.threadIdx.x
        Lk = S.shape[2]
        end = end_of_row(row0 + i, Lk)
        gS = S[head, i]
        highest, totals = cuda.shared.array(WARPS, float32), cuda.shared.array(WARPS, float32)

        # m over the keys that count
        m = NEG_INF
        for col in range(tid, end, THREADS):
            m = max(m, gS[col] * scale)
        m = warp_max(m)
        if tid % WARP == 0:
            highest[tid // WARP] = m
        cuda.syncthreads()  # the maxima of all warps are there
        for w in range(WARPS):
            m = max(m, highest[w])
        base = finite_max(m)

        # P in place of S, and l
        total = ZERO
        for col in range(tid, Lk, THREADS):
            # Rounded before the difference, as for m: one FMA of both would miss 0 where scores are large.
            s = gS[col] * scale if col < end else NEG_INF
            p = float32(math.exp(s - base))
            gS[col] = p
            total += p
        total = warp_sum(total)
        if tid % WARP == 0:
            totals[tid // WARP] = total
        cuda.syncthreads()  # the sums of all warps are there
        if tid == 0:
            total = ZERO
            for w in range(WARPS):
                total += totals[w]
            l[head, i] = total
            if i < lse.shape[1]:
                lse[head, i] = log_sum_exp(m, total)

    return unfused_softmax


def build_finish(config: Config):
    THREADS, SELECT = config.threads, config.is_causal
    end_of_row = Mask(config.is_causal).end

    @cuda.jit
    def unfused_finish(P, V, O, l, row0):
        # who am I: block -> head and row of the round
        head, i = cuda.blockIdx.x // P.shape[1], cuda.blockIdx.x % P.shape[1]
        end = end_of_row(row0 + i, P.shape[2])
        beta = reciprocal(l[head, i], end > 0)
        for d in range(cuda.threadIdx.x, O.shape[2], THREADS):
            acc = O[head, i, d]
            if SELECT and acc != acc:  # NaN
                acc = ZERO
                for k in range(end):
                    acc = fma(P[head, i, k], V[head, k, d], acc)
            O[head, i, d] = acc * beta

    return unfused_finish


KERNEL = Kernel(
    name="unfused_fp32",
    summary="library product, softmax in place, library product: the yardstick for what fusion buys",
    accuracy="fp32",
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
    uses_matmul=True,
)
