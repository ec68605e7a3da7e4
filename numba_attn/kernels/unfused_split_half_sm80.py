"""fp32 accuracy on tensor cores for wide heads: two products of halves by `mma.sync`, P in memory between.

Tenth rung of the ladder. The ninth, flash_split_half_sm80, keeps O in registers, which wide rows do not fit. This one
gives that up, and with it the order of keys: every block of S is on its own, and so is every block of O. Bound by
tensor cores, and by the traffic of tiles from L2, 64 KB for each 128 x 128 x 64 products.

Algorithm. Five launches, see `two_products`. In two of them, in base 2:

    scores    per block of rows and keys, slab by slab of 32 columns:      S = S + units Q K^T
              then for each group g of 64 keys:   m_g = rowmax S     P = 2^(S - m_g)     l_g = rowsum P
    outputs   per block of rows and columns, slab by slab of 32 keys:      O = O + w_g units P V

    where `units` undoes the scales of the two tiles, and w_g = 2^(m_g - m) / l is what a group weighs in a row.

Work split. One block per (head, BLOCK_M rows, BLOCK_N keys or columns), a warp 64 x 64 of it; two blocks an SM.
Slabs of both operands come through a ring of SLOTS stages, copied between the products of earlier ones.

Memory. Images take the bytes of Q, K and V again, columns padded to 64, that of P four bytes a score; batches of heads
or of blocks of rows keep all below 512 MB. Shared: 8 KB a slab. Registers per lane: 128 for S or O.

Numerics. As flash_split_half_sm80: each sum is truncated within the 32 terms of a slab, rounded to nearest beyond. P is
split in units of its group's largest, so that its digits last whatever the row's largest is.

Limits. Compute capability 8.0; K and V of one head within 512 MB; slower than the ninth for heads up to 256.

Source. Split and sums: Ootomo and Yokota 2022. Partial softmax: Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from numba import cuda, float32, int32

from numba_attn.device import mma_patch, mma_product, mma_tile
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, quotient
from numba_attn.device.mma_product import M_TILES, SLAB_BYTES, SLABS, STEPS, TILE, TILE_BYTES, TILE_WORDS
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import shared_memory
from numba_attn.device.softmax import ONE
from numba_attn.device.split_half import PEAK, scales
from numba_attn.device.tile import WARP
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import Device, Problem
from numba_attn.two_products import TwoProducts, unsuited

PATCH_SHAPE, ROW_SHAPE = (M_TILES, TILE // 8, 4), (M_TILES, 2)  # of a warp: one tile
S_BUNCHES, O_BUNCHES = 1, 2
"""Of copies between the products of a slab: branches, across which the compiler moves no load."""
RESERVED_BYTES = 1024  # of shared memory, that an SM keeps for itself with each block


@dataclass(frozen=True)
class Config:
    warps_m: int
    warps_n: int
    slots: int
    blocks: int = 1
    """Of an SM: one begins and ends under the products of the other."""
    vector: int = 1
    """Elements (4, or 1) of an access to the rows of O."""
    is_causal: bool = False

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n

    @property
    def block_m(self) -> int:
        return self.warps_m * TILE

    @property
    def block_n(self) -> int:
        return self.warps_n * TILE

    @property
    def slot_bytes(self) -> int:
        return (self.warps_m + self.warps_n) * SLAB_BYTES

    @property
    def smem_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def fits(self, device: Device) -> bool:
        """All blocks: together they have what one alone can have with what is kept for it."""
        return self.blocks * (self.smem_bytes + RESERVED_BYTES) <= device.smem_per_block_bytes + RESERVED_BYTES


# The ones behind the first are for GPUs with less shared memory.
TILES = Config(2, 2, slots=3, blocks=2), Config(2, 2, slots=2, blocks=2), Config(2, 2, slots=3)


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
    return serving(problem, next((tiles for tiles in TILES if tiles.fits(device)), TILES[-1]))


def configs():
    for tiles, vector, is_causal in product(TILES, (4, 1), (False, True)):
        yield replace(tiles, vector=vector, is_causal=is_causal)


def small_config(problem: Problem) -> Config:
    return serving(problem, Config(2, 1, slots=2))


def serving(problem: Problem, tiles: Config) -> Config:
    return replace(tiles, vector=4 if problem.vector == 4 else 1, is_causal=problem.is_causal)


def steps(problem: Problem, config: Config) -> TwoProducts:
    return TwoProducts(problem, config.block_m, config.block_n, config.block_n, steps_of_sum=STEPS)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    return steps(problem, config).images.workspace


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    sizes = config.threads, config.smem_bytes, config.blocks
    return steps(problem, config).launches(build_scores, build_outputs, config, *sizes)


def build_scores(config: Config):
    BLOCK_M, BLOCK_N, WARPS_M, WARPS_N = config.block_m, config.block_n, config.warps_m, config.warps_n
    SLOTS, SLOT_BYTES, THREADS = config.slots, config.slot_bytes, config.threads
    end_of_row, place = Mask(config.is_causal).end, mma_product.place(heaviest_first=False)
    (q_lane, k_lane), (to_place, q_place, k_place) = mma_product.lanes_of(False), mma_product.places_of(False, THREADS)
    copy = mma_product.copy_slabs(WARPS_M, WARPS_N, THREADS)
    wait_slot, following = cp_async_wait(SLOTS - 2), mma_tile.ring(SLOTS)
    start, load_unscale = mma_tile.start(TILE, TILE), mma_product.load_unscale
    multiply = mma_product.multiply(WARPS_M, WARPS_N, THREADS, S_BUNCHES, transposed=False)
    mask, softmax = mma_tile.masked(TILE, TILE, end_of_row), mma_tile.softmax(TILE, TILE)
    store_image, store_statistics = mma_patch.store_image, mma_patch.store_statistics

    @cuda.jit
    def scores(Q, K, Q_image, K_image, Q_record, K_record, P_image, M, L, unsafe, first_row):
        # who am I: block -> head, m_block, n_block; a warp owns a tile of rows and a group of keys
        Lq, D, Lk = Q.shape[2], Q.shape[3], K.shape[2]
        heads, m_blocks = unsafe.shape  # a shape alone: the next launch fills it
        n_blocks = max(1, quotient(Lk + (BLOCK_N - 1), BLOCK_N))
        head, m_block, n_block = place(cuda.blockIdx.x, heads, m_blocks, n_blocks)
        m0 = m_block * BLOCK_M
        if n_block * BLOCK_N >= end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk):
            return
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        own_m, own_n = quotient(warp, WARPS_N), warp % WARPS_N
        row0, g = m0 + own_m * TILE, n_block * WARPS_N + own_n
        tiles, groups = quotient(D + (TILE - 1), TILE), M.shape[1]
        rQ, rK, gQ, gK = Q_record[head], K_record[head], Q_image[head], K_image[head]
        q_tile, k_tile, to_next = m_block * WARPS_M * tiles, n_block * WARPS_N * tiles, tiles * TILE_BYTES
        q_own, k_own = q_tile + own_m * tiles, k_tile + own_n * tiles

        # load the first slabs of Q and K; reset S
        smem = shared_memory()
        q_at = smem + own_m * SLAB_BYTES + q_lane(lane)
        k_at = smem + (WARPS_M + own_n) * SLAB_BYTES + k_lane(lane)
        to = smem + to_place(tid)
        for step in range(SLOTS - 1):
            d, slab = quotient(step, SLABS), step & (SLABS - 1)
            q, k = q_place(q_tile + d, slab, tid), k_place(k_tile + d, slab, tid)
            copy(d < tiles, to + step * SLOT_BYTES, gQ, q, to_next, gK, k, to_next)
            cp_async_commit()
        slot, free = int32(0), int32(SLOTS - 1)
        S = cuda.local.array(PATCH_SHAPE, float32)  # then P
        q_unscale = cuda.local.array(1, float32)
        k_unscale = cuda.local.array(1, float32)
        none = cuda.local.array(1, float32)
        m = cuda.local.array(ROW_SHAPE, float32)
        l = cuda.local.array(ROW_SHAPE, float32)
        alpha = cuda.local.array(ROW_SHAPE, float32)
        start(S, m, l)
        load_unscale(q_unscale, rQ, q_own)
        load_unscale(k_unscale, rK, k_own)

        # S = Q K^T
        for step in range(int32(tiles * SLABS)):
            wait_slot()
            # The slab is visible to all, and all are done with the slot that is filled next.
            cuda.syncthreads()
            d, slab = quotient(step + (SLOTS - 1), SLABS), (step + (SLOTS - 1)) & (SLABS - 1)
            q, k, there = q_place(q_tile + d, slab, tid), k_place(k_tile + d, slab, tid), d < tiles
            a, b, copied = q_at + slot * SLOT_BYTES, k_at + slot * SLOT_BYTES, to + free * SLOT_BYTES
            multiply(S, a, b, none, k_unscale, q_unscale[0], there, copied, gQ, q, to_next, gK, k, to_next)
            cp_async_commit()
            d = min(quotient(step + 1, SLABS), tiles - 1)
            load_unscale(q_unscale, rQ, q_own + d)
            load_unscale(k_unscale, rK, k_own + d)
            slot, free = int32(following(slot)), int32(following(free))

        # P = 2^(S - m)
        col0 = g * TILE
        if col0 + TILE > end_of_row(first_row + row0, Lk):
            mask(S, first_row + row0, col0, Lk, lane)
        softmax(S, m, l, alpha, ONE, PEAK)
        store_image(P_image[head], (quotient(row0, TILE) * groups + g) * TILE_WORDS, S, lane)
        store_statistics(M[head, g], L[head, g], m, l, row0, lane)

    return scores


def build_outputs(config: Config):
    BLOCK_M, BLOCK_N, WARPS_M, WARPS_N = config.block_m, config.block_n, config.warps_m, config.warps_n
    SLOTS, SLOT_BYTES, THREADS = config.slots, config.slot_bytes, config.threads
    end_of_row, place = Mask(config.is_causal).end, mma_product.place(config.is_causal)
    (p_lane, v_lane), (to_place, p_place, v_place) = mma_product.lanes_of(True), mma_product.places_of(True, THREADS)
    copy = mma_product.copy_slabs(WARPS_M, WARPS_N, THREADS)
    wait_slot, following = cp_async_wait(SLOTS - 2), mma_tile.ring(SLOTS)
    start, load_unscale = mma_tile.start(TILE, TILE), mma_product.load_unscale
    multiply = mma_product.multiply(WARPS_M, WARPS_N, THREADS, O_BUNCHES, transposed=True)
    load_weights, store = mma_product.load_weights, mma_patch.store_outputs(config.vector)

    @cuda.jit
    def outputs(Q, K, P_image, V_image, V_record, W, V_amax, unsafe, O, first_row):
        # who am I: block -> head, m_block, d_block; a warp owns a tile of rows and columns
        H, Lq, Lk, Dv = Q.shape[1], Q.shape[2], K.shape[2], O.shape[3]
        (heads, m_blocks), d_blocks = unsafe.shape, quotient(Dv + (BLOCK_N - 1), BLOCK_N)
        head, m_block, d_block = place(cuda.blockIdx.x, heads, m_blocks, d_blocks)
        if unsafe[head, m_block] != 0:
            return
        m0 = m_block * BLOCK_M
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        own_m, own_n = quotient(warp, WARPS_N), warp % WARPS_N
        row0, d_tile = m0 + own_m * TILE, d_block * WARPS_N + own_n
        tiles, groups = quotient(Dv + (TILE - 1), TILE), W.shape[1]  # W is M, where weights stand by now
        g_end = quotient(end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk) + (TILE - 1), TILE)
        gP, gV, rV, gW = P_image[head], V_image[head], V_record[head], W[head]
        p_tile, v_tile = m_block * WARPS_M * groups, d_block * WARPS_N
        # Behind the last columns of V the same ones again, for nobody.
        p_next, v_next, v_own = groups * TILE_BYTES, TILE_BYTES if v_tile + 1 < tiles else 0, min(d_tile, tiles - 1)
        v_scale, v_unscale = scales(bits(V_amax[head]))

        # load the first slabs of P and V; reset acc
        smem = shared_memory()
        p_at = smem + own_m * SLAB_BYTES + p_lane(lane)
        v_at = smem + (WARPS_M + own_n) * SLAB_BYTES + v_lane(lane)
        to = smem + to_place(tid)
        for step in range(SLOTS - 1):
            g, slab = quotient(step, SLABS), step & (SLABS - 1)
            p, v = p_place(p_tile + g, slab, tid), v_place(v_tile + g * tiles, slab, tid)
            copy(g < g_end, to + step * SLOT_BYTES, gP, p, p_next, gV, v, v_next)
            cp_async_commit()
        slot, free = int32(0), int32(SLOTS - 1)
        acc = cuda.local.array(PATCH_SHAPE, float32)
        w = cuda.local.array(ROW_SHAPE, float32)
        unscale = cuda.local.array(1, float32)
        none = cuda.local.array(ROW_SHAPE, float32)
        start(acc, none, none)
        load_weights(w, gW[0], row0, lane)
        load_unscale(unscale, rV, v_own)

        # O = sum w P V
        for step in range(int32(g_end * SLABS)):
            wait_slot()
            # The slab is visible to all, and all are done with the slot that is filled next.
            cuda.syncthreads()
            g, slab = quotient(step + (SLOTS - 1), SLABS), (step + (SLOTS - 1)) & (SLABS - 1)
            p, v, there = p_place(p_tile + g, slab, tid), v_place(v_tile + g * tiles, slab, tid), g < g_end
            a, b, copied = p_at + slot * SLOT_BYTES, v_at + slot * SLOT_BYTES, to + free * SLOT_BYTES
            multiply(acc, a, b, w, unscale, v_scale, there, copied, gP, p, p_next, gV, v, v_next)
            cp_async_commit()
            g = min(quotient(step + 1, SLABS), g_end - 1)
            load_weights(w, gW[g], row0, lane)
            load_unscale(unscale, rV, g * tiles + v_own)
            slot, free = int32(following(slot)), int32(following(free))

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
