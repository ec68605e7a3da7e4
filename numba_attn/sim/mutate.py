"""Does the simulator notice? Every mutant of a kernel must be caught, or be listed as equivalent with its reason.

    report = run("numba_attn/kernels/flash_fp32.py")

plants faults in the kernels that its launches run and in the verbs that these use, wherever in the package they are
defined, and runs each mutant over small problems until one catches it: by an error of the simulator, an exception, a
result off the reference, or a run that does not end. Mutants that survive are listed in a TOML file, by kernel, with
the text of their line and their description:

    [[flash_fp32]]
    line = "n_end = min(m0 + BLOCK_M, Lk)"
    mutant = "min -> max in `min(m0 + BLOCK_M, Lk)`"
    reason = "only skips work"

They are equivalent, unless `test` names a test of the repository: then that must fail under the mutant, which changes
what these problems do not show, such as the last digits. The problems are not tried with it.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from numba_attn import reference
from numba_attn.sim.cases import CASES, Case
from numba_attn.sim.errors import SimulationError
from numba_attn.sim.loader import Loader
from numba_attn.sim.mutants import Mutant, mutants
from numba_attn.sim.named_test import NamedTests
from numba_attn.sim.run import of_kernel
from numba_attn.sim.time_limit import TimeLimit, time_limit

__all__ = ["CASES", "Case", "Mutant", "Report", "Row", "mutants", "run"]

LIMIT_FACTOR = 20  # a mutant that takes this many times the kernel's own time does not end
LEAST_LIMIT_S = 10.0
EQUIVALENT = Path(__file__).parents[2] / "tests" / "sim" / "equivalent_mutants.toml"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one mutant."""

    file: str
    """The kernel's file or a module of verbs."""
    mutant: Mutant
    outcome: str
    """`error` (of the simulator), `exception`, `wrong`, `endless`, `tested`, `equivalent` or `survived`."""
    detail: str
    """First sentence of what caught it, or the reason why it is listed."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all mutants of a kernel."""

    kernel: str
    rows: tuple[Row, ...]
    stale: tuple[str, ...]
    """Listed, but caught or no longer there."""

    @property
    def counts(self) -> dict[str, int]:
        """Mutants per outcome."""
        return dict(Counter(row.outcome for row in self.rows))

    @property
    def ok(self) -> bool:
        """Whether every mutant is caught, tested or equivalent, and every listed one is still there."""
        return not self.stale and not any(row.outcome == "survived" for row in self.rows)


def run(
    kernel_file: str | Path,
    cases: Iterable[Case] | None = None,
    progress: Callable[[int, int, Row], None] | None = None,
    *,
    name: str = "KERNEL",
    verbs: Iterable[str] | None = None,
    equivalent: str | Path | None = None,
    without: Iterable[tuple[str | Path, str]] = (),
    jobs: int = 1,
) -> Report:
    """Try every mutant of a kernel file.

    Args:
        kernel_file: the file; its `name` is a `Kernel`.
        cases: the calls to try. None: `CASES`.
        progress: called after each mutant with its number, their count and its row.
        name: what the file calls its `Kernel`.
        verbs: modules of the package that are mutated too, as far as the kernel uses them. None: all that it depends
            on.
        equivalent: TOML file of the mutants known to survive. None: the repository's own, if there is one.
        without: files of other kernels and their names there, to whose mutants the verbs that they use are left.
        jobs: processes to share the mutants.

    Raises:
        ValueError: the kernel itself fails one of the cases that it supports, or a test of the list.
    """
    path = Path(kernel_file)
    with tempfile.TemporaryDirectory() as folder:
        loader = Loader(path, Path(folder), name)
        kernel = loader.kernel()
        cases = _baseline(kernel, CASES if cases is None else cases)
        known = _known(EQUIVALENT if equivalent is None else Path(equivalent), kernel.name)
        tests = NamedTests({entry["test"] for entry in known.values() if "test" in entry})
        reached = loader.reached()
        left = [Loader(Path(other), Path(folder), its_name).reached() for other, its_name in without]
        found = [(None, mutant) for mutant in mutants(path)]
        for module in loader.modules if verbs is None else verbs:
            for mutant in mutants(importlib.import_module(module)):
                is_left = any(mutant.line in lines for others in left for lines in others.get(module, ()))
                if not is_left and any(mutant.line in lines for lines in reached[module]):
                    found.append((module, mutant))
        trial = _Trial(loader, cases, known, tests)
        rows = []
        for row in _in_processes(trial, found, jobs):
            rows.append(row)
            if progress is not None:
                progress(len(rows), len(found), row)
    alive = {(row.mutant.text, row.mutant.description) for row in rows if row.outcome in ("equivalent", "tested")}
    return Report(
        kernel.name, tuple(rows), tuple(f"{text}: {what}" for text, what in known if (text, what) not in alive)
    )


