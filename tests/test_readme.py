"""Contract: what the README says can be done, can be done, and its tables say what is there.

Without a GPU the code runs in the simulator, with the very substitution that the README names; what needs torch on a
GPU is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numba_attn
from numba_attn import launch
from numba_attn.bench import results
from numba_attn.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HAS_GPU = launch.device_count() > 0


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def block(text: str, language: str = "python") -> str:
    (found,) = [code for code in blocks(language) if text in code]
    return found


def rows(title: str) -> list[tuple[str, ...]]:
    """Cells of the table whose header starts with `title`."""
    _, _, rest = README.partition(f"| {title} |")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip().strip("`") for cell in line.strip("|").split("|")) for line in lines]


def run(code: str, names: dict) -> dict:
    """Execute a block after those before it: on the GPU as it stands, else with the call that the README names."""
    if not HAS_GPU:
        code = code.replace("numba_attn.attention(", "numba_attn.sim.attention(")
    exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.fixture
def names() -> dict:
    """What the numpy block leaves behind."""
    return run(block("import numpy"), {})


def test_two_commands_do_all_the_set_up():
    demo, tests = blocks("bash")
    assert demo == "pip install -e '.[cu13]' && python -m numba_attn demo\n"
    assert tests == "pip install -e '.[test]' && python -m pytest -n auto\n"


def test_numpy(names):
    assert names["o"].shape == (1, 2, 20, 32)
    np.testing.assert_allclose(names["o"], names["expected"], atol=1e-6)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_numpy_without_a_gpu_names_the_simulator():
    with pytest.raises(RuntimeError, match="numba_attn.sim.attention"):
        exec(block("import numpy"), {})


@pytest.mark.gpu
def test_torch(capsys):
    run(block("import torch"), {})
    assert "e-0" in capsys.readouterr().out


def test_explain(names, capsys):
    capsys.readouterr()
    run(block("explain(q, k, v, causal=True)"), names)
    facts, *kernels = capsys.readouterr().out.splitlines()
    written, *written_kernels = block("chosen", "text").splitlines()
    assert facts.partition(" (")[0] == written.partition(" (")[0]
    assert HAS_GPU or facts == written
    assert kernels == written_kernels


def test_precision(names, monkeypatch, capsys):
    capsys.readouterr()
    if not HAS_GPU:
        monkeypatch.setattr(numba_attn, "attention", numba_attn.sim.attention)
    run(block("precision="), names)
    assert capsys.readouterr().out == "fp32\n", "few rows: a kernel without that mode"
    expected, _ = numba_attn.reference.attention(names["q"], names["k"], names["v"])
    np.testing.assert_allclose(names["o"], expected, atol=2e-3)


def test_edit_a_kernel(names, tmp_path, monkeypatch, capsys):
    lines = block("my_kernel", "text").replace("\\\n", "").splitlines()
    copy, check, inspect, bench = (line.partition(" #")[0].split() for line in lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    shutil.copy(ROOT / copy[1], copy[2])
    assert check[:3] == inspect[:3] == bench[:3] == ["python", "-m", "numba_attn"]
    assert main([*check[3:], "-k", "1x1-5x9"]) == 0
    assert "9 passed, 0 failed" in capsys.readouterr().out
    assert main(inspect[3:]) == 0
    assert {"registers", "spills", "shared"} <= set(capsys.readouterr().out.split())
    assert bench[3:6] == ["bench", "--shape", "4,16,4096,4096,128"]
    assert bench[6:] == ["--kernel", "my_kernel.py", "--kernel", "warp_tile_fp32", "--kernel", "torch_default"]
    run(block("my_kernel"), names)
    expected, _ = numba_attn.reference.attention(names["q"], names["k"], names["v"])
    np.testing.assert_allclose(names["o"], expected, atol=1e-6)
    np.testing.assert_allclose(names["expected"], expected, atol=1e-6)
    assert names["config"] != names["my_kernel"].small_config(names["facts"].problem)


def test_simulator(names):
    run(block("sim.attention(q, k, v, causal=True"), names)
    expected = numba_attn.reference.attention(names["q"], names["k"], names["v"], causal=True)
    np.testing.assert_allclose(names["o"], expected[0], atol=1e-6)
    np.testing.assert_allclose(names["lse"], expected[1], atol=1e-5)


def test_table_of_kernels():
    assert rows("kernel | accuracy class | idea") == [
        (k.name, ", ".join([k.accuracy, *k.lower_accuracies]), k.summary) for k in numba_attn.KERNELS
    ]


def test_the_ladder_has_every_kernel_once():
    rungs = re.findall(r"^(\d+)\. `(\w+)`: ", README, re.MULTILINE)
    assert [int(number) for number, _ in rungs] == list(range(1, len(rungs) + 1))
    assert sorted(name for _, name in rungs) == sorted(kernel.name for kernel in numba_attn.KERNELS)


def test_table_of_commands():
    assert dict(rows("command | what it does")) == COMMANDS
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(f"`{command}`" in changes for command in COMMANDS)


def test_commands_of_the_numbers():
    measure, write = (line.split() for line in block("results --write", "text").splitlines())
    assert measure == ["python", "-m", "numba_attn", "bench", "--json", results.FILE.as_posix()]
    assert write == ["python", "-m", "numba_attn", "results", "--write"]
    options = re.search(r"`(--shape [^`]*)`", README)[1].split()
    assert options[:3] == ["--shape", "4,16,4096,4096,128", "--causal"]
    assert set(options[4::2]) == {"my_kernel.py", "torch_default"}


@pytest.mark.parametrize(
    "options, problems", [([], {"small"}), (["--benchmark-enable"], {"headline", "b32_h32_q1_k4096_d128"})]
)
def test_benchmarks_are_tests_unless_they_are_asked_to_time(options, problems):
    assert "`python -m pytest benchmarks --benchmark-enable`" in README
    command = [sys.executable, "-m", "pytest", "benchmarks", *options, "--collect-only", "-q", "-p", "no:cacheprovider"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    listed = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    found = {line.partition("[")[2].partition("-")[0].rstrip("]") for line in listed.splitlines() if "[" in line}
    assert problems <= found
    assert options or problems == found


PATHS = re.findall(r"\]\(([\w/.]+)\)|`((?:numba_attn|docs|benchmarks)/[\w/.]*)`", README)


# What a run on a GPU makes may not be there yet: the README says so itself.
@pytest.mark.parametrize("path", sorted({link or code for link, code in PATHS} - {results.FILE.as_posix()}))
def test_paths_exist(path):
    assert (ROOT / path).exists()
