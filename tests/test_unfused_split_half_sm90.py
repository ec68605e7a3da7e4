"""Contract under test: tiles split beside the products give the same bits, whichever of two launches is ahead."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import numba_attn
from numba_attn import images, sim, testing
from numba_attn.device.split_kernel import build_split
from numba_attn.kernel import Launch
from numba_attn.kernels import unfused_split_half_sm90
from numba_attn.kernels.unfused_split_half_sm90 import KERNEL, Config
from numba_attn.launch import compiler
from numba_attn.problem import H200, Problem
from numba_attn.testing import Case
from numba_attn.two_products import sms_of_product

HEADLINE = Problem(32, 32, 32, 512, 512, 1024, 1024, vector=4)


def apart(config: Config) -> Config:
    return dataclasses.replace(config, beside=False)


def batches_of(steps) -> int:
    return names_of(steps).count("scores")


def names_of(steps) -> list[str]:
    return [step.build.__name__.removeprefix("build_") + "'" * step.is_beside for step in steps]


def test_order_of_launches():
    config = KERNEL.config(HEADLINE, H200)
    steps = KERNEL.launches(HEADLINE, config)
    per_batch = ["scores", "split'", "weights", "outputs"]
    n = batches_of(steps)
    assert n > 2
    expected = ["split", *(n - 1) * [*per_batch, "split'"], *per_batch, "rescue"]
    assert names_of(steps) == expected
    # A tile is split as often as without.
    plain = KERNEL.launches(HEADLINE, apart(config))
    tiles = [
        sum(step.grid * step.config.tiles for step in some if step.build is build_split) for some in (steps, plain)
    ]
    assert tiles[0] == tiles[1] == 3 * 32 * 32 * 8 * 16
    # Each product leaves SMs to what runs beside it, the last one none.
    products = [step.grid for step in steps if step.build.__name__ in ("build_scores", "build_outputs")]
    assert all(grid < unfused_split_half_sm90.SMS for grid in products[:-1])
    assert products[-1] == unfused_split_half_sm90.SMS


def test_launches_that_run_side_by_side_say_so():
    config = KERNEL.config(HEADLINE, H200)
    workspace = KERNEL.workspace(HEADLINE, config)
    seen = {(step.build, step.is_beside): step for step in KERNEL.launches(HEADLINE, config)}
    for (build, is_beside), step in seen.items():
        ptx = compiler.ptx(step, workspace, H200.arch)
        assert ptx.count("griddepcontrol.launch_dependents") == (build.__name__ in ("build_scores", "build_outputs"))
        assert ptx.count("griddepcontrol.wait") == is_beside


@pytest.mark.parametrize(
    ("blocks", "steps", "tiles", "sms"),
    [(512, 16, 8192, 103), (1024, 8, 16384, 94), (1, 16, 64, 1), (132, 16, 1, 66), (10**6, 8, 1, 131)],
)
def test_sms_of_product(blocks, steps, tiles, sms):
    assert sms_of_product(blocks, steps, tiles, 132) == sms


def in_other_order(launches):
    """Each launch that may start ahead of the one before, ahead of it."""

    def swapped(problem, config) -> tuple[Launch, ...]:
        steps = list(launches(problem, config))
        for i, step in enumerate(steps):
            if step.is_beside:
                steps[i - 1], steps[i] = steps[i], steps[i - 1]
        return tuple(steps)

    return swapped


BATCHES = {
    "of heads": (Case(2, 1, 40, 70, 66, 20), 2),
    "of rows": (Case(1, 1, 200, 40, 20, 20, is_causal=True), 2),
    "with a block for the rescue": (Case(1, 3, 5, 70, 16, 16, poison="k_nan"), 3),
    "one half": (Case(1, 2, 40, 70, 20, 66, precision="tf32"), 2),
}


@pytest.mark.parametrize("change", [lambda launches: launches, in_other_order], ids=["in order", "in other order"])
@pytest.mark.parametrize(("case", "least"), BATCHES.values(), ids=BATCHES)
def test_tiles_split_beside(case, least, change, monkeypatch):
    config = KERNEL.small_config(case.problem)
    one = KERNEL.workspace(dataclasses.replace(case.problem, B=1, H=1, Hkv=1), config)
    # Flags are those of all heads.
    one["unsafe"] = KERNEL.workspace(case.problem, config)["unsafe"]
    n_bytes = sum(4 * int(np.prod(space.shape)) for space in one.values())
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", n_bytes - 1 if case.B * case.H == 1 else n_bytes)
    assert batches_of(KERNEL.launches(case.problem, config)) == least
    arrays, options = testing.make_inputs(case), {**case.kwargs, "precision": case.precision, "return_lse": True}
    expected = sim.attention(*arrays, **options, kernel=KERNEL, config=apart(config))
    testing.assert_accurate(*expected, *arrays, **case.kwargs, accuracy=case.precision)
    kernel = dataclasses.replace(KERNEL, launches=change(KERNEL.launches))
    for x, y in zip(sim.attention(*arrays, **options, kernel=kernel, config=config), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(
    ("shape", "causal"),
    [((8, 16, 512, 512, 1024), False), ((2, 4, 1000, 777, 300), True), ((1, 2, 20000, 3000, 512), True)],
    ids=str,
)
def test_gpu_tiles_split_beside(shape, causal, precision):
    """Many launches, so that one that starts too early, or a tile that comes too late, shows."""
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{KERNEL.name} is for compute capability 9.0, this GPU has {torch.cuda.get_device_capability()}")
    B, H, Lq, Lk, D = shape
    q, k, v = (torch.randn(B, H, L, D, device="cuda") for L in (Lq, Lk, Lk))
    plain = dataclasses.replace(KERNEL, config=lambda problem, device: apart(KERNEL.config(problem, device)))

    def attention(kernel):
        return numba_attn.attention(q, k, v, causal=causal, precision=precision, return_lse=True, kernel=kernel)

    expected = attention(plain)
    for _ in range(20):
        for x, y in zip(attention(KERNEL), expected, strict=True):
            assert torch.equal(x, y)
