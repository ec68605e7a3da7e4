"""Options of kernels that no heuristic chooses, each a `Kernel` of its own, to be checked and timed beside the chosen:

    python -m numba_attn check benchmarks/variants.py:APART --sim
    python -m numba_attn bench --kernel benchmarks/variants.py:APART --kernel unfused_split_half_sm90

What wins becomes the heuristic's choice in the kernel's file, and what loses goes to `docs/notes/`.
"""

from __future__ import annotations

from dataclasses import replace

from numba_attn.kernel import Kernel
from numba_attn.kernels import flash_split_half_sm90, unfused_split_half_sm90
from numba_attn.problem import Device, Problem


def variant(kernel: Kernel, name: str, small: dict | None = None, **changes) -> Kernel:
    """The kernel with other options; `small`: those of its tiles in the simulator, where they differ."""
    return replace(
        kernel,
        name=f"{kernel.name}_{name}",
        config=lambda problem, device: replace(kernel.config(problem, device), **changes),
        configs=lambda: (replace(config, **changes) for config in kernel.configs()),
        small_config=lambda problem: replace(kernel.small_config(problem), **(changes if small is None else small)),
    )


APART = variant(unfused_split_half_sm90.KERNEL, "apart", beside=False)


def up_to(columns: int) -> Kernel:
    """flash_split_half_sm90, for head dims up to so many columns."""

    def supports(problem: Problem, device: Device) -> str | None:
        if max(problem.D, problem.Dv) > columns:
            return f"for head dims up to {columns}"
        return flash_split_half_sm90.supports(problem, device)

    def configs():
        return (config for config in flash_split_half_sm90.configs() if config.d_bucket <= columns)

    return replace(flash_split_half_sm90.KERNEL, supports=supports, configs=configs)


ANY_TURN = variant(up_to(128), "any_turn", small={"groups": 2}, ping_pong=False)
