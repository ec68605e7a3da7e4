"""One call: arrays, checks, problem, choice, plan, launch, arrays.

What follows from the layouts of the arrays is worked out once and kept, so that a warm call only reads pointers,
allocates and launches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from numba_attn import interop, launch, versions
from numba_attn.choice import choose, find
from numba_attn.interop import device_arrays, numpy_arrays
from numba_attn.kernel import OPERANDS
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200, Device, Geometry, View, check_out, contiguous_strides, describe, vector_width

NO_GPU = "no CUDA GPU is found: numba_attn.sim.attention runs the kernels on a CPU"
KEPT_CALLS = 1024  # a few kilobytes each


@dataclass(frozen=True, slots=True)
class Call:
    """All that one combination of layouts and options needs, pointers and scale apart."""

    geometry: Geometry
    is_plain: bool
    """The last dimension of every operand has unit stride, and more than one element."""
    plan: Any
    """From `launch.prepare`; None if there is nothing to launch."""
    device: int
    o_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    workspace: tuple[tuple[View, str], ...]
    """Layout and type of each temporary."""
    uses_matmul: bool
    """The plan multiplies with the arrays' library."""
    needs_arrays: bool
    """That, or stand-ins take the place of some."""


def attend(names, q, k, v, causal, scale, enable_gqa, return_lse=False, kernel=None, out=None, stream=None):
    """O, and lse or None: `attention` with the caller's names of its operands."""
    if not (type(causal) is type(enable_gqa) is type(return_lse) is bool):
        causal, enable_gqa, return_lse = flags(names, causal, enable_gqa, return_lse)
    library = interop.library_of_type(type(q)) if out is None and type(q) is type(k) is type(v) else None
    if library is None:
        library = interop.library_of((*names, "out"), (q, k, v) if out is None else (q, k, v, out))
    if library is numpy_arrays:
        return _attend_on_host(names, q, k, v, causal, scale, enable_gqa, return_lse, kernel, out, stream)
    if library is device_arrays:
        q, k, v = adopted = _adopt(library, names, (q, k, v), stream)

    (q_pointer, k_pointer, v_pointer), layout = library.read(q, k, v, names)
    alignment, out_layout = q_pointer | k_pointer | v_pointer, None
    if out is not None:
        target = library.adopt(out, "out", stream)
        (o_pointer, _, _), out_layout = library.read(target, target, target, ("out",) * 3)
        alignment |= o_pointer
    key = (layout, out_layout, alignment & 15, causal, enable_gqa, return_lse, kernel)
    try:
        call = _calls.get(key)
    except TypeError:
        find(kernel, KERNELS)
        raise
    if call is None:
        arrays = (q, k, v) if out is None else (q, k, v, target)
        call = _calls.make(key, library, names, arrays, causal, enable_gqa, return_lse, kernel)
    elif not call.is_plain:
        for array, name in zip((q, k, v), names, strict=True):
            library.operand(array, name)
    geometry = call.geometry
    if scale is None:
        scale = geometry.scale
    elif type(scale) is not float:
        scale = _as_float(scale)

    if out is None:
        o = library.empty(q, geometry.o_shape, call.o_strides, "float32", stream)
        o_pointer = library.pointer(o)
    else:
        o = out
        _check_overlap(library, names, (q, k, v), target)
    lse = library.empty(q, geometry.lse_shape, call.lse_strides, "float32", stream) if return_lse else None
    if call.plan is None:
        _fill_without_keys(library, o, lse, geometry, stream)
        if library is device_arrays:
            library.release(adopted, stream)
        return o, lse

    pointers = [q_pointer, k_pointer, v_pointer, o_pointer, 0 if lse is None else library.pointer(lse)]
    temporaries = []
    for view, dtype in call.workspace:
        temporaries.append(library.empty(q, *view, dtype, stream))
        pointers.append(library.pointer(temporaries[-1]))
    if call.needs_arrays:
        arrays = [q, k, v, o, lse, *temporaries]
        _run_with_arrays(library, call, arrays, pointers, scale, stream)
    else:
        call.plan.run(library.stream_handle(call.device, stream), pointers, scale)
    if library is device_arrays:
        library.release(adopted, stream)
    return o, lse


