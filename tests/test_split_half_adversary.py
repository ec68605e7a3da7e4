"""Contract under test: inputs that know how halves lose digits. Every result is of the class asked for; what halves
would not serve is left to the rescue, and usual inputs of any size are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

import numba_attn
from numba_attn import reference, sim, testing
from numba_attn.device import split_half
from numba_attn.kernel import Part
from numba_attn.kernels import flash_split_half_sm90, unfused_split_half_sm80, unfused_split_half_sm90
from numba_attn.kernels.flash_split_half_sm80 import KERNEL, Config
from numba_attn.problem import PRECISIONS, Problem

BIG, SMALL = np.float32(2.0**20), np.float32(2.0**-20)
PLACES = {"first": 0, "middle": 0.5, "last": 1}


def at(x: np.ndarray, place: float) -> tuple[int, int]:
    """Row and column of a place of the last two dimensions."""
    rows, columns = x.shape[-2:]
    return round(place * (rows - 1)), round(place * (columns - 1))


@dataclass(frozen=True)
class Attack:
    """Inputs by a change of N(0, 1) arrays q, k, v [B, H, rows, columns]."""

    change: Callable
    """In place; what it returns, if anything, takes the place of q, k and v."""
    unsafe: str = "?"
    """Blocks left to the rescue: `none`, `all`, `first`, `last` or the `first head`'s; `?` where either may serve."""
    scale: float | None = None
    heads: int = 1
    unsafe_of_one_half: str | None = None
    """The same at precision tf32, where that is not so."""


def outlier(operand: int, place: float):
    def change(*arrays):
        x = arrays[operand]
        x[..., *at(x, place)] = BIG

    return change


def last_column(big: int, zero: int | None):
    def change(*arrays):
        arrays[big][..., -1] *= BIG
        if zero is not None:
            arrays[zero][..., -1] = 0

    return change


def rows_of_all_sizes(*operands: int):
    def change(*arrays):
        for i in operands:
            n = arrays[i].shape[-2]
            sizes = 2.0 ** np.linspace(-20, 20, n)
            arrays[i][...] *= np.random.default_rng(i).permutation(sizes).astype(np.float32)[:, None]

    return change


def times(q_factor, k_factor=None, v_factor=None):
    def change(q, k, v):
        q *= np.float32(q_factor)
        k *= np.float32(q_factor if k_factor is None else k_factor)
        v *= np.float32(q_factor if v_factor is None else v_factor)

    return change


def heads_apart(factor):
    def change(q, k, v):
        for x in (q, k, v):
            x[:, 0] *= np.float32(factor)

    return change


def balanced_column(factor):
    def change(q, k, v):
        q[..., 3] *= np.float32(factor)
        k[..., 3] *= np.float32(1 / factor)

    return change


def huge_last_row_of_v(q, k, v):
    v[..., -1, :] *= np.float32(2.0**36)


def equal_rows(q, k, v):
    for x in (q, k, v):
        x[...] = x[..., :1, :]


def poison(value, *operands: int, key: float):
    def change(*arrays):
        for i in operands:
            x = arrays[i]
            x[..., *at(x, key)] = value

    return change


def zero(*operands: int):
    def change(*arrays):
        for i in operands:
            arrays[i][...] = 0

    return change


def one_element_a_row(*operands: int, size: float = 1):
    def change(*arrays):
        for i in operands:
            x, columns = arrays[i], arrays[i].shape[-1]
            keep = np.arange(columns) == (7 * np.arange(x.shape[-2]) % columns)[:, None]
            x[...] = np.where(keep, np.float32(size) * x, 0)

    return change


def small_rows_of_v(factor: float):
    def change(q, k, v):
        v[..., ::3, :] *= np.float32(factor)

    return change


def denormals(q, k, v):
    return 4e-39 * q, np.float32(1e38) * np.clip(k, -2, 2), 1e-39 * v


def aligned_key(q, k, v):
    k[..., 5, :] = 40 * q[..., 9, :] / np.linalg.norm(q[..., 9, :])


def of_one_sign(q, k, v):
    return np.abs(q), 4 * np.abs(k), v


