"""What every benchmark shares: the problems, their inputs on the GPU, and what the machine is.

`pytest benchmarks --benchmark-enable` times; plain `pytest` runs each benchmark once, as a test, on a small problem.
"""

from __future__ import annotations

import pytest
from problems import AS_A_TEST, PROBLEMS

from numba_attn import launch, versions
from numba_attn.cli import measure


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config) -> None:
    # pytest-benchmark takes any --dist for parallel tests, also where there is one process, and times nothing.
    if not config.getoption("numprocesses", None):
        config.option.dist = "no"


def pytest_generate_tests(metafunc) -> None:
    if "problem_name" in metafunc.fixturenames:
        # A fixture of session scope, so that one problem's inputs are there at a time.
        metafunc.parametrize("problem_name", problems(metafunc.config), scope="session")


def problems(config) -> dict:
    return AS_A_TEST if config._benchmarksession.disabled else PROBLEMS


@pytest.fixture(scope="session")
def problem(problem_name, request):
    return problems(request.config)[problem_name]


@pytest.fixture(scope="session")
def torch():
    """torch with TF32 off, or None."""
    module, _ = measure.cuda_torch()
    if module is None:
        yield None
    else:
        with measure.tf32_off(module):
            yield module


@pytest.fixture(scope="session")
def inputs(gpu, problem, torch):
    """q, k, v on the GPU."""
    return measure.uniform_inputs(problem, torch)


@pytest.fixture(scope="session")
def sample(inputs, problem) -> measure.Sample:
    """What some heads must be."""
    return measure.Sample(*inputs, problem)


@pytest.fixture(scope="session")
def gpu() -> None:
    if launch.device_count() == 0:
        pytest.skip("no GPU is found")


def pytest_benchmark_update_machine_info(config, machine_info) -> None:
    machine_info["packages"] = versions.report()
    if launch.device_count():
        machine_info["gpu"] = launch.device_facts(0).name
        machine_info["driver_cuda"] = ".".join(map(str, launch.driver_version()))
