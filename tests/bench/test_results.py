"""Contract: older results, missed bars and a README that says something else are seen, each with its place."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpu import FIRST, LAST

from numba_attn.bench import bars, contenders, document, measure, problems, results, tables
from numba_attn.bench.bars import Bar
from numba_attn.bench.problems import PROBLEMS, NamedProblem, make_problem
from numba_attn.bench.results import ROOT, Results
from numba_attn.cli import main
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200

NAMES = [kernel.name for kernel in KERNELS]
SMALL = NamedProblem(make_problem(2, 3, 65, 130, 72, 72), "b2_h3_q65_k130_d72")
HEADLINE = PROBLEMS[0].full_name


def entry(known: NamedProblem, name: str, ms: float, code: str | None = None) -> dict:
    """One of a document's entries, by default of the code that is here."""
    kernel = next((kernel for kernel in KERNELS if kernel.name == name), None)
    if code is None:
        code = document_code(kernel, known) if kernel else "2.11.0+cu130"
    facts = {
        "kernel": name,
        "accuracy": "fp32",
        "problem": known.full_name,
        "ms": ms,
        "tflops": measure.tflops(known.problem, ms),
        "rel_err": 3.6e-7,
        "max_abs_err": 2e-6,
        "peak_bytes": 2147483648,
        "device": "NVIDIA H200",
        "code": code,
    }
    backend = {} if kernel else {"backend": "efficient_attention"}
    return {"name": f"test_contender[{known.name}-{name}]", "extra_info": facts | backend}


def document_code(kernel, known: NamedProblem) -> str:
    return results.code_digest(kernel, known.problem, H200)


@pytest.fixture
def saved() -> dict:
    """A document with the headline and a small problem, all of today's code."""
    gpu = {"name": "NVIDIA H200", "cc": [9, 0], "sm_count": 132}
    gpu |= {"smem_per_block_bytes": H200.smem_per_block_bytes, "l2_bytes": H200.l2_bytes}
    packages = {"torch": "2.11.0", "numba": "0.68.0", "numba-cuda": "0.30.4"}
    return {
        "machine_info": {"gpu": gpu, "packages": packages, "driver_cuda": "13.0"},
        "datetime": "2026-11-29T10:00:00+00:00",
        "benchmarks": [
            entry(PROBLEMS[0], FIRST, 28.83),
            entry(PROBLEMS[0], LAST, 170.3),
            entry(PROBLEMS[0], "torch_default", 22.79),
            entry(SMALL, FIRST, 0.0521),
            entry(SMALL, "torch_default", 0.0625),
        ],
    }