def flags(names, causal, enable_gqa, return_lse=False) -> tuple[bool, bool, bool]:
    """The options that are on or off. Raises for anything but bools, by the name that goes with the operands' names."""
    given = {"is_causal" if names[0] == "query" else "causal": causal}
    given |= {"enable_gqa": enable_gqa, "return_lse": return_lse}
    for name, value in given.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} is a {type(value).__name__}: True or False is needed")
    return bool(causal), bool(enable_gqa), bool(return_lse)


def geometry_of(names, q, k, v, causal, enable_gqa, stream=None) -> Geometry:
    """The checked facts of a call that is not made."""
    library = interop.library_of(names, (q, k, v))
    arrays = _adopt(library, names, (q, k, v), stream) if library is device_arrays else (q, k, v)
    operands = (library.operand(array, name) for array, name in zip(arrays, names, strict=True))
    return describe(*operands, is_causal=causal, enable_gqa=enable_gqa)


def device_of(geometry: Geometry) -> tuple[Device, bool]:
    """The device that a call runs on, and whether it is there: without a GPU, an H200 that is not."""
    if launch.device_count() == 0:
        return H200, False
    return launch.device_facts(_index(geometry)), True


class _Calls:
    """Calls by layout, the oldest dropped when there are too many; any thread may ask."""

    def __init__(self):
        self._calls: dict[Hashable, Call] = {}
        self._lock = threading.Lock()
        self.get = self._calls.get
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def make(self, key: Hashable, *arguments) -> Call:
        """The call for the key. No lock is held while it is prepared: `launch` compiles each kernel once by itself."""
        call = _prepare(*arguments)
        with self._lock:
            while len(self._calls) >= KEPT_CALLS:
                del self._calls[next(iter(self._calls))]
            return self._calls.setdefault(key, call)

    def _after_fork(self) -> None:
        # A fork copies the lock in whatever state another thread has it.
        self._lock = threading.Lock()


_calls = _Calls()


def _prepare(library, names, arrays, causal, enable_gqa, return_lse, kernel) -> Call:
    """Checks, problem, choice and plan."""
    q, k, v, *out = (library.operand(array, name) for array, name in zip(arrays, (*names, "out"), strict=False))
    geometry = describe(q, k, v, is_causal=causal, enable_gqa=enable_gqa)
    problem, index = geometry.problem, _index(geometry)
    layouts = {
        "Q": geometry.Q,
        "K": geometry.K,
        "V": geometry.V,
        # One column at least: the scratch of `_stand_in`, where V has none.
        "O": View.contiguous((problem.B, problem.H, problem.Lq, problem.Dv)),
        # Of no rows if the caller wants none.
        "lse": View.contiguous((problem.B, problem.H, problem.Lq if return_lse else 0)),
    }
    if out:
        layouts["O"] = check_out(*out, geometry, q)
        problem = replace(problem, vector=min(problem.vector, vector_width(layouts["O"], out[0].pointer)))
    plan, workspace, uses_matmul = None, (), False
    _check_versions()
    if geometry.nothing_to_launch(return_lse):
        if kernel is not None:
            find(kernel, KERNELS)
    else:
        chosen = choose(kernel, KERNELS, problem, launch.device_facts(index))
        uses_matmul = chosen.uses_matmul
        if uses_matmul and not hasattr(library, "matmul"):
            raise ValueError(
                f"kernel {chosen.name} multiplies with the arrays' library: torch or CuPy arrays are needed"
            )
        plan = launch.prepare(chosen, problem, index, layouts)
        workspace = tuple((View.contiguous(space.shape), space.dtype) for space in plan.workspace.values())
    return Call(
        geometry,
        all(view.strides[-1] == 1 and view.shape[-1] > 1 for view in (geometry.Q, geometry.K, geometry.V)),
        plan,
        index,
        o_strides=contiguous_strides(geometry.o_shape),
        lse_strides=contiguous_strides(geometry.lse_shape),
        workspace=workspace,
        uses_matmul=uses_matmul,
        needs_arrays=uses_matmul or bool(geometry.stand_ins),
    )


