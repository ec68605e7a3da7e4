"""One call: arrays, checks, problem, choice, plan, launch, arrays.

What follows from the layouts of the arrays is worked out once and kept, so that a warm call only reads pointers,
allocates and launches.
"""

from __future__ import annotations

import numpy as np

from numba_attn import interop, launch
from numba_attn.choice import find
from numba_attn.interop import device_arrays, numpy_arrays
from numba_attn.kernel import OPERANDS
from numba_attn.kernels import KERNELS
from numba_attn.prepared import NO_GPU, calls, index_of
from numba_attn.problem import (
    H200,
    Device,
    Geometry,
    View,
    check_out,
    check_precision,
    describe,
)


def attend(
    names, q, k, v, causal, scale, enable_gqa, return_lse=False, kernel=None, out=None, stream=None, precision="fp32"
):
    """O, and lse or None: `attention` with the caller's names of its operands."""
    check_precision(precision)
    if not (type(causal) is type(enable_gqa) is type(return_lse) is bool):
        causal, enable_gqa, return_lse = flags(names, causal, enable_gqa, return_lse)
    if kernel is not None:
        find(kernel, KERNELS)
    if scale is not None and type(scale) is not float:
        scale = as_float("scale", scale)
    library = interop.library_of_type(type(q)) if out is None and type(q) is type(k) is type(v) else None
    if library is None:
        library = interop.library_of((*names, "out"), (q, k, v) if out is None else (q, k, v, out))
    if library is numpy_arrays:
        return _attend_on_host(names, q, k, v, causal, scale, enable_gqa, return_lse, kernel, out, stream, precision)
    if stream is not None:
        library.check_stream(stream, q)
    if library is device_arrays:
        q, k, v = adopted = _adopt(library, names, (q, k, v), stream)

    (q_pointer, k_pointer, v_pointer), layout = library.read(q, k, v, names)
    alignment, out_layout = q_pointer | k_pointer | v_pointer, None
    if out is not None:
        target = library.adopt(out, "out", stream)
        (o_pointer, _, _), out_layout = library.read(target, target, target, ("out",) * 3)
        alignment |= o_pointer
    key = (layout, out_layout, alignment & 15, causal, enable_gqa, return_lse, kernel, precision)
    call = calls.get(key)
    if call is None:
        arrays = (q, k, v) if out is None else (q, k, v, target)
        call = calls.make(key, library, names, arrays, causal, enable_gqa, return_lse, kernel, precision)
    elif not call.is_plain:
        for array, name in zip((q, k, v), names, strict=True):
            library.operand(array, name)
    geometry = call.geometry
    if scale is None:
        scale = geometry.scale

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
    if call.workspace_words:
        temporaries.append(library.empty(q, (call.workspace_words,), (1,), "float32", stream))
        start = library.pointer(temporaries[0])
        pointers += [start + offset for offset in call.workspace_offsets]
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


def facts_of(
    names, q, k, v, causal, enable_gqa, stream=None, precision="fp32", scale=None, out=None
) -> tuple[Geometry, bool]:
    """The checked facts of a call that is not made, and whether the arrays' library multiplies."""
    if scale is not None:
        as_float("scale", scale)
    library = interop.library_of((*names, "out"), (q, k, v) if out is None else (q, k, v, out))
    if library is numpy_arrays:
        q, k, v = numpy_arrays.with_batch_in_one(q, k, v)
    if stream is not None:
        library.check_stream(stream, q)
    arrays = _adopt(library, names, (q, k, v), stream) if library is device_arrays else (q, k, v)
    operands = [library.operand(array, name) for array, name in zip(arrays, names, strict=True)]
    geometry = describe(*operands, is_causal=causal, enable_gqa=enable_gqa, precision=precision)
    if out is not None and library is numpy_arrays:
        numpy_arrays.check_out(out, geometry, dict(zip(names, (q, k, v), strict=True)))
    elif out is not None:
        target = library.adopt(out, "out", stream)
        check_out(library.operand(target, "out"), geometry, operands[0])
        _check_overlap(library, names, arrays, target)
    return geometry, hasattr(library, "matmul")


def device_of(geometry: Geometry) -> tuple[Device, bool]:
    """The device that a call runs on, and whether it is there: without a GPU, an H200 that is not."""
    if launch.device_count() == 0:
        return H200, False
    return launch.device_facts(index_of(geometry)), True


def as_float(name: str, value) -> float:
    """A number that a caller has given, of whatever kind."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except OverflowError:
        raise ValueError(f"{name} is beyond the range of floating-point numbers") from None
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} is a {type(value).__name__}: a number{' or None' * (name == 'scale')} is needed")


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


def _attend_on_host(names, q, k, v, causal, scale, enable_gqa, return_lse, kernel, out, stream, precision):
    """numpy arrays through the current device of Numba."""
    facts_of(names, q, k, v, causal, enable_gqa, stream, precision, scale, out)
    if launch.device_count() == 0:
        raise RuntimeError(NO_GPU)
    q, k, v = numpy_arrays.with_batch_in_one(q, k, v)
    stream = device_arrays.as_numba_stream(stream) or None
    arrays = [numpy_arrays.to_device(array, stream) for array in (q, k, v)]
    o, lse = attend(names, *arrays, causal, scale, enable_gqa, return_lse, kernel, None, stream, precision)
    host_lse = None if lse is None else numpy_arrays.to_host(lse, None, stream)
    return numpy_arrays.to_host(o, out, stream), host_lse
