"""The record that a kernel file exports: what it is, what it can serve, and how it is launched.

A kernel file ends with `KERNEL = Kernel(...)`. The record holds plain functions of a `Problem`, a `Device` and a
`Config`; none of them touches a GPU.

`Config` stands for a frozen dataclass of the kernel file's own. It holds every compile-time constant of the kernel
(tile sizes and options such as causality), so that equal configs mean equal machine code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from numba_attn.problem import Device, Problem, View

OPERANDS = {"Q": 4, "K": 4, "V": 4, "O": 4, "lse": 3}
"""Dimensions of the arrays that every step may name; `scale` is an fp32 that a launch may name in its `args`."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A temporary array of one call, taken from the caller's allocator and not initialised."""

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Part:
    """`name[index]`, in place: part of an array of `OPERANDS` or of a workspace, by its leading dimensions."""

    name: str
    index: tuple[int | slice, ...]

    def __hash__(self):
        # Slices have a hash from Python 3.12 on only.
        return hash((self.name, repr(self.index)))

    def of(self, view: View) -> tuple[View, int]:
        """How a kernel sees it, and how many elements behind the first one of the array it starts."""
        offset, dims = 0, []
        for i, size, stride in zip(self.index, view.shape, view.strides, strict=False):
            if isinstance(i, slice):
                start, stop, step = i.indices(size)
                offset += start * stride
                dims.append((len(range(start, stop, step)), step * stride))
            else:
                offset += i * stride
        dims += list(zip(view.shape, view.strides, strict=True))[len(self.index) :]
        return View(*map(tuple, zip(*dims, strict=True))), offset

    @property
    def dimensions_less(self) -> int:
        """Dimensions that the index takes away."""
        return sum(not isinstance(i, slice) for i in self.index)


@dataclass(frozen=True, slots=True)
class Matmul:
    """One batched product in fp32 by the library of the caller's arrays: `out = left @ right`, all 3-D.

    No flag of the library turns TF32 on. A kernel with such steps says so: `Kernel.uses_matmul`.
    """

    left: str | Part
    right: str | Part
    out: str | Part
    transpose_right: bool = False
    """`left @ right^T`: the last two dimensions of `right` exchanged."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One grid of one compiled function."""

    build: Callable[[Hashable], Callable]
    """`build(config)` defines the kernel with the config's values as closure constants and returns it."""
    config: Hashable
    args: tuple[str | Part | int, ...]
    """The kernel's parameters in order: names of `OPERANDS` or of workspaces, where `Kernel.uses_matmul` also parts of
    them, `scale`, or an int, a 32-bit one that the machine code does not depend on."""
    grid: int
    threads: int
    smem_bytes: int = 0
    """Dynamic shared memory."""
    cluster: int = 1
    """Blocks of a thread block cluster."""
    min_blocks: int = 1
    """Blocks that an SM must be able to hold: bounds the registers of a thread."""
    is_beside: bool = False
    """Starts where the launch before leaves SMs free, once all blocks of that have called `let_next_launch_start`, and
    ends after it (`wait_for_launch_before`). The two share no part of an array that either writes. From compute
    capability 9.0."""


def grids(steps: Iterable[Launch | Matmul]) -> tuple[Launch, ...]:
    """Those of a kernel's steps that run a compiled function of its own."""
    return tuple(step for step in steps if isinstance(step, Launch))


def suits_always(problem: Problem, device: Device) -> str | None:
    """A good choice wherever it can serve."""
    return None


def no_workspace(problem: Problem, config: Hashable) -> dict[str, Workspace]:
    """Most kernels need none."""
    return {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel: one or several steps over a named workspace."""

    name: str
    """Algorithm and arithmetic, as the file is called: `flash_fp32`."""
    summary: str
    """One line for `explain`, `info` and the README's table."""
    accuracy: str
    """Accuracy class that its results are held to (`numba_attn.testing`), see `accuracy_at`."""
    supports: Callable[[Problem, Device], str | None]
    """Why it cannot serve the problem on the device, or None if it can."""
    config: Callable[[Problem, Device], Hashable]
    """The heuristic: always one of `configs`."""
    configs: Callable[[], Iterable[Hashable]]
    """Every config that the heuristic can choose: what `precompile` builds and the compile gates check."""
    small_config: Callable[[Problem], Hashable]
    """The smallest tiles of the same body, for the simulator: several blocks, tiles and slices at small shapes."""
    launches: Callable[[Problem, Hashable], tuple[Launch | Matmul, ...]]
    """The steps of one call, in order."""
    suits: Callable[[Problem, Device], str | None] = suits_always
    """Why another kernel should be preferred, or None if this one is a good choice."""
    workspace: Callable[[Problem, Hashable], dict[str, Workspace]] = no_workspace
    uses_matmul: bool = False
    """Its steps have a `Matmul`: the caller's arrays must be of a library that multiplies, torch or CuPy."""
    lower_accuracies: tuple[str, ...] = ()
    """Classes below `accuracy` that it has faster configs for: `Problem.precision` asks for them."""

    def accuracy_at(self, problem: Problem) -> str:
        """Class of its results at a problem: without configs for a lower one they are better than asked for."""
        return problem.precision if problem.precision in self.lower_accuracies else self.accuracy
