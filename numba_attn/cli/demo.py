"""The command `demo`: one problem through every kernel and torch, checked and then timed."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from numba_attn import launch, sim, testing
from numba_attn.bench import problems, torch_backends
from numba_attn.bench.contenders import BASELINES, contenders
from numba_attn.bench.measure import DoesNotFitError, measure
from numba_attn.bench.problems import NamedProblem, input_bytes, output_bytes
from numba_attn.choice import choose
from numba_attn.cli.errors import CommandError, require_toolkit
from numba_attn.cli.measured import fault_lines, measured_table
from numba_attn.cli.screen import Progress, one_line, table
from numba_attn.kernels import KERNELS

DESCRIPTION = """With a GPU: fp32 [32, 32, 512, 1024], uniform in [0, 1), through every kernel and torch's backends,
each checked against float64 and then timed. Without a GPU: a small problem through every kernel in the simulator.
Exit status 1 if a result is wrong."""

HEADLINE = problems.PROBLEMS[0]
BUDGET_S = 8.0  # for the timing
OUTPUTS = 4  # a result, the memory that it is checked in, and what torch's unfused backend keeps of the scores
SIMULATED = testing.Case(1, 2, 24, 40, 32, 32, inputs="uniform")


def add_arguments(parser) -> None:
    pass


def run(args) -> int:
    if launch.device_count() == 0:
        return simulate()
    require_toolkit()
    return measure_all()


def measure_all() -> int:
    known = fitting(HEADLINE, launch.free_bytes(0))
    problem, device = known.problem, launch.device_facts(0)
    shape = [problem.B, problem.H, problem.Lq, problem.D]
    print(f"{device.name}: fp32 {shape}, uniform in [0, 1), {problem.flop:.2e} FLOP")
    if known != HEADLINE:
        print(f"batch {problem.B} instead of {HEADLINE.problem.B}: the GPU's free memory holds no more")
    found = contenders(problem, KERNELS, BASELINES, device)
    with Progress() as progress:
        try:
            measured = measure(known, found, BUDGET_S, lambda part, text: progress.show(100 * part, 100, text))
        except DoesNotFitError as error:
            raise CommandError(str(error)) from None
        except RuntimeError as error:  # the driver's and torch's own
            raise CommandError(f"stopped: {one_line(error)}") from None
    torch, why_not = torch_backends.cuda_torch()
    everywhere = "; every element against torch's float64" if torch else ""
    print(f"checked against numpy in float64: (batch, head) {', '.join(map(str, measured.heads))}{everywhere}")
    print(f"times by CUDA events, median of rounds in turns; TF32 off{'' if torch else f'; {why_not}'}")
    print(f"chosen by default: {choose(None, KERNELS, problem, device).name}\n")
    print(measured_table(measured))
    for line in fault_lines(measured):
        print(line)
    return 1 if measured.faults else 0


def fitting(known: NamedProblem, free_bytes: int) -> NamedProblem:
    """The problem with the largest batch, halved as often as needed, that the memory holds."""
    problem = known.problem
    while problem.B > 1 and input_bytes(problem) + OUTPUTS * output_bytes(problem) > free_bytes:
        problem = replace(problem, B=problem.B // 2)
    return known if problem == known.problem else replace(known, problem=problem, name=problems.short_name(problem))


def simulate() -> int:
    """A small problem in the simulator."""
    print("No GPU is found: this is the simulator, which runs the kernels' source in Python on the CPU.")
    shape = [SIMULATED.B, SIMULATED.H, SIMULATED.Lq, SIMULATED.D]
    print(f"Its seconds say nothing about a GPU. Q: fp32 {shape}, {SIMULATED.Lk} keys, uniform in [0, 1)\n")
    inputs = testing.make_inputs(SIMULATED)
    expected = testing.Expected(*inputs)
    rows, wrong = [], []
    with Progress() as progress:
        for done, kernel in enumerate(KERNELS):
            progress.show(done, len(KERNELS), kernel.name)
            start = time.perf_counter()
            try:
                found = f"{simulated_error(kernel, inputs, expected):.1e}"
            except Exception as error:  # a kernel that fails is reported, and the others are run
                found = "wrong"
                wrong.append(f"WRONG {kernel.name}: {one_line(error)}")
            rows.append((kernel.name, found, f"{time.perf_counter() - start:.1f}"))
    print("\n".join([table(("kernel", "rel. error", "seconds simulated"), rows), *wrong]))
    return 1 if wrong else 0


def simulated_error(kernel, inputs, expected: testing.Expected) -> float:
    o, lse = sim.attention(*inputs, return_lse=True, kernel=kernel)
    expected.check(o, lse, accuracy=kernel.accuracy_at(SIMULATED.problem))
    return float(np.linalg.norm(o - expected.o) / np.linalg.norm(expected.o))
