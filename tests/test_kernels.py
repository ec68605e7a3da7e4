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
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200, Device
from numba_attn.testing import LAYOUTS, Case

SMALL_GPU = Device("a GPU with 99 KB of shared memory a block", (8, 9), 128, 99 * 1024, 72 * 1024 * 1024)

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


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
def test_simulator(kernel, case):
    skip_refused(kernel, case)
    o, lse = sim.attention(*testing.make_inputs(case), **case.kwargs, return_lse=True, kernel=kernel)
    expected(case).check(o, lse, accuracy=kernel.accuracy)


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
    o, lse = numba_attn.attention(*inputs, **case.kwargs, return_lse=True, kernel=kernel, out=out)
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
    expected(case).check(*run_on_gpu(kernel, case, to_gpu, guarded_output), accuracy=kernel.accuracy)


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
@each_kernel
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
@pytest.mark.parametrize("matrix", [testing.small_cases, testing.cases])
def test_each_kernel_serves_some_case(kernel, matrix):
    assert any(kernel.supports(case.problem, H200) is None for case in matrix())


@functools.cache
def problems(matrix):
    return tuple(dict.fromkeys(case.problem for case in matrix()))


def values(configs) -> dict[str, set]:
    """Every value of every field."""
    seen: dict[str, set] = {}
    for config in configs:
        for field in dataclasses.fields(config):
            seen.setdefault(field.name, set()).add(getattr(config, field.name))
    return seen


@each_kernel
def test_every_value_of_every_config_is_reached(kernel):
    """On an H200 or on a small GPU; options (bools) on an H200, and in the simulator too."""
    chosen = {
        device: {kernel.config(problem, device) for problem in problems(testing.cases)}
        for device in (H200, SMALL_GPU)
        if any(kernel.supports(problem, device) is None for problem in problems(testing.cases))
    }
    possible = set(kernel.configs())
    assert set().union(*chosen.values()) <= possible
    reached = values(set().union(*chosen.values()))
    assert {name: seen - reached.get(name, set()) for name, seen in values(possible).items()} == {
        name: set() for name in reached
    }
    on_h200, in_simulator = (
        values(chosen[H200]),
        values(kernel.small_config(problem) for problem in problems(testing.small_cases)),
    )
    for name, seen in values(possible).items():
        if seen == {False, True}:
            assert on_h200[name] == seen, name
            assert in_simulator[name] == seen, name
