"""Contract: every registered kernel gives attention of its accuracy class, O and lse, on the whole matrix.

The matrix is `numba_attn.testing.small_cases` in the simulator, at each kernel's smallest tiles, and `testing.cases`
on a GPU. A kernel skips only what its own `supports` refuses, with the reason shown.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import numba_attn
from numba_attn import sim, testing
from numba_attn.choice import choose
from numba_attn.kernels import KERNELS, split_keys_fp32
from numba_attn.problem import H200, PRECISIONS, Device, Problem
from numba_attn.testing import LAYOUTS, Case, accuracy

SMALL_GPU = Device("a GPU with 99 KB of shared memory a block", (8, 9), 128, 99 * 1024, 72 * 1024 * 1024)

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)

# A library's product may sum in another order for another layout.
each_with_own_products = pytest.mark.parametrize(
    "kernel", [kernel for kernel in KERNELS if not kernel.uses_matmul], ids=lambda kernel: kernel.name
)


def each_case(cases):
    """One test a case; under xdist the kernels' tests of one case share a worker, and so what is expected."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(str(case))) for case in cases]
    )


@functools.cache
def expected(case: Case) -> testing.Expected:
    return testing.Expected(*testing.make_inputs(case), **case.kwargs)


def skip_refused(kernel, case: Case, device: Device = H200) -> None:
    if reason := kernel.supports(case.problem, device):
        pytest.skip(f"{kernel.name}: {reason}")


@each_kernel
@each_case(testing.small_cases())
def test_simulator(kernel, case, monkeypatch):
    skip_refused(kernel, case)
    # Here one draw of the reference's error is enough, however few the rows: the class in its plainest form.
    monkeypatch.setattr(accuracy, "MIN_ROWS", 1)
    o, lse = sim.attention(*testing.make_inputs(case), **case.options, return_lse=True, kernel=kernel)
    delivered = kernel.accuracy_at(case.problem)
    testing.assert_accurate(o, lse, *testing.make_inputs(case), **case.kwargs, accuracy=delivered)


small_sizes = st.builds(
    Case,
    *(st.integers(1, most) for most in (2, 2, 9, 40, 12, 12)),
    is_causal=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
)


