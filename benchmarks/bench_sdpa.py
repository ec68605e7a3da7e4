"""Our kernels and torch's own choice on the same inputs, each checked against float64 and then timed.

The columns of pytest-benchmark are host times of a round. What counts is in `extra_info`: GPU time by CUDA events,
and never without the error.
"""

from __future__ import annotations

import pytest

import numba_attn
from numba_attn.cli import measure
from numba_attn.kernels import KERNELS

ROUNDS = 9


def time_checked(benchmark, call, o, problem, problem_name: str, sample: measure.Sample, **facts) -> None:
    """Time a call whose result `o` was found right."""
    rel_err, max_abs_err = sample.errors(o)
    timer = measure.Timer(call)
    benchmark.group = problem_name
    benchmark.pedantic(timer.round, rounds=ROUNDS, warmup_rounds=1)
    ms = timer.median_ms
    benchmark.extra_info.update(
        facts, ms=ms, tflops=measure.tflops(problem, ms), rel_err=rel_err, max_abs_err=max_abs_err
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernel(benchmark, kernel, problem, problem_name, inputs, sample):
    if reason := measure.why_left_out(kernel):
        pytest.skip(reason)

    def call(**options):
        return numba_attn.attention(*inputs, causal=problem.is_causal, kernel=kernel, **options)

    o, lse = call(return_lse=True)
    sample.check(o, lse, kernel.accuracy)
    time_checked(benchmark, call, o, problem, problem_name, sample)


def test_torch(benchmark, problem, problem_name, inputs, sample, torch):
    if torch is None:
        pytest.skip(measure.cuda_torch()[1])

    def call():
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=problem.is_causal)

    o = call()
    sample.check_torch(o)
    backend = measure.torch_backend(torch, *inputs, problem.is_causal)
    time_checked(benchmark, call, o, problem, problem_name, sample, backend=backend, allow_tf32=False)
