"""Contract under test: mutants are what they say, and each is caught, listed with a reason, or reported."""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path

import pytest

from numba_attn.device import mma_tile, rescue_kernel, softmax, split_half, split_kernel
from numba_attn.kernels import flash_fp32, flash_split_half_sm80, warp_tile_fp32
from numba_attn.problem import Problem
from numba_attn.sim import mutate
from numba_attn.sim.loader import Loader
from numba_attn.sim.named_test import NamedTests
from numba_attn.sim.time_limit import TimeLimit, time_limit

TOY = Path(__file__).with_name("toy_kernel.py")
CASES = (
    mutate.Case(1, 2, 3, 5, 3, 5),
    mutate.Case(2, 1, 2, 5, 3, 34, causal=True, lse=False),
    mutate.Case(1, 1, 2, 34, 2, 3),
    mutate.Case(1, 1, 3, 5, 2, 3, causal=True, poison=2),
    mutate.Case(1, 1, 1, 70, 2, 2, minus_inf=40),
    mutate.Case(1, 1, 2, 0, 2, 2),
)
EQUIVALENT = """
[[toy]]
line = "if lane == 0 and row < lse.shape[2]:"
mutant = "drop the test `lane == 0`"
reason = "all lanes store the same value"
"""


def _mutants(tmp_path, body: str) -> dict[str, str]:
    """Description and mutated line of each mutant of a one-line kernel body."""
    file = tmp_path / "kernel.py"
    host = "LIMIT = min(1, 2)\n\n\ndef build(config):\n    N = max(config.n, 2)\n\n"
    file.write_text(f"{host}    def kernel(A, O, n):\n        {body}\n")
    found = mutate.mutants(file)
    for mutant in found:
        assert mutant.line == 8
        assert mutant.text == body
        compile(mutant.source, "mutant", "exec")
    return {mutant.description: mutant.source.splitlines()[7].strip() for mutant in found}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("cuda.syncthreads()  # why", {"drop `cuda.syncthreads()`": "pass  # why"}),
        ("cuda.syncwarp(0xF)", {"drop `cuda.syncwarp(15)`": "pass"}),
        ("wait_slot()", {"drop `wait_slot()`": "pass"}),
        ("copy_tile_async(A)", {}),
        ("n = A.shape[0]", {}),
        (
            "O[n, A[0]] = 1",
            {
                "add 1 to subscript 0 of `O[n, A[0]]`": "O[(n) + 1, A[0]] = 1",
                "add 1 to subscript 1 of `O[n, A[0]]`": "O[n, (A[0]) + 1] = 1",
                "add 1 to the subscript of `A[0]`": "O[n, A[(0) + 1]] = 1",
            },
        ),
        ("x = A[1:n]", {"add 1 to the start of the subscript of `A[1:n]`": "x = A[(1) + 1:n]"}),
        ("x = A[:n]", {}),
        ("for i in range(n): O(i)", {}),
        (
            "x = (n < 3) & flag",
            {"drop the test `n < 3`": "x = (True) & flag", "< -> <= in `n < 3`": "x = (n <= 3) & flag"},
        ),
        (
            "x = 1 if n < 3 and flag else 0",
            {
                "drop the test `n < 3`": "x = 1 if True and flag else 0",
                "< -> <= in `n < 3`": "x = 1 if n <= 3 and flag else 0",
            },
        ),
        ("x = n >= 3", {"drop the test `n >= 3`": "x = True", ">= -> > in `n >= 3`": "x = n > 3"}),
        ("x = max(n, 1)", {"max -> min in `max(n, 1)`": "x = min(n, 1)"}),
        ("n += 1", {"+= -> -= in `n += 1`": "n -= 1"}),
        ("n -= 1", {"-= -> += in `n -= 1`": "n += 1"}),
        ("x = 'é', max(n, 1)", {"max -> min in `max(n, 1)`": "x = 'é', min(n, 1)"}),
    ],
)
def test_mutants_of_a_line(tmp_path, body, expected):
    assert _mutants(tmp_path, body) == expected


