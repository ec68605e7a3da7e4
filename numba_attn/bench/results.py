"""Saved measurements: what they say, and which of them were made on other code than there is now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from numba_attn.bench.contenders import EVERY_BASELINE, RATIO_TO
from numba_attn.bench.digest import code_digest
from numba_attn.bench.problems import parse
from numba_attn.kernel import Kernel
from numba_attn.problem import Device

ROOT = Path(__file__).resolve().parents[2]
FILE = Path("benchmarks/results/h200.json")
KEYS = ("kernel", "accuracy", "problem", "ms", "tflops", "rel_err", "max_abs_err", "peak_bytes", "device", "code")


class ResultsError(Exception):
    """Why a file of results cannot be used, in one line."""


@dataclass(frozen=True)
class Result:
    """One contender at one problem: the `extra_info` of an entry."""

    kernel: str
    accuracy: str
    problem: str
    ms: float
    tflops: float
    rel_err: float
    max_abs_err: float
    peak_bytes: int | None
    device: str
    code: str
    backend: str | None = None


class Results:
    """A document of pytest-benchmark whose entries are `Result`s."""

    def __init__(self, document: dict):
        self.machine: dict = document["machine_info"]
        self.date: str = document["datetime"][:10]
        self.results = tuple(_result(benchmark) for benchmark in document["benchmarks"])
        seen = [(result.problem, result.kernel) for result in self.results]
        for place in seen:
            if seen.count(place) > 1:
                raise ResultsError(f"two entries of {place[1]} at {place[0]}")
        facts = self.machine["gpu"]
        self.device = Device(**{**facts, "cc": tuple(facts["cc"])})

    @property
    def problems(self) -> list[str]:
        return list(dict.fromkeys(result.problem for result in self.results))

    def find(self, problem: str, kernel: str) -> Result | None:
        return next((r for r in self.results if (r.problem, r.kernel) == (problem, kernel)), None)

    def ratio(self, result: Result, to: str = RATIO_TO) -> float | None:
        """Its time over that of torch's own choice, or of another baseline, measured in the same rounds."""
        base = self.find(result.problem, to)
        return result.ms / base.ms if base else None

    def why_older(self, result: Result, kernels: Sequence[Kernel]) -> str | None:
        """Why an entry says nothing about the code that is here, or None."""
        if result.kernel in EVERY_BASELINE:
            return None
        kernel = next((kernel for kernel in kernels if kernel.name == result.kernel), None)
        if kernel is None:
            return "no kernel has this name"
        problem = parse(result.problem)
        if reason := kernel.supports(problem, self.device):
            return f"it cannot serve this any more: {reason}"
        now = code_digest(kernel, problem, self.device)
        return None if now == result.code else f"its code was {result.code} and is {now}"


def _result(benchmark: dict) -> Result:
    info = benchmark["extra_info"]
    missing = [key for key in KEYS if key not in info]
    if missing:
        raise ResultsError(f"{benchmark['name']} has no {', '.join(missing)} in its extra_info")
    parse(info["problem"])
    return Result(**{key: info[key] for key in KEYS}, backend=info.get("backend"))


def load(path: Path) -> Results:
    """The results of a file. Raises `ResultsError`."""
    try:
        return Results(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from None
    except ResultsError as error:
        raise ResultsError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ResultsError(f"{path} holds no results of pytest-benchmark with GPU facts: {what}") from None
