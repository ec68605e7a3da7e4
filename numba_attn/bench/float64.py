"""Is a result right: sampled heads and rows by numpy's float64, and every element by torch's on the GPU."""

from __future__ import annotations

import math

import numpy as np

from numba_attn import testing
from numba_attn.problem import Problem

HEADS = 2
ROW_WORK = 1 << 29  # products of one head's sampled rows: about half a second of numpy
DRAW_WORK = 1 << 27  # elements of K and V in all draws of the reference's error
TOLERANCES = {"fp32": 1e-4, "tf32": 5e-3}  # absolute and relative: is it the same attention, not is it as accurate
STEP = 1 << 26  # elements of an array that torch holds at once in float64


class Sample:
    """The first and the last head of a call in float64 (`numba_attn.reference`, from copies on the host).

    Of long heads some rows, spread evenly from the first to the last: all keys count for each.
    """

    def __init__(self, q, k, v, problem: Problem):
        numbers = np.linspace(0, problem.B * problem.H - 1, HEADS).astype(int)
        self.heads = [divmod(int(number), problem.H) for number in dict.fromkeys(numbers)]
        most = max(testing.MIN_ROWS, ROW_WORK // (problem.Lk * (problem.D + problem.Dv)))
        self.rows = np.linspace(0, problem.Lq - 1, min(most, problem.Lq)).astype(int)
        mask = np.arange(problem.Lk) <= self.rows[:, None] if problem.is_causal else None
        elements = len(self.heads) * problem.Lk * (problem.D + problem.Dv)
        draws = max(4, DRAW_WORK // elements)
        self.expected = testing.Expected(self.of_rows(q), self._of(k), self._of(v), mask=mask, draws=draws)

    def check(self, o, lse, accuracy: str) -> None:
        """Raise AssertionError unless the sample is as accurate as the class promises; without lse, O alone."""
        lse = None if lse is None else self.of_rows(lse)
        try:
            self.expected.check(self.of_rows(o), lse, accuracy=accuracy)
        except AssertionError as error:
            # The oracle counts the sampled heads and rows as 0, 1, ...
            raise AssertionError(f"of the heads {self.heads}, {self.described_rows}: {error}") from None

    def check_close(self, o, accuracy: str = "fp32") -> None:
        """Raise AssertionError unless the sample is close to float64."""
        tolerance = TOLERANCES[accuracy]
        np.testing.assert_allclose(self.of_rows(o), self.expected.o, rtol=tolerance, atol=tolerance)

    def errors(self, o) -> tuple[float, float]:
        """||O - O64|| / ||O64|| of the worst head, and max |O - O64|."""
        difference = self.of_rows(o) - self.expected.o
        relative = np.linalg.norm(difference, axis=(1, 2)) / np.linalg.norm(self.expected.o, axis=(1, 2))
        return float(relative.max()), float(np.abs(difference).max())

    @property
    def described_rows(self) -> str:
        return f"{len(self.rows)} rows from 0 to {self.rows[-1]}"

    def of_rows(self, array) -> np.ndarray:
        """The sampled rows of the sampled heads of an array on the GPU."""
        return self._of(array)[:, self.rows]

    def _of(self, array) -> np.ndarray:
        heads = (array[b, h] for b, h in self.heads)
        return np.stack([head.cpu().numpy() if hasattr(head, "cpu") else head.copy_to_host() for head in heads])


def check_everywhere(torch, q, k, v, o, is_causal: bool, accuracy: str = "fp32") -> None:
    """Raise AssertionError unless every element of O is close to torch's float64 products, softmax and sums."""
    Lq, Lk = q.shape[-2], k.shape[-2]
    q, k, v, o = (x.flatten(0, 1) for x in (q, k, v, o))
    elements = max(Lq * Lk, max(Lq, Lk) * max(q.shape[-1], v.shape[-1]))  # the largest array of one head
    heads, rows = max(1, STEP // elements), max(1, min(Lq, STEP // Lk))
    for h in range(0, len(q), heads):
        at = slice(h, h + heads)
        keys, values = k[at].double(), v[at].double()
        for m in range(0, Lq, rows):
            S = q[at, m : m + rows].double() @ keys.mT / math.sqrt(q.shape[-1])
            if is_causal:
                row = torch.arange(m, min(m + rows, Lq), device=S.device)
                S.masked_fill_(torch.arange(Lk, device=S.device) > row[:, None], -math.inf)
            o64 = torch.softmax(S, -1) @ values
            excess = (o[at, m : m + rows] - o64).abs() - TOLERANCES[accuracy] * (1 + o64.abs())
            if not excess.max() <= 0:  # NaN is no result either
                raise AssertionError(_first_far(excess, h, m))


def _first_far(excess, h: int, m: int) -> str:
    head, row, column = ((~(excess <= 0)).nonzero()[0]).tolist()
    return f"far from torch's float64, first in head {h + head} of all, row {m + row}, column {column}"
