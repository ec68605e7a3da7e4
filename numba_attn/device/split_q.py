"""A block's rows of Q as halves in shared memory, split by the warps that multiply them.

A warp has 16 rows, in slabs that registers hold, one after the other; a slab has one exponent (see `split_half`), so
that nothing is compared with other warps first. Whether halves lose nothing is known when all warps of the block have
met.
"""

from __future__ import annotations

from math import prod

from numba import cuda, float32

from numba_attn.device.math import bits, quotient
from numba_attn.device.ptx import opaque
from numba_attn.device.ptx_sm90 import fence_proxy_async
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
    SLACK,
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
    unit_of,
)
from numba_attn.device.split_kernel import HALF, LEAST_HALF
from numba_attn.device.split_tile import SplitConfig, halves_of_chunk, load_tile, over_lanes_of
from numba_attn.device.tile import WARP
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb
from numba_attn.device.wgmma_fragments import GROUP_ROWS

WARP_ROWS = 16
GROUP_WARPS = GROUP_ROWS // WARP_ROWS
MOST_COLUMNS = 128
"""Of 16 rows that a warp's registers hold."""
FACTS = SLAB_AMAX, SLAB_LEAST, SLAB_UNSCALE = range(3)
"""Of a slab: `split_half`'s Q_AMAX and Q_LEAST, and 2^-e."""


def slabs(columns: int) -> int:
    """Of a warp's rows."""
    return 1 if columns <= MOST_COLUMNS else 2


def facts_shape(warps: int, columns: int) -> tuple[int, int]:
    """Of the shared tile that tells of all slabs, one after the other."""
    return warps * slabs(columns), len(FACTS)


def facts_bytes(warps: int, columns: int) -> int:
    return 4 * prod(facts_shape(warps, columns))


def slab_config(columns: int, vector: int = 4, halves: int = 2) -> SplitConfig:
    rows = WARP_ROWS // slabs(columns)
    return SplitConfig(rows, columns, vector, halves, chunks_a_thread=rows * padded(columns) // (CHUNK * WARP))


def x_shape(columns: int) -> tuple[int, int]:
    """Of the local array for a thread's part of a slab."""
    config = slab_config(columns)
    return config.turns, CHUNK * config.chunks


def verbs(columns: int, groups: int, halves: int):
    """Three verbs of a block of `groups` warpgroups that multiply.

    load(x, gQ, row0, tid, vector): a warp's first slab, from row0 on, on its way to x before anything else is known.
    judge(x, gQ, row0, vector, smem, sFact, rK, rV, scale, lost, tid): the rows as halves in shared memory, from `smem`
    on, and whether halves lose nothing, with the largest magnitude of V; by all threads of the block.
    units(unit, sFact, warp, k_unscale): unit[0, h] makes exponents of 2 of the scores of eight rows and a tile of keys.
    """
    config, single = slab_config(columns, halves=halves), load_tile(slab_config(columns, vector=1))
    fours, put, (of_rows, _, _, sums_of_rows) = load_tile(config), write_shared(config), over_lanes_of(config)
    OWN_SLACK = SLACK[halves]
    LANES, TURNS, PEAKS, WARPS = config.lanes, config.turns, config.turns + 1, GROUP_WARPS * groups
    GROUP_BYTES, SLABS, SLAB_ROWS = image_bytes(GROUP_ROWS, columns, halves), slabs(columns), config.rows

    @verb
    def load(x, gQ, row0, tid, vector):
        # The lane of unknown origin: addresses are else kept.
        lane = opaque(tid) & (WARP - 1)
        row, chunk = row0 + quotient(lane, LANES), lane & (LANES - 1)
        if tid < WARPS * WARP:
            if vector == 4:
                fours(x, gQ, row, row0, 0, chunk)
            else:
                single(x, gQ, row, row0, 0, chunk)

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
            sFact[SLAB_AMAX] = amax if (amax < INF) & (abs(times) * up < INF) else INF
            sFact[SLAB_LEAST], sFact[SLAB_UNSCALE] = least, down

    @verb
    def judge(x, gQ, row0, vector, smem, sFact, rK, rV, scale, lost, tid):
        extreme = cuda.local.array(EXTREMES, float32)
        lane, warp, D = tid & (WARP - 1), quotient(tid, WARP), gQ.shape[1]
        extremes_of_keys(extreme, rK, rV, lane)
        if warp < WARPS:
            group = quotient(warp, GROUP_WARPS)
            at = smem + group * GROUP_BYTES + (warp - group * GROUP_WARPS) * WARP_ROWS * ROW_BYTES
            times, rest = of_log2e(scale, lost)
            for slab in range(SLABS):
                if slab > 0:
                    load(x, gQ, row0 + slab * SLAB_ROWS, tid, vector)
                split(at + slab * SLAB_ROWS * ROW_BYTES, x, sFact[warp * SLABS + slab], D, times, rest, lane)
            # What this thread stored is for tensor cores.
            fence_proxy_async()
        cuda.syncthreads()
        if lane < WARPS * SLABS:
            extreme[Q_AMAX], extreme[Q_LEAST] = sFact[lane, SLAB_AMAX], sFact[lane, SLAB_LEAST]
        over_warp(extreme)
        q, k, v_amax = (extreme[Q_AMAX], -extreme[Q_LEAST]), (extreme[K_AMAX], -extreme[K_LEAST]), extreme[V_AMAX]
        return is_safe(float32(D), q[0], q[1], k[0], k[1], v_amax, -extreme[V_LEAST], OWN_SLACK), v_amax

    @verb
    def units(unit, sFact, warp, k_unscale):
        for h in range(2):
            # Shared memory knows it, where registers are few.
            unit[0, h] = unit_of(sFact[warp * SLABS + h * (SLABS - 1), SLAB_UNSCALE], k_unscale)

    return load, judge, units


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
                planes = halves_of_chunk(e, x, i, chunk, scale, rest, config.halves)
                for half, words in enumerate(planes):
                    e.store_shared(own + (behind + half * plane), words)
                for hi in planes[0]:
                    counts = e.count_magnitudes(counts, hi, threshold)
            low, high = e.unpack(counts)
            count[i] = low + high

    return write
