"""What every benchmark shares: one measurement a problem, and what the machine is.

`pytest benchmarks --benchmark-enable` is the standard run of `python -m numba_attn bench`; plain `pytest` measures a
small problem once, as a test.
"""

from __future__ import annotations

import pytest

from numba_attn import launch
from numba_attn.bench import document
from numba_attn.bench.contenders import by_names, standard_names
from numba_attn.bench.measure import BUDGET_S, DoesNotFitError, Measurement, measure
from numba_attn.bench.problems import PROBLEMS, NamedProblem, make_problem
from numba_attn.problem import H200

AS_A_TEST = NamedProblem(make_problem(2, 3, 65, 130, 72, 72), "small", every_kernel=True)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config) -> None:
    # pytest-benchmark takes any --dist for parallel tests, also where there is one process, and times nothing.
    if not config.getoption("numprocesses", None):
        config.option.dist = "no"


def pytest_generate_tests(metafunc) -> None:
    if "contender" in metafunc.fixturenames:
        device = launch.device_facts(0) if launch.device_count() else H200
        known = known_problems(metafunc.config).values()
        places = [(problem.name, name) for problem in known for name in standard_names(problem, device)]
        metafunc.parametrize(("problem", "contender"), places, ids=map("-".join, places))


def known_problems(config) -> dict[str, NamedProblem]:
    problems = [AS_A_TEST] if config._benchmarksession.disabled else PROBLEMS
    return {problem.name: problem for problem in problems}


@pytest.fixture(scope="session")
def measurements() -> dict[str, Measurement]:
    """By problem; none of them holds memory on the GPU."""
    return {}


@pytest.fixture
def measured(problem, measurements, request) -> Measurement:
    """The measurement of the problem's contenders among the tests that are run."""
    if launch.device_count() == 0:
        pytest.skip("no GPU is found")
    if problem not in measurements:
        known = known_problems(request.config)[problem]
        params = (item.callspec.params for item in request.session.items if "contender" in item.fixturenames)
        names = [chosen["contender"] for chosen in params if chosen["problem"] == problem]
        budget_s = 0.1 if known is AS_A_TEST else BUDGET_S
        try:
            measurements[problem] = measure(known, by_names(known, names, launch.device_facts(0)), budget_s)
        except DoesNotFitError as error:
            pytest.skip(str(error))
    return measurements[problem]


def pytest_benchmark_update_machine_info(config, machine_info) -> None:
    document.complete_machine_info(machine_info)


def pytest_benchmark_update_commit_info(config, commit_info) -> None:
    document.complete_commit_info(commit_info)
