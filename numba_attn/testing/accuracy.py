"""Error measures and budgets: is a result as accurate as its class promises?

For every (batch, head), over O and over its rows i, with O64 from `reference.attention` and O32 from
`reference.attention_fp32`:

    head    ||O - O64||                      <= times ||O32 - O64||                      + unit ||O64||
    row     max_i ||O_i - O64_i|| / size_i   <= times max_i ||O32_i - O64_i|| / size_i   + unit ||O64_i|| / size_i
    lse     max_i |lse_i - lse64_i|          <= times max_i |lse32_i - lse64_i|          + unit |lse64_i|

Class `fp32` has times = 2 and unit = 2^-23. Class `tf32` has times = 2 and unit = 2^-11, and O32 and lse32 are those of
`reference.attention_tf32`, whose products are of factors with 11 significant bits instead of 24. The last term takes
the row i that is worst on the left. Two choices make the worst row mean something:

- `size_i` is the norm of row i of softmax(...) |V|, the scale of what was summed. A row of small values beside one of
  large values is judged on its own scale, and a row whose sum cancels is not judged on the accident of its remainder.
- The error of a reference with few rows is luck: with one row and one key the fp32 evaluation is often exact. Where
  a head has fewer than `MIN_ROWS` rows, errors are also drawn on copies of the inputs changed by up to 1e-3 each,
  until there are that many rows; the reference's error is then the largest of all draws.

Elements where O32 or O64 is not finite have no error. There the kind must agree: NaN, inf or -inf as in O64, or as in
O32 (exp underflows sooner in fp32, and 0 times inf is NaN). Where O64 alone is finite nothing is asked. A row with no
key left must be exactly 0, its lse -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numba_attn import reference

MIN_ROWS = 128  # rows from which the error of the reference is no longer luck
CHANGE = 1e-3  # relative change of the inputs that draws their rounding errors anew


@dataclass(frozen=True, slots=True)
class AccuracyClass:
    """Budget of a result: `times` the error of the textbook evaluation plus `unit` of the result's norm."""

    times: float
    unit: float
    evaluate: Callable = reference.attention_fp32
    """The textbook evaluation."""


CLASSES = {
    "fp32": AccuracyClass(times=2.0, unit=2.0**-23),
    "tf32": AccuracyClass(times=2.0, unit=2.0**-11, evaluate=reference.attention_tf32),
}


@dataclass
class Textbook:
    """A textbook evaluation of one call, and its errors per head."""

    o: np.ndarray
    lse: np.ndarray
    judged: np.ndarray
    """Where errors of o count: it is finite, and so is float64's."""
    judged_lse: np.ndarray
    head_error: np.ndarray | None = None
    row_error: np.ndarray | None = None
    """Of the worst row, relative to its size."""
    lse_error: np.ndarray | None = None

    def errors(self, o, lse, o64, lse64) -> tuple[np.ndarray, np.ndarray]:
        """Per row: the norm of the error of o, and the error of lse, over what is judged."""
        return _norm(_distance(o, o64, self.judged)), _distance(lse, lse64, self.judged_lse)


def assert_accurate(o, lse, q, k, v, *, accuracy: str = "fp32", **kwargs) -> None:
    """Hold a result to its accuracy class.

    Args:
        o: [..., Lq, Dv], the output to judge.
        lse: [..., Lq], its log-sum-exp (natural logarithm), or None to judge `o` alone.
        q, k, v, kwargs: the call, as `reference.attention` takes it.
        accuracy: one of `CLASSES`.

    Raises:
        AssertionError: with the first wrong element, the error measured and its budget.
        ValueError: an unknown class.
    """
    Expected(q, k, v, **kwargs).check(o, lse, accuracy=accuracy)


