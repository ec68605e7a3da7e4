"""Contract: `bench` times what is asked for, keeps it, and says by its status whether all went well."""

from __future__ import annotations

import pytest
from fake_gpu import NO_TORCH

from numba_attn import launch
from numba_attn.bench import contenders, document, problems, results
from numba_attn.bench.contenders import BASELINES
from numba_attn.bench.problems import NamedProblem
from numba_attn.cli import bench
from numba_attn.kernels import KERNELS


@pytest.mark.skipif(launch.device_count() > 0, reason="there is a GPU")
def test_bench_without_a_gpu(call):
    assert call("bench") == (1, "", "numba_attn: no GPU is found: bench times kernels on one\n")


SMALL = ("bench", "--seconds", "0.01", "--problem", "b2_h2_q5_k7_d4")


def test_bench(call, fake_gpu, tmp_path):
    pytest.importorskip("pytest_benchmark")
    options = ("--shape", "1,2,3,5,4,6", "--causal", "--kernel", "flash_fp32", "--json", tmp_path / "out.json")
    status, out, err = call(*SMALL, *options)
    assert status == 0
    headings = [line for line in out.splitlines() if "FLOP, 1 set of inputs" in line]
    names = ["b2_h2_q5_k7_d4_causal", "b1_h2_q3_k5_d4_v6_causal"]
    assert [heading.partition(":")[0] for heading in headings] == names
    assert [line.split()[:2] for line in out.splitlines() if "_fp32" in line] == [["flash_fp32", "0.500"]] * 2
    assert out.endswith("\n2 timed\n")
    assert "b2_h2_q5_k7_d4_causal: flash_fp32: check" in err
    saved = results.load(tmp_path / "out.json")
    assert [(result.problem, result.kernel) for result in saved.results] == [
        ("b2_h2_q5_k7_d4_v4_fp32_causal", "flash_fp32"),
        ("b1_h2_q3_k5_d4_v6_fp32_causal", "flash_fp32"),
    ]


def test_bench_at_another_precision(call, fake_gpu):
    status, out, _ = call(*SMALL, "--precision", "tf32", "--kernel", "flash_split_half_sm80", "--kernel", "flash_fp32")
    assert status == 0
    assert "median of rounds; TF32 off but in torch_math_tf32" in out and "b2_h2_q5_k7_d4_tf32: normal" in out
    rows = [line for line in out.splitlines() if line.startswith("flash_")]
    assert rows[0].startswith("flash_split_half_sm80 (tf32)  0.500") and rows[1].startswith("flash_fp32    ")
    assert call("bench", "--precision", "tf32")[2].startswith("numba_attn: --precision needs --problem or --shape")


def test_bench_of_the_standard_run(call, fake_gpu, monkeypatch):
    known = NamedProblem(problems.make_problem(2, 2, 5, 7, 4, 4), "small", every_kernel=True)
    monkeypatch.setattr(bench, "PROBLEMS", (known,))
    status, out, _ = call("bench", "--seconds", "0.01")
    assert status == 0
    rows = [line.split()[0] for line in out.splitlines() if line.startswith(tuple(k.name for k in KERNELS))]
    assert rows == [kernel.name for kernel in KERNELS]
    assert [f"REFUSED {name}: {NO_TORCH}" in out for name in BASELINES] == [True] * 3


def test_bench_of_torch_alone(call, fake_gpu_with_torch):
    status, out, _ = call(*SMALL, "--kernel", "torch_math", "--kernel", "torch_efficient")
    assert status == 0
    assert "REFUSED torch_efficient: " in out
    assert out.endswith("\n1 timed\n")


def test_bench_of_what_no_contender_can(call, fake_gpu):
    status, out, _ = call(*SMALL, "--kernel", "torch_math")
    assert (status, out.endswith("\n0 timed\n")) == (1, True)


