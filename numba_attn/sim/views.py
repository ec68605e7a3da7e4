"""Views of shared memory: how one thread reaches the cells of a `SharedMemory`.

`View` serves any number of dimensions and any width of elements. `View1` and `View2`, for elements of one cell, are
what kernels mostly use: a race-free access of theirs costs a bounds test, a few list accesses and one comparison, and
hands over to the memory's thorough way only where something is unusual.
"""

from __future__ import annotations

from math import prod

from numba_attn.sim.errors import fail, name_of
from numba_attn.sim.local import bracket
from numba_attn.sim.marks import MAX_THREADS, NEVER
from numba_attn.sim.scalars import cast_of


def make_view(memory, thread, base: int, shape, strides, dtype):
    """The leanest view class that serves."""
    simple = dtype.itemsize == memory.unit
    kind = View1 if simple and len(shape) == 1 else View2 if simple and len(shape) == 2 else View
    return kind(memory, thread, base, shape, strides, dtype)


class View:
    """One thread's view of shared memory: any number of dimensions, any width of elements."""

    __slots__ = (
        "memory", "thread", "base", "shape", "strides", "dtype", "cast", "scalar", "real",
        "_cells", "_marks", "_readers", "_clock", "_me", "_n0", "_n1", "_s0", "_s1",
    )  # fmt: skip

    def __init__(self, memory, thread, base, shape, strides, dtype):
        self.memory = memory
        self.thread = thread
        self.base = base
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.cast = cast_of(dtype)
        self.scalar = dtype.type
        self.real = dtype.kind not in "iu"
        self._cells = memory.cells
        self._marks = memory.marks
        self._readers = memory.readers
        self._clock = memory.clock
        self._me = thread.index
        self._n0, self._s0 = shape[0], strides[0]
        if len(shape) > 1:
            self._n1, self._s1 = shape[1], strides[1]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        fail(self.thread, f"a loop over shared array {name_of(self.thread, self)}: loop over its indices instead")

    def __getitem__(self, index):
        cell, rest = self.find(index)
        if rest:
            return make_view(self.memory, self.thread, cell, self.shape[-rest:], self.strides[-rest:], self.dtype)
        return self.memory.read(self, self.thread, cell, index)

    def __setitem__(self, index, value):
        self.memory.write(self, self.thread, self.element(index), value, index)

    def find(self, index) -> tuple[int, int]:
        """First cell of `self[index]`, and how many dimensions the index leaves."""
        key = index if isinstance(index, tuple) else (index,)
        if len(key) > len(self.shape):
            fail(self.thread, f"{len(key)} subscripts for {self.text(index)}")
        cell = self.base
        for subscript, length, stride in zip(key, self.shape, self.strides, strict=False):
            if isinstance(subscript, slice) or not 0 <= subscript < length:
                fail(self.thread, f"index out of range: {self.text(index)}")
            cell += int(subscript) * stride
        return cell, len(self.shape) - len(key)

    def element(self, index) -> int:
        """First cell of the element `self[index]`."""
        cell, rest = self.find(index)
        if rest:
            fail(self.thread, f"{len(self.shape) - rest} subscripts for {self.text(index)}")
        return cell

    def run_cell(self, index, n: int) -> int | None:
        """First cell of `n` consecutive, aligned elements, or None where the short way does not serve."""
        return None

    def run(self, index, n: int) -> tuple | None:
        """The values of `n` consecutive elements, or None where the short way does not serve."""
        return None

    def atomic(self, index, update):
        """`self[index] = update(self[index])` in one step; returns the old value."""
        return self.memory.atomic(self, self.thread, self.element(index), index, update)

    def text(self, index) -> str:
        """What a message calls the element."""
        name = name_of(self.thread, self)
        return f"shared array {name}{bracket(index)} ({self.dtype}, shape {self.shape})"


class View1(View):
    """One dimension of elements of one cell each."""

    __slots__ = ()

    def __getitem__(self, index):
        if type(index) is tuple or not 0 <= index < self._n0:
            return View.__getitem__(self, index)
        cell = self.base + index * self._s0
        value = self._cells[cell]
        mark = self._marks[cell]
        if type(value) is not self.scalar or (mark >= self._clock.block_mark and self._unordered(mark)):
            return self.memory.read(self, self.thread, cell, index)
        readers = self._readers[cell]
        if readers is None:
            self._readers[cell] = {self._me: self._clock.time}
        else:
            readers[self._me] = self._clock.time
        return value if self.real else int(value)

    def __setitem__(self, index, value):
        if type(index) is tuple or not 0 <= index < self._n0:
            View.__setitem__(self, index, value)
            return
        self._put(self.base + index * self._s0, value, index)

    def _unordered(self, mark) -> bool:
        """False if the write of `mark` was this thread's own or came before the warp's last barrier."""
        writer = mark % MAX_THREADS
        return writer != self._me and (mark >= self.thread.warp_mark or writer // 32 != self.thread.warp)

    def _put(self, cell, value, index):
        mark = self._marks[cell]
        if self._readers[cell] or (mark >= self._clock.block_mark and self._unordered(mark)):
            self.memory.check_write(self, self.thread, cell, index)
        if type(value) is not self.scalar:
            value = self.scalar(self.cast(value))
        self._cells[cell] = value
        self._marks[cell] = self._clock.mark + self._me


class View2(View1):
    """Two dimensions of elements of one cell each."""

    __slots__ = ()

    def __getitem__(self, index):
        try:
            i, j = index
        except (TypeError, ValueError):
            return View.__getitem__(self, index)
        if not (0 <= i < self._n0 and 0 <= j < self._n1):
            return View.__getitem__(self, index)
        cell = self.base + i * self._s0 + j * self._s1
        value = self._cells[cell]
        mark = self._marks[cell]
        if type(value) is not self.scalar or (mark >= self._clock.block_mark and self._unordered(mark)):
            return self.memory.read(self, self.thread, cell, index)
        readers = self._readers[cell]
        if readers is None:
            self._readers[cell] = {self._me: self._clock.time}
        else:
            readers[self._me] = self._clock.time
        return value if self.real else int(value)

    def __setitem__(self, index, value):
        try:
            i, j = index
        except (TypeError, ValueError):
            i = j = NEVER
        if not (0 <= i < self._n0 and 0 <= j < self._n1):
            View.__setitem__(self, index, value)
            return
        self._put(self.base + i * self._s0 + j * self._s1, value, index)

    def run_cell(self, index, n: int) -> int | None:
        try:
            i, j = index
        except (TypeError, ValueError):
            return None
        memory = self.memory
        if not (0 <= i < self._n0 and 0 <= j <= self._n1 - n) or self._s1 != 1 or memory.alignment % (n * memory.unit):
            return None
        cell = self.base + i * self._s0 + j
        return None if cell % n else cell

    def run(self, index, n: int) -> tuple | None:
        cell = self.run_cell(index, n)
        if cell is None:
            return None
        values = self._cells[cell : cell + n]
        marks = self._marks[cell : cell + n]
        if {*map(type, values)} != {self.scalar}:
            return None
        block_mark = self._clock.block_mark
        if max(marks) >= block_mark and any(mark >= block_mark and self._unordered(mark) for mark in marks):
            return None
        me, time = self._me, self._clock.time
        for i, readers in enumerate(self._readers[cell : cell + n], cell):
            if readers is None:
                self._readers[i] = {me: time}
            else:
                readers[me] = time
        return tuple(values) if self.real else tuple(map(int, values))
