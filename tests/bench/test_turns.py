"""Contract: rounds are long enough, everybody has a turn in each, and slow contenders have fewer."""

from __future__ import annotations

from collections import Counter

import pytest

from numba_attn import launch
from numba_attn.bench import turns
from numba_attn.bench.turns import MAX_ROUNDS, MIN_ROUNDS, Clock, rounds_for, take_turns


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which each call takes what it returns, and the first launch of an idle GPU 0.02 ms more."""
    log = []

    def elapsed_ms(work, calls=1):
        times = [work() for _ in range(calls)]
        log.append((calls, sum(times)))
        return (sum(times) + 0.02) / calls

    monkeypatch.setattr(launch, "elapsed_ms", elapsed_ms)
    return log


@pytest.mark.parametrize("ms", [0.004, 0.05, 0.3, 0.999, 1.0, 7.0, 250.0])
def test_a_round_lasts_a_millisecond(gpu, ms):
    clock = Clock(lambda: ms)
    assert clock.calls == 1 or clock.calls * ms >= 0.85
    assert clock.calls * ms < max(1.3, 1.01 * ms)
    clock.round()
    assert gpu[-1] == (clock.calls, pytest.approx(clock.calls * ms))
    assert clock.round_ms == pytest.approx(clock.calls * ms, rel=0.15)


@pytest.mark.parametrize(("ms", "untimed"), [(0.5, 1), (9.0, 1), (11.0, 0)])
def test_the_gpu_is_busy_while_the_host_queues_a_short_round(gpu, ms, untimed):
    calls = []
    clock = Clock(lambda: calls.append(ms) or ms)
    calls.clear()
    clock.round()
    assert len(calls) == clock.calls + untimed


def test_calls_are_made_in_their_context(gpu):
    log = []

    class Entered:
        def __enter__(self):
            log.append("in")

        def __exit__(self, *_):
            log.append("out")

    clock = Clock(lambda: log.append("call") or 20.0, Entered)
    clock.round()
    assert log == ["in", "call", "out"] * 2


def test_the_median_counts(gpu):
    times = iter([10.0, 20, 50, 30, 100, 40, 100])
    clock = Clock(lambda: next(times))
    for _ in range(5):
        clock.round()
    assert clock.median_ms == pytest.approx(40.02)
    assert clock.rounds_ms == pytest.approx([20.02, 50.02, 30.02, 100.02, 40.02])


def test_numbers_of_rounds():
    assert rounds_for(28.0, 1.25) == MAX_ROUNDS
    assert rounds_for(170.0, 1.25) == 7
    assert rounds_for(250.0, 1.25) == 5
    assert rounds_for(5000.0, 1.25) == MIN_ROUNDS
    assert all(rounds_for(ms, share) % 2 for ms in (1, 30, 77, 123, 400) for share in (0.01, 0.5, 1, 2, 10))


def test_turns(gpu):
    order = []

    def contender(name, ms):
        return Clock(lambda: order.append(name) or ms)

    clocks = [contender("a", 20.0), contender("b", 30.0), contender("slow", 200.0)]
    order.clear()
    parts = [part for part, _ in take_turns(clocks, budget_s=3.3)]
    assert Counter(order) == {"a": 25, "b": 25, "slow": 5}
    assert [len(clock.rounds_ms) for clock in clocks] == [25, 25, 5]
    rounds = "".join(name[0] for name in order)
    assert rounds.replace("s", "") == "abba" * 12 + "ab"  # every second round goes backwards
    gaps = [len(gap) for gap in rounds.split("s")]
    assert all(8 <= gap <= 12 for gap in gaps[:-1])  # spread over the others' rounds
    assert parts == sorted(parts)
    assert (parts[0], parts[-1] < 1) == (0, True)


def test_the_budget_is_about_kept(gpu):
    clocks = [Clock(lambda ms=ms: ms) for ms in (25.0, 25.0, 28.0, 150.0, 200.0, 400.0)]
    gpu.clear()
    assert len(list(take_turns(clocks, budget_s=6.0))) == sum(len(clock.rounds_ms) for clock in clocks)
    assert 3000 < sum(ms for _, ms in gpu) < 6600


def test_nobody():
    assert list(turns.take_turns([], 1.0)) == []