def test_bench_of_what_does_not_fit(call, fake_gpu, monkeypatch):
    monkeypatch.setattr(launch, "free_bytes", lambda index: 1500)
    status, out, _ = call(*SMALL, "--problem", "b1_h1_q1_k1_d1", "--kernel", "flash_fp32")
    assert status == 0
    assert "SKIPPED b2_h2_q5_k7_d4 needs 0.0 GB more than the 0.0 GB free\n" in out
    assert out.endswith("\n1 timed, 1 problems skipped\n")


def test_bench_stops_where_the_gpu_is_lost(call, fake_gpu, monkeypatch):
    def lost(*arrays, **options):
        raise launch.DriverError("an illegal memory access")

    monkeypatch.setattr(contenders.api, "attention", lost)
    monkeypatch.setattr(launch, "synchronize", lost)
    status, out, err = call(*SMALL, "--kernel", "flash_fp32", "--problem", "b1_h1_q1_k1_d1")
    assert status == 1
    assert "FAILED flash_fp32: DriverError: an illegal memory access" in out
    assert "b1_h1_q1_k1_d1" not in out
    assert "stopped after b2_h2_q5_k7_d4: the GPU takes no more work" in err.splitlines()[-1]


def test_bench_where_the_gpu_is_lost_while_timing(call, fake_gpu, monkeypatch):
    right = fake_gpu.elapsed_ms
    times = iter([right] * 3)
    monkeypatch.setattr(launch, "elapsed_ms", lambda *args, **options: next(times, lost)(*args, **options))

    def lost(*args, **options):
        raise launch.DriverError("an illegal\nmemory access")

    status, _, err = call(*SMALL, "--kernel", "flash_fp32")
    assert (status, err.splitlines()[-1]) == (1, "numba_attn: stopped at b2_h2_q5_k7_d4: an illegal memory access")


def test_bench_keeps_what_is_done(call, fake_gpu, tmp_path, monkeypatch):
    pytest.importorskip("pytest_benchmark")
    right = fake_gpu.attention

    def interrupted(q, *arrays, **options):
        if q.shape[0] == 1:
            raise KeyboardInterrupt
        return right(q, *arrays, **options)

    monkeypatch.setattr(contenders.api, "attention", interrupted)
    options = ("--problem", "b1_h1_q1_k1_d1", "--kernel", "flash_fp32", "--json", tmp_path / "out.json")
    assert call(*SMALL, *options)[0] == 130
    assert results.load(tmp_path / "out.json").problems == ["b2_h2_q5_k7_d4_v4_fp32_full"]


def test_bench_makes_the_folder_of_its_file(call, fake_gpu, tmp_path):
    pytest.importorskip("pytest_benchmark")
    file = tmp_path / "benchmarks" / "results" / "h200.json"
    assert call(*SMALL, "--kernel", "flash_fp32", "--json", file)[0] == 0
    assert len(results.load(file).results) == 1
    status, out, err = call(*SMALL, "--json", file / "out.json")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"--json: {file / 'out.json'} cannot be written: " in err
    assert f"{tmp_path} cannot be written: it is a directory" in call(*SMALL, "--json", tmp_path)[2]


def test_bench_without_pytest_benchmark(call, fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(document, "find_spec", lambda name: None)
    status, out, err = call(*SMALL, "--json", tmp_path / "out.json")
    assert (status, out, err) == (1, "", f"numba_attn: --json: {document.MISSING}\n")


@pytest.mark.gpu
def test_bench_on_a_gpu(call, tmp_path):
    pytest.importorskip("pytest_benchmark")
    options = ("--problem", "b2_h3_q65_k130_d72", "--shape", "1,2,1,300,64", "--seconds", "0.1")
    status, out, _ = call("bench", *options, "--json", tmp_path / "out.json")
    assert status == 0
    saved = results.load(tmp_path / "out.json")
    assert len(saved.problems) == 2
    assert all(result.peak_bytes > 0 and result.ms > 0 for result in saved.results)
    assert all(saved.why_older(result, KERNELS) is None for result in saved.results)
