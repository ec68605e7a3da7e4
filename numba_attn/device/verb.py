"""How device code is declared: verbs are inlined always, intrinsics carry a numpy twin."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda


def verb(function: Callable) -> Callable:
    """Make `function` a device function that is inlined where it is called.

    Inlining lets local arrays that a verb receives stay in registers: their indices become constants.
    """
    return cuda.jit(device=True, inline="always")(function)


def twin_of(intrinsic: Callable) -> Callable[[Callable], Callable]:
    """Attach the decorated `twin(thread, *args)` to `intrinsic`: what it means in the simulator."""

    def attach(twin: Callable) -> Callable:
        intrinsic._sim_twin = twin
        return twin

    return attach
