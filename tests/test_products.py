"""Contract under test: kernels that multiply with the library of the caller's arrays.

Which parts of the arrays a step gets, that the library's product is one in fp32 whatever its flags say and leaves them
as they are, and who is refused. Without a GPU: torch's product of tensors on the CPU, and launches that the simulator
runs at the addresses in the argument buffer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import numba_attn
from numba_attn import call, prepared, reference, sim, testing
from numba_attn.bench import torch_backends
from numba_attn.cli import check
from numba_attn.kernel import Kernel, Launch, Matmul, Part, Workspace, grids
from numba_attn.kernels import KERNELS, unfused_fp32
from numba_attn.launch import compiler, plan
from numba_attn.problem import H200, Problem, View
from numba_attn.sim.rebind import python_function
from numba_attn.tensor import ArgumentBuffer, packing

torch = pytest.importorskip("torch")

KERNEL = unfused_fp32.KERNEL


def small(workspace_bytes: int = 1600) -> Kernel:
    """The kernel with a workspace so small that a call takes several batches."""
    return dataclasses.replace(
        KERNEL, config=lambda problem, device: unfused_fp32.Config(1, workspace_bytes, problem.is_causal)
    )


# Parts

indices = st.integers(0, 2) | st.builds(slice, st.integers(0, 4), st.integers(0, 5) | st.none())


@given(index=st.lists(indices, max_size=3).map(tuple))
def test_parts_are_those_of_numpy(index):
    array = np.arange(3 * 4 * 5 * 6, dtype=np.float32).reshape(3, 4, 5, 6).transpose(0, 2, 1, 3)[..., ::2]
    view, offset = Part("x", index).of(View(array.shape, tuple(stride // 4 for stride in array.strides)))
    first = array.__array_interface__["data"][0]
    expected = array[index]
    assert view.shape == expected.shape
    if expected.size:
        assert first + 4 * offset == expected.__array_interface__["data"][0]
        assert tuple(4 * stride for stride in view.strides) == expected.strides


def test_parts_are_keys_of_dictionaries():
    part = Part("x", (1, slice(0, 3)))
    assert {part: 1}[Part("x", (1, slice(0, 3)))] == 1
    assert part not in {Part("x", (1, slice(0, 4))): 1, Part("y", part.index): 1}


def test_no_array_without_rows_moves_a_pointer_before_it():
    view, offset = Part("lse", (1, slice(2, 4), slice(3, 7))).of(View.contiguous((2, 4, 0)))
    assert (view.shape, offset >= 0) == ((2, 0), True)


def test_arguments():
    launch = Launch(None, None, (Part("Q", (0, slice(0, 2))), Part("part", (1,)), 7, "scale", "lse"), 1, 32)
    kinds = compiler.argument_types(launch, {"part": Workspace((2, 3), "int32")})
    assert list(map(str, kinds)) == ["Tensor(float32, 3)", "Tensor(int32, 1)", "int32", "float32", "Tensor(float32, 3)"]
    buffer = ArgumentBuffer([View((5,), (1,)), -7, None, View((2,), (3,))])
    assert struct.unpack("P1i1qifP1i1q", buffer.template) == (0, 5, 1, -7, 0.0, 0, 2, 3)
    assert buffer.positions == [0, 24, 28, 32]


# Batches

problems = st.builds(
    lambda H, **sizes: Problem(H=H, Hkv=H, D=8, Dv=8, **sizes),
    B=st.integers(1, 9),
    H=st.integers(1, 9),
    Lq=st.integers(1, 50),
    Lk=st.integers(1, 50),
    is_causal=st.booleans(),
)


@given(problem=problems, rows=st.integers(1, 300))
def test_batches_cover_every_row_once_within_the_bound(problem, rows):
    config = unfused_fp32.Config(4, 4 * rows * (problem.Lk + 1), problem.is_causal)
    workspace = KERNEL.workspace(problem, config)
    assert sum(4 * np.prod(space.shape) for space in workspace.values()) <= config.workspace_bytes
    seen = np.zeros((problem.B, problem.H, problem.Lq), int)
    steps = KERNEL.launches(problem, config)
    for first, launch, second, finish in zip(*(steps[i::4] for i in range(4)), strict=True):
        assert isinstance(first, Matmul) and isinstance(second, Matmul)
        S = first.out
        rows_of_S = np.zeros(workspace["S"].shape[:2])[S.index]
        here = seen[first.left.index]
        assert here.shape == rows_of_S.shape and here.size == launch.grid == finish.grid
        here += 1
        assert first.right.index == second.right.index == first.left.index[:2]
        assert launch.args[3] == finish.args[4] == first.left.index[2].start
        assert second.out.index == launch.args[2].index == first.left.index
    assert (seen == 1).all()


def test_batches_are_few_where_the_workspace_holds_much():
    for B, H, L, batches in ((32, 32, 512, 32), (300, 1, 64, 1), (1, 300, 64, 1), (1, 1, 4096, 1), (1, 1, 32768, 9)):
        problem = Problem(B, H, H, L, L, 64, 64)
        assert len(KERNEL.launches(problem, KERNEL.config(problem, H200))) == 4 * batches


def test_what_is_too_large_is_refused():
    assert KERNEL.supports(Problem(1, 1, 1, 1, 10**8, 64, 64), H200) is None
    assert "for one row" in KERNEL.supports(Problem(1, 1, 1, 1, 128 * 10**6, 64, 64), H200)
    assert "5000 rounds" in KERNEL.supports(Problem(5000, 5000, 5000, 1, 1, 64, 64), H200)


def test_kernels_say_whether_they_multiply():
    for kernel in KERNELS:
        problem = Problem(1, 1, 1, 4, 5, 8, 8)
        steps = kernel.launches(problem, kernel.config(problem, H200))
        assert kernel.uses_matmul == any(isinstance(step, Matmul) for step in steps)
        assert grids(steps) == tuple(step for step in steps if not isinstance(step, Matmul))


# A call


def host_array(pointer: int, shape, strides) -> np.ndarray:
    """The fp32 array at an address."""
    if 0 in shape:
        return np.zeros(shape, np.float32)
    start = np.frombuffer((ctypes.c_float * 1).from_address(pointer), np.float32)
    return as_strided(start, shape, tuple(4 * stride for stride in strides))


class HostLauncher:
    """What stands for a loaded kernel and its launcher: the simulator, on what the argument buffer says."""

    def __init__(self, loaded, launch, template):
        _, self.kinds = loaded
        self.function, self.grid, self.threads = launch.build(launch.config), launch.grid, launch.threads
        self.buffer = bytearray(template) + bytes(-len(template) % 8)
        self.words, self.floats = (memoryview(self.buffer).cast(code) for code in "Qf")
        self.launcher = self

    def launch(self, stream) -> None:
        formats, arguments = "", []
        for kind in self.kinds:
            code = packing(kind.ndim) if hasattr(kind, "ndim") else {"float32": "f", "int32": "i"}[str(kind)]
            start = struct.calcsize(f"{formats}0{code[0]}")
            values = struct.unpack_from(code, self.buffer, start)
            formats += code
            if hasattr(kind, "ndim"):
                arguments.append(host_array(values[0], values[1 : 1 + kind.ndim], values[1 + kind.ndim :]))
            else:
                arguments.append(np.float32(values[0]) if code == "f" else values[0])
        assert python_function(self.function).__code__.co_argcount == len(arguments)
        sim.launch(self.function, self.grid, self.threads, arguments)


@pytest.fixture
def on_host(monkeypatch):
    """Tensors on the CPU are served as if they were on a device; the types that were loaded."""
    from numba_attn.interop import device_arrays, torch_arrays

    loaded = []

    def load(launch, workspace, device_index):
        loaded.append((launch, compiler.argument_types(launch, workspace)))
        return loaded[-1]

    monkeypatch.setattr(plan, "_loaded", load)
    monkeypatch.setattr(plan, "LauncherOfThread", HostLauncher)
    monkeypatch.setattr(plan, "device_facts", lambda index: H200)
    monkeypatch.setattr(torch_arrays, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(torch_arrays, "_current_stream", lambda device: 0)
    monkeypatch.setattr(device_arrays, "current_device", lambda: 0)
    stand_in = types.SimpleNamespace(
        device_count=lambda: 1, device_facts=lambda index: H200, driver_version=lambda: None, prepare=plan.prepare
    )
    monkeypatch.setattr(call, "launch", stand_in)
    monkeypatch.setattr(prepared, "launch", stand_in)
    monkeypatch.setattr(call, "calls", prepared.Calls())
    return loaded


def tensors(case: testing.Case) -> list:
    return [
        torch.as_strided(torch.from_numpy(placed.buffer), placed.shape, placed.strides, placed.offset)
        for placed in testing.place_inputs(case)
    ]


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("kernel", [KERNEL, small()], ids=["one batch", "several batches"])
@pytest.mark.usefixtures("on_host")
def test_call(kernel, layout):
    for sizes in ((2, 3, 7, 11, 6, 5), (3, 1, 4, 9, 8, 8), (1, 2, 33, 40, 4, 3)):
        case = testing.Case(*sizes, is_causal=True, layout=layout)
        target = testing.guarded((case.B, case.H, case.Lq, case.Dv), layout="padded")
        out = torch.as_strided(torch.from_numpy(target.buffer), target.shape, target.strides, target.offset)
        o, lse = numba_attn.attention(*tensors(case), causal=True, return_lse=True, kernel=kernel, out=out)
        assert o is out
        target.check()
        testing.assert_accurate(o.numpy(), lse.numpy(), *testing.make_inputs(case), causal=True)
        alone = numba_attn.attention(*tensors(case), causal=True, kernel=kernel)
        assert alone.equal(o) and alone.is_contiguous()


@pytest.mark.usefixtures("on_host")
def test_compiled_functions_do_not_depend_on_the_batch(on_host):
    q, k, v = tensors(testing.Case(1, 1, 33, 40, 4, 4))
    numba_attn.attention(q, k, v, kernel=small())
    functions = {(launch.build, launch.config, kinds) for launch, kinds in on_host}
    assert len(on_host) > 4 and len(functions) == 2


@pytest.mark.usefixtures("on_host")
def test_head_dims_of_zero():
    q, k, v = tensors(testing.Case(2, 3, 5, 7, 8, 8))
    o, lse = numba_attn.attention(q[..., :0], k[..., :0], v, kernel=small(), return_lse=True)
    expected, expected_lse = reference.attention(q.numpy()[..., :0], k.numpy()[..., :0], v.numpy())
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    o, lse = numba_attn.attention(q, k, v[..., :0], kernel=KERNEL, return_lse=True)
    assert o.shape == (2, 3, 5, 0)
    np.testing.assert_allclose(lse, reference.attention(q.numpy(), k.numpy(), v.numpy())[1], rtol=1e-5)


@pytest.mark.usefixtures("on_host")
def test_libraries_without_a_product_are_refused_before_anything_is_prepared(monkeypatch):
    from numba_attn.interop import torch_arrays

    monkeypatch.delattr(torch_arrays, "matmul")
    monkeypatch.setattr(plan, "_loaded", None)
    said = "multiplies with the arrays' library: torch or CuPy arrays are needed"
    arrays = tensors(testing.Case(1, 1, 3, 5, 4, 4))
    with pytest.raises(ValueError, match=f"^kernel unfused_fp32 cannot serve this call: {said}$"):
        numba_attn.attention(*arrays, kernel="unfused_fp32")
    told = numba_attn.explain(*arrays, kernel="unfused_fp32")
    assert told.chosen is None and told.reasons["unfused_fp32"] == f"cannot: {said}"


@pytest.mark.gpu
def test_numba_and_numpy_arrays_are_refused():
    from numba import cuda

    arrays = testing.make_inputs(testing.Case(1, 1, 3, 5, 4, 4))
    for refused in (arrays, tuple(map(cuda.to_device, arrays))):
        with pytest.raises(
            ValueError, match="^kernel unfused_fp32 cannot .* multiplies .* torch or CuPy arrays are needed$"
        ):
            numba_attn.attention(*refused, kernel="unfused_fp32")
        assert numba_attn.explain(*refused, kernel="unfused_fp32").chosen is None


# TF32

needs_new_flag = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has no fp32_precision"
)


@pytest.fixture
def flags():
    """torch's flags as a new process has them, before and after."""

    def reset() -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"

    reset()
    yield torch.backends
    reset()


