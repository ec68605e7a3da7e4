"""Shared memory of one block: cells with shadow state, and the guarded views through which threads reach it.

A `SharedMemory` is cut into cells of `unit` bytes. All views of it, whatever their dtype and shape, share its cells,
so aliasing tiles see each other's values and faults. Per cell there is

    cells    the numpy scalar stored there, raw bytes of a wider element, an `InFlight` copy, or None: never written
    marks    time and thread of the last write, in one integer: `time * MAX_THREADS + thread`
    readers  {thread: time} of the reads since that write, or None

Two accesses of a cell by different threads, one of them a write, need a barrier between. `clock.mark` is the mark of
now and `clock.block_mark` that of the last block barrier: a mark below the latter is ordered before everything that
the block runs now, which is the one comparison that a race-free access pays. Time advances at barriers only.

Here is the thorough way to read and write one element; the short ways that most accesses take are in `views`.
"""

from __future__ import annotations

from math import prod

import numpy as np

from numba_attn.sim.errors import actor_text, fail, file_line
from numba_attn.sim.marks import ATOMIC, COPIES, IN_FLIGHT, MAX_THREADS, NEVER
from numba_attn.sim.scalars import dtype_of
from numba_attn.sim.views import make_view


class FinerUnitsError(Exception):
    """A view needs smaller cells than the launch started with: it starts again."""

    def __init__(self, unit: int):
        super().__init__(unit)
        self.unit = unit


class InFlight:
    """A cell that an asynchronous copy will write: its value once the issuing thread has waited."""

    __slots__ = ("value", "thread", "file", "line")

    def __init__(self, value, thread: int, file: str, line: int):
        self.value = value
        self.thread = thread
        self.file = file
        self.line = line


