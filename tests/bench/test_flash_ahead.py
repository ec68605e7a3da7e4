"""Contract under test: tasks that follow each other in a block, rounds whose images lie in two places by turns."""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path

import pytest

from numba_attn import sim, testing
from numba_attn.bench import problems
from numba_attn.cli import kernel_file
from numba_attn.images import MAX_WORKSPACE_BYTES
from numba_attn.problem import H200
from numba_attn.testing import Case

KERNEL, _, _ = kernel_file.find(str(Path(__file__).resolve().parents[2] / "benchmarks" / "flash_ahead_sm90.py"))


def names(case: Case, config) -> list[str]:
    return [launch.build.__name__ for launch in KERNEL.launches(case.problem, config)]


@pytest.mark.parametrize(
    ("case", "changes", "flashes"),
    [
        (Case(2, 4, 150, 100, 16, 16), {"sms": 2}, 4),
        (Case(1, 5, 200, 70, 24, 16), {"sms": 2}, 3),
        (Case(3, 2, 70, 40, 16, 16, poison="k_nan"), {"sms": 2}, 3),
        (Case(1, 2, 200, 40, 130, 16), {"sms": 2}, 2),
        (Case(1, 3, 400, 40, 16, 16), {"sms": 3, "groups": 3}, 1),
    ],
    ids=str,
)
def test_rounds(case, changes, flashes):
    config = dataclasses.replace(KERNEL.small_config(case.problem), **changes)
    assert names(case, config).count("build_flash") == flashes
    o, lse = sim.attention(*testing.make_inputs(case), **case.kwargs, return_lse=True, kernel=KERNEL, config=config)
    testing.assert_accurate(o, lse, *testing.make_inputs(case), **case.kwargs)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_images_of_two_rounds_fit(d):
    problem = problems.parse(f"b32_h32_q512_k512_d{d}_v{d}_fp32_full")
    config = KERNEL.config(problem, H200)
    space = KERNEL.workspace(problem, config)
    assert space["Q_image"].shape[0] == 2
    assert sum(4 * prod(array.shape) for array in space.values()) <= MAX_WORKSPACE_BYTES
    split, *launches, rescue = KERNEL.launches(problem, config)
    assert [split.is_beside, rescue.is_beside] == [False, False]
    assert [launch.is_beside for launch in launches] == [i % 2 == 1 for i in range(len(launches))]
    assert all(launch.grid < 132 for launch in launches[:-1:2]) and launches[-1].grid == 132


@pytest.mark.parametrize("config", list(KERNEL.configs()), ids=lambda config: f"d{config.d_bucket}")
def test_registers_that_are_dealt_out_are_there(config):
    few, many = config.registers
    at_start = min(255, 65536 // config.threads // 8 * 8)
    assert 24 <= few <= at_start <= many <= 240 and few % 8 == many % 8 == 0
    assert few + config.groups * many <= at_start * (config.groups + 1)