def product_seen(monkeypatch) -> str:
    """The precision that torch's product meets."""
    from numba_attn.interop import torch_arrays

    seen = []
    matmul = torch.backends.cuda.matmul
    new = hasattr(matmul, "fp32_precision")
    bmm = lambda left, right, out: seen.append(matmul.fp32_precision if new else matmul.allow_tf32)  # noqa: E731
    monkeypatch.setattr(torch, "bmm", bmm)
    torch_arrays.matmul(None, None, None, None)
    return seen[0]


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_old_flag_is_off_in_products_and_left_as_found(monkeypatch, flags, precision):
    torch.set_float32_matmul_precision(precision)
    before = torch.backends.cuda.matmul.allow_tf32
    assert before == (precision != "highest")
    assert product_seen(monkeypatch) in ("ieee", "none", False)
    assert torch.backends.cuda.matmul.allow_tf32 == before


@needs_new_flag
def test_the_new_flag_is_off_in_products_and_left_as_found(monkeypatch, flags):
    for precision in ("tf32", "ieee", "none"):
        flags.cuda.matmul.fp32_precision = precision
        assert product_seen(monkeypatch) in ("ieee", "none")
        assert flags.cuda.matmul.fp32_precision == precision
    flags.cuda.matmul.fp32_precision = "tf32"
    product_seen(monkeypatch)
    flags.fp32_precision = "ieee"
    assert flags.cuda.matmul.fp32_precision == "tf32", "what was set for products stays set"


