"""Toy kernels of the tests of device code: run by the simulator and on a GPU, compiled to PTX."""

from __future__ import annotations

import numpy as np

from numba_attn import sim
from numba_attn.kernel import OPERANDS, Launch, Workspace
from numba_attn.launch import Plan, compiler
from numba_attn.problem import View

ARCH = "sm_90a"


def simulate(kernel, *arrays, threads=32, grid=1, smem_bytes=0) -> None:
    """Run `kernel` on numpy arrays, in place."""
    sim.launch(kernel, grid, threads, arrays, smem_bytes)


def run_on_gpu(kernel, *arrays, threads=32, grid=1, smem_bytes=0) -> None:
    """The same on GPU 0; strides and offsets of the arrays are kept."""
    import torch

    bases = [array if array.base is None else array.base for array in arrays]
    assert all(base.flags.c_contiguous for base in bases), "views are of contiguous arrays here"
    buffers = [torch.from_numpy(base.reshape(-1)).cuda() for base in bases]
    launch, workspace = _launch(kernel, [array.ndim for array in arrays], threads, grid, smem_bytes)
    layouts, pointers = {}, {}
    for name, array, base, buffer in zip(launch.args, arrays, bases, buffers, strict=True):
        layouts[name] = View(array.shape, tuple(stride // array.itemsize for stride in array.strides))
        pointers[name] = buffer.data_ptr() + array.ctypes.data - base.ctypes.data
    torch.cuda.synchronize()
    # The toys have no operands, only workspaces.
    Plan((launch,), workspace, 0, layouts).run(0, [0] * len(OPERANDS) + [pointers[n] for n in workspace], 0.0)
    torch.cuda.synchronize()
    for base, buffer in zip(bases, buffers, strict=True):
        base[...] = buffer.cpu().numpy().reshape(base.shape)


def ptx_of(kernel, *ndims: int, threads=32) -> str:
    """PTX of `kernel`, whose parameters are fp32 tensors of these dimensions."""
    return compiler.ptx(*_launch(kernel, ndims, threads, 1, 0), ARCH)


def _launch(kernel, ndims, threads: int, grid: int, smem_bytes: int):
    # Names of their own: those of `OPERANDS` have their dimensions already.
    workspace = {f"array_{i}": Workspace((1,) * ndim) for i, ndim in enumerate(ndims)}
    return Launch(_build, kernel, tuple(workspace), grid, threads, smem_bytes), workspace


def _build(kernel):
    return kernel


def randn(*shape: int, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def nans(*shape: int) -> np.ndarray:
    """For outputs: what nobody writes stays NaN."""
    return np.full(shape, np.nan, np.float32)
