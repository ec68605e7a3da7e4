"""Do times and errors hold for inputs of other distributions? `python benchmarks/distributions.py [--problem NAME]`.

Per problem and distribution: the kernel's time over its time on normal inputs, in turns, and the normwise error of the
worst of three heads, beside that of torch's default, both against torch's float64. Nothing is judged here: where scores
are large, keys nearly tie and no evaluation in fp32 is close to float64. Exit status 2 if there is no GPU with torch.
"""

from __future__ import annotations

import argparse
import math
import sys
from statistics import median

import numba_attn
from numba_attn.bench.problems import find as find_problem
from numba_attn.bench.problems import full_name
from numba_attn.bench.torch_backends import backend_of, cuda_torch, tf32
from numba_attn.cli.errors import CommandError
from numba_attn.cli.kernel_file import KERNEL_HELP, find
from numba_attn.cli.screen import table
from numba_attn.problem import Problem

PROBLEMS = (
    "b4_h16_q4096_k4096_d64",
    "b4_h16_q4096_k4096_d128",
    "b4_h16_q4096_k4096_d128_causal",
    "b2_h16_q4096_k4096_d256",
    "headline",
)
LONG = "b1_h4_q1024_k16384_d128"
"""Sums of many keys, for their errors."""
HEADS, ROUNDS = 3, 9
HEADER = "inputs", "ms", "of normal", "error", "torch's error", "torch's backend"


def magnitudes(torch, x, low: float, high: float):
    """10^low to 10^high, one a row."""
    return 10 ** (low + (high - low) * torch.rand(*x.shape[:-1], 1, device=x.device))


def cancelling(torch, q, k, v):
    sign = 1 - 2 * (torch.arange(v.shape[-2], device=v.device) % 2)
    return 0.1 * q, k, sign[:, None] * (100 + v)


def wide(torch, q, k, v):
    return tuple(x * magnitudes(torch, x, *span) for x, span in ((q, (-4, 0.5)), (k, (-4, 0)), (v, (-6, 6))))


def heads_apart(torch, q, k, v):
    """Every other head times 2^-20."""
    factor = 2.0 ** (-20 * (torch.arange(q.shape[1], device=q.device) % 2))
    return tuple(x * factor[:, None, None] for x in (q, k, v))


DISTRIBUTIONS = {
    "normal": lambda torch, q, k, v: (q, k, v),
    "uniform": lambda torch, q, k, v: tuple(torch.rand_like(x) for x in (q, k, v)),
    "peaked": lambda torch, q, k, v: (8 * q, k, v),
    "cancelling": cancelling,
    "wide": wide,
    "times 1e-3": lambda torch, q, k, v: tuple(1e-3 * x for x in (q, k, v)),
    "times 1e3": lambda torch, q, k, v: tuple(1e3 * x for x in (q, k, v)),
    "heads 2^20 apart": heads_apart,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", action="append", metavar="NAME", help=f"may be repeated; {', '.join(PROBLEMS)}")
    parser.add_argument("--kernel", metavar="KERNEL", help=f"{KERNEL_HELP}; the default one unless given")
    args = parser.parse_args(argv)
    try:
        problems = [find_problem(name).problem for name in args.problem or (*PROBLEMS, LONG)]
        kernel = find(args.kernel)[0] if args.kernel else None
    except (ValueError, CommandError) as error:
        parser.error(str(error))
    torch, reason = cuda_torch()
    if torch is None:
        print(f"nothing to run it with: {reason}", file=sys.stderr)
        return 2
    for problem in problems:
        with tf32(torch, on=False):
            rows = rows_of(torch, problem, kernel)
        print(f"\n{full_name(problem)}\n{table(HEADER, rows)}", flush=True)
    return 0


def rows_of(torch, problem: Problem, kernel) -> list[tuple[str, ...]]:
    """A row of the table for each distribution."""
    shapes = [(problem.B, problem.H, L, D) for L, D in ((problem.Lq, problem.D), (problem.Lk, problem.D))]
    normal = [torch.randn(shape, device="cuda") for shape in (*shapes, (*shapes[1][:3], problem.Dv))]

    def call(inputs):
        return numba_attn.attention(*inputs, causal=problem.is_causal, kernel=kernel)

    rows = []
    for name, draw in DISTRIBUTIONS.items():
        inputs = draw(torch, *normal)
        ms, usual = times(torch, [lambda inputs=inputs: call(inputs), lambda: call(normal)])
        theirs = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=problem.is_causal)
        backend = backend_of(torch, "torch_default", *inputs, problem.is_causal)
        errors = errors_of(torch, problem, inputs, (call(inputs), theirs))
        rows.append((name, f"{ms:.3g}", f"{ms / usual:.2f}", *(f"{error:.1e}" for error in errors), backend))
    return rows


def times(torch, calls) -> list[float]:
    """Milliseconds of each, median of rounds in turns."""
    rounds = [[] for _ in calls]
    for number in range(ROUNDS + 1):
        for call, seen in zip(calls, rounds, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if number:  # the first compiles
                seen.append(start.elapsed_time(stop))
    return [median(seen) for seen in rounds]


def errors_of(torch, problem: Problem, inputs, outputs) -> list[float]:
    """||O - O64|| / ||O64|| of the worst head of some, for each output."""
    worst = [0.0] * len(outputs)
    for number in range(HEADS):
        b, h = divmod(number * (problem.B * problem.H - 1) // (HEADS - 1), problem.H)
        q, k, v = (x[b, h].double() for x in inputs)
        S = q @ k.T / math.sqrt(problem.D)
        if problem.is_causal:
            S.masked_fill_(torch.ones_like(S, dtype=torch.bool).triu(1), -math.inf)
        o64 = torch.softmax(S, -1) @ v
        for i, o in enumerate(outputs):
            worst[i] = max(worst[i], float((o[b, h] - o64).norm() / o64.norm()))
    return worst


if __name__ == "__main__":
    sys.exit(main())
