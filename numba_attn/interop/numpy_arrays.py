"""numpy arrays: copied to the current device of Numba, served as Numba device arrays, and copied back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numba import cuda

from numba_attn import problem
from numba_attn.interop import device_arrays
from numba_attn.problem import Geometry, Operand, contiguous_strides


def operand(array: np.ndarray, name: str) -> Operand:
    """The copy that the device will get: contiguous and aligned, whatever the strides of the array."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array: its mask would be lost, so pass an array without one")
    return Operand(name, array.shape, contiguous_strides(array.shape), str(array.dtype))


def check_out(out: np.ndarray, geometry: Geometry, inputs: dict[str, np.ndarray]) -> None:
    """Raise, as for an array on the device, if `out` cannot take the result."""
    facts = operand(out, "out")
    strides = tuple(stride // out.itemsize for stride in out.strides)
    problem.check_out(replace(facts, strides=strides), geometry, facts)
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    for name, array in inputs.items():
        if np.shares_memory(out, array):
            raise ValueError(f"out shares memory with {name}")


def with_batch_in_one(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays, those expanded whose batch dimensions broadcast in part: they are copied anyway."""
    try:
        batch = np.broadcast_shapes(*(array.shape[:-3] for array in arrays))
    except ValueError:  # told with the caller's names later
        return arrays

    def is_one(array: np.ndarray) -> bool:
        own = (1,) * (len(batch) - array.ndim + 3) + array.shape[:-3]
        return own == batch or all(size == 1 for size in own)

    return tuple(
        array if array.ndim < 4 or is_one(array) else np.broadcast_to(array, (*batch, *array.shape[-3:]), subok=True)
        for array in arrays
    )


def check_stream(stream, like: np.ndarray) -> None:
    device_arrays.check_stream(stream, like)


def to_device(array: np.ndarray, stream):
    return cuda.to_device(np.ascontiguousarray(array), stream=stream or 0)


def to_host(array, out: np.ndarray | None, stream) -> np.ndarray:
    """Copy the result back and wait for it."""
    result = array.copy_to_host(stream=stream or 0)
    if stream:
        stream.synchronize()
    if out is None:
        return result
    np.copyto(out, result)
    return out
