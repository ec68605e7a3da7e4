"""Register tiles in plain FP32: one fused multiply-add per product, no tensor cores.

Eighth rung of the ladder. To the fourth, warp_tile_multi_fp32, it adds columns per lane: several keys share an element
of Q as its rows share one of K, and copies are asynchronous. Bound by the issue of FMAs and their registers' ports.

Algorithm. For a block of query rows, over tiles of BLOCK_N keys:

    1.  S = Q K^T                    in registers, D walked in slices of BLOCK_D
    2.  S = scale S, -inf where the key does not count
    3.  m_new = max(m, rowmax S)     alpha = exp(m - m_new)     P = exp(S - m_new), to shared memory
    4.  l = alpha l + rowsum P
    5.  O = alpha O + P V            Dv walked in slices, one register tile each
    and after the last tile O = O / l, lse = m + ln l.

Work split. One block per (batch, head, BLOCK_M query rows); a warp owns ROWS of them whole, so row statistics need
shuffles alone and P never leaves its warp. A lane holds ROWS x COLUMNS of S (columns lane + 32 j), then ROWS x
DV_COLUMNS of O, and does ROWS + COLUMNS 16-byte shared loads for 4 ROWS COLUMNS FMAs: 24 for 512 with 16 x 8.

Memory. P: 4 BLOCK_M (BLOCK_N + 4) bytes, kept for a whole tile of keys, so that S is computed once however large Dv is.
Ring of STAGES slots, filled by cp.async: 4 (BLOCK_M + BLOCK_N) (BLOCK_D + 4) bytes each for Q and K, the same bytes
later for V. O is accumulated in the output itself, read and written once per tile of keys and slice: BLOCK_N / 8 FMAs
of P V per byte. Accumulators: ROWS COLUMNS, then ROWS DV_COLUMNS registers per lane.

Numerics. One fp32 FMA chain per score over D and per output over the keys, rescaled by alpha at each tile; exp by
ex2.approx. Against float64, normwise, at D = 1024: 4e-7 on uniform inputs, 1.2e-6 on normal ones. A pair that does
not count is left out of P V by its position.

Limits. cp.async (compute capability 8.0), a grid below 2^31 blocks, the shared memory of the smallest tile.

Source. FlashAttention-2 (Dao 2023), section 3.1, with the loops over Dv and keys exchanged inside a tile;
register blocking as in Volkov and Demmel 2008.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from numba import cuda, float32

from numba_attn.device.mask import Mask
from numba_attn.device.math import cdiv
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import shared_memory, shared_tile, tile_bytes
from numba_attn.device.softmax import NEG_INF, ONE, ZERO, log_sum_exp, reciprocal
from numba_attn.device.tile import (
    WARP,
    copy_tile_async,
    fill,
    mma_AB,
    mma_AB_where,
    mma_ABt,
    online_softmax,
    output_rows,
    scale_and_mask,
    store_rows,
)
from numba_attn.kernel import Kernel, Launch
from numba_attn.problem import MAX_GRID, Device, Problem

PAD = 4  # words per row that spread eight rows over the 32 banks, see device/smem.py


@dataclass(frozen=True)
class Config:
    warps: int
    rows: int  # of S and O, of a warp
    columns: int  # of S, of a lane
    dv_columns: int  # of O, of a lane
    block_d: int
    block_k: int  # keys of a slice of V
    stages: int
    vector: int  # elements of a copy
    is_causal: bool

    def __post_init__(self):
        if self.rows % 4 or self.block_d % 4 or self.block_k % 4 or self.block_n % self.block_k:
            raise ValueError(f"4 must divide {self.rows=}, {self.block_d=}, {self.block_k=}, and that {self.block_n=}")

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def block_m(self) -> int:
        return self.warps * self.rows

    @property
    def block_n(self) -> int:
        return WARP * self.columns

    @property
    def block_dv(self) -> int:
        return WARP * self.dv_columns

    @property
    def dv_vector(self) -> int:
        return min(self.dv_columns, 4)  # elements of O and V that a lane holds side by side

    @property
    def p_bytes(self) -> int:
        return tile_bytes((self.block_m, self.block_n), self.block_n + PAD)

    @property
    def smem_bytes(self) -> int:
        """P, and behind it the ring of slots for Q and K, later for V."""
        qk_bytes = tile_bytes((self.stages, self.block_m + self.block_n, self.block_d), self.block_d + PAD)
        return self.p_bytes + max(qk_bytes, tile_bytes((self.stages, self.block_k, self.block_dv)))


@dataclass(frozen=True)
class Tiles:
    """A choice of tile sizes, and what `config` needs to compare it with the others."""

    warps: int
    rows: int
    columns: int
    block_d: int
    blocks_per_sm: int  # that it takes to keep an SM busy
    fma_rates: tuple[float, float]
    """Share of an SM's FMA rate that they reach, Dv up to 128 and more; measured, see docs/notes/flash_fp32.md."""

    def config(self, dv_columns: int, vector: int, is_causal: bool) -> Config:
        sizes = (self.warps, self.rows, self.columns, dv_columns, self.block_d)
        return Config(*sizes, block_k=16, stages=2, vector=vector, is_causal=is_causal)