def test_a_mutant_of_several_lines_keeps_the_line_numbers(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("@verb\ndef f(n):\n    wait(\n        n,\n    )\n    return max(n, 1)\n")
    wait, top = mutate.mutants(file)
    assert wait.source.splitlines() == ["@verb", "def f(n):", "    pass", "", "", "    return max(n, 1)"]
    assert top.line == 6


UNROLLED = """
def width(n):
    return [i for i in range(n)]


def load(e, A, n):
    return A[n]


def other(n):
    return A[n]


def scores(rows):
    if rows < 3:
        rows = 3

    @unrolled
    def qk(e, S, A):
        for i in width(rows):
            S(e.where(i < 2, load(e, A, i), 0.0))

    return qk
"""


def test_unrolled_verbs_lose_turns_and_so_do_the_functions_that_they_call(tmp_path):
    file = tmp_path / "verbs.py"
    file.write_text(UNROLLED)
    found = {mutant.description: mutant.source.splitlines()[mutant.line - 1].strip() for mutant in mutate.mutants(file)}
    assert found == {
        "leave out the last turn of `for i in range(n)`": "return [i for i in list(range(n))[:-1]]",
        "add 1 to the subscript of `A[n]`": "return A[(n) + 1]",
        "leave out the last turn of `for i in width(rows)`": "for i in list(width(rows))[:-1]:",
        "drop the test `i < 2`": "S(e.where(True, load(e, A, i), 0.0))",
        "< -> <= in `i < 2`": "S(e.where(i <= 2, load(e, A, i), 0.0))",
    }
    assert len(mutate.mutants(file)) == 5, "that of `other`, which no unrolled verb calls, is none"


def test_every_launch_of_a_kernel_is_mutated(tmp_path):
    loader = Loader(Path(flash_split_half_sm80.__file__), tmp_path, "KERNEL")
    reached = loader.reached()
    for function in (
        split_kernel.build_split,
        rescue_kernel.build_rescue,
        mma_tile.scores,
        mma_tile.products_of,
        split_half.split,
    ):
        line = inspect.getsourcelines(function)[1]
        assert any(line in lines for lines in reached[function.__module__]), function
    assert not any(inspect.getsourcelines(softmax.reciprocal)[1] in lines for lines in reached[softmax.__name__])
    # A changed verb reaches the launch that another module builds.
    kernel = loader.kernel(inspect.getsource(split_kernel), split_kernel.__name__)
    problem = Problem(1, 1, 1, 40, 40, 4, 4)
    split, flash, rescue = kernel.launches(problem, kernel.small_config(problem))
    assert split.build.__code__.co_filename.startswith(str(tmp_path))
    assert rescue.build is rescue_kernel.build_rescue


def test_report(tmp_path):
    (tmp_path / "equivalent.toml").write_text(EQUIVALENT)
    seen = []
    report = mutate.run(TOY, CASES, lambda *row: seen.append(row), equivalent=tmp_path / "equivalent.toml")
    assert [row.mutant.description for row in report.rows if row.outcome == "survived"] == []
    assert report.kernel == "toy"
    assert report.ok
    assert report.counts["equivalent"] == 1
    assert report.counts["error"] > 20
    assert report.counts["wrong"] > 5
    assert [number for number, _, _ in seen] == list(range(1, len(report.rows) + 1))
    races = [row for row in report.rows if row.mutant.description == "drop `cuda.syncwarp()`"]
    assert len(races) == 2
    # Which of the cases shows it depends on the time that each takes.
    assert {row.detail.split()[0] for row in races} <= {"race:", "read"}


def test_processes_share_the_mutants(tmp_path):
    (tmp_path / "equivalent.toml").write_text(EQUIVALENT)
    seen, results = [], []
    for jobs in (1, 2):
        report = mutate.run(
            TOY, CASES[:2], lambda *row: seen.append(row), equivalent=tmp_path / "equivalent.toml", jobs=jobs
        )
        results.append([(row.mutant, row.outcome == "survived") for row in report.rows])
    assert results[0] == results[1]
    assert [number for number, _, _ in seen] == [*range(1, len(results[0]) + 1)] * 2


RING = "tests/device/test_mma_tile.py::test_ring[simulator-2]"


def test_a_named_test_fails_under_a_mutant():
    (mutant,) = (m for m in mutate.mutants(mma_tile) if m.description == "drop the test `slot < slots - 1`")
    file = Path(mma_tile.__file__)
    tests = NamedTests([RING])
    assert tests.fails(RING, file, mutant.source)
    assert not tests.fails(RING, file, file.read_text())


def test_a_named_test_must_be_there():
    with pytest.raises(ValueError, match="no_such_test must pass before a mutant is tried: exit code 4"):
        NamedTests(["tests/sim/test_mutate.py::no_such_test"])


def test_survivors_that_a_named_test_must_catch(tmp_path, monkeypatch):
    monkeypatch.setattr(NamedTests, "__init__", lambda self, names: None)
    entry = f'{EQUIVALENT}test = "tests/some.py::test_name"\n'
    (tmp_path / "equivalent.toml").write_text(entry)
    for fails, outcome in ((True, "tested"), (False, "survived")):
        monkeypatch.setattr(NamedTests, "fails", lambda self, name, file, source, fails=fails: fails and file == TOY)
        report = mutate.run(TOY, CASES, equivalent=tmp_path / "equivalent.toml")
        (row,) = (row for row in report.rows if row.mutant.description == "drop the test `lane == 0`")
        assert row.outcome == outcome and "tests/some.py::test_name" in row.detail
        assert report.ok == fails


def test_survivors_and_stale_entries_are_not_ok(tmp_path):
    stale = EQUIVALENT.replace("lane == 0", "lane == 1")
    (tmp_path / "equivalent.toml").write_text(stale)
    report = mutate.run(TOY, CASES[:1], equivalent=tmp_path / "equivalent.toml")
    assert report.counts["survived"] >= 1
    assert len(report.stale) == 1
    assert not report.ok


def test_a_kernel_that_is_wrong_itself(tmp_path):
    file = tmp_path / "wrong_kernel.py"
    file.write_text(TOY.read_text().replace("s *= scale", "s *= scale * 2"))
    with pytest.raises(ValueError, match="toy itself fails"):
        mutate.run(file, CASES[:1])


def test_a_mutant_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "LEAST_LIMIT_S", 0.3)
    monkeypatch.setattr(mutate, "LIMIT_FACTOR", 1)
    file = tmp_path / "endless_kernel.py"
    loop = "n = 0\n        while n < 3:\n            n += 1\n"
    source = TOY.read_text().replace("        lane = cuda.laneid\n", f"        lane = cuda.laneid\n        {loop}")
    file.write_text(source)
    rows = {}
    only = {"+= -> -= in `n += 1`"}
    monkeypatch.setattr(mutate, "mutants", lambda path: [m for m in _all_mutants(path) if m.description in only])
    report = mutate.run(file, CASES[:1], lambda number, count, row: rows.update({row.mutant.description: row.outcome}))
    assert rows == {"+= -> -= in `n += 1`": "endless"}
    assert report.ok


