"""The command `demo`: one problem through every kernel, checked and then timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from numba_attn import api, launch, sim, testing
from numba_attn.cli import measure
from numba_attn.cli.errors import require_toolkit
from numba_attn.cli.measure import HEADLINE
from numba_attn.cli.screen import Progress, one_line, table
from numba_attn.kernels import KERNELS
from numba_attn.problem import ITEM_BYTES, Problem

DESCRIPTION = """With a GPU: fp32 [32, 32, 512, 1024], uniform in [0, 1), through every kernel and torch, each checked
against float64 and then timed. Without a GPU: a small problem through every kernel in the simulator. Exit status 1 if
a result is wrong."""

ARRAYS = 7  # of the size of Q: inputs, an output, and what torch's unfused backend keeps of the scores
ROUNDS = 5
SIMULATED = testing.Case(1, 2, 24, 40, 32, 32, inputs="uniform")


def add_arguments(parser) -> None:
    pass


def run(args) -> int:
    if launch.device_count() == 0:
        return simulate()
    require_toolkit()
    return measure_all()


@dataclass
class Contender:
    """One way to compute the attention."""

    name: str
    call: Callable
    check: Callable
    """Function of nothing that gives the errors of the result, or raises AssertionError."""
    error: float = float("nan")
    wrong: str | None = None
    timer: measure.Timer | None = None


def measure_all() -> int:
    problem = fitting(HEADLINE, launch.free_bytes(0))
    torch, why_not = measure.cuda_torch()
    shape = [problem.B, problem.H, problem.Lq, problem.D]
    print(f"{launch.device_facts(0).name}: fp32 {shape}, uniform in [0, 1), {problem.flop:.2e} FLOP")
    if problem != HEADLINE:
        print(f"batch {problem.B} instead of {HEADLINE.B}: the GPU's free memory holds no more")
    with measure.tf32_off(torch) if torch else nullcontext(), Progress() as progress:
        progress.show(0, 1, "inputs and their float64 results")
        q, k, v = measure.uniform_inputs(problem, torch)
        sample = measure.Sample(q, k, v, problem)
        left_out = {kernel.name: reason for kernel in KERNELS if (reason := measure.why_left_out(kernel))}
        contenders = [ours(kernel, q, k, v, sample) for kernel in KERNELS if kernel.name not in left_out]
        if torch:
            contenders.append(torchs(torch, q, k, v, sample))
        done, total = 1, 1 + len(contenders) * (1 + ROUNDS)
        for contender in contenders:
            progress.show(done, total, f"{contender.name}: check")
            check(contender)
            done += 1
        for _ in range(ROUNDS):
            for contender in contenders:
                if contender.timer is not None:
                    progress.show(done, total, f"{contender.name}: time")
                    contender.timer.round()
                done += 1
    print(f"checked against numpy in float64: (batch, head) {', '.join(map(str, sample.heads))}")
    print(f"times by CUDA events, median of {ROUNDS} interleaved rounds; TF32 off{'' if torch else f'; {why_not}'}")
    print(f"chosen by default: {api.explain(q, k, v).chosen}\n")
    print(results(contenders, problem))
    for name, reason in left_out.items():
        print(f"{name}: left out: {reason}")
    return report_wrong(contenders)


def fitting(problem: Problem, free_bytes: int) -> Problem:
    """The problem with the largest batch, halved as often as needed, that the memory holds."""
    while problem.B > 1 and ARRAYS * ITEM_BYTES * problem.B * problem.H * problem.Lq * problem.D > free_bytes:
        problem = replace(problem, B=problem.B // 2)
    return problem


def ours(kernel, q, k, v, sample: measure.Sample) -> Contender:
    call = partial(api.attention, q, k, v, kernel=kernel)

    def check() -> float:
        o, lse = call(return_lse=True)
        sample.check(o, lse, kernel.accuracy)
        return sample.errors(o)[0]

    return Contender(kernel.name, call, check)


def torchs(torch, q, k, v, sample: measure.Sample) -> Contender:
    call = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)

    def check() -> float:
        o = call()
        sample.check_torch(o)
        return sample.errors(o)[0]

    backend = measure.torch_backend(torch, q, k, v, is_causal=False)
    return Contender(f"torch {torch.__version__} ({backend})", call, check)


def check(contender: Contender) -> None:
    """Find its error, and make it ready to be timed only if that is within bounds."""
    try:
        contender.error = contender.check()
        contender.timer = measure.Timer(contender.call)
    except Exception as error:  # a contender that fails is reported, and the others are measured
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        contender.wrong = kind + one_line(error)


def results(contenders: list[Contender], problem: Problem) -> str:
    """The table: no time where the result is wrong."""
    torch_ms = next((c.timer.median_ms for c in contenders if c.timer and c.name.startswith("torch ")), None)
    rows = []
    for contender in contenders:
        if contender.timer is None:
            rows.append((contender.name, "wrong", "", "", ""))
            continue
        ms = contender.timer.median_ms
        ratio = f"{ms / torch_ms:.2f}" if torch_ms else ""
        speed = f"{measure.tflops(problem, ms):.1f}"
        rows.append((contender.name, f"{ms:.2f}", speed, f"{contender.error:.1e}", ratio))
    return table(("kernel", "ms", "TFLOP/s", "rel. error", "time / torch's"), rows)


def simulate() -> int:
    """A small problem in the simulator."""
    print("No GPU is found: this is the simulator, which runs the kernels' source in Python on the CPU.")
    shape = [SIMULATED.B, SIMULATED.H, SIMULATED.Lq, SIMULATED.D]
    print(f"Its seconds say nothing about a GPU. Q: fp32 {shape}, {SIMULATED.Lk} keys, uniform in [0, 1)\n")
    inputs = testing.make_inputs(SIMULATED)
    expected = testing.Expected(*inputs)
    contenders, seconds = [], []
    with Progress() as progress:
        for done, kernel in enumerate(KERNELS):
            progress.show(done, len(KERNELS), kernel.name)
            start = time.perf_counter()
            contender = Contender(kernel.name, None, partial(simulated_error, kernel, inputs, expected))
            try:
                contender.error = contender.check()
            except Exception as error:  # as in `check`
                contender.wrong = one_line(error)
            contenders.append(contender)
            seconds.append(time.perf_counter() - start)
    rows = [
        (c.name, "wrong" if c.wrong else f"{c.error:.1e}", f"{s:.1f}") for c, s in zip(contenders, seconds, strict=True)
    ]
    print(table(("kernel", "rel. error", "seconds simulated"), rows))
    return report_wrong(contenders)


def simulated_error(kernel, inputs, expected: testing.Expected) -> float:
    o, lse = sim.attention(*inputs, return_lse=True, kernel=kernel)
    expected.check(o, lse, accuracy=kernel.accuracy)
    return float(np.linalg.norm(o - expected.o) / np.linalg.norm(expected.o))


def report_wrong(contenders: list[Contender]) -> int:
    wrong = [contender for contender in contenders if contender.wrong]
    for contender in wrong:
        print(f"WRONG {contender.name}: {contender.wrong}")
    return 1 if wrong else 0
