"""What follows from the layouts of a call's arrays: worked out once per combination, and kept.

Checks, problem, choice and plan are made here; a warm call finds them.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from numba_attn import launch, versions
from numba_attn.choice import choose, find
from numba_attn.interop import device_arrays
from numba_attn.kernels import KERNELS
from numba_attn.problem import (
    ITEM_BYTES,
    Geometry,
    View,
    check_out,
    contiguous_strides,
    describe,
    vector_width,
)

NO_GPU = "no CUDA GPU is found: numba_attn.sim.attention runs the kernels on a CPU"
KEPT_CALLS = 1024  # a few kilobytes each
ALIGNMENT = 256  # of each temporary, in bytes: that of the libraries' own arrays


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
    """Layout and type of each temporary that the arrays' library multiplies."""
    workspace_words: int
    """Of four bytes, of all other temporaries together; they are parts of one."""
    workspace_offsets: tuple[int, ...]
    """Where each of them starts, in bytes."""
    uses_matmul: bool
    """The plan multiplies with the arrays' library."""
    needs_arrays: bool
    """That, or stand-ins take the place of some."""


class Calls:
    """Calls by layout, the oldest dropped when there are too many; any thread may ask."""

    def __init__(self):
        self._calls: dict[Hashable, Call] = {}
        self._lock = threading.Lock()
        self.get = self._calls.get
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def make(self, key: Hashable, *arguments) -> Call:
        """The call for the key. No lock is held while it is prepared: `launch` compiles each kernel once by itself."""
        call = prepare(*arguments)
        with self._lock:
            while len(self._calls) >= KEPT_CALLS:
                del self._calls[next(iter(self._calls))]
            return self._calls.setdefault(key, call)

    def _after_fork(self) -> None:
        # A fork copies the lock in whatever state another thread has it.
        self._lock = threading.Lock()


calls = Calls()


def prepare(library, names, arrays, causal, enable_gqa, return_lse, kernel, precision) -> Call:
    """Checks, problem, choice and plan."""
    q, k, v, *out = (library.operand(array, name) for array, name in zip(arrays, (*names, "out"), strict=False))
    geometry = describe(q, k, v, is_causal=causal, enable_gqa=enable_gqa, precision=precision)
    problem, index = geometry.problem, index_of(geometry)
    layouts = {
        "Q": geometry.Q,
        "K": geometry.K,
        "V": geometry.V,
        # One column where V has none: the scratch of `_stand_in`.
        "O": View.contiguous((problem.B, problem.H, problem.Lq, problem.Dv)),
        # Of no rows if the caller wants none.
        "lse": View.contiguous((problem.B, problem.H, problem.Lq if return_lse else 0)),
    }
    if out:
        view = check_out(*out, geometry, q)
    if out and "V" not in geometry.stand_ins:
        layouts["O"] = view
        problem = replace(problem, vector=min(problem.vector, vector_width(layouts["O"], out[0].pointer)))
    plan, workspace, offsets, n_bytes, uses_matmul = None, (), [], 0, False
    _check_versions()
    if geometry.nothing_to_launch(return_lse):
        if kernel is not None:
            find(kernel, KERNELS)
    else:
        chosen = choose(kernel, KERNELS, problem, launch.device_facts(index), hasattr(library, "matmul"))
        uses_matmul = chosen.uses_matmul
        plan = launch.prepare(chosen, problem, index, layouts)
        if uses_matmul:
            workspace = tuple((View.contiguous(space.shape), space.dtype) for space in plan.workspace.values())
        else:
            for space in plan.workspace.values():
                offsets.append(n_bytes)
                n_bytes += -(-ITEM_BYTES * math.prod(space.shape) // ALIGNMENT) * ALIGNMENT
    return Call(
        geometry,
        all(view.strides[-1] == 1 and view.shape[-1] > 1 for view in (geometry.Q, geometry.K, geometry.V)),
        plan,
        index,
        o_strides=contiguous_strides(geometry.o_shape),
        lse_strides=contiguous_strides(geometry.lse_shape),
        workspace=workspace,
        workspace_words=n_bytes // ITEM_BYTES,
        workspace_offsets=tuple(offsets),
        uses_matmul=uses_matmul,
        needs_arrays=uses_matmul or bool(geometry.stand_ins),
    )


@cache
def _check_versions() -> None:
    if problem := versions.problem(launch.driver_version()):
        raise RuntimeError(problem)


def index_of(geometry: Geometry) -> int:
    """The device of the arrays; the current one if they are all empty or on the host."""
    if geometry.device is not None:
        return geometry.device
    if launch.device_count() == 0:
        raise RuntimeError(NO_GPU)
    return device_arrays.current_device()
