"""fp32 accuracy on tensor cores for wide heads: two products of halves by Hopper's `wgmma`, P in memory between.

Twelfth rung of the ladder. To the tenth, unfused_split_half_sm80, it adds warpgroups that multiply straight from shared
memory, and one that does nothing but copy. Bound by tensor cores, and by the bytes of splitting.

Algorithm. Five launches, see `two_products`. In two of them:

    scores    per block of 128 rows and 256 keys, slab by slab of 64 columns:     S = S + units Q K^T
              then for each group g of 64 keys:   m_g = rowmax S     P = 2^(S - m_g)     l_g = rowsum P
    outputs   per block of 128 rows and 256 columns, group by group of keys:      O = O + w_g units P V

    where `units` undoes the scales of the two tiles, and w_g = 2^(m_g - m) / l is what a group weighs in a row. For
    precision tf32 the same with one half and one product each.

Work split. One block an SM, which takes every gridDim-th block of S or O that counts: while one is written, the first
tiles of the next are on their way. A warpgroup has 64 rows and all 256 columns, as four panels
of 64; one thread of the last warpgroup copies.

Memory. Images take the bytes of Q, K and V again, columns padded to 64, that of P four bytes a score; with one half
half of all that. Batches of heads or of blocks of rows keep it below 512 MB. Shared: a ring of slots of 32 KB, each
with 128 rows of the left operand or 128 rows (columns) of the right one; with one half twice as many of half the size.
Registers per lane: 128 for S or O, 64 for the sums of one tile.

Numerics. As flash_split_half_sm90: each sum starts from zero at each tile, small products first, and is added in fp32.
P is split in units of its group's largest, so that its digits last whatever the row's largest is.

Limits. Compute capability 9.0; K and V of one head within 512 MB; grids are for 132 SMs.

Source. Split and sums: Ootomo and Yokota 2022. Partial softmax: Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from numba import cuda, float32

from numba_attn.device import mma_product, mma_tile, wgmma_panels, wgmma_product, wgmma_ring
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, quotient
from numba_attn.device.mma_product import TILE
from numba_attn.device.ptx_sm90 import let_next_launch_start, setmaxnreg
from numba_attn.device.smem import shared_memory
from numba_attn.device.softmax import ONE
from numba_attn.device.split_half import PEAK, ROW_BYTES, UNSCALE, WORD_BYTES, image_bytes, scales
from numba_attn.device.wgmma_fragments import GROUP_THREADS
from numba_attn.device.wgmma_product import AT_ONCE, GROUPS
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import Device, Problem
from numba_attn.two_products import TwoProducts, unsuited

BLOCK_M, PANELS = TILE * GROUPS, 4
BLOCK_N = PANELS * TILE
CONSUMERS, READERS = GROUP_THREADS * GROUPS, 4 * GROUPS
PATCH_SHAPE, ROW_SHAPE = (PANELS, TILE // 8, 4), (PANELS, 2)
REGISTERS = 24, 240  # of a thread that copies, and of one that multiplies: together those of an SM


@dataclass(frozen=True)
class Config:
    vector: int
    """Elements (4, or 1) of an access to the rows of O."""
    is_causal: bool
    slots: int
    halves: int
    """1 for precision tf32: one product."""
    beside: bool = True
    """Tiles are split beside the products, on SMs that these leave free, see `ImageBatches.launches_beside`."""

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (GROUPS + 1)

    @property
    def smem_bytes(self) -> int:
        """The ring of slots, and the barriers of each: full, and read."""
        return self.slots * (wgmma_product.slot_bytes(self.halves) + 2 * wgmma_ring.BARRIER_BYTES)


SMS = 132
"""Blocks of a launch at most, one for each SM of an H100 or H200: more work is dealt out in turns."""


def supports(problem: Problem, device: Device) -> str | None:
    if device.cc != (9, 0):
        return f"multiplies halves by wgmma, of compute capability 9.0 alone: {device.name} has {device.cc}"
    return steps(problem, config(problem, device)).images.refusal


def suits(problem: Problem, device: Device) -> str | None:
    return unsuited(problem)


def config(problem: Problem, device: Device) -> Config:
    slots, halves = (14, 1) if problem.precision == "tf32" else (7, 2)
    return Config(4 if problem.vector == 4 else 1, problem.is_causal, slots, halves)


def configs():
    for vector, is_causal, sizes in product((4, 1), (False, True), ((7, 2), (14, 1))):
        yield Config(vector, is_causal, *sizes)


def small_config(problem: Problem) -> Config:
    return Config(1, problem.is_causal, slots=4, halves=1 if problem.precision == "tf32" else 2)


def steps(problem: Problem, config: Config) -> TwoProducts:
    return TwoProducts(problem, BLOCK_M, BLOCK_N, AT_ONCE, SMS, halves=config.halves, beside=config.beside)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    return steps(problem, config).images.workspace


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    return steps(problem, config).launches(build_scores, build_outputs, config, config.threads, config.smem_bytes)


def of_ring(config: Config) -> tuple:
    """The verbs that hand out registers, and those of the ring and its copies."""
    few, many = (setmaxnreg(n, more=more) for n, more in zip(REGISTERS, (False, True), strict=True))
    ring = wgmma_product.ring(config.slots, READERS, config.halves)
    copies = wgmma_product.copy_left(config.halves), wgmma_product.copy_right(config.halves)
    return few, many, wgmma_ring.ring(config.slots), *ring, *copies


def build_scores(config: Config):
    SLOTS, HALVES, BESIDE = config.slots, config.halves, config.beside
    TILE_BYTES = image_bytes(TILE, TILE, HALVES)
    TILE_WORDS = TILE_BYTES // WORD_BYTES
    end_of_row = Mask(config.is_causal).end
    few, many, following, start_ring, claim, give_back, copy_left, copy_right = of_ring(config)
    start = mma_tile.start(16 * PANELS, TILE)  # panels stand where rows do there
    multiply, multiply_more = (wgmma_product.multiply(half, SLOTS, False, HALVES) for half in range(2))
    count, find = wgmma_product.blocks_of_scores(not config.is_causal, BLOCK_M, BLOCK_N, end_of_row)
    load_units = wgmma_product.load_units(PANELS)
    mask = wgmma_panels.masked(PANELS, end_of_row)
    softmax = mma_tile.softmax(16 * PANELS, TILE)  # statistics of each panel, not of all
    store_image = wgmma_panels.store_image(PANELS, HALVES)
    store_statistics = wgmma_panels.store_statistics(PANELS)

    @cuda.jit
    def scores(Q, K, Q_image, K_image, Q_record, K_record, P_image, M, L, unsafe, first_row):
        # who am I: every gridDim-th block of S; a warpgroup owns 64 rows of it, the last one copies
        if BESIDE:
            let_next_launch_start()
        Lq, D, Lk = Q.shape[2], Q.shape[3], K.shape[2]
        heads, m_blocks = unsafe.shape  # a shape alone: the next launch fills it
        tid, warpgroup = cuda.threadIdx.x, cuda.threadIdx.x // GROUP_THREADS
        slabs, groups = quotient(D + (TILE - 1), TILE), M.shape[1]
        ring = shared_memory()
        start_ring(ring, tid)
        turn, of_head = 0, count(m_blocks, Lq, Lk, first_row)

        if tid >= CONSUMERS:
            # copy tiles of Q and K as slots become free
            few()
            if tid == CONSUMERS:
                step = slabs * TILE_WORDS
                for block in range(cuda.blockIdx.x, heads * of_head, cuda.gridDim.x):
                    head = quotient(block, of_head)
                    m_block, n0, end = find(block - head * of_head, m_blocks, Lq, Lk, first_row)
                    gQ, gK = Q_image[head], K_image[head]
                    q_tile, k_tile = m_block * GROUPS * slabs, quotient(n0, TILE) * slabs
                    for slab in range(slabs):
                        slot, barrier = claim(ring, turn)
                        copy_left(slot, gQ, (q_tile + slab) * TILE_WORDS, step, barrier)
                        turn = following(turn)
                        for half in range(2 if n0 + AT_ONCE < end else 1):
                            slot, barrier = claim(ring, turn)
                            copy_right(slot, gK, (k_tile + 2 * half * slabs + slab) * TILE_WORDS, step, barrier)
                            turn = following(turn)
        else:
            many()
            lane, warp_row = tid & 31, tid // 32 * 16
            S = cuda.local.array(PATCH_SHAPE, float32)  # then P
            unit = cuda.local.array(ROW_SHAPE, float32)
            m = cuda.local.array(ROW_SHAPE, float32)
            l = cuda.local.array(ROW_SHAPE, float32)
            alpha = cuda.local.array(ROW_SHAPE, float32)
            for block in range(cuda.blockIdx.x, heads * of_head, cuda.gridDim.x):
                # S = Q K^T
                head = quotient(block, of_head)
                m_block, n0, end = find(block - head * of_head, m_blocks, Lq, Lk, first_row)
                rQ, rK, is_wide = Q_record[head], K_record[head], n0 + AT_ONCE < end
                q_tile, k_tile = (m_block * GROUPS + warpgroup) * slabs, quotient(n0, TILE) * slabs
                start(S, m, l)
                for slab in range(slabs):
                    load_units(unit, rK, k_tile + slab, slabs, rQ[q_tile + slab, UNSCALE])
                    a_turn, turn = turn, following(turn)
                    multiply(S, warpgroup * TILE_BYTES, ring, a_turn, turn, unit, lane == 0)
                    turn = following(turn)
                    if is_wide:
                        multiply_more(S, warpgroup * TILE_BYTES, ring, a_turn, turn, unit, lane == 0)
                        turn = following(turn)
                    give_back(ring, a_turn, lane == 0)

                # P = 2^(S - m)
                row0 = m_block * BLOCK_M + warp_row
                if n0 + BLOCK_N > end_of_row(first_row + row0, Lk):
                    mask(S, first_row + row0, n0, Lk, lane)
                softmax(S, m, l, alpha, ONE, PEAK)
                n = PANELS if is_wide else 2
                word = ((m_block * GROUPS + warpgroup) * groups + quotient(n0, TILE)) * TILE_WORDS
                word += warp_row % TILE * (ROW_BYTES // WORD_BYTES)
                store_image(P_image[head], word, S, n, lane)
                store_statistics(M[head], L[head], m, l, quotient(n0, TILE), n, row0, lane)

    return scores


def build_outputs(config: Config):
    SLOTS, HALVES, BESIDE = config.slots, config.halves, config.beside
    TILE_BYTES = image_bytes(TILE, TILE, HALVES)
    TILE_WORDS = TILE_BYTES // WORD_BYTES
    end_of_row = Mask(config.is_causal).end
    few, many, following, start_ring, claim, give_back, copy_left, copy_right = of_ring(config)
    start = mma_tile.start(16 * PANELS, TILE)  # panels stand where rows do there
    multiply, multiply_more = (wgmma_product.multiply(half, SLOTS, True, HALVES) for half in range(2))
    load_factors = wgmma_product.load_factors(PANELS)
    place = mma_product.place(config.is_causal)
    store = wgmma_panels.store_outputs(PANELS, config.vector)

    @cuda.jit
    def outputs(Q, K, P_image, V_image, V_record, W, V_amax, unsafe, O, first_row):
        # who am I: every gridDim-th block of O; a warpgroup owns 64 rows of it, the last one copies
        if BESIDE:
            let_next_launch_start()
        H, Lq, Lk, Dv = Q.shape[1], Q.shape[2], K.shape[2], O.shape[3]
        (heads, m_blocks), d_blocks = unsafe.shape, quotient(Dv + (BLOCK_N - 1), BLOCK_N)
        tid, warpgroup = cuda.threadIdx.x, cuda.threadIdx.x // GROUP_THREADS
        slabs, groups = quotient(Dv + (TILE - 1), TILE), W.shape[1]  # W is M, where weights stand by now
        ring = shared_memory()
        start_ring(ring, tid)
        turn = 0

        if tid >= CONSUMERS:
            # copy tiles of P and V as slots become free
            few()
            if tid == CONSUMERS:
                for block in range(cuda.blockIdx.x, heads * m_blocks * d_blocks, cuda.gridDim.x):
                    head, m_block, d_block = place(block, heads, m_blocks, d_blocks)
                    end = end_of_row(first_row + min((m_block + 1) * BLOCK_M, Lq) - 1, Lk)
                    gP, gV = P_image[head], V_image[head]
                    p_tile, d_tile = m_block * GROUPS * groups, d_block * PANELS
                    for g in range(quotient(end + (TILE - 1), TILE) if unsafe[head, m_block] == 0 else 0):
                        slot, barrier = claim(ring, turn)
                        copy_left(slot, gP, (p_tile + g) * TILE_WORDS, groups * TILE_WORDS, barrier)
                        turn = following(turn)
                        for half in range(2 if d_tile + 2 < slabs else 1):
                            slot, barrier = claim(ring, turn)
                            tile = d_tile + 2 * half
                            # Behind the last columns of V the same ones again, for nobody.
                            step = TILE_WORDS if tile + 1 < slabs else 0
                            copy_right(slot, gV, (g * slabs + tile) * TILE_WORDS, step, barrier)
                            turn = following(turn)
        else:
            many()
            lane = tid & 31
            acc = cuda.local.array(PATCH_SHAPE, float32)
            factor = cuda.local.array(ROW_SHAPE, float32)
            for block in range(cuda.blockIdx.x, heads * m_blocks * d_blocks, cuda.gridDim.x):
                head, m_block, d_block = place(block, heads, m_blocks, d_blocks)
                if unsafe[head, m_block] == 0:
                    # O = sum w P V
                    end = end_of_row(first_row + min((m_block + 1) * BLOCK_M, Lq) - 1, Lk)
                    row0, d_tile = m_block * BLOCK_M + tid // 32 * 16, d_block * PANELS
                    rV, gW = V_record[head], W[head]
                    v_scale, v_unscale = scales(bits(V_amax[head]))
                    start(acc, factor, factor)  # without m and l: factor stands in for both, and is loaded below
                    for g in range(quotient(end + (TILE - 1), TILE)):
                        load_factors(factor, gW[g], rV, g * slabs + d_tile, (g + 1) * slabs, v_scale, row0, lane)
                        a_turn, turn = turn, following(turn)
                        multiply(acc, warpgroup * TILE_BYTES, ring, a_turn, turn, factor, lane == 0)
                        turn = following(turn)
                        if d_tile + 2 < slabs:
                            multiply_more(acc, warpgroup * TILE_BYTES, ring, a_turn, turn, factor, lane == 0)
                            turn = following(turn)
                        give_back(ring, a_turn, lane == 0)
                    b = quotient(head, H)
                    store(O[b, head - b * H], acc, v_unscale / PEAK, row0, d_block * BLOCK_N, lane)

    return outputs


KERNEL = Kernel(
    name="unfused_split_half_sm90",
    summary="wide heads: two products of fp16 halves by wgmma, P in memory between",
    accuracy="fp32",
    lower_accuracies=("tf32",),
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
)
