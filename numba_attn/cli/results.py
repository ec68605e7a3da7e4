"""The command `results`: are the saved results those of this code, are the bars met, does the README say the same?"""

from __future__ import annotations

from numba_attn.bench import bars, results, tables
from numba_attn.bench.results import Results
from numba_attn.cli.errors import CommandError
from numba_attn.kernels import KERNELS

DESCRIPTION = f"""List the entries of {results.FILE} that were measured on other code than is here, the bars of
{bars.FILE} that they miss, and the rows of README.md that differ from them. Exit status 1 if there is any. No GPU is
needed, but a checkout of the repository."""

README = "README.md"


def add_arguments(parser) -> None:
    parser.add_argument("--write", action="store_true", help="write the README's tables from the file first")


def run(args) -> int:
    root = results.ROOT
    try:
        saved = results.load(root / results.FILE) if (root / results.FILE).exists() else None
        text = (root / README).read_text(encoding="utf-8")
        limits = bars.load(root / bars.FILE)
        if args.write:
            text = tables.replaced(text, tables.block(saved, KERNELS))
            (root / README).write_text(text, encoding="utf-8")
            print(f"{README}: tables written")
        rows = tables.differing_rows(text, saved, KERNELS)
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be read: {error.strerror}: is this a checkout?") from None
    except (results.ResultsError, bars.BarsError, tables.MarkersError) as error:
        raise CommandError(str(error)) from None
    found = [*without_file(saved), *older(saved), *bars_missed(limits, saved), *(f"README {row}" for row in rows)]
    for line in found:
        print(line)
    if saved:
        print(f"{len(saved.results)} entries of {results.FILE}, {len(limits)} bars")
    print("nothing to report" if not found else f"{len(found)} to look at")
    return 1 if found else 0


def without_file(saved: Results | None) -> list[str]:
    hint = f"`python -m numba_attn bench --json {results.FILE}` makes it, on a GPU"
    return [] if saved else [f"NO RESULTS: {results.FILE} is missing; {hint}"]


def older(saved: Results | None) -> list[str]:
    """A line for each entry that says nothing about the code that is here, and for each kernel without one."""
    if saved is None:
        return []
    reasons = ((result, saved.why_older(result, KERNELS)) for result in saved.results)
    lines = [f"OLDER CODE {r.kernel} at {r.problem}: {reason}" for r, reason in reasons if reason]
    measured = {result.kernel for result in saved.results}
    return lines + [f"NOT MEASURED {kernel.name}" for kernel in KERNELS if kernel.name not in measured]


def bars_missed(limits, saved: Results | None) -> list[str]:
    return [f"MISSED {bar}; {reason}" for bar, reason in bars.missed(limits, saved).items()]
