"""Calls of one kernel on torch tensors, for a tool to watch: `python benchmarks/attend.py KERNEL PROBLEM...`.

With `--check` each result is compared with float64: a tool that reports nothing has then watched the right thing.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from numba_attn import attention, reference
from numba_attn.bench.problems import parse
from numba_attn.bench.torch_backends import cuda_torch
from numba_attn.cli.kernel_file import find

TOLERANCE = 1e-4  # of a row's norm: only what is plainly wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel")
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--calls", type=int, default=1, help="calls on each problem")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    args = parser.parse_args(argv)
    torch, why_not = cuda_torch()
    if torch is None:
        sys.exit(why_not)
    kernel = find(args.kernel)[0]
    for name in args.problems:
        problem, rng = parse(name), np.random.default_rng(0)
        shapes = (
            (problem.B, problem.H, problem.Lq, problem.D),
            (problem.B, problem.Hkv, problem.Lk, problem.D),
            (problem.B, problem.Hkv, problem.Lk, problem.Dv),
        )
        # Made on the host: a tool then watches no kernel but ours.
        arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
        tensors = [torch.from_numpy(array).cuda() for array in arrays]
        for _ in range(args.calls):
            o, lse = attention(*tensors, causal=problem.is_causal, return_lse=True, kernel=kernel)
        torch.cuda.synchronize()
        if args.check:
            expected, expected_lse = reference.attention(*arrays, causal=problem.is_causal)
            norm = np.linalg.norm(expected, axis=-1, keepdims=True)
            wrong = not np.all(np.abs(o.cpu().numpy() - expected) <= TOLERANCE * norm)
            if wrong or not np.allclose(lse.cpu().numpy(), expected_lse, TOLERANCE, TOLERANCE):
                sys.exit(f"{name}: the result is wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
