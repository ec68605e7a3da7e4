"""The edge to array libraries: what their arrays are, which stream is theirs, and how they allocate.

One module per library, all with the functions of `Library`. torch and CuPy are imported only once a caller has
passed an array of theirs: their modules are looked up by the type of the array.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from numba_attn.problem import Operand


class Library(Protocol):
    """What the call needs of an array library.

    `array` stands for an array of the library; a stream of None for the library's current one on the array's device.
    """

    def adopt(self, array: Any, name: str, stream: Any) -> Any:
        """What the other functions take for `array`; other producers' arrays are imported and ordered here."""

    def read(self, q: Any, k: Any, v: Any, names: tuple[str, str, str]) -> tuple[tuple[int, int, int], Hashable]:
        """Pointers and layout: all that decides how a call with the arrays is served, the pointers apart."""

    def operand(self, array: Any, name: str) -> Operand:
        """The same facts in plain terms. Raises if no kernel can read the array, naming it.

        Called for the first call of a layout, and for each call of one without unit strides: such arrays may be
        views that are not what their layout says (torch's pending negation).
        """

    def empty(self, like: Any, shape, strides, dtype: str, stream: Any) -> Any:
        """A new array on the device of `like`, ordered on the stream."""

    def fill(self, array: Any, value: float, stream: Any) -> None:
        """Set every element, ordered on the stream."""

    def pointer(self, array: Any) -> int:
        """Address of the first element."""

    def stream_handle(self, device: int, stream: Any) -> int:
        """The driver's handle of the stream on the device."""

    def check_stream(self, stream: Any, like: Any) -> None:
        """Raise for what is no stream, or one of another device than the array's."""

    def release(self, adopted: tuple, stream: Any) -> None:
        """Called once the launch is queued: the adopted arrays may go."""

    # Of libraries that multiply, torch and CuPy:

    def view(self, array: Any, shape, strides, offset: int) -> Any:
        """An array of the library over the same memory, `offset` elements behind the first one of `array`."""

    def matmul(self, left: Any, right: Any, out: Any, stream: Any) -> None:
        """out[i] = left[i] @ right[i] in fp32, ordered on the stream; no flag turns TF32 on, and all stay as they are.

        The library may copy an operand whose strides its product does not take.
        """


def library_of(names: tuple[str, ...], arrays: tuple) -> Any:
    """The module that serves all the arrays.

    Raises:
        TypeError: an argument is no array, or the arrays come from different libraries.
    """
    kinds = [type(array) for array in arrays]
    libraries = [library_of_type(kind) or _exporters(array) for kind, array in zip(kinds, arrays, strict=True)]
    for name, kind, library in zip(names, kinds, libraries, strict=False):
        if library is None:
            raise TypeError(f"{name} is a {kind.__name__}: torch, CuPy, Numba, numpy or other GPU arrays are served")
        if library is not libraries[0] or (library.__name__ == EXPORTERS and _root(kind) != _root(kinds[0])):
            raise TypeError(
                f"{name} is a {_root(kind)} array and {names[0]} a {_root(kinds[0])} one: all must be of one library"
            )
    return libraries[0]


EXPORTERS = "numba_attn.interop.device_arrays"


@lru_cache(maxsize=64)
def library_of_type(kind: type) -> Any:
    """The module that serves arrays of a type, or None."""
    for base in kind.__mro__:
        if base.__name__ == "Tensor" and base.__module__ == "torch":
            return import_module("numba_attn.interop.torch_arrays")
        if base.__name__ == "ndarray" and _root(base) == "cupy":
            return import_module("numba_attn.interop.cupy_arrays")
    if hasattr(kind, "__cuda_array_interface__") and not issubclass(kind, np.ndarray):
        return import_module(EXPORTERS)
    if issubclass(kind, np.ndarray):
        return import_module("numba_attn.interop.numpy_arrays")
    if hasattr(kind, "__dlpack__"):
        return import_module(EXPORTERS)
    return None


def _exporters(array: Any) -> Any:
    """Their module for an array that exports itself by an attribute of its own, and not of its type."""
    is_array = hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack__")
    return import_module(EXPORTERS) if is_array and not isinstance(array, type) else None


def _root(kind: type) -> str:
    """The library that a type belongs to, by name."""
    root = kind.__module__.partition(".")[0]
    return {"jaxlib": "jax", "numba_cuda": "numba"}.get(root, root)


def overlap(a: Operand, b: Operand) -> bool:
    """Whether two arrays share an element; a case too hard to decide counts as shared."""
    if 0 in a.shape or 0 in b.shape:
        return False
    try:
        return np.shares_memory(_addresses(a), _addresses(b), max_work=100_000)
    except np.exceptions.TooHardError:
        return True


def _addresses(operand: Operand) -> np.ndarray:
    """A numpy array at the operand's addresses, never to be read."""

    class Interface:
        __array_interface__ = {
            "version": 3,
            "typestr": np.dtype(operand.dtype).str,
            "shape": operand.shape,
            "strides": tuple(stride * np.dtype(operand.dtype).itemsize for stride in operand.strides),
            "data": (operand.pointer, False),
        }

    return np.asarray(Interface())
