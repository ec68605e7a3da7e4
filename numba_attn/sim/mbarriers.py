"""Barriers in shared memory (`mbarrier`), the bulk copies that they count, and named barriers.

An arrival releases what its thread did and knows to have been done; a wait acquires what the arrivals of the phases
before it released (`Thread.known`). A bulk copy lands as late as it can: when no thread can go on without it, the last
one first. What it writes is ordered before those that waited for its barrier's phase, and before nobody else.
"""

from __future__ import annotations

from math import prod

import numpy as np

from numba_attn.sim.errors import caller_line, fail, file_line
from numba_attn.sim.marks import COPIES, IN_FLIGHT, KNOWN
from numba_attn.sim.shared import InFlight
from numba_attn.sim.tensors import Tensor

FULL = 0xFFFFFFFF
MBARRIER_BYTES = 8
COPY_BYTES = 16
"""What addresses and sizes of bulk copies are multiples of."""


class Mbarrier:
    """One barrier of a block: what its phase still waits for, and what the phases before it released."""

    def __init__(self, thread, address: int, arrivals: int, number: int):
        self.address = address
        self.arrivals = self.missing = arrivals
        self.n_bytes = 0
        """Announced and not yet there."""
        self.phase = 0
        self.writer = COPIES + number
        """As which "thread" the copies that it counts write."""
        self.by, self.at = thread.index, thread.grid.clock.time
        self.is_fenced = False
        self._released = np.zeros(KNOWN, np.int64)
        self._arrived = np.zeros(KNOWN, np.int64)

    def is_complete(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def add(self, released) -> None:
        """Something of the phase is there, and with it what it releases."""
        np.maximum(self._arrived, released, out=self._arrived)

    def turn(self) -> None:
        """Begin the next phase if this one is complete."""
        if self.missing == 0 and self.n_bytes == 0:
            self.phase += 1
            self.missing = self.arrivals
            np.maximum(self._released, self._arrived, out=self._released)

    def acquire(self, thread) -> None:
        thread.learn(self._released)

    def __str__(self) -> str:
        done = self.arrivals - self.missing
        arrivals = f"{done} of {self.arrivals} arrivals, {self.n_bytes} bytes missing"
        return f"mbarrier {self.address}: phase {self.phase}, {arrivals}"


def init(thread, address: int, arrivals: int) -> None:
    grid = thread.grid
    if address % MBARRIER_BYTES or not 0 <= address <= grid.dynamic.size - MBARRIER_BYTES:
        fail(thread, f"an mbarrier at byte {address} of {grid.dynamic.size}: 8 bytes, aligned to them")
    if address in grid.mbarriers:
        fail(thread, f"mbarrier {address} is initialised again")
    if arrivals < 1:
        fail(thread, f"mbarrier {address} of {arrivals} arrivals")
    grid.mbarriers[address] = Mbarrier(thread, address, arrivals, len(grid.mbarriers))


def fence_init(thread) -> None:
    for barrier in thread.grid.mbarriers.values():
        barrier.is_fenced |= barrier.by == thread.index


def _of(thread, address: int) -> Mbarrier:
    barrier = thread.grid.mbarriers.get(address)
    if barrier is None:
        fail(thread, f"mbarrier {address}, which nobody has initialised")
    if barrier.by != thread.index and not thread.ordered(barrier.by, barrier.at):
        what = f"race: mbarrier {address}, initialised by thread {barrier.by} with no barrier between"
        fail(thread, what, barrier.by)
    return barrier


def arrive(thread, address: int, n_bytes: int = 0) -> None:
    """One arrival, after `n_bytes` have been announced."""
    barrier = _of(thread, address)
    if barrier.missing == 0:
        fail(thread, f"more than {barrier.arrivals} arrivals in one phase of mbarrier {address}")
    barrier.missing -= 1
    barrier.n_bytes += n_bytes
    barrier.add(thread.released())
    barrier.turn()


def wait(thread, address: int, parity: int) -> None:
    """Wait until the phase of this parity is complete."""
    barrier = _of(thread, address)
    if parity not in (0, 1):
        fail(thread, f"parity {parity} of mbarrier {address}: 0 and 1 are possible")
    if not barrier.is_complete(parity):
        thread.meet("mbarrier wait", FULL, (barrier, parity))
    barrier.acquire(thread)


class BulkCopy:
    """One copy in flight."""

    def __init__(self, thread, memory, first: int, values: list, barrier: Mbarrier, n_bytes: int):
        self.thread = thread.index
        self.memory = memory
        self.cells = slice(first, first + len(values))
        self.values = values
        self.barrier = barrier
        self.n_bytes = n_bytes
        self.file, self.line = caller_line(thread)

    def land(self) -> None:
        memory, barrier = self.memory, self.barrier
        memory.cells[self.cells] = self.values
        memory.marks[self.cells] = [memory.clock.mark + barrier.writer] * len(self.values)
        released = np.zeros(KNOWN, np.int64)
        released[barrier.writer] = memory.clock.tick()
        barrier.n_bytes -= self.n_bytes
        barrier.add(released)
        barrier.turn()

    def __str__(self) -> str:
        place = file_line(self.file, self.line)
        return f"a bulk copy of {self.n_bytes} bytes, issued at {place} by thread {self.thread}"


def copy_bulk(thread, target: int, source: tuple[Tensor, tuple], n_bytes: int, address: int) -> None:
    """Start a copy of `n_bytes` of a tensor's last dimension to a shared address, counted by a barrier."""
    barrier = _of(thread, address)
    if not barrier.is_fenced:
        fail(thread, f"mbarrier {address} given to a bulk copy without fence_mbarrier_init by thread {barrier.by}")
    memory, (tensor, index) = thread.grid.dynamic, source
    unit, itemsize = memory.unit, tensor.dtype.itemsize
    count, end = n_bytes // itemsize, target + n_bytes
    if not 0 <= target <= memory.size - n_bytes:
        fail(thread, f"a bulk copy to bytes {target} to {end} of {memory.size} of shared memory")
    if found := [other for other in thread.grid.mbarriers if target < other + MBARRIER_BYTES and other < end]:
        fail(thread, f"a bulk copy to bytes {target} to {end}, over mbarrier {found[0]}")
    start = tensor.address() + sum(int(i) * s for i, s in zip(index, tensor.array.strides, strict=True))
    for name, value in (("target", target), ("size", n_bytes), ("source", start)):
        if value % COPY_BYTES:
            fail(thread, f"a bulk copy with {name} {value}, not a multiple of {COPY_BYTES}")
    *lead, first = tensor.element(index)
    tensor.element((*lead, first + count - 1))
    if tensor.strides[-1] != 1:
        fail(thread, f"a bulk copy from {tensor.text(index)}, whose last stride is {tensor.strides[-1]}")
    array = tensor.read_run((*lead, slice(first, first + count)))
    values = list(array) if unit == itemsize else [raw.tobytes() for raw in array.view(np.uint8).reshape(-1, unit)]
    first_cell = target // unit
    _check_target(thread, memory, first_cell, len(values))
    copy = BulkCopy(thread, memory, first_cell, values, barrier, n_bytes)
    memory.cells[copy.cells] = [InFlight(None, thread.index, copy.file, copy.line)] * len(values)
    memory.marks[copy.cells] = [IN_FLIGHT] * len(values)
    memory.readers[copy.cells] = [None] * len(values)
    thread.grid.copies.append(copy)


def _check_target(thread, memory, first: int, n: int) -> None:
    """Fail unless everything that was done to the cells is ordered before the copy."""
    cells = slice(first, first + n)
    view = memory.view(thread, first * memory.unit, (n,), (1,), np.dtype(f"u{memory.unit}"), "target of the copy")
    before = {}  # the first place and the last time of what each has read or written
    for place, (mark, readers) in enumerate(zip(memory.marks[cells], memory.readers[cells], strict=True)):
        if mark >= memory.clock.block_mark:
            before.setdefault(("w", mark), place)
        for reader, time in (readers or {}).items():
            before.setdefault((reader, time), place)
    for place in dict.fromkeys(before.values()):
        memory.check_write(view, thread, first + place, place, "bulk copy")


class NamedBarrier:
    """One of the 16 barriers of a block that some of its warps meet at."""

    def __init__(self, threads: int):
        self.threads = threads
        self.arrived = 0
        self.waiting = []
        self._released = np.zeros(KNOWN, np.int64)

    def arrive(self, thread) -> None:
        self.arrived += 1
        np.maximum(self._released, thread.released(), out=self._released)

    def go_on(self) -> list:
        """The threads that waited, once all are there."""
        for thread in self.waiting:
            thread.learn(self._released)
            thread.request = thread.answer = None
        return self.waiting


NAMES = 16


def named(thread, name: int, threads: int, *, wait: bool) -> None:
    """Arrive at a named barrier of so many threads, and wait there or not."""
    found = thread.grid.named
    if not 0 < name < NAMES or threads % 32 or not 0 < threads <= prod(thread.grid.block_dim):
        fail(thread, f"named barrier {name} of {threads} threads: names are 1 to {NAMES - 1}, threads whole warps")
    barrier = found.setdefault(name, NamedBarrier(threads))
    if barrier.threads != threads:
        fail(thread, f"named barrier {name} of {threads} threads here and of {barrier.threads} elsewhere")
    barrier.arrive(thread)
    if wait:
        barrier.waiting.append(thread)
    if barrier.arrived == threads:
        del found[name]
        thread.grid.passed.append(barrier)
    if wait:
        thread.meet("named barrier", FULL, name)


def unfinished(grid) -> str:
    """What the barriers of a block wait for, for a message."""
    texts = [str(b) for b in grid.mbarriers.values() if b.missing < b.arrivals or b.n_bytes]
    texts += [f"named barrier {name}: {b.arrived} of {b.threads} threads" for name, b in grid.named.items()]
    return "".join(f"; {text}" for text in texts)
