"""Verbs of a ring of slots in shared memory that one thread fills with tiles of K and V, and warpgroups read.

A slot holds a part of a tile: some columns of its planes, the plane of hi first. Barriers in shared memory stand
behind each other: full of each slot, read of each slot. A turn names a slot and, in its lowest bit, the
parity of its phase.
"""

from __future__ import annotations

from numba import cuda

from numba_attn.device.ptx_sm90 import (
    fence_mbarrier_init,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from numba_attn.device.split_half import image_bytes, image_words, padded, plane_bytes
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb
from numba_attn.device.wgmma_fragments import GROUP_ROWS

BARRIER_BYTES = 8


def copy_part(rows: int, columns: int, part: int, halves: int):
    """The verb `copy(target, image, tile, part, barrier)`: `part` columns of all planes of a tile, by one thread.

    image: a 1-D tensor of words; tile, part: numbers.
    """
    piece = plane_bytes(rows, part)
    pieces = [half * plane_bytes(rows, columns) for half in range(halves)] if part < padded(columns) else [0]
    n_bytes = halves * piece // len(pieces)
    tile_words, part_words = image_words(rows, columns, halves), piece // 4

    @unrolled
    def issue(e, target, image, word, barrier):
        source = e.address(image, word)
        for i, start in enumerate(pieces):
            e.copy_bulk(target + i * piece, source, start, n_bytes, barrier)

    @verb
    def copy(target, image, tile, part, barrier):
        issue(target, image, tile * tile_words + part * part_words, barrier)

    return copy


def start_barriers(slots: int, readers: int):
    """The verb `start(barriers, tid)`: all barriers, for `readers` warps that read."""

    @verb
    def start(barriers, tid):
        if tid == 0:
            for slot in range(slots):
                mbarrier_init(barriers + slot * BARRIER_BYTES, 1)
                mbarrier_init(barriers + (slots + slot) * BARRIER_BYTES, readers)
            # The copy engine must see them too, not threads alone.
            fence_mbarrier_init()
        # The barriers are there for all.
        cuda.syncthreads()

    return start


def claim(slots: int, slot_bytes: int):
    """The verb `claim(ring, barriers, turn)`: wait until all have read a slot, and announce its bytes; by one thread.

    Returns the shared addresses of the slot and of the barrier that counts the bytes.
    """

    @verb
    def claim(ring, barriers, turn):
        full = barriers + (turn >> 1) * BARRIER_BYTES
        # Read by all: their arrivals release what they did, and the tensor cores' reads ended before their waits did.
        mbarrier_wait(full + slots * BARRIER_BYTES, (turn & 1) ^ 1)
        mbarrier_arrive_expect(full, slot_bytes)
        return ring + (turn >> 1) * slot_bytes, full

    return claim


def feed(columns: int, part: int, slots: int, halves: int):
    """The verb `feed(ring, barriers, turn, gK, gV, first, last)`: K and V by one thread, as slots become free.

    Tiles first .. last - 1 of those of K and V in turns: 2 t is tile t of K, 2 t + 1 of V. gK, gV: images.
    """
    parts, slot_bytes = padded(columns) // part, image_bytes(GROUP_ROWS, part, halves)
    following, claim_slot, copy = ring(slots), claim(slots, slot_bytes), copy_part(GROUP_ROWS, columns, part, halves)

    @verb
    def feed(ring, barriers, turn, gK, gV, first, last):
        for tile in range(first, last):
            for p in range(parts):
                slot, barrier = claim_slot(ring, barriers, turn)
                copy(slot, gV if tile & 1 else gK, tile >> 1, p, barrier)
                turn = following(turn)

    return feed


def await_slots(slots: int):
    """The verb `await_slots(barriers)`: until there is what the first so many slots hold first."""

    @verb
    def await_slots(barriers):
        for slot in range(slots):
            mbarrier_wait(barriers + slot * BARRIER_BYTES, 0)

    return await_slots


def ring(slots: int):
    """The verb `following(turn)`: the next turn of a ring: number of the slot and, in the lowest bit, the parity."""

    @verb
    def following(turn):
        return turn + 2 if turn < 2 * (slots - 1) else (turn & 1) ^ 1

    return following


def turn_after(parts: int, slots: int) -> int:
    """The turn after so many, not more than a ring has slots."""
    return 2 * parts if parts < slots else 1


def take(parts: int, slots: int):
    """The verb `take(turns, turn)`: the turns of the parts of a tile; returns the one after them."""
    following = ring(slots)

    @verb
    def take(turns, turn):
        for part in range(parts):
            turns[part] = turn
            turn = following(turn)
        return turn

    return take


def slot_of(turn, ring, barriers, slot_bytes: int, slots: int) -> tuple:
    """Address of the slot, its two barriers (full, read) and the parity of its phase."""
    slot = turn >> 1
    full = barriers + slot * BARRIER_BYTES
    return ring + slot * slot_bytes, full, full + slots * BARRIER_BYTES, turn & 1
