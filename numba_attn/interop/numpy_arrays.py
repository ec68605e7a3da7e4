"""numpy arrays: copied to the current device of Numba, served as Numba device arrays, and copied back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numba import cuda

from numba_attn import problem
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
