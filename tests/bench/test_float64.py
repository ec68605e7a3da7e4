"""Contract: a wrong result is found, in the sample by its accuracy class and everywhere by its size."""

from __future__ import annotations

import numpy as np
import pytest

from numba_attn import reference, testing
from numba_attn.bench import float64
from numba_attn.bench.float64 import Sample, check_everywhere
from numba_attn.bench.problems import make_problem


class OnHost:
    """An array that is copied to the host a head at a time, as one of Numba's is."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        return OnHost(self.array[index])

    def copy_to_host(self):
        return self.array


@pytest.fixture(params=[False, True], ids=["full", "causal"])
def call(request, rng):
    problem = make_problem(2, 3, 40, 56, 8, 12, is_causal=request.param)
    q, k, v = (rng.standard_normal((2, 3, *size), dtype=np.float32) for size in ((40, 8), (56, 8), (56, 12)))
    o, lse = reference.attention_fp32(q, k, v, causal=problem.is_causal)
    return problem, (q, k, v), o, lse


def sample_of(problem, inputs) -> Sample:
    return Sample(*map(OnHost, inputs), problem)


def test_a_right_result(call):
    problem, inputs, o, lse = call
    sample = sample_of(problem, inputs)
    assert sample.heads == [(0, 0), (1, 2)]
    sample.check(OnHost(o), OnHost(lse), "fp32")
    sample.check_close(OnHost(o))
    o64, _ = reference.attention(*inputs, causal=problem.is_causal)
    relative = [np.linalg.norm(o[head] - o64[head]) / np.linalg.norm(o64[head]) for head in sample.heads]
    worst = max(np.abs(o[head] - o64[head]).max() for head in sample.heads)
    assert sample.errors(OnHost(o)) == pytest.approx((max(relative), worst))


def test_a_wrong_result(call):
    problem, inputs, o, lse = call
    sample = sample_of(problem, inputs)
    o[1, 2, 7, 3] += 1e-5
    with pytest.raises(
        AssertionError, match=r"of the heads \[\(0, 0\), \(1, 2\)\], 40 rows from 0 to 39: o\[1, 7, 3\]"
    ):
        sample.check(OnHost(o), OnHost(lse), "fp32")
    sample.check_close(OnHost(o))
    o[0, 0, 0, 0] = np.nan
    with pytest.raises(AssertionError):
        sample.check_close(OnHost(o))


def test_a_result_of_class_tf32(call):
    problem, inputs, _, _ = call
    sample = sample_of(problem, inputs)
    o, lse = reference.attention_tf32(*inputs, causal=problem.is_causal)
    sample.check(OnHost(o), OnHost(lse), "tf32")
    sample.check_close(OnHost(o), "tf32")
    for too_strict in (lambda: sample.check(OnHost(o), OnHost(lse), "fp32"), lambda: sample.check_close(OnHost(o))):
        with pytest.raises(AssertionError):
            too_strict()
    o[1, 2, 7, 3] += 0.02
    for wrong in (lambda: sample.check(OnHost(o), OnHost(lse), "tf32"), lambda: sample.check_close(OnHost(o), "tf32")):
        with pytest.raises(AssertionError):
            wrong()


def test_a_wrong_lse(call):
    problem, inputs, o, lse = call
    lse[0, 0, 3] *= 1.01
    with pytest.raises(AssertionError, match="lse"):
        sample_of(problem, inputs).check(OnHost(o), OnHost(lse), "fp32")


def test_rows_of_long_heads_are_sampled_with_all_their_keys(call, monkeypatch):
    problem, inputs, o, lse = call
    monkeypatch.setattr(testing, "MIN_ROWS", 5)
    monkeypatch.setattr(float64, "ROW_WORK", 7 * 56 * 20)
    sample = sample_of(problem, inputs)
    assert sample.rows.tolist() == [0, 6, 13, 19, 26, 32, 39]
    o64, lse64 = reference.attention(*inputs, causal=problem.is_causal)
    np.testing.assert_allclose(sample.expected.o, np.stack([o64[0, 0], o64[1, 2]])[:, sample.rows])
    np.testing.assert_allclose(sample.expected.lse, np.stack([lse64[0, 0], lse64[1, 2]])[:, sample.rows])
    sample.check(OnHost(o), OnHost(lse), "fp32")
    monkeypatch.setattr(float64, "ROW_WORK", 0)
    assert len(sample_of(problem, inputs).rows) == 5


def test_few_rows_with_many_keys_take_fewer_draws(monkeypatch):
    drawn = []
    monkeypatch.setattr(testing, "Expected", lambda *arrays, draws, mask: drawn.append(draws))
    for Lk in (64, 4096, 65536):
        array = OnHost(np.broadcast_to(np.float32(0), (1, 32, Lk, 128)))
        Sample(OnHost(array.array[:, :, :1]), array, array, make_problem(1, 32, 1, Lk, 128, 128))
    assert drawn[0] > testing.MIN_ROWS > drawn[1] > drawn[2] == 4


def test_fewer_draws_never_widen_the_budget():
    inputs = testing.make_inputs(testing.Case(1, 2, 1, 40, 8, 8))
    whole, few = testing.Expected(*inputs), testing.Expected(*inputs, draws=4)
    whole, few, one = whole.textbook(), few.textbook(), testing.Expected(*inputs, draws=1).textbook()
    for name in ("head_error", "row_error", "lse_error"):
        assert (getattr(few, name) <= getattr(whole, name)).all()
        assert (getattr(few, name) >= getattr(one, name)).all()
    assert (few.row_error < whole.row_error).any()


@pytest.mark.parametrize("step", [1, 100, 40 * 56 * 4, 1 << 20])
def test_everywhere(call, monkeypatch, step):
    torch = pytest.importorskip("torch")
    problem, inputs, o, _ = call
    monkeypatch.setattr(float64, "STEP", step)
    tensors = [torch.from_numpy(x) for x in inputs]
    check_everywhere(torch, *tensors, torch.from_numpy(o), problem.is_causal)
    for value in (o[1, 1, 20, 3] + 1e-3, np.nan, np.inf):
        wrong = o.copy()
        wrong[1, 1, 20, 3] = value
        with pytest.raises(AssertionError, match="first in head 4 of all, row 20, column 3"):
            check_everywhere(torch, *tensors, torch.from_numpy(wrong), problem.is_causal)
