"""The command `bench`: kernels and torch's backends on named problems, checked, timed and kept as JSON."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from numba_attn import launch
from numba_attn.bench import document, problems
from numba_attn.bench.contenders import EVERY_BASELINE, LOWER_BASELINES, Contender, by_names, contenders, standard_names
from numba_attn.bench.measure import BUDGET_S, DoesNotFitError, Measurement, measure
from numba_attn.bench.problems import DTYPES, PROBLEMS, NamedProblem
from numba_attn.cli.check import lost_gpu
from numba_attn.cli.errors import CommandError, require_toolkit
from numba_attn.cli.kernel_file import KERNEL_HELP, find
from numba_attn.cli.measured import fault_lines, measured_table
from numba_attn.cli.screen import Progress, one_line
from numba_attn.kernel import Kernel
from numba_attn.kernels import KERNELS
from numba_attn.problem import MAX_LENGTH, PRECISIONS

DESCRIPTION = f"""Check kernels and torch's backends ({", ".join(EVERY_BASELINE)}) against float64, and time those
that are right, in turns on the same inputs. Without arguments the standard run: all kernels at the headline problem,
the likely ones at the others. Problems: {", ".join(known.name for known in PROBLEMS)}, or any name like them. Exit
status 1 if a result is wrong, a kernel fails, or nothing could be timed."""


def add_arguments(parser) -> None:
    parser.add_argument("--problem", action="append", default=[], metavar="NAME", help="may be repeated")
    shape = "a problem by its numbers, Dv = D unless given; may be repeated"
    parser.add_argument("--shape", action="append", default=[], metavar="B,H,Lq,Lk,D[,Dv]", help=shape)
    parser.add_argument("--causal", action="store_true", help="the problems asked for under causality")
    precision = "accuracy class that the problems asked for ask for; with tf32 also torch's math backend with TF32 on"
    parser.add_argument("--precision", choices=PRECISIONS, help=precision)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="type of --shape's arrays")
    kernel = f"{KERNEL_HELP}, or one of torch's; may be repeated"
    parser.add_argument("--kernel", action="append", default=[], metavar="KERNEL", help=kernel)
    budget = f"to time one problem, {BUDGET_S:g} without it; slow kernels get fewer rounds, never less than 3"
    parser.add_argument("--seconds", type=float, default=BUDGET_S, metavar="S", help=budget)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results, in pytest-benchmark's format")


def run(args) -> int:
    chosen = chosen_problems(args)
    kernels = kernels_of(args.kernel)
    if not 0 < args.seconds < math.inf:
        raise CommandError(f"--seconds is {args.seconds:g}: it must be a number more than 0", status=2)
    if args.json is not None and (reason := document.why_unavailable()):
        raise CommandError(f"--json: {reason}")
    if launch.device_count() == 0:
        raise CommandError("no GPU is found: bench times kernels on one")
    require_toolkit()
    if args.json is not None:
        make_room(args.json)
    lower = any(known.problem.precision == "tf32" for known in chosen)
    but = f" but in {', '.join(LOWER_BASELINES['tf32'])}" if lower else ""
    print(f"{launch.device_facts(0).name}: GPU time between events, median of rounds; TF32 off{but}")
    measurements, skipped = [], 0
    with Progress() as progress:
        for number, known in enumerate(chosen):

            def show(part: float, text: str, number=number, known=known) -> None:
                progress.show(number + part, len(chosen), f"{known.name}: {text}")

            try:
                measured = measure(known, asked_for(args.kernel, kernels, known), args.seconds, show)
            except DoesNotFitError as error:
                progress.say(f"\nSKIPPED {error}")
                skipped += 1
                continue
            except RuntimeError as error:  # the driver's and torch's own
                raise CommandError(f"stopped at {known.name}: {one_line(error)}") from None
            measurements.append(measured)
            progress.say(report(measured))
            if args.json is not None:
                document.write(args.json, measurements)  # after each problem, so that a run cut short leaves something
            if measured.faults and (lost := lost_gpu()):
                raise CommandError(f"stopped after {known.name}: the GPU takes no more work from this process: {lost}")
    timed = sum(len(measured.timed) for measured in measurements)
    print(f"\n{timed} timed" + (f", {skipped} problems skipped" if skipped else ""))
    return 1 if not timed or any(measured.faults for measured in measurements) else 0


def make_room(file: Path) -> None:
    """Make the file's folder, and find out now whether it can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        why_not = None if os.access(file if file.exists() else file.parent, os.W_OK) else "no permission"
    except OSError as error:
        why_not = error.strerror
    if why_not or file.is_dir():
        raise CommandError(f"--json: {file} cannot be written: {why_not or 'it is a directory'}", status=2)


def chosen_problems(args) -> list[NamedProblem]:
    """The problems asked for, in their order; the standard ones if none is."""
    found = []
    try:
        found += [problems.find(name) for name in args.problem]
        found += [problems.named(shape(text, args.dtype)) for text in args.shape]
    except ValueError as error:
        raise CommandError(str(error), status=2) from None
    found = found or list(PROBLEMS)
    facts = {"is_causal": True} if args.causal else {}
    facts |= {"precision": args.precision} if args.precision else {}
    if facts and not (args.problem or args.shape):
        option = "--causal" if args.causal else "--precision"
        raise CommandError(f"{option} needs --problem or --shape", status=2)
    found = [problems.changed(known, **facts) for known in found]
    return list(dict.fromkeys(found))


def shape(text: str, dtype: str):
    """The problem of `B,H,Lq,Lk,D[,Dv]`."""
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (5, 6) or not 1 <= min(sizes) <= max(sizes) <= MAX_LENGTH:
        raise ValueError(f"--shape {text!r} is not B,H,Lq,Lk,D or B,H,Lq,Lk,D,Dv of numbers from 1 to {MAX_LENGTH}")
    return problems.make_problem(*sizes[:5], sizes[-1], dtype)


def asked_for(names: list[str], kernels: list[Kernel], known: NamedProblem) -> list[Contender]:
    """The contenders asked for; the standard ones if none is."""
    device = launch.device_facts(0)
    if not names:
        return by_names(known, standard_names(known, device), device)
    return contenders(known.problem, kernels, [name for name in EVERY_BASELINE if name in names], device)


def kernels_of(names: list[str]) -> list[Kernel]:
    """The kernels among the names; one of a file that has a registered one's name gets another, as in `explain`."""
    found = list(dict.fromkeys(find(name)[0] for name in names if name not in EVERY_BASELINE))
    registered = {kernel.name: kernel for kernel in KERNELS}
    return [
        kernel if registered.get(kernel.name, kernel) is kernel else replace(kernel, name=f"{kernel.name} (given)")
        for kernel in found
    ]


def report(measured: Measurement) -> str:
    problem = measured.known.problem
    sets = f"{measured.input_sets} sets of inputs" if measured.input_sets > 1 else "1 set of inputs"
    heading = f"\n{measured.known.name}: {measured.known.inputs} inputs, {problem.flop:.2e} FLOP, {sets}"
    return "\n".join([heading, measured_table(measured), *fault_lines(measured)])
