"""Measurements as pytest-benchmark's own JSON: its statistics over the GPU times of the rounds, in seconds.

`python -m numba_attn bench --json` fills pytest-benchmark's records here; `pytest benchmarks --benchmark-json` has them
filled by pytest-benchmark, from the same rounds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from numba_attn import launch, versions
from numba_attn.bench.measure import Entry, Measurement

MISSING = "pytest-benchmark is not installed: pip install 'numba_attn[bench]'"


def why_unavailable() -> str | None:
    """One line that says why no document can be made here, or None."""
    return None if find_spec("pytest_benchmark") else MISSING


class DeviceClock:
    """A timer for pytest-benchmark that shows GPU time: of rounds that were measured before and are now replayed."""

    def __init__(self):
        self._now = 0.0
        self._rounds = iter(())

    def __call__(self) -> float:
        return self._now

    def load(self, rounds_ms: Sequence[float]) -> None:
        self._rounds = iter(rounds_ms)

    def rewind(self) -> None:
        """So that differences are exact."""
        self._now = 0.0

    def replay(self) -> None:
        self._now += next(self._rounds) / 1e3


def machine_facts() -> dict:
    """What a result depends on beside the code: versions of packages, GPU, driver."""
    facts = {"packages": versions.report(), "toolkit": _toolkit_versions()}
    if launch.device_count():
        facts["gpu"] = asdict(launch.device_facts(0))
        facts["driver_cuda"] = ".".join(map(str, launch.driver_version()))
    return facts


def _toolkit_versions() -> dict[str, str]:
    return {name: found.partition(" ")[0] for name, found in versions.toolkit_report().items()}


def complete_machine_info(machine_info: dict) -> None:
    """Add what counts to pytest-benchmark's facts, and leave out the name of the machine."""
    machine_info.pop("node", None)
    machine_info.update(machine_facts())


def complete_commit_info(commit_info: dict) -> None:
    """The project's name, whatever the folder is called."""
    commit_info["project"] = "numba_attn"


@cache
def _host_facts() -> dict:
    """pytest-benchmark's own facts; it takes a second to find them."""
    from pytest_benchmark import plugin

    return plugin.pytest_benchmark_generate_machine_info()


def name_of(measured: Measurement, entry: Entry) -> str:
    return f"test_contender[{measured.known.name}-{entry.name}]"


def document(measurements: Sequence[Measurement]) -> dict:
    """The document that pytest-benchmark writes of these results."""
    from pytest_benchmark import plugin
    from pytest_benchmark.utils import get_commit_info

    machine_info = {**_host_facts()}
    complete_machine_info(machine_info)
    commit_info = get_commit_info()
    complete_commit_info(commit_info)
    records = [_record(measured, entry) for measured in measurements for entry in measured.timed]
    return plugin.pytest_benchmark_generate_json(
        config=None,
        benchmarks=records,
        include_data=True,
        machine_info=machine_info,
        commit_info=commit_info,
    )


def _record(measured: Measurement, entry: Entry):
    """pytest-benchmark's own record of one contender."""
    from pytest_benchmark.stats import Metadata

    name, short = name_of(measured, entry), measured.known.name
    fixture = SimpleNamespace(
        name=name,
        fullname=f"benchmarks/bench_sdpa.py::{name}",
        group=measured.known.full_name,
        param=name.partition("[")[2].rstrip("]"),
        params={"problem": short, "contender": entry.name},
        extra_info=measured.extra_info(entry),
        cprofile_stats=None,
        has_error=False,
    )
    options = {"disable_gc": False, "timer": "GPU events", "min_rounds": len(entry.rounds_ms), "warmup": False}
    record = Metadata(fixture, iterations=1, options=options)
    for ms in entry.rounds_ms:
        record.update(ms / 1e3)
    return record


def write(path: Path, measurements: Sequence[Measurement]) -> None:
    path.write_text(json.dumps(document(measurements), indent=4) + "\n", encoding="utf-8")
