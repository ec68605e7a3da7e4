"""Options of kernels that no heuristic chooses, each a `Kernel` of its own, to be checked and timed beside the chosen:

    python -m numba_attn check benchmarks/variants.py:APART --sim
    python -m numba_attn bench --kernel benchmarks/variants.py:APART --kernel unfused_split_half_sm90

What wins becomes the heuristic's choice in the kernel's file, and what loses goes to `docs/notes/`.
"""

from __future__ import annotations

from dataclasses import replace

from numba_attn.kernel import Kernel
from numba_attn.kernels import flash_split_half_sm90, unfused_split_half_sm80, unfused_split_half_sm90
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


def by_mma(name: str, small: dict, **changes) -> Kernel:
    return variant(unfused_split_half_sm80.KERNEL, name, small={"slab": 32, **small}, **changes)


TWO_BLOCKS = {"slab": 32, "slots": 3, "blocks": 2}
"""Of an SM: one begins and ends under the products of the other."""
SQUARE = by_mma("square", {"m_rows": 64}, warps_m=2, warps_n=2, m_rows=64, s_bunches=1, **TWO_BLOCKS)
PANELS = by_mma("panels", {"panels": 2}, warps_m=4, warps_n=1, panels=2, o_bunches=4, **TWO_BLOCKS)
TALL = by_mma("tall", {"m_rows": 64}, warps_m=4, warps_n=2, m_rows=64, s_bunches=1, slab=32, slots=4)
THREE = by_mma("three", {}, warps_m=4, warps_n=1, slab=32, slots=3, blocks=3)
SHORT = by_mma("short", {}, slab=32, slots=6)
