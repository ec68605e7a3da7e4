"""Barriers in shared memory (`mbarrier`), the bulk copies that they count, and named barriers.

An arrival releases what its thread did and knows to have been done; a wait acquires what the arrivals of the phases
before it released (`Thread.known`), those from other blocks of a cluster if it says so. A bulk copy lands as late as it
can: when no thread can go on without it, the last one first. What it writes is ordered before those that waited for its
barrier's phase, and before nobody else.
"""

from __future__ import annotations

from math import prod

import numpy as np

from numba_attn.sim.errors import actor_text, caller_line, fail, file_line
from numba_attn.sim.marks import COPIES, IN_FLIGHT, LANDED, MAX_MBARRIERS, MAX_THREADS
from numba_attn.sim.shared import InFlight
from numba_attn.sim.tensors import Tensor

FULL = 0xFFFFFFFF
MBARRIER_BYTES = 8
COPY_BYTES = 16
"""What addresses and sizes of bulk copies are multiples of."""


class Mbarrier:
    """One barrier of a block: what its phase still waits for, and what the phases before it released."""

    def __init__(self, thread, address: int, arrivals: int, number: int):
        grid = thread.grid
        self.address = address
        self.arrivals = self.missing = arrivals
        self.n_bytes = 0
        """Announced and not yet there; below 0 where bytes came before their announcement."""
        self.phase = 0
        self.writer = COPIES + number
        """As which "thread" the copies that it counts write."""
        self.by, self.at = thread.index, thread.block.clock.time
        self.fenced_at = None
        self._released, self._arrived = grid.nothing_known(), grid.nothing_known()
        # For who acquires what the own block released.
        self._own_released, self._own_arrived = self._released, self._arrived
        if grid.cluster > 1:
            self._own_released, self._own_arrived = grid.nothing_known(), grid.nothing_known()

    def is_complete(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def count(self, thread, n_bytes: int) -> None:
        """One arrival, after `n_bytes` have been announced."""
        if self.missing == 0:
            fail(thread, f"more than {self.arrivals} arrivals in one phase of mbarrier {self.address}")
        self.missing -= 1
        self.n_bytes += n_bytes

    def add(self, released, *, is_remote: bool = False) -> None:
        """Something of the phase is there, and with it what it releases."""
        np.maximum(self._arrived, released, out=self._arrived)
        if self._own_arrived is not self._arrived:
            # What is over is known whatever the wait acquires.
            own, released = (self._own_arrived[-1], released[-1]) if is_remote else (self._own_arrived, released)
            np.maximum(own, released, out=own)

    def turn(self) -> None:
        """Begin the next phase if this one is complete."""
        if self.missing == 0 and self.n_bytes == 0:
            self.phase += 1
            self.missing = self.arrivals
            np.maximum(self._released, self._arrived, out=self._released)
            np.maximum(self._own_released, self._own_arrived, out=self._own_released)

    def acquire(self, thread, of_cluster: bool) -> None:
        thread.learn(self._released if of_cluster else self._own_released)

    def __str__(self) -> str:
        done, more = self.arrivals - self.missing, "more than announced" if self.n_bytes < 0 else "missing"
        arrivals = f"{done} of {self.arrivals} arrivals, {abs(self.n_bytes)} bytes {more}"
        return f"mbarrier {self.address}: phase {self.phase}, {arrivals}"


def init(thread, address: int, arrivals: int) -> None:
    grid, block = thread.grid, thread.block
    if address % MBARRIER_BYTES or not 0 <= address <= block.dynamic.size - MBARRIER_BYTES:
        fail(thread, f"an mbarrier at byte {address} of {block.dynamic.size}: 8 bytes, aligned to them")
    if address in block.mbarriers:
        fail(thread, f"mbarrier {address} is initialised again")
    if arrivals < 1:
        fail(thread, f"mbarrier {address} of {arrivals} arrivals")
    if grid.n_mbarriers == MAX_MBARRIERS:
        fail(thread, f"more than {MAX_MBARRIERS} mbarriers")
    block.mbarriers[address] = Mbarrier(thread, address, arrivals, grid.n_mbarriers)
    grid.n_mbarriers += 1


def fence_init(thread) -> None:
    clock = thread.block.clock
    for barrier in thread.block.mbarriers.values():
        if barrier.by == thread.index and barrier.fenced_at is None:
            barrier.fenced_at = clock.time
    clock.tick()


def _of(thread, address: int) -> Mbarrier:
    barrier = thread.block.mbarriers.get(address)
    if barrier is None:
        fail(thread, f"mbarrier {address}, which nobody has initialised")
    _require_ordered(thread, barrier, barrier.at, "")
    return barrier


def _require_ordered(thread, barrier: Mbarrier, time: int, where: str) -> None:
    if barrier.by != thread.index and not thread.ordered(barrier.by, time):
        by = actor_text(thread.grid, barrier.by)
        what = f"race: mbarrier {barrier.address}{where}, initialised by {by} with no barrier between"
        fail(thread, what, barrier.by)


def check_made(thread, barrier: Mbarrier, where: str = "") -> None:
    """Fail unless the copy engine, and other blocks, see the barrier."""
    if barrier.fenced_at is None:
        by, to = actor_text(thread.grid, barrier.by), "other blocks" if where else "a bulk copy"
        fail(thread, f"mbarrier {barrier.address}{where} given to {to} without fence_mbarrier_init by {by}")
    _require_ordered(thread, barrier, barrier.fenced_at, where)


def arrive(thread, address: int, n_bytes: int = 0) -> None:
    """One arrival, after `n_bytes` have been announced."""
    barrier = _of(thread, address)
    barrier.count(thread, n_bytes)
    barrier.add(thread.released())
    barrier.turn()


def wait(thread, address: int, parity: int, *, of_cluster: bool) -> None:
    """Wait until the phase of this parity is complete."""
    barrier = _of(thread, address)
    if parity not in (0, 1):
        fail(thread, f"parity {parity} of mbarrier {address}: 0 and 1 are possible")
    if not barrier.is_complete(parity):
        thread.meet("mbarrier wait", FULL, (barrier, parity))
    barrier.acquire(thread, of_cluster)


class BulkCopy:
    """One copy in flight."""

    def __init__(self, thread, memory, first: int, values: list, barrier: Mbarrier, n_bytes: int):
        self.grid, self.blocks = thread.grid, (thread.block,)
        self.thread = thread.index
        self.memory, self.source = memory, None
        self.cells = slice(first, first + len(values))
        self.values = values
        self.barrier = barrier
        self.n_bytes = n_bytes
        self.file, self.line = caller_line(thread)

    def land(self) -> None:
        memory, barrier = self.memory, self.barrier
        self.landed_at = LANDED + memory.clock.time
        memory.cells[self.cells] = self.values
        memory.marks[self.cells] = [self.landed_at * MAX_THREADS + barrier.writer] * len(self.values)
        memory.clock.tick()
        released = self.grid.nothing_known()
        released[:, barrier.writer] = self.landed_at + 1
        barrier.n_bytes -= self.n_bytes
        barrier.add(released)
        barrier.turn()

    def __str__(self) -> str:
        place = file_line(self.file, self.line)
        return f"a bulk copy of {self.n_bytes} bytes, issued at {place} by {actor_text(self.grid, self.thread)}"


def copy_bulk(thread, target: int, source: tuple[Tensor, tuple], n_bytes: int, address: int) -> None:
    """Start a copy of `n_bytes` of a tensor's last dimension to a shared address, counted by a barrier."""
    barrier = _of(thread, address)
    check_made(thread, barrier)
    memory, (tensor, index) = thread.block.dynamic, source
    unit, itemsize = memory.unit, tensor.dtype.itemsize
    count = n_bytes // itemsize
    check_place(thread, thread.block, target, n_bytes)
    start = tensor.address() + sum(int(i) * s for i, s in zip(index, tensor.array.strides, strict=True))
    if start % COPY_BYTES:
        fail(thread, f"a bulk copy with source {start}, not a multiple of {COPY_BYTES}")
    *lead, first = tensor.element(index)
    tensor.element((*lead, first + count - 1))
    if tensor.strides[-1] != 1:
        fail(thread, f"a bulk copy from {tensor.text(index)}, whose last stride is {tensor.strides[-1]}")
    array = tensor.read_run((*lead, slice(first, first + count)))
    values = list(array) if unit == itemsize else [raw.tobytes() for raw in array.view(np.uint8).reshape(-1, unit)]
    start_copy(thread, BulkCopy(thread, memory, target // unit, values, barrier, n_bytes))


def check_place(thread, block, target: int, n_bytes: int) -> None:
    """Fail unless so many bytes of a block's shared memory may be the target of a bulk copy."""
    end, size = target + n_bytes, block.dynamic.size
    if not 0 <= target <= size - n_bytes:
        fail(thread, f"a bulk copy to bytes {target} to {end} of {size} of shared memory")
    if found := [other for other in block.mbarriers if target < other + MBARRIER_BYTES and other < end]:
        fail(thread, f"a bulk copy to bytes {target} to {end}, over mbarrier {found[0]}")
    for name, value in (("target", target), ("size", n_bytes)):
        if value % COPY_BYTES:
            fail(thread, f"a bulk copy with {name} {value}, not a multiple of {COPY_BYTES}")


def start_copy(thread, copy: BulkCopy) -> None:
    """The copy is in flight, if everything that was done to its target is ordered before."""
    memory, n = copy.memory, len(copy.values)
    _check_target(thread, memory, copy.cells)
    memory.cells[copy.cells] = [InFlight(None, thread.index, copy.file, copy.line)] * n
    memory.marks[copy.cells] = [IN_FLIGHT] * n
    memory.readers[copy.cells] = [None] * n
    thread.grid.copies.append(copy)


def _check_target(thread, memory, cells: slice) -> None:
    n, first = cells.stop - cells.start, cells.start
    view = memory.view(thread, first * memory.unit, (n,), (1,), np.dtype(f"u{memory.unit}"), "target of the copy")
    ordered_mark = memory.clock.block_mark if memory is thread.block.dynamic else 0
    before = {}  # the first place and the last time of what each has read or written
    for place, (mark, readers) in enumerate(zip(memory.marks[cells], memory.readers[cells], strict=True)):
        if mark >= ordered_mark:
            before.setdefault(("w", mark), place)
        for reader, time in (readers or {}).items():
            before.setdefault((reader, time), place)
    for place in dict.fromkeys(before.values()):
        memory.check_write(view, thread, first + place, place, "bulk copy")


class NamedBarrier:
    """One of the 16 barriers of a block that some of its warps meet at."""

    def __init__(self, grid, threads: int):
        self.threads = threads
        self.arrived = 0
        self.waiting = []
        self._released = grid.nothing_known()

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
    found = thread.block.named
    if not 0 < name < NAMES or threads % 32 or not 0 < threads <= prod(thread.grid.block_dim):
        fail(thread, f"named barrier {name} of {threads} threads: names are 1 to {NAMES - 1}, threads whole warps")
    barrier = found.setdefault(name, NamedBarrier(thread.grid, threads))
    if barrier.threads != threads:
        fail(thread, f"named barrier {name} of {threads} threads here and of {barrier.threads} elsewhere")
    barrier.arrive(thread)
    if wait:
        barrier.waiting.append(thread)
    if barrier.arrived == threads:
        del found[name]
        thread.block.passed.append(barrier)
    if wait:
        thread.meet("named barrier", FULL, name)


def unfinished(grid) -> str:
    """What the barriers of the blocks that run wait for, for a message."""
    texts = []
    for block in grid.blocks:
        own = [str(b) for b in block.mbarriers.values() if b.missing < b.arrivals or b.n_bytes]
        own += [f"named barrier {name}: {b.arrived} of {b.threads} threads" for name, b in block.named.items()]
        texts += own if grid.cluster == 1 else [f"{block}, {text}" for text in own]
    return "".join(f"; {text}" for text in texts)
