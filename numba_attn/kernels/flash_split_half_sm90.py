"""fp32 accuracy on tensor cores: operands split into fp16 halves, three products each, by Hopper's `wgmma`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from numba import cuda, float32, int32

from numba_attn.device import mma_tile, wgmma_tile
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, cdiv
from numba_attn.device.ptx_sm90 import (
    fence_mbarrier_init,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg,
)
from numba_attn.device.rescue_kernel import FEW_KEYS
from numba_attn.device.smem import shared_memory
from numba_attn.device.split_half import (
    BLOCK_COLUMNS,
    FEW_COLUMNS,
    PEAK,
    ROW_BYTES,
    UNSCALE,
    extremes,
    image_bytes,
    is_safe,
    padded,
    peak_of,
    scales,
    unit_of,
)
from numba_attn.device.split_half import SLACK as SLACKS
from numba_attn.device.wgmma_fragments import GROUP_ROWS, GROUP_THREADS, STEP
from numba_attn.images import ImageBatches
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import Device, Problem


@dataclass(frozen=True)
class Config:
    d_bucket: int
    groups: int
    """Warpgroups that multiply, of 64 rows each; one more copies."""
    k_rows: int
    part: int
    """Columns of a tile of K or V in one slot."""
    slots: int
    s_chains: int
    """Sums of 64 columns of S that are issued together."""
    o_columns: int
    """Columns of O that are."""
    products: int = 3
    is_causal: bool = False

    def __post_init__(self):
        if self.k_rows % GROUP_ROWS or self.block_m % self.k_rows or padded(self.d_bucket) % self.part:
            raise ValueError(f"{self.k_rows=} must be ...")

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (self.groups + 1)

    @property
    def block_m(self) -> int:
        return GROUP_ROWS * self.groups

    @property
    def q_bytes(self) -> int:
        return image_bytes(self.block_m, self.d_bucket)

    @property
    def slot_bytes(self) -> int:
        return image_bytes(self.k_rows, self.part)

    @property
    def smem_bytes(self) -> int:
        """Q, the ring of slots for K and V, and the barriers: full, read, and Q's."""
        return self.q_bytes + self.slots * self.slot_bytes + (2 * self.slots + 1) * wgmma_tile.BARRIER_BYTES

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and of one that multiplies: together those of an SM."""
        few = 24 if self.groups < 3 else 32
        return few, min(240, (65536 // GROUP_THREADS - few) // self.groups // 8 * 8)


TILES = (
    Config(32, groups=3, k_rows=64, part=64, slots=4, s_chains=1, o_columns=32, products=4),
    Config(64, groups=3, k_rows=64, part=64, slots=8, s_chains=1, o_columns=64),
    Config(128, groups=2, k_rows=64, part=128, slots=5, s_chains=2, o_columns=128),
    Config(192, groups=2, k_rows=64, part=64, slots=8, s_chains=1, o_columns=64),
    Config(256, groups=2, k_rows=64, part=128, slots=3, s_chains=1, o_columns=64),
)
LEAST_ROWS, LEAST_FLOP = 64, 1e9  # below which other kernels are faster
L2_BYTES = 32 * 1024 * 1024
"""Images of K and V that the blocks of one time should share in L2."""


def supports(problem: Problem, device: Device) -> str | None:
    if device.cc != (9, 0):
        return f"multiplies halves by wgmma, of compute capability 9.0 alone: {device.name} has {device.cc}"
    if max(problem.D, problem.Dv) > TILES[-1].d_bucket:
        return f"keeps O in registers, up to {TILES[-1].d_bucket} columns: D={problem.D}, Dv={problem.Dv}"
    return images(problem, config(problem, device)).refusal


def suits(problem: Problem, device: Device) -> str | None:
    if problem.precision == "tf32":
        return "three products: flash_split_half_sm80 has one for precision tf32"
    if problem.D < FEW_COLUMNS:
        return f"fewer than {FEW_COLUMNS} columns: done one key at a time in fp32, halves would lose digits"
    if problem.Lq < LEAST_ROWS:
        return f"fewer than {LEAST_ROWS} rows a head: most of a block would be empty"
    if problem.flop < LEAST_FLOP:
        return f"less than {LEAST_FLOP:.0e} operations: three launches take longer than they save"
    return None


def config(problem: Problem, device: Device) -> Config:
    tiles = next((tiles for tiles in TILES if tiles.d_bucket >= max(problem.D, problem.Dv)), TILES[-1])
    return replace(tiles, is_causal=problem.is_causal)


def configs():
    for tiles, is_causal in product(TILES, (False, True)):
        yield replace(tiles, is_causal=is_causal)


def small_config(problem: Problem) -> Config:
    d_bucket = cdiv(max(problem.D, problem.Dv), 16) * 16
    products = 4 if d_bucket <= 32 else 3
    tiles = Config(d_bucket, groups=1, k_rows=64, part=64, slots=3, s_chains=1, o_columns=64, products=products)
    return replace(tiles, is_causal=problem.is_causal)


def images(problem: Problem, config: Config) -> ImageBatches:
    lost = mma_tile.lost_by_scores(min(BLOCK_COLUMNS, config.d_bucket), BLOCK_COLUMNS // STEP)
    return ImageBatches(problem, config.k_rows, config.d_bucket, config.block_m, lost=lost)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    return images(problem, config).workspace


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    return images(problem, config).launches_around(
        build_flash, config, threads=config.threads, smem_bytes=config.smem_bytes
    )


def build_flash(config: Config):
    GROUPS, K_ROWS, SLOTS, COLUMNS, PART = config.groups, config.k_rows, config.slots, config.d_bucket, config.part
    BLOCK_M, Q_BYTES, SLOT_BYTES = config.block_m, config.q_bytes, config.slot_bytes
    Q_TILES, Q_WORDS, PARTS = BLOCK_M // K_ROWS, config.q_bytes // 4, padded(COLUMNS) // PART
    Q_IMAGE_BYTES, GROUP_WARPS = image_bytes(K_ROWS, COLUMNS), 4
    CONSUMERS, READERS = GROUP_THREADS * GROUPS, GROUP_WARPS * GROUPS
    FULL, Q_FULL = Q_BYTES + SLOTS * SLOT_BYTES, Q_BYTES + SLOTS * SLOT_BYTES + 16 * SLOTS
    HEAD_BYTES = 2 * Q_IMAGE_BYTES  # of a tile of K and one of V
    IS_CAUSAL, WARP_ROWS = config.is_causal, 16
    S_SHAPE, O_SHAPE, ROW_SHAPE = (1, K_ROWS // 8, 4), (1, COLUMNS // 8, 4), (1, 2)
    LEFT_SHAPE = (2, K_ROWS // STEP, 4)
    end_of_row, SLACK = Mask(config.is_causal).end, SLACKS[2]
    few, many = (setmaxnreg(n, more=more) for n, more in zip(config.registers, (False, True), strict=True))
    copy_q = wgmma_tile.copy_tiles(Q_BYTES)
    copy = wgmma_tile.copy_part(K_ROWS, COLUMNS, PART)
    following = wgmma_tile.ring(SLOTS)
    start = mma_tile.start(WARP_ROWS, COLUMNS)
    qk = wgmma_tile.scores(K_ROWS, K_ROWS, COLUMNS, PART, config.products, SLOTS, config.s_chains)
    mask = mma_tile.masked(WARP_ROWS, K_ROWS, end_of_row)
    softmax = mma_tile.softmax(WARP_ROWS, K_ROWS)
    split = wgmma_tile.split_left(K_ROWS)
    pv = wgmma_tile.outputs(K_ROWS, COLUMNS, PART, SLOTS, config.o_columns)
    finish = mma_tile.finish(WARP_ROWS, COLUMNS)
    store_lse = mma_tile.store_lse(WARP_ROWS)

    @cuda.jit
    def flash_split_half(Q, K, Q_image, K_image, V_image, Q_record, K_record, V_record, unsafe, O, lse, first_row):
        # who am I: block -> batch, head, m_block; a warpgroup owns 64 query rows, the last one copies
        H, Lq, D, Lk = Q.shape[1], Q.shape[2], Q.shape[3], K.shape[2]
        heads, m_blocks = unsafe.shape
        head, m_block = cuda.blockIdx.x // m_blocks, cuda.blockIdx.x % m_blocks
        if IS_CAUSAL:
            # The last rows have the most keys: start with those of as many heads as L2 holds, so that no long block
            # comes last.
            together = min(heads, max(1, L2_BYTES // (K_record.shape[1] * HEAD_BYTES)))
            first = cuda.blockIdx.x // (together * m_blocks) * together
            together = min(together, heads - first)
            place = cuda.blockIdx.x - first * m_blocks
            head, m_block = first + place % together, m_blocks - 1 - place // together
        b, h = head // H, head % H
        tid = cuda.threadIdx.x
        lane, group = tid & 31, tid // GROUP_THREADS
        m0 = m_block * BLOCK_M
        rQ, rK, rV = Q_record[head], K_record[head], V_record[head]

        # halves only where they lose nothing
        q_tile = m_block * Q_TILES
        q_amax, q_level, _ = extremes(rQ, q_tile, q_tile + Q_TILES, lane)
        k_amax, k_level, _ = extremes(rK, 0, rK.shape[0], lane)
        v_amax, _, v_min = extremes(rV, 0, rV.shape[0], lane)
        safe = is_safe(float32(D), q_amax, q_level, k_amax, k_level, v_amax, v_min, SLACK) and Lk >= FEW_KEYS
        if tid == 0:
            unsafe[head, m_block] = 0 if safe else 1
        if not safe:
            return

        smem = shared_memory()
        ring, full, q_full = smem + Q_BYTES, smem + FULL, smem + Q_FULL
        if tid == 0:
            mbarrier_init(q_full, 1)
            for slot in range(SLOTS):
                mbarrier_init(full + 8 * slot, 1)
                mbarrier_init(full + 8 * (SLOTS + slot), READERS)
            fence_mbarrier_init()
        # The barriers are there for all.
        cuda.syncthreads()
        n_end = end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk)
        n_blocks = (n_end + K_ROWS - 1) // K_ROWS
        turn = 0

        if tid >= CONSUMERS:
            # copy Q, and K and V of each tile in turn, as slots become free
            few()
            if tid == CONSUMERS:
                gK, gV = K_image[head], V_image[head]
                mbarrier_arrive_expect(q_full, Q_BYTES)
                copy_q(smem, Q_image[head], m_block * Q_WORDS, q_full)
                for tile in range(2 * n_blocks):
                    for part in range(PARTS):
                        slot, barrier = turn >> 1, full + 8 * (turn >> 1)
                        # All warps have read what was in the slot.
                        mbarrier_wait(barrier + 8 * SLOTS, (turn & 1) ^ 1)
                        mbarrier_arrive_expect(barrier, SLOT_BYTES)
                        copy(ring + slot * SLOT_BYTES, gV if tile & 1 else gK, tile >> 1, part, barrier)
                        turn = following(turn)
        else:
            # reset m, l, acc
            many()
            S = cuda.local.array(S_SHAPE, float32)  # then P
            left = cuda.local.array(LEFT_SHAPE, int32)  # P in halves
            acc = cuda.local.array(O_SHAPE, float32)
            m = cuda.local.array(ROW_SHAPE, float32)
            l = cuda.local.array(ROW_SHAPE, float32)
            alpha = cuda.local.array(ROW_SHAPE, float32)
            turns = cuda.local.array(PARTS, int32)
            start(acc, m, l)
            group_row = group * GROUP_ROWS
            row0 = m0 + (tid >> 5) * WARP_ROWS
            q_at = smem + group_row // K_ROWS * Q_IMAGE_BYTES + group_row % K_ROWS * ROW_BYTES
            q_unscale = rQ[q_tile + group_row // K_ROWS, UNSCALE]
            v_scale, v_unscale = scales(bits(v_amax))
            mbarrier_wait(q_full, 0)

            for n_block in range(n_blocks):
                n0 = n_block * K_ROWS
                unit = unit_of(q_unscale, rK[n_block, UNSCALE])
                peak = peak_of(rV[n_block, UNSCALE], v_scale)

                # S = Q K^T, P = 2^(S - m)
                for part in range(PARTS):
                    turns[part] = turn
                    turn = following(turn)
                qk(S, q_at, ring, turns, lane == 0)
                if n0 + K_ROWS > end_of_row(first_row + row0, Lk):
                    mask(S, first_row + row0, n0, Lk, lane)
                softmax(S, m, l, alpha, unit, peak)
                split(left, S)

                # O = alpha O + P V
                for part in range(PARTS):
                    turns[part] = turn
                    turn = following(turn)
                pv(acc, left, alpha, ring, turns, lane == 0)

            # finish: O = acc / l, lse = m + ln l
            finish(O[b, h], acc, l, v_unscale / PEAK, row0, lane)
            store_lse(lse[b, h], m, l, row0, lane)

    return flash_split_half


KERNEL = Kernel(
    name="flash_split_half_sm90",
    summary="operands split into fp16 halves, three tensor-core products each, by wgmma",
    accuracy="fp32",
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
)
