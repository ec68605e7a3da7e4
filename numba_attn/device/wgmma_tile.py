"""Verbs of a warpgroup on tiles of halves: S = Q K^T and O = alpha O + P V by `wgmma`.

A warpgroup owns 64 whole rows, each of its warps 16 of them, in the layout of `mma_tile` with q_rows = 16: the verbs
there do the rest. Q, K and V are images in shared memory (see `split_half`), that of K and V in parts: some columns of
all planes, the plane of hi first, each in its own slot of a ring. A verb that walks the parts of a tile waits for each
and gives its slot back.

Every product of fp32 numbers is three of halves (for precision tf32 one). The tensor core truncates its sums, so each
starts from zero, takes the small products first, ends after 64 columns (S) or one tile of keys (O) and is added up in
fp32.

The ring and its barriers: `wgmma_ring`.
"""

from __future__ import annotations

from numba_attn.device.math import quotient
from numba_attn.device.mma_tile import SMALL_FIRST, halves_of, left_fragment
from numba_attn.device.ptx_sm90 import (
    named_barrier_arrive,
    named_barrier_sync,
)
from numba_attn.device.split_half import (
    BLOCK_COLUMNS,
    ROW_BYTES,
    padded,
    plane_bytes,
)
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb
from numba_attn.device.wgmma_fragments import GROUP_ROWS, GROUP_THREADS, STEP, Matrix
from numba_attn.device.wgmma_ring import slot_of


def scores(columns: int, part: int, products: int, slots: int, at_once: int):
    """The verb `qk(S, q, ring, barriers, turns, is_reporter)`: S = Q K^T, in units of both tiles' scales.

    q: shared address of the warpgroup's rows in a tile of Q; turns: those of the parts of K, see `ring`; is_reporter:
    in one lane of each warp. `at_once` sums of 64 columns are issued together.
    """
    block, q_plane, k_plane = GROUP_ROWS * ROW_BYTES, plane_bytes(GROUP_ROWS, columns), plane_bytes(GROUP_ROWS, part)
    slot_bytes = halves_of(products) * k_plane
    *small, large = SMALL_FIRST[-products:]

    def chain(q, slot, number: int, first: int) -> list:
        """64 columns at most, from column `first` of Q and the part's block of this number on."""
        steps = range(-(-min(columns - first, BLOCK_COLUMNS) // STEP))
        q_at, k_at = first // BLOCK_COLUMNS * block, number * block

        def product(step: int, a: int, b: int):
            left = Matrix(q, a * q_plane + q_at + step * 2 * STEP)
            return left, Matrix(slot, b * k_plane + k_at + step * 2 * STEP)

        return [product(step, *halves) for step in steps for halves in small] + [
            product(step, *large) for step in steps
        ]

    @unrolled
    def qk(e, S, q, ring, barriers, turns, is_reporter):
        total = None
        for p, start in enumerate(range(0, columns, part)):
            slot, full, read, parity = slot_of(turns[p], ring, barriers, slot_bytes, slots)
            # The copy's bytes are there for whoever waited, and for the tensor cores, which read as the copy wrote.
            e.mbarrier_wait(full, parity)
            blocks = list(enumerate(range(start, min(start + part, columns), BLOCK_COLUMNS)))
            for i in range(0, len(blocks), at_once):
                sums = e.wgmma(GROUP_ROWS, [chain(q, slot, *block) for block in blocks[i : i + at_once]])
                if i + at_once >= len(blocks):
                    # The products are done: this warp has read the slot.
                    e.mbarrier_arrive(read, is_reporter)
                for registers in sums:
                    total = [a + b for a, b in zip(total, registers, strict=True)] if total else registers
        for i, x in enumerate(total):
            S[0, i // 4, i % 4] = x

    return qk


def split_left(halves: int):
    """The verb `split(left, P)`: left[half, step] = four registers, P as left operands of 16 columns each."""

    @unrolled
    def split_left(e, left, P):
        for step in range(GROUP_ROWS // STEP):
            for half, registers in enumerate(left_fragment(e, P, 0, step, halves)):
                for r, register in enumerate(registers):
                    left[half, step, r] = register

    return split_left


def outputs(columns: int, part: int, products: int, slots: int, at_once: int):
    """The verb `pv(O, left, alpha, ring, barriers, turns, is_reporter)`: O = alpha O + P V, `at_once` columns a sum."""
    plane, block, halves = plane_bytes(GROUP_ROWS, part), GROUP_ROWS * ROW_BYTES, halves_of(products)
    steps = range(GROUP_ROWS // STEP)
    order = [(step, *pair) for step in steps for pair in SMALL_FIRST[-products:-1]] + [(step, 0, 0) for step in steps]

    @unrolled
    def pv(e, O, left, alpha, ring, barriers, turns, is_reporter):
        lefts = [[[left[half, step, r] for r in range(4)] for step in steps] for half in range(halves)]
        for p, start in enumerate(range(0, columns, part)):
            slot, full, read, parity = slot_of(turns[p], ring, barriers, halves * plane, slots)
            e.mbarrier_wait(full, parity)
            end = min(start + part, columns)
            for first in range(start, end, at_once):
                offset = (first - start) // BLOCK_COLUMNS * block
                chain = [
                    (lefts[a][step], Matrix(slot, b * plane + offset + step * STEP * ROW_BYTES, block, True))
                    for step, a, b in order
                ]
                (sums,) = e.wgmma(min(at_once, end - first), [chain])
                if first + at_once >= end:
                    # As above.
                    e.mbarrier_arrive(read, is_reporter)
                for i, x in enumerate(sums):
                    place = first // 8 + i // 4, i % 4
                    O[0, *place] = e.fma(O[0, *place], alpha[0, place[1] // 2], x)

    return pv


def skip(columns: int, part: int, slots: int):
    """The verb `skip(ring, barriers, turns, is_reporter)`: give back the parts of a tile that nobody needs."""

    @unrolled
    def skip(e, ring, barriers, turns, is_reporter):
        for p in range(padded(columns) // part):
            _, full, read, parity = slot_of(turns[p], ring, barriers, 2 * plane_bytes(GROUP_ROWS, part), slots)
            # Not before it is full: an arrival ahead of the phase would count for the one before.
            e.mbarrier_wait(full, parity)
            e.mbarrier_arrive(read, is_reporter)

    return skip


def turns(groups: int):
    """The verbs `take(group)` and `end(group)`: warpgroups take turns, the first one after an `end` of the last one."""

    @verb
    def take(group):
        named_barrier_sync(1 + group, 2 * GROUP_THREADS)

    @verb
    def end(group):
        named_barrier_arrive(1 + (group + 1) % groups, 2 * GROUP_THREADS)

    return take, end


L2_BYTES = 32 * 1024 * 1024
"""Images of K and V that the blocks of one time should share in L2."""


def place(is_causal: bool, tile_bytes: int):
    """The verb `place(task, heads, m_blocks, k_tiles)`: head and m_block of a task.

    Under causality the last rows have the most keys: they come first, those of as many heads as L2 holds together, so
    that no long task comes last. tile_bytes: of a tile of K and one of V.
    """

    l2_tiles = L2_BYTES // tile_bytes

    @verb
    def place(task, heads, m_blocks, k_tiles):
        if is_causal:
            together = min(heads, max(1, quotient(l2_tiles, k_tiles)))
            first = quotient(task, together * m_blocks) * together
            together = min(together, heads - first)
            rest = task - first * m_blocks
            return first + rest - quotient(rest, together) * together, m_blocks - 1 - quotient(rest, together)
        head = quotient(task, m_blocks)
        return head, task - head * m_blocks

    return place
