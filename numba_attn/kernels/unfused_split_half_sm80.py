"""fp32 accuracy on tensor cores for wide heads: two products of halves by `mma.sync`, P in memory between.

Tenth rung of the ladder. The ninth, flash_split_half_sm80, keeps O in registers, which wide rows do not fit. This one
gives that up, and with it the order of keys: every block of S is on its own, and so is every block of O. Bound by
tensor cores, and by the traffic of tiles from L2, 64 KB for each 128 x 128 x 64 products.

Algorithm. Five launches, see `two_products`. In two of them, in base 2:

    scores    per block of rows and keys, slab by slab of 64 columns:      S = S + units Q K^T
              then for each group g of 64 keys:   m_g = rowmax S     P = 2^(S - m_g)     l_g = rowsum P
    outputs   per block of rows and columns, group by group of keys:       O = O + w_g units P V

    where `units` undoes the scales of the two tiles, and w_g = 2^(m_g - m) / l is what a group weighs in a row.

Work split. One block per (head, BLOCK_M rows, BLOCK_N keys or columns), a warp 32 x 64 of it. Tiles of 64 x 64 of both
operands come through a ring of SLOTS stages.

Memory. Images take the bytes of Q, K and V again, columns padded to 64, that of P four bytes a score; batches of heads
or of blocks of rows keep all below 512 MB. Shared: 16 KB a tile. Registers per lane: 64 for S or O.

Numerics. As flash_split_half_sm80: each sum is truncated within 16 CHAIN terms, rounded to nearest beyond. P is split
in units of its group's largest, so that its digits last whatever the row's largest is.

Limits. Compute capability 8.0; K and V of one head within 512 MB; slower than the ninth for heads up to 256.

Source. Split and sums: Ootomo and Yokota 2022. Partial softmax: Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from numba import cuda, float32

from numba_attn.device import mma_product, mma_tile
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, quotient
from numba_attn.device.mma_product import TILE, TILE_BYTES, TILE_WORDS
from numba_attn.device.mma_tile import lane_of_chunks, lane_of_rows
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import shared_memory
from numba_attn.device.softmax import ONE
from numba_attn.device.split_half import PEAK, ROW_BYTES, UNSCALE, WORD_BYTES, scales, unit_of
from numba_attn.device.tile import WARP
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import Device, Problem
from numba_attn.two_products import TwoProducts, unsuited

M_ROWS, N_COLUMNS = 32, TILE  # of a warp: one group of keys, or one tile of V
PATCH_SHAPE, ROW_SHAPE = (M_ROWS // 16, N_COLUMNS // 8, 4), (M_ROWS // 16, 2)


@dataclass(frozen=True)
class Config:
    warps_m: int
    warps_n: int
    slots: int
    chain: int = 2
    """Steps of 16 terms after which a sum moves on to fp32."""
    is_causal: bool = False

    def __post_init__(self):
        if self.block_m % TILE:
            raise ValueError(f"{TILE} must divide {self.block_m=}")

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n

    @property
    def block_m(self) -> int:
        return self.warps_m * M_ROWS

    @property
    def block_n(self) -> int:
        return self.warps_n * N_COLUMNS

    @property
    def slot_bytes(self) -> int:
        return (self.block_m + self.block_n) // TILE * TILE_BYTES

    @property
    def smem_bytes(self) -> int:
        return self.slots * self.slot_bytes


# The larger the block, the fewer bytes a product; the ones behind the first are for GPUs with less shared memory.
TILES = (Config(4, 2, slots=3), Config(4, 2, slots=2), Config(4, 1, slots=2))


def supports(problem: Problem, device: Device) -> str | None:
    if device.cc < (8, 0):
        return f"multiplies halves by mma.m16n8k16, from compute capability 8.0 on: {device.name} has {device.cc}"
    chosen = config(problem, device)
    if device.smem_per_block_bytes < chosen.smem_bytes:
        return f"needs {chosen.smem_bytes} bytes of shared memory a block, {device.name} has less"
    return steps(problem, chosen).images.refusal


def suits(problem: Problem, device: Device) -> str | None:
    return unsuited(problem)


def config(problem: Problem, device: Device) -> Config:
    fitting = [tiles for tiles in TILES if tiles.smem_bytes <= device.smem_per_block_bytes]
    return replace((fitting or TILES[-1:])[0], is_causal=problem.is_causal)


def configs():
    for tiles, is_causal in product(TILES, (False, True)):
        yield replace(tiles, is_causal=is_causal)


def small_config(problem: Problem) -> Config:
    return Config(2, 1, slots=2, is_causal=problem.is_causal)


def steps(problem: Problem, config: Config) -> TwoProducts:
    return TwoProducts(problem, config.block_m, config.block_n, config.block_n, steps_of_sum=config.chain)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    return steps(problem, config).images.workspace


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    return steps(problem, config).launches(build_scores, build_outputs, config, config.threads, config.smem_bytes)


def build_scores(config: Config):
    BLOCK_M, BLOCK_N, WARPS_N, SLOTS = config.block_m, config.block_n, config.warps_n, config.slots
    SLOT_BYTES, M_TILES, N_TILES = config.slot_bytes, config.block_m // TILE, config.block_n // TILE
    end_of_row = Mask(config.is_causal).end
    copy = mma_product.copy_tiles(M_TILES, N_TILES, config.threads)
    wait_slot, following = cp_async_wait(SLOTS - 2), mma_tile.ring(SLOTS)
    start = mma_tile.start(M_ROWS, N_COLUMNS)
    fill = mma_product.fill(M_ROWS)
    multiply = mma_product.multiply(M_ROWS, N_COLUMNS, config.chain, transposed=False)
    mask = mma_tile.masked(M_ROWS, N_COLUMNS, end_of_row)
    softmax = mma_tile.softmax(M_ROWS, N_COLUMNS)
    store_image = mma_product.store_image(M_ROWS, N_COLUMNS)
    store_statistics = mma_product.store_statistics(M_ROWS)

    @cuda.jit
    def scores(Q, K, Q_image, K_image, Q_record, K_record, P_image, M, L, unsafe, first_row):
        # who am I: block -> head, m_block, n_block; a warp owns M_ROWS rows and one group of keys
        Lq, D, Lk = Q.shape[2], Q.shape[3], K.shape[2]
        # Of `unsafe`, which the next launch fills, the shape alone.
        n_blocks, m_blocks = max(1, quotient(Lk + (BLOCK_N - 1), BLOCK_N)), unsafe.shape[1]
        block = quotient(cuda.blockIdx.x, n_blocks)
        head = quotient(block, m_blocks)
        m_block, n_block = block - head * m_blocks, cuda.blockIdx.x - block * n_blocks
        m0 = m_block * BLOCK_M
        if n_block * BLOCK_N >= end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk):
            return
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        own_row, own_column = quotient(warp, WARPS_N) * M_ROWS, warp % WARPS_N
        row0, g = m0 + own_row, n_block * N_TILES + own_column
        slabs, groups = quotient(D + (TILE - 1), TILE), M.shape[1]
        rQ, rK, gQ, gK = Q_record[head], K_record[head], Q_image[head], K_image[head]
        q_tile, k_tile = m_block * M_TILES * slabs, n_block * N_TILES * slabs
        q_own, k_own = quotient(row0, TILE) * slabs, g * slabs
        to_next = slabs * TILE_WORDS

        # load the first tiles of Q and K; reset S
        smem = shared_memory()
        q_at = smem + own_row // TILE * TILE_BYTES + own_row % TILE * ROW_BYTES + lane_of_rows(lane)
        k_at = smem + (M_TILES + own_column) * TILE_BYTES + lane_of_chunks(lane)
        for slab in range(SLOTS - 1):
            if slab < slabs:
                q, k = (q_tile + slab) * TILE_WORDS, (k_tile + slab) * TILE_WORDS
                copy(smem + slab * SLOT_BYTES, gQ, q, to_next, gK, k, to_next, tid)
            cp_async_commit()
        slot, free = 0, SLOTS - 1
        S = cuda.local.array(PATCH_SHAPE, float32)  # then P
        unit = cuda.local.array(ROW_SHAPE, float32)
        m = cuda.local.array(ROW_SHAPE, float32)
        l = cuda.local.array(ROW_SHAPE, float32)
        alpha = cuda.local.array(ROW_SHAPE, float32)
        start(S, m, l)

        # S = Q K^T
        for slab in range(slabs):
            wait_slot()
            # The tiles are visible to all, and all are done with the slot that is filled next.
            cuda.syncthreads()
            ahead = slab + SLOTS - 1
            if ahead < slabs:
                q, k = (q_tile + ahead) * TILE_WORDS, (k_tile + ahead) * TILE_WORDS
                copy(smem + free * SLOT_BYTES, gQ, q, to_next, gK, k, to_next, tid)
            cp_async_commit()
            fill(unit, unit_of(rQ[q_own + slab, UNSCALE], rK[k_own + slab, UNSCALE]))
            multiply(S, q_at + slot * SLOT_BYTES, k_at + slot * SLOT_BYTES, unit)
            slot, free = following(slot), following(free)

        # P = 2^(S - m)
        col0 = g * TILE
        if col0 + TILE > end_of_row(first_row + row0, Lk):
            mask(S, first_row + row0, col0, Lk, lane)
        softmax(S, m, l, alpha, ONE, PEAK)
        word = (row0 // TILE * groups + g) * TILE_WORDS + own_row % TILE * (ROW_BYTES // WORD_BYTES)
        store_image(P_image[head], word, S, lane)
        store_statistics(M[head, g], L[head, g], m, l, row0, lane)

    return scores


def build_outputs(config: Config):
    BLOCK_M, BLOCK_N, WARPS_N, SLOTS = config.block_m, config.block_n, config.warps_n, config.slots
    SLOT_BYTES, M_TILES, N_TILES = config.slot_bytes, config.block_m // TILE, config.block_n // TILE
    end_of_row = Mask(config.is_causal).end
    copy = mma_product.copy_tiles(M_TILES, N_TILES, config.threads)
    wait_slot, following = cp_async_wait(SLOTS - 2), mma_tile.ring(SLOTS)
    start = mma_tile.start(M_ROWS, N_COLUMNS)
    multiply = mma_product.multiply(M_ROWS, N_COLUMNS, config.chain, transposed=True)
    IS_CAUSAL, load_factors = config.is_causal, mma_product.load_factors(M_ROWS)
    store = mma_product.store_outputs(M_ROWS, N_COLUMNS)

    @cuda.jit
    def outputs(Q, K, P_image, V_image, V_record, W, V_amax, unsafe, O, first_row):
        # who am I: block -> head, m_block, d_block; a warp owns M_ROWS rows and N_COLUMNS columns
        H, Lq, Lk, Dv = Q.shape[1], Q.shape[2], K.shape[2], O.shape[3]
        (heads, m_blocks), d_blocks = unsafe.shape, quotient(Dv + (BLOCK_N - 1), BLOCK_N)
        block = quotient(cuda.blockIdx.x, d_blocks)
        d_block, head = cuda.blockIdx.x - block * d_blocks, quotient(block, m_blocks)
        m_block = block - head * m_blocks
        if IS_CAUSAL:
            # The last rows have the most keys: start with those of all heads, so that no long block comes last.
            head = block - quotient(block, heads) * heads
            m_block = m_blocks - 1 - quotient(block, heads)
        if unsafe[head, m_block] != 0:
            return
        m0 = m_block * BLOCK_M
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        own_row, own_column = quotient(warp, WARPS_N) * M_ROWS, warp % WARPS_N
        row0, d_tile = m0 + own_row, d_block * N_TILES + own_column
        slabs, groups = quotient(Dv + (TILE - 1), TILE), W.shape[1]  # W is M, where weights stand by now
        g_end = quotient(end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk) + (TILE - 1), TILE)
        gP, gV, rV, gW = P_image[head], V_image[head], V_record[head], W[head]
        p_tile, v_tile = m_block * M_TILES * groups, d_block * N_TILES
        # Behind the last columns of V the same ones again, for nobody.
        to_next = TILE_WORDS if v_tile + 1 < slabs else 0
        v_own = min(d_tile, slabs - 1)
        v_scale, v_unscale = scales(bits(V_amax[head]))

        # load the first tiles of P and V; reset acc
        smem = shared_memory()
        p_at = smem + own_row // TILE * TILE_BYTES + own_row % TILE * ROW_BYTES + lane_of_rows(lane)
        v_at = smem + (M_TILES + own_column) * TILE_BYTES + lane_of_rows(lane)
        for g in range(SLOTS - 1):
            if g < g_end:
                p, v = (p_tile + g) * TILE_WORDS, (g * slabs + v_tile) * TILE_WORDS
                copy(smem + g * SLOT_BYTES, gP, p, groups * TILE_WORDS, gV, v, to_next, tid)
            cp_async_commit()
        slot, free = 0, SLOTS - 1
        acc = cuda.local.array(PATCH_SHAPE, float32)
        factor = cuda.local.array(ROW_SHAPE, float32)
        start(acc, factor, factor)  # without m and l: factor stands in for both, and is loaded below

        # O = sum w P V
        for g in range(g_end):
            wait_slot()
            # The tiles are visible to all, and all are done with the slot that is filled next.
            cuda.syncthreads()
            ahead = g + SLOTS - 1
            if ahead < g_end:
                p, v = (p_tile + ahead) * TILE_WORDS, (ahead * slabs + v_tile) * TILE_WORDS
                copy(smem + free * SLOT_BYTES, gP, p, groups * TILE_WORDS, gV, v, to_next, tid)
            cp_async_commit()
            load_factors(factor, gW[g], rV[g * slabs + v_own, UNSCALE] * v_scale, row0, lane)
            multiply(acc, p_at + slot * SLOT_BYTES, v_at + slot * SLOT_BYTES, factor)
            slot, free = following(slot), following(free)

        b = quotient(head, H)
        store(O[b, head - b * H], acc, v_unscale / PEAK, row0, d_tile * TILE, lane)

    return outputs


KERNEL = Kernel(
    name="unfused_split_half_sm80",
    summary="wide heads: two products of fp16 halves by mma.sync, P in memory between",
    accuracy="fp32",
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
)
