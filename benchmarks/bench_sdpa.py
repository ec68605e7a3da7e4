"""Our kernels and torch's backends on the same inputs, each checked against float64 and then timed in turns.

All contenders of a problem are measured together; each test reports its share. The statistics are over the GPU times
of its rounds, and the error stands beside them in `extra_info`.
"""

from __future__ import annotations

import pytest

from numba_attn.bench.document import DeviceClock

clock = DeviceClock()


@pytest.mark.benchmark(timer=clock)
def test_contender(benchmark, measured, contender):
    entry = next(entry for entry in measured.entries if entry.name == contender)
    if entry.outcome == "refused":
        pytest.skip(entry.why)
    assert entry.outcome == "timed", f"{entry.outcome}: {entry.why}"
    benchmark.group = measured.known.full_name
    benchmark.extra_info.update(measured.extra_info(entry))
    clock.load(entry.rounds_ms)
    benchmark.pedantic(clock.replay, setup=clock.rewind, rounds=len(entry.rounds_ms))
