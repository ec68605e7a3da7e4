"""The command `mutate`: does the simulator notice faults planted in a kernel?"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from numba_attn.cli.errors import CommandError
from numba_attn.cli.kernel_file import KERNEL_HELP, find
from numba_attn.cli.screen import Progress, table
from numba_attn.sim import mutate

DESCRIPTION = """Plant one fault after the other in the kernels that it launches and in the verbs that these use (a
dropped barrier, a shifted index, a dropped bounds test, max for min, an unrolled loop without its last turn) and run
each over small problems in the simulator. Takes minutes. Exit status 1 if a mutant survives that is neither listed as
equivalent nor caught by the test that the list names, or if the list has an entry that is no longer true."""


def add_arguments(parser) -> None:
    parser.add_argument("kernel", metavar="KERNEL", help=KERNEL_HELP)
    equivalent = "list of mutants known to survive; the repository's unless given"
    parser.add_argument("--equivalent", metavar="FILE.toml", help=equivalent)
    without = "leave the verbs that this kernel uses to its own mutants; may be repeated"
    parser.add_argument("--without", action="append", default=[], metavar="KERNEL", help=without)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; one for each processor unless given")


def run(args) -> int:
    if args.equivalent is not None and not Path(args.equivalent).is_file():
        raise CommandError(f"--equivalent: {args.equivalent} is no file", status=2)
    if args.equivalent is not None:
        try:
            tomllib.loads(Path(args.equivalent).read_text(encoding="utf-8"))
        except ValueError as error:  # of tomllib, or no UTF-8
            raise CommandError(f"--equivalent: {args.equivalent} is no TOML: {error}", status=2) from None
    jobs = (os.cpu_count() or 1) if args.jobs is None else args.jobs
    if jobs < 1:
        raise CommandError(f"--jobs: {jobs} is less than 1", status=2)
    _, path, name = find(args.kernel)
    without = [find(other)[1:] for other in args.without]
    with Progress() as progress:

        def show(number: int, count: int, row) -> None:
            if row.outcome == "survived":
                progress.say(f"SURVIVED {place(row)}")
            progress.show(number, count, place(row))

        progress.show(0, 1, "the kernel itself")
        try:
            options = {"name": name, "equivalent": args.equivalent, "without": without, "jobs": jobs}
            report = mutate.run(path, progress=show, **options)
        except ValueError as error:
            raise CommandError(str(error)) from None
    print(table(("outcome", "mutants"), [(outcome, str(count)) for outcome, count in sorted(report.counts.items())]))
    for row in report.rows:
        if row.outcome in ("equivalent", "tested"):
            print(f"{row.outcome}: {place(row)}: {row.detail}")
    for entry in report.stale:
        print(f"STALE {entry}")
    return 0 if report.ok else 1


def place(row) -> str:
    """Where a mutant is, and what it is."""
    return f"{row.file}:{row.mutant.line} {row.mutant.description}"
