"""Where a block's rows of Q come from, as halves in shared memory: split by its own warps, or copied from an image.

A warp that multiplies splits its own 16 rows; they have one exponent (see `split_half`), so that nothing is compared
with other warps first. Whether halves lose nothing is then known when all warps of the block have met.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda, float32

from numba_attn.device.math import bits, quotient
from numba_attn.device.ptx import opaque
from numba_attn.device.ptx_cluster import fence_proxy_async
from numba_attn.device.ptx_sm90 import mbarrier_wait
from numba_attn.device.softmax import NEG_INF, ONE, ZERO, warp_max
from numba_attn.device.split_half import (
    CHUNK,
    DENSE,
    EXTREMES,
    INF,
    K_AMAX,
    K_LEAST,
    Q_AMAX,
    Q_LEAST,
    ROW_BYTES,
    UNSCALE,
    V_AMAX,
    V_LEAST,
    extremes_of_keys,
    image_bytes,
    is_safe,
    of_log2e,
    over_warp,
    padded,
    plane_bytes,
    scales,
    verdict,
)
from numba_attn.device.split_kernel import HALF, LEAST_HALF
from numba_attn.device.split_tile import SplitConfig, halves_of_chunk, load_tile, over_lanes_of
from numba_attn.device.tile import WARP
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb
from numba_attn.device.wgmma_fragments import GROUP_ROWS, GROUP_THREADS
from numba_attn.device.wgmma_ring import copy_q

WARP_ROWS = 16
GROUP_WARPS = GROUP_ROWS // WARP_ROWS
FACTS = 2
FACTS_BYTES = 4 * FACTS
"""Of a warp's rows: `split_half`'s Q_AMAX and Q_LEAST."""


class Source(NamedTuple):
    """Four verbs, and what they need: `x_shape` of a local array; `facts`, the shape of a shared tile."""

    start: Any
    """start(x, gQ, own0, smem, barrier, image, m_block, tid, vector, has_keys): before anything else is known."""
    judge: Any
    """judge(x, D, smem, sFact, Q_record, K_record, V_record, head, m_block, scale, lost, tid): by all threads.
    Returns whether halves lose nothing, the largest magnitude of V, and 2^-e of this warp's rows if known by then."""
    late: Any
    """late(smem, barrier, image, m_block): by the thread that copies, once it is known that halves lose nothing."""
    wait: Any
    """wait(barrier, unscale, Q_record, head, m_block, group): until all rows are there; `unscale` is what `judge`
    returned. Returns 2^-e of a warp's rows."""
    x_shape: tuple[int, int]
    facts: tuple[int, int]


def source(columns: int, groups: int, splits: bool, is_early: bool) -> Source:
    """For blocks of `groups` warpgroups. splits: by its own warps; is_early: images are copied before all is known."""
    return split_by_warps(columns, groups) if splits else copied(columns, groups, is_early)


def copied(columns: int, groups: int, is_early: bool) -> Source:
    """From images that another launch made, by one thread: the first one behind the warps that multiply."""
    copy, copier = copy_q(GROUP_ROWS * groups, columns), GROUP_THREADS * groups

    @verb
    def start(x, gQ, own0, smem, barrier, image, m_block, tid, vector, has_keys):
        if is_early and has_keys and tid == copier:
            copy(smem, barrier, image, m_block)

    @verb
    def judge(x, D, smem, sFact, Q_record, K_record, V_record, head, m_block, scale, lost, tid):
        first = m_block * groups
        safe, v_amax = verdict(Q_record, K_record, V_record, head, first, groups, D, ONE, tid & (WARP - 1))
        return safe, v_amax, ONE

    @verb
    def late(smem, barrier, image, m_block):
        if not is_early:
            copy(smem, barrier, image, m_block)

    @verb
    def wait(barrier, unscale, Q_record, head, m_block, group):
        mbarrier_wait(barrier, 0)
        return Q_record[head, m_block * groups + group, UNSCALE]

    return Source(start, judge, late, wait, (1, 1), (1, FACTS))