_all_mutants = mutate.mutants


def test_verbs_that_are_left_to_another_kernel(monkeypatch):
    rows = []
    monkeypatch.setattr(mutate, "_in_processes", lambda trial, found, jobs: rows.append(found) or iter(()))
    for without in ([], [(warp_tile_fp32.__file__, "KERNEL")], [(flash_fp32.__file__, "KERNEL")]):
        mutate.run(Path(flash_fp32.__file__), CASES[:1], without=without)
    alone, beside_a_rung_before, beside_itself = ({(module, m.line, m.description) for module, m in x} for x in rows)
    own = {row for row in alone if row[0] is None}
    assert beside_itself == own < beside_a_rung_before < alone
    assert {row[0] for row in alone - beside_a_rung_before} >= {"numba_attn.device.mask"}


def test_verbs_are_mutated_too(monkeypatch):
    file = Path(flash_fp32.__file__)
    monkeypatch.setattr(
        mutate, "mutants", lambda path: [m for m in _all_mutants(path) if "max -> min" in m.description]
    )
    report = mutate.run(file, [mutate.Case(1, 1, 1, 70, 2, 3, spread=1000)], verbs=["numba_attn.device.tile"])
    rows = [row for row in report.rows if row.file != file.name]
    assert len(rows) == 2
    assert {row.outcome for row in rows} == {"wrong"}


def test_a_changed_verb_reaches_the_verbs_that_use_it(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("from numba_attn.device import tile\n\nKERNEL = tile.online_softmax.py_func.__globals__\n")
    loader = Loader(file, tmp_path, "KERNEL")
    assert loader.modules.index("numba_attn.device.softmax") < loader.modules.index("numba_attn.device.tile")
    changed = loader.kernel(inspect.getsource(softmax), "numba_attn.device.softmax")
    assert changed["warp_sum"]._defn.__code__.co_filename.startswith(str(tmp_path))
    assert loader.kernel()["warp_sum"] is softmax.warp_sum
    assert sys.modules["numba_attn.device.softmax"] is softmax


def test_time_limit_leaves_nothing_behind():
    with pytest.raises(TimeLimit), time_limit(0.05):
        while True:
            pass
    with time_limit(0.05):
        pass
    time.sleep(0.1)
