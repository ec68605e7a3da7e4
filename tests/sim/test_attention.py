"""Contract under test: `sim.attention` gives what the reference gives, for every kernel, and refuses what it must."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numba import cuda, float32

from numba_attn import reference, sim, testing
from numba_attn.kernel import Launch, Matmul, Part, Workspace
from numba_attn.kernels import KERNELS
from numba_attn.sim.mutate import CASES

TOY_FILE = Path(__file__).with_name("toy_kernel.py")


def _toy(text: str = "", by: str = ""):
    """The toy kernel, its source changed in one place."""
    source = TOY_FILE.read_text()
    assert text in source
    module = ModuleType("toy_kernel")
    sys.modules["toy_kernel"] = module  # dataclasses look their module up
    exec(compile(source.replace(text, by) if text else source, TOY_FILE, "exec"), vars(module))
    return module.KERNEL


TOY = _toy()


def _inputs(B=1, H=2, Lq=3, Lk=5, D=4, Dv=3, Hkv=None):
    generator = np.random.default_rng(1)
    shapes = ((B, H, Lq, D), (B, Hkv or H, Lk, D), (B, Hkv or H, Lk, Dv))
    return tuple(generator.standard_normal(shape, dtype=np.float32) for shape in shapes)


def _assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel(kernel, case):
    q, k, v = case.inputs()
    result = sim.attention(q, k, v, causal=case.causal, return_lse=case.lse, kernel=kernel.name)
    o, lse = reference.attention(q, k, v, causal=case.causal)
    if case.lse:
        _assert_close(result[1], lse)
        result = result[0]
    assert result.dtype == np.float32
    _assert_close(result, o)


def test_strides_and_scale():
    q, k, v = _inputs(Lq=4, Lk=6, D=8, Dv=4)
    q = np.asfortranarray(q)[:, ::-1, ::2]
    k = k[..., ::-2]
    v = np.broadcast_to(v[:, :1], v.shape)
    q = q[..., :4]
    for kernel in (TOY, None):
        _assert_close(sim.attention(q, k, v, scale=0.3, kernel=kernel), reference.attention(q, k, v, scale=0.3)[0])


def test_inputs_are_left_alone():
    arrays = _inputs()
    for array in arrays:
        array.flags.writeable = False
    sim.attention(*arrays, kernel=TOY)


def test_unwritten_output():
    kernel = _toy("for d in range(lane, V.shape[3], 32)", "for d in range(lane, V.shape[3] - 1, 32)")
    with pytest.raises(sim.SimulationError, match=r"6 of 18 elements of O left unwritten, the first O\[0, 0, 0, 2\]"):
        sim.attention(*_inputs(), kernel=kernel)
    kernel = _toy("lse[b, h, row] =", "m =")
    sim.attention(*_inputs(), kernel=kernel)
    with pytest.raises(sim.SimulationError, match="6 of 6 elements of lse left unwritten"):
        sim.attention(*_inputs(), kernel=kernel, return_lse=True)


def test_lse_that_was_not_asked_for():
    kernel = _toy("if lane == 0 and row < lse.shape[2]", "if lane == 0")
    sim.attention(*_inputs(), kernel=kernel, return_lse=True)
    with pytest.raises(sim.SimulationError, match="out of range: tensor lse"):
        sim.attention(*_inputs(), kernel=kernel)


def _two_launches(first_half: bool):
    def build_fill(config):
        def fill(part):
            if first_half or cuda.threadIdx.x > 0:
                part[cuda.threadIdx.x] = float32(2)

        return fill

    def build_use(config):
        def use(O, part):
            for d in range(O.shape[3]):
                O[0, 0, cuda.threadIdx.x, d] = part[cuda.threadIdx.x]

        return use

    launches = (Launch(build_fill, None, ("part",), 1, 3), Launch(build_use, None, ("O", "part"), 1, 3))
    return dataclasses.replace(
        TOY,
        name="two_launches",
        launches=lambda problem, config: launches,
        workspace=lambda problem, config: {"part": Workspace((3,))},
    )


def test_workspace_is_kept_between_launches_and_poisoned_before():
    arrays = _inputs(H=1)
    np.testing.assert_array_equal(sim.attention(*arrays, kernel=_two_launches(True)), np.full((1, 1, 3, 3), 2))
    with pytest.raises(sim.SimulationError, match=r"read of tensor part\[0\].*nobody has written; kernel `use`"):
        sim.attention(*arrays, kernel=_two_launches(False))


def _with_product(steps, **workspace):
    return dataclasses.replace(
        TOY,
        name="with_product",
        launches=lambda problem, config: tuple(steps),
        workspace=lambda problem, config: workspace,
        uses_matmul=True,
    )


def test_products_and_parts():
    def build_add(config):
        def add(O, row, step):
            for d in range(O.shape[1]):
                O[row, d] += float32(step)

        return add

    q, k, v = _inputs(B=2, H=2, Lq=3, Lk=5, D=4, Dv=3)
    steps = []
    for b in range(2):
        for rows in (slice(0, 2), slice(2, 3)):
            S = Part("S", (slice(0, 2), slice(0, rows.stop - rows.start)))
            steps.append(Matmul(Part("Q", (b, slice(0, 2), rows)), Part("K", (b,)), S, transpose_right=True))
            steps.append(Matmul(S, Part("V", (b,)), Part("O", (b, slice(0, 2), rows))))
    steps.append(Launch(build_add, None, (Part("O", (1, 0)), 2, 7), 1, 1))
    expected = q @ k.swapaxes(2, 3) @ v
    expected[1, 0, 2] += 7
    _assert_close(sim.attention(q, k, v, kernel=_with_product(steps, S=Workspace((2, 2, 5)))), expected)
    with pytest.raises(sim.SimulationError, match="18 of 36 elements of O left unwritten"):
        sim.attention(q, k, v, kernel=_with_product(steps[:4], S=Workspace((2, 2, 5))))


def test_products_of_what_nobody_has_written():
    step = Matmul("S", Part("V", (0,)), Part("O", (0,)))
    with pytest.raises(sim.SimulationError, match="^product of S: 30 elements that nobody has written"):
        sim.attention(*_inputs(), kernel=_with_product([step], S=Workspace((2, 3, 5))))


def test_misaligned_arrays_are_copied():
    q, k, v = _inputs()
    shifted = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(q.shape)
    shifted[...] = q
    assert not shifted.flags.aligned
    for kernel in (TOY, *KERNELS):
        expected = sim.attention(q, k, v, kernel=kernel)
        np.testing.assert_allclose(sim.attention(shifted, k, v, kernel=kernel), expected, rtol=1e-6)


def test_without_head_dim_the_scores_are_zero():
    q, k, v = _inputs(D=0)
    expected, _ = reference.attention(q, k, v)
    np.testing.assert_allclose(sim.attention(q, k, v, kernel=TOY), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("empty", ["B", "H", "Lq", "Lk"])
def test_no_kernel_runs_without_a_row_or_a_key(empty):
    """Kernels got what no launch gives them: grids of no block, divisions by a length of 0."""
    q, k, v = _inputs(**{empty: 0})
    o, lse = sim.attention(q, k, v, kernel=dataclasses.replace(TOY, launches=None), return_lse=True)
    expected, expected_lse = reference.attention(q, k, v)
    assert o.dtype == lse.dtype == np.float32
    np.testing.assert_array_equal(o, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("kernel", [TOY, *KERNELS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("empty", ["D", "Dv"])
def test_kernels_get_a_column_where_there_is_none(kernel, empty):
    q, k, v = _inputs(Lq=2, Lk=3, **{empty: 0})
    o, lse = sim.attention(q, k, v, kernel=kernel, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v)
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)
    if empty == "Dv":
        assert sim.attention(q, k, v, kernel=dataclasses.replace(kernel, launches=None)).shape == expected.shape


def test_flags_are_bools():
    arrays = _inputs()
    for name in ("causal", "enable_gqa", "return_lse"):
        for value in (1, None, "no", np.zeros(1, bool)):
            with pytest.raises(TypeError, match=f"^{name} is a {type(value).__name__}: True or False is needed"):
                sim.attention(*arrays, **{name: value})
        sim.attention(*arrays, kernel=TOY, **{name: np.bool_(True)})


def test_grouped_heads_are_not_there_yet():
    q, k, v = _inputs(H=4, Hkv=2)
    with pytest.raises(NotImplementedError, match=r"^k has 2 heads for the 4 of q: grouped heads are not there yet$"):
        sim.attention(q, k, v, enable_gqa=True)


def test_refusals():
    q, k, v = _inputs()
    with pytest.raises(TypeError, match="^q: "):
        sim.attention(q.astype(np.float64), k, v)
    with pytest.raises(ValueError, match="^v: four dimensions"):
        sim.attention(q, k, v[0])
    for arrays, said in (
        ((q, k[..., 1:], v), "k has head dim 3 and q has 4: "),
        ((q, k, v[:, :, 1:]), "v has length 4 and k has 5: "),
        ((q, k, v[:, 1:]), "v has 1 heads and k has 2: "),
        ((q, k[:, 1:], v[:, 1:]), "k has 1 heads and q has 2: .*enable_gqa=True"),
        ((np.concatenate([q, q]), k, np.concatenate([v, v, v])), "v has batch size 3 and q has 2: "),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            sim.attention(*arrays)
    with pytest.raises(ValueError, match="^k has 0 heads, which does not divide the 2 heads of q"):
        sim.attention(q, k[:, :0], v[:, :0], enable_gqa=True)
    for scale in ("0.5", [], object(), 1j):
        with pytest.raises(TypeError, match="^scale is a .*: a number or None is needed"):
            sim.attention(q, k, v, scale=scale)
    with pytest.raises(ValueError, match="^scale is beyond the range"):
        sim.attention(q, k, v, scale=10**400)
    with pytest.raises(TypeError, match="^k: "):
        sim.attention(q, np.ma.masked_array(k), v)
    with pytest.raises(TypeError, match="^kernel: a name or a Kernel"):
        sim.attention(q, k, v, kernel=[])
    with pytest.raises(ValueError, match=f"called 'unknown': there are {KERNELS[0].name}, {KERNELS[1].name}"):
        sim.attention(q, k, v, kernel="unknown")
    with pytest.raises(ValueError, match="toy does not support this problem: too small"):
        sim.attention(q, k, v, kernel=dataclasses.replace(TOY, supports=lambda problem, device: "too small"))


@pytest.mark.parametrize("kernel", ["warp_tile_fp32", "warp_tile_multi_fp32", "warp_two_pass_fp32"])
def test_lse_of_a_row_without_a_finite_score(kernel):
    """Columns past D do not count: 0 times Inf there would make a NaN of ln 0."""
    q, k, v = (np.abs(x) + np.float32(0.1) for x in testing.make_inputs(testing.Case(1, 1, 3, 5, 9, 4)))
    q[0, 0, 1] = -np.inf
    o, lse = sim.attention(q, k, v, return_lse=True, kernel=kernel)
    assert lse[0, 0, 1] == -np.inf and np.isnan(o[0, 0, 1]).all()
    assert np.isfinite(lse[0, 0, [0, 2]]).all() and np.isfinite(o[0, 0, [0, 2]]).all()
