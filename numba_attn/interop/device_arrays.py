"""Numba device arrays and other producers of GPU arrays, by DLPack or `__cuda_array_interface__`.

Results are Numba device arrays. Without `stream` the work is queued on Numba's default stream. Other producers may
reuse the memory of an array as soon as the caller drops it, and do not know our stream: without `stream` the call
then waits for its own work; with one, the caller keeps the arrays until that stream has reached the end of the call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.core.utils import StridedMemoryView
from numba import cuda

from numba_attn.problem import Operand, contiguous_strides, strides_in_elements

DEFAULT_STREAM = 0
LEGACY_STREAM = 1  # the default stream's name in DLPack and in the interface, where 0 is not allowed
DLPACK_CUDA = (2, 13)  # kDLCUDA and kDLCUDAManaged


@dataclass(frozen=True, slots=True)
class Adopted:
    """An imported array; its import lives as long as this."""

    array: Any
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    read_only: bool
    view: Any = None


class _Interface:
    """A producer's `__cuda_array_interface__` in version 3, with a legal stream."""

    def __init__(self, description: dict):
        stream = description.get("stream")
        self.__cuda_array_interface__ = {
            **description,
            "version": 3,
            "stream": LEGACY_STREAM if stream == DEFAULT_STREAM else stream,
        }


def adopt(array: Any, name: str, stream) -> Adopted:
    if isinstance(array, Adopted):
        return array
    source, device = _source(array, name)
    if device is None:
        shape = tuple(source.__cuda_array_interface__["shape"])
        return Adopted(array, 0, shape, contiguous_strides(shape), _dtype(array, source), None, False)
    consumer = LEGACY_STREAM if stream is None else _handle(stream) or LEGACY_STREAM
    with cuda.gpus[device]:
        view = StridedMemoryView.from_any_interface(source, stream_ptr=consumer)
    shape = tuple(view.shape)
    strides = contiguous_strides(shape) if view.strides is None else tuple(view.strides)
    if isinstance(source, _Interface) and (in_bytes := source.__cuda_array_interface__.get("strides")):
        strides = strides_in_elements(name, in_bytes, view.dtype.itemsize)
    return Adopted(array, view.ptr, shape, strides, _dtype(array, view), device, view.readonly, view)


def _source(array: Any, name: str) -> tuple[Any, int | None]:
    """The object to import from, and its device: None for an empty array without one."""
    if hasattr(array, "__dlpack_device__"):
        try:
            kind, device = array.__dlpack_device__()
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} has no usable __dlpack_device__: {error}") from None
        if kind not in DLPACK_CUDA:
            raise ValueError(
                f"{name} is not on a GPU: a device array is needed (numba_attn.sim.attention runs on a CPU)"
            )
        return array, int(device)
    if not hasattr(array, "__cuda_array_interface__"):
        raise TypeError(f"{name} has no usable __dlpack__: it has no __dlpack_device__")
    if problem := _malformed(array.__cuda_array_interface__):
        raise TypeError(f"{name} has no usable __cuda_array_interface__: {problem}")
    source = _Interface(array.__cuda_array_interface__)
    if 0 in source.__cuda_array_interface__["shape"]:
        return source, None
    cuda.current_context()
    return source, StridedMemoryView.from_cuda_array_interface(source, stream_ptr=-1).device_id


def _malformed(description: Any) -> str | None:
    """What is wrong with an interface, or None."""
    if not isinstance(description, dict):
        return f"it is a {type(description).__name__}, not a dict"
    if missing := [key for key in ("shape", "typestr", "data") if key not in description]:
        return f"it has no {' and no '.join(missing)}"
    if description.get("mask") is not None:
        return "it has a mask, and masked arrays are not served"
    for key, optional in (("shape", False), ("strides", True)):
        value = description.get(key)
        is_tuple = isinstance(value, tuple) and all(hasattr(item, "__index__") for item in value)
        if not is_tuple and not (optional and value is None):
            return f"its {key} is {value!r}, not a tuple of ints"
    data = description["data"]
    if not (isinstance(data, tuple) and len(data) == 2 and hasattr(data[0], "__index__")):
        return f"its data is {data!r}, not a pointer and a flag"
    typestr = description["typestr"]
    try:
        known = isinstance(typestr, str) and np.dtype(typestr) is not None
    except (TypeError, ValueError):
        known = False
    return None if known else f"its typestr is {typestr!r}, which is no type of numpy's"


def _dtype(array: Any, source: Any) -> str:
    if hasattr(array, "dtype"):
        return str(array.dtype)
    return str(source.dtype if hasattr(source, "dtype") else np.dtype(source.__cuda_array_interface__["typestr"]))


def read(q: Adopted, k: Adopted, v: Adopted, names) -> tuple[tuple[int, int, int], Hashable]:
    layout = tuple((x.shape, x.strides, x.dtype, x.device, x.read_only) for x in (q, k, v))
    return (q.pointer, k.pointer, v.pointer), layout


def operand(array: Adopted, name: str) -> Operand:
    if name == "out" and array.read_only:
        raise ValueError("out is read-only")
    return Operand(name, array.shape, array.strides, array.dtype, array.device, array.pointer)


def empty(like: Adopted, shape, strides, dtype: str, stream):
    with cuda.gpus[_device(like.device)]:
        return cuda.device_array(shape, dtype, stream=as_numba_stream(stream))


def fill(array: Any, value: float, stream) -> None:
    target = adopt(array, "out", stream)
    with cuda.gpus[_device(target.device)]:
        view = cuda.from_cuda_array_interface(
            {
                "version": 3,
                "shape": target.shape,
                "strides": tuple(stride * np.dtype(target.dtype).itemsize for stride in target.strides),
                "typestr": np.dtype(target.dtype).str,
                "data": (target.pointer, False),
            }
        )
        view.setitem(slice(None), np.dtype(target.dtype).type(value), as_numba_stream(stream))


def pointer(array: Any) -> int:
    return array.pointer if isinstance(array, Adopted) else array.device_ctypes_pointer.value or 0


def stream_handle(device: int, stream) -> int:
    return DEFAULT_STREAM if stream is None else _handle(stream)


def check_stream(stream, like) -> None:
    _handle(stream)


def release(adopted: tuple, stream) -> None:
    first = adopted[0]
    if stream is None and not hasattr(first.array, "__cuda_ndarray__") and first.device is not None:
        with cuda.gpus[first.device]:
            cuda.default_stream().synchronize()


def current_device() -> int:
    return cuda.get_current_device().id


def _device(device: int | None) -> int:
    return current_device() if device is None else device


def _handle(stream) -> int:
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    raise TypeError(f"stream is a {type(stream).__name__}: a Numba stream or a driver handle is needed")


def as_numba_stream(stream):
    """The stream as Numba's functions take it: 0 for the default one."""
    handle = DEFAULT_STREAM if stream is None else _handle(stream)
    return cuda.external_stream(handle) if handle else 0