def nearly_cancelling(q, k, v):
    q[..., -1], k[..., -1] = q[..., 0] * np.float32(1.001), -k[..., 0] * np.float32(0.999)
    for column in (0, -1):
        q[..., column] *= 2**5
        k[..., column] *= 2**3


ATTACKS = {
    "normal": Attack(lambda q, k, v: None, "none"),
    "times 1e-3": Attack(times(1e-3), "none"),
    "times 1e3": Attack(times(1e3), "none", unsafe_of_one_half="all"),
    "times 1e-36": Attack(times(1e-36), "none"),
    "times 1e-18": Attack(times(1e-18), "none"),
    "times 1e12": Attack(times(1e12), "none", unsafe_of_one_half="all"),
    "Q times 2^-100, K times 2^100": Attack(times(2.0**-100, 2.0**100, 1), "none"),
    "Q times 2^100, K times 2^-100": Attack(times(2.0**100, 2.0**-100, 2.0**100), "none"),
    "V near the largest": Attack(lambda q, k, v: (q, k, np.float32(3e38) * np.sign(v)), "none"),
    "all near the largest": Attack(lambda q, k, v: tuple(np.float32(3e38) * np.sign(x) for x in (q, k, v)), "all"),
    "V denormal": Attack(times(1, 1, 1e-41), "?"),
    "denormals": Attack(denormals, "?"),
    "V at the smallest": Attack(lambda q, k, v: (q, k, np.float32(1e-45) * np.sign(v)), "none"),
    "heads 2^20 apart": Attack(heads_apart(BIG), "none", heads=2, unsafe_of_one_half="first head"),
    "heads 2^-20 apart": Attack(heads_apart(SMALL), "none", heads=2),
    "a head 2^-30 of the others": Attack(heads_apart(2.0**-30), "none", heads=2),
    **{
        f"outlier in {'QKV'[i]}, {name}": Attack(outlier(i, place), unsafe, unsafe_of_one_half=of_one_half)
        for i in range(3)
        for name, place in PLACES.items()
        for unsafe in [{"first": "first", "middle": "first", "last": "last"}[name] if i == 0 else "all"]
        for of_one_half in [None if i < 2 else "none"]
    },
    "last column of Q, K zero there": Attack(last_column(0, 1), "all"),
    "last column of K, Q zero there": Attack(last_column(1, 0), "all"),
    "last column of V": Attack(last_column(2, None), "?"),
    "rows of Q of all sizes": Attack(rows_of_all_sizes(0), "?"),
    "rows of K of all sizes": Attack(rows_of_all_sizes(1), "all"),
    "rows of V of all sizes": Attack(rows_of_all_sizes(2), "all"),
    "rows of all sizes": Attack(rows_of_all_sizes(0, 1, 2), "all"),
    "balanced column": Attack(balanced_column(BIG), "all"),
    "balanced column, 2^36": Attack(balanced_column(2.0**36), "all"),
    "last row of V huge": Attack(huge_last_row_of_v, "all"),
    "equal rows": Attack(equal_rows, "?"),
    "all equal": Attack(lambda q, k, v: tuple(np.full_like(x, -1.1) for x in (q, k, v)), "none"),
    "sparse Q": Attack(one_element_a_row(0), "none"),
    "sparse Q, large": Attack(one_element_a_row(0, size=2.0**14), "all"),
    "sparse K, large": Attack(one_element_a_row(1, size=2.0**14), "all"),
    "sparse": Attack(one_element_a_row(0, 1, 2), "?"),
    "every third row of V small": Attack(small_rows_of_v(2.0**-15), "all", unsafe_of_one_half="none"),
    "every third row of V tiny": Attack(small_rows_of_v(2.0**-27), "all"),
    "sparse Q, huge": Attack(one_element_a_row(0, size=2.0**28), "all"),
    "one element a row of V": Attack(one_element_a_row(2), "?"),
    "every third row of V a little smaller": Attack(small_rows_of_v(2.0**-9), "none"),
    "a key along a query": Attack(aligned_key, "none"),
    "scores of one sign": Attack(of_one_sign, "none"),
    "large columns that nearly cancel": Attack(nearly_cancelling, "first"),
    "zero Q": Attack(zero(0), "none"),
    "zero K": Attack(zero(1), "none"),
    "zero V": Attack(zero(2), "none"),
    "zeros": Attack(zero(0, 1, 2), "none"),
    "scale 0": Attack(lambda q, k, v: None, "none", scale=0.0),
    "scale -0.3": Attack(lambda q, k, v: None, "none", scale=-0.3),
    "scale 1e30": Attack(lambda q, k, v: None, "?", scale=1e30),
    "scale 1e-45": Attack(lambda q, k, v: None, "none", scale=1e-45),
    "NaN in a key": Attack(poison(np.nan, 1, key=0.5), "all"),
    "NaN in the last key": Attack(poison(np.nan, 1, 2, key=1), "all"),
    "Inf in the last key": Attack(poison(np.inf, 1, 2, key=1), "all"),
    "-Inf in a value": Attack(poison(-np.inf, 2, key=0.5), "all"),
    "Inf in a query": Attack(poison(np.inf, 0, key=0.5), "first"),
    "NaN in the last query": Attack(poison(np.nan, 0, key=1), "last"),
}


