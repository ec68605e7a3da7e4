"""The command `inspect`: what the compiler makes of one kernel, without a GPU."""

from __future__ import annotations

from numba_attn.cli.errors import CommandError, require_toolkit, told
from numba_attn.cli.kernel_file import KERNEL_HELP, find
from numba_attn.cli.precompile import HEADER, row
from numba_attn.cli.screen import table
from numba_attn.cli.targets import device_of, launches_of
from numba_attn.launch import compiler
from numba_attn.problem import MAX_LENGTH, PRECISIONS, Problem

DESCRIPTION = """Compile the config that serves one head dim and show its registers, bytes of spills, stack and shared
memory, or its PTX. No GPU is needed."""


def add_arguments(parser) -> None:
    parser.add_argument("kernel", metavar="KERNEL", help=KERNEL_HELP)
    parser.add_argument("--arch", default="sm_90a", metavar="sm_XX", help="architecture, sm_90a without one")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="head dim of Q, K and V, 64 without one")
    parser.add_argument("--causal", action="store_true", help="the config for causal calls")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="fp32 without one")
    parser.add_argument("--ptx", action="store_true", help="print the PTX instead")


def run(args) -> int:
    require_toolkit()
    kernel, _, _ = find(args.kernel)
    device, D = device_of(args.arch), args.head_dim
    if not 1 <= D <= MAX_LENGTH:
        raise CommandError(f"--head-dim is {D}: it must be from 1 to {MAX_LENGTH}", status=2)
    sizes, vector = (1, 1, 1, 1024, 1024, D, D), 1 if D % 4 else 4
    problem = Problem(*sizes, is_causal=args.causal, vector=vector, precision=args.precision)
    with told(f"{kernel.name} fails"):
        reason = kernel.supports(problem, device)
    if reason:
        raise CommandError(f"{kernel.name} cannot serve this: {reason}", status=2)
    with told(f"{kernel.name} does not compile"):
        pieces = launches_of(kernel, kernel.config(problem, device), problem)
        if args.ptx:
            text = "\n".join(compiler.ptx(launch, workspace, device.arch) for launch, workspace in pieces)
        else:
            binaries = ((launch, compiler.binary(launch, workspace, device.arch)) for launch, workspace in pieces)
            text = table(HEADER, [row(kernel, device, launch, binary) for launch, binary in binaries])
    print(text)
    return 0
