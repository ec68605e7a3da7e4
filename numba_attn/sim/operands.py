"""What products and bulk copies may read of shared memory: what is there for all threads that ask for it.

They see what bulk copies have written, and what a thread has stored before `fence_proxy_async`: the fence must stand
between the store and the arrival or barrier behind which the reader is.
"""

from __future__ import annotations

import numpy as np

from numba_attn.sim.errors import actor_text, fail, file_line
from numba_attn.sim.marks import ATOMIC, COPIES, IN_FLIGHT, MAX_THREADS
from numba_attn.sim.shared import InFlight


class Operands:
    """Checks for some threads that ask for one statement."""

    def __init__(self, threads):
        self.threads = threads
        self._until = None
        self._passed = set()

    def check(self, thread, memory, cells, what: str) -> None:
        """Fail unless what is read is there, for all threads."""
        first = {}
        for cell in cells:
            first.setdefault(memory.marks[cell], cell)
        for mark, cell in first.items():
            if mark in self._passed:
                continue
            at, value = f"byte {cell * memory.unit} of shared memory", memory.cells[cell]
            if value is None:
                fail(thread, f"{what} has {at}, which nobody has written")
            if mark == IN_FLIGHT or type(value) is InFlight:
                issued = f"issued at {file_line(value.file, value.line)} by {actor_text(thread.grid, value.thread)}"
                fail(thread, f"{what} has {at} while an asynchronous copy to it, {issued}, is in flight", value.thread)
            time, writer = divmod(mark, MAX_THREADS)
            if writer == ATOMIC:
                fail(thread, f"{what} has {at}, updated atomically and not by a bulk copy")
            if writer < COPIES:
                self._check_store(thread, writer, time, f"{what} has {at}")
            else:
                late = [other for other in self.threads if not other.ordered(writer, time)]
                if late:
                    fail_race(thread, f"{what} has {at}", writer, late[0])
            self._passed.add(mark)

    def _check_store(self, thread, writer: int, time: int, what: str) -> None:
        stored = f"{what}, stored by {actor_text(thread.grid, writer)}"
        fence = thread.grid.threads[writer].fenced(time)
        if fence is None:
            fail(thread, f"{stored} without fence_proxy_async since", writer)
        if self._until is None:
            self._until = np.minimum.reduce([other.until() for other in self.threads])
        until = self._until[writer]
        if time >= until:
            late = next(other for other in self.threads if time >= other.until()[writer])
            fail_race(thread, what, writer, late)
        if fence >= until:
            fail(thread, f"{stored}, whose fence_proxy_async comes after the barrier between", writer)


def fail_race(thread, what: str, writer: int, late) -> None:
    by = actor_text(thread.grid, writer)
    fail(thread, f"race: {what}, written by {by} with no barrier between", writer, late.index)


def check_operand(thread, threads, memory, cells, what: str) -> None:
    Operands(threads).check(thread, memory, cells, what)
