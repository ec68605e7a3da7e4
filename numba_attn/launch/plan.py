"""A kernel made ready for one problem, device and layout: what remains of a call is writing pointers and launching."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from numba_attn.kernel import OPERANDS, Kernel, Launch, Workspace
from numba_attn.launch import compiler
from numba_attn.launch.driver import LauncherOfThread, LoadedKernel, device_facts
from numba_attn.problem import Problem, View
from numba_attn.tensor import ArgumentBuffer


class Plan:
    """The launches of one call and the temporaries that they need."""

    __slots__ = ("_steps", "workspace")

    def __init__(
        self,
        launches: tuple[Launch, ...],
        workspace: Mapping[str, Workspace],
        device_index: int,
        layouts: Mapping[str, View],
    ):
        self.workspace = dict(workspace)
        self._steps = []
        places = {name: place for place, name in enumerate((*OPERANDS, *workspace))}
        for launch in launches:
            buffer = ArgumentBuffer([None if name == "scale" else layouts[name] for name in launch.args])
            kernel = _loaded(launch, workspace, device_index)
            of_thread = LauncherOfThread(kernel, launch.grid, launch.threads, launch.cluster, buffer.template)
            slots = list(zip(launch.args, buffer.positions, strict=True))
            words = [(position // 8, places[name]) for name, position in slots if name != "scale"]
            floats = [position // 4 for name, position in slots if name == "scale"]
            self._steps.append((of_thread, words, floats))

    def run(self, stream: int, pointers: Sequence[int], scale: float) -> None:
        """Launch on `stream`, with the addresses of the arrays of `OPERANDS` and of the workspaces, in this order."""
        for of_thread, words, floats in self._steps:
            launcher = of_thread.launcher
            buffer = launcher.words
            for word, place in words:
                buffer[word] = pointers[place]
            for position in floats:
                launcher.floats[position] = scale
            launcher.launch(stream)


def prepare(kernel: Kernel, problem: Problem, device_index: int, layouts: Mapping[str, View]) -> Plan:
    """Compile or load what `kernel` needs for `problem` on a device.

    Args:
        layouts: 4-D views of Q, K, V and O and the 3-D one of lse, by name; a workspace is contiguous.
    """
    config = kernel.config(problem, device_facts(device_index))
    workspace = kernel.workspace(problem, config)
    temporaries = {name: View.contiguous(space.shape) for name, space in workspace.items()}
    return Plan(kernel.launches(problem, config), workspace, device_index, {**layouts, **temporaries})


_lock = threading.Lock()
_locks: dict[Hashable, threading.Lock] = {}
_kernels: dict[Hashable, LoadedKernel] = {}


def _renew_locks() -> None:
    """A fork copies each lock in whatever state another thread has it."""
    global _lock
    _lock = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


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
