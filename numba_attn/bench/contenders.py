"""Ways to compute one attention, ours and torch's, under the names by which results are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from numba_attn import api
from numba_attn.bench import torch_backends
from numba_attn.bench.digest import code_digest
from numba_attn.bench.float64 import Sample
from numba_attn.bench.problems import NamedProblem, standard_kernels
from numba_attn.kernel import Kernel
from numba_attn.kernels import KERNELS
from numba_attn.problem import Device, Problem

BASELINES = tuple(torch_backends.BACKENDS)
LOWER_BASELINES = {"tf32": tuple(torch_backends.TF32_BACKENDS)}
"""By accuracy class: those that only problems of that precision are given to."""
EVERY_BASELINE = (*BASELINES, *(name for names in LOWER_BASELINES.values() for name in names))
RATIO_TO = "torch_default"
"""The baseline that ratios are taken to."""


def _no_facts(q, k, v) -> dict:
    return {}


@dataclass(frozen=True)
class Contender:
    """One way to compute the attention of one problem."""

    name: str
    accuracy: str
    code: str
    """Digest of a kernel's code, version of torch."""
    call: Callable | None = None
    """`call(q, k, v)` queues the work on the default stream and returns O."""
    run: Callable | None = None
    """`run(q, k, v, out)` gives (O, lse or None) to be judged, O in `out` where a contender can write there."""
    judge: Callable | None = None
    """`judge(sample, o, lse)` raises AssertionError unless the sampled heads are right."""
    entered: Callable = nullcontext
    """Context that its calls are made in."""
    refusal: str | None = None
    """Why it cannot serve the problem."""
    refuses_by: tuple[type[Exception], ...] = ()
    """What `run` raises where it cannot serve."""
    facts: Callable = _no_facts
    """`facts(q, k, v)`: what else is kept with a result."""


def ours(kernel: Kernel, problem: Problem, device: Device, refuses_by: tuple = ()) -> Contender:
    accuracy = kernel.accuracy_at(problem)
    if reason := kernel.supports(problem, device):
        return Contender(kernel.name, accuracy, "", refusal=reason)
    call = partial(api.attention, causal=problem.is_causal, kernel=kernel, precision=problem.precision)

    def run(q, k, v, out) -> tuple:
        return call(q, k, v, return_lse=True, out=out)

    def judge(sample: Sample, o, lse) -> None:
        sample.check(o, lse, accuracy)

    code = code_digest(kernel, problem, device)
    return Contender(kernel.name, accuracy, code, call, run, judge, refuses_by=refuses_by)


def torchs(name: str, problem: Problem, torch) -> Contender:
    accuracy = accuracy_of(name)
    if accuracy not in ("fp32", problem.precision):
        reason = f"it is of class {accuracy}, the problem asks for {problem.precision}"
        return Contender(name, accuracy, "", refusal=reason)
    call = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=problem.is_causal)
    entered = partial(torch_backends.held_to, torch, name)

    def run(q, k, v, out) -> tuple:
        return call(q, k, v), None

    def judge(sample: Sample, o, lse) -> None:
        sample.check_close(o, accuracy)

    def facts(q, k, v) -> dict:
        backend = torch_backends.backend_of(torch, name, q, k, v, problem.is_causal)
        return {"backend": backend, "allow_tf32": torch.backends.cuda.matmul.allow_tf32}

    version, refuses_by = str(torch.__version__), (RuntimeError,)
    return Contender(name, accuracy, version, call, run, judge, entered, refuses_by=refuses_by, facts=facts)


def accuracy_of(baseline: str) -> str:
    return next((accuracy for accuracy, names in LOWER_BASELINES.items() if baseline in names), "fp32")


def baselines_for(problem: Problem) -> tuple[str, ...]:
    """Torch's backends that are as precise as the problem asks for, and those that are no more than that."""
    return BASELINES + LOWER_BASELINES.get(problem.precision, ())


def without_torch(name: str, reason: str) -> Contender:
    return Contender(name, accuracy_of(name), "", refusal=reason)


def contenders(
    problem: Problem, kernels: Iterable[Kernel], baselines: Iterable[str], device: Device
) -> list[Contender]:
    """The kernels and baselines for a problem, those that cannot serve it too, with the reason."""
    torch, why_not = torch_backends.cuda_torch()
    if torch is None:
        # A kernel that needs a library's arrays says so when it is called with others.
        refusals = (ValueError, TypeError, NotImplementedError)
        found = [ours(kernel, problem, device, refusals) for kernel in kernels]
        return found + [without_torch(name, why_not) for name in baselines]
    return [ours(kernel, problem, device) for kernel in kernels] + [torchs(name, problem, torch) for name in baselines]


def standard_names(known: NamedProblem, device: Device) -> list[str]:
    """What a run times where nothing is asked for: kernels in their order, then the baselines."""
    return [kernel.name for kernel in standard_kernels(known, KERNELS, device)] + list(baselines_for(known.problem))


def by_names(known: NamedProblem, names: Sequence[str], device: Device) -> list[Contender]:
    """The contenders of these names, in the order of `standard_names`."""
    kernels = (kernel for kernel in KERNELS if kernel.name in names)
    return contenders(known.problem, kernels, (name for name in EVERY_BASELINE if name in names), device)


def torch_label(name: str, version: str, backend: str | None) -> str:
    """A baseline with what stands behind it: `torch_default (torch 2.11.0, efficient_attention)`."""
    return f"{name} (torch {version.partition('+')[0]}, {backend or 'unknown'})"
