"""A kernel made ready for one problem on one device: what remains of a call is packing arguments and launching."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import replace

from numba_attn.kernel import OPERANDS, Kernel, Launch, Workspace
from numba_attn.launch import compiler
from numba_attn.launch.driver import LoadedKernel, device_facts
from numba_attn.problem import Problem
from numba_attn.tensor import argument_struct


class Plan:
    """The launches of one call and the temporaries that they need."""

    __slots__ = ("_steps", "workspace")

    def __init__(self, launches: tuple[Launch, ...], workspace: Mapping[str, Workspace], device_index: int):
        self.workspace = dict(workspace)
        ndims = {**OPERANDS, "scale": None, **{name: len(w.shape) for name, w in workspace.items()}}
        self._steps = [
            (_loaded(launch, workspace, device_index), launch, argument_struct([ndims[n] for n in launch.args]).pack)
            for launch in launches
        ]

    def run(self, stream: int, arrays: Mapping[str, tuple[int, tuple, tuple]], scale: float) -> None:
        """Launch on `stream`; `arrays` gives pointer, shape and strides (in elements) of each operand by name."""
        for kernel, launch, pack in self._steps:
            arguments = []
            for name in launch.args:
                if name == "scale":
                    arguments.append(scale)
                else:
                    pointer, shape, strides = arrays[name]
                    arguments.append(pointer)
                    arguments += shape
                    arguments += strides
            kernel.launch(launch.grid, launch.threads, stream, pack(*arguments))


def prepare(kernel: Kernel, problem: Problem, device_index: int) -> Plan:
    """Compile or load what `kernel` needs for `problem` on a device."""
    config = kernel.config(problem, device_facts(device_index))
    return Plan(kernel.launches(problem, config), kernel.workspace(problem, config), device_index)


_lock = threading.Lock()
_locks: dict[Hashable, threading.Lock] = {}
_kernels: dict[Hashable, LoadedKernel] = {}


def _loaded(launch: Launch, workspace: Mapping[str, Workspace], device_index: int) -> LoadedKernel:
    """The launch's kernel on the device, compiled and loaded once however many threads ask for it."""
    kinds = tuple((name, w.dtype, len(w.shape)) for name, w in workspace.items())
    identity = (replace(launch, grid=0), kinds, device_index)
    with _lock:
        lock = _locks.setdefault(identity, threading.Lock())
    with lock:
        if identity not in _kernels:
            binary = compiler.binary(launch, workspace, device_facts(device_index).arch)
            _kernels[identity] = LoadedKernel(binary, device_index, launch.smem_bytes)
        return _kernels[identity]
