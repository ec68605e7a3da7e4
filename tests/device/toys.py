"""Toy kernels of the tests of device code: run by the simulator and on a GPU, compiled to PTX."""

from __future__ import annotations

import numpy as np

from numba_attn import sim
from numba_attn.kernel import OPERANDS, Launch, Workspace
from numba_attn.launch import Plan, compiler
from numba_attn.problem import View

ARCH = "sm_90a"


def simulate(kernel, *arrays, threads=32, grid=1, smem_bytes=0, cluster=1) -> None:
    """Run `kernel` on numpy arrays, in place."""
    sim.launch(kernel, grid, threads, arrays, smem_bytes, cluster)


def compiled(kernel, *arrays, threads=32, grid=1, smem_bytes=0, cluster=1) -> compiler.Binary:
    """Machine code of `kernel` for such arrays; needs no GPU."""
    return compiler.binary(*_launch(kernel, _kinds(arrays), threads, grid, smem_bytes, cluster), ARCH)


def run_on_gpu(kernel, *arrays, threads=32, grid=1, smem_bytes=0, cluster=1) -> None:
    """The same on GPU 0; strides and offsets of the arrays are kept. One argument may be a float, others ints."""
    import torch

    scale = next((x for x in arrays if isinstance(x, float | np.float32)), 0.0)
    launch, workspace = _launch(kernel, _kinds(arrays), threads, grid, smem_bytes, cluster)
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    bases = [array if array.base is None else array.base for array in arrays]
    assert all(base.flags.c_contiguous for base in bases), "views are of contiguous arrays here"
    buffers = [torch.from_numpy(base.reshape(-1).view(np.int32)).cuda() for base in bases]
    layouts, pointers = {}, {}
    for name, array, base, buffer in zip(workspace, arrays, bases, buffers, strict=True):
        layouts[name] = View(array.shape, tuple(stride // array.itemsize for stride in array.strides))
        pointers[name] = buffer.data_ptr() + array.ctypes.data - base.ctypes.data
    torch.cuda.synchronize()
    # The toys have no operands, only workspaces.
    Plan((launch,), workspace, 0, layouts).run(0, [0] * len(OPERANDS) + [pointers[n] for n in workspace], float(scale))
    torch.cuda.synchronize()
    for base, buffer in zip(bases, buffers, strict=True):
        base[...] = buffer.cpu().numpy().view(base.dtype).reshape(base.shape)


def ptx_of(kernel, *ndims: int, threads=32, dtype="float32") -> str:
    """PTX of `kernel`, whose parameters are tensors of these dimensions."""
    return compiler.ptx(*_launch(kernel, [(ndim, dtype) for ndim in ndims], threads, 1, 0), ARCH)


def _kinds(arrays) -> list:
    return [(x.ndim, x.dtype.name) if isinstance(x, np.ndarray) else x for x in arrays]


def _launch(kernel, kinds, threads: int, grid: int, smem_bytes: int, cluster: int = 1):
    """The launch and its arrays; of each array the dimensions and the type, numbers as they are."""

    def argument(i: int, kind):
        if isinstance(kind, tuple):
            return f"array_{i}"  # names of their own: those of `OPERANDS` have their dimensions already
        return kind if isinstance(kind, int) else "scale"

    args = tuple(argument(i, kind) for i, kind in enumerate(kinds))
    workspace = {
        name: Workspace((1,) * kind[0], kind[1])
        for name, kind in zip(args, kinds, strict=True)
        if isinstance(kind, tuple)
    }
    return Launch(_build, kernel, args, grid, threads, smem_bytes, cluster), workspace


def _build(kernel):
    return kernel


def randn(*shape: int, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def nans(*shape: int) -> np.ndarray:
    """For outputs: what nobody writes stays NaN."""
    return np.full(shape, np.nan, np.float32)
