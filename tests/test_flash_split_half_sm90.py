"""Contract under test: tiles and parts of any size through the ring, by any groups, and the same bits every time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import numba_attn
from numba_attn import sim, testing
from numba_attn.kernels.flash_split_half_sm90 import KERNEL, Config
from numba_attn.problem import H200
from numba_attn.testing import Case


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (Case(1, 2, 150, 150, 16, 16, is_causal=True), {"groups": 2}),
        (Case(1, 2, 150, 200, 16, 70, is_causal=True), {"groups": 2, "ping_pong": True}),
        (Case(1, 3, 200, 100, 16, 16), {"groups": 3, "ping_pong": True, "slots": 2}),
        (Case(1, 2, 150, 70, 80, 40), {"groups": 2}),
        (Case(1, 2, 150, 150, 16, 16), {"groups": 3, "ping_pong": True}),
        # three groups in turns, tiles of 96 columns in slots of 128
        (
            Case(1, 1, 130, 70, 80, 96, is_causal=True),
            {"groups": 3, "ping_pong": True, "part": 128, "slots": 4, "s_chains": 2},
        ),
        (Case(1, 2, 70, 100, 130, 16), {"part": 192, "o_columns": 192, "s_chains": 3}),
        (Case(1, 1, 20, 200, 16, 130), {"part": 192, "slots": 2}),  # several sums from one slot
        (Case(1, 2, 5, 70, 16, 16, poison="k_nan"), {"groups": 2}),
        # tiles of as many parts as there are slots, and of fewer
        (Case(1, 1, 70, 100, 256, 200), {}),
        (Case(1, 1, 20, 100, 200, 256, is_causal=True), {"slots": 6}),
    ],
    ids=str,
)
def test_other_configs(case, changes):
    config = dataclasses.replace(KERNEL.small_config(case.problem), **changes)
    o, lse = sim.attention(*testing.make_inputs(case), **case.kwargs, return_lse=True, kernel=KERNEL, config=config)
    testing.assert_accurate(o, lse, *testing.make_inputs(case), **case.kwargs)


@pytest.mark.parametrize("D", [80, 130])
def test_no_copy_is_in_flight_when_a_block_without_enough_keys_ends(D):
    case = Case(1, 1, 5, 9, D, 16)
    o, lse = sim.attention(*testing.make_inputs(case), return_lse=True, kernel=KERNEL)
    testing.assert_accurate(o, lse, *testing.make_inputs(case))


@pytest.mark.parametrize("D", [16, 80, 130, 256])
def test_no_copy_is_in_flight_when_an_unsafe_block_ends(D):
    case = Case(1, 1, 5, 40, D, 16)
    q, k, v = testing.make_inputs(case)
    k[..., 3, 2] = 2.0**20
    o, lse = sim.attention(q, k, v, return_lse=True, kernel=KERNEL)
    testing.assert_accurate(o, lse, q, k, v)


def test_nan_in_rows_of_any_warpgroup():
    case = Case(1, 1, 130, 40, 16, 16)
    q, k, v = testing.make_inputs(case)
    q[..., 70, 3] = q[..., 127, 15] = np.nan
    config = dataclasses.replace(KERNEL.small_config(case.problem), groups=2)
    o = sim.attention(q, k, v, kernel=KERNEL, config=config)
    assert list(np.flatnonzero(np.isnan(o).any((0, 1, 3)))) == [70, 127]


def test_without_images_of_q():
    problem = Case(2, 3, 200, 100, 64, 48).problem
    config = KERNEL.config(problem, H200)
    space = KERNEL.workspace(problem, config)
    assert space["Q_image"].shape == (6, 0) and space["Q_record"].shape == (6, 0, 4)
    split, flash, _ = KERNEL.launches(problem, config)
    assert split.grid == 6 * (2 + 2)
    assert not {"Q_image", "Q_record"} & set(flash.args)


def test_one_product_of_wide_heads():
    case = Case(1, 1, 70, 100, 256, 200)
    inputs = testing.make_inputs(case)
    o, lse = sim.attention(*inputs, return_lse=True, kernel=KERNEL, precision="tf32")
    testing.assert_accurate(o, lse, *inputs, accuracy="tf32")


def test_a_tile_that_does_not_fit_in_the_slots():
    with pytest.raises(ValueError, match="a tile of self.d_bucket=256 columns does not fit in self.slots=3"):
        Config(256, groups=2, part=64, slots=3, s_chains=1, o_columns=64)


@pytest.mark.parametrize("changes", [{"part": 32}, {"d_bucket": 192, "part": 128}, {"o_columns": 48}])
def test_sizes_that_do_not_divide(changes):
    with pytest.raises(ValueError, match="64 must divide"):
        dataclasses.replace(Config(128, groups=2, part=128, slots=4, s_chains=1, o_columns=64), **changes)


@pytest.mark.parametrize("groups", [2, 3])
def test_registers_that_are_dealt_out_are_there(groups):
    config = Config(64, groups=groups, part=64, slots=4, s_chains=1, o_columns=64)
    few, many = config.registers
    at_start = min(255, 65536 // config.threads // 8 * 8)
    assert 24 <= few <= at_start <= many <= 240 and few % 8 == many % 8 == 0
    assert few + groups * many <= at_start * (groups + 1)


STRESS = [
    (2, 16, 1024, 1024, 128, False),
    (2, 16, 1000, 777, 128, True),
    (4, 16, 1024, 1024, 64, False),
    (3, 7, 1000, 1000, 80, True),
    (2, 8, 1024, 1024, 256, False),
    (1, 9, 515, 700, 192, True),
    (32, 32, 192, 256, 64, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", STRESS, ids=str)
def test_gpu_hundreds_of_launches_give_the_same_bits(shape):
    """Also while another stream keeps tensor cores and memory busy: no result depends on who is faster."""
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{KERNEL.name} is for compute capability 9.0, this GPU has {torch.cuda.get_device_capability()}")
    B, H, Lq, Lk, D, is_causal = shape
    q, k, v = (torch.randn(B, H, L, D, device="cuda") for L in (Lq, Lk, Lk))

    def call():
        return numba_attn.attention(q, k, v, causal=is_causal, return_lse=True, kernel=KERNEL)

    o, lse = call()
    torch.cuda.synchronize()
    assert torch.isfinite(o).all()
    other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for round_ in range(300):
        if round_ % 3:
            with torch.cuda.stream(other):
                busy = (busy @ busy).clamp(-1, 1)
        again, lse_again = call()
        # Heads that differ in any bit.
        wrong += ((again != o).flatten(2).any(-1) | (lse_again != lse).any(-1)).sum()
        if round_ % 50 == 49:
            torch.cuda.synchronize()
    assert wrong.item() == 0, f"{wrong.item()} heads of {300 * B * H}"