TILES = (
    # 16 x 8 patches keep the FMA units, not shared memory, the limit; 8 warps of 255 registers fill an SM.
    Tiles(warps=8, rows=16, columns=8, block_d=16, blocks_per_sm=1, fma_rates=(0.45, 0.58)),
    # A third of the shared memory: for GPUs with less than 227 KB a block, for fewer rows, and where Dv is narrow.
    Tiles(warps=4, rows=16, columns=4, block_d=16, blocks_per_sm=2, fma_rates=(0.55, 0.55)),
    # Few rows and keys: many small blocks, none of which is mostly padding.
    Tiles(warps=4, rows=4, columns=2, block_d=32, blocks_per_sm=4, fma_rates=(0.35, 0.35)),
)
DV_COLUMNS = (2, 4, 8)


def supports(problem: Problem, device: Device) -> str | None:
    if device.cc < (8, 0):
        return f"copies to shared memory asynchronously, from compute capability 8.0 on: {device.name} has {device.cc}"
    blocks = problem.B * problem.H * cdiv(problem.Lq, min(tiles.warps * tiles.rows for tiles in TILES))
    if blocks > MAX_GRID:
        return f"needs {blocks} blocks, a grid holds {MAX_GRID}"
    smallest = min(tiles.config(DV_COLUMNS[-1], 1, False).smem_bytes for tiles in TILES)
    if device.smem_per_block_bytes < smallest:
        return f"needs {smallest} bytes of shared memory a block, {device.name} has {device.smem_per_block_bytes}"
    return None


def configs():
    for tiles, dv_columns, vector, is_causal in product(TILES, DV_COLUMNS, (4, 1), (False, True)):
        yield tiles.config(dv_columns, vector, is_causal)


def config(problem: Problem, device: Device) -> Config:
    dv_columns = next((c for c in DV_COLUMNS if WARP * c >= problem.Dv), DV_COLUMNS[-1])
    vector = 4 if problem.vector == 4 else 1
    choices = [(tiles, tiles.config(dv_columns, vector, problem.is_causal)) for tiles in TILES]
    fitting = [choice for choice in choices if choice[1].smem_bytes <= device.smem_per_block_bytes]
    return min(fitting, key=lambda choice: _expected_time(*choice, problem, device))[1]


def _expected_time(tiles: Tiles, config: Config, problem: Problem, device: Device) -> float:
    """FMAs of the busiest SM, padding included, over the rate at which it does them."""
    blocks = problem.B * problem.H * cdiv(problem.Lq, config.block_m)
    pairs = config.block_m * config.block_n * cdiv(problem.Lk, config.block_n)
    return max(cdiv(blocks, device.sm_count), tiles.blocks_per_sm) * pairs / tiles.fma_rates[problem.Dv > 128]


def small_config(problem: Problem) -> Config:
    vector = 4 if problem.vector == 4 else 1
    tiles = {"warps": 2, "rows": 4, "columns": 2, "dv_columns": 1, "block_k": 8, "stages": 2}
    return Config(**tiles, block_d=8 * vector, vector=vector, is_causal=problem.is_causal)


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    grid = problem.B * problem.H * cdiv(problem.Lq, config.block_m)
    args = ("Q", "K", "V", "O", "lse", "scale")
    return (Launch(build, config, args, grid, config.threads, config.smem_bytes),)


