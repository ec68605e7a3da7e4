"""The command `precompile`: machine code of every config, into the cache, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from numba_attn.cli.errors import CommandError, require_toolkit, told
from numba_attn.cli.kernel_file import KERNEL_HELP, find
from numba_attn.cli.screen import Progress, one_line, table
from numba_attn.cli.targets import devices_of, launches_of
from numba_attn.kernel import Kernel
from numba_attn.kernels import KERNELS
from numba_attn.launch import cache, compiler
from numba_attn.problem import Device, Problem

DESCRIPTION = """Compile every config of every kernel, or of those named, into the cache. No GPU is needed. Exit status
1 if a config does not compile, or if the cache cannot be written."""

# Equal configs mean equal machine code, so that one problem stands for all; the smallest fits any config.
PROBLEM = Problem(B=1, H=1, Hkv=1, Lq=1, Lk=1, D=1, Dv=1)

HEADER = ("kernel", "arch", "registers", "spills", "stack", "shared", "config")


def add_arguments(parser) -> None:
    parser.add_argument("kernel", nargs="*", metavar="KERNEL", help=f"{KERNEL_HELP}; all without one")
    parser.add_argument(
        "--arch",
        action="append",
        metavar="sm_XX",
        help="architecture, like sm_80, sm_90a or sm_120a; may be repeated; those of the GPUs here without one",
    )


def run(args) -> int:
    require_toolkit()
    kernels = [find(text)[0] for text in args.kernel] or KERNELS
    devices = devices_of(args.arch)
    if problem := cache.problem():
        raise CommandError(problem)
    pairs = [(kernel, device) for device in devices for kernel in kernels]
    refusals = {pair: reason for pair in pairs if (reason := refusal(*pair))}
    pieces = [
        (*piece, device) for kernel, device in pairs if (kernel, device) not in refusals for piece in configs(kernel)
    ]
    rows, too_large, failures = [], [], []
    with Progress() as progress:
        for done, (kernel, config, launch, workspace, device) in enumerate(pieces):
            what = f"{kernel.name} {device.arch} {describe(config)}"
            progress.show(done, len(pieces), what)
            if launch.smem_bytes > device.smem_per_block_bytes:
                too_large.append((launch.smem_bytes, device))
                continue
            try:
                binary = compiler.binary(launch, workspace, device.arch, keep=cache.store)
            except Exception as error:  # compiler and linker raise many kinds, and the other configs may compile
                failures.append(f"{what}: {type(error).__name__}: {one_line(error)}")
                continue
            rows.append(row(kernel, device, launch, binary))
    if rows:
        print(table(HEADER, rows))
    for (kernel, device), reason in refusals.items():
        print(f"{device.arch}: {kernel.name} is left out: {reason}")
    for line in skipped(too_large):
        print(line)
    for failure in failures:
        print(f"FAIL {failure}")
    print(f"{len(rows)} configs are in {cache.directory()}" + (f", {len(failures)} failed" if failures else ""))
    return 1 if failures else 0


def refusal(kernel: Kernel, device: Device) -> str | None:
    """Why the kernel serves nothing on the device, or None."""
    with told(f"{kernel.name} fails"):
        return kernel.supports(PROBLEM, device)


def configs(kernel: Kernel) -> list[tuple]:
    """(kernel, config, launch, workspace) for each launch of each config."""
    with told(f"{kernel.name} fails"):
        return [
            (kernel, config, launch, workspace)
            for config in kernel.configs()
            for launch, workspace in launches_of(kernel, config, PROBLEM)
        ]


def row(kernel: Kernel, device: Device, launch, binary) -> tuple[str, ...]:
    """One line of the table: bytes of spills, stack and shared memory."""
    sizes = (binary.registers, binary.spill_bytes, binary.stack_bytes, binary.static_smem_bytes + launch.smem_bytes)
    return (kernel.name, device.arch, *map(str, sizes), describe(launch.config))


def describe(config) -> str:
    """The config's fields: numbers by name, options by name alone where they are on."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return " ".join(
        name if value is True else f"{name}={value}" for name, value in values.items() if value is not False
    )


def skipped(too_large: list[tuple[int, Device]]) -> Iterator[str]:
    """What was left out, and why, per device."""
    for device in dict.fromkeys(device for _, device in too_large):
        sizes = [size for size, other in too_large if other == device]
        yield (
            f"{device.arch}: {len(sizes)} configs are left out: they need {min(sizes)} bytes of shared memory or more, "
            f"a block can have {device.smem_per_block_bytes}"
        )
