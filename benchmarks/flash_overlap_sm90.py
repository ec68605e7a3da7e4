"""A candidate beside flash_split_half_sm90, up to 128 columns: S of the next tile beside the softmax and P V of this.

    python -m numba_attn check benchmarks/flash_overlap_sm90.py --sim
    python -m numba_attn bench --kernel benchmarks/flash_overlap_sm90.py --kernel flash_split_half_sm90

There a warpgroup waits for each of its products, and only the others keep the tensor cores busy meanwhile: at d64 two
thirds of the time, at d128 four fifths.

Algorithm. That of flash_split_half_sm90, over tiles t of keys:

    S_0 = Q K_0^T, P_0
    for t = 1 ..:    begin S_t = Q K_t^T and, but for columns that registers do not suffice for, P_{t-1} V_{t-1}
                     wait for S_t, begin the columns left
                     m, l and P_t from S_t
                     wait for P_{t-1} V_{t-1}        O = alpha O + P_{t-1} V_{t-1}
    the last P V

Tiles of which not all keys count are done one product after the other.

Memory. Registers a thread: COLUMNS / 2 for O, 32 for S, 32 for P in halves, and for what is in flight 32 for each 64
columns of S and O_COLUMNS / 2 for each sum of O. V_{t-1} and K_t lie in the ring together.

Limits. Head dims up to 128; else those of flash_split_half_sm90. Source. FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import cuda, float32, int32

from numba_attn.device import mma_epilogue, mma_tile, wgmma_ring, wgmma_tile
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, quotient
from numba_attn.device.mma_tile import SMALL_FIRST, left_fragment
from numba_attn.device.ptx import opaque
from numba_attn.device.ptx_sm90 import mbarrier_wait, setmaxnreg
from numba_attn.device.rescue_kernel import FEW_KEYS
from numba_attn.device.smem import shared_memory
from numba_attn.device.softmax import ONE
from numba_attn.device.split_half import (
    BLOCK_COLUMNS,
    PEAK,
    ROW_BYTES,
    UNSCALE,
    image_bytes,
    padded,
    peak_of,
    plane_bytes,
    scales,
    unit_of,
    verdict,
)
from numba_attn.device.unrolled import unrolled
from numba_attn.device.wgmma_fragments import GROUP_ROWS, GROUP_THREADS, STEP, Matrix
from numba_attn.device.wgmma_ring import slot_of
from numba_attn.kernel import Kernel, Launch
from numba_attn.kernels import flash_split_half_sm90 as waiting
from numba_attn.kernels.flash_split_half_sm90 import GROUP_WARPS, K_ROWS, WARP_ROWS
from numba_attn.problem import Device, Problem


@dataclass(frozen=True)
class Config(waiting.Config):
    """As there; all of a tile of K or V is in one slot."""


TILES = (
    Config(32, groups=3, part=64, slots=5, s_chains=1, o_columns=32, products=4),
    Config(64, groups=3, part=64, slots=8, s_chains=1, o_columns=64),
    Config(128, groups=2, part=128, slots=5, s_chains=2, o_columns=64),
)


def supports(problem: Problem, device: Device) -> str | None:
    if max(problem.D, problem.Dv) > TILES[-1].d_bucket:
        return f"keeps two tiles in registers, up to {TILES[-1].d_bucket} columns: D={problem.D}, Dv={problem.Dv}"
    return waiting.supports(problem, device)


def config(problem: Problem, device: Device) -> Config:
    tiles = next((tiles for tiles in TILES if tiles.d_bucket >= max(problem.D, problem.Dv)), TILES[-1])
    return replace(tiles, is_causal=problem.is_causal)


def configs():
    for tiles in TILES:
        for is_causal in (False, True):
            yield replace(tiles, is_causal=is_causal)


def small_config(problem: Problem) -> Config:
    small = waiting.small_config(problem)
    whole = {"part": padded(small.d_bucket), "s_chains": padded(small.d_bucket) // BLOCK_COLUMNS}
    return Config(**vars(small) | whole)


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    sizes = {"threads": config.threads, "smem_bytes": config.smem_bytes, "min_blocks": config.blocks}
    return waiting.images(problem, config).launches_around(build_flash, config, more=(problem.vector,), **sizes)


def advance(columns: int, products: int, slots: int, o_columns: int):
    """The verb `advance(O, left, m, l, alpha, q, ring, barriers, v_turn, k_turn, unit, peak, is_reporter)`.

    O = alpha O + P V of one tile, whose P is `left` and whose factor of O is `alpha`, and S, m, l and P of the next, of
    which every key counts: `left` and `alpha` are that one's then. The turns are those of V and of the next K.
    """
    block, plane = GROUP_ROWS * ROW_BYTES, plane_bytes(GROUP_ROWS, columns)
    steps = range(GROUP_ROWS // STEP)
    *small, large = SMALL_FIRST[-products:]
    of_values = [(step, *halves) for step in steps for halves in SMALL_FIRST[1:3]] + [(step, 0, 0) for step in steps]

    def of_scores(q, slot, first: int) -> list:
        k_steps = range(-(-min(columns - first, BLOCK_COLUMNS) // STEP))
        at = first // BLOCK_COLUMNS * block

        def product(step: int, a: int, b: int):
            return Matrix(q, a * plane + at + step * 2 * STEP), Matrix(slot, b * plane + at + step * 2 * STEP)

        return [product(s, *halves) for s in k_steps for halves in small] + [product(s, *large) for s in k_steps]

    def of_outputs(lefts, slot, first: int) -> list:
        at = first // BLOCK_COLUMNS * block
        return [
            (lefts[a][step], Matrix(slot, b * plane + at + step * STEP * ROW_BYTES, block, True))
            for step, a, b in of_values
        ]

    @unrolled
    def advance(e, O, left, m, l, alpha, q, ring, barriers, v_turn, k_turn, unit, peak, is_reporter):
        lefts = [[[left[half, step, r] for r in range(4)] for step in steps] for half in range(2)]
        kept = [register for half in lefts for step in half for register in step]
        v_slot, v_full, v_read, v_parity = slot_of(v_turn, ring, barriers, 2 * plane, slots)
        k_slot, k_full, k_read, k_parity = slot_of(k_turn, ring, barriers, 2 * plane, slots)
        firsts = list(range(0, columns, o_columns))

        def begin(first: int) -> list:
            (sums,) = e.wgmma(min(o_columns, columns - first), [of_outputs(lefts, v_slot, first)], wait=False)
            return sums

        # Both on their way: the copies' bytes are there for whoever waited, and for the tensor cores.
        e.mbarrier_wait(k_full, k_parity)
        chains = [of_scores(q, k_slot, first) for first in range(0, columns, BLOCK_COLUMNS)]
        scores = e.wgmma(GROUP_ROWS, chains, wait=False)
        e.mbarrier_wait(v_full, v_parity)
        outputs = [begin(firsts[0])]

        # S, while P V goes on
        scores = e.wgmma_wait(1, [x for sums in scores for x in sums], kept)
        e.mbarrier_arrive(k_read, is_reporter)
        S = scores[: GROUP_ROWS // 2]
        for i in range(GROUP_ROWS // 2, len(scores), GROUP_ROWS // 2):
            S = [a + b for a, b in zip(S, scores[i : i + GROUP_ROWS // 2], strict=True)]
        outputs += [begin(first) for first in firsts[1:]]

        # the softmax of `mma_tile`, P in place of S
        factors = []
        for h in range(2):
            places = [4 * j + 2 * h + r for j in range(K_ROWS // 8) for r in range(2)]
            highest = tree(e.max, [S[place] for place in places])
            for distance in (1, 2):
                highest = e.max(highest, e.shfl_xor(highest, distance))
            m_old, m_new = m[0, h], e.max(m[0, h], highest * unit)
            base = e.where(m_new > -np.inf, m_new, 0.0)
            factors.append(e.ex2(m_old - base))
            m[0, h] = m_new
            probabilities = [e.ex2(e.fma(S[place], unit, -base)) for place in places]
            for place, p in zip(places, probabilities, strict=True):
                S[place] = p * peak
            l[0, h] = e.fma(l[0, h], factors[h], tree(lambda a, b: a + b, probabilities))

        # O = alpha O + P V
        for i, (first, sums) in enumerate(zip(firsts, outputs, strict=True)):
            sums = e.wgmma_wait(len(firsts) - 1 - i, sums, kept)
            if first == firsts[-1]:
                # The products are done: this warp has read the slot.
                e.mbarrier_arrive(v_read, is_reporter)
            for k, x in enumerate(sums):
                place = first // 8 + k // 4, k % 4
                O[0, *place] = e.fma(O[0, *place], alpha[0, place[1] // 2], x)
        for h in range(2):
            alpha[0, h] = factors[h]
        P = {(0, k // 4, k % 4): x for k, x in enumerate(S)}
        for step in steps:
            for half, registers in enumerate(left_fragment(e, P, 0, step)):
                for r, register in enumerate(registers):
                    left[half, step, r] = register

    return advance


def tree(combine, values: list):
    """All values combined, in pairs; an even number of them at each turn."""
    while len(values) > 1:
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def build_flash(config: Config):
    GROUPS, BLOCK_M, COLUMNS, SLOTS = config.groups, config.block_m, config.d_bucket, config.slots
    PART = padded(config.d_bucket)
    Q_BYTES, TILE_BYTES = image_bytes(BLOCK_M, COLUMNS), image_bytes(K_ROWS, COLUMNS)
    BARRIERS, CONSUMERS = config.tiles_bytes, GROUP_THREADS * GROUPS
    IS_EARLY = not config.is_causal
    S_SHAPE, O_SHAPE, ROW_SHAPE = (1, K_ROWS // 8, 4), (1, COLUMNS // 8, 4), (1, 2)
    LEFT_SHAPE = (2, K_ROWS // STEP, 4)
    end_of_row = Mask(config.is_causal).end
    few, many = (setmaxnreg(n, more=more) for n, more in zip(config.registers, (False, True), strict=True))
    start_barriers = wgmma_ring.start_barriers(SLOTS, GROUP_WARPS * GROUPS)
    place = wgmma_tile.place(config.is_causal, 2 * TILE_BYTES)
    copy_q, feed = wgmma_ring.copy_q(BLOCK_M, COLUMNS), wgmma_ring.feed(COLUMNS, PART, SLOTS)
    await_copies, V_TURN = wgmma_ring.await_copies(1), wgmma_ring.turn_after(1, SLOTS)
    take, skip = wgmma_ring.take(1, SLOTS), wgmma_tile.skip(COLUMNS, PART, SLOTS)
    start = mma_tile.start(WARP_ROWS, COLUMNS)
    qk = wgmma_tile.scores(COLUMNS, PART, config.products, SLOTS, config.s_chains)
    mask, softmax = mma_tile.masked(WARP_ROWS, K_ROWS, end_of_row), mma_tile.softmax(WARP_ROWS, K_ROWS)
    split, pv = wgmma_tile.split_left, wgmma_tile.outputs(COLUMNS, PART, SLOTS, config.o_columns)
    both = advance(COLUMNS, config.products, SLOTS, config.o_columns)
    finish, store_lse = mma_epilogue.finish_wide(WARP_ROWS, COLUMNS), mma_epilogue.store_lse(WARP_ROWS)

    @cuda.jit
    def flash_overlap(Q, K, Q_image, K_image, V_image, Q_record, K_record, V_record, unsafe, O, lse, first_row, vector):
        # who am I: block -> head, m_block; a warpgroup owns 64 query rows, the last one copies
        H, Lq, D, Lk, (heads, m_blocks) = Q.shape[1], Q.shape[2], Q.shape[3], K.shape[2], unsafe.shape
        head, m_block = place(cuda.blockIdx.x, heads, m_blocks, K_record.shape[1])
        tid, m0 = cuda.threadIdx.x, m_block * BLOCK_M
        lane, group = tid & 31, tid >> 7
        smem = shared_memory()
        ring, q_full = smem + Q_BYTES, smem + BARRIERS

        # Q and the first tile of K, on their way while it is found out whether they are needed
        start_barriers(q_full, tid)
        if IS_EARLY and tid == CONSUMERS and Lk >= FEW_KEYS:
            own = opaque(head)
            copy_q(smem, q_full, Q_image[own], m_block)
            feed(ring, q_full, 0, K_image[own], V_image[own], 0, 1)

        # halves only where they lose nothing
        safe, v_amax = verdict(Q_record, K_record, V_record, head, m_block * GROUPS, GROUPS, D, ONE, lane)
        safe &= Lk >= FEW_KEYS
        if tid == 0:
            unsafe[head, m_block] = not safe
        if not safe:
            if IS_EARLY and tid == CONSUMERS and Lk >= FEW_KEYS:
                # Nothing may arrive once shared memory is another block's.
                await_copies(q_full)
            return
        head, m_block = place(opaque(cuda.blockIdx.x), heads, m_blocks, K_record.shape[1])
        m0, tid = m_block * BLOCK_M, opaque(cuda.threadIdx.x)
        lane, group = tid & 31, tid >> 7
        n_end = end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk)

        if tid >= CONSUMERS:
            # copy tiles of K and V as slots become free
            few()
            if tid == CONSUMERS:
                tiles = 2 * quotient(n_end + (K_ROWS - 1), K_ROWS)
                if IS_EARLY:
                    feed(ring, q_full, V_TURN, K_image[head], V_image[head], 1, tiles)
                else:
                    copy_q(smem, q_full, Q_image[head], m_block)
                    feed(ring, q_full, 0, K_image[head], V_image[head], 0, tiles)
        else:
            # reset m, l, acc
            many()
            S = cuda.local.array(S_SHAPE, float32)  # then P
            left = cuda.local.array(LEFT_SHAPE, int32)  # P in halves
            acc = cuda.local.array(O_SHAPE, float32)
            m = cuda.local.array(ROW_SHAPE, float32)
            l = cuda.local.array(ROW_SHAPE, float32)
            alpha = cuda.local.array(ROW_SHAPE, float32)
            k_turn, v_turn, turn = cuda.local.array(1, int32), cuda.local.array(1, int32), 0
            start(acc, m, l)
            q_at = smem + group * TILE_BYTES
            v_bits, q_unscale = bits(v_amax), Q_record[head, m_block * GROUPS + group, UNSCALE]
            row0, own0 = first_row + m0 + (tid >> 5) * WARP_ROWS, m0 + group * GROUP_ROWS
            # Of this group's own rows: none past the last row, fewer under causality; and what counts for all of them.
            own_end = end_of_row(first_row + min(own0 + GROUP_ROWS, Lq) - 1, Lk) if own0 < Lq else 0
            whole_end = end_of_row(first_row + own0, Lk)
            mbarrier_wait(q_full, 0)

            for n0 in range(0, n_end, K_ROWS):
                turn = take(v_turn, turn) if n0 > 0 else turn
                turn = take(k_turn, turn)
                if n0 < own_end:
                    unit = unit_of(q_unscale, K_record[opaque(head), n0 // K_ROWS, UNSCALE])
                    peak = peak_of(V_record[opaque(head), n0 // K_ROWS, UNSCALE], scales(opaque(v_bits))[0])
                    if n0 > 0 and n0 + K_ROWS <= whole_end:
                        # O = alpha O + P V of the tile before; S = Q K^T, P = 2^(S - m) of this one
                        both(acc, left, m, l, alpha, q_at, ring, q_full, v_turn[0], k_turn[0], unit, peak, lane == 0)
                    else:
                        if n0 > 0:
                            pv(acc, left, alpha, ring, q_full, v_turn, lane == 0)
                        qk(S, q_at, ring, q_full, k_turn, lane == 0)
                        if n0 + K_ROWS > whole_end:
                            mask(S, row0, n0, Lk, opaque(lane))
                        softmax(S, m, l, alpha, unit, peak)
                        split(left, S)
                else:
                    if n0 > 0 and n0 < own_end + K_ROWS and own_end > 0:
                        # The last tile of this group's own.
                        pv(acc, left, alpha, ring, q_full, v_turn, lane == 0)
                    elif n0 > 0:
                        skip(ring, q_full, v_turn, lane == 0)
                    skip(ring, q_full, k_turn, lane == 0)
            if n_end > 0:
                turn = take(v_turn, turn)
                if own_end > quotient(n_end - 1, K_ROWS) * K_ROWS:
                    pv(acc, left, alpha, ring, q_full, v_turn, lane == 0)
                else:
                    skip(ring, q_full, v_turn, lane == 0)

            # finish: O = acc / l, lse = m + ln l; found anew, so that registers serve the tiles
            head, m_block = place(opaque(cuda.blockIdx.x), heads, m_blocks, K_record.shape[1])
            b, warp, of_lane = quotient(head, H), opaque(tid) >> 5, opaque(tid) & 31
            h, row0, v_unscale = head - b * H, m_block * BLOCK_M + warp * WARP_ROWS, scales(opaque(v_bits))[1]
            finish(O[b, h], acc, l, v_unscale / PEAK, row0, of_lane, vector)
            store_lse(lse[b, h], m, l, row0, of_lane)

    return flash_overlap


KERNEL = Kernel(
    name="flash_split_half_sm90_overlap",
    summary="flash_split_half_sm90 with S of the next tile under the softmax and P V of this one",
    accuracy="fp32",
    supports=supports,
    suits=waiting.suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=waiting.workspace,
)
