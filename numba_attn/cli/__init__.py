"""`python -m numba_attn COMMAND`: one module of this package per command.

A command's module has `DESCRIPTION`, `add_arguments(parser)` and `run(args) -> exit status`. It is imported only when
it is called for, so that `info` can tell what is wrong where nothing else can be imported.

Exit status: 0 if all is well, 1 if something was found wrong, 2 for arguments that make no sense, 130 and 141 as for
other commands if interrupted or if nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from numba_attn import versions
from numba_attn.cli.errors import CommandError

COMMANDS = {
    "demo": "run, check and time every kernel on one problem; without a GPU, in the simulator",
    "info": "show versions, driver, devices, cache, kernels, and what is wrong with them",
    "check": "hold kernels, or a kernel of your own file, to the matrix of problems",
    "precompile": "fill the cache with machine code, without a GPU",
    "bench": "check and time kernels and torch on named problems or any shape, and keep the results as JSON",
    "results": "compare the saved results with the code, the bars and the README, or write the README's tables",
    "inspect": "show the registers, spills and shared memory, or the PTX, of one kernel",
    "mutate": "plant faults in a kernel and see whether the simulator notices each",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    try:
        status = _guarded(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has seen enough
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _guarded(argv: list[str]) -> int:
    try:
        return _main(argv)
    except CommandError as error:
        print(f"numba_attn: {error}", file=sys.stderr)
        return error.status
    except SystemExit as stop:  # argparse, after --help too
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise CommandError(f"{message} ({self.prog} --help)", status=2)


def _main(argv: list[str]) -> int:
    parser = _Parser(prog="python -m numba_attn", description="Exact attention by kernels written in Python.")
    parser.add_argument("--version", action="version", version=versions.version("numba-attn") or "not installed")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    command = None
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary)
        if argv[:1] == [name]:
            if name != "info" and (problem := versions.package_problem()):
                raise CommandError(problem)
            command = import_module(f"numba_attn.cli.{name}")
            subparser.description = command.DESCRIPTION
            command.add_arguments(subparser)
    args = parser.parse_args(argv)
    return command.run(args)
