"""Local arrays (`cuda.local.array`): registers of one thread.

A local array is a dict from index to value. Reads, three of the four accesses of a fused multiply-add, then run
entirely in the interpreter's own code: a key that is there has been written and is in range, and `__missing__` tells
the two faults apart. Only the first write of each element checks its index.
"""

from __future__ import annotations

from math import prod

from numba_attn.sim.errors import fail, name_of
from numba_attn.sim.scalars import cast_of, dtype_of

_put = dict.__setitem__


class LocalArray(dict):
    """A guarded array of one thread: unwritten reads and indices out of range are errors."""

    __slots__ = ("thread", "shape", "dtype", "_scalar", "_cast")

    def __init__(self, thread, shape, dtype):
        self.thread = thread
        self.shape = tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        self.dtype = dtype_of(dtype)
        self._cast = cast_of(self.dtype)
        # Every int goes through the cast: it may need to wrap.
        self._scalar = None if self.dtype.kind in "iu" else self.dtype.type

    def __setitem__(self, index, value):
        if index not in self:
            index = self._admit(index)
        if type(value) is not self._scalar:
            value = self._cast(value)
        _put(self, index, value)

    def __missing__(self, index):
        key = self._partial(index)
        if key is not None:
            return LocalView(self, key)
        key = self._admit(index)
        if key is index:
            fail(self.thread, f"read of local {self._text(index)}, which this thread has not written")
        return self[key]

    def _partial(self, index):
        """The index as a tuple if it leaves dimensions, else None."""
        key = index if isinstance(index, tuple) else (index,)
        if len(key) >= len(self.shape):
            return None
        self._check(index, key)
        return key

    def _admit(self, index):
        """The dict key of an index in range."""
        key = index if isinstance(index, tuple) else (index,)
        if len(key) != len(self.shape):
            fail(self.thread, f"{len(key)} subscripts for local {self._text(index)}")
        self._check(index, key)
        return key[0] if len(key) == 1 and index is not key[0] else index

    def _check(self, index, key):
        for subscript, length in zip(key, self.shape, strict=False):
            if isinstance(subscript, slice) or not 0 <= subscript < length:
                fail(self.thread, f"index out of range: local {self._text(index)}")

    def _text(self, index) -> str:
        return f"array {name_of(self.thread, self)}{bracket(index)} ({self.dtype}, shape {self.shape})"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        fail(self.thread, f"a loop over local array {name_of(self.thread, self)}: loop over its indices instead")

    def __bool__(self):
        return True

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


class LocalView:
    """The part of a local array that is left after its first subscripts."""

    __slots__ = ("_array", "_first")

    def __init__(self, array: LocalArray, first: tuple):
        self._array = array
        self._first = first

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape[len(self._first) :]

    @property
    def dtype(self):
        return self._array.dtype

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        return self._array[self._first + (index if isinstance(index, tuple) else (index,))]

    def __setitem__(self, index, value):
        self._array[self._first + (index if isinstance(index, tuple) else (index,))] = value


def bracket(index) -> str:
    """`[i, j]` as it is written in source."""
    return f"[{', '.join(map(str, index))}]" if isinstance(index, tuple) else f"[{index}]"
