"""Contract under test: mutants are what they say, and each is caught, listed with a reason, or reported."""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path

import pytest

from numba_attn.device import softmax
from numba_attn.kernels import flash_fp32
from numba_attn.sim import mutate
from numba_attn.sim.loader import Loader
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
    assert [row.detail.split()[0] for row in races] == ["race:", "read"]


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
