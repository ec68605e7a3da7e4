"""GPU times of several contenders in turns: each is timed once a round, and the median over the rounds counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from statistics import median

from numba_attn import launch

SHORT_MS = 1.0  # a round of shorter calls has several of them, or the events' own resolution would show
LEAD_IN_MS = 10.0  # up to which the host's work before the first launch would show
MIN_ROUNDS, MAX_ROUNDS = 3, 25


class Clock:
    """GPU times of one contender's calls in milliseconds, by events on the default stream."""

    def __init__(self, work: Callable[[], object], entered: Callable = nullcontext):
        self._work = work
        self._entered = entered
        self.rounds_ms: list[float] = []
        self.calls = 1
        with entered():
            ms = launch.elapsed_ms(work)
            if ms < SHORT_MS:
                # Calls in a row, so that the host's time for the first is not taken for the GPU's.
                self.calls = calls_for(ms)
                ms = launch.elapsed_ms(work, calls=self.calls)
                self.calls = calls_for(ms)
        self.round_ms = ms * self.calls
        """Expected time of a round."""

    def round(self) -> None:
        with self._entered():
            if self.round_ms < LEAD_IN_MS:
                self._work()  # keeps the GPU busy while the host queues what is timed
            self.rounds_ms.append(launch.elapsed_ms(self._work, calls=self.calls))

    @property
    def median_ms(self) -> float:
        return median(self.rounds_ms)


def calls_for(ms: float) -> int:
    return math.ceil(SHORT_MS / max(ms, 1e-3))


def rounds_for(round_ms: float, share_s: float) -> int:
    """Rounds that a share of the budget pays for: an odd number, so that the median is one of them."""
    rounds = min(max(int(share_s * 1e3 / round_ms), MIN_ROUNDS), MAX_ROUNDS)
    return rounds - 1 + rounds % 2


def take_turns(clocks: Sequence[Clock], budget_s: float) -> Iterator[tuple[float, int]]:
    """Time all, within about `budget_s` seconds; yields the part that is done, and whose turn is next.

    Each has an equal share of the budget, so that slow ones have fewer rounds, spread over those of the others. Every
    second round goes backwards: nobody always follows the same neighbour.
    """
    wanted = [rounds_for(clock.round_ms, budget_s / len(clocks)) for clock in clocks]
    most = max(wanted, default=0)
    total_ms = sum(rounds * clock.round_ms for rounds, clock in zip(wanted, clocks, strict=True))
    done_ms = 0.0
    for number in range(most):
        due = [i for i, rounds in enumerate(wanted) if (number + 1) * rounds // most > number * rounds // most]
        for i in due if number % 2 == 0 else reversed(due):
            yield done_ms / total_ms, i
            clocks[i].round()
            done_ms += clocks[i].round_ms
