"""Contract: a contender is timed only if its result is right, and what is kept of it is what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_gpu import FIRST, LAST, NO_TORCH

from numba_attn import launch
from numba_attn.bench import contenders, digest, inputs, measure
from numba_attn.bench.problems import NamedProblem, make_problem
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200

KNOWN = NamedProblem(make_problem(2, 3, 40, 56, 8, 12, is_causal=True), "small")
NAMES = [kernel.name for kernel in KERNELS]


def measured(names=(*NAMES, *contenders.BASELINES), budget_s=0.05, **options):
    return measure.measure(KNOWN, contenders.by_names(KNOWN, names, H200), budget_s, **options)


def entry_of(measurement, name):
    (entry,) = [entry for entry in measurement.entries if entry.name == name]
    return entry


def test_without_torch(fake_gpu):
    fake_gpu.ms = {FIRST: 0.25, LAST: 2.0}
    result = measured()
    assert [entry.name for entry in result.entries] == [*NAMES, *contenders.BASELINES]
    assert [entry.name for entry in result.timed] == NAMES
    assert {entry.why for entry in result.entries[len(NAMES) :]} == {NO_TORCH}
    assert result.faults == []
    assert (entry_of(result, FIRST).ms, entry_of(result, LAST).ms) == (0.25, 2.0)
    info = result.extra_info(result.timed[0])
    assert {"kernel": FIRST, "accuracy": "fp32", "device": "NVIDIA H200", "peak_bytes": None}.items() <= info.items()
    assert info["problem"] == "b2_h3_q40_k56_d8_v12_fp32_causal"
    assert info["code"] == digest.code_digest(KERNELS[0], KNOWN.problem, H200)
    assert info["tflops"] == pytest.approx(2 * 6 * 40 * 41 / 2 * 20 / 0.25e-3 / 1e12)
    assert 1e-8 < info["rel_err"] < 1e-6
    assert 1e-8 < info["max_abs_err"] < 1e-5
    assert result.ratio(result.timed[0]) is None


def test_with_torch(fake_gpu_with_torch):
    fake_gpu_with_torch.ms = {"torch": 0.5, FIRST: 0.25}
    result = measured()
    default, math, efficient = (entry_of(result, name) for name in contenders.BASELINES)
    torch = fake_gpu_with_torch.torch
    assert (default.outcome, math.outcome, efficient.outcome) == ("timed", "timed", "refused")
    assert (default.contender.code, math.facts["backend"]) == (torch.__version__, "math")
    assert default.facts["backend"] in ("math", "flash_attention", "efficient_attention")
    assert default.facts["allow_tf32"] is False
    assert result.faults == []
    assert result.ratio(entry_of(result, FIRST)) == 0.5
    assert result.ratio(default) == 1
    info = result.extra_info(entry_of(result, FIRST))
    assert info["peak_bytes"] == 10_000_000
    assert info["workspace_bytes"] == 10_000_000 - 4 * 6 * 40 * 12
    assert result.extra_info(math)["backend"] == "math"


def test_tf32_is_off_while_measuring_whatever_the_flags_say(fake_gpu_with_torch):
    matmul = fake_gpu_with_torch.torch.backends.cuda.matmul
    before, seen = matmul.allow_tf32, []
    fake_gpu_with_torch.damage = lambda name, o, lse: seen.append(matmul.allow_tf32)
    matmul.allow_tf32 = True
    try:
        measured()
        assert matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before
    assert seen
    assert not any(seen)


def test_precision_tf32(fake_gpu_with_torch):
    """Each contender says what it delivers; TF32 is on for torch where that is asked for, and for nothing else."""
    torch, known = fake_gpu_with_torch.torch, replace(KNOWN, problem=replace(KNOWN.problem, precision="tf32"))
    matmul, seen = torch.backends.cuda.matmul, {}
    fake_gpu_with_torch.damage = lambda name, o, lse: seen.setdefault(name, matmul.allow_tf32)
    names = contenders.standard_names(known, H200)
    assert names[-1] == "torch_math_tf32" and "torch_math_tf32" not in contenders.standard_names(KNOWN, H200)
    result = measure.measure(known, contenders.by_names(known, [*NAMES, *names], H200), 0.05)
    classes = {entry.name: entry.contender.accuracy for entry in result.entries}
    one_product = ("flash_split_half_sm80", "flash_split_half_sm90", "unfused_split_half_sm90", "torch_math_tf32")
    assert classes == dict.fromkeys(classes, "fp32") | dict.fromkeys(one_product, "tf32")
    info = result.extra_info(entry_of(result, "flash_split_half_sm80"))
    assert (info["accuracy"], info["problem"]) == ("tf32", "b2_h3_q40_k56_d8_v12_tf32_causal")
    tf32 = entry_of(result, "torch_math_tf32")
    assert (tf32.outcome, tf32.facts) == ("timed", {"backend": "math", "allow_tf32": True})
    assert entry_of(result, "torch_math").facts["allow_tf32"] is False
    assert seen and not any(seen.values())


def test_less_than_the_problem_asks_for_is_refused(fake_gpu_with_torch):
    (entry,) = measured(["torch_math_tf32"]).entries
    assert (entry.outcome, entry.why) == ("refused", "it is of class tf32, the problem asks for fp32")


@pytest.mark.parametrize("torch", [False, True])
def test_a_wrong_result_gets_no_time(request, torch):
    gpu = request.getfixturevalue("fake_gpu_with_torch" if torch else "fake_gpu")

    def damage(name, o, lse):
        o[0, 0, 3, 4] += name == FIRST

    gpu.damage = damage
    result = measured()
    entry = entry_of(result, FIRST)
    assert (entry.outcome, entry.rounds_ms, result.faults) == ("wrong", [], [entry])
    assert entry.why.startswith("of the heads [(0, 0), (1, 2)], 40 rows from 0 to 39: o[0, 3, 4] = ")
    assert entry_of(result, LAST).outcome == "timed"


def test_a_result_that_is_wrong_outside_the_sample(fake_gpu_with_torch):
    def damage(name, o, lse):
        o[0, 1, 39, 11] += 1e-3 * (name == FIRST)

    fake_gpu_with_torch.damage = damage
    entry = entry_of(measured(), FIRST)
    assert entry.outcome == "wrong"
    assert entry.why == "far from torch's float64, first in head 1 of all, row 39, column 11"


def test_a_kernel_that_writes_nothing_is_wrong(fake_gpu, monkeypatch):
    right = fake_gpu.attention

    def lazy(*arrays, out=None, **options):
        result = right(*arrays, **options, out=np.empty_like(out) if out is not None else None)
        return (out, result[1]) if out is not None else result

    monkeypatch.setattr(contenders.api, "attention", lazy)
    assert {entry.outcome for entry in measured(NAMES).entries} == {"wrong"}


def test_contenders_that_raise(fake_gpu, monkeypatch):
    def attention(*arrays, kernel, **options):
        if kernel.name == FIRST:
            raise MemoryError("no room")
        raise ValueError("kernel cannot serve this call: no arrays of torch")

    monkeypatch.setattr(contenders.api, "attention", attention)
    result = measured()
    first, last = entry_of(result, FIRST), entry_of(result, LAST)
    assert (first.outcome, first.why) == ("failed", "MemoryError: no room")
    assert (last.outcome, last.why) == ("refused", "kernel cannot serve this call: no arrays of torch")
    assert result.faults == [first]


def test_with_torch_no_kernel_may_refuse_by_raising(fake_gpu_with_torch, monkeypatch):
    def attention(*arrays, **options):
        raise ValueError("bad config")

    monkeypatch.setattr(contenders.api, "attention", attention)
    assert [entry.why for entry in measured(NAMES).faults] == ["ValueError: bad config"] * len(NAMES)


def test_contenders_that_fail_when_they_are_timed(fake_gpu, monkeypatch):
    right = fake_gpu.attention

    def attention(*arrays, kernel, return_lse=False, **options):
        if kernel.name == FIRST and not return_lse:
            raise RuntimeError("lost")
        return right(*arrays, kernel=kernel, return_lse=return_lse, **options)

    monkeypatch.setattr(contenders.api, "attention", attention)
    result = measured()
    assert (entry_of(result, FIRST).outcome, entry_of(result, LAST).outcome) == ("failed", "timed")


def test_what_a_kernel_refuses_is_not_called(fake_gpu):
    kernel = replace(KERNELS[0], supports=lambda problem, device: "not today")
    (contender,) = contenders.contenders(KNOWN.problem, [kernel], [], H200)
    (entry,) = measure.measure(KNOWN, [contender]).entries
    assert (entry.outcome, entry.why, fake_gpu.calls) == ("refused", "not today", [])


def test_consecutive_calls_take_consecutive_sets(fake_gpu, monkeypatch):
    monkeypatch.setattr(inputs, "CACHES", 3)
    size = 4 * 6 * (40 * 8 + 56 * 20)
    monkeypatch.setattr(launch, "device_facts", lambda index: replace(H200, l2_bytes=size))
    result = measured(NAMES)
    assert result.input_sets == 3
    for name in NAMES:
        sets = [address for called, address in fake_gpu.calls[len(NAMES) :] if called == name]
        assert len(set(sets)) == 3
        assert all(one != other for one, other in zip(sets, sets[1:], strict=False))


def test_all_contenders_take_turns(fake_gpu):
    fake_gpu.ms = dict.fromkeys(NAMES, 20.0)  # one call a round
    measured(NAMES, budget_s=0.02 * len(NAMES) * 5.5)
    timed = [name for name, _ in fake_gpu.calls[2 * len(NAMES) :]]
    assert timed == NAMES + NAMES[::-1] + NAMES + NAMES[::-1] + NAMES


def test_progress(fake_gpu):
    shown = []
    measured(progress=lambda part, text: shown.append((part, text)))
    parts = [part for part, _ in shown]
    assert parts == sorted(parts)
    assert parts[0] == 0
    assert 0.9 < parts[-1] < 1
    assert {f"{FIRST}: check", f"{LAST}: time"} <= {text for _, text in shown}


def test_a_problem_that_does_not_fit(fake_gpu, monkeypatch):
    monkeypatch.setattr(launch, "free_bytes", lambda index: 1000)
    with pytest.raises(measure.DoesNotFitError, match=r"small needs 0.0 GB more than the 0.0 GB free"):
        measured()


@pytest.mark.gpu
def test_on_a_gpu():
    names = (*NAMES, *contenders.BASELINES)
    facts = launch.device_facts(0)
    known = NamedProblem(make_problem(2, 3, 65, 130, 72, 72), "small")
    result = measure.measure(known, contenders.by_names(known, names, facts), budget_s=0.1)
    assert result.faults == []
    able = {kernel.name for kernel in KERNELS if kernel.supports(known.problem, facts) is None}
    assert {"torch_default", "torch_math", *able} <= {entry.name for entry in result.timed}
    assert result.input_sets > 1
    for entry in result.timed:
        info = result.extra_info(entry)
        assert 1e-3 < info["ms"] < 100
        assert info["rel_err"] < 1e-5
        assert info["peak_bytes"] >= 4 * 6 * 65 * 72
    assert entry_of(result, "torch_math").facts["backend"] == "math"
    assert entry_of(result, "torch_math").workspace_bytes >= 4 * 6 * 65 * 130