@needs_new_flag
def test_a_product_goes_on_following_the_wider_flag(monkeypatch, flags):
    flags.fp32_precision = "tf32"
    assert product_seen(monkeypatch) == "ieee"
    assert flags.cuda.matmul.fp32_precision == "tf32"
    flags.fp32_precision = "ieee"
    assert flags.cuda.matmul.fp32_precision == "ieee"


def test_the_flag_is_put_back_after_an_error(monkeypatch, flags):
    from numba_attn.interop import torch_arrays

    flags.cuda.matmul.allow_tf32 = True
    with pytest.raises(TypeError):
        torch_arrays.matmul(None, None, None, None)
    assert flags.cuda.matmul.allow_tf32
    flags.cuda.matmul.allow_tf32 = False


@pytest.mark.gpu
@pytest.mark.parametrize("api", ["allow_tf32", pytest.param("fp32_precision", marks=needs_new_flag)])
def test_tf32_changes_no_bit(api, flags):
    q = 1 + 1e-4 * torch.randn(2, 2, 256, 1024, device="cuda")
    k, v = (torch.randn(2, 2, 256, 1024, device="cuda") for _ in range(2))
    expected = numba_attn.attention(q, k, v, kernel="unfused_fp32")
    product = torch.bmm(q[0], k[0].mT)
    on = True if api == "allow_tf32" else "tf32"
    setattr(flags.cuda.matmul, api, on)
    assert not torch.equal(torch.bmm(q[0], k[0].mT), product), "TF32 is on"
    assert torch.equal(numba_attn.attention(q, k, v, kernel="unfused_fp32"), expected)
    assert getattr(flags.cuda.matmul, api) == on
    testing.assert_accurate(expected.cpu(), None, q.cpu(), k.cpu(), v.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [testing.Case(2, 3, 65, 130, 64, 72, is_causal=True), testing.Case(5, 2, 9, 40, 8, 8)])