@cache
def _check_versions() -> None:
    if problem := versions.problem(launch.driver_version()):
        raise RuntimeError(problem)


def _index(geometry: Geometry) -> int:
    """The device of the arrays; the current one if they are all empty or on the host."""
    if geometry.device is not None:
        return geometry.device
    if launch.device_count() == 0:
        raise RuntimeError(NO_GPU)
    return device_arrays.current_device()


def _as_float(scale) -> float:
    try:
        if not isinstance(scale, str | bytes):
            return float(scale)
    except OverflowError:
        raise ValueError("scale is beyond the range of floating-point numbers") from None
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"scale is a {type(scale).__name__}: a number or None is needed")


def _adopt(library, names, arrays, stream) -> tuple:
    try:
        return tuple(library.adopt(array, name, stream) for array, name in zip(arrays, names, strict=True))
    except (ImportError, LookupError):
        # Numba's errors where it has no driver or no device.
        if launch.device_count() == 0:
            raise RuntimeError(NO_GPU) from None
        raise


def _check_overlap(library, names, arrays, out) -> None:
    target = library.operand(out, "out")
    for array, name in zip(arrays, names, strict=True):
        if interop.overlap(target, library.operand(array, name)):
            raise ValueError(f"out shares memory with {name}")


def _fill_without_keys(library, o, lse, geometry, stream) -> None:
    """Results that depend on no input: no key is attended."""
    if 0 not in geometry.o_shape:
        library.fill(o, 0.0, stream)
    if lse is not None and 0 not in geometry.lse_shape:
        library.fill(lse, -float("inf"), stream)


def _run_with_arrays(library, call, arrays, pointers, scale, stream) -> None:
    """Run a plan that needs more than pointers; `arrays` are those at `pointers`."""
    if call.geometry.stand_ins:
        _stand_in(library, arrays, pointers, call.geometry, stream)
    handle = library.stream_handle(call.device, stream)
    more = (library, arrays, stream) if call.uses_matmul else ()
    call.plan.run(handle, pointers, scale, *more)


def _stand_in(library, arrays, pointers, geometry, stream) -> None:
    """Put one zero in the place of each stand-in, and scratch memory in that of an output without columns."""
    like, problem = arrays[0], geometry.problem
    zero = library.empty(like, (1,), (1,), "float32", stream)
    library.fill(zero, 0.0, stream)
    instead = dict.fromkeys(geometry.stand_ins, zero)
    if "V" in geometry.stand_ins:
        scratch = View.contiguous((problem.B, problem.H, problem.Lq, 1))
        instead["O"] = library.empty(like, *scratch, "float32", stream)
    for name, array in instead.items():
        place = tuple(OPERANDS).index(name)
        arrays[place], pointers[place] = array, library.pointer(array)


def _attend_on_host(names, q, k, v, causal, scale, enable_gqa, return_lse, kernel, out, stream):
    """numpy arrays through the current device of Numba."""
    geometry = geometry_of(names, q, k, v, causal, enable_gqa)
    if out is not None:
        numpy_arrays.check_out(out, geometry, dict(zip(names, (q, k, v), strict=True)))
    if launch.device_count() == 0:
        raise RuntimeError(NO_GPU)
    stream = device_arrays.as_numba_stream(stream) or None
    arrays = [numpy_arrays.to_device(array, stream) for array in (q, k, v)]
    o, lse = attend(names, *arrays, causal, scale, enable_gqa, return_lse, kernel, None, stream)
    host_lse = None if lse is None else numpy_arrays.to_host(lse, None, stream)
    return numpy_arrays.to_host(o, out, stream), host_lse
