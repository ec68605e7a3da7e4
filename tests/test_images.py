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
from numba_attn.device.rescue_kernel import FEW_KEYS, MOST_BLOCKS, build_rescue
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


def n_bytes(spaces) -> int:
    return sum(4 * int(np.prod(space.shape)) for space in spaces)


def batches_of(problem: Problem, config=SMALL) -> ImageBatches:
    return ImageBatches(problem, config.k_rows, config.d_bucket, config.block_m)


def bound_of(problem: Problem, heads: float, config=SMALL) -> int:
    """Of the workspace, for so many heads in a batch: flags are those of the whole problem."""
    space = KERNEL.workspace(replace(problem, B=1, H=1, Hkv=1), config)
    flags = n_bytes([space.pop("unsafe")])
    return int(heads * n_bytes(space.values())) + problem.B * problem.H * flags


OF_ROWS = testing.Case(1, 2, 130, 60, 9, 10, is_causal=True)
"""Five blocks of query rows."""
FEW_ROWS = replace(OF_ROWS, Lq=36, Lk=34)


def bound_of_blocks(problem: Problem, m_blocks: int) -> int:
    """For so many blocks of query rows of one head."""
    space = KERNEL.workspace(replace(problem, B=1, H=1, Hkv=1, Lq=m_blocks * SMALL.block_m), SMALL)
    flags = problem.B * problem.H * -(-problem.Lq // SMALL.block_m)
    return n_bytes(array for name, array in space.items() if name != "unsafe") + 4 * flags


def in_pairs(launches) -> list[tuple[Launch, Launch]]:
    """Split and flash of each batch; the rescue of all, which comes last, has whole arrays."""
    *of_batches, rescue = launches
    assert rescue.build is build_rescue
    assert rescue.args[:7] == ("Q", "K", "V", "unsafe", "O", "lse", "scale")
    assert all(launch.build is not build_rescue for launch in of_batches)
    return list(zip(of_batches[::2], of_batches[1::2], strict=True))


def covered(launches, B: int, H: int) -> list[np.ndarray]:
    """Per batch, how often each head is in it, by the operands of its two launches and by its flags."""
    every = []
    for pair in in_pairs(launches):
        seen = np.zeros((B, H), int)
        parts = [arg for launch in pair for arg in launch.args if isinstance(arg, Part)]
        indices = [part.index for part in parts if part.name in OPERANDS]
        assert all(index == indices[0] for index in indices)
        seen[indices[0] if indices else ...] += 1
        flags = np.zeros(B * H, int)
        flags[next((part.index[0] for part in parts if part.name == "unsafe"), ...)] += 1
        np.testing.assert_array_equal(flags.reshape(B, H), seen)
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
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", bound_of(CASE.problem, heads + 1) - 1)
    launches = KERNEL.launches(CASE.problem, SMALL)
    every = covered(launches, 2, 3)
    assert [seen.sum() for seen in every] == sizes
    np.testing.assert_array_equal(sum(every), 1)
    assert [split.grid for split, _ in in_pairs(launches)] == [size * sum(TILES) for size in sizes]
    assert [flash.grid for _, flash in in_pairs(launches)] == sizes
    assert launches[-1].grid == 6


def test_batches_are_of_one_size():
    # Not 7 and 1: four b of one batch, four of the other.
    problem = replace(CASE.problem, B=8)
    for bound, sizes in ((7, [12, 12]), (3, [9, 9, 6]), (8, [24])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(images, "MAX_WORKSPACE_BYTES", bound_of(problem, bound * 3))
            launches, space = KERNEL.launches(problem, SMALL), KERNEL.workspace(problem, SMALL)
            assert [seen.sum() for seen in covered(launches, 8, 3)] == sizes
            assert (space["K_record"].shape[0], space["unsafe"].shape[0]) == (sizes[0], 24)


@pytest.mark.parametrize(
    ("case", "bound", "batches"),
    [(CASE, bound_of(CASE.problem, 2), 4), (OF_ROWS, bound_of_blocks(OF_ROWS.problem, 2), 6)],
    ids=["of heads", "of rows"],
)
def test_machine_code_does_not_depend_on_the_batch(monkeypatch, case, bound, batches):
    config = KERNEL.small_config(case.problem)
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", bound)
    workspace, launches = KERNEL.workspace(case.problem, config), KERNEL.launches(case.problem, config)
    monkeypatch.undo()
    whole = KERNEL.launches(case.problem, config)
    assert len(launches) == 2 * batches + 1

    def code(launch: Launch):
        return replace(launch, args=(), grid=0), compiler.argument_types(launch, workspace)

    assert {code(launch) for launch in launches} == {code(launch) for launch in whole}


def test_refusal_of_one_head(monkeypatch):
    one = bound_of(CASE.problem, 1)
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", one)
    assert batches_of(CASE.problem).refusal is None
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", one - 1)
    said = f"needs {one} bytes of workspace for one head at a time, {one - 1} are allowed"
    assert batches_of(CASE.problem).refusal == said


def test_refusal_of_many_flags():
    """Those of all batches are there at once; less than nothing would be left for the rest."""
    problem = Problem(1 << 14, 1 << 10, 1 << 10, 300, 40, 1, 1)
    refusal = batches_of(problem).refusal
    assert refusal is not None and "bytes of workspace for one head at a time" in refusal
    assert batches_of(problem).workspace["K_image"].shape[0] == 1


def test_the_largest_heads_that_are_served():
    longest = Problem(1, 1, 1, 10**5, 10**5, 256, 256)
    assert KERNEL.supports(longest, H200) is None
    assert len(KERNEL.launches(replace(longest, B=3, H=5, Hkv=5), KERNEL.config(longest, H200))) == 2 * 15 + 1
    assert "bytes of workspace for one head at a time" in KERNEL.supports(replace(longest, Lk=3 * 10**5), H200)


def test_refusal_of_many_batches():
    one_head_each = Problem(128, 128, 128, 10**5, 10**5, 256, 256)
    assert KERNEL.supports(one_head_each, H200) is None
    assert len(KERNEL.launches(one_head_each, KERNEL.config(one_head_each, H200))) == 2 * images.MOST_BATCHES + 1
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
    bound = bound_of(problem, heads + slack, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "MAX_WORKSPACE_BYTES", bound)
        workspace, launches = KERNEL.workspace(problem, config), KERNEL.launches(problem, config)
        refusal = batches_of(problem, config).refusal
    assert refusal is None and n_bytes(workspace.values()) <= bound
    every = covered(launches, problem.B, problem.H)
    np.testing.assert_array_equal(sum(every), 1)
    # No more batches than twice what the bound asks for: it may cut a b in two, never a batch short.
    assert len(every) <= 2 * -(-problem.B * problem.H // heads)
    most, m_blocks = workspace["K_record"].shape[0], workspace["unsafe"].shape[1]
    for seen, (split, flash) in zip(every, in_pairs(launches), strict=True):
        n = seen.sum()
        assert n <= most
        parts = {
            arg
            for launch in (split, flash)
            for arg in launch.args
            if isinstance(arg, Part) and arg.name in workspace and arg.name != "unsafe"
        }
        assert all(part.index == (slice(n),) for part in parts)
        tiles = sum(workspace[f"{name}_record"].shape[1] for name in "QKV")
        assert (split.grid, flash.grid) == (n * tiles, n * m_blocks) and max(split.grid, flash.grid) <= MAX_GRID
    assert launches[-1].grid == min(problem.B * problem.H * m_blocks, MOST_BLOCKS)


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
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", bound_of(case.problem, 2))
    assert [seen.sum() for seen in covered(KERNEL.launches(case.problem, SMALL), case.B, case.H)] == [2, 1]
    for got, want in zip(sim.attention(q, k, v, **options), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("most", "sizes"), [(5, [5]), (4, [3, 2]), (2, [2, 2, 1]), (1, [1] * 5)], ids=str)
def test_batches_of_query_rows(monkeypatch, most, sizes):
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", bound_of_blocks(OF_ROWS.problem, most))
    space, launches = KERNEL.workspace(OF_ROWS.problem, SMALL), KERNEL.launches(OF_ROWS.problem, SMALL)
    assert n_bytes(space.values()) <= images.MAX_WORKSPACE_BYTES
    rows, flags = np.zeros((1, 2, 130), int), np.zeros(space["unsafe"].shape, int)
    for _, flash in in_pairs(launches):
        parts = {arg.name: arg.index for arg in flash.args if isinstance(arg, Part)}
        of_batch = np.zeros_like(rows)
        of_batch[parts["O"]] += 1
        assert parts["Q"] == parts["O"] == parts["lse"]
        # Flags lie where the batch's rows do.
        own = np.zeros_like(flags)
        own[parts["unsafe"]] += 1
        np.testing.assert_array_equal(own, of_batch[0, :, :: SMALL.block_m])
        rows, flags = rows + of_batch, flags + own
    assert np.all(rows == 1) and np.all(flags == 1)
    assert [flash.grid for _, flash in in_pairs(launches)] == 2 * sizes
    # The images of K and V are made once a head.
    keys = sum(TILES[1:])
    splits = [split.grid for split, _ in in_pairs(launches)]
    assert splits == 2 * [n + (keys if i == 0 else 0) for i, n in enumerate(sizes)]
    assert launches[-1].grid == 10


@pytest.mark.parametrize("unsafe", [(), ((0, 3), (1, 35))], ids=["safe", "a block of each head is not"])
def test_batches_of_query_rows_change_no_bit(monkeypatch, unsafe):
    """Rows with few keys are those of a head's first block alone, and left to it where all of it is done again."""
    case, (q, k, v) = FEW_ROWS, testing.make_inputs(FEW_ROWS)
    for head, row in unsafe:
        q[0, head, row, 2] = 2.0**20
    options = {**case.kwargs, "return_lse": True, "kernel": replace(KERNEL, supports=lambda problem, device: None)}
    expected = sim.attention(q, k, v, **options)
    testing.assert_accurate(*expected, q, k, v, **case.kwargs)
    assert SMALL.block_m >= FEW_KEYS
    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", bound_of_blocks(case.problem, 1))
    assert len(in_pairs(KERNEL.launches(case.problem, SMALL))) == 4
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


@pytest.mark.parametrize(
    ("case", "bound"),
    [(OVER_H, bound_of(OVER_H.problem, 2)), (FEW_ROWS, bound_of_blocks(FEW_ROWS.problem, 1))],
    ids=["of heads", "of rows"],
)
def test_a_plan_points_at_its_parts(monkeypatch, case, bound):
    """The plan of a call runs each batch on its part of strided operands, and all of them in one workspace."""
    monkeypatch.setattr(plan, "_loaded", lambda launch, space, index: (launch, compiler.argument_types(launch, space)))
    monkeypatch.setattr(plan, "LauncherOfThread", HostLauncher)
    config = KERNEL.small_config(case.problem)
    q, k, v = with_an_outlier(case)
    expected, expected_lse = sim.attention(q, k, v, return_lse=True, kernel=KERNEL, **case.kwargs)

    monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", bound)
    operands = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v, expected)]
    arrays = dict(zip(("Q", "K", "V", "O"), operands, strict=True)) | {"lse": np.empty_like(expected_lse)}
    arrays["O"][...] = arrays["lse"][...] = np.nan
    views = {name: View(x.shape, tuple(stride // 4 for stride in x.strides)) for name, x in arrays.items()}
    space = KERNEL.workspace(case.problem, config)
    memory = {name: np.zeros(array.shape, array.dtype) for name, array in space.items()}
    layouts = views | {name: View.contiguous(array.shape) for name, array in space.items()}
    own = plan.Plan(KERNEL.launches(case.problem, config), space, 0, layouts)
    own.run(0, [array.ctypes.data for array in (arrays | memory).values()], case.D**-0.5)
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
    for heads in (11, 4, 3, 1):
        monkeypatch.setattr(call, "calls", prepared.Calls())
        bound = bound_of(case.problem, heads, KERNEL.config(case.problem, H200))
        monkeypatch.setattr(images, "MAX_WORKSPACE_BYTES", bound)
        o, lse = attention(q, k, v, causal=is_causal, return_lse=True, kernel=KERNEL)
        assert o.equal(expected[0]) and lse.equal(expected[1]), heads