def test_several_batches_on_a_gpu(case):
    q, k, v = (t.cuda() for t in tensors(case))
    for workspace_bytes in (1600, 40000):
        o, lse = numba_attn.attention(q, k, v, **case.kwargs, return_lse=True, kernel=small(workspace_bytes))
        testing.assert_accurate(o.cpu(), lse.cpu(), *testing.make_inputs(case), **case.kwargs)


@pytest.mark.gpu
def test_products_are_ordered_on_the_callers_stream():
    q, k, v = (t.cuda() for t in tensors(testing.Case(2, 3, 65, 130, 64, 64)))
    expected = numba_attn.attention(2 * q, k, v, kernel="unfused_fp32")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for stream in (None, side):
        target = q.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            target *= 2
        with torch.cuda.stream(side if stream is None else torch.cuda.default_stream()):
            o = numba_attn.attention(target, k, v, kernel="unfused_fp32", stream=stream)
        side.synchronize()
        assert torch.equal(o, expected)


@pytest.mark.gpu
def test_cupy_multiplies_too():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    from cupy._core import _routines_linalg as linalg

    case = testing.Case(2, 3, 33, 70, 24, 20, is_causal=True, layout="transposed")
    inputs = testing.make_inputs(case)
    q, k, v = (cupy.asarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for array in inputs)
    found = cupy._core.get_compute_type("float32")
    try:
        for kind in (found, linalg.COMPUTE_TYPE_TF32):
            cupy._core.set_compute_type("float32", kind)
            o, lse = numba_attn.attention(q, k, v, causal=True, return_lse=True, kernel="unfused_fp32")
            assert isinstance(o, cupy.ndarray) and cupy._core.get_compute_type("float32") == kind
            testing.assert_accurate(o.get(), lse.get(), *inputs, causal=True)
    finally:
        cupy._core.set_compute_type("float32", found)


# Who runs them without torch


def test_they_are_left_out_without_torch(monkeypatch):
    monkeypatch.setattr(torch_backends, "cuda_torch", lambda: (None, "torch is not installed"))
    reasons = {kernel.name: check.why_left_out(kernel, H200) for kernel in KERNELS}
    assert reasons.pop("unfused_fp32") == "it multiplies with torch or CuPy, and torch is not installed"
    assert set(reasons.values()) == {None}
