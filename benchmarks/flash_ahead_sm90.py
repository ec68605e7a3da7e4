"""Candidates beside flash_split_half_sm90: images of the next heads made beside blocks that stay, overlapping tiles.

    python -m numba_attn check benchmarks/flash_ahead_sm90.py --sim
    python -m numba_attn bench --kernel benchmarks/flash_ahead_sm90.py --kernel flash_split_half_sm90

`check` has neither rounds nor overlapping tiles, for want of keys and heads: tests/bench/test_candidates.py has both.

At b32 h32 L512 a third of flash_split_half_sm90's time is the split, bound by bytes, and a fifth of the rest stands
before and behind a block's tiles; at L4096 a warpgroup waits for each of its products, and only the others keep the
tensor cores busy meanwhile. What is expected: docs/notes/flash_split_half_sm90.md.

Algorithm. That of flash_split_half_sm90, for heads in rounds (KERNEL):

    split     the heads of the first round
    flash     one round; beside it, on SMs that it leaves free, the split of the next
    rescue    all heads

OVERLAP has no rounds, and the products of two tiles in flight during the softmax between them (`overlapping_tiles`);
tiles of which not all keys count are done one product after the other. AHEAD_OVERLAP has both.

Work split. A block has every gridDim-th task, the 64 GROUPS query rows of one head. The warp that copies finds out
which tasks are safe while those before them are multiplied, and tells the others what to do next.

Memory. Images of two rounds: those of round r + 1 are made when all blocks of round r run, that is after round r - 1,
which read the images that are overwritten. Shared: words of two tasks too. Those of a task are written when all threads
have arrived at `q_read` in the task before, and so have left the one before that, whose words were in the same place.

Limits. Those of flash_split_half_sm90, and up to 128 columns to overlap. Under causality, and where heads do not fit
twice or are too few for two rounds that fill the SMs, batches follow each other in one set of images. Counts on the 132
SMs of an H100 or H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

from numba import cuda, float32, int32
from overlapping_tiles import advance

from numba_attn.device import mma_epilogue, mma_tile, wgmma_ring, wgmma_tile
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, cdiv, quotient
from numba_attn.device.ptx import opaque
from numba_attn.device.ptx_sm90 import (
    let_next_launch_start,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg,
)
from numba_attn.device.rescue_kernel import FEW_KEYS
from numba_attn.device.smem import shared_memory, shared_tile
from numba_attn.device.softmax import NEG_INF, ONE, ZERO
from numba_attn.device.split_half import (
    AMAX,
    BLOCK_COLUMNS,
    EXTREMES,
    K_AMAX,
    K_LEAST,
    LEVEL,
    PEAK,
    Q_AMAX,
    Q_LEAST,
    ROW_MIN,
    UNSCALE,
    V_AMAX,
    V_LEAST,
    image_bytes,
    is_safe,
    over_warp,
    padded,
    peak_of,
    scales,
    unit_of,
)
from numba_attn.device.tile import WARP
from numba_attn.device.verb import verb
from numba_attn.device.wgmma_fragments import GROUP_ROWS, GROUP_THREADS, STEP
from numba_attn.device.wgmma_ring import BARRIER_BYTES
from numba_attn.images import IMAGES, MAX_WORKSPACE_BYTES, RECORDS, Batch, ImageBatches
from numba_attn.kernel import Kernel, Launch, Part, Workspace
from numba_attn.kernels import flash_split_half_sm90 as apart
from numba_attn.kernels.flash_split_half_sm90 import GROUP_WARPS, K_ROWS, WARP_ROWS
from numba_attn.problem import ITEM_BYTES, Device, Problem

TASKS_BYTES = 32
HEAD, M_BLOCK, V_BITS = range(3)
"""Words of a task; no head is -1, which ends the round."""
ROUNDS = 4
"""If each then fills the SMs, and more if images do not fit: the split of the first has nothing to run beside."""
LEAST_TASKS = 2
"""Of a round but the last, for each SM."""
STEPS_OF_TASK = 2
"""What stands before and behind the tiles of a task, in tiles of keys."""
STEPS_OF_SPLIT = {64: 0.22, 128: 0.42, 256: 0.4}
"""What splitting a tile takes an SM, in tiles of keys, by columns: 0.45 us per 64 of them."""


@dataclass(frozen=True)
class Config(apart.Config):
    sms: int = 132
    rounds: bool = True
    overlaps: bool = False
    """A tile in one slot, see `overlapping_tiles`."""

    def __post_init__(self):
        super().__post_init__()
        if self.overlaps and self.part < padded(self.d_bucket):
            raise ValueError(f"tiles that overlap lie in one slot: {self.part=} is less than {self.d_bucket=}")

    @property
    def smem_bytes(self) -> int:
        """Behind the tiles and the ring's barriers: the one that Q is read, and what the next task is."""
        return super().smem_bytes + BARRIER_BYTES + TASKS_BYTES

    @property
    def registers(self) -> tuple[int, int]:
        """As for flash_split_half_sm90, but whoever copies also decides what is safe, and spills if need be."""
        together = min(240, 65536 // self.threads // 8 * 8) * (self.groups + 1)
        few = 24 if self.d_bucket > 192 else 32 if self.overlaps else 56
        many = min(240, (together - few) // self.groups // 8 * 8)
        return together - many * self.groups, many


OVERLAPPING = (
    Config(32, groups=3, part=64, slots=5, s_chains=1, o_columns=32, products=4, overlaps=True),
    Config(64, groups=3, part=64, slots=8, s_chains=1, o_columns=64, overlaps=True),
    Config(128, groups=2, part=128, slots=5, s_chains=2, o_columns=64, overlaps=True),
)


def config(problem: Problem, device: Device) -> Config:
    return Config(**vars(apart.config(problem, device)))


def configs():
    yield from (Config(**vars(config)) for config in apart.configs())


def small_config(problem: Problem) -> Config:
    return Config(**vars(apart.small_config(problem)), sms=3)


@dataclass(frozen=True)
class Rounds:
    """The heads of a problem in rounds, with images of two of them, whose number is in front of the arrays' shapes."""

    images: ImageBatches
    heads: int
    """Of a round; the last may have fewer."""

    @property
    def workspace(self) -> dict[str, Workspace]:
        problem, images = self.images.problem, self.images
        of_round = images._of(self.heads, images.m_blocks)
        of_round["unsafe"] = Workspace((problem.B * problem.H, images.m_blocks), "int32")
        twice = {name: replace(of_round[name], shape=(2, *of_round[name].shape)) for name in (*IMAGES, *RECORDS)}
        return of_round | twice

    def batches(self) -> list[Batch]:
        """Whole batch indices, or some heads of one of them."""
        B, H = self.images.problem.B, self.images.problem.H
        of_b, of_h = max(1, self.heads // H), min(self.heads, H)
        firsts = [(b, h) for b in range(0, B, of_b) for h in range(0, H, of_h)]
        return [self._batch(i, b, min(b + of_b, B), h, min(h + of_h, H)) for i, (b, h) in enumerate(firsts)]

    def _batch(self, number: int, b: int, b_end: int, h: int, h_end: int) -> Batch:
        heads, first = (b_end - b) * (h_end - h), b * self.images.problem.H + h

        def part(name: str) -> Part:
            if name in ("Q", "K", "V", "O", "lse"):
                return Part(name, (slice(b, b_end), slice(h, h_end)))
            return Part(name, (slice(first, first + heads),) if name == "unsafe" else (number % 2, slice(heads)))

        return Batch(heads, self.images.m_blocks, 0, False, part)

    def launches(self, flash) -> tuple[Launch, ...]:
        """`flash(batch, tiles)`: the launch that reads a batch, while so many tiles are split."""
        batches, images = self.batches(), self.images
        steps = [images._split(batches[0], "QKV")]
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            steps.append(flash(batch, images._tiles_of(following, "QKV" if following else "")))
            if following:
                steps.append(images._split(following, "QKV", is_beside=True))
        heads = images.problem.B * images.problem.H
        return (*steps, images._rescue(Batch(heads, images.m_blocks, 0, False, lambda name: name)))


def block_per_task(config: Config) -> bool:
    """Whether there is a block for each task: those of different lengths are dealt out better by the hardware."""
    return config.is_causal or not config.rounds


def rounds(problem: Problem, config: Config) -> Rounds | None:
    """None where no two rounds of whole heads, the last one aside, fill the SMs and have images that fit twice."""
    if block_per_task(config):
        return None
    images, B, H = apart.images(problem, config), problem.B, problem.H
    of_head = sum(ITEM_BYTES * prod(space.shape) for space in images._of(1, images.m_blocks).values())
    for number in range(ROUNDS, 1, -1):
        most = min(MAX_WORKSPACE_BYTES // (2 * of_head), cdiv(B * H, number))
        if most:
            heads = cdiv(B, cdiv(B, most // H)) * H if most >= H else cdiv(H, cdiv(H, most))
            if heads < B * H and heads * images.m_blocks >= LEAST_TASKS * config.sms:
                return Rounds(images, heads)
    return None


def sms_of_flash(tasks: int, steps: int, of_split: float, sms: int) -> int:
    """How many of all SMs take the tasks, of so many steps each, so that these and the split's steps end soon."""

    def time(own: int) -> float:
        return max(cdiv(tasks, own) * steps, of_split / (sms - own))

    return min(range(1, sms), key=lambda own: (time(own), own))


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    found = rounds(problem, config)
    return found.workspace if found else apart.images(problem, config).workspace


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    sizes, found = {"threads": config.threads, "smem_bytes": config.smem_bytes}, rounds(problem, config)

    def flash(batch: Batch, tiles: int = 0) -> Launch:
        args = (*batch.parts("Q", "K", *IMAGES, *RECORDS, "unsafe", "O", "lse"), batch.first_row, problem.vector)
        blocks, steps = batch.heads * batch.m_blocks, cdiv(problem.Lk, K_ROWS) + STEPS_OF_TASK
        cost = next(cost for columns, cost in STEPS_OF_SPLIT.items() if config.d_bucket <= columns)
        own = sms_of_flash(blocks, steps, tiles * cost, config.sms) if tiles else config.sms
        return Launch(build_flash, config, args, blocks if block_per_task(config) else min(blocks, own), **sizes)

    if found:
        return found.launches(flash)
    return apart.images(problem, config).launches(lambda batch: (flash(batch),))


@verb
def extremes_of(x, i, record, first, tiles, least, lane):
    """x[i], x[i + 1]: the largest AMAX of so many tiles of a head, and the least of another number, negated."""
    for tile in range(lane, tiles, WARP):
        x[i], x[i + 1] = max(x[i], record[first + tile, AMAX]), max(x[i + 1], -record[first + tile, least])


@verb
def verdict_in_turns(Q_record, K_record, V_record, head, first, tiles, D, lane):
    """That of `split_half`, one operand after the other: for a warp that has time and few registers."""
    x = cuda.local.array(EXTREMES, float32)
    for i in range(0, EXTREMES, 2):
        x[i], x[i + 1] = ZERO, NEG_INF
    extremes_of(x, Q_AMAX, Q_record[opaque(head)], first, tiles, LEVEL, opaque(lane))
    extremes_of(x, K_AMAX, K_record[opaque(head)], 0, K_record.shape[1], LEVEL, opaque(lane))
    extremes_of(x, V_AMAX, V_record[opaque(head)], 0, V_record.shape[1], ROW_MIN, opaque(lane))
    over_warp(x)
    safe = is_safe(float32(D), x[Q_AMAX], -x[Q_LEAST], x[K_AMAX], -x[K_LEAST], x[V_AMAX], -x[V_LEAST], ONE)
    return safe, x[V_AMAX]


def build_flash(config: Config):
    GROUPS, BLOCK_M, COLUMNS = config.groups, config.block_m, config.d_bucket
    SLOTS, PART, PARTS = config.slots, config.part, padded(config.d_bucket) // config.part
    Q_BYTES, TILE_BYTES = image_bytes(BLOCK_M, COLUMNS), image_bytes(K_ROWS, COLUMNS)
    BARRIERS, CONSUMERS = config.tiles_bytes, GROUP_THREADS * GROUPS
    TASKS = config.smem_bytes - TASKS_BYTES
    READ, task_words = TASKS - BARRIER_BYTES, shared_tile(TASKS, (2, TASKS_BYTES // 8), dtype=int32)
    S_SHAPE, O_SHAPE, ROW_SHAPE = (1, K_ROWS // 8, 4), (1, COLUMNS // 8, 4), (1, 2)
    LEFT_SHAPE = (2, K_ROWS // STEP, 4)
    SKIPS = COLUMNS <= 128  # wider ones have no registers for skipping
    end_of_row = Mask(config.is_causal).end
    place = wgmma_tile.place(config.is_causal, 2 * TILE_BYTES)
    few, many = (setmaxnreg(n, more=more) for n, more in zip(config.registers, (False, True), strict=True))
    start_barriers = wgmma_ring.start_barriers(SLOTS, GROUP_WARPS * GROUPS)
    copy_q, feed = wgmma_ring.copy_q(BLOCK_M, COLUMNS), wgmma_ring.feed(COLUMNS, PART, SLOTS)
    take, skip = wgmma_ring.take(PARTS, SLOTS), wgmma_tile.skip(COLUMNS, PART, SLOTS)
    start = mma_tile.start(WARP_ROWS, COLUMNS)
    qk = wgmma_tile.scores(COLUMNS, PART, config.products, SLOTS, config.s_chains)
    mask, softmax = mma_tile.masked(WARP_ROWS, K_ROWS, end_of_row), mma_tile.softmax(WARP_ROWS, K_ROWS)
    split, pv = wgmma_tile.split_left, wgmma_tile.outputs(COLUMNS, PART, SLOTS, config.o_columns)
    OVERLAPS, both = config.overlaps, advance(COLUMNS, config.products, SLOTS, config.o_columns)
    finish, store_lse = mma_epilogue.finish_wide(WARP_ROWS, COLUMNS), mma_epilogue.store_lse(WARP_ROWS)

    @cuda.jit
    def flash_ahead(Q, K, Q_image, K_image, V_image, Q_record, K_record, V_record, unsafe, O, lse, first_row, vector):
        # who am I: a block has every gridDim-th task; a warpgroup owns 64 of its query rows, the last one copies
        let_next_launch_start()
        H, Lq, D, Lk, (heads, m_blocks) = Q.shape[1], Q.shape[2], Q.shape[3], K.shape[2], unsafe.shape
        tid = cuda.threadIdx.x
        lane, group = tid & 31, tid >> 7
        smem = shared_memory()
        ring, q_full, q_read, tasks = smem + Q_BYTES, smem + BARRIERS, smem + READ, task_words(smem)
        if tid == 0:
            mbarrier_init(q_read, CONSUMERS)
        start_barriers(q_full, tid)
        turn, parity = 0, 0  # of the ring, and of the task: 0, 1, 0 ..

        if tid >= CONSUMERS:
            # find out what is safe, and copy its tiles as slots become free
            few()
            if tid < CONSUMERS + WARP:
                for number in range(cuda.blockIdx.x, heads * m_blocks, cuda.gridDim.x):
                    head, m_block = place(number, heads, m_blocks, K_record.shape[1])
                    tile = m_block * GROUPS
                    safe, v_amax = verdict_in_turns(Q_record, K_record, V_record, head, tile, GROUPS, D, lane)
                    safe &= Lk >= FEW_KEYS
                    if lane == 0:
                        unsafe[head, m_block] = not safe
                        if safe:
                            # All are done with Q of the task before.
                            mbarrier_wait(q_read, parity ^ 1)
                            tasks[parity, HEAD], tasks[parity, M_BLOCK] = head, m_block
                            tasks[parity, V_BITS] = bits(v_amax)
                            # The arrival that expects the bytes of Q releases the words.
                            copy_q(smem, q_full, Q_image[head], m_block)
                            parity ^= 1
                            n_end = end_of_row(first_row + min((m_block + 1) * BLOCK_M, Lq) - 1, Lk)
                            tiles = 2 * quotient(n_end + (K_ROWS - 1), K_ROWS)
                            turn = feed(ring, q_full, turn, K_image[head], V_image[head], 0, tiles)
                if lane == 0:
                    mbarrier_wait(q_read, parity ^ 1)
                    tasks[parity, HEAD] = -1
                    mbarrier_arrive_expect(q_full, 0)
        else:
            many()
            S = cuda.local.array(S_SHAPE, float32)  # then P
            left = cuda.local.array(LEFT_SHAPE, int32)  # P in halves
            acc = cuda.local.array(O_SHAPE, float32)
            m = cuda.local.array(ROW_SHAPE, float32)
            l = cuda.local.array(ROW_SHAPE, float32)
            alpha = cuda.local.array(ROW_SHAPE, float32)
            parts, v_parts = cuda.local.array(PARTS, int32), cuda.local.array(PARTS, int32)
            q_at = smem + group * TILE_BYTES
            mbarrier_wait(q_full, parity)
            while tasks[parity, HEAD] >= 0:
                # reset m, l, acc
                m0, q_tile = tasks[parity, M_BLOCK] * BLOCK_M, tasks[parity, M_BLOCK] * GROUPS + group
                q_unscale = Q_record[tasks[parity, HEAD], q_tile, UNSCALE]
                n_end = end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk)
                # Of this group's own rows: none past the last row, fewer under causality; and what counts for all.
                own0, own_end = q_tile * GROUP_ROWS, n_end
                if SKIPS:
                    own_end = end_of_row(first_row + min(own0 + GROUP_ROWS, Lq) - 1, Lk) if own0 < Lq else 0
                whole_end = end_of_row(first_row + own0, Lk)
                start(acc, m, l)

                for n0 in range(0, n_end, K_ROWS):
                    if OVERLAPS and n0 > 0:
                        turn = take(v_parts, turn)
                    turn = take(parts, turn)
                    if not SKIPS or n0 < own_end:
                        # S = Q K^T, P = 2^(S - m), and where it waits for that, O = alpha O + P V of the tile before
                        head, v_scale = tasks[parity, HEAD], scales(tasks[parity, V_BITS])[0]
                        unit = unit_of(q_unscale, K_record[head, n0 // K_ROWS, UNSCALE])
                        peak = peak_of(V_record[head, n0 // K_ROWS, UNSCALE], v_scale)
                        if OVERLAPS and n0 > 0 and n0 + K_ROWS <= whole_end:
                            both(
                                acc, left, m, l, alpha, q_at, ring, q_full, v_parts[0], parts[0], unit, peak, lane == 0
                            )
                        else:
                            if OVERLAPS and n0 > 0:
                                pv(acc, left, alpha, ring, q_full, v_parts, lane == 0)
                            qk(S, q_at, ring, q_full, parts, lane == 0)
                            if n0 + K_ROWS > whole_end:
                                row0 = first_row + tasks[parity, M_BLOCK] * BLOCK_M + (opaque(tid) >> 5) * WARP_ROWS
                                mask(S, row0, n0, Lk, opaque(lane))
                            softmax(S, m, l, alpha, unit, peak)
                            split(left, S)
                    else:
                        if OVERLAPS and n0 > 0:
                            if n0 - K_ROWS < own_end:
                                pv(acc, left, alpha, ring, q_full, v_parts, lane == 0)
                            else:
                                skip(ring, q_full, v_parts, lane == 0)
                        skip(ring, q_full, parts, lane == 0)
                    if n0 + K_ROWS >= n_end:
                        # Q is read: the next one may come.
                        mbarrier_arrive_expect(q_read, 0)
                    if not OVERLAPS or n0 + K_ROWS >= n_end:
                        # O = alpha O + P V
                        turn = take(v_parts, turn)
                        if not SKIPS or n0 < own_end:
                            pv(acc, left, alpha, ring, q_full, v_parts, lane == 0)
                        else:
                            skip(ring, q_full, v_parts, lane == 0)

                # finish: O = acc / l, lse = m + ln l
                head, warp, of_lane = tasks[parity, HEAD], opaque(tid) >> 5, opaque(tid) & 31
                b = quotient(head, H)
                h, row0 = head - b * H, tasks[parity, M_BLOCK] * BLOCK_M + warp * WARP_ROWS
                finish(O[b, h], acc, l, scales(tasks[parity, V_BITS])[1] / PEAK, row0, of_lane, vector)
                store_lse(lse[b, h], m, l, row0, of_lane)
                parity ^= 1
                mbarrier_wait(q_full, parity)

    return flash_ahead


KERNEL = Kernel(
    name="flash_split_half_sm90_ahead",
    summary="flash_split_half_sm90 by blocks that stay, images of the next heads made beside them",
    accuracy="fp32",
    supports=apart.supports,
    suits=apart.suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
)


def overlapping(name: str, rounds: bool) -> Kernel:
    def supports(problem: Problem, device: Device) -> str | None:
        if max(problem.D, problem.Dv) > OVERLAPPING[-1].d_bucket:
            most = OVERLAPPING[-1].d_bucket
            return f"keeps two tiles in registers, up to {most} columns: D={problem.D}, Dv={problem.Dv}"
        return apart.supports(problem, device)

    def config(problem: Problem, device: Device) -> Config:
        tiles = next((tiles for tiles in OVERLAPPING if tiles.d_bucket >= max(problem.D, problem.Dv)), OVERLAPPING[-1])
        return replace(tiles, is_causal=problem.is_causal, rounds=rounds)

    def configs():
        for tiles, is_causal in product(OVERLAPPING, (False, True)):
            yield replace(tiles, is_causal=is_causal, rounds=rounds)

    def small_overlapping(problem: Problem) -> Config:
        small = small_config(problem)
        wide = padded(small.d_bucket)
        return replace(small, part=wide, s_chains=wide // BLOCK_COLUMNS, rounds=rounds, overlaps=True)

    summary = f"{apart.KERNEL.name} with the products of two tiles in flight during the softmax between them"
    of_kernel = {"supports": supports, "config": config, "configs": configs, "small_config": small_overlapping}
    return replace(KERNEL, name=f"{apart.KERNEL.name}_{name}", summary=summary, **of_kernel)


OVERLAP, AHEAD_OVERLAP = overlapping("overlap", rounds=False), overlapping("ahead_overlap", rounds=True)