class SharedMemory:
    """`size` bytes of a block, nothing of it written yet."""

    __slots__ = ("clock", "size", "unit", "alignment", "cells", "marks", "readers", "atomics", "kind")

    def __init__(self, clock, size: int, unit: int, alignment: int, kind: str):
        self.clock = clock
        self.size = size
        self.unit = unit
        self.alignment = alignment
        self.kind = kind
        count = -(-size // unit)
        self.cells = [None] * count
        self.marks = [NEVER] * count
        self.readers = [None] * count
        self.atomics = {}  # cell: (mark of the last plain write, {thread: time of its last update since})

    def view(self, thread, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype, name: str = ""):
        """The view of `thread` at byte `offset`; strides in elements."""
        dtype = dtype_of(dtype)
        last = offset + dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
        if offset < 0 or (prod(shape) and last > self.size):
            fail(
                thread, f"a tile of shape {shape} at byte {offset} ends at byte {last} of {self.size} {self.kind} bytes"
            )
        if offset % dtype.itemsize:
            fail(thread, f"a tile of {dtype} at byte {offset}, which is not a multiple of {dtype.itemsize}")
        if dtype.itemsize < self.unit:
            raise FinerUnitsError(dtype.itemsize)
        span = dtype.itemsize // self.unit
        strides = tuple(s * span for s in strides)
        return make_view(self, thread, offset // self.unit, tuple(shape), strides, dtype)

    def read(self, view, thread, cell: int, index):
        """The slow way to read one element: whatever the short one did not expect."""
        span = view.dtype.itemsize // self.unit
        pieces = []
        for i in range(cell, cell + span):
            value = self.cells[i]
            if value is None:
                fail(thread, f"read of {view.text(index)}, which nobody has written")
            if type(value) is InFlight:
                self.fail_in_flight(view, thread, value, "read", index)
            mark = self.marks[i]
            if mark >= self.clock.block_mark and mark % MAX_THREADS != thread.index:
                self.check_writer(view, thread, i, "read", index)
            readers = self.readers[i]
            if readers is None:
                readers = self.readers[i] = {}
            readers[thread.index] = self.clock.time
            pieces.append(value)
        if span == 1 and type(pieces[0]) is view.scalar:
            value = pieces[0]
        else:
            raw = b"".join(piece if type(piece) is bytes else piece.tobytes() for piece in pieces)
            value = np.frombuffer(raw, view.dtype)[0]
        return value if view.real else int(value)

    def write(self, view, thread, cell: int, value, index) -> None:
        """The slow way to write one element."""
        value = view.dtype.type(view.cast(value))
        span = view.dtype.itemsize // self.unit
        raw = value.tobytes()
        for i in range(span):
            self.check_write(view, thread, cell + i, index)
            self.cells[cell + i] = value if span == 1 else raw[i * self.unit : (i + 1) * self.unit]
            self.marks[cell + i] = self.clock.mark + thread.index

    def check_write(self, view, thread, cell: int, index, action: str = "write") -> None:
        """Fail unless `thread` may write the cell now; forgets its readers."""
        mark = self.marks[cell]
        # A thread of another block, which copies here, is not behind this one's barriers.
        is_recent = mark >= self.clock.block_mark or (mark >= 0 and thread.block.clock is not self.clock)
        if is_recent and mark % MAX_THREADS != thread.index:
            if mark == IN_FLIGHT:
                self.fail_in_flight(view, thread, self.cells[cell], action, index)
            # Bytes that have come may be written over once that is known, whoever told it.
            self.check_writer(view, thread, cell, action, index, -1 if mark % MAX_THREADS >= COPIES else 0)
        readers = self.readers[cell]
        if readers:
            for reader, time in readers.items():
                if reader != thread.index and not thread.ordered(reader, time, -1):
                    self.fail_race(view, thread, action, index, reader, "read")
            self.readers[cell] = None

    def check_writer(self, view, thread, cell: int, action: str, index, row: int = 0) -> None:
        """Fail if the last write of the cell is not ordered before `thread`: in that row of what it knows."""
        time, writer = divmod(self.marks[cell], MAX_THREADS)
        if writer == ATOMIC:
            for other, at in self.atomics[cell][1].items():
                if other != thread.index and not thread.ordered(other, at):
                    self.fail_race(view, thread, action, index, other, "updated atomically")
        elif not thread.ordered(writer, time, row):
            self.fail_race(view, thread, action, index, writer, "written")

    def atomic(self, view, thread, cell: int, index, update):
        """Replace the element by `update(old)` in one step and return old."""
        span = view.dtype.itemsize // self.unit
        cells = range(cell, cell + span)
        before = {}
        for i in cells:
            mark = self.marks[i]
            plain, updates = self.atomics[i] if mark % MAX_THREADS == ATOMIC else (mark, {})
            before[i] = plain, updates
            self.marks[i] = plain
            self.check_write(view, thread, i, index, "atomic update")
            self.marks[i] = NEVER  # the update itself is no plain access
        old = self.read(view, thread, cell, index)
        self.write(view, thread, cell, update(old), index)
        for i in cells:
            before[i][1][thread.index] = self.clock.time
            self.atomics[i] = before[i]
            self.marks[i] = self.clock.mark + ATOMIC
            self.readers[i] = None
        return old

    def fail_race(self, view, thread, action: str, index, other: int, done: str) -> None:
        by = f"{done} by {actor_text(thread.grid, other)} with no barrier between"
        for copy in thread.grid.copies:
            if copy.barrier.writer == other and copy.source is self and done == "read":
                by = f"which {copy}, reads"
        fail(thread, f"race: {action} of {view.text(index)}, {by}", other)

    def fail_in_flight(self, view, thread, flight: InFlight, action: str, index) -> None:
        issued = f"{file_line(flight.file, flight.line)} by {actor_text(thread.grid, flight.thread)}"
        what = f"{action} of {view.text(index)} while an asynchronous copy to it, issued at {issued}, is in flight"
        fail(thread, what, flight.thread)
