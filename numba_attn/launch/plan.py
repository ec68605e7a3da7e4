"""A kernel made ready for one problem, device and layout: what remains of a call is writing pointers and launching."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from numba_attn.kernel import OPERANDS, Kernel, Launch, Matmul, Part, Workspace
from numba_attn.launch import compiler
from numba_attn.launch.driver import LauncherOfThread, LoadedKernel, device_facts
from numba_attn.problem import ITEM_BYTES, Problem, View
from numba_attn.tensor import ArgumentBuffer


class Plan:
    """The launches of one call and the temporaries that they need."""

    __slots__ = ("_parts", "_steps", "workspace")

    def __init__(
        self,
        launches: tuple[Launch, ...],
        workspace: Mapping[str, Workspace],
        device_index: int,
        layouts: Mapping[str, View],
    ):
        self.workspace = dict(workspace)
        self._steps = []
        parts = dict.fromkeys(arg for launch in launches for arg in launch.args if isinstance(arg, Part))
        places = {name: place for place, name in enumerate((*OPERANDS, *workspace, *parts))}
        located = {part: part.of(layouts[part.name]) for part in parts}
        self._parts = [(places[part.name], ITEM_BYTES * offset) for part, (_, offset) in located.items()]
        known = {**layouts, "scale": None, **{part: view for part, (view, _) in located.items()}}
        for launch in launches:
            buffer = ArgumentBuffer([arg if isinstance(arg, int) else known[arg] for arg in launch.args])
            kernel = _loaded(launch, workspace, device_index)
            of_thread = LauncherOfThread(kernel, launch, buffer.template)
            slots = list(zip(launch.args, buffer.positions, strict=True))
            words = [(position // 8, places[name]) for name, position in slots if name in places]
            floats = [position // 4 for name, position in slots if name == "scale"]
            self._steps.append((of_thread, words, floats))

    def run(self, stream: int, pointers: Sequence[int], scale: float) -> None:
        """Launch on `stream`, with the addresses of the arrays of `OPERANDS` and of the workspaces, in this order."""
        if self._parts:
            pointers = [*pointers, *(pointers[place] + n_bytes for place, n_bytes in self._parts)]
        for of_thread, words, floats in self._steps:
            launcher = of_thread.launcher
            buffer = launcher.words
            for word, place in words:
                buffer[word] = pointers[place]
            for position in floats:
                launcher.floats[position] = scale
            launcher.launch(stream)


class PlanWithProducts:
    """The steps of one call some of which are products by the library of the arrays."""

    __slots__ = ("_steps", "workspace")

    def __init__(
        self,
        steps: tuple[Launch | Matmul, ...],
        workspace: Mapping[str, Workspace],
        device_index: int,
        layouts: Mapping[str, View],
    ):
        self.workspace = dict(workspace)
        self._steps = []
        places = {name: place for place, name in enumerate((*OPERANDS, *workspace))}

        def located(operand: str | Part) -> tuple[int, View, int]:
            """The array's place, the operand's layout, and at which of the array's elements it starts."""
            part = operand if isinstance(operand, Part) else Part(operand, ())
            return places[part.name], *part.of(layouts[part.name])

        for is_product, group in groupby(steps, lambda step: isinstance(step, Matmul)):
            if is_product:
                for step in group:
                    place, view, offset = located(step.right)
                    right = (place, view.transposed if step.transpose_right else view, offset)
                    self._steps.append((None, (located(step.left), right, located(step.out))))
            else:
                self._steps.append((Plan(tuple(group), workspace, device_index, layouts), ()))

    def run(self, handle: int, pointers: Sequence[int], scale: float, library: Any, arrays, stream: Any) -> None:
        """As `Plan.run` on the stream of this handle, the caller's `stream`; `arrays` are those at `pointers`."""
        for plan, operands in self._steps:
            if plan is None:
                library.matmul(
                    *(library.view(arrays[place], *view, offset) for place, view, offset in operands), stream
                )
            else:
                plan.run(handle, pointers, scale)


def prepare(
    kernel: Kernel, problem: Problem, device_index: int, layouts: Mapping[str, View]
) -> Plan | PlanWithProducts:
    """Compile or load what `kernel` needs for `problem` on a device.

    Args:
        layouts: 4-D views of Q, K, V and O and the 3-D one of lse, by name; a workspace is contiguous.
    """
    config = kernel.config(problem, device_facts(device_index))
    workspace = kernel.workspace(problem, config)
    temporaries = {name: View.contiguous(space.shape) for name, space in workspace.items()}
    kind = PlanWithProducts if kernel.uses_matmul else Plan
    return kind(kernel.launches(problem, config), workspace, device_index, {**layouts, **temporaries})


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
    identity = (replace(launch, args=(), grid=0), compiler.argument_types(launch, workspace), device_index)
    with _lock:
        lock = _locks.setdefault(identity, threading.Lock())
    with lock:
        if identity not in _kernels:
            binary = compiler.binary(launch, workspace, device_facts(device_index).arch)
            _kernels[identity] = LoadedKernel(binary, device_index, launch.smem_bytes)
        return _kernels[identity]
