"""Verbs of a warpgroup in a product whose operands are both images: C += factor A B, and what follows it.

A warpgroup owns 64 rows and 256 columns of C, four panels of 64: C[i, j, r] is register r of the fragment of panel i,
columns 8 j .. + 7 of it, rows 16 w .. + 15 of warp w. Operands are tiles of 64 x 64 (see `mma_product`) in slots of a
ring: one slot has the tiles of A, two more the tiles of B, 128 columns each, their planes of hi together first.
"""

from __future__ import annotations

from numba import cuda

from numba_attn.device.fragments import N
from numba_attn.device.math import quotient
from numba_attn.device.mma_product import TILE
from numba_attn.device.mma_tile import SMALL_FIRST
from numba_attn.device.ptx_sm90 import (
    fence_mbarrier_init,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from numba_attn.device.split_half import ROW_BYTES, UNSCALE, plane_bytes, unit_of
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb
from numba_attn.device.wgmma_fragments import STEP, Matrix
from numba_attn.device.wgmma_ring import BARRIER_BYTES

GROUPS = 2
"""Warpgroups that multiply: as many rows as a slot has."""
AT_ONCE = 2 * TILE
"""Columns of one sum."""
PLANE_BYTES = plane_bytes(TILE, TILE)


def slot_bytes(halves: int) -> int:
    """Of two tiles."""
    return 2 * halves * PLANE_BYTES


def blocks_of_scores(is_full: bool, block_m: int, block_n: int, end_of_row):
    """The verbs `count(m_blocks, Lq, Lk, first_row)` and `find(block, m_blocks, Lq, Lk, first_row)`.

    count: blocks of S of one head that count; find: (m_block, first key, end of the keys) of one of them. `is_full`:
    rows have the same keys, so that nothing is to be searched for.
    """

    @verb
    def blocks_of(end):
        return quotient(end + (block_n - 1), block_n)

    @verb
    def end_of(m_block, Lq, Lk, first_row):
        return end_of_row(first_row + min((m_block + 1) * block_m, Lq) - 1, Lk)

    @verb
    def count(m_blocks, Lq, Lk, first_row):
        if is_full:
            return m_blocks * blocks_of(Lk)
        total = 0
        for m_block in range(m_blocks):
            total += blocks_of(end_of(m_block, Lq, Lk, first_row))
        return total

    @verb
    def find(block, m_blocks, Lq, Lk, first_row):
        if is_full:
            m_block = quotient(block, blocks_of(Lk))
            return m_block, (block - m_block * blocks_of(Lk)) * block_n, Lk
        m_block = 0
        end = end_of(0, Lq, Lk, first_row)
        while block >= blocks_of(end):
            block -= blocks_of(end)
            m_block += 1
            end = end_of(m_block, Lq, Lk, first_row)
        return m_block, block * block_n, end

    return count, find


def ring(slots: int, readers: int, halves: int) -> tuple:
    """The verbs of a ring of slots and, behind them, two barriers of each: full, one arrival; read, `readers`.

    start(ring, tid): make the barriers, by all threads of the block.
    claim(ring, turn): wait until all have read the slot, and say what comes; by the thread that copies. Returns the
        shared addresses of the slot and of its barrier.
    give_back(ring, turn, is_reporter): this warp has read the slot; is_reporter in one of its lanes.
    """
    SLOT_BYTES = slot_bytes(halves)
    full = slots * SLOT_BYTES

    @verb
    def start(ring, tid):
        if tid == 0:
            for slot in range(slots):
                mbarrier_init(ring + full + slot * BARRIER_BYTES, 1)
                mbarrier_init(ring + full + (slots + slot) * BARRIER_BYTES, readers)
            fence_mbarrier_init()
        # The barriers are there for all.
        cuda.syncthreads()

    @verb
    def claim(ring, turn):
        slot = turn >> 1
        barrier = ring + full + slot * BARRIER_BYTES
        # The products that read the slot are complete: what they read may be overwritten.
        mbarrier_wait(barrier + slots * BARRIER_BYTES, (turn & 1) ^ 1)
        mbarrier_arrive_expect(barrier, SLOT_BYTES)
        return ring + slot * SLOT_BYTES, barrier

    @unrolled
    def give_back(e, ring, turn, is_reporter):
        barrier = ring + (full + slots * BARRIER_BYTES) + (turn >> 1) * BARRIER_BYTES
        e.mbarrier_arrive(barrier, is_reporter)

    return start, claim, give_back


def copy_left(halves: int):
    """The verb `copy(target, image, word, step, barrier)`: the tiles of A from `word` on, `step` words apart."""

    @unrolled
    def issue(e, target, image, word, step, barrier):
        n_bytes = halves * PLANE_BYTES
        for i in range(GROUPS):
            e.copy_bulk(target + i * n_bytes, e.address(image, word), 0, n_bytes, barrier)
            word = word + step

    return issue


def copy_right(halves: int):
    """The verb `copy(target, image, word, step, barrier)`: two tiles of B, their planes of hi together first."""

    @unrolled
    def issue(e, target, image, word, step, barrier):
        for i in range(2):
            for plane in range(halves):
                source = e.address(image, word)
                to = target + (2 * plane + i) * PLANE_BYTES
                e.copy_bulk(to, source, plane * PLANE_BYTES, PLANE_BYTES, barrier)
            word = word + step

    return issue


def multiply(half: int, slots: int, transposed: bool, halves: int):
    """The verb `multiply(C, a, ring, a_turn, b_turn, factor, is_reporter)`: the columns 128 half .. + 127 of C.

    C += factor A B^T, or `transposed`, factor A B, over one tile of each. a: bytes from a slot to the warpgroup's tile;
    a_turn, b_turn: see `wgmma_ring.ring`; factor[i, h] is that of a panel and row; is_reporter: in one lane of each
    warp, which gives the slot of B back. The sum starts from zero, small products first, and is added in fp32.
    """
    steps = range(TILE // STEP)
    small = SMALL_FIRST[1:3] if halves == 2 else ()
    order = [(step, *which) for step in steps for which in small] + [(step, 0, 0) for step in steps]
    SLOT_BYTES = slot_bytes(halves)

    def place(turn, ring):
        slot = turn >> 1
        full = ring + slots * SLOT_BYTES + slot * BARRIER_BYTES
        return ring + slot * SLOT_BYTES, full, full + slots * BARRIER_BYTES, turn & 1

    def right(address, step: int, plane: int) -> Matrix:
        at = plane * 2 * PLANE_BYTES
        if transposed:
            return Matrix(address, at + step * STEP * ROW_BYTES, PLANE_BYTES, True)
        return Matrix(address, at + step * 2 * STEP)

    @unrolled
    def multiply(e, C, a, ring, a_turn, b_turn, factor, is_reporter):
        left, full, _, parity = place(a_turn, ring)
        if half == 0:
            e.mbarrier_wait(full, parity)
        left = left + a
        slot, full, read, parity = place(b_turn, ring)
        e.mbarrier_wait(full, parity)
        chain = [(Matrix(left, p * PLANE_BYTES + step * 2 * STEP), right(slot, step, q)) for step, p, q in order]
        (sums,) = e.wgmma(AT_ONCE, [chain])
        # The products are done: this warp has read the slot.
        e.mbarrier_arrive(read, is_reporter)
        for k, x in enumerate(sums):
            j, r = divmod(k, 4)
            panel, j = 2 * half + j // (TILE // N), j % (TILE // N)
            C[panel, j, r] = e.fma(x, factor[panel, r // 2], C[panel, j, r])

    return multiply


def load_units(panels: int):
    """The verb `load(unit, record, first, step, q_unscale)`: unit[i, h] of the tiles first + i step of K."""

    @verb
    def load(unit, record, first, step, q_unscale):
        for i in range(panels):
            # Panels behind the last tile do not count.
            x = unit_of(q_unscale, record[min(first + i * step, record.shape[0] - 1), UNSCALE])
            for h in range(2):
                unit[i, h] = x

    return load


def load_factors(panels: int):
    """The verb `load(factor, gW, record, first, end, times, row0, lane)`: gW[row0 + row] times `times` and unscale.

    factor[i, h] is of tile first + i of V, those from `end` on do not count.
    """

    @verb
    def load(factor, gW, record, first, end, times, row0, lane):
        for h in range(2):
            w = gW[row0 + (lane >> 2) + 8 * h] * times
            for i in range(panels):
                factor[i, h] = record[min(first + i, end - 1), UNSCALE] * w

    return load
