"""Names rebound by identity: a copy of a kernel for one thread, in which every name means its simulated twin.

The function objects are copies of the originals over the same code, so that lines, names and closures of a message
are those of the source. Rebound are the globals that the code names, the closure cells, and, recursively, every
device function found there. An object with a `_sim_twin` means `twin(thread, ...)`.
"""

from __future__ import annotations

import builtins
import math
from functools import partial
from types import CellType, FunctionType, ModuleType

import numpy as np
from numba import cuda
from numba.cuda import libdevice

from numba_attn.sim.cuda_names import Cuda
from numba_attn.sim.errors import fail
from numba_attn.sim.scalars import LIBDEVICE, MATH, cast_of, dtype_of, maximum, minimum
from numba_attn.sim.threads import Thread

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic, np.dtype, np.ndarray, range)
_FOREIGN = ("numba", "numba_cuda")  # packages whose functions are stubs: they mean nothing on a CPU

_SHARED_TWINS = {
    id(builtins.max): maximum,
    id(builtins.min): minimum,
    id(math): MATH,
    **{id(getattr(math, name)): getattr(MATH, name) for name in vars(MATH)},
    **{id(getattr(libdevice, name)): twin for name, twin in LIBDEVICE.items()},
}
"""Twins that do not depend on the thread, by the identity of what they replace."""

_CUDA_NAMES = [name for name in dir(Cuda) if not name.startswith("_") and name != "start_block"]
_CUDA_NAMES += ["threadIdx", "blockIdx", "blockDim", "gridDim", "laneid", "warpsize", "shared", "local", "atomic"]


class ModuleTwin:
    """A module as kernels see it: attributes are rebound when they are used."""

    def __init__(self, binder: Binder, module: ModuleType):
        self._binder = binder
        self._module = module

    def __getattr__(self, name):
        value = self._binder.twin(getattr(self._module, name))
        setattr(self, name, value)
        return value


class Binder:
    """Rebinds functions for one thread."""

    def __init__(self, thread: Thread):
        self.thread = thread
        self.cuda = Cuda(thread)
        self._memo = {id(cuda): self.cuda}
        for name in _CUDA_NAMES:
            if hasattr(cuda, name):
                self._memo[id(getattr(cuda, name))] = getattr(self.cuda, name)
        self._alive = []  # objects whose ids are keys of the memo

    def function(self, function: FunctionType) -> FunctionType:
        """The copy of a plain Python function."""
        code = function.__code__
        self.thread.grid.codes.add(code)
        names = {}
        copy = FunctionType(code, names, function.__name__, None, _cells(function))
        # Before its names are looked at, so that a recursive function finds its own copy.
        self._remember(function, copy)
        scope = function.__globals__
        for name in _global_names(code):
            if name in scope:
                names[name] = self.twin(scope[name])
            elif hasattr(builtins, name):
                names[name] = self.twin(getattr(builtins, name))
        names["__builtins__"] = builtins
        copy.__defaults__ = self.twin(function.__defaults__)
        copy.__kwdefaults__ = {name: self.twin(value) for name, value in (function.__kwdefaults__ or {}).items()}
        for original, cell in zip(function.__closure__ or (), copy.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.twin(original.cell_contents)
            except ValueError:  # the cell is empty still
                continue
        return copy

    def twin(self, value):
        """What stands for `value` in a simulated kernel."""
        if isinstance(value, _PLAIN):
            return value
        if id(value) in _SHARED_TWINS:
            return _SHARED_TWINS[id(value)]
        if id(value) in self._memo:
            return self._memo[id(value)]
        if type(value) is tuple:
            return tuple(map(self.twin, value))
        return self._remember(value, self._new_twin(value))

    def _new_twin(self, value):
        if isinstance(value, ModuleType):
            return value if value is np else ModuleTwin(self, value)
        own = getattr(value, "_sim_twin", None)
        if own is not None:
            return partial(own, self.thread)
        if hasattr(value, "bitwidth") or str(value) in ("bool", "boolean"):
            return cast_of(dtype_of(value))
        if type(value).__name__ == "_Intrinsic" or _is_stub(value):
            return self._missing(getattr(value, "_name", None) or getattr(value, "__name__", repr(value)))
        if hasattr(value, "py_func"):
            return self.function(value.py_func)
        if isinstance(value, FunctionType):
            return self.function(value)
        return value

    def _missing(self, name: str):
        def missing(*args, **kwargs):
            fail(self.thread, f"{name} has no twin in the simulator")

        return missing

    def _remember(self, value, twin):
        self._memo[id(value)] = twin
        self._alive.append(value)
        return twin


def _is_stub(value) -> bool:
    """Whether numba declares `value` for compiled code only."""
    module = getattr(value, "__module__", None) or ""
    return isinstance(value, (type, FunctionType)) and module.split(".")[0] in _FOREIGN


def _cells(function: FunctionType):
    return function.__closure__ and tuple(CellType() for _ in function.__closure__)


def _global_names(code) -> set[str]:
    """Names that the code, or code nested in it, may look up in its globals."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= _global_names(constant)
    return names


def python_function(kernel) -> FunctionType:
    """The Python source of a kernel, compiled or not."""
    function = getattr(kernel, "py_func", kernel)
    if not isinstance(function, FunctionType):
        raise TypeError(f"a kernel is a function or has a `py_func`, not {type(kernel).__name__}")
    return function
