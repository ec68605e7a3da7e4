"""Does the simulator notice? Every mutant of a kernel must be caught, or be listed as equivalent with its reason.

    report = run("numba_attn/kernels/flash_fp32.py")

plants faults in the kernel and in the verbs that its file imports, and runs each mutant over small problems until one
catches it: by an error of the simulator, an exception, a result off
the reference, or a run that does not end. Equivalent mutants are listed in a TOML file, by kernel, with the text of
their line and their description:

    [[flash_fp32]]
    line = "n_end = min(m0 + BLOCK_M, Lk)"
    mutant = "min -> max in `min(m0 + BLOCK_M, Lk)`"
    reason = "only skips work"
"""

from __future__ import annotations

import importlib
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from numba_attn import reference
from numba_attn.sim.errors import SimulationError
from numba_attn.sim.loader import Loader
from numba_attn.sim.mutants import Mutant, mutants
from numba_attn.sim.run import attention
from numba_attn.sim.time_limit import TimeLimit, time_limit

__all__ = ["CASES", "Case", "Mutant", "Report", "Row", "mutants", "run"]

TOLERANCE = 1e-5  # of a row's norm; fp32 evaluations of these sizes differ by less than 1e-6
LIMIT_FACTOR = 20  # a mutant that takes this many times the kernel's own time does not end
LEAST_LIMIT_S = 10.0
EQUIVALENT = Path(__file__).parents[2] / "tests" / "sim" / "equivalent_mutants.toml"


@dataclass(frozen=True, slots=True)
class Case:
    """One small attention call."""

    B: int
    H: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    causal: bool = False
    lse: bool = True
    poison: int | None = None
    """K and V are NaN from this row on, those that causality removes from every row included."""
    spread: float = 4
    """Standard deviation of the scores; where it is large, exp overflows unless the maximum is subtracted."""
    minus_inf: int = 0
    """The scores of the first keys are -inf."""
    last_inf: bool = False
    """The last element of V is Inf."""

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v, the same in every run."""
        generator = np.random.default_rng(0)
        shapes = ((self.Lq, self.D), (self.Lk, self.D), (self.Lk, self.Dv))
        q, k, v = (generator.standard_normal((self.B, self.H, *shape), dtype=np.float32) for shape in shapes)
        q *= self.spread
        if self.poison is not None:
            k[:, :, self.poison :] = v[:, :, self.poison :] = np.nan
        if self.minus_inf:
            q[..., 0] = 1
            k[:, :, : self.minus_inf, 0] = -np.inf
        if self.last_inf:
            v[..., -1, -1] = np.inf
        return q, k, v


CASES = (
    Case(1, 1, 3, 5, 5, 3),
    Case(1, 2, 5, 37, 6, 9),
    Case(1, 1, 6, 6, 8, 4, causal=True, lse=False),
    Case(2, 1, 9, 40, 12, 36),
    Case(1, 1, 11, 9, 4, 5, causal=True),
    Case(1, 1, 5, 40, 4, 4, causal=True, poison=5),
    Case(1, 1, 36, 40, 3, 2, causal=True, poison=17),
    Case(1, 1, 36, 40, 3, 2, causal=True, poison=33),
    Case(2, 2, 3, 70, 20, 70, lse=False),
    Case(1, 1, 40, 70, 9, 33, causal=True),
    Case(1, 1, 4, 64, 32, 64),
    Case(1, 1, 3, 9, 70, 7),
    Case(1, 1, 3, 40, 72, 68),
    Case(1, 1, 3, 70, 4, 4, minus_inf=40),
    Case(1, 1, 3, 5, 1, 4, minus_inf=2),
    Case(1, 1, 3, 70, 4, 4, spread=200),
    Case(1, 1, 3, 40, 4, 4, last_inf=True),
    Case(1, 1, 1, 245, 2, 4),
    Case(1, 1, 3, 0, 4, 4),
)
"""Tails in every length, several tiles and slices, both kinds of causal excess, keys that must not be touched, an Inf
that is attended, an infinity in the last column of K, more chunks than a warp has lanes."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one mutant."""

    file: str
    """The kernel's file or a module of verbs."""
    mutant: Mutant
    outcome: str
    """`error` (of the simulator), `exception`, `wrong`, `endless`, `equivalent` or `survived`."""
    detail: str
    """First sentence of what caught it, or the reason why it is equivalent."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all mutants of a kernel."""

    kernel: str
    rows: tuple[Row, ...]
    stale: tuple[str, ...]
    """Listed as equivalent, but caught or no longer there."""

    @property
    def counts(self) -> dict[str, int]:
        """Mutants per outcome."""
        return dict(Counter(row.outcome for row in self.rows))

    @property
    def ok(self) -> bool:
        """Whether every mutant is caught or equivalent, and every listed one is still there."""
        return not self.stale and not any(row.outcome == "survived" for row in self.rows)


