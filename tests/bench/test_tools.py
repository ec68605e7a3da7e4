"""Contract under test: sanitize.py and counters.py read what the tools print, and say in a line what is missing;
variants.py has kernels.

The outputs are written after the tools' documentation; the machines of the tests have no GPU for them.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from numba_attn import launch, sim, testing
from numba_attn.bench.digest import code_digest
from numba_attn.bench.problems import parse
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROBLEM = "b1_h2_q70_k130_d64"

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
WRITE = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at flash_fp32+0x1d0
=========     by thread (64,0,0) in block (0,0,0)
=========     Access at 0x7f3c00000200 is out of bounds
=========
========= ERROR SUMMARY: 1 error
"""
NO_RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at flash_fp32+0x70
=========     and Read access at flash_fp32+0x90 [31 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
DIED = "========= COMPUTE-SANITIZER\nTraceback (most recent call last):\nModuleNotFoundError: No module named 'x'\n"

QUERIED = """\
Device NVIDIA H200 (GH100)
-------------------------- ------------ ---------------- -------------------------
Metric Name                Metric Type  Metric Unit      Metric Description
-------------------------- ------------ ---------------- -------------------------
dram__bytes_read           Counter      byte             # of bytes read from DRAM
gpu__time_duration         Counter      ns               incremental duration
sm__inst_issued            Counter      inst             # of warp instructions issued
sm__pipe_tensor_cycles_active Counter   cycle            # of cycles where tensor pipe was active
"""
TABLE = """\
==PROF== Connected to process 7 (/usr/bin/python3)
==PROF== Profiling "_ZN10flash_fp32B2v1" - 0: 0%....50%....100% - 8 passes
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","launch__registers_per_thread"
"","","","byte","ns","register/thread"
"0","7","_ZN10flash_fp32B2v1","2,500,000","1234567","168"
"1","7","_ZN10flash_fp32B2v2","n/a","2000","40"
"""


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sanitize, counters, attend, variants, distributions = map(
    script, ("sanitize", "counters", "attend", "variants", "distributions")
)
ARGUMENTS = {sanitize: ["flash_fp32"], counters: ["flash_fp32", PROBLEM]}
scripts = pytest.mark.parametrize("module", [sanitize, counters], ids=["sanitize", "counters"])


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (sanitize, [], "KERNEL"),
        (sanitize, ["nonsense"], "'nonsense' is neither a kernel"),
        (sanitize, ["flash_fp32", "--problem", "b1_h2"], "'b1_h2' is not like"),
        (counters, ["flash_fp32"], "PROBLEM"),
        (counters, ["nonsense", PROBLEM], "'nonsense' is neither a kernel"),
        (counters, ["flash_fp32", "b1_h2"], "'b1_h2' is not like"),
        (counters, ["no_file.py", PROBLEM], "no_file.py is no file"),
    ],
)
def test_arguments_that_make_no_sense(module, arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        module.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@scripts
def test_without_the_tool(module, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert module.main(ARGUMENTS[module]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("is not on the PATH: it comes with the CUDA toolkit") or "Nsight" in line


@pytest.fixture
def fake_tool(monkeypatch, tmp_path):
    """`fake_tool(module, script)`: the module's tool is a shell script, and there seems to be an H200."""

    def make(module, text: str) -> None:
        program = tmp_path / module.PROGRAM
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(module, "cuda_torch", lambda: (object(), None))
        monkeypatch.setattr(launch, "device_facts", lambda index: H200)
        monkeypatch.setattr(launch, "driver_version", lambda: (13, 0))

    return make


@scripts
def test_without_a_gpu(module, fake_tool, monkeypatch, capsys):
    fake_tool(module, "exit 3")
    monkeypatch.setattr(module, "cuda_torch", lambda: (None, "torch finds no GPU"))
    assert module.main(ARGUMENTS[module]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{module.__name__.removeprefix('benchmarks_')}: torch finds no GPU"
    ]


# sanitize.py


@pytest.mark.parametrize(
    ("output", "count", "lines"),
    [
        (CLEAN, 0, ["========= ERROR SUMMARY: 0 errors"]),
        (WRITE, 1, ["========= ERROR SUMMARY: 1 error"]),
        (NO_RACE, 0, ["========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"]),
        (RACE, 1, ["========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"]),
        (WRITE + NO_RACE + CLEAN, 1, None),
        (DIED, None, []),
    ],
)
def test_summaries(output, count, lines):
    assert sanitize.errors(output) == count
    assert lines is None or sanitize.summary(output) == lines


def test_every_problem_is_served_by_some_kernel_and_every_kernel_serves_some():
    for name in sanitize.PROBLEMS:
        assert any(kernel.supports(parse(name), H200) is None for kernel in KERNELS)
    for kernel in KERNELS:
        assert sum(kernel.supports(parse(name), H200) is None for name in sanitize.PROBLEMS) >= 8


def test_a_clean_log(fake_tool, tmp_path):
    fake_tool(
        sanitize, f'[ "$1" = --version ] && echo "Version 2025.3" && exit\necho "$@" > {tmp_path}/$2\nprintf "{CLEAN}"'
    )
    refused = "b1_h1_q5_k5_d300"
    arguments = ["flash_split_half_sm80", "--problem", PROBLEM, "--problem", refused, "--out", str(tmp_path / "notes")]
    assert sanitize.main(arguments) == 0
    log = (tmp_path / "notes" / "sanitizer_flash_split_half_sm80.txt").read_text()
    kernel = next(kernel for kernel in KERNELS if kernel.name == "flash_split_half_sm80")
    assert f"  {PROBLEM}: {code_digest(kernel, parse(PROBLEM), H200)}\n" in log
    assert f"  {refused}: not served: " in log
    assert "device: NVIDIA H200, sm_90a, driver serves CUDA 13.0\n" in log and "tool: Version 2025.3\n" in log
    for tool in ("memcheck", "racecheck", "initcheck"):
        assert f"\n{tool}\n  ========= ERROR SUMMARY: 0 errors\n" in log
        # What does not serve is not run.
        assert (tmp_path / tool).read_text().split()[-3:] == ["--check", "flash_split_half_sm80", PROBLEM]
    assert "--report-api-errors no" in (tmp_path / "memcheck").read_text()


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [(WRITE, 86, "out of bounds"), (CLEAN, 1, "exit code 1, 0 errors"), (DIED, 0, "No module")],
)
def test_a_log_with_errors(fake_tool, tmp_path, output, code, said, capsys):
    (tmp_path / "output").write_text(output)
    fake_tool(sanitize, f"cat {tmp_path}/output\nexit {code}")
    assert sanitize.main(["flash_fp32", "--problem", PROBLEM, "--out", str(tmp_path)]) == 1
    assert said in (tmp_path / "sanitizer_flash_fp32.txt").read_text()
    assert "flash_fp32 racecheck: FAILED" in capsys.readouterr().out


def test_a_tool_that_does_not_end(fake_tool, tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize, "LIMIT_S", 0.2)
    fake_tool(sanitize, '[ "$1" = --version ] && exit\nprintf started\nexec sleep 5')
    assert sanitize.main(["flash_fp32", "--problem", PROBLEM, "--out", str(tmp_path)]) == 1
    assert "not done after 0.2 s" in (tmp_path / "sanitizer_flash_fp32.txt").read_text()


# counters.py


def test_metrics_that_the_tool_knows():
    assert counters.available(QUERIED) == {
        "us": "gpu__time_duration.sum",
        "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_active",
        "DRAM read MB": "dram__bytes_read.sum",
        "registers": "launch__registers_per_thread",
    }


def test_the_table_of_counters(fake_tool, tmp_path, capsys):
    (tmp_path / "queried").write_text(QUERIED)
    (tmp_path / "table").write_text(TABLE)
    asked = f'[ "$1" = --query-metrics ] && cat {tmp_path}/queried && exit'
    fake_tool(counters, f'{asked}\necho "$@" > {tmp_path}/given\ncat {tmp_path}/table')
    assert counters.main(["flash_fp32", "b1_h2_q70_k130_d64_causal"]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "flash_fp32, b1_h2_q70_k130_d64_v64_fp32_causal, NVIDIA H200"
    assert header.split() == "kernel us tensor % issue % DRAM read MB registers".split()
    assert [row.split() for row in rows] == [
        ["flash_fp32", "1235", "?", "?", "2.5", "168"],
        ["flash_fp32", "2", "?", "?", "?", "40"],
    ]
    given = (tmp_path / "given").read_text()
    assert "--kernel-name regex:.*(flash_fp32).* --launch-skip 1 --launch-count 1 --metrics gpu__time" in given
    assert given.endswith("--calls 2 flash_fp32 b1_h2_q70_k130_d64_v64_fp32_causal\n")


def test_counters_that_cannot_be_read(fake_tool, capsys):
    fake_tool(counters, 'echo "==PROF== Connected"\necho "==ERROR== ERR_NVGPUCTRPERM - no permission"\nexit 1')
    assert counters.main(["flash_fp32", PROBLEM]) == 1
    assert capsys.readouterr().err == "counters: ==ERROR== ERR_NVGPUCTRPERM - no permission\n"


def test_names_of_all_launches():
    kernel = next(kernel for kernel in KERNELS if kernel.name == "flash_split_half_sm80")
    names = counters.function_names(kernel, parse(PROBLEM), H200)
    assert names == ["split_halves", "flash_split_half", "rescue"]
    assert counters.shown("_ZN16flash_split_halfB2v1", names) == "flash_split_half"


def test_a_problem_that_the_kernel_does_not_serve(fake_tool, capsys):
    fake_tool(counters, "exit 3")
    assert counters.main(["flash_split_half_sm80", "b1_h1_q5_k5_d300"]) == 2
    assert "cannot serve b1_h1_q5_k5_d300: " in capsys.readouterr().err


# attend.py


def test_attend_without_a_gpu(monkeypatch):
    monkeypatch.setattr(attend, "cuda_torch", lambda: (None, "torch finds no GPU"))
    with pytest.raises(SystemExit, match="torch finds no GPU"):
        attend.main(["flash_fp32", PROBLEM])


@pytest.mark.gpu
def test_attend():
    assert attend.main(["--check", "--calls", "2", "flash_fp32", PROBLEM, "b1_h1_q5_k7_d3_causal"]) == 0


# distributions.py


def test_distributions_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(distributions, "cuda_torch", lambda: (None, "torch finds no GPU"))
    assert distributions.main(["--problem", PROBLEM]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_distributions_are_what_their_names_say():
    torch = pytest.importorskip("torch", reason="torch draws the inputs, and the package works without it")
    q, k, v = (torch.randn(2, 4, 50, 8) for _ in range(3))
    drawn = {name: draw(torch, q, k, v) for name, draw in distributions.DISTRIBUTIONS.items()}
    assert all(x.shape == q.shape and x.dtype == torch.float32 for inputs in drawn.values() for x in inputs)
    assert torch.equal(drawn["times 1e3"][1], 1e3 * k)
    apart = drawn["heads 2^20 apart"][0]
    assert torch.equal(apart[:, 0], q[:, 0]) and torch.equal(apart[:, 1] * 2.0**20, q[:, 1])
    assert drawn["cancelling"][2].mean().abs() < 1 and drawn["cancelling"][2].abs().min() > 90
    assert drawn["wide"][2].abs().amax(-1).log10().std() > 2


@pytest.mark.gpu
def test_distributions(capsys):
    assert distributions.main(["--problem", "b1_h2_q256_k256_d64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(tuple(distributions.DISTRIBUTIONS))]) == 8


@pytest.mark.parametrize("name", ["APART", "ANY_TURN"])
def test_variants_are_kernels_that_differ_from_the_chosen(name):
    kernel, case = getattr(variants, name), testing.Case(1, 1, 20, 40, 16, 16)
    original = next(k for k in KERNELS if kernel.name.startswith(k.name))
    config = kernel.config(case.problem, H200)
    assert config in set(kernel.configs()) and config != original.config(case.problem, H200)
    assert code_digest(kernel, case.problem, H200) != code_digest(original, case.problem, H200)
    o, lse = sim.attention(*testing.make_inputs(case), return_lse=True, kernel=kernel)
    testing.assert_accurate(o, lse, *testing.make_inputs(case))


def test_a_variant_for_some_head_dims_says_so():
    wide = parse("b1_h1_q100_k100_d129")
    assert variants.ANY_TURN.supports(wide, H200) == "for head dims up to 128"
    assert variants.APART.supports(wide, H200) is None
