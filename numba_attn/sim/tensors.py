"""Global memory: the arrays that a launch is given, as guarded `Tensor`s.

All threads share a Tensor's data; each has its own view, so that a fault names its thread. A log beside the data
remembers who wrote each element, so that two threads that write different values to one element, with no barrier
between and not atomically, are caught, and so is a read of what another thread wrote; it also tells which elements of
an output are still missing. Writes over what another thread has read are not judged.
"""

from __future__ import annotations

import numpy as np

from numba_attn.sim.errors import fail, name_of, threads_text
from numba_attn.sim.local import bracket
from numba_attn.sim.scalars import cast_of


class Log:
    """Who wrote each element of one array during one launch, and which elements hold a value."""

    __slots__ = ("writes", "written")

    def __init__(self, shape: tuple[int, ...], written: np.ndarray | None):
        self.writes = np.full(shape, None, object)
        self.written = written
        """bool per element; None for an array that is only read."""

    def part(self, index) -> Log:
        """The log of `array[index]`."""
        log = Log.__new__(Log)
        log.writes = self.writes[index]
        log.written = None if self.written is None else self.written[index]
        return log


class Tensor:
    """One thread's view of a global array with any strides."""

    __slots__ = (
        "thread", "array", "log", "name", "shape", "ndim", "dtype",
        "_cast", "_scalar", "_real", "_written", "_address",
    )  # fmt: skip

    def __init__(self, thread, array: np.ndarray, log: Log, name: str = ""):
        self.thread = thread
        self.array = array
        self.log = log
        self.name = name
        self.shape = array.shape
        self.ndim = array.ndim
        self.dtype = array.dtype
        self._cast = cast_of(array.dtype)
        self._scalar = array.dtype.type
        self._real = array.dtype.kind not in "iu"
        self._written = log.written
        self._address = None

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(s // self.dtype.itemsize for s in self.array.strides)

    @property
    def size(self) -> int:
        return self.array.size

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        fail(self.thread, f"a loop over tensor {self.name}: loop over its indices instead")

    def __getitem__(self, index):
        if type(index) is not tuple:
            index = (index,)
        if min(index) < 0:
            self._fail_range(index)
        try:
            value = self.array[index]
        except IndexError:
            self._fail_range(index)
        if type(value) is not self._scalar:
            return Tensor(self.thread, value, self.log.part(index), self.name)
        if self._written is not None:
            self._check_read(index)
        return value if self._real else int(value)

    def __setitem__(self, index, value):
        index = self.element(index)
        value = self._cast(value)
        self._record(index, self._scalar(value), False)
        self.array[index] = value

    def _check_read(self, index):
        if not self._written[index]:
            fail(self.thread, f"read of {self.text(index)}, which nobody has written")
        last = self.log.writes[index]
        if last is not None and not last[3] and not self._ordered(last):
            who, threads = self._writer(last)
            fail(self.thread, f"race: read of {self.text(index)}, written by {who} with no barrier between", *threads)

    def _ordered(self, last) -> bool:
        """Whether a recorded write comes before what the thread does now."""
        other, cluster, time, _ = last
        return cluster == self.thread.grid.number and (other == self.thread.index or self.thread.ordered(other, time))

    def _writer(self, last) -> tuple[str, tuple[int, ...]]:
        other, cluster, _, _ = last
        rank, tid = divmod(other, self.thread.grid.stride)
        is_own = cluster == self.thread.grid.number
        of_block = (
            "" if is_own and rank == self.thread.rank else f" of block {cluster * self.thread.grid.cluster + rank}"
        )
        return f"{threads_text((tid,))}{of_block}", (other,) if is_own else ()

    def read_run(self, index) -> np.ndarray:
        """`self[index]` whose last subscript is a slice in range, as an array."""
        whole = self._written is None or self._written[index].all()
        if not whole or any(write is not None for write in self.log.writes[index]):
            *lead, last = index
            for i in range(last.start, last.stop):
                self._check_read((*lead, i))
        return self.array[index]

    def element(self, index) -> tuple:
        """The index of one element as a tuple, in range."""
        index = index if type(index) is tuple else (index,)
        if len(index) != self.ndim:
            fail(self.thread, f"{len(index)} subscripts for {self.text(index)}")
        for subscript, length in zip(index, self.shape, strict=True):
            if isinstance(subscript, slice) or not 0 <= subscript < length:
                self._fail_range(index)
        return index

    def atomic(self, index, update):
        """`self[index] = update(self[index])` in one step; returns the old value."""
        index = self.element(index)
        old = self[index]
        new = self._scalar(self._cast(update(old)))
        self._record(index, new, True)
        self.array[index] = new
        return old

    def _record(self, index, value, atomic: bool):
        thread = self.thread
        last = self.log.writes[index]
        if last is not None and not (atomic and last[3]) and not self._ordered(last):
            if value.tobytes() != self.array[index].tobytes():
                who, threads = self._writer(last)
                what = f"two values written to {self.text(index)}: {self.array[index]} by {who}, then {value}"
                fail(thread, what, *threads)
        self.log.writes[index] = (thread.index, thread.grid.number, thread.block.clock.time, atomic)
        if self._written is not None:
            self._written[index] = True

    def _fail_range(self, index):
        if len(index) > self.ndim:
            fail(self.thread, f"{len(index)} subscripts for {self.text(index)}")
        fail(self.thread, f"index out of range: {self.text(index)}")

    def text(self, index) -> str:
        """What a message calls the element."""
        return f"tensor {name_of(self.thread, self) or self.name}{bracket(index)} ({self.dtype}, shape {self.shape})"

    def address(self) -> int:
        """Byte address of the first element."""
        if self._address is None:
            self._address = self.array.__array_interface__["data"][0]
        return self._address