@each_kernel
@given(case=small_sizes)
@settings(max_examples=5, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
def test_simulator_any_shape_and_stride(kernel, case):
    if kernel.supports(case.problem, H200) is None:
        o, lse = sim.attention(*testing.make_inputs(case), **case.kwargs, return_lse=True, kernel=kernel)
        testing.assert_accurate(o, lse, *testing.make_inputs(case), **case.kwargs, accuracy=kernel.accuracy)


@each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_simulator_layouts_change_no_bit(kernel, layout):
    strided = testing.make_inputs(Case(2, 1, 3, 33, 8, 8, layout=layout))
    o = sim.attention(*strided, kernel=kernel)
    np.testing.assert_array_equal(o, sim.attention(*map(np.ascontiguousarray, strided), kernel=kernel))


def run_on_gpu(kernel, case: Case, to_gpu, guarded_output):
    inputs = [to_gpu(placed) for placed in testing.place_inputs(case)]
    out, check = guarded_output((case.B, case.H, case.Lq, case.Dv))
    o, lse = numba_attn.attention(*inputs, **case.options, return_lse=True, kernel=kernel, out=out)
    assert o is out
    check()
    return o.cpu().numpy(), lse.cpu().numpy()


@pytest.fixture(scope="session")
def device(to_gpu) -> Device:
    from numba_attn import launch

    return launch.device_facts(0)


@pytest.mark.gpu
@each_kernel
@each_case(testing.cases())
def test_gpu(kernel, case, device, to_gpu, guarded_output):
    skip_refused(kernel, case, device)
    o, lse = run_on_gpu(kernel, case, to_gpu, guarded_output)
    expected(case).check(o, lse, accuracy=kernel.accuracy_at(case.problem))


sizes = st.builds(
    Case,
    *(st.integers(1, most) for most in (3, 3, 150, 300, 160, 160)),
    is_causal=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
)


@pytest.mark.gpu
@each_kernel
@given(case=sizes)
@settings(max_examples=30)
def test_gpu_any_shape_and_stride(kernel, case, device, to_gpu, guarded_output):
    if kernel.supports(case.problem, device) is None:
        o, lse = run_on_gpu(kernel, case, to_gpu, guarded_output)
        testing.assert_accurate(o, lse, *testing.make_inputs(case), **case.kwargs, accuracy=kernel.accuracy)


@pytest.mark.gpu
@each_with_own_products
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_layouts_change_no_bit(kernel, layout, to_gpu, guarded_output):
    case = Case(2, 3, 65, 130, 64, 72, is_causal=True, layout=layout)
    strided = [to_gpu(placed) for placed in testing.place_inputs(case)]
    contiguous = [x.contiguous().clone() for x in strided]
    plain = numba_attn.attention(*contiguous, causal=True, kernel=kernel)
    for changed in ({0}, {1}, {2}, {0, 1, 2}):
        mixed = [strided[i] if i in changed else contiguous[i] for i in range(3)]
        assert numba_attn.attention(*mixed, causal=True, kernel=kernel).equal(plain), changed
    if layout != "expanded":  # elements of an output share no memory
        out, check = guarded_output(plain.shape, layout)
        assert numba_attn.attention(*contiguous, causal=True, kernel=kernel, out=out).equal(plain)
        check()


@pytest.mark.gpu
@each_kernel
def test_gpu_repeats_give_the_same_bits(kernel, to_gpu):
    inputs = [to_gpu(placed) for placed in testing.place_inputs(Case(2, 4, 257, 300, 96, 96))]
    first = numba_attn.attention(*inputs, kernel=kernel)
    assert all(numba_attn.attention(*inputs, kernel=kernel).equal(first) for _ in range(50))


@each_kernel
def test_the_class_that_is_delivered_has_a_budget(kernel):
    exact = Problem(1, 1, 1, 8, 8, 8, 8)
    tf32 = dataclasses.replace(exact, precision="tf32")
    assert kernel.accuracy_at(exact) == kernel.accuracy
    assert kernel.accuracy_at(tf32) == ("tf32" if "tf32" in kernel.lower_accuracies else kernel.accuracy)
    assert {kernel.accuracy, *kernel.lower_accuracies} <= set(testing.CLASSES)
    assert set(kernel.lower_accuracies) <= set(PRECISIONS)
    assert (kernel.config(tf32, H200) == kernel.config(exact, H200)) == (not kernel.lower_accuracies)


@each_kernel
@pytest.mark.parametrize("matrix", [testing.small_cases, testing.cases])
def test_each_kernel_serves_some_case(kernel, matrix):
    assert any(kernel.supports(case.problem, H200) is None for case in matrix())


def each_config(kernels=KERNELS):
    pairs = [(kernel, config) for kernel in kernels for config in kernel.configs()]
    ids = [f"{kernel.name}-{'-'.join(map(str, dataclasses.astuple(config)))}" for kernel, config in pairs]
    return pytest.mark.parametrize(("kernel", "config"), pairs, ids=ids)


# What a problem decides; the rest are tile sizes.
OPTIONS = ("halves", "d_bucket", "vector", "is_causal", "dv_columns", "dv_bucket", "bucket")


@functools.cache
def chosen_options(kernel, case: Case) -> tuple:
    config = kernel.config(case.problem, H200)
    return tuple(getattr(config, name, None) for name in OPTIONS)


def largest_cases(kernel, config) -> list[Case]:
    """The two largest cases with the config's options."""
    options = tuple(getattr(config, name, None) for name in OPTIONS)
    served = (case for case in testing.cases() if kernel.supports(case.problem, H200) is None)
    matching = [case for case in served if chosen_options(kernel, case) == options]
    return sorted(matching, key=lambda case: case.H * case.Lq * case.Lk * (case.D + case.Dv))[-2:]


@each_config()
def test_each_config_has_cases_with_several_blocks(kernel, config):
    assert config in set(kernel.configs())
    cases = largest_cases(kernel, config)
    assert cases
    assert all(case.Lq * case.Lk > 128 * 256 for case in cases), cases


@pytest.mark.gpu
@each_config()
def test_gpu_each_config(kernel, config, device, to_gpu, guarded_output):
    """Every config that can be chosen, also those whose tiles the heuristic prefers for larger problems only."""
    fixed = dataclasses.replace(kernel, config=lambda problem, device: config)
    for case in largest_cases(kernel, config):
        o, lse = run_on_gpu(fixed, case, to_gpu, guarded_output)
        expected(case).check(o, lse, accuracy=kernel.accuracy_at(case.problem))


@each_kernel
def test_every_choice_is_a_config_and_reaches_both_options(kernel):
    possible = set(kernel.configs())
    for device in (H200, SMALL_GPU):
        assert {kernel.config(case.problem, device) for case in testing.cases()} <= possible
    assert {kernel.config(case.problem, H200).is_causal for case in testing.cases()} == {False, True}
    assert {kernel.small_config(case.problem).is_causal for case in testing.small_cases()} == {False, True}


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        ((32, 32, 1, 4096, 128), True),
        ((1, 32, 1, 65536, 128), True),
        ((1, 1, 4, 256, 64), True),
        ((1, 1, 4, 255, 64), False),
        ((8, 32, 8, 4096, 128), True),
        ((8, 32, 9, 4096, 128), False),
        ((8, 32, 8, 4096, 65), True),
        ((8, 32, 4, 4096, 64), True),
        ((8, 32, 5, 4096, 64), False),
        ((8, 32, 4, 4096, 129), True),
        ((8, 32, 5, 4096, 129), False),
        ((1, 4, 256, 4096, 128), True),
        ((1, 8, 512, 4096, 128), False),
    ],
    ids=str,
)
def test_keys_are_split_where_queries_are_few(sizes, split):
    B, H, *lengths, D = sizes
    problem = Problem(B, H, H, *lengths, D, D)
    assert (choose(None, KERNELS, problem, H200) is split_keys_fp32.KERNEL) == split
    # Under causality 4 rows attend 4 keys at most, however many there are.
    causal = dataclasses.replace(problem, Lq=4, is_causal=True)
    assert choose(None, KERNELS, causal, H200) is not split_keys_fp32.KERNEL


def test_keys_are_split_for_as_many_warps_as_fill_a_gpu():
    for sizes, chunks in (
        ((32, 32, 1, 4096), 4),
        ((1, 32, 1, 65536), 128),
        ((1, 1, 1, 65536), 1024),
        ((8, 8, 99, 99), 1),
    ):
        B, H, *lengths = sizes
        problem = Problem(B, H, H, *lengths, 128, 128)
        kernel = split_keys_fp32.KERNEL
        config = kernel.config(problem, H200)
        partial, merge = kernel.launches(problem, config)
        rows = problem.B * problem.H * problem.Lq
        assert kernel.workspace(problem, config)["chunk_m"].shape == (rows, chunks)
        assert partial.grid == problem.B * problem.H * -(-problem.Lq // config.rows) * chunks
        assert merge.grid == rows * 4