def run(
    kernel_file: str | Path,
    cases: Iterable[Case] | None = None,
    progress: Callable[[int, int, Row], None] | None = None,
    *,
    name: str = "KERNEL",
    verbs: Iterable[str] | None = None,
    equivalent: str | Path | None = None,
) -> Report:
    """Try every mutant of a kernel file.

    Args:
        kernel_file: the file; its `name` is a `Kernel`.
        cases: the calls to try, cheap ones first. None: `CASES`.
        progress: called after each mutant with its number, their count and its row.
        name: what the file calls its `Kernel`.
        verbs: modules whose verbs are mutated too, as far as the kernel uses them. None: all of `numba_attn.device`
            that it depends on.
        equivalent: TOML file of the mutants known to be equivalent. None: the repository's own, if there is one.

    Raises:
        ValueError: the kernel itself fails one of the cases that it supports.
    """
    path = Path(kernel_file)
    with tempfile.TemporaryDirectory() as folder:
        loader = Loader(path, Path(folder), name)
        kernel = loader.kernel()
        cases, limits = _baseline(kernel, CASES if cases is None else cases)
        known = _known(EQUIVALENT if equivalent is None else Path(equivalent), kernel.name)
        reached = loader.reached()
        found = [(None, mutant) for mutant in mutants(path)]
        for module in loader.modules if verbs is None else verbs:
            for mutant in mutants(importlib.import_module(module)):
                if any(mutant.line in lines for lines in reached[module]):
                    found.append((module, mutant))
        rows = []
        for number, (module, mutant) in enumerate(found, 1):
            start = time.perf_counter()
            outcome, detail = _try(partial(loader.kernel, mutant.source, module), cases, limits)
            reason = known.get((mutant.text, mutant.description))
            if outcome == "survived" and reason:
                outcome, detail = "equivalent", reason
            rows.append(Row(module or path.name, mutant, outcome, detail, time.perf_counter() - start))
            if progress is not None:
                progress(number, len(found), rows[-1])
    alive = {(row.mutant.text, row.mutant.description) for row in rows if row.outcome == "equivalent"}
    return Report(
        kernel.name, tuple(rows), tuple(f"{text}: {what}" for text, what in known if (text, what) not in alive)
    )


def _baseline(kernel, cases) -> tuple[list, list[float]]:
    """The cases, inputs and expected results; and the time that a mutant may take for each."""
    prepared, limits = [], []
    for case in cases:
        q, k, v = case.inputs()
        expected = reference.attention(q, k, v, causal=case.causal)
        start = time.perf_counter()
        wrong = _mistake(kernel, case, (q, k, v), expected)
        if wrong:
            raise ValueError(f"{kernel.name} itself fails {case}: {wrong}")
        limits.append(max(LIMIT_FACTOR * (time.perf_counter() - start), LEAST_LIMIT_S))
        prepared.append((case, (q, k, v), expected))
    return prepared, limits


def _try(load: Callable, cases, limits) -> tuple[str, str]:
    kernel = load()
    for (case, inputs, expected), limit in zip(cases, limits, strict=True):
        try:
            with time_limit(limit):
                wrong = _mistake(kernel, case, inputs, expected)
        except SimulationError as error:
            kind = "exception" if error.__cause__ is not None else "error"
            return kind, str(error).split("; kernel")[0]
        except TimeLimit:
            return "endless", f"{case} not done after {limit:.0f} s"
        except Exception as error:
            return "exception", f"{type(error).__name__}: {error}"
        if wrong:
            return "wrong", f"{wrong} in {case}"
    return "survived", ""


def _mistake(kernel, case: Case, inputs, expected) -> str:
    """What is wrong with the kernel's result, or ''."""
    result = attention(*inputs, causal=case.causal, return_lse=case.lse, kernel=kernel)
    o, lse = result if case.lse else (result, None)
    expected_o, expected_lse = expected
    size = np.linalg.norm(np.where(np.isfinite(expected_o), expected_o, 0), axis=-1, keepdims=True)
    for what, got, want, scale in (("O", o, expected_o, size), ("lse", lse, expected_lse, 1 + np.abs(expected_lse))):
        if got is not None:
            with np.errstate(invalid="ignore"):
                close = np.abs(got - want) <= TOLERANCE * scale
            same = close | (got == want) | (np.isnan(got) & np.isnan(want))
            if not same.all():
                first = tuple(map(int, np.argwhere(~same)[0]))
                return f"{what}{list(first)} is {got[first]}, not {want[first]}"
    return ""


def _known(path: Path, kernel: str) -> dict[tuple[str, str], str]:
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get(kernel, [])
    return {(entry["line"], entry["mutant"]): entry["reason"] for entry in entries}
