"""Verbs of a warpgroup on tiles of halves: S = Q K^T and O = alpha O + P V by `wgmma`.

A warpgroup owns 64 whole rows, each of its warps 16 of them, in the layout of `mma_tile` with q_rows = 16: the verbs
there do the rest. Q, K and V are images in shared memory (see `split_half`), that of K and V in parts: some columns of
both planes, the plane of hi first, each in its own slot of a ring. A verb that walks the parts of a tile waits for each
and gives its slot back.

Every product of fp32 numbers is three of halves. The tensor core truncates its sums, so each starts from zero, takes
the small products first, ends after 64 columns (S) or one tile of keys (O) and is added up in fp32.
"""

from __future__ import annotations

from numba_attn.device.mma_tile import left_fragment
from numba_attn.device.split_half import BLOCK_COLUMNS, ROW_BYTES, image_words, padded, plane_bytes
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb
from numba_attn.device.wgmma_fragments import STEP, Matrix

SMALL_FIRST = ((1, 1), (1, 0), (0, 1), (0, 0))
"""The four products, as which half (0: hi, 1: lo) of the left and of the right operand they take."""
BARRIER_BYTES = 8


def copy_part(rows: int, columns: int, part: int):
    """The verb `copy(target, image, tile, part, barrier)`: `part` columns of both planes of a tile, by one thread.

    image: a 1-D tensor of words; tile, part: numbers.
    """
    piece = plane_bytes(rows, part)
    pieces = (0, plane_bytes(rows, columns)) if part < padded(columns) else (0,)
    n_bytes = piece if len(pieces) > 1 else 2 * piece
    tile_words, part_words = image_words(rows, columns), piece // 4

    @unrolled
    def issue(e, target, image, word, barrier):
        source = e.address(image, word)
        for i, start in enumerate(pieces):
            e.copy_bulk(target + i * piece, source, start, n_bytes, barrier)

    @verb
    def copy(target, image, tile, part, barrier):
        issue(target, image, tile * tile_words + part * part_words, barrier)

    return copy


def copy_tiles(n_bytes: int):
    """The verb `copy(target, image, word, barrier)`: n_bytes of an image in one piece, by one thread."""

    @unrolled
    def copy(e, target, image, word, barrier):
        e.copy_bulk(target, e.address(image, word), 0, n_bytes, barrier)

    return copy


def _place(turn, ring, slot_bytes: int, slots: int) -> tuple:
    """Address of the slot, its two barriers (filled, read) and the parity of its phase."""
    slot = turn >> 1
    full = ring + (slots * slot_bytes) + slot * BARRIER_BYTES
    return ring + slot * slot_bytes, full, full + slots * BARRIER_BYTES, turn & 1


def scores(q_image_rows: int, k_rows: int, columns: int, part: int, products: int, slots: int, at_once: int):
    """The verb `qk(S, q, ring, turns, is_reporter)`: S = Q K^T, in units of both tiles' scales.

    q: shared address of the warpgroup's first row of Q; turns: those of the parts of K, see `ring`; is_reporter: in one
    lane of each warp. `at_once` sums of 64 columns are issued together.
    """
    q_block, k_block = q_image_rows * ROW_BYTES, k_rows * ROW_BYTES
    q_plane, k_plane = plane_bytes(q_image_rows, columns), plane_bytes(k_rows, part)
    *small, large = SMALL_FIRST[-products:]

    def chain(q, slot, block: int, first: int) -> list:
        """64 columns at most, from column `first` of Q and the part's block `block` on."""
        steps = range(-(-min(columns - first, BLOCK_COLUMNS) // STEP))
        q_at, k_at = first // BLOCK_COLUMNS * q_block, block * k_block

        def product(step: int, a: int, b: int):
            left = Matrix(q, a * q_plane + q_at + step * 2 * STEP)
            return left, Matrix(slot, b * k_plane + k_at + step * 2 * STEP)

        return [product(step, *halves) for step in steps for halves in small] + [
            product(step, *large) for step in steps
        ]

    @unrolled
    def qk(e, S, q, ring, turns, is_reporter):
        total = None
        for p, start in enumerate(range(0, columns, part)):
            slot, full, read, parity = _place(turns[p], ring, 2 * k_plane, slots)
            e.mbarrier_wait(full, parity)
            blocks = list(enumerate(range(start, min(start + part, columns), BLOCK_COLUMNS)))
            for i in range(0, len(blocks), at_once):
                sums = e.wgmma(k_rows, [chain(q, slot, *block) for block in blocks[i : i + at_once]])
                if i + at_once >= len(blocks):
                    # The products are done: this warp has read the slot.
                    e.mbarrier_arrive(read, is_reporter)
                for registers in sums:
                    total = [a + b for a, b in zip(total, registers, strict=True)] if total else registers
        for i, x in enumerate(total):
            S[0, i // 4, i % 4] = x

    return qk


def split_left(k_rows: int):
    """The verb `split(left, P)`: left[half, step] = four registers, P as left operands of 16 columns each."""

    @unrolled
    def split(e, left, P):
        for step in range(k_rows // STEP):
            for half, registers in enumerate(left_fragment(e, P, 0, step)):
                for r, register in enumerate(registers):
                    left[half, step, r] = register

    return split


def outputs(k_rows: int, columns: int, part: int, slots: int, at_once: int):
    """The verb `pv(O, left, alpha, ring, turns, is_reporter)`: O = alpha O + P V, `at_once` columns at a time."""
    plane, block = plane_bytes(k_rows, part), k_rows * ROW_BYTES
    steps = range(k_rows // STEP)
    order = [(step, *halves) for step in steps for halves in SMALL_FIRST[1:3]] + [(step, 0, 0) for step in steps]

    @unrolled
    def pv(e, O, left, alpha, ring, turns, is_reporter):
        lefts = [[[left[half, step, r] for r in range(4)] for step in steps] for half in range(2)]
        for p, start in enumerate(range(0, columns, part)):
            slot, full, read, parity = _place(turns[p], ring, 2 * plane, slots)
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


def ring(slots: int):
    """The verb `following(turn)`: the next turn of a ring: number of the slot and, in the lowest bit, the parity."""

    @verb
    def following(turn):
        return turn + 2 if turn < 2 * (slots - 1) else (turn & 1) ^ 1

    return following
