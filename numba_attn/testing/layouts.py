"""Memory layouts of a [B, H, L, D] operand, and outputs whose every stray write shows.

A layout is plain arithmetic on a shape, so the same one can be laid over a numpy or a GPU buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

Shape = tuple[int, ...]

PAD_ROWS, PAD_COLUMNS = 33, 3  # one row more than a tile of 32 keys; columns that are no whole vector
GUARD = 256  # elements of one guard band, a multiple of any alignment that a kernel may use


@dataclass(frozen=True)
class Placed:
    """A view of a flat buffer; strides and offset count elements."""

    buffer: np.ndarray
    shape: Shape
    strides: Shape
    offset: int = 0

    @property
    def view(self) -> np.ndarray:
        item = self.buffer.itemsize
        return as_strided(self.buffer[self.offset :], self.shape, tuple(item * stride for stride in self.strides))


def _dense(*order: int) -> Callable[[Shape, int], tuple[int, Shape, int]]:
    """Contiguous storage whose dimensions are nested in `order`, outermost first."""

    def layout(shape: Shape, slot: int) -> tuple[int, Shape, int]:
        strides, step = [0] * 4, 1
        for axis in reversed(order):
            strides[axis] = step
            step *= shape[axis]
        return step, tuple(strides), 0

    return layout


def _packed(shape: Shape, slot: int) -> tuple[int, Shape, int]:
    B, H, L, D = shape
    return B * L * 3 * H * D, (L * 3 * H * D, D, 3 * H * D, 1), slot * H * D


def _every_other(shape: Shape, slot: int) -> tuple[int, Shape, int]:
    B, H, L, D = shape
    return 2 * B * H * L * D, (2 * H * L * D, 2 * L * D, 2 * D, 2), 0


def _misaligned(shape: Shape, slot: int) -> tuple[int, Shape, int]:
    size, strides, _ = _dense(0, 1, 2, 3)(shape, slot)
    return size + 1, strides, 1


def _padded(shape: Shape, slot: int) -> tuple[int, Shape, int]:
    B, H, L, D = shape
    return _dense(0, 1, 2, 3)((B, H, L + PAD_ROWS, D + PAD_COLUMNS), slot)


def _expanded(shape: Shape, slot: int) -> tuple[int, Shape, int]:
    B, H, L, D = shape
    return L * D, (0, 0, D, 1), 0


LAYOUTS: dict[str, Callable[[Shape, int], tuple[int, Shape, int]]] = {
    "contiguous": _dense(0, 1, 2, 3),
    "transposed": _dense(0, 2, 1, 3),
    "packed": _packed,
    "every_other": _every_other,
    "storage_transposed": _dense(0, 1, 3, 2),
    "misaligned": _misaligned,
    "padded": _padded,
    "expanded": _expanded,
}
"""Name -> function of (shape, slot) that gives the buffer's elements, the strides and the offset.

`transposed` is (B, L, H, D) storage, `packed` a slice of (B, L, 3, H, D) at index `slot`, `every_other` has last
stride 2, `storage_transposed` is (B, H, D, L) storage, `misaligned` starts one element in, `padded` is the first L
rows and D columns of a larger array, `expanded` has stride 0 over batches and heads (which then hold the same).
"""


def place(values: np.ndarray, layout: str = "contiguous", slot: int = 0) -> Placed:
    """Values [B, H, L, D] in the named layout; elements of the buffer that are not theirs are NaN."""
    size, strides, offset = LAYOUTS[layout](values.shape, slot)
    placed = Placed(np.full(size, np.nan, values.dtype), values.shape, strides, offset)
    placed.view[...] = values
    return placed


@dataclass(frozen=True)
class Guarded(Placed):
    """An output to be filled: NaN in the view, and a sentinel in all of the buffer that is not the view's."""

    def check(self, buffer: np.ndarray | None = None) -> None:
        """Raise AssertionError if anything outside the view changed, in `buffer` (a copy back) or in place."""
        buffer = self.buffer if buffer is None else buffer
        owned = np.zeros(buffer.shape, bool)
        Placed(owned, self.shape, self.strides, self.offset).view[...] = True
        changed = np.flatnonzero((_bits(buffer) != _bits(_sentinel(1, buffer.dtype))) & ~owned)
        if changed.size:
            first = int(changed[0]) - self.offset
            raise AssertionError(
                f"{changed.size} elements outside the output were written, the first at {first} elements from its start"
            )


def guarded(shape: Shape, dtype=np.float32, layout: str | None = None) -> Guarded:
    """An output of any rank (contiguous) or of a 4-D layout, full of NaN, between guard bands."""
    if layout is None:
        strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        size, offset = int(np.prod(shape)), 0
    else:
        size, strides, offset = LAYOUTS[layout](shape, 0)
    output = Guarded(_sentinel(size + 2 * GUARD, dtype), tuple(shape), strides, offset + GUARD)
    output.view[...] = np.nan
    return output


def _sentinel(size: int, dtype) -> np.ndarray:
    return np.frombuffer(b"\xa5" * (size * np.dtype(dtype).itemsize), dtype).copy()


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")