def split_by_warps(columns: int, groups: int) -> Source:
    """By the warps that multiply, their own rows: up to 128 columns, which their registers hold."""
    config, single = slab_config(columns), load_tile(slab_config(columns, vector=1))
    fours, put, (of_rows, _, _, sums_of_rows) = load_tile(config), write_shared(config), over_lanes_of(config)
    LANES, TURNS, PEAKS, WARPS = config.lanes, config.turns, config.turns + 1, GROUP_WARPS * groups
    GROUP_BYTES = image_bytes(GROUP_ROWS, columns)

    @verb
    def start(x, gQ, own0, smem, barrier, image, m_block, tid, vector, has_keys):
        # The lane of unknown origin: addresses are else kept.
        lane = opaque(tid) & (WARP - 1)
        row, chunk = own0 + quotient(lane, LANES), lane & (LANES - 1)
        if tid < WARPS * WARP:
            if vector == 4:
                fours(x, gQ, row, own0, 0, chunk)
            else:
                single(x, gQ, row, own0, 0, chunk)

    @verb
    def split(at, x, sFact, D, times, rest, lane):
        peak = cuda.local.array(PEAKS, float32)
        count = cuda.local.array(TURNS, float32)
        of_rows(peak, x)
        amax = peak[TURNS] * abs(times)
        # Rows of zeros must not take the factor out of range.
        up, down = scales(bits(amax if amax > ZERO else ONE))
        level, half = DENSE * amax, float32(D) * HALF
        row, chunk = quotient(lane, LANES), lane & (LANES - 1)
        put(at + row * ROW_BYTES + ((chunk ^ row) << 4), x, times * up, rest * up, max(level * up, LEAST_HALF), count)
        sums_of_rows(count)
        least = -level if amax > ZERO else NEG_INF
        for i in range(TURNS):
            # A row whose large elements are few has no level; zero rows do not count.
            least = ZERO if (peak[i] > ZERO) & (count[i] <= half) else least
        least = warp_max(least)
        if lane == 0:
            # A factor out of range is no scale: then fp32 has to do.
            sFact[0], sFact[1] = amax if (amax < INF) & (abs(times) * up < INF) else INF, least
        return down

    @verb
    def judge(x, D, smem, sFact, Q_record, K_record, V_record, head, m_block, scale, lost, tid):
        extreme = cuda.local.array(EXTREMES, float32)
        lane, warp, unscale = tid & (WARP - 1), quotient(tid, WARP), ONE
        extremes_of_keys(extreme, K_record[head], V_record[head], lane)
        if warp < WARPS:
            group = quotient(warp, GROUP_WARPS)
            at = smem + group * GROUP_BYTES + (warp - group * GROUP_WARPS) * WARP_ROWS * ROW_BYTES
            times, rest = of_log2e(scale, lost)
            unscale = split(at, x, sFact[warp], D, times, rest, lane)
            # What this thread stored is for tensor cores.
            fence_proxy_async()
        cuda.syncthreads()
        if lane < WARPS:
            extreme[Q_AMAX], extreme[Q_LEAST] = sFact[lane, 0], sFact[lane, 1]
        over_warp(extreme)
        q, k, v_amax = (extreme[Q_AMAX], -extreme[Q_LEAST]), (extreme[K_AMAX], -extreme[K_LEAST]), extreme[V_AMAX]
        return is_safe(float32(D), q[0], q[1], k[0], k[1], v_amax, -extreme[V_LEAST], ONE), v_amax, unscale

    @verb
    def late(smem, barrier, image, m_block):
        pass

    @verb
    def wait(barrier, unscale, Q_record, head, m_block, group):
        return unscale

    return Source(start, judge, late, wait, (TURNS, CHUNK * config.chunks), (WARPS, FACTS))


def slab_config(columns: int, vector: int = 4) -> SplitConfig:
    """Of a warp's rows."""
    return SplitConfig(WARP_ROWS, columns, vector, chunks_a_thread=WARP_ROWS * padded(columns) // (CHUNK * WARP))


def write_shared(config: SplitConfig):
    """The verb `write(at, x, scale, rest, least, count)`: as `split_tile.write_image`, to an image of 64 rows.

    at: shared address of this thread's first chunk in row i = 0, one of the first eight.
    """
    lanes, step, plane = config.lanes, config.step, plane_bytes(GROUP_ROWS, config.columns)

    @unrolled
    def write(e, at, x, scale, rest, least, count):
        threshold = e.halves(least, least)
        for i in range(config.turns):
            counts = e.halves(0.0, 0.0)
            for chunk in range(config.chunks):
                # Another row of eight, or chunk of the block, exchanges what its number tells.
                blocks, place = divmod(lanes * chunk, CHUNK)
                own, behind = at ^ ((place ^ step * i % CHUNK) << 4), (blocks * GROUP_ROWS + step * i) * ROW_BYTES
                planes = halves_of_chunk(e, x, i, chunk, scale, rest)
                for half, words in enumerate(planes):
                    e.store_shared(own + (behind + half * plane), words)
                for hi in planes[0]:
                    counts = e.count_magnitudes(counts, hi, threshold)
            low, high = e.unpack(counts)
            count[i] = low + high

    return write
