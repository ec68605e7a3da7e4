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

from numba import cuda, float32, int32

from numba_attn.device import mma_panels, mma_product, mma_tile
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, quotient
from numba_attn.device.mma_product import TILE, TILE_BYTES, TILE_WORDS, Slab
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import shared_memory
from numba_attn.device.softmax import ONE
from numba_attn.device.split_half import PEAK, ROW_BYTES, WORD_BYTES, scales
from numba_attn.device.tile import WARP
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import Device, Problem
from numba_attn.two_products import TwoProducts, unsuited


@dataclass(frozen=True)
class Config:
    warps_m: int
    warps_n: int
    slots: int
    m_rows: int = 32
    """Of a warp."""
    panels: int = 1
    """Of 64 keys or columns, of a warp."""
    slab: int = TILE
    """Columns of Q and K, or keys, of a slot."""
    chain: int = 2
    """Steps of 16 terms after which a sum moves on to fp32."""
    blocks: int = 1
    """Of an SM."""
    s_bunches: int = 2
    o_bunches: int = 2
    """Of copies between the products of a slab of S and of O: branches, across which the compiler moves no load."""
    vector: int = 1
    """Elements (4, or 1) of an access to the rows of O."""
    is_causal: bool = False

    def __post_init__(self):
        if self.block_m % TILE:
            raise ValueError(f"{TILE} must divide {self.block_m=}")

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n

    @property
    def block_m(self) -> int:
        return self.warps_m * self.m_rows

    @property
    def block_n(self) -> int:
        return self.warps_n * self.panels * TILE

    @property
    def shapes(self) -> tuple:
        """Of a warp's patch, of statistics of its rows in each panel, and of numbers of its rows."""
        m_tiles = self.m_rows // 16
        return (self.panels * m_tiles, TILE // 8, 4), (self.panels * m_tiles, 2), (m_tiles, 2)

    @property
    def slot_bytes(self) -> int:
        return (self.block_m + self.block_n) // TILE * Slab(self.slab, False, self.threads).tile_bytes

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
    vector = 4 if problem.vector == 4 else 1
    return replace((fitting or TILES[-1:])[0], vector=vector, is_causal=problem.is_causal)


def configs():
    for tiles, vector, is_causal in product(TILES, (4, 1), (False, True)):
        yield replace(tiles, vector=vector, is_causal=is_causal)


def small_config(problem: Problem) -> Config:
    return Config(2, 1, slots=2, is_causal=problem.is_causal)


def steps(problem: Problem, config: Config) -> TwoProducts:
    return TwoProducts(problem, config.block_m, config.block_n, config.block_n, steps_of_sum=config.chain)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    return steps(problem, config).images.workspace


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    sizes = config.threads, config.smem_bytes, config.blocks
    return steps(problem, config).launches(build_scores, build_outputs, config, *sizes)


def of_slabs(config: Config, transposed: bool) -> tuple:
    """What both products are made of: sizes, lanes, places and verbs of slabs, their copies and their products."""
    slab, tiles = Slab(config.slab, transposed, config.threads), (config.block_m // TILE, config.block_n // TILE)
    multiply = mma_product.multiply(
        slab, config.m_rows, config.panels, config.chain, *tiles, config.o_bunches if transposed else config.s_bunches
    )
    verbs = mma_product.copy_slab(slab, *tiles), multiply, mma_product.load_unscales(config.panels)
    sizes = *tiles, config.slot_bytes, slab.tile_bytes, slab.parts
    return sizes, mma_product.lanes_of(slab), mma_product.places_of(slab), verbs


def build_scores(config: Config):
    BLOCK_M, BLOCK_N, WARPS_N, SLOTS = config.block_m, config.block_n, config.warps_n, config.slots
    M_ROWS, PANELS, (PATCH_SHAPE, STATISTICS_SHAPE, _) = config.m_rows, config.panels, config.shapes
    sizes, (lane_of_rows, lane_of_keys), places, (copy, multiply, load_units) = of_slabs(config, False)
    (M_TILES, N_TILES, SLOT_BYTES, PART_BYTES, PARTS), (to_place, q_place, k_place) = sizes, places
    end_of_row, place = Mask(config.is_causal).end, mma_product.place(heaviest_first=False)
    load_unit = mma_product.load_unscales(1)
    wait_slot, following = cp_async_wait(SLOTS - 2), mma_tile.ring(SLOTS)
    start = mma_tile.start(PANELS * M_ROWS, TILE)  # panels stand where rows do there
    mask = mma_panels.masked(M_ROWS, PANELS, end_of_row)
    softmax = mma_tile.softmax(PANELS * M_ROWS, TILE)  # statistics of each panel, not of all
    store_image = mma_panels.store_image(M_ROWS, PANELS)
    store_statistics = mma_panels.store_statistics(M_ROWS, PANELS)

    @cuda.jit
    def scores(Q, K, Q_image, K_image, Q_record, K_record, P_image, M, L, unsafe, first_row):
        # who am I: block -> head, m_block, n_block; a warp owns M_ROWS rows and PANELS groups of keys
        Lq, D, Lk = Q.shape[2], Q.shape[3], K.shape[2]
        heads, m_blocks = unsafe.shape  # a shape alone: the next launch fills it
        n_blocks = max(1, quotient(Lk + (BLOCK_N - 1), BLOCK_N))
        head, m_block, n_block = place(cuda.blockIdx.x, heads, m_blocks, n_blocks)
        m0 = m_block * BLOCK_M
        if n_block * BLOCK_N >= end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk):
            return
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        own_row, own_panel = quotient(warp, WARPS_N) * M_ROWS, warp % WARPS_N * PANELS
        row0, g = m0 + own_row, n_block * N_TILES + own_panel
        slabs, groups = quotient(D + (TILE - 1), TILE), M.shape[1]
        rQ, rK, gQ, gK = Q_record[head], K_record[head], Q_image[head], K_image[head]
        q_tile, k_tile, to_next = m_block * M_TILES * slabs, n_block * N_TILES * slabs, slabs * TILE_BYTES
        q_own, k_own = quotient(row0, TILE) * slabs, g * slabs

        # load the first slabs of Q and K; reset S
        smem = shared_memory()
        q_at = smem + own_row // TILE * PART_BYTES + own_row % TILE * (ROW_BYTES // PARTS) + lane_of_rows(lane)
        k_at = smem + (M_TILES + own_panel) * PART_BYTES + lane_of_keys(lane)
        to = smem + to_place(tid)
        for step in range(SLOTS - 1):
            slab, part = quotient(step, PARTS), step & (PARTS - 1)
            q, k = q_place(q_tile + slab, part, tid), k_place(k_tile + slab, part, tid)
            copy(slab < slabs, to + step * SLOT_BYTES, gQ, q, to_next, gK, k, to_next)
            cp_async_commit()
        slot, free = int32(0), int32(SLOTS - 1)
        S = cuda.local.array(PATCH_SHAPE, float32)  # then P
        q_unscale = cuda.local.array(1, float32)
        k_unscale = cuda.local.array(PANELS, float32)
        none = cuda.local.array(1, float32)
        m = cuda.local.array(STATISTICS_SHAPE, float32)
        l = cuda.local.array(STATISTICS_SHAPE, float32)
        alpha = cuda.local.array(STATISTICS_SHAPE, float32)
        start(S, m, l)
        load_unit(q_unscale, rQ, q_own, 0)
        load_units(k_unscale, rK, k_own, slabs)

        # S = Q K^T
        for step in range(int32(slabs * PARTS)):
            wait_slot()
            # The slab is visible to all, and all are done with the slot that is filled next.
            cuda.syncthreads()
            slab, part = quotient(step + (SLOTS - 1), PARTS), (step + (SLOTS - 1)) & (PARTS - 1)
            q, k, there = q_place(q_tile + slab, part, tid), k_place(k_tile + slab, part, tid), slab < slabs
            a, b, copied = q_at + slot * SLOT_BYTES, k_at + slot * SLOT_BYTES, to + free * SLOT_BYTES
            multiply(S, a, b, none, k_unscale, q_unscale[0], there, copied, gQ, q, to_next, gK, k, to_next)
            cp_async_commit()
            slab = min(quotient(step + 1, PARTS), slabs - 1)
            load_unit(q_unscale, rQ, q_own + slab, 0)
            load_units(k_unscale, rK, k_own + slab, slabs)
            slot, free = int32(following(slot)), int32(following(free))

        # P = 2^(S - m)
        col0 = g * TILE
        if col0 + PANELS * TILE > end_of_row(first_row + row0, Lk):
            mask(S, first_row + row0, col0, Lk, lane)
        softmax(S, m, l, alpha, ONE, PEAK)
        word = (row0 // TILE * groups + g) * TILE_WORDS + own_row % TILE * (ROW_BYTES // WORD_BYTES)
        store_image(P_image[head], word, S, lane)
        store_statistics(M[head], L[head], m, l, g, row0, lane)

    return scores


def build_outputs(config: Config):
    BLOCK_M, BLOCK_N, WARPS_N, SLOTS = config.block_m, config.block_n, config.warps_n, config.slots
    M_ROWS, PANELS, (PATCH_SHAPE, STATISTICS_SHAPE, ROW_SHAPE) = config.m_rows, config.panels, config.shapes
    sizes, (lane_of_rows, lane_of_keys), places, (copy, multiply, load_units) = of_slabs(config, True)
    (M_TILES, N_TILES, SLOT_BYTES, PART_BYTES, PARTS), (to_place, p_place, v_place) = sizes, places
    end_of_row, place = Mask(config.is_causal).end, mma_product.place(config.is_causal)
    wait_slot, following = cp_async_wait(SLOTS - 2), mma_tile.ring(SLOTS)
    start = mma_tile.start(PANELS * M_ROWS, TILE)
    load_weights = mma_product.load_weights(M_ROWS)
    store = mma_panels.store_outputs(M_ROWS, PANELS, config.vector)

    @cuda.jit
    def outputs(Q, K, P_image, V_image, V_record, W, V_amax, unsafe, O, first_row):
        # who am I: block -> head, m_block, d_block; a warp owns M_ROWS rows and PANELS tiles of columns
        H, Lq, Lk, Dv = Q.shape[1], Q.shape[2], K.shape[2], O.shape[3]
        (heads, m_blocks), d_blocks = unsafe.shape, quotient(Dv + (BLOCK_N - 1), BLOCK_N)
        head, m_block, d_block = place(cuda.blockIdx.x, heads, m_blocks, d_blocks)
        if unsafe[head, m_block] != 0:
            return
        m0 = m_block * BLOCK_M
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        own_row, own_panel = quotient(warp, WARPS_N) * M_ROWS, warp % WARPS_N * PANELS
        row0, d_tile = m0 + own_row, d_block * N_TILES + own_panel
        slabs, groups = quotient(Dv + (TILE - 1), TILE), W.shape[1]  # W is M, where weights stand by now
        g_end = quotient(end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk) + (TILE - 1), TILE)
        gP, gV, rV, gW = P_image[head], V_image[head], V_record[head], W[head]
        p_tile, v_tile = m_block * M_TILES * groups, d_block * N_TILES
        # Behind the last columns of V the same ones again, for nobody.
        p_next, v_next = groups * TILE_BYTES, TILE_BYTES if v_tile + 1 < slabs else 0
        v_own, own_next = min(d_tile, slabs - 1), 1 if d_tile + 1 < slabs else 0
        v_scale, v_unscale = scales(bits(V_amax[head]))

        # load the first slabs of P and V; reset acc
        smem = shared_memory()
        p_at = smem + own_row // TILE * PART_BYTES + own_row % TILE * (ROW_BYTES // PARTS) + lane_of_rows(lane)
        v_at = smem + (M_TILES + own_panel) * PART_BYTES + lane_of_keys(lane)
        to = smem + to_place(tid)
        for step in range(SLOTS - 1):
            g, part = quotient(step, PARTS), step & (PARTS - 1)
            p, v = p_place(p_tile + g, part, tid), v_place(v_tile + g * slabs, part, tid)
            copy(g < g_end, to + step * SLOT_BYTES, gP, p, p_next, gV, v, v_next)
            cp_async_commit()
        slot, free = int32(0), int32(SLOTS - 1)
        acc = cuda.local.array(PATCH_SHAPE, float32)
        w = cuda.local.array(ROW_SHAPE, float32)
        unscale = cuda.local.array(PANELS, float32)
        none = cuda.local.array(STATISTICS_SHAPE, float32)
        start(acc, none, none)
        load_weights(w, gW, 0, row0, lane)
        load_units(unscale, rV, v_own, own_next)

        # O = sum w P V
        for step in range(int32(g_end * PARTS)):
            wait_slot()
            # The slab is visible to all, and all are done with the slot that is filled next.
            cuda.syncthreads()
            g, part = quotient(step + (SLOTS - 1), PARTS), (step + (SLOTS - 1)) & (PARTS - 1)
            p, v, there = p_place(p_tile + g, part, tid), v_place(v_tile + g * slabs, part, tid), g < g_end
            a, b, copied = p_at + slot * SLOT_BYTES, v_at + slot * SLOT_BYTES, to + free * SLOT_BYTES
            multiply(acc, a, b, w, unscale, v_scale, there, copied, gP, p, p_next, gV, v, v_next)
            cp_async_commit()
            g = min(quotient(step + 1, PARTS), g_end - 1)
            load_weights(w, gW, g, row0, lane)
            load_units(unscale, rV, g * slabs + v_own, own_next)
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
