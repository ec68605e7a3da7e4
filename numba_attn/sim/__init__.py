"""A simulator: the very same kernel source on a CPU, threads in lockstep, every access checked.

`attention` runs a registered or unregistered `Kernel` on numpy arrays; `launch` runs any kernel function. What is an
error here: reads of memory nobody wrote, indices out of range (negative ones too), misaligned vectors, barriers and
warp collectives that not all threads reach, two threads touching one shared byte without a barrier between with one
of them writing, copies still in flight, two values for one element of global memory, a wait for what nobody brings
about, what a block of a cluster does in one that may have ended. See `SimulationError`.

Twins of intrinsics are called as `twin(thread, *args)` with a `lockstep.Thread`.

Design: an access costs one call of a Python function at most. Local arrays are dicts (`local`), shared memory is
lists of cells and marks (`shared`), each thread has its own copy of the kernel whose names lead straight to its own
objects (`rebind`), and threads are switched where they wait and nowhere else (`lockstep`).
"""

from __future__ import annotations

from numba_attn.sim.errors import SimulationError
from numba_attn.sim.run import attention, launch

__all__ = ["SimulationError", "attention", "launch"]
