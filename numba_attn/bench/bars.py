"""Bars: times that were reached once and must not be lost unseen."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from numba_attn.bench.contenders import RATIO_TO
from numba_attn.bench.problems import full_name, parse
from numba_attn.bench.results import Results

FILE = Path("benchmarks/bars.toml")


class BarsError(Exception):
    """What is wrong with the file of bars, in one line."""


@dataclass(frozen=True)
class Bar:
    """The most that a kernel may take at a problem: milliseconds, or its time over `torch_default`'s."""

    problem: str
    kernel: str
    ms: float | None = None
    ratio: float | None = None

    def __post_init__(self):
        if (self.ms is None) == (self.ratio is None):
            raise ValueError("exactly one of ms and ratio is needed")
        if not all(isinstance(text, str) for text in (self.problem, self.kernel)):
            raise ValueError("problem and kernel are names")
        limit = self.ms if self.ratio is None else self.ratio
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
            raise ValueError(f"a bar of {limit!r} is no positive number")
        if full_name(parse(self.problem)) != self.problem:
            raise ValueError(f"the problem's full name is {full_name(parse(self.problem))}")

    def __str__(self) -> str:
        limit = f"{self.ms:g} ms" if self.ratio is None else f"{self.ratio:g} times {RATIO_TO}'s time"
        return f"{self.kernel} at {self.problem}: {limit}"


def load(path: Path) -> tuple[Bar, ...]:
    """The bars of a file. Raises `BarsError`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BarsError(f"{path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise BarsError(f"{path}: {error}") from None
    if unknown := document.keys() - {"bar"}:
        raise BarsError(f"{path}: {', '.join(sorted(unknown))} is no bar: bars are [[bar]] tables")
    bars = []
    for number, table in enumerate(document.get("bar", []), 1):
        try:
            bars.append(Bar(**table))
        except (TypeError, ValueError) as error:
            raise BarsError(f"{path}: bar {number}: {error}") from None
    if len(set(bars)) < len(bars):
        raise BarsError(f"{path}: a bar is there twice")
    return tuple(bars)


def missed(bars: Sequence[Bar], results: Results | None) -> dict[Bar, str]:
    """The bars that the results do not reach, and why; what was not measured counts as missed."""
    reasons = {}
    for bar in bars:
        result = results and results.find(bar.problem, bar.kernel)
        if result is None:
            reasons[bar] = "not measured"
            continue
        ratio = results.ratio(result)
        if bar.ms is not None and not result.ms <= bar.ms:
            reasons[bar] = f"{result.ms:.4g} ms"
        elif bar.ratio is not None and ratio is None:
            reasons[bar] = f"{RATIO_TO} was not measured"
        elif bar.ratio is not None and not ratio <= bar.ratio:
            reasons[bar] = f"{ratio:.3g} times"
    return reasons