@functools.cache
def inputs(name: str, B: int, H: int, Lq: int, Lk: int, D: int, Dv: int):
    rng = np.random.default_rng(0)
    shapes = (B, H, Lq, D), (B, H, Lk, D), (B, H, Lk, Dv)
    arrays = tuple(rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    changed = ATTACKS[name].change(*arrays)
    return tuple(x.astype(np.float32) for x in changed or arrays)


@functools.cache
def expected(name: str, *sizes: int, causal: bool) -> testing.Expected:
    return testing.Expected(*inputs(name, *sizes), causal=causal, scale=ATTACKS[name].scale)


def simulated(q, k, v, causal: bool, scale: float | None, config=None, precision="fp32", kernel=KERNEL):
    """O, lse and which blocks were left to the rescue: the kernel's launches, by hand."""
    B, H, Lq, D = q.shape
    problem = Problem(B, H, H, Lq, k.shape[2], D, v.shape[3], is_causal=causal, precision=precision)
    config = config or kernel.small_config(problem)
    arrays = {"Q": q, "K": k, "V": v, "O": np.full((B, H, Lq, v.shape[3]), np.nan, np.float32)}
    arrays["lse"] = np.full((B, H, Lq), np.nan, np.float32)
    for name, space in kernel.workspace(problem, config).items():
        arrays[name] = np.full(space.shape, -1).astype(space.dtype)
    arrays["scale"] = np.float32(D**-0.5 if scale is None else scale)
    for launch in kernel.launches(problem, config):
        assert not any(isinstance(arg, Part) for arg in launch.args)
        arguments = [arg if isinstance(arg, int) else arrays[arg] for arg in launch.args]
        sim.launch(launch.build(launch.config), launch.grid, launch.threads, arguments, launch.smem_bytes)
    return arrays["O"], arrays["lse"], arrays["unsafe"]


UNSAFE = {
    "none": lambda blocks: not blocks.any(),
    "all": lambda blocks: blocks.all(),
    "first": lambda blocks: blocks[:, 0].all() and not blocks[:, 1:].any(),
    "last": lambda blocks: blocks[:, -1].all() and not blocks[:, :-1].any(),
    "first head": lambda blocks: blocks[0].all() and not blocks[1:].any(),
    "?": lambda blocks: True,
}


CAUSAL = [
    name
    for name in ATTACKS
    if name.startswith(("normal", "outlier", "rows", "NaN", "Inf", "-Inf", "heads", "last", "V near", "all near"))
]
"""Where it matters which keys a row attends: a record is of all rows of a tile."""

calls = [pytest.param(name, False, id=name) for name in ATTACKS]
calls += [pytest.param(name, True, id=f"{name}, causal") for name in CAUSAL]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "causal"), calls)
def test_simulator(name, causal, precision):
    attack = ATTACKS[name]
    sizes = (1, attack.heads, 33 if attack.heads == 1 else 3, 37, 40, 36)
    o, lse, unsafe = simulated(*inputs(name, *sizes), causal, attack.scale, precision=precision)
    assert np.isin(unsafe, (0, 1)).all()
    left = attack.unsafe_of_one_half if precision == "tf32" and attack.unsafe_of_one_half else attack.unsafe
    assert UNSAFE[left](unsafe), unsafe
    expected(name, *sizes, causal=causal).check(o, lse, accuracy=precision)


