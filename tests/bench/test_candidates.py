"""Contract under test: kernels that wait for their measurement in `benchmarks/`.

Tasks that follow each other in a block, rounds whose images lie in two places by turns, tiles whose products overlap.
"""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path

import pytest

from numba_attn import sim, testing
from numba_attn.bench import problems
from numba_attn.cli import kernel_file
from numba_attn.images import MAX_WORKSPACE_BYTES
from numba_attn.launch import compiler
from numba_attn.problem import H200
from numba_attn.testing import Case


def kernel(name: str):
    return kernel_file.find(str(Path(__file__).resolve().parents[2] / "benchmarks" / name))[0]


AHEAD, OVERLAP, BOTH = (kernel(f"flash_ahead_sm90.py:{name}") for name in ("KERNEL", "OVERLAP", "AHEAD_OVERLAP"))


def assert_right(kernel, case: Case, config) -> None:
    o, lse = sim.attention(*testing.make_inputs(case), **case.kwargs, return_lse=True, kernel=kernel, config=config)
    testing.assert_accurate(o, lse, *testing.make_inputs(case), **case.kwargs)


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
    config = dataclasses.replace(AHEAD.small_config(case.problem), **changes)
    names = [launch.build.__name__ for launch in AHEAD.launches(case.problem, config)]
    assert names.count("build_flash") == flashes
    assert_right(AHEAD, case, config)
    if case.D < 64:
        assert_right(BOTH, case, dataclasses.replace(BOTH.small_config(case.problem), **changes))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (Case(1, 1, 64, 256, 16, 16), {}),
        (Case(1, 1, 70, 200, 80, 40), {}),
        (Case(1, 1, 100, 100, 16, 16, is_causal=True), {"groups": 2}),
        (Case(1, 1, 200, 260, 16, 128, is_causal=True), {"groups": 3, "slots": 3}),
        (Case(1, 1, 130, 192, 128, 128), {"groups": 2, "o_columns": 128}),
    ],
    ids=str,
)
def test_overlap(case, changes):
    assert_right(OVERLAP, case, dataclasses.replace(OVERLAP.small_config(case.problem), **changes))


@pytest.mark.parametrize("kernel", [AHEAD, BOTH], ids=["ahead", "both"])
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (Case(1, 2, 150, 150, 16, 16, is_causal=True), {"groups": 2}),
        (Case(1, 1, 200, 260, 16, 80, is_causal=True), {"groups": 3}),
    ],
    ids=str,
)
def test_a_block_for_each_task_under_causality(kernel, case, changes):
    config = dataclasses.replace(kernel.small_config(case.problem), **changes)
    assert_right(kernel, case, config)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_images_of_two_rounds_fit(d):
    problem = problems.parse(f"b32_h32_q512_k512_d{d}_v{d}_fp32_full")
    config = AHEAD.config(problem, H200)
    space = AHEAD.workspace(problem, config)
    assert space["Q_image"].shape[0] == 2
    assert sum(4 * prod(array.shape) for array in space.values()) <= MAX_WORKSPACE_BYTES
    split, *launches, rescue = AHEAD.launches(problem, config)
    assert [split.is_beside, rescue.is_beside] == [False, False]
    assert [launch.is_beside for launch in launches] == [i % 2 == 1 for i in range(len(launches))]
    assert all(launch.grid < 132 for launch in launches[:-1:2]) and launches[-1].grid == 132


@pytest.mark.parametrize(
    ("kernel", "config"),
    [(kernel, config) for kernel in (AHEAD, OVERLAP, BOTH) for config in kernel.configs()],
    ids=lambda value: getattr(value, "name", None) or f"d{value.d_bucket}",
)
def test_registers_that_are_dealt_out_are_there(kernel, config):
    few, many = config.registers
    at_start = min(255, 65536 // config.threads // 8 * 8)
    assert 24 <= few <= at_start <= many <= 240 and few % 8 == many % 8 == 0
    assert few + config.groups * many <= at_start * (config.groups + 1)


@pytest.mark.parametrize(
    ("kernel", "config"),
    [(kernel, config) for kernel in (AHEAD, OVERLAP) for config in kernel.configs() if config.d_bucket in (64, 128)],
    ids=lambda value: getattr(value, "name", None) or f"d{value.d_bucket}{'_causal' * value.is_causal}",
)
def test_spills(kernel, config):
    """None where the copying warp has 56 registers; with 32 or 40 it spills while it decides what is safe."""
    d, mask = config.d_bucket, "causal" if config.is_causal else "full"
    problem = problems.parse(f"b4_h16_q4096_k4096_d{d}_v{d}_fp32_{mask}")
    launch = next(launch for launch in kernel.launches(problem, config) if launch.config == config)
    built = compiler.binary(launch, kernel.workspace(problem, config), "sm_90a")
    assert built.spill_bytes <= (480 if config.overlaps else 0)


def test_no_candidate_falls_back():
    wide = problems.parse("b1_h2_q256_k256_d130_v64_fp32_full")
    assert AHEAD.supports(wide, H200) is None
    assert OVERLAP.supports(wide, H200) == "keeps two tiles in registers, up to 128 columns: D=130, Dv=64"
    tall = problems.parse("b4_h16_q4096_k4096_d64_v64_fp32_full")
    assert sum(launch.is_beside for launch in BOTH.launches(tall, BOTH.config(tall, H200))) == 3
    (split, flash, rescue) = OVERLAP.launches(tall, OVERLAP.config(tall, H200))
    assert flash.grid == 4 * 16 * 22 and not split.is_beside and not rescue.is_beside
