"""What the hardware counters say of a kernel on one problem: `python benchmarks/counters.py KERNEL PROBLEM`.

Runs Nsight Compute over the kernel's own launches, after a warm-up, and prints a line for each. Exit status 1 if the
counters cannot be read, 2 if there is nothing to run it with.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

from numba_attn import launch
from numba_attn.bench.problems import find as find_problem
from numba_attn.bench.problems import full_name
from numba_attn.bench.torch_backends import cuda_torch
from numba_attn.cli.errors import CommandError
from numba_attn.cli.kernel_file import KERNEL_HELP, find
from numba_attn.cli.screen import table
from numba_attn.kernel import Kernel, grids
from numba_attn.problem import Device, Problem

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "ncu"
LIMIT_S = 560

OF_PEAK = ".avg.pct_of_peak_sustained_active"
OF_PEAK_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
COUNTERS = {
    "us": (1e-3, "gpu__time_duration.sum"),
    # Names differ by chip and version: of several the first that the tool knows.
    "tensor %": (
        1,
        f"sm__inst_executed_pipe_tensor{OF_PEAK}",
        f"sm__pipe_tensor_cycles_active{OF_PEAK}",
        f"sm__inst_executed_pipe_tensor_op_hmma{OF_PEAK}",
        f"sm__pipe_tensor_op_hmma_cycles_active{OF_PEAK}",
    ),
    "issue %": (1, f"sm__inst_issued{OF_PEAK}", f"sm__issue_active{OF_PEAK}"),
    "shared %": (
        1,
        f"l1tex__data_pipe_lsu_wavefronts_mem_shared{OF_PEAK_ELAPSED}",
        f"l1tex__data_pipe_lsu_wavefronts{OF_PEAK_ELAPSED}",
    ),
    "L2 %": (1, f"lts__t_sectors{OF_PEAK_ELAPSED}", f"lts__throughput{OF_PEAK_ELAPSED}"),
    "DRAM read MB": (1e-6, "dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "DRAM write MB": (1e-6, "dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "registers": (1, "launch__registers_per_thread"),
    "local loads": (1, "smsp__inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_ld.sum"),
    "local stores": (1, "smsp__inst_executed_op_local_st.sum", "smsp__sass_inst_executed_op_local_st.sum"),
}
"""Column: factor, and metrics; loads and stores are instructions of warps."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", metavar="KERNEL", help=KERNEL_HELP)
    parser.add_argument("problem", metavar="PROBLEM", help="as bench takes it: b4_h16_q4096_k4096_d128_causal")
    args = parser.parse_args(argv)
    try:
        kernel, problem = find(args.kernel)[0], find_problem(args.problem).problem
    except (ValueError, CommandError) as error:
        parser.error(str(error))
    if why_not := missing():
        return stop(why_not, 2)
    device = launch.device_facts(0)
    if reason := kernel.supports(problem, device):
        return stop(f"{kernel.name} cannot serve {args.problem}: {reason}", 2)
    chosen = available(run([PROGRAM, "--query-metrics"]).stdout)
    names = function_names(kernel, problem, device)
    done = run(command(args.kernel, problem, names, list(chosen.values())))
    rows = launches(done.stdout)
    if done.returncode or not rows:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")]
        return stop(said[0] if said else f"{PROGRAM} read nothing: {(done.stderr or done.stdout).strip()[-300:]}", 1)
    print(f"{kernel.name}, {full_name(problem)}, {device.name}")
    print(table(("kernel", *chosen), [(shown(row["Kernel Name"], names), *cells(row, chosen)) for row in rows]))
    return 0


def stop(reason: str, status: int) -> int:
    print(f"counters: {reason}", file=sys.stderr)
    return status


def missing() -> str | None:
    """What is not there to read counters with."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not on the PATH: it comes with the CUDA toolkit (Nsight Compute)"
    return cuda_torch()[1]


def run(command: list[str]) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        return subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"not done after {LIMIT_S} s")


def available(queried: str) -> dict[str, str]:
    """Column to metric, of those that the tool lists; what belongs to a launch it does not list."""
    known = {line.split()[0] for line in queried.splitlines() if "__" in line}
    chosen = {}
    for column, (_, *metrics) in COUNTERS.items():
        there = [name for name in metrics if name.partition(".")[0] in known or name.startswith("launch__")]
        chosen |= {column: there[0]} if there else {}
    return chosen


def function_names(kernel: Kernel, problem: Problem, device: Device) -> list[str]:
    """What the functions of the kernel's launches are called, in order."""
    steps = grids(kernel.launches(problem, kernel.config(problem, device)))
    return [step.build(step.config).py_func.__name__ for step in steps]


def command(text: str, problem: Problem, names: list[str], metrics: list[str]) -> list[str]:
    """One warm-up call, and one whose launches are measured."""
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    # Numba's names are mangled in a way that the tool may not undo.
    options += ["--kernel-name-base", "mangled", "--kernel-name", f"regex:.*({'|'.join(sorted(set(names)))}).*"]
    options += ["--launch-skip", str(len(names)), "--launch-count", str(len(names)), "--metrics", ",".join(metrics)]
    program = [sys.executable, str(ROOT / "benchmarks" / "attend.py"), "--calls", "2", text, full_name(problem)]
    return [PROGRAM, *options, *program]


def shown(mangled: str, names: list[str]) -> str:
    """The function's own name, the longest that fits."""
    return max((name for name in names if name in mangled), key=len, default=mangled)


def launches(output: str) -> list[dict[str, str]]:
    """The rows of the tool's table, which stands behind whatever else was printed; the first one holds units."""
    lines = output.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(line for line in lines[first:] if line.startswith('"')))
    return [row for row in rows if row["ID"]]


def cells(row: dict[str, str], chosen: dict[str, str]) -> list[str]:
    found = []
    for column, metric in chosen.items():
        try:
            found.append(f"{COUNTERS[column][0] * float(row[metric].replace(',', '')):.4g}")
        except (KeyError, ValueError):
            found.append("?")
    return found


if __name__ == "__main__":
    sys.exit(main())