@pytest.fixture
def checkout(saved, tmp_path, monkeypatch) -> Path:
    """A repository with these results, their tables in the README, and one bar that is met."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / results.FILE).write_text(json.dumps(saved))
    (tmp_path / bars.FILE).write_text(f'[[bar]]\nproblem = "{HEADLINE}"\nkernel = "{FIRST}"\nms = 35.0\n')
    text = f"# Title\n\n{tables.BEGIN}\n\n{tables.END}\n\nThe rest.\n"
    (tmp_path / "README.md").write_text(tables.replaced(text, tables.block(Results(saved), KERNELS)))
    return tmp_path


@pytest.fixture
def call(capsys):
    def call(*argv):
        status = main(["results", *argv])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return call


def change(checkout: Path, saved: dict) -> None:
    (checkout / results.FILE).write_text(json.dumps(saved))


def test_tables_at_a_lower_precision(saved):
    known = problems.find("headline_tf32")
    found = [entry(known, "flash_fp32", 28.0), entry(known, "torch_math_tf32", 7.0)]
    own = entry(problems.find("b4_h16_q4096_k4096_d64_tf32"), "flash_split_half_sm80", 1.5)
    own["extra_info"]["accuracy"] = "tf32"
    saved["benchmarks"] += [*found, own]
    _, _, lower = tables.block(Results(saved), KERNELS).partition(tables.LOWER)
    rows = [line.split(" | ") for line in lower.splitlines()[4:]]
    assert [row[:4] for row in rows] == [
        ["| `headline_tf32`", "`flash_fp32`", "fp32", "28.0"],
        ["| `b4_h16_q4096_k4096_d64_tf32`", "`flash_split_half_sm80`", "tf32", "1.50"],
    ]
    assert [row[-2:] for row in rows] == [["7.00", "4.00 |"], ["", " |"]]


# What the results say of the code


def test_results_of_this_code(saved):
    found = Results(saved)
    assert found.problems == [HEADLINE, SMALL.full_name]
    assert all(found.why_older(result, KERNELS) is None for result in found.results)
    assert found.ratio(found.find(SMALL.full_name, FIRST)) == pytest.approx(0.0521 / 0.0625)
    assert found.find(SMALL.full_name, LAST) is None
    assert found.device == H200


def test_older_results(saved):
    saved["benchmarks"][0]["extra_info"]["code"] = "0123456789abcdef"
    saved["benchmarks"].append(entry(SMALL, "gone_fp32", 1.0, code="x"))
    found = Results(saved)
    now = document_code(KERNELS[0], PROBLEMS[0])
    assert found.why_older(found.results[0], KERNELS) == f"its code was 0123456789abcdef and is {now}"
    assert found.why_older(found.results[1], KERNELS) is None
    assert found.why_older(found.results[-1], KERNELS) == "no kernel has this name"
    kernels = [replace(kernel, supports=lambda problem, device: "not any more") for kernel in KERNELS]
    assert found.why_older(found.results[1], kernels) == "it cannot serve this any more: not any more"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda saved: saved.pop("benchmarks"), "no 'benchmarks'"),
        (lambda saved: saved["machine_info"].pop("gpu"), "no 'gpu'"),
        (lambda saved: saved["benchmarks"][1]["extra_info"].pop("rel_err"), f"headline-{LAST}] has no rel_err"),
        (lambda saved: saved["benchmarks"][1]["extra_info"].update(problem="tail"), "'tail' is not like"),
        (lambda saved: saved["benchmarks"].append(saved["benchmarks"][0]), f"two entries of {FIRST} at {HEADLINE}"),
    ],
)
def test_files_that_are_no_results(saved, checkout, call, damage, said):
    damage(saved)
    change(checkout, saved)
    status, out, err = call()
    assert (status, out, err.count("\n")) == (1, [], 1)
    assert said in err


# Bars


def test_bars(saved):
    found = Results(saved)
    limits = [
        Bar(HEADLINE, FIRST, ms=28.83),
        Bar(HEADLINE, FIRST, ms=28.82),
        Bar(SMALL.full_name, FIRST, ratio=0.84),
        Bar(SMALL.full_name, FIRST, ratio=0.83),
        Bar(SMALL.full_name, LAST, ms=1e9),
        Bar("b1_h1_q1_k1_d1_v1_fp32_full", FIRST, ms=1e9),
    ]
    missed = bars.missed(limits, found)
    assert list(missed.items()) == [
        (limits[1], "28.83 ms"),
        (limits[3], "0.834 times"),
        (limits[4], "not measured"),
        (limits[5], "not measured"),
    ]
    assert str(limits[3]) == f"{FIRST} at {SMALL.full_name}: 0.83 times torch_default's time"
    assert bars.missed(limits, None) == dict.fromkeys(limits, "not measured")


def test_a_ratio_without_torch_is_missed(saved):
    del saved["benchmarks"][-1]
    bar = Bar(SMALL.full_name, FIRST, ratio=9.0)
    assert bars.missed([bar], Results(saved)) == {bar: "torch_default was not measured"}


@pytest.mark.parametrize("ms", [float("nan"), float("inf")])
def test_a_time_that_is_no_number_meets_no_bar(saved, ms):
    saved["benchmarks"][0]["extra_info"]["ms"] = ms
    assert bars.missed([Bar(HEADLINE, FIRST, ms=100.0)], Results(saved))


BAR = f'[[bar]]\nproblem = "{HEADLINE}"\nkernel = "flash_fp32"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BAR, "bar 1: exactly one of ms and ratio"),
        (BAR + "ms = 1\nratio = 1\n", "bar 1: exactly one of ms and ratio"),
        (BAR + "ms = -1\n", "bar 1: a bar of -1 is no positive number"),
        (BAR + 'ms = "1"\n', "bar 1: a bar of '1' is no positive number"),
        (BAR + "ms = 1\n" + BAR + "seconds = 1\n", "bar 2: "),
        (BAR.replace("_fp32_full", "") + "ms = 1\n", f"bar 1: the problem's full name is {HEADLINE}"),
        (BAR.replace("b32_", "") + "ms = 1\n", "is not like"),
        (BAR + "ms = 1\n" + BAR + "ms = 1\n", "a bar is there twice"),
        ("[bars]\n", "bars is no bar"),
        ("[[bar\n", "bars.toml: "),
    ],
)
def test_files_that_are_no_bars(checkout, call, text, said):
    (checkout / bars.FILE).write_text(text)
    status, out, err = call()
    assert (status, out, err.count("\n")) == (1, [], 1)
    assert said in err


# Tables


def test_tables(saved):
    saved["benchmarks"][0]["extra_info"]["code"] = "older"
    caption, headline, title, others, legend = tables.block(Results(saved), KERNELS).split("\n\n")
    assert caption == (
        "One NVIDIA H200, driver for CUDA 13.0, torch 2.11.0, numba 0.68.0, numba-cuda 0.30.4, 2026-11-29:"
    )
    rows = headline.splitlines()
    assert rows[0] == "| kernel | ms | TFLOP/s | rel. error | time / torch's |"
    assert f"| `{FIRST}` (older code) | 28.8 | 38.1 | 3.6e-7 | 1.27 |" in rows
    assert f"| `{LAST}` | 170 | 6.5 | 3.6e-7 | 7.47 |" in rows
    assert "| `torch_default` (torch 2.11.0, efficient_attention) | 22.8 | 48.2 | 3.6e-7 | 1.00 |" in rows
    assert "| `torch_math` | not measured |  |  |  |" in rows
    assert [row.split("`")[1] for row in rows[2:]] == [*NAMES, *contenders.BASELINES]
    assert others.splitlines()[2:] == [
        f"| `{SMALL.name}` | `{FIRST}` | 0.0521 | 0.3 | 3.6e-7 | 0.0625 | 0.83 |",
    ]
    assert legend == tables.LEGEND


def test_tables_of_nothing_but_the_headline(saved):
    saved["benchmarks"] = saved["benchmarks"][:3] + [entry(PROBLEMS[0], "gone_fp32", 1.0, code="x")]
    parts = tables.block(Results(saved), KERNELS).split("\n\n")
    assert [part.partition(" ")[0] for part in parts] == ["One", "|", "*Older"]
    assert "| `gone_fp32` (older code) | 1.00 |" in parts[1]


def test_numbers():
    numbers = {170.3: "170", 1234.5: "1234", 28.83: "28.8", 2.051: "2.05", 0.305: "0.305", 0.0521: "0.0521"}
    assert {x: tables.significant(x) for x in numbers} == numbers


def test_a_readme_without_markers(checkout, call):
    (checkout / "README.md").write_text("# Title\n")
    for options in ((), ("--write",)):
        status, _, err = call(*options)
        assert status == 1
        assert "the README has no <!-- numbers" in err
    (checkout / "README.md").write_text(tables.BEGIN)
    assert "the README has no <!-- end" in call()[2]


# The command


def complete(saved: dict) -> None:
    """Entries of the kernels in between, if there are any, at the headline problem or else the small one."""
    there = {benchmark["extra_info"]["kernel"] for benchmark in saved["benchmarks"]}
    for kernel in KERNELS:
        serves = kernel.supports(PROBLEMS[0].problem, H200) is None
        if kernel.name not in there:
            saved["benchmarks"].append(entry(PROBLEMS[0] if serves else SMALL, kernel.name, 100.0))


def test_nothing_to_report(saved, checkout, call):
    complete(saved)
    change(checkout, saved)
    assert call("--write")[:2] == (
        0,
        [
            "README.md: tables written",
            f"{len(saved['benchmarks'])} entries of {results.FILE}, 1 bars",
            "nothing to report",
        ],
    )
    status, out, err = call()
    assert (status, out[-1], err) == (0, "nothing to report", "")


def test_older_code_a_missed_bar_and_another_readme(saved, checkout, call):
    complete(saved)
    saved["benchmarks"][0]["extra_info"] |= {"code": "0123", "ms": 36.0}
    change(checkout, saved)
    status, out, _ = call()
    assert status == 1
    assert out[0].startswith(f"OLDER CODE {FIRST} at {HEADLINE}: its code was 0123 and is ")
    assert out[1] == f"MISSED {FIRST} at {HEADLINE}: 35 ms; 36 ms"
    assert f"README - | `{FIRST}` | 28.8 | 38.1 | 3.6e-7 | 1.27 |" in out
    assert f"README + | `{FIRST}` (older code) | 36.0 | 38.1 | 3.6e-7 | 1.58 |" in out
    status, out, _ = call("--write")
    assert status == 1
    assert [line.partition(" ")[0] for line in out[1:3]] == ["OLDER", "MISSED"]
    assert not [line for line in out if line.startswith("README ")]
    text = (checkout / "README.md").read_text()
    assert text.startswith("# Title\n\n<!--")
    assert text.endswith("-->\n\nThe rest.\n")
    call("--write")
    assert (checkout / "README.md").read_text() == text


def test_a_kernel_that_cannot_serve_the_headline(saved):
    refuses = replace(KERNELS[0], name="narrow", supports=lambda problem, device: "too wide")
    rows = tables.block(Results(saved), [*KERNELS, refuses]).splitlines()
    assert "| `narrow` | does not serve it |  |  |  |" in rows


def test_a_kernel_without_results(saved, checkout, call):
    saved["benchmarks"] = [e for e in saved["benchmarks"] if e["extra_info"]["kernel"] != LAST]
    change(checkout, saved)
    status, out, _ = call("--write")
    assert status == 1
    assert f"NOT MEASURED {LAST}" in out


def test_without_results(checkout, call):
    (checkout / results.FILE).unlink()
    status, out, err = call("--write")
    assert (status, err) == (1, "")
    assert out[1].startswith(f"NO RESULTS: {results.FILE} is missing; `python -m numba_attn bench --json")
    assert out[2].startswith(f"MISSED {FIRST} at {HEADLINE}: 35 ms; not measured")
    assert tables.within((checkout / "README.md").read_text()) == tables.WITHOUT_RESULTS


def test_outside_a_checkout(tmp_path, monkeypatch, call):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    status, out, err = call()
    assert (status, out, err.count("\n")) == (1, [], 1)
    assert "README.md cannot be read: No such file or directory: is this a checkout?" in err


# This repository's own


def saved_here() -> Results | None:
    return results.load(ROOT / results.FILE) if (ROOT / results.FILE).exists() else None


def test_the_readme_has_the_tables_of_the_file():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    differing = tables.differing_rows(text, saved_here(), KERNELS)
    assert differing == [], "python -m numba_attn results --write"


def test_no_bar_is_missed():
    assert bars.missed(bars.load(ROOT / bars.FILE), saved_here()) == {}


def test_pending_bars_are_bars(tmp_path):
    _, _, pending = (ROOT / bars.FILE).read_text().partition("# Pending")
    lines = [line.removeprefix("# ") for line in pending.splitlines()[1:]]
    text = "\n".join(line for line in lines if line.startswith("[[") or " = " in line)
    (tmp_path / "bars.toml").write_text(text)
    known = {known.full_name for known in PROBLEMS}
    assert {bar.problem for bar in bars.load(tmp_path / "bars.toml")} <= known
    assert len(tomllib.loads(text).get("bar", [])) == text.count("[[bar]]")


def test_results_that_are_here_are_of_known_problems():
    known = {known.full_name for known in PROBLEMS}
    found = results.load(ROOT / results.FILE)
    assert set(found.problems) <= known
    assert problems.full_name(problems.HEADLINE) in found.problems
    assert all(result.accuracy and result.rel_err < 1e-3 for result in found.results)


def test_a_measurement_goes_through_to_the_tables(fake_gpu, tmp_path):
    pytest.importorskip("pytest_benchmark")
    measured = measure.measure(SMALL, contenders.by_names(SMALL, NAMES, H200), 0.05)
    document.write(tmp_path / "out.json", [measured])
    assert "| 0.500 |" in tables.block(results.load(tmp_path / "out.json"), KERNELS)