@dataclass(frozen=True)
class _Prepared:
    """A case with what it needs, and what its result must be."""

    case: Case
    inputs: tuple
    expected: tuple
    seconds: float
    """That the kernel itself takes."""

    @property
    def limit(self) -> float:
        """What a mutant may take."""
        return max(LIMIT_FACTOR * self.seconds, LEAST_LIMIT_S)


class _Trial:
    """What happens to one mutant, given as its module (None: the kernel's file) and itself."""

    def __init__(self, loader: Loader, cases: list[_Prepared], known: dict[tuple[str, str], dict], tests: NamedTests):
        self.loader, self.cases, self.known, self.tests = loader, cases, known, tests
        self.hits = [0.0] * len(cases)

    def __call__(self, found: tuple[str | None, Mutant]) -> Row:
        module, mutant = found
        start = time.perf_counter()
        entry = self.known.get((mutant.text, mutant.description), {})
        if "test" in entry:
            file = self.loader.path if module is None else Path(inspect.getsourcefile(importlib.import_module(module)))
            fails = self.tests.fails(entry["test"], file, mutant.source)
            outcome = "tested" if fails else "survived"
            detail = f"{entry['reason']}: {entry['test']}" if fails else f"{entry['test']} passes"
        else:
            outcome, detail = self._try(self.loader.kernel(mutant.source, module))
            if outcome == "survived" and entry:
                outcome, detail = "equivalent", entry["reason"]
        return Row(module or self.loader.path.name, mutant, outcome, detail, time.perf_counter() - start)

    def _try(self, kernel) -> tuple[str, str]:
        # What caught the last mutants, close to this one, is likely to catch it too: cheap and successful cases first.
        order = sorted(range(len(self.cases)), key=lambda i: self.cases[i].seconds / (0.05 + self.hits[i]))
        for i in order:
            outcome, detail = _try(kernel, self.cases[i])
            if outcome != "survived":
                self.hits = [0.8 * hits for hits in self.hits]
                self.hits[i] += 1
                return outcome, detail
        return "survived", ""


def _in_processes(trial: _Trial, found: list, jobs: int) -> Iterator[Row]:
    """The rows, in order."""
    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(trial, found)
        return
    # Forked, not spawned: the processes share the kernel, the inputs and whatever a test has replaced.
    with multiprocessing.get_context("fork").Pool(jobs, _keep, (trial,)) as pool:
        yield from pool.imap(_try_kept, found)


def _keep(trial: _Trial) -> None:
    global _kept
    _kept = trial
    # Each process writes its sources to a folder of its own.
    folder = trial.loader.folder / multiprocessing.current_process().name
    folder.mkdir()
    trial.loader.folder = folder


def _try_kept(found) -> Row:
    return _kept(found)


def _baseline(kernel, cases) -> list[_Prepared]:
    """The cases, which the kernel itself must pass."""
    prepared = []
    for case in cases:
        inputs = case.inputs()
        expected = reference.attention(*inputs, causal=case.causal)
        start = time.perf_counter()
        wrong = _mistake(kernel, case, inputs, expected)
        if wrong:
            raise ValueError(f"{kernel.name} itself fails {case}: {wrong}")
        prepared.append(_Prepared(case, inputs, expected, time.perf_counter() - start))
    return prepared


def _try(kernel, prepared: _Prepared) -> tuple[str, str]:
    try:
        with time_limit(prepared.limit):
            wrong = _mistake(kernel, prepared.case, prepared.inputs, prepared.expected)
    except SimulationError as error:
        kind = "exception" if error.__cause__ is not None else "error"
        return kind, str(error).split("; kernel")[0]
    except TimeLimit:
        return "endless", f"{prepared.case} not done after {prepared.limit:.0f} s"
    except Exception as error:
        return "exception", f"{type(error).__name__}: {error}"
    return ("wrong", f"{wrong} in {prepared.case}") if wrong else ("survived", "")


def _mistake(kernel, case: Case, inputs, expected) -> str:
    """What is wrong with the kernel's result, or ''."""
    result = of_kernel(kernel, *inputs, case.causal, case.lse)
    o, lse = result if case.lse else (result, None)
    expected_o, expected_lse = expected
    size = np.linalg.norm(np.where(np.isfinite(expected_o), expected_o, 0), axis=-1, keepdims=True)
    for what, got, want, scale in (("O", o, expected_o, size), ("lse", lse, expected_lse, 1 + np.abs(expected_lse))):
        if got is not None:
            with np.errstate(invalid="ignore"):
                close = np.abs(got - want) <= case.tolerance * scale
            same = close | (got == want) | (np.isnan(got) & np.isnan(want))
            if not same.all():
                first = tuple(map(int, np.argwhere(~same)[0]))
                return f"{what}{list(first)} is {got[first]}, not {want[first]}"
    return ""


def _known(path: Path, kernel: str) -> dict[tuple[str, str], dict]:
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get(kernel, [])
    return {(entry["line"], entry["mutant"]): entry for entry in entries}
