"""What the demo and `bench` show of one problem's contenders."""

from __future__ import annotations

from numba_attn.bench.contenders import EVERY_BASELINE, torch_label
from numba_attn.bench.measure import Entry, Measurement, tflops
from numba_attn.bench.tables import significant
from numba_attn.cli.screen import one_line, table

HEADER = ("kernel", "ms", "TFLOP/s", "rel. error", "time / torch's", "peak MB", "workspace MB")


def measured_table(measured: Measurement) -> str:
    """A row for each contender: no time where the result is wrong."""
    return table(HEADER, [_row(measured, entry) for entry in measured.entries])


def _row(measured: Measurement, entry: Entry) -> tuple[str, ...]:
    if entry.outcome != "timed":
        return entry.name, entry.outcome, "", "", "", "", ""
    ratio = measured.ratio(entry)
    return (
        label(entry),
        significant(entry.ms),
        f"{tflops(measured.known.problem, entry.ms):.1f}",
        f"{entry.rel_err:.1e}",
        "" if ratio is None else f"{ratio:.2f}",
        _megabytes(entry.peak_bytes),
        _megabytes(entry.workspace_bytes),
    )


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.1f}"


def label(entry: Entry) -> str:
    """Its name; for torch also the version and the backend that served, for a kernel its class where it is not fp32."""
    if entry.name in EVERY_BASELINE:
        return torch_label(entry.name, entry.contender.code, entry.facts.get("backend"))
    return entry.name if entry.contender.accuracy == "fp32" else f"{entry.name} ({entry.contender.accuracy})"


def fault_lines(measured: Measurement) -> list[str]:
    """Why each contender without a time has none."""
    without = (entry for entry in measured.entries if entry.outcome != "timed")
    return [f"{entry.outcome.upper()} {entry.name}: {one_line(entry.why)}" for entry in without]
