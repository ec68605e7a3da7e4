"""CuPy arrays. Imported only when a caller's array is one."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from functools import partial

import cupy

from numba_attn.interop.flags import turned_off
from numba_attn.problem import Operand, strides_in_elements


def adopt(array: cupy.ndarray, name: str, stream) -> cupy.ndarray:
    return array


def read(q: cupy.ndarray, k: cupy.ndarray, v: cupy.ndarray, names) -> tuple[tuple[int, int, int], Hashable]:
    layout = tuple((x.shape, x.strides, x.dtype, x.device.id) for x in (q, k, v))
    return (q.data.ptr, k.data.ptr, v.data.ptr), layout


def operand(array: cupy.ndarray, name: str) -> Operand:
    strides = strides_in_elements(name, array.strides, array.dtype.itemsize)
    return Operand(name, array.shape, strides, str(array.dtype), array.device.id, array.data.ptr)


def empty(like: cupy.ndarray, shape, strides, dtype: str, stream) -> cupy.ndarray:
    with _entered(like.device.id, stream):
        return cupy.empty(shape, dtype)


def fill(array: cupy.ndarray, value: float, stream) -> None:
    with _entered(array.device.id, stream):
        array.fill(value)


def pointer(array: cupy.ndarray) -> int:
    return array.data.ptr


def stream_handle(device: int, stream) -> int:
    return cupy.cuda.get_current_stream(device).ptr if stream is None else _as_stream(stream, device).ptr


def check_stream(stream, like: cupy.ndarray) -> None:
    _as_stream(stream, like.device.id)


def release(adopted: tuple, stream) -> None:
    pass


def view(array: cupy.ndarray, shape, strides, offset: int) -> cupy.ndarray:
    item = array.itemsize
    return cupy.ndarray(shape, array.dtype, array.data + item * offset, tuple(item * stride for stride in strides))


def matmul(left: cupy.ndarray, right: cupy.ndarray, out: cupy.ndarray, stream) -> None:
    with _entered(out.device.id, stream), _tf32_off():
        cupy.matmul(left, right, out=out)


def _tf32_off():
    # Private, but there is no public way; CUPY_TF32=1 sets the same.
    core = cupy._core
    tf32, fp32 = core._routines_linalg.COMPUTE_TYPE_TF32, core._routines_linalg.COMPUTE_TYPE_FP32

    def found():
        return tf32 if core.get_compute_type("float32") == tf32 else None

    return turned_off(found, partial(core.set_compute_type, "float32"), fp32)


def _as_stream(stream, device: int):
    if isinstance(stream, int):
        return cupy.cuda.ExternalStream(stream, device)
    if hasattr(stream, "ptr") and hasattr(stream, "__enter__"):
        return stream
    raise TypeError(f"stream is a {type(stream).__name__}: a cupy.cuda.Stream or a driver handle is needed")


def _entered(device: int, stream) -> ExitStack:
    """The device, and the stream if one is given, as CuPy's current ones."""
    scope = ExitStack()
    scope.enter_context(cupy.cuda.Device(device))
    if stream is not None:
        scope.enter_context(_as_stream(stream, device))
    return scope
