"""Contract under test: `sim.attention` gives what the reference gives, for every kernel, and refuses what it must."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numba import cuda, float32

from numba_attn import reference, sim
from numba_attn.kernel import Launch, Workspace
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


def test_refusals():
    q, k, v = _inputs()
    with pytest.raises(TypeError, match="^q: "):
        sim.attention(q.astype(np.float64), k, v)
    with pytest.raises(ValueError, match="^v: four dimensions"):
        sim.attention(q, k, v[0])
    with pytest.raises(ValueError, match="do not fit together"):
        sim.attention(q, k[..., 1:], v)
    with pytest.raises(ValueError, match="no registered kernel is called 'unknown'"):
        sim.attention(q, k, v, kernel="unknown")
    with pytest.raises(ValueError, match="toy does not support this problem: too small"):
        sim.attention(q, k, v, kernel=dataclasses.replace(TOY, supports=lambda problem, device: "too small"))