OTHERS = [flash_split_half_sm90.KERNEL, unfused_split_half_sm80.KERNEL, unfused_split_half_sm90.KERNEL]
"""They share the split, its records and the rescue with KERNEL; how a tile is left to the rescue is their own."""

SOME = [
    "outlier in Q, last",
    "heads 2^20 apart",
    "every third row of V tiny",
    "V near the largest",
    "NaN in the last key",
    "Inf in a query",
    "NaN in the last query",
]


@pytest.mark.parametrize("kernel", OTHERS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SOME)
def test_simulator_of_the_other_kernels(name, precision, kernel):
    attack = ATTACKS[name]
    sizes, causal = (1, attack.heads, 33 if attack.heads == 1 else 3, 37, 40, 36), name in CAUSAL
    options = {"causal": causal, "scale": attack.scale, "precision": precision}
    o, lse = sim.attention(*inputs(name, *sizes), **options, return_lse=True, kernel=kernel)
    expected(name, *sizes, causal=causal).check(o, lse, accuracy=precision)


@pytest.mark.parametrize(("name", "causal"), [("balanced column, 2^36", False), ("last row of V huge", True)])
def test_what_one_half_loses_shows_without_the_rescue(name, causal, monkeypatch):
    monkeypatch.setitem(split_half.SLACK, 1, np.float32(2.0**100))
    monkeypatch.setattr(split_half, "MAX_SCORE", np.float32(2.0**100))
    sizes = (1, 1, 33, 37, 40, 36)
    o, lse, unsafe = simulated(*inputs(name, *sizes), causal, None, precision="tf32")
    assert not unsafe.any()
    with pytest.raises(AssertionError, match="of the textbook evaluation"):
        expected(name, *sizes, causal=causal).check(o, lse, accuracy="tf32")


@pytest.mark.parametrize("name", ["normal", "times 1e-3", "times 1e3", "times 1e12"])
def test_scaled_inputs_are_safe_in_blocks_of_several_tiles(name):
    q, k, v = inputs(name, 1, 1, 120, 70, 32, 8)
    config = Config(32, warps=4, q_rows=32, k_rows=32, slots=4, products=4)
    _, _, unsafe = simulated(q, k, v, False, None, config)
    assert unsafe.size == 1 and not unsafe.any()


@pytest.mark.parametrize("kernel", [KERNEL, flash_split_half_sm90.KERNEL], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("D", [20, 48, 64, 80, 96, 128])
def test_what_scores_lose_by_truncation_is_made_up_for(D, kernel):
    # Left alone, scores of one sign are 1.1 to 4.5 times 2^-24 of themselves too small on average.
    q, k, v = (np.random.default_rng(i).random((1, 4, 32, D), dtype=np.float32) for i in range(3))
    q *= 16
    _, lse, unsafe = simulated(q, k, v[..., :1], False, None, kernel=kernel)
    assert not unsafe.any()

    def bias(scale: float) -> float:
        lse64 = reference.attention(q, k, v, scale=scale)[1]
        return np.mean((lse - lse64) / lse64) * 2.0**24

    assert abs(bias(D**-0.5)) < 0.7
    assert abs(bias(float(np.float32(D**-0.5)))) < 0.5, "besides what rounding the scale to fp32 takes off or adds"


@pytest.mark.parametrize("D", [1, 7, 15])
def test_few_columns_are_left_to_the_rescue(D):
    # D = 1: halves had more than the budget, by the tensor core's model and on a GPU.
    case = testing.Case(2, 2, 17, 48, 1, 33) if D == 1 else testing.Case(1, 1, 5, 34, D, 4)
    q, k, v = testing.make_inputs(case)
    o, lse, unsafe = simulated(q, k, v, False, None)
    assert unsafe.all()
    testing.assert_accurate(o, lse, q, k, v)


def test_rescue_of_large_scores_that_nearly_tie():
    # fp32 scores of 2^22 are multiples of 1/4 to 1/2: nothing would be left of differences near 1.
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(np.float32) for n in (6, 9, 9))
    q *= 2**20
    k[..., 1:, :] = k[..., :1, :] * (1 + 2.0**-22 * rng.integers(-4, 5, k[..., 1:, :].shape)).astype(np.float32)
    o, lse, unsafe = simulated(q, k, v, False, None)
    o64, lse64 = reference.attention(q, k, v)
    weights = np.exp(np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k) / 8 - lse64[..., None])
    assert unsafe.all() and np.median(weights.max(-1)) < 0.99, "no ties"
    np.testing.assert_allclose(o, o64, rtol=0, atol=2.0**-20 * np.abs(v).max())
    np.testing.assert_allclose(lse, lse64, rtol=2.0**-23)


