"""Random inputs on the GPU, in enough sets that none is in the cache when its turn comes again.

Arrays are torch tensors where torch has CUDA, else Numba device arrays. All work is queued on the default stream.
"""

from __future__ import annotations

import numpy as np

from numba_attn.bench.problems import NamedProblem, input_bytes, output_bytes
from numba_attn.problem import Problem

CACHES = 3  # the bytes of all sets together, in sizes of the L2 cache
DEVICE = "cuda"  # as torch calls it
SHARE_OF_MEMORY = 0.5  # the rest is for outputs and temporaries

Arrays = tuple  # q, k, v


def number_of_sets(problem: Problem, l2_bytes: int, free_bytes: int) -> int:
    """Sets whose bytes pass `CACHES` times the cache, one if a set alone does; fewer if the memory holds no more."""
    wanted = -(-CACHES * l2_bytes // input_bytes(problem))
    most = int(SHARE_OF_MEMORY * free_bytes) // input_bytes(problem)
    return max(1, min(wanted, most))


def lacking_bytes(problem: Problem, free_bytes: int) -> int:
    """Bytes that one set, a result and the one that it is checked against need beyond what is free."""
    return max(0, input_bytes(problem) + 2 * output_bytes(problem) - free_bytes)


def make_sets(known: NamedProblem, count: int, torch, seed: int = 0) -> list[Arrays]:
    """`count` sets (q, k, v), the same in every run: uniform in [0, 1), or normal."""
    problem = known.problem
    B, H, Lq, Lk, D, Dv = problem.B, problem.H, problem.Lq, problem.Lk, problem.D, problem.Dv
    shapes = (count, B, H, Lq, D), (count, B, problem.Hkv, Lk, D), (count, B, problem.Hkv, Lk, Dv)
    if torch is not None:
        draw = {"uniform": torch.rand, "normal": torch.randn}[known.inputs]
        generator = torch.Generator(DEVICE).manual_seed(seed)
        stacks = [draw(shape, device=DEVICE, generator=generator) for shape in shapes]
    else:
        from numba_attn.interop import numpy_arrays

        rng = np.random.default_rng(seed)
        draw = {"uniform": rng.random, "normal": rng.standard_normal}[known.inputs]
        stacks = [numpy_arrays.to_device(draw(shape, np.float32), None) for shape in shapes]
    return [tuple(stack[i] for stack in stacks) for i in range(count)]


def poisoned_output(problem: Problem, torch):
    """Memory for a result that holds NaN: what a kernel leaves out cannot look right."""
    shape = (problem.B, problem.H, problem.Lq, problem.Dv)
    if torch is not None:
        return torch.full(shape, float("nan"), device=DEVICE)
    from numba_attn.interop import numpy_arrays

    return numpy_arrays.to_device(np.full(shape, np.nan, np.float32), None)
