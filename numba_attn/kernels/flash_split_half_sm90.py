"""fp32 accuracy on tensor cores: operands split into fp16 halves, three products each, by Hopper's `wgmma`.

Eleventh rung of the ladder. To the ninth, flash_split_half_sm80, it adds warpgroups that multiply straight from shared
memory, and one that does nothing but copy. Bound by tensor cores, and by the softmax between two products (d64).

Algorithm. Three launches:

    split    tiles of K and V become images of halves, with one exponent and a record of what was lost per tile.
    flash    per block of query rows, which become halves too, over tiles of keys, in base 2:
             1.  S = Q K^T              hi hi + hi lo + lo hi on the tensor cores, 64 columns at a time
             2.  m_new = max(m, rowmax S)     alpha = 2^(m - m_new)     P = 2^(S - m_new)
             3.  l = alpha l + rowsum P
             4.  O = alpha O + P V      P split in the registers that S was summed in
             and after the last tile O = O / l, lse = m + ln l.
    rescue   blocks for which halves would lose digits (`is_safe`), and rows with few keys: fp32 without tensor cores,
             scores to twice its digits.

Work split. One block for 64 GROUPS query rows of a head. A warpgroup owns 64 rows, each of its warps splits 16 of them.
One thread of the last warpgroup copies K and V, tile by tile, to a ring of SLOTS slots, each with two barriers: full
(the bytes are there) and read (all warps are done with them). Where it pays warpgroups take turns at Q K^T.

Memory. Images take HALVES / 2 of the bytes of K and V, columns PADDED to 64s. Shared: 128 HALVES (GROUPS PADDED + SLOTS
PART) bytes. Registers: COLUMNS / 2 for O, O_COLUMNS / 2 for its sums; 32 for S and each of its sums.

Numerics. As flash_split_half_sm80; sums are truncated within 64 columns (S) or one tile of keys (O). For precision
tf32 one half and one product each.

Limits. Compute capability 9.0; head dims up to 256; images of K and V of one head within 512 MB.

Source. Split and sums: Ootomo and Yokota 2022. FlashAttention-3 (Shah et al. 2024). PTX ISA: wgmma, mbarrier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from numba import cuda, float32, int32

from numba_attn.device import mma_epilogue, mma_tile, split_q, wgmma_ring, wgmma_tile
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, cdiv, quotient
from numba_attn.device.ptx import of_warp, opaque
from numba_attn.device.ptx_sm90 import setmaxnreg
from numba_attn.device.rescue_kernel import FEW_KEYS
from numba_attn.device.smem import shared_memory, shared_tile
from numba_attn.device.split_half import PEAK, UNSCALE, image_bytes, padded, peak_of, scales, units_of
from numba_attn.device.split_q import GROUP_WARPS, WARP_ROWS
from numba_attn.device.wgmma_fragments import GROUP_ROWS, GROUP_THREADS, STEP
from numba_attn.device.wgmma_ring import BARRIER_BYTES
from numba_attn.images import ImageBatches, unsuited
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import H200, Device, Problem


@dataclass(frozen=True)
class Config:
    d_bucket: int
    groups: int  # warpgroups that multiply; one more copies
    part: int  # columns of a tile of K or V in one slot
    slots: int
    s_chains: int  # sums of 64 columns of S that are issued together
    o_columns: int  # columns of O that are summed together
    products: int = 3  # 1 for precision tf32; the fourth, lo lo of Q K^T, shows beside errors of very short sums only
    ping_pong: bool = False  # warpgroups take turns at Q K^T: one multiplies while another exponentiates
    is_causal: bool = False

    def __post_init__(self):
        if self.part % GROUP_ROWS or padded(self.d_bucket) % self.part or self.part % min(self.part, self.o_columns):
            raise ValueError(f"64 must divide {self.part=}, that padded {self.d_bucket=}, and {self.o_columns=} it")
        if self.slots * self.part < padded(self.d_bucket):
            raise ValueError(f"a tile of {self.d_bucket=} columns does not fit in {self.slots=} of {self.part=}")

    @property
    def halves(self) -> int:
        return mma_tile.halves_of(self.products)

    def bytes_of(self, rows: int, columns: int) -> int:
        return image_bytes(rows, columns, self.halves)

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (self.groups + 1)

    @property
    def block_m(self) -> int:
        return GROUP_ROWS * self.groups

    @property
    def tiles_bytes(self) -> int:
        return self.bytes_of(self.block_m, self.d_bucket) + self.slots * self.bytes_of(GROUP_ROWS, self.part)

    @property
    def smem_bytes(self) -> int:
        """Q and the ring of slots, two barriers of each; then what is known of each warp's rows of Q."""
        facts = split_q.facts_bytes(GROUP_WARPS * self.groups, self.d_bucket)
        return self.tiles_bytes + 2 * self.slots * BARRIER_BYTES + facts

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and of one that multiplies: together what the block starts with, or it hangs."""
        together = min(240, 65536 // self.threads // 8 * 8) * (self.groups + 1)
        many = min(240 if self.d_bucket > 192 else 232, (together - 24) // self.groups // 8 * 8)
        return together - many * self.groups, many


# Up to 128 columns three warpgroups share what is copied, and take turns; wider ones have no registers for a third.
NARROW = {"groups": 3, "ping_pong": True}
TILES = (
    Config(32, part=64, slots=4, s_chains=1, o_columns=32, products=4, **NARROW),
    Config(64, part=64, slots=8, s_chains=1, o_columns=64, **NARROW),
    Config(96, part=128, slots=4, s_chains=2, o_columns=64, **NARROW),
    Config(128, part=128, slots=4, s_chains=2, o_columns=64, **NARROW),
    Config(192, groups=2, part=64, slots=8, s_chains=1, o_columns=64, ping_pong=True),
    Config(256, groups=2, part=64, slots=6, s_chains=1, o_columns=64),
)
# For precision tf32: images of half the size.
ONE_PRODUCT = (
    Config(64, part=64, slots=16, s_chains=1, o_columns=64, products=1, **NARROW),
    Config(128, part=128, slots=8, s_chains=2, o_columns=128, products=1, **NARROW),
    Config(256, groups=2, part=128, slots=8, s_chains=1, o_columns=64, products=1, ping_pong=True),
)


def supports(problem: Problem, device: Device) -> str | None:
    if device.cc != (9, 0):
        return f"multiplies halves by wgmma, of compute capability 9.0 alone: {device.name} has {device.cc}"
    if max(problem.D, problem.Dv) > TILES[-1].d_bucket:
        return f"keeps O in registers, up to {TILES[-1].d_bucket} columns: D={problem.D}, Dv={problem.Dv}"
    return images(problem, config(problem, device)).refusal


def config(problem: Problem, device: Device) -> Config:
    table = ONE_PRODUCT if problem.precision == "tf32" else TILES
    tiles = next((tiles for tiles in table if tiles.d_bucket >= max(problem.D, problem.Dv)), table[-1])
    return of_causality(tiles, problem.is_causal)


def of_causality(tiles: Config, is_causal: bool) -> Config:
    # Which of the two keeps 256 columns in registers is the compiler's whim.
    parts = {"part": 128, "slots": 3} if is_causal and tiles.d_bucket > 192 and tiles.halves == 2 else {}
    return replace(tiles, is_causal=is_causal, **parts)


def configs():
    return (of_causality(*pair) for pair in product(TILES + ONE_PRODUCT, (False, True)))


def small_config(problem: Problem) -> Config:
    chosen, d_bucket = config(problem, H200), cdiv(max(problem.D, problem.Dv), 16) * 16
    tiles = {"groups": 1, "part": 64, "slots": max(3, cdiv(d_bucket, 64)), "s_chains": 1, "o_columns": 64}
    products = 1 if chosen.products == 1 else 4 if d_bucket <= 32 else 3
    return replace(chosen, d_bucket=d_bucket, products=products, ping_pong=False, **tiles)


def images(problem: Problem, config: Config) -> ImageBatches:
    halves = config.halves
    lost = mma_tile.lost_by_scores(problem.D, GROUP_ROWS // STEP, small_first=True) if halves == 2 else 0.0
    return ImageBatches(problem, GROUP_ROWS, config.d_bucket, config.block_m, lost=lost, halves=halves, has_q=False)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    return images(problem, config).workspace


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    sizes, batches = {"threads": config.threads, "smem_bytes": config.smem_bytes}, images(problem, config)
    return batches.launches_around(build_flash, config, (problem.vector, "scale", units_of(batches.lost)), **sizes)


def build_flash(config: Config):
    GROUPS, BLOCK_M, COLUMNS = config.groups, config.block_m, config.d_bucket
    SLOTS, PART, PARTS = config.slots, config.part, padded(config.d_bucket) // config.part
    Q_BYTES, TILE_BYTES, HALVES = config.bytes_of(BLOCK_M, COLUMNS), config.bytes_of(GROUP_ROWS, COLUMNS), config.halves
    BARRIERS, CONSUMERS = config.tiles_bytes, GROUP_THREADS * GROUPS
    PING_PONG, SKIPS = config.ping_pong, COLUMNS <= 128  # wider ones were slower
    IS_EARLY = not config.is_causal  # under causality it was 10 percent slower
    (load_q, judge, units), X_SHAPE = split_q.verbs(COLUMNS, GROUPS, HALVES), split_q.x_shape(COLUMNS)
    FACT = shared_tile(BARRIERS + 2 * SLOTS * BARRIER_BYTES, split_q.facts_shape(GROUP_WARPS * GROUPS, COLUMNS))
    S_SHAPE, O_SHAPE, ROW_SHAPE = (1, GROUP_ROWS // 8, 4), (1, COLUMNS // 8, 4), (1, 2)
    LEFT_SHAPE, take_turn, end_turn = (HALVES, GROUP_ROWS // STEP, 4), *wgmma_tile.turns(GROUPS)
    end_of_row = Mask(config.is_causal).end
    few, many = (setmaxnreg(n, more=more) for n, more in zip(config.registers, (False, True), strict=True))
    start_barriers = wgmma_ring.start_barriers(SLOTS, GROUP_WARPS * GROUPS)
    place, feed = wgmma_tile.place(config.is_causal, 2 * TILE_BYTES), wgmma_ring.feed(COLUMNS, PART, SLOTS, HALVES)
    await_slots, N_EARLY = wgmma_ring.await_slots(PARTS), int(IS_EARLY)
    FIRST_TURN = wgmma_ring.turn_after(PARTS, SLOTS) if IS_EARLY else 0
    take, skip = wgmma_ring.take(PARTS, SLOTS), wgmma_tile.skip(COLUMNS, PART, SLOTS)
    start, split = mma_tile.start(WARP_ROWS, COLUMNS), wgmma_tile.split_left(HALVES)
    qk = wgmma_tile.scores(COLUMNS, PART, config.products, SLOTS, config.s_chains)
    mask, softmax = mma_tile.masked(WARP_ROWS, GROUP_ROWS, end_of_row), mma_tile.softmax(WARP_ROWS, GROUP_ROWS, True)
    pv = wgmma_tile.outputs(COLUMNS, PART, min(config.products, 3), SLOTS, config.o_columns)
    finish, store_lse = mma_epilogue.finish_wide(WARP_ROWS, COLUMNS), mma_epilogue.store_lse(WARP_ROWS)

    @cuda.jit
    def flash_split_half(Q, K, K_image, V_image, K_record, V_record, unsafe, O, lse, first_row, vector, scale, lost):
        # who am I: block -> head, m_block; a warpgroup owns 64 query rows, the last one copies
        H, Lq, Lk, (heads, m_blocks) = Q.shape[1], Q.shape[2], K.shape[2], unsafe.shape
        head, m_block = place(cuda.blockIdx.x, heads, m_blocks, K_record.shape[1])
        tid, m0, b, has_keys = cuda.threadIdx.x, m_block * BLOCK_M, quotient(head, H), Lk >= FEW_KEYS
        smem = shared_memory()
        ring, barriers, gQ = smem + Q_BYTES, smem + BARRIERS, Q[b, head - b * H]

        # Q and the first tile of K, on their way while it is found out whether they are needed
        start_barriers(barriers, tid)
        x, warp0 = cuda.local.array(X_SHAPE, float32), m0 + (tid >> 5) * WARP_ROWS
        load_q(x, gQ, warp0, tid, vector)
        if IS_EARLY and has_keys and tid == CONSUMERS:
            own = opaque(head)
            feed(ring, barriers, 0, K_image[own], V_image[own], 0, 1)

        # halves only where they lose nothing
        safe, v_amax = judge(x, gQ, warp0, vector, smem, FACT(smem), K_record[head], V_record[head], scale, lost, tid)
        safe &= has_keys
        if tid == 0:
            unsafe[head, m_block] = not safe
        if not safe:
            if IS_EARLY and has_keys and tid == CONSUMERS:
                # Nothing may arrive once shared memory is another block's.
                await_slots(barriers)
            return
        head, m_block = place(opaque(cuda.blockIdx.x), heads, m_blocks, K_record.shape[1])
        m0, tid = m_block * BLOCK_M, opaque(cuda.threadIdx.x)
        lane, group = tid & 31, of_warp(tid >> 7)
        n_end = end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk)

        if tid >= CONSUMERS:
            # copy tiles of K and V as slots become free
            few()
            if tid == CONSUMERS:
                tiles = 2 * quotient(n_end + (GROUP_ROWS - 1), GROUP_ROWS)
                feed(ring, barriers, FIRST_TURN, K_image[head], V_image[head], N_EARLY, tiles)
        else:
            # reset m, l, acc
            many()
            S = cuda.local.array(S_SHAPE, float32)  # then P
            left = cuda.local.array(LEFT_SHAPE, int32)  # P in halves
            acc = cuda.local.array(O_SHAPE, float32)
            m = cuda.local.array(ROW_SHAPE, float32)
            l = cuda.local.array(ROW_SHAPE, float32)
            alpha = cuda.local.array(ROW_SHAPE, float32)
            unit = cuda.local.array(ROW_SHAPE, float32)
            parts, turn, q_at, v_bits = cuda.local.array(PARTS, int32), 0, smem + group * TILE_BYTES, bits(v_amax)
            start(acc, m, l)
            row0, own0, own_end = first_row + m0 + (tid >> 5) * WARP_ROWS, m0 + group * GROUP_ROWS, n_end
            if SKIPS:
                # Of this group's own rows: none past the last row, fewer under causality.
                own_end = of_warp(end_of_row(first_row + min(own0 + GROUP_ROWS, Lq) - 1, Lk) if own0 < Lq else 0)
            if PING_PONG and group == GROUPS - 1:
                end_turn(group)

            for n0 in range(0, n_end, GROUP_ROWS):
                turn = take(parts, turn)
                if PING_PONG:
                    take_turn(group)
                if not SKIPS or n0 < own_end:
                    # S = Q K^T, P = 2^(S - m)
                    units(unit, FACT(smem), opaque(tid) >> 5, K_record[opaque(head), n0 // GROUP_ROWS, UNSCALE])
                    peak = peak_of(V_record[opaque(head), n0 // GROUP_ROWS, UNSCALE], scales(opaque(v_bits))[0])
                    qk(S, q_at, ring, barriers, parts, lane == 0)
                    if PING_PONG:
                        end_turn(group)
                    if n0 + GROUP_ROWS > end_of_row(row0, Lk):
                        mask(S, row0, n0, Lk, opaque(lane))
                    softmax(S, m, l, alpha, unit, peak)
                    split(left, S)

                    # O = alpha O + P V
                    turn = take(parts, turn)
                    pv(acc, left, alpha, ring, barriers, parts, lane == 0)
                else:
                    if PING_PONG:
                        end_turn(group)
                    skip(ring, barriers, parts, lane == 0)
                    turn = take(parts, turn)
                    skip(ring, barriers, parts, lane == 0)

            # finish: O = acc / l, lse = m + ln l; found anew, so that registers serve the tiles
            head, m_block = place(opaque(cuda.blockIdx.x), heads, m_blocks, K_record.shape[1])
            b, warp, of_lane = quotient(head, H), opaque(tid) >> 5, opaque(tid) & 31
            h, row0, v_unscale = head - b * H, m_block * BLOCK_M + warp * WARP_ROWS, scales(opaque(v_bits))[1]
            finish(O[b, h], acc, l, v_unscale / PEAK, row0, of_lane, vector)
            store_lse(lse[b, h], m, l, row0, of_lane)

    return flash_split_half


KERNEL = Kernel(
    name="flash_split_half_sm90",
    summary="operands split into fp16 halves, three tensor-core products each, by wgmma",
    accuracy="fp32",
    lower_accuracies=("tf32",),
    supports=supports,
    suits=lambda problem, device: unsuited(problem),
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
)
