"""Contract: what `bench --json` writes is what pytest-benchmark writes of the same rounds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import textwrap

import pytest
from fake_gpu import NO_TORCH

from numba_attn.bench import contenders, document, measure, results
from numba_attn.bench.problems import NamedProblem, make_problem
from numba_attn.bench.results import KEYS, ROOT, Results
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200

pytest.importorskip("pytest_benchmark")

ROUNDS_MS = [3.0, 1.0, 2.0, 5.0, 4.0]
KNOWN = NamedProblem(make_problem(2, 3, 40, 56, 8, 12), "small")


@pytest.fixture
def measurement(fake_gpu):
    result = measure.measure(KNOWN, contenders.by_names(KNOWN, [k.name for k in KERNELS], H200), 0.05)
    for entry in result.timed:
        entry.rounds_ms = ROUNDS_MS
    return result


BENCH_OF_THE_SAME_ROUNDS = """
    import pytest
    from numba_attn.bench.document import DeviceClock

    clock = DeviceClock()

    @pytest.mark.benchmark(timer=clock)
    @pytest.mark.parametrize("problem, contender", [("small", "flash_fp32")])
    def test_contender(benchmark, problem, contender):
        benchmark.group = "b2_h3_q40_k56_d8_v12_fp32_full"
        clock.load([3.0, 1.0, 2.0, 5.0, 4.0])
        benchmark.pedantic(clock.replay, setup=clock.rewind, rounds=5)
"""


def run_pytest(cwd, *arguments) -> str:
    """The output of a run of its own, without this one's options."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(cwd), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=cwd, env={**alone, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_as_pytest_benchmark_writes_it(measurement, tmp_path):
    (tmp_path / "bench_sdpa.py").write_text(textwrap.dedent(BENCH_OF_THE_SAME_ROUNDS))
    run_pytest(tmp_path, "--benchmark-json=out.json", "bench_sdpa.py")
    theirs = json.loads((tmp_path / "out.json").read_text())
    ours = json.loads(json.dumps(document.document([measurement])))
    assert set(ours) == set(theirs)
    assert set(ours["machine_info"]) - set(theirs["machine_info"]) == {"packages", "toolkit", "gpu", "driver_cuda"}
    assert set(theirs["machine_info"]) - set(ours["machine_info"]) == {"node"}
    (their_entry,) = theirs["benchmarks"]
    (our_entry,) = [entry for entry in ours["benchmarks"] if "flash_fp32" in entry["name"]]
    assert our_entry["stats"] == their_entry["stats"]
    for key in ("name", "group", "param", "params"):
        assert our_entry[key] == their_entry[key]
    assert set(our_entry) == set(their_entry)


PLUGIN = """
    import fake_gpu
    import pytest
    from numba_attn.bench import problems

    small = problems.make_problem(2, 3, 40, 56, 8, 12)
    problems.PROBLEMS = (problems.NamedProblem(small, "small", every_kernel=True),)

    def pytest_configure():
        fake_gpu.install(pytest.MonkeyPatch()).ms["flash_fp32"] = 2.0
"""


@pytest.mark.parametrize("option", ["--benchmark-enable", "--benchmark-disable"])
def test_benchmarks_under_pytest(tmp_path, option):
    (tmp_path / "plugin_of_test.py").write_text(textwrap.dedent(PLUGIN))
    options = ("-p", "plugin_of_test", option, f"--benchmark-json={tmp_path / 'out.json'}")
    place = ("--rootdir", ROOT, "-c", ROOT / "pyproject.toml", ROOT / "benchmarks")
    out = run_pytest(tmp_path, *options, "-k", "flash_fp32 or default", *place)
    assert "1 passed, 1 skipped" in out
    assert NO_TORCH in out
    if option == "--benchmark-enable":
        (result,) = results.load(tmp_path / "out.json").results
        assert (result.problem, result.kernel, result.ms) == ("b2_h3_q40_k56_d8_v12_fp32_full", "flash_fp32", 2.0)
        (entry,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
        assert set(entry["stats"]["data"]) == {0.002}
        assert entry["group"] == result.problem


def test_the_document(measurement, tmp_path):
    document.write(tmp_path / "out.json", [measurement])
    written = json.loads((tmp_path / "out.json").read_text())
    entry = written["benchmarks"][0]
    assert set(KEYS) <= set(entry["extra_info"])
    assert entry["stats"]["median"] == statistics.median(ROUNDS_MS) / 1e3
    assert entry["stats"]["data"] == [ms / 1e3 for ms in ROUNDS_MS]
    assert entry["extra_info"]["ms"] == 3.0
    assert written["machine_info"]["gpu"]["name"] == "NVIDIA H200"
    assert "numba-cuda" in written["machine_info"]["packages"]
    results = Results(written)
    assert [result.kernel for result in results.results] == [kernel.name for kernel in KERNELS]
    assert results.device == H200
    assert all(results.why_older(result, KERNELS) is None for result in results.results)


def test_wrong_results_are_not_in_it(measurement):
    measurement.entries[0].outcome = "wrong"
    names = [record["extra_info"]["kernel"] for record in document.document([measurement])["benchmarks"]]
    assert names == [kernel.name for kernel in KERNELS[1:]]


def test_a_clock_that_replays():
    clock = document.DeviceClock()
    clock.load([1.5, 2.5])
    for seconds in (0.0015, 0.0025):
        clock.rewind()
        start = clock()
        clock.replay()
        assert clock() - start == seconds


def test_without_pytest_benchmark(monkeypatch):
    assert document.why_unavailable() is None
    monkeypatch.setattr(document, "find_spec", lambda name: None)
    assert "pip install 'numba_attn[bench]'" in document.why_unavailable()
