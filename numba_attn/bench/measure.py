"""One problem, several contenders: each checked, and those that are right timed in turns on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median

from numba_attn import launch
from numba_attn.bench import torch_backends
from numba_attn.bench.contenders import RATIO_TO, Contender
from numba_attn.bench.float64 import Sample, check_everywhere
from numba_attn.bench.inputs import lacking_bytes, make_sets, number_of_sets, poisoned_output
from numba_attn.bench.problems import NamedProblem, output_bytes
from numba_attn.bench.turns import Clock, take_turns
from numba_attn.problem import Problem

BUDGET_S = 15.0  # for the timing of one problem

Progress = Callable[[float, str], None]
"""Function of the part that is done, 0 to 1, and of what comes now."""


@dataclass
class Entry:
    """What became of one contender."""

    contender: Contender
    outcome: str = "unchecked"
    """`timed`; `refused`: it cannot serve this; `wrong`: its result; `failed`: anything else."""
    why: str | None = None
    rel_err: float = float("nan")
    max_abs_err: float = float("nan")
    peak_bytes: int | None = None
    """Most memory that one call takes beyond its inputs, the result included; None without torch."""
    workspace_bytes: int | None = None
    """The same without the result."""
    facts: dict = field(default_factory=dict)
    rounds_ms: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def ms(self) -> float:
        return median(self.rounds_ms)


@dataclass
class Measurement:
    """All contenders of one problem, measured together."""

    known: NamedProblem
    device: str
    input_sets: int
    entries: list[Entry]
    heads: list[tuple[int, int]]
    """(batch, head) of the sampled heads."""

    @property
    def timed(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.outcome == "timed"]

    @property
    def faults(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.outcome in ("wrong", "failed")]

    def ratio(self, entry: Entry) -> float | None:
        """Its time over that of torch's own choice, in the same rounds."""
        base = next((other for other in self.timed if other.name == RATIO_TO), None)
        return entry.ms / base.ms if base else None

    def extra_info(self, entry: Entry) -> dict:
        """What is kept of a timed contender beside its rounds."""
        return {
            "kernel": entry.name,
            "accuracy": entry.contender.accuracy,
            "problem": self.known.full_name,
            "ms": entry.ms,
            "tflops": tflops(self.known.problem, entry.ms),
            "rel_err": entry.rel_err,
            "max_abs_err": entry.max_abs_err,
            "peak_bytes": entry.peak_bytes,
            "workspace_bytes": entry.workspace_bytes,
            "device": self.device,
            "code": entry.contender.code,
            "inputs": self.known.inputs,
            "input_sets": self.input_sets,
            **entry.facts,
        }


class DoesNotFitError(Exception):
    """The GPU's free memory does not hold the problem."""


def tflops(problem: Problem, ms: float) -> float:
    return problem.flop / ms / 1e9


def measure(
    known: NamedProblem,
    contenders: Sequence[Contender],
    budget_s: float = BUDGET_S,
    progress: Progress = lambda part, text: None,
) -> Measurement:
    """Check and time the contenders on device 0; raises `DoesNotFitError`."""
    problem, device = known.problem, launch.device_facts(0)
    torch, _ = torch_backends.cuda_torch()
    free_bytes = launch.free_bytes(0)
    if lacking := lacking_bytes(problem, free_bytes):
        raise DoesNotFitError(f"{known.name} needs {lacking / 1e9:.1f} GB more than the {free_bytes / 1e9:.1f} GB free")
    entries = [Entry(contender) for contender in contenders]
    with torch_backends.tf32(torch, on=False) if torch else nullcontext():
        progress(0, "inputs and their float64 results")
        sets = make_sets(known, number_of_sets(problem, device.l2_bytes, free_bytes), torch)
        sample = Sample(*sets[0], problem)
        for done, entry in enumerate(entries):
            progress(0.2 + 0.4 * done / len(entries), f"{entry.name}: check")
            check(entry, sets[0], sample, problem, torch)
        time_in_turns([entry for entry in entries if entry.outcome == "unchecked"], sets, budget_s, progress)
    measured = Measurement(known, device.name, len(sets), entries, sample.heads)
    if torch:
        del sets
        torch.cuda.empty_cache()
    return measured


def check(entry: Entry, inputs, sample: Sample, problem: Problem, torch) -> None:
    """Find the errors of its result and the memory that it takes, or why it is not to be timed."""
    contender = entry.contender
    if contender.refusal is not None:
        entry.outcome, entry.why = "refused", contender.refusal
        return
    try:
        with contender.entered():
            out = poisoned_output(problem, torch)
            try:
                o, lse = contender.run(*inputs, out)
            except contender.refuses_by as error:
                entry.outcome, entry.why = "refused", str(error)
                return
            contender.judge(sample, o, lse)
            if torch:
                check_everywhere(torch, *inputs, o, problem.is_causal, contender.accuracy)
            entry.rel_err, entry.max_abs_err = sample.errors(o)
            entry.facts = contender.facts(*inputs)
            del o, lse, out
            if torch:
                entry.peak_bytes = peak_bytes(torch, contender, inputs)
                entry.workspace_bytes = max(0, entry.peak_bytes - output_bytes(problem))
    except AssertionError as error:
        entry.outcome, entry.why = "wrong", str(error)
    except Exception as error:  # a contender that fails is reported, and the others are measured
        entry.outcome, entry.why = "failed", f"{type(error).__name__}: {error}"


def peak_bytes(torch, contender: Contender, inputs) -> int:
    """Most memory of torch's allocator that one call takes beyond what was taken before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    contender.call(*inputs)
    return torch.cuda.max_memory_allocated() - before


def time_in_turns(entries: Sequence[Entry], sets, budget_s: float, progress: Progress) -> None:
    """Fill in the rounds."""
    clocks, running = [], []
    for entry in entries:
        progress(0.6, f"{entry.name}: first time")
        rotation = cycle(sets)
        call = entry.contender.call
        try:
            clocks.append(Clock(lambda call=call, rotation=rotation: call(*next(rotation)), entry.contender.entered))
        except Exception as error:  # as in `check`
            entry.outcome, entry.why = "failed", f"{type(error).__name__}: {error}"
        else:
            running.append(entry)
    for part, i in take_turns(clocks, budget_s):
        progress(0.6 + 0.4 * part, f"{running[i].name}: time")
    for entry, clock in zip(running, clocks, strict=True):
        entry.outcome, entry.rounds_ms = "timed", clock.rounds_ms
