"""Architectures to compile for without a GPU of them."""

from __future__ import annotations

from dataclasses import replace

from numba_attn import launch
from numba_attn.cli.errors import CommandError
from numba_attn.kernel import Kernel, Launch, grids
from numba_attn.launch import compiler
from numba_attn.problem import H200, Device, Problem

SMEM_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Shared memory that one block can have, by compute capability (CUDA programming guide, compute capabilities)."""


def device_of(arch: str) -> Device:
    """A GPU of the architecture, as far as a choice of config depends on it."""
    try:
        cc = compiler.compute_capability(arch)[:2]
    except ValueError as error:
        raise CommandError(str(error), status=2) from None
    known = {10 * major + minor: (major, minor) for major, minor in (divmod(number, 10) for number in SMEM_KB)}
    number = 10 * cc[0] + cc[1]
    if number not in known:
        raise CommandError(f"arch {arch} is not one of {', '.join(f'sm_{n}' for n in known)}", status=2)
    device = replace(H200, name=f"GPU of {arch}", cc=cc, smem_per_block_bytes=SMEM_KB[number] * 1024)
    if device.arch != arch:
        raise CommandError(f"arch {arch}: a GPU of compute capability {cc[0]}.{cc[1]} loads {device.arch}", status=2)
    return device


def devices_of(archs: list[str] | None) -> list[Device]:
    """GPUs of the architectures asked for; without any, those that are here."""
    if archs:
        return [device_of(arch) for arch in dict.fromkeys(archs)]
    here = {launch.device_facts(index).arch: launch.device_facts(index) for index in range(launch.device_count())}
    if not here:
        raise CommandError("no GPU is found here: --arch (like sm_90a) is needed", status=2)
    return list(here.values())


def launches_of(kernel: Kernel, config, problem: Problem) -> list[tuple[Launch, dict]]:
    """The launches of a config, each with the workspace that it needs to be compiled."""
    return [(launch, kernel.workspace(problem, config)) for launch in grids(kernel.launches(problem, config))]
