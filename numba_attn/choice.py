"""Which kernel serves a call, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_attn.kernel import Kernel
from numba_attn.problem import Device, Problem


@dataclass(frozen=True)
class Explanation:
    """Which kernel serves a call on a device, and for each of the others why not."""

    problem: Problem
    device: Device
    has_gpu: bool
    """False: there is no GPU here, and the facts of `device` are built in."""
    chosen: str | None
    """Name of the kernel that serves the call; None if none can."""
    reasons: dict[str, str]
    """For every kernel, in order: 'chosen', or why it is not. An unregistered kernel that has a registered one's name
    is called '<name> (given)'."""
    accuracy: str | None = None
    """Class of the chosen kernel's results: that of `problem.precision`, or a better one."""

    def __repr__(self) -> str:
        facts = self.problem
        shape = f"B={facts.B} H={facts.H} Lq={facts.Lq} Lk={facts.Lk} D={facts.D} Dv={facts.Dv}"
        options = f"{facts.dtype}{' causal' if facts.is_causal else ''}, loads of {facts.vector}"
        if facts.precision != "fp32":
            options += f", precision {facts.precision}" + (f" gives {self.accuracy}" if self.accuracy else "")
        device = self.device.name if self.has_gpu else f"no GPU here; as on an {self.device.name}"
        width = max(map(len, self.reasons), default=0)
        lines = [f"{name:<{width}}  {reason}" for name, reason in self.reasons.items()]
        return "\n".join([f"{shape} {options} ({device})", *lines])


NO_PRODUCTS = "multiplies with the arrays' library: torch or CuPy arrays are needed"


def choose(
    kernel: str | Kernel | None, kernels: Sequence[Kernel], problem: Problem, device: Device, has_matmul: bool = True
) -> Kernel:
    """The kernel that the caller asked for; without one, the first that suits, or else the first that can serve.

    Precision is a fact like others. Kernels with a faster mode for it stand before those that they are faster than.
    has_matmul: the library of the caller's arrays multiplies.

    Raises:
        ValueError: the kernel asked for, or every registered one, cannot serve the problem; or its name is unknown.
        TypeError: `kernel` is neither a name nor a Kernel.
    """
    if kernel is None:
        refusals = {candidate.name: _refusal(candidate, problem, device, has_matmul) for candidate in kernels}
        able = [candidate for candidate in kernels if refusals[candidate.name] is None]
        if not able:
            said = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
            raise ValueError(f"no kernel can serve this call: {said}")
        return next((candidate for candidate in able if candidate.suits(problem, device) is None), able[0])
    kernel = find(kernel, kernels)
    if reason := _refusal(kernel, problem, device, has_matmul):
        raise ValueError(f"kernel {kernel.name} cannot serve this call: {reason}")
    return kernel


def _refusal(kernel: Kernel, problem: Problem, device: Device, has_matmul: bool) -> str | None:
    """Why the kernel cannot serve the call, or None."""
    return NO_PRODUCTS if kernel.uses_matmul and not has_matmul else kernel.supports(problem, device)


def find(kernel: str | Kernel, kernels: Sequence[Kernel]) -> Kernel:
    """A registered kernel by its name; a record stands for itself, registered or not."""
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        raise TypeError(f"kernel is a {type(kernel).__name__}: a name or a Kernel is needed")
    for candidate in kernels:
        if candidate.name == kernel:
            return candidate
    raise ValueError(f"kernel {kernel!r} is not one of {', '.join(candidate.name for candidate in kernels)}")


def explain(
    kernel: str | Kernel | None,
    kernels: Sequence[Kernel],
    problem: Problem,
    device: Device,
    has_gpu: bool,
    has_matmul: bool = True,
) -> Explanation:
    """The choice that `choose` makes, with the reasons; where it would raise, no kernel is chosen."""
    asked = None if kernel is None else find(kernel, kernels)
    candidates = {candidate.name: candidate for candidate in kernels}
    label = asked and asked.name
    if asked and candidates.get(label) is not asked:
        label = f"{label} (given)" if label in candidates else label
        candidates = {label: asked, **candidates}
    try:
        chosen = choose(asked, kernels, problem, device, has_matmul)
    except ValueError:
        chosen = None
    reasons = {}
    for name, candidate in candidates.items():
        if candidate is chosen:
            reasons[name] = "chosen"
        else:
            reason = _refusal(candidate, problem, device, has_matmul)
            rather = f"{label} was asked for" if asked else candidate.suits(problem, device)
            reasons[name] = f"cannot: {reason}" if reason else f"can, but {rather or 'comes later in the list'}"
    return Explanation(
        problem, device, has_gpu, chosen and chosen.name, reasons, chosen and chosen.accuracy_at(problem)
    )
