"""Contract under test: kernels that wait for their measurement in `benchmarks/`.

Tasks that follow each other in a block, rounds whose images lie in two places by turns, tiles whose products overlap.
"""

from __future__ import annotations

import dataclasses
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest

from numba_attn import images, sim, testing
from numba_attn.bench import problems
from numba_attn.cli import kernel_file
from numba_attn.device.verb import twin_of
from numba_attn.images import MAX_WORKSPACE_BYTES
from numba_attn.launch import compiler
from numba_attn.problem import H200
from numba_attn.testing import Case


def kernel(name: str):
    return kernel_file.find(str(Path(__file__).resolve().parents[2] / "benchmarks" / name))[0]


AHEAD, OVERLAP, BOTH = (kernel(f"flash_ahead_sm90.py:{name}") for name in ("KERNEL", "OVERLAP", "AHEAD_OVERLAP"))


def assert_right(kernel, case: Case, config, arrays=None) -> None:
    arrays = testing.make_inputs(case) if arrays is None else arrays
    o, lse = sim.attention(*arrays, **case.kwargs, return_lse=True, kernel=kernel, config=config)
    testing.assert_accurate(o, lse, *arrays, **case.kwargs)


def in_other_order(problem, config) -> tuple:
    """AHEAD's launches, each that may start ahead of the one before ahead of it."""
    steps = list(AHEAD.launches(problem, config))
    for i, step in enumerate(steps):
        if step.is_beside:
            steps[i - 1], steps[i] = steps[i], steps[i - 1]
    return tuple(steps)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Threads that multiply two tiles together, each time one does."""
    module, seen = sys.modules[AHEAD.launches.__module__], []
    advance = module.advance

    def counted(*args):
        verb = advance(*args)
        twin = verb._sim_twin

        def count(thread, *operands):
            seen.append(thread.index)
            twin(thread, *operands)

        return twin_of(verb)(count) and verb

    monkeypatch.setattr(module, "advance", counted)
    return seen


@pytest.mark.parametrize(
    ("case", "changes", "flashes"),
    [
        (Case(2, 4, 150, 100, 16, 16), {"sms": 2}, 4),
        (Case(1, 5, 200, 70, 24, 16), {"sms": 2}, 3),
        (Case(3, 2, 70, 40, 16, 16, poison="k_nan"), {"sms": 2}, 3),
        (Case(1, 2, 200, 40, 130, 16), {"sms": 2}, 2),
        (Case(1, 3, 200, 40, 16, 16), {"sms": 3, "groups": 3}, 1),
    ],
    ids=str,
)
def test_rounds(case, changes, flashes):
    config = dataclasses.replace(AHEAD.small_config(case.problem), **changes)
    names = [launch.build.__name__ for launch in AHEAD.launches(case.problem, config)]
    assert names.count("build_flash") == flashes
    assert_right(AHEAD, case, config)
    if flashes > 1:
        # Images of the next round may be there before this one's are read.
        assert_right(dataclasses.replace(AHEAD, launches=in_other_order), case, config)


@pytest.mark.parametrize(
    ("shape", "tasks"),
    [
        ((4, 16, 2048, 64), [352, 352]),
        ((4, 16, 4096, 128), [512, 512, 512, 512]),
        ((32, 32, 512, 256), [640, 640, 640, 640, 640, 640, 256]),
        ((7, 7, 4096, 64), [308, 308, 308, 154]),
        ((3, 7, 1000, 80), None),
        ((1, 1, 65536, 64), None),
    ],
    ids=str,
)
def test_rounds_fill_the_sms(shape, tasks):
    B, H, L, d = shape
    problem = problems.make_problem(B, H, L, L, d, d)
    config = AHEAD.config(problem, H200)
    found = sys.modules[AHEAD.launches.__module__].rounds(problem, config)
    assert tasks == (found and [batch.heads * batch.m_blocks for batch in found.batches()])


@pytest.mark.parametrize(
    ("case", "changes", "tiles"),
    [
        (Case(1, 1, 64, 256, 16, 16), {}, 3),
        (Case(1, 1, 70, 200, 80, 40), {}, 4),
        (Case(1, 1, 100, 100, 16, 16, is_causal=True), {"groups": 2}, 0),
        (Case(1, 1, 200, 260, 16, 128, is_causal=True), {"groups": 3, "slots": 3}, 3),
        (Case(1, 1, 130, 192, 128, 128), {"groups": 2, "o_columns": 128}, 6),
    ],
    ids=str,
)
def test_overlap(case, changes, tiles, calls):
    assert_right(OVERLAP, case, dataclasses.replace(OVERLAP.small_config(case.problem), **changes))
    assert len(calls) == tiles * 128


def test_overlap_in_every_task_of_a_block_and_tiles_of_any_scale(calls):
    case = Case(1, 4, 64, 200, 16, 16)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, n, 16), np.float32) for n in (64, 200, 200))
    scales = np.exp2(np.repeat([0, -3, 2, -1], 64)[:200, None], dtype=np.float32)
    config = dataclasses.replace(BOTH.small_config(case.problem), sms=2)
    assert_right(BOTH, case, config, (q, k * scales, v * scales))
    assert len(calls) == 4 * 2 * 128


def test_tasks_for_the_rescue_between_others():
    case = Case(1, 1, 320, 40, 16, 16)
    q, k, v = testing.make_inputs(case)
    q = q.copy()
    q[0, 0, 64], q[0, 0, 200] = np.nan, np.inf
    config = dataclasses.replace(AHEAD.small_config(case.problem), sms=2)
    assert [step.grid for step in AHEAD.launches(case.problem, config)][1] == 2
    assert_right(AHEAD, case, config, (q, k, v))


@pytest.mark.parametrize("kernel", [AHEAD, BOTH], ids=["ahead", "both"])
def test_rows_of_a_head_in_batches(kernel, monkeypatch):
    case = Case(1, 1, 200, 140, 16, 16, is_causal=True)
    config = kernel.small_config(case.problem)
    n_bytes = sum(4 * prod(space.shape) for space in kernel.workspace(case.problem, config).values())
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", n_bytes - 1)
    firsts = [step.args[11] for step in kernel.launches(case.problem, config) if step.build.__name__ == "build_flash"]
    assert firsts == [0, 128]
    assert_right(kernel, case, config)


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
    [
        (kernel, config)
        for kernel in (AHEAD, OVERLAP)
        for config in kernel.configs()
        if config.d_bucket in (64, 128, 256)
    ],
    ids=lambda value: getattr(value, "name", None) or f"d{value.d_bucket}{'_causal' * value.is_causal}",
)
def test_machine_code(kernel, config):
    """None where the copying warp has 56 registers; with 24 to 40 it spills while it decides what is safe."""
    d, mask = config.d_bucket, "causal" if config.is_causal else "full"
    problem = problems.parse(f"b4_h16_q4096_k4096_d{d}_v{d}_fp32_{mask}")
    launch = next(launch for launch in kernel.launches(problem, config) if launch.config == config)
    built = compiler.binary(launch, kernel.workspace(problem, config), "sm_90a")
    assert built.spill_bytes <= (1000 if d == 256 else 480 if config.overlaps else 0)
    ptx = compiler.ptx(launch, kernel.workspace(problem, config), "sm_90a")
    assert ptx.count("griddepcontrol.launch_dependents") == 1


def test_tiles_that_overlap_lie_in_one_slot():
    config = next(config for config in OVERLAP.configs() if config.d_bucket == 128)
    with pytest.raises(ValueError, match="in one slot"):
        dataclasses.replace(config, part=64)


def test_no_candidate_falls_back():
    wide = problems.parse("b1_h2_q256_k256_d130_v64_fp32_full")
    assert AHEAD.supports(wide, H200) is None
    assert OVERLAP.supports(wide, H200) == "keeps two tiles in registers, up to 128 columns: D=130, Dv=64"
    tall = problems.parse("b4_h16_q4096_k4096_d64_v64_fp32_full")
    assert sum(launch.is_beside for launch in BOTH.launches(tall, BOTH.config(tall, H200))) == 3
    (split, flash, rescue) = OVERLAP.launches(tall, OVERLAP.config(tall, H200))
    assert flash.grid == 4 * 16 * 22 and not split.is_beside and not rescue.is_beside