class Expected:
    """What a call should give: the oracle's results and the textbook's errors, for many checks of one call."""

    def __init__(self, q, k, v, *, draws: int | None = None, **kwargs):
        """Of the draws that few rows ask for, at most `draws` are made: a smaller budget, in less time."""
        self._inputs, self._kwargs = tuple(map(np.asarray, (q, k, v))), kwargs
        q, k, v = self._inputs
        self.o, self.lse = reference.attention(q, k, v, **kwargs)
        size = _norm(reference.attention(q, k, np.abs(v), **kwargs)[0])
        self.size = np.where(np.isfinite(size) & (size > 0), size, 1)
        wanted = math.ceil(MIN_ROWS / self.lse.shape[-1]) if self.o.size else 1
        self._draws = wanted if draws is None else min(wanted, draws)
        self._textbooks: dict[str, Textbook] = {}

    def textbook(self, accuracy: str = "fp32") -> Textbook:
        """The evaluation that a class is held to."""
        if accuracy not in CLASSES:
            raise ValueError(f"unknown accuracy class {accuracy!r}, known: {', '.join(CLASSES)}")
        if accuracy not in self._textbooks:
            evaluate = CLASSES[accuracy].evaluate
            o, lse = evaluate(*self._inputs, **self._kwargs)
            found = Textbook(o, lse, np.isfinite(o) & np.isfinite(self.o), np.isfinite(lse) & np.isfinite(self.lse))
            errors = [found.errors(o, lse, self.o, self.lse)]
            rng = np.random.default_rng(0)
            for _ in range(1, self._draws):
                changed = [_changed(x, rng) for x in self._inputs]
                drawn = evaluate(*changed, **self._kwargs)
                errors.append(found.errors(*drawn, *reference.attention(*changed, **self._kwargs)))
            rows, lses = zip(*errors, strict=True)
            found.head_error = np.max([_norm(row) for row in rows], axis=0)
            found.row_error = np.max([(row / self.size).max(-1, initial=0) for row in rows], axis=0)
            found.lse_error = np.max([lse.max(-1, initial=0) for lse in lses], axis=0)
            self._textbooks[accuracy] = found
        return self._textbooks[accuracy]

    def check(self, o, lse, *, accuracy: str = "fp32") -> None:
        """`assert_accurate` of one result."""
        textbook = self.textbook(accuracy)
        budget = CLASSES[accuracy]
        o, lse = np.asarray(o), textbook.lse if lse is None else np.asarray(lse)
        for name, x, x64 in (("o", o, self.o), ("lse", lse, self.lse)):
            if x.shape != x64.shape:
                raise AssertionError(f"{name} has shape {x.shape}, expected {x64.shape}")
        _check_kind("o", o, textbook.o, self.o)
        _check_kind("lse", lse, textbook.lse, self.lse)
        _raise_first("o", o, self.o, np.isneginf(self.lse)[..., None] & (o != 0), "its row has no key left")
        if not o.size:
            return

        rows, lses = textbook.errors(o, lse, self.o, self.lse)
        norms = _norm(np.where(textbook.judged, self.o, 0))
        worst = (rows / self.size).argmax(-1)
        row, norm = _at(rows / self.size, worst), _at(norms / self.size, worst)
        worst_lse = lses.argmax(-1)
        lse64 = np.where(textbook.judged_lse, np.abs(self.lse), 0)

        errors = _distance(o, self.o, textbook.judged)
        in_worst_row = np.where((np.arange(rows.shape[-1]) == worst[..., None])[..., None], errors, 0)
        self._hold("head", o, errors, _norm(rows), textbook.head_error, _norm(norms), budget)
        self._hold("worst row, relative to its size,", o, in_worst_row, row, textbook.row_error, norm, budget)
        self._hold("lse", lse, lses, _at(lses, worst_lse), textbook.lse_error, _at(lse64, worst_lse), budget)

    def _hold(self, what, x, errors, measured, error, norm, budget: AccuracyClass) -> None:
        """Raise for the first head whose measured error is over budget, showing its worst element."""
        limit = budget.times * error + budget.unit * norm
        over = np.argwhere(~(measured <= limit))
        if not len(over):
            return
        head = tuple(map(int, over[0]))
        element = (*head, *map(int, np.unravel_index(errors[head].argmax(), errors[head].shape)))
        x64 = self.lse if what == "lse" else self.o
        name = "lse" if what == "lse" else "o"
        raise AssertionError(
            f"{_element(name, element)} = {x[element]!s}, float64 gives {x64[element]!s}; {what} of head {head}: "
            f"error {measured[head]:.3e}, budget {limit[head]:.3e} "
            f"({budget.times:g} x {error[head]:.3e} of the textbook evaluation + {budget.unit:.2e} x {norm[head]:.3e})"
        )


def _check_kind(name: str, x: np.ndarray, x32: np.ndarray, x64: np.ndarray) -> None:
    """NaN, inf, -inf or finite, as in float64 or else in fp32; free where fp32 alone fails."""
    wrong = ~_same_kind(x, x64) & ~_same_kind(x, x32) & ~(np.isfinite(x64) & ~np.isfinite(x32))
    _raise_first(name, x, x64, wrong, f"{np.count_nonzero(wrong)} elements differ in kind (finite, NaN, inf)")


def _same_kind(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(y), np.isfinite(x), (np.isnan(x) & np.isnan(y)) | (x == y))


def _raise_first(name: str, x: np.ndarray, x64: np.ndarray, wrong: np.ndarray, why: str) -> None:
    if wrong.any():
        element = tuple(map(int, np.argwhere(wrong)[0]))
        raise AssertionError(f"{_element(name, element)} = {x[element]!s}, float64 gives {x64[element]!s}; {why}")


def _element(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}]"


def _changed(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (x * (1 + rng.uniform(0, CHANGE, x.shape))).astype(x.dtype)


def _distance(x: np.ndarray, x64: np.ndarray, judged: np.ndarray) -> np.ndarray:
    judged = judged & np.isfinite(x) & np.isfinite(x64)
    return np.abs(np.subtract(x, x64, where=judged, out=np.zeros(x64.shape)))


def _norm(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(np.square(x, dtype=np.float64), axis=-1))


def _at(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, np.asarray(index)[..., None], -1)[..., 0]
