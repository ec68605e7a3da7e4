"""Contract under test: batches of heads cover each head once, within the bound, and change no bit of the result."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from numba_attn import images, sim, testing
from numba_attn.device.rescue_kernel import MOST_BLOCKS
from numba_attn.device.split_half import RECORD, image_words
from numba_attn.images import ImageBatches
from numba_attn.kernel import OPERANDS, Launch, Part
from numba_attn.kernels.flash_split_half_sm80 import KERNEL
from numba_attn.launch import compiler, plan
from numba_attn.problem import H200, MAX_GRID, Problem, View
from numba_attn.tensor import packing

CASE = testing.Case(2, 3, 5, 33, 9, 10)
SMALL = KERNEL.small_config(CASE.problem)
TILES = (1, 2, 2)
"""Of Q, K and V."""


def n_bytes(workspace) -> int:
    return sum(4 * int(np.prod(space.shape)) for space in workspace.values())


def batches_of(problem: Problem, config=SMALL) -> ImageBatches:
    return ImageBatches(problem, config.k_rows, config.d_bucket, config.block_m)


ONE_HEAD = n_bytes(KERNEL.workspace(replace(CASE.problem, B=1, H=1, Hkv=1), SMALL))


def covered(launches, B: int, H: int) -> list[np.ndarray]:
    """Per batch, how often each head is in it, by the operands of its three launches."""
    every = []
    for three in zip(*(launches[i::3] for i in range(3)), strict=True):
        seen = np.zeros((B, H), int)
        indices = [arg.index for launch in three for arg in launch.args if getattr(arg, "name", "") in OPERANDS]
        assert all(index == indices[0] for index in indices)
        seen[indices[0] if indices else ...] += 1
        every.append(seen)
    return every


def test_workspace():
    space = KERNEL.workspace(CASE.problem, SMALL)
    words = image_words(SMALL.k_rows, SMALL.d_bucket)
    for name, tiles in zip("QKV", TILES, strict=True):
        assert (space[f"{name}_image"].shape, space[f"{name}_image"].dtype) == ((6, tiles * words), "uint32")
        assert space[f"{name}_record"].shape == (6, tiles, RECORD)
    assert (space["unsafe"].shape, space["unsafe"].dtype) == ((6, 1), "int32")


def test_workspace_of_one_half():
    problem = replace(CASE.problem, precision="tf32")
    config = KERNEL.small_config(problem)
    space, both = KERNEL.workspace(problem, config), KERNEL.workspace(CASE.problem, SMALL)
    assert (config.halves, SMALL.halves) == (1, 2)
    for name, whole in both.items():
        rows, *rest = space[name].shape
        factor = 2 if name.endswith("_image") else 1
        assert (rows, factor * rest[0], *rest[1:]) == whole.shape
    split, flash, rescue = KERNEL.launches(problem, config)
    assert (split.config.halves, split.grid, flash.grid) == (1, 6 * sum(TILES), 6)
    assert rescue.config == KERNEL.launches(CASE.problem, SMALL)[2].config


def test_one_batch_has_whole_arrays():
    split, flash, rescue = KERNEL.launches(CASE.problem, SMALL)
    assert not any(isinstance(arg, Part) for launch in (split, flash, rescue) for arg in launch.args)
    assert (split.grid, flash.grid, rescue.grid) == (6 * sum(TILES), 6, 6)


@pytest.mark.parametrize(
    ("heads", "sizes"), [(6, [6]), (5, [3, 3]), (3, [3, 3]), (2, [2, 1] * 2), (1, [1] * 6)], ids=str
)
def test_batches(monkeypatch, heads, sizes):
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", heads * ONE_HEAD + ONE_HEAD - 1)
    launches = KERNEL.launches(CASE.problem, SMALL)
    every = covered(launches, 2, 3)
    assert [seen.sum() for seen in every] == sizes
    np.testing.assert_array_equal(sum(every), 1)
    assert [launch.grid for launch in launches[::3]] == [size * sum(TILES) for size in sizes]
    assert [launch.grid for launch in launches[1::3]] == [launch.grid for launch in launches[2::3]] == sizes


def test_batches_are_of_one_size():
    # Not 7 and 1: four b of one batch, four of the other.
    problem = replace(CASE.problem, B=8)
    for bound, sizes in ((7, [12, 12]), (3, [9, 9, 6]), (8, [24])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(images, "MAX_WORKSPACE_BYTES", bound * 3 * ONE_HEAD)
            launches = KERNEL.launches(problem, SMALL)
            assert [seen.sum() for seen in covered(launches, 8, 3)] == sizes
            assert KERNEL.workspace(problem, SMALL)["unsafe"].shape[0] == sizes[0]


def test_machine_code_does_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", 2 * ONE_HEAD)
    workspace, launches = KERNEL.workspace(CASE.problem, SMALL), KERNEL.launches(CASE.problem, SMALL)
    monkeypatch.undo()
    whole = KERNEL.launches(CASE.problem, SMALL)
    assert len(launches) == 12

    def code(launch: Launch):
        return replace(launch, args=(), grid=0), compiler.argument_types(launch, workspace)

    assert {code(launch) for launch in launches} == {code(launch) for launch in whole}


def test_refusal_of_one_head(monkeypatch):
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", ONE_HEAD)
    assert batches_of(CASE.problem).refusal is None
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", ONE_HEAD - 1)
    said = f"needs {ONE_HEAD} bytes of workspace for one head, {ONE_HEAD - 1} are allowed"
    assert batches_of(CASE.problem).refusal == said


def test_the_largest_heads_that_are_served():
    longest = Problem(1, 1, 1, 10**5, 10**5, 256, 256)
    assert KERNEL.supports(longest, H200) is None
    assert len(KERNEL.launches(replace(longest, B=3, H=5, Hkv=5), KERNEL.config(longest, H200))) == 3 * 15
    assert "bytes of workspace for one head" in KERNEL.supports(replace(longest, Lk=3 * 10**5), H200)


def test_refusal_of_many_batches():
    one_head_each = Problem(128, 128, 128, 10**5, 10**5, 256, 256)
    assert KERNEL.supports(one_head_each, H200) is None
    assert len(KERNEL.launches(one_head_each, KERNEL.config(one_head_each, H200))) == 3 * images.MOST_BATCHES
    said = KERNEL.supports(replace(one_head_each, B=129), H200)
    assert said == "needs 16512 batches of 512000000 bytes of workspace, more than 16384"


problems = st.builds(
    lambda H, **sizes: Problem(H=H, Hkv=H, Dv=sizes["D"], **sizes),
    B=st.integers(1, 40),
    H=st.integers(1, 40),
    Lq=st.integers(1, 3000),
    Lk=st.integers(0, 3000),
    D=st.integers(1, 256),
    is_causal=st.booleans(),
)


@given(problem=problems, heads=st.integers(1, 300), slack=st.floats(0, 0.99))
@settings(max_examples=100)
def test_any_batches_cover_every_head_once_within_the_bound(problem, heads, slack):
    config = KERNEL.config(problem, H200)
    one = n_bytes(KERNEL.workspace(replace(problem, B=1, H=1, Hkv=1), config))
    bound = max(1, int((heads + slack) * one))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "MAX_WORKSPACE_BYTES", bound)
        workspace, launches = KERNEL.workspace(problem, config), KERNEL.launches(problem, config)
        refusal = batches_of(problem, config).refusal
    assert refusal is None and n_bytes(workspace) <= bound
    every = covered(launches, problem.B, problem.H)
    np.testing.assert_array_equal(sum(every), 1)
    # No more batches than twice what the bound asks for: it may cut a b in two, never a batch short.
    assert len(every) <= 2 * -(-problem.B * problem.H // heads)
    most = workspace["unsafe"].shape[0]
    for seen, (split, flash, rescue) in zip(every, zip(*(launches[i::3] for i in range(3)), strict=True), strict=True):
        n = seen.sum()
        assert n <= most
        parts = {
            arg for launch in (split, flash, rescue) for arg in launch.args if getattr(arg, "name", "") in workspace
        }
        assert all(part.index == (slice(n),) for part in parts)
        tiles = sum(workspace[f"{name}_record"].shape[1] for name in "QKV")
        assert (split.grid, flash.grid) == (n * tiles, n * workspace["unsafe"].shape[1])
        assert rescue.grid == min(flash.grid, MOST_BLOCKS) and max(split.grid, flash.grid) <= MAX_GRID


def with_an_outlier(case: testing.Case):
    """Inputs of which the last head is unsafe, and only that."""
    q, k, v = testing.make_inputs(case)
    k[-1, -1, 3, 2] = 2.0**20
    return q, k, v


OVER_B, OVER_H = replace(CASE, B=3, H=1, is_causal=True), replace(CASE, B=1, H=3)


@pytest.mark.parametrize("case", [OVER_B, OVER_H], ids=["over b", "over heads of one b"])
def test_batches_change_no_bit(monkeypatch, case):
    q, k, v = with_an_outlier(case)
    # The bound here is for small tiles, not for those of a GPU.
    kernel = replace(KERNEL, supports=lambda problem, device: None)
    options = {**case.kwargs, "return_lse": True, "kernel": kernel}
    expected = sim.attention(q, k, v, **options)
    testing.assert_accurate(*expected, q, k, v, **case.kwargs)
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", 2 * ONE_HEAD)
    assert [seen.sum() for seen in covered(KERNEL.launches(case.problem, SMALL), case.B, case.H)] == [2, 1]
    for got, want in zip(sim.attention(q, k, v, **options), expected, strict=True):
        np.testing.assert_array_equal(got, want)


class HostLauncher:
    """What stands for a loaded kernel and its launcher: the simulator, on what the argument buffer says."""

    def __init__(self, loaded, launch, template):
        (self.launch_, self.kinds), self.grid, self.threads = loaded, launch.grid, launch.threads
        self.buffer = bytearray(template) + bytes(-len(template) % 8)
        self.words, self.floats = (memoryview(self.buffer).cast(code) for code in "Qf")
        self.launcher = self

    def launch(self, stream) -> None:
        formats, arguments = "", []
        for kind in self.kinds:
            code = packing(kind.ndim) if hasattr(kind, "ndim") else {"int32": "i", "float32": "f"}[str(kind)]
            values = struct.unpack_from(code, self.buffer, struct.calcsize(f"{formats}0{code[0]}"))
            formats += code
            if not hasattr(kind, "ndim"):
                arguments.append(np.float32(values[0]) if code == "f" else values[0])
                continue
            pointer, shape, strides = values[0], values[1 : 1 + kind.ndim], values[1 + kind.ndim :]
            start = np.frombuffer((ctypes.c_float * 1).from_address(pointer), str(kind.dtype))
            arguments.append(as_strided(start, shape, tuple(4 * stride for stride in strides)))
        function = self.launch_.build(self.launch_.config)
        sim.launch(function, self.grid, self.threads, arguments, self.launch_.smem_bytes)


def test_a_plan_points_at_its_parts(monkeypatch):
    """The plan of a call runs each batch on its heads' part of strided operands, and all of them in one workspace."""
    monkeypatch.setattr(plan, "_loaded", lambda launch, space, index: (launch, compiler.argument_types(launch, space)))
    monkeypatch.setattr(plan, "LauncherOfThread", HostLauncher)
    q, k, v = with_an_outlier(OVER_H)
    expected, expected_lse = sim.attention(q, k, v, return_lse=True, kernel=KERNEL)

    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", 2 * ONE_HEAD)
    operands = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v, expected)]
    arrays = dict(zip(("Q", "K", "V", "O"), operands, strict=True)) | {"lse": np.empty_like(expected_lse)}
    arrays["O"][...] = arrays["lse"][...] = np.nan
    views = {name: View(x.shape, tuple(stride // 4 for stride in x.strides)) for name, x in arrays.items()}
    space = KERNEL.workspace(OVER_H.problem, SMALL)
    memory = {name: np.zeros(array.shape, array.dtype) for name, array in space.items()}
    layouts = views | {name: View.contiguous(array.shape) for name, array in space.items()}
    own = plan.Plan(KERNEL.launches(OVER_H.problem, SMALL), space, 0, layouts)
    own.run(0, [array.ctypes.data for array in (arrays | memory).values()], OVER_H.D**-0.5)
    np.testing.assert_array_equal(arrays["O"], expected)
    np.testing.assert_array_equal(arrays["lse"], expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_batches_change_no_bit_on_a_gpu(monkeypatch, is_causal):
    import torch

    from numba_attn import attention, call, prepared

    case = testing.Case(3, 4, 200, 300, 100, 90)
    q, k, v = (torch.from_numpy(x).cuda() for x in with_an_outlier(case))
    expected = attention(q, k, v, causal=is_causal, return_lse=True, kernel=KERNEL)
    one = n_bytes(KERNEL.workspace(replace(case.problem, B=1, H=1, Hkv=1), KERNEL.config(case.problem, H200)))
    for heads in (11, 4, 3, 1):
        monkeypatch.setattr(call, "calls", prepared.Calls())
        monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", heads * one)
        o, lse = attention(q, k, v, causal=is_causal, return_lse=True, kernel=KERNEL)
        assert o.equal(expected[0]) and lse.equal(expected[1]), heads