def build(config: Config):
    ROWS, COLUMNS, DV_COLUMNS, DV_VECTOR = config.rows, config.columns, config.dv_columns, config.dv_vector
    BLOCK_M, BLOCK_N, BLOCK_D = config.block_m, config.block_n, config.block_d
    BLOCK_K, BLOCK_DV, STAGES = config.block_k, config.block_dv, config.stages
    AHEAD = STAGES - 1  # slots in flight while one is read
    SELECT = config.is_causal
    P_TILE = shared_tile(0, (BLOCK_M, BLOCK_N), BLOCK_N + PAD)
    Q_TILES = shared_tile(config.p_bytes, (STAGES, BLOCK_M, BLOCK_D), BLOCK_D + PAD)
    K_OFFSET = config.p_bytes + tile_bytes((STAGES, BLOCK_M, BLOCK_D), BLOCK_D + PAD)
    K_TILES = shared_tile(K_OFFSET, (STAGES, BLOCK_N, BLOCK_D), BLOCK_D + PAD)
    V_TILES = shared_tile(config.p_bytes, (STAGES, BLOCK_K, BLOCK_DV))
    mask = Mask(config.is_causal)
    attends, end_of_row = mask.attends, mask.end
    copy_q = copy_tile_async(BLOCK_M, BLOCK_D, config.threads, config.vector)
    copy_k = copy_tile_async(BLOCK_N, BLOCK_D, config.threads, config.vector)
    copy_v = copy_tile_async(BLOCK_K, BLOCK_DV, config.threads, config.vector)
    wait_slot = cp_async_wait(AHEAD - 1)
    qk = mma_ABt(ROWS, COLUMNS)
    pv = mma_AB(ROWS, DV_COLUMNS, DV_VECTOR)
    pv_where = mma_AB_where(ROWS, DV_COLUMNS, DV_VECTOR, attends)
    load_output, store_output = output_rows(ROWS, DV_COLUMNS, DV_VECTOR, min(config.vector, DV_VECTOR))

    @cuda.jit
    def flash_fp32(Q, K, V, O, lse, scale):
        # who am I: block -> batch, head, m_block; a warp owns ROWS query rows
        H, Lq, D = Q.shape[1], Q.shape[2], Q.shape[3]
        Lk, Dv = K.shape[2], V.shape[3]
        m_blocks = (Lq + BLOCK_M - 1) // BLOCK_M
        head = cuda.blockIdx.x // m_blocks
        # Under causality the last rows have the most keys: start with them.
        m0 = (m_blocks - 1 - cuda.blockIdx.x % m_blocks) * BLOCK_M
        b, h = head // H, head % H
        tid = cuda.threadIdx.x
        warp, lane = tid // WARP, tid % WARP
        row_in_block = warp * ROWS
        row0 = m0 + row_in_block
        gQ, gK, gV, gO = Q[b, h], K[b, h], V[b, h], O[b, h]
        smem = shared_memory()
        sP, sQ, sK, sV = P_TILE(smem), Q_TILES(smem), K_TILES(smem), V_TILES(smem)
        S = cuda.local.array((ROWS, COLUMNS), float32)  # then P
        acc = cuda.local.array((ROWS, DV_COLUMNS), float32)
        m, l = NEG_INF, ZERO
        n_end = end_of_row(min(m0 + BLOCK_M, Lq) - 1, Lk)
        d_blocks = (D + BLOCK_D - 1) // BLOCK_D
        dv_blocks = (Dv + BLOCK_DV - 1) // BLOCK_DV

        # At least one turn, so that rows without keys are written too.
        for n0 in range(0, max(n_end, 1), BLOCK_N):
            # S = Q K^T, slices of D in a ring of STAGES slots
            fill(S, ZERO)
            for step in range(AHEAD + d_blocks):
                d_block = step - AHEAD
                if d_block >= 0:
                    wait_slot()
                    # Slice d_block is visible to all, and all are done with the slot that is filled next.
                    cuda.syncthreads()
                if step < d_blocks:
                    copy_q(sQ[step % STAGES], gQ, m0, step * BLOCK_D, Lq, tid)
                    copy_k(sK[step % STAGES], gK, n0, step * BLOCK_D, n_end, tid)
                cp_async_commit()
                if d_block >= 0:
                    qk(S, sQ[d_block % STAGES], row_in_block, sK[d_block % STAGES], lane)

            # P = exp(scale S - m) where the key counts
            scale_and_mask(S, scale, attends, row0, n0, Lk, lane)
            m, l, alpha = online_softmax(S, m, l, lane)
            store_rows(sP, S, row_in_block, lane)
            beta = ONE
            if n0 + BLOCK_N >= n_end:
                # finish: O = O / l, lse = m + ln l
                beta = reciprocal(l, end_of_row(row0 + lane, Lk) > 0)
                if lane < ROWS and row0 + lane < lse.shape[2]:
                    lse[b, h, row0 + lane] = log_sum_exp(m, l)

            # O = alpha O + P V, slice by slice of Dv, keys in a ring of STAGES slots
            k_blocks = (min(BLOCK_N, n_end - n0) + BLOCK_K - 1) // BLOCK_K
            for dv_block in range(dv_blocks):
                dv0 = dv_block * BLOCK_DV
                # Every warp is done with the slots, and with writing its rows of P.
                cuda.syncthreads()
                if n0 == 0:
                    fill(acc, ZERO)
                else:
                    load_output(acc, gO, row0, dv0, alpha, lane)
                for step in range(AHEAD + k_blocks):
                    k_block = step - AHEAD
                    if k_block >= 0:
                        wait_slot()
                        # Keys of k_block are visible to all, and all are done with the slot that is filled next.
                        cuda.syncthreads()
                    if step < k_blocks:
                        copy_v(sV[step % STAGES], gV, n0 + step * BLOCK_K, dv0, n_end, tid)
                    cp_async_commit()
                    if k_block >= 0:
                        k0 = k_block * BLOCK_K
                        slot = k_block % STAGES
                        if not SELECT or n0 + k0 + BLOCK_K <= end_of_row(row0, Lk):
                            pv(acc, sP, row_in_block, k0, sV[slot], lane)
                        elif n0 + k0 < end_of_row(row0 + ROWS - 1, Lk):
                            pv_where(acc, sP, row_in_block, k0, sV[slot], lane, row0, n0 + k0, Lk)
                store_output(gO, acc, row0, dv0, beta, lane)
            # Every warp is done with the slots of V before those of Q and K are filled.
            cuda.syncthreads()

    return flash_fp32


KERNEL = Kernel(
    name="flash_fp32",
    summary="register tiles over tiles of BLOCK_N keys, plain FP32 arithmetic",
    accuracy="fp32",
    supports=supports,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
)