@pytest.mark.parametrize("largest", [1.0, 3e38, np.finfo(np.float32).max], ids=str)
def test_rescue_of_sums_that_overflow(largest):
    q, k, v = inputs("normal", 1, 1, 4, 9, 16, 8)
    v = np.where(v > 0, np.float32(largest), -np.float32(largest))
    v[..., 0], v[..., 1] = np.float32(largest), np.float32(-largest)
    v[..., 2] = 1e-42  # beside the largest, and in rows of its own scale
    o, _, unsafe = simulated(q, k, v, True, None)
    o64, _ = reference.attention(q, k, v, causal=True)
    assert unsafe.all() and np.isfinite(o).all()
    np.testing.assert_allclose(o[..., :2], o64[..., :2], rtol=2.0**-20)
    np.testing.assert_allclose(o[..., 3:], o64[..., 3:], rtol=0, atol=2.0**-20 * float(largest))
    if largest == 1:
        np.testing.assert_allclose(o[..., 2], o64[..., 2], rtol=0, atol=2.0**-148)


@pytest.mark.parametrize("factor", [1e20, np.inf], ids=["scores overflow", "query of -inf"])
def test_rescue_of_rows_without_a_finite_score(factor):
    """A mean of nothing is NaN, not the largest number."""
    q, k, v = inputs("normal", 1, 1, 4, 9, 16, 8)
    q[..., 1, :], k[...] = -factor, np.abs(k) + (1e20 if np.isfinite(factor) else 0)
    o, lse, unsafe = simulated(q, k, v, False, None)
    assert unsafe.all()
    assert np.isnan(o[0, 0, 1]).all() and lse[0, 0, 1] == -np.inf
    assert np.isfinite(o[0, 0, [0, 2, 3]]).all()


def test_rescue_without_lse():
    q, k, v = inputs("NaN in a key", 1, 1, 5, 9, 8, 8)
    o = sim.attention(q, k, v, causal=True, kernel=KERNEL)
    testing.assert_accurate(o, None, q, k, v, causal=True)


def test_rescue_without_keys():
    q, k, v = inputs("Inf in a query", 1, 1, 5, 9, 8, 8)
    o, lse = sim.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True, kernel=KERNEL)
    assert np.all(o == 0) and np.all(lse == -np.inf)


CALLS = [(64, True, "fp32"), (100, False, "fp32"), (128, False, "fp32"), (64, True, "tf32"), (128, False, "tf32")]
WIDE = [(264, False, "fp32"), (264, True, "fp32"), (264, False, "tf32")]

on_gpu = [(kernel, *call) for kernel in (KERNEL, OTHERS[0]) for call in CALLS]
on_gpu += [(OTHERS[0], 192, False, "fp32"), (OTHERS[0], 256, True, "fp32"), (OTHERS[0], 256, False, "tf32")]
on_gpu += [(kernel, *call) for kernel in OTHERS[1:] for call in WIDE]


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "D", "causal", "precision"), on_gpu, ids=lambda x: getattr(x, "name", str(x)))
@pytest.mark.parametrize("name", ATTACKS)
def test_gpu(name, kernel, D, causal, precision):
    import torch

    sizes = (1, 2, 260, 530, D, D)
    tensors = [torch.from_numpy(x).cuda() for x in inputs(name, *sizes)]
    options = {"causal": causal, "scale": ATTACKS[name].scale, "precision": precision}
    o, lse = numba_attn.attention(*tensors, **options, return_lse=True, kernel=kernel)
    expected(name, *sizes, causal=causal).check(o.cpu().numpy(), lse.cpu().numpy(), accuracy=precision)
