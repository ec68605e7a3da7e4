"""Contract under test: the public calls. Every wrong argument is told in one line that has the caller's name for it,
before any launch; whatever is launched gets the right views of the right memory.

Without a GPU, a plan that evaluates the reference at the addresses it is given stands for the kernels, and host
tensors of torch for tensors on a device.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import threading
import types
from dataclasses import replace

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import numba_attn
from numba_attn import call, prepared, reference
from numba_attn.kernel import OPERANDS, Workspace
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200, View

torch = pytest.importorskip("torch")
functional = torch.nn.functional


def host_array(pointer: int, shape, strides) -> np.ndarray:
    """The fp32 array at an address."""
    if 0 in shape:
        return np.zeros(shape, np.float32)
    start = np.frombuffer((ctypes.c_float * 1).from_address(pointer), np.float32)
    return as_strided(start, shape, tuple(4 * stride for stride in strides))


class ReferencePlan:
    def __init__(self, kernel, problem, layouts):
        self.kernel, self.problem, self.layouts = kernel, problem, layouts
        self.workspace = {"partial": Workspace((3, 5))} if kernel.name == "with_workspace" else {}

    def run(self, stream, pointers, scale, *products):
        assert bool(products) == self.kernel.uses_matmul
        assert len(pointers) == len(OPERANDS) + len(self.workspace)
        assert all(pointers[len(OPERANDS) :])
        operands = zip(OPERANDS, pointers, strict=False)
        Q, K, V, O, lse = (host_array(pointer, *self.layouts[name]) for name, pointer in operands)
        assert Q.shape[-1] == self.problem.D and V.shape[-1] == self.problem.Dv
        o64, lse64 = reference.attention(Q, K, V, causal=self.problem.is_causal, scale=scale)
        O[...] = o64
        if lse.shape[2]:
            lse[...] = lse64


@pytest.fixture
def launches(monkeypatch):
    """Plans made so far, with host tensors served as if they were on device 0."""
    from numba_attn.interop import device_arrays, torch_arrays

    plans = []

    def prepare(kernel, problem, device_index, layouts):
        plans.append(ReferencePlan(kernel, problem, layouts))
        return plans[-1]

    stand_in = types.SimpleNamespace(
        device_count=lambda: 1, device_facts=lambda index: H200, driver_version=lambda: None, prepare=prepare
    )
    monkeypatch.setattr(torch_arrays, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(device_arrays, "current_device", lambda: 0)
    monkeypatch.setattr(torch_arrays, "_current_stream", lambda device: 0)
    monkeypatch.setattr(call, "launch", stand_in)
    monkeypatch.setattr(prepared, "launch", stand_in)
    monkeypatch.setattr(call, "calls", prepared.Calls())
    return plans


def tensors(q=(2, 3, 5, 8), k=(2, 3, 7, 8), v=(2, 3, 7, 4), **kwargs):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(**kwargs) for shape in (q, k, v)]


def assert_near(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=1e-6)


def test_signature_is_torchs():
    parameters = inspect.signature(numba_attn.scaled_dot_product_attention).parameters
    assert [(name, p.default) for name, p in parameters.items()] == [
        ("query", inspect.Parameter.empty),
        ("key", inspect.Parameter.empty),
        ("value", inspect.Parameter.empty),
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 8), (7, 8), (7, 4)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 4)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
        ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 4)),
        ((1, 3, 5, 8), (2, 3, 7, 8), (1, 3, 7, 4)),
        ((2, 3, 5, 8), (3, 7, 8), (3, 7, 4)),
        ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 4)),
        ((2, 2, 3, 5, 0), (2, 2, 3, 7, 0), (2, 2, 3, 7, 4)),
        ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 4)),
        ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 4)),
        ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
        ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 4)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_and_values_are_torchs(launches, shapes, is_causal):
    q, k, v = tensors(*shapes)
    o = numba_attn.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert o.shape == expected.shape and o.is_contiguous() and o.dtype == torch.float32
    assert_near(o, expected)


@pytest.mark.parametrize("scale", [0, 0.0, -1, 1e-45, 0.25, np.float32(0.5), torch.tensor(0.5), np.array(2.0)])
def test_only_none_means_the_default_scale(launches, scale):
    q, k, v = tensors()
    expected, _ = reference.attention(q, k, v, scale=float(scale))
    assert_near(numba_attn.attention(q, k, v, scale=scale), expected)
    assert_near(numba_attn.scaled_dot_product_attention(q, k, v, scale=scale), expected)
    assert_near(numba_attn.attention(q, k, v), reference.attention(q, k, v)[0])


@pytest.mark.parametrize("scale", ["0.5", [], object(), 1j, torch.ones(2)], ids=lambda scale: type(scale).__name__)
def test_scale_that_is_no_number(launches, scale):
    with pytest.raises(TypeError, match="^scale is a"):
        numba_attn.attention(*tensors(), scale=scale)


def test_numbers_and_flags_that_are_arrays(launches):
    # Told once by numpy: "the truth value of an array", of no argument's name.
    sdpa = numba_attn.scaled_dot_product_attention
    with pytest.raises(TypeError, match="^dropout_p is a ndarray: a number is needed$"):
        sdpa(*tensors(), dropout_p=np.zeros(2))
    with pytest.raises(TypeError, match="^is_causal is a ndarray: True or False is needed$"):
        sdpa(*tensors(), attn_mask=np.zeros(2), is_causal=np.zeros(2, bool))
    sdpa(*tensors(), dropout_p=0)
    sdpa(*tensors(), dropout_p=np.float32(0))


WRONG_OPTIONS = {
    "scale": ("x", TypeError, "^scale is a str: a number or None is needed$"),
    "kernel": ("zz", ValueError, "^kernel 'zz' is not one of "),
    "stream": ("x", TypeError, "^stream is a str: "),
    "out": (np.zeros(2, np.float32), ValueError, r"^out has shape \(2,\) and the result has "),
}


@pytest.mark.parametrize("argument", WRONG_OPTIONS)
def test_arguments_are_checked_before_anything_else_is_done(launches, monkeypatch, argument):
    def done(*_):
        raise AssertionError("too early")

    value, error, said = WRONG_OPTIONS[argument]
    arrays = tensors()
    of_torch = torch.from_numpy(value) if argument == "out" else value
    monkeypatch.setattr(call.launch, "prepare", done)
    with pytest.raises(error, match=said):
        numba_attn.attention(*arrays, **{argument: of_torch})
    with pytest.raises(error, match=said):
        numba_attn.explain(*arrays, **{argument: of_torch})
    monkeypatch.setattr(call.launch, "device_count", done)
    for function in (numba_attn.attention, numba_attn.explain):
        if not (argument == "kernel" and function is numba_attn.explain):
            with pytest.raises(error, match=said):
                function(*(t.numpy() for t in arrays), **{argument: value})


def test_out_that_explain_refuses(launches):
    q, k, v = tensors(k=(2, 3, 5, 8), v=(2, 3, 5, 8))
    with pytest.raises(ValueError, match="^out shares memory with q$"):
        numba_attn.explain(q, k, v, out=q)
    assert numba_attn.explain(q, k, v, out=torch.empty(2, 3, 5, 8), scale=0.5).chosen


def test_dual_tensors_are_refused(launches):
    # Served once, without their tangents.
    forward_ad = torch.autograd.forward_ad
    arrays = tensors()
    numba_attn.attention(*arrays)
    with forward_ad.dual_level():
        numba_attn.attention(*arrays)
        for index, name in enumerate("qkv"):
            given = list(arrays)
            given[index] = forward_ad.make_dual(given[index], torch.ones_like(given[index]))
            with pytest.raises(NotImplementedError, match=f"^{name} is a dual tensor: "):
                numba_attn.attention(*given)
    assert {plan.problem.B for plan in launches} == {2}


def test_numpy_batches_that_broadcast_in_part_are_expanded():
    z = [np.zeros(shape, np.float32) for shape in ((2, 1, 1, 3, 8), (1, 3, 1, 4, 8), (2, 3, 1, 4, 8))]
    assert numba_attn.explain(*z).problem.B == 6
    with pytest.raises(ValueError, match="^q has batch size 2 and k has 4"):
        numba_attn.explain(z[0], np.zeros((4, 3, 1, 4, 8), np.float32), z[2])
    q = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 1, 1, 3, 8)
    expanded, k, v = call.numpy_arrays.with_batch_in_one(q, np.zeros((1, 1, 1, 4, 8), np.float32), z[2])
    assert expanded.shape == (2, 3, 1, 3, 8) and (expanded[:, 2] == q[:, 0]).all()
    assert k.shape == (1, 1, 1, 4, 8) and v is z[2], "these are one batch dimension as they are"
    with pytest.raises(TypeError, match="^q is a masked array"):
        numba_attn.explain(np.ma.masked_array(z[0]), z[1], z[2])


def test_scale_out_of_range(launches):
    with pytest.raises(ValueError, match="^scale is beyond the range"):
        numba_attn.attention(*tensors(), scale=10**400)


@pytest.mark.parametrize("value", [1, 0, None, "no", [], np.ones(1, bool)], ids=repr)
def test_flags_are_bools(launches, value):
    for name in ("causal", "enable_gqa", "return_lse"):
        for function in (numba_attn.attention, numba_attn.explain):
            with pytest.raises(TypeError, match=f"^{name} is a"):
                function(*tensors(), **{name: value})
    for name in ("is_causal", "enable_gqa"):
        with pytest.raises(TypeError, match=f"^{name} is a"):
            numba_attn.scaled_dot_product_attention(*tensors(), **{name: value})
    assert not launches


def test_flags_of_numpy_are_the_same_call(launches):
    for kind in (bool, np.bool_):
        o, _ = numba_attn.attention(*tensors(), causal=kind(1), enable_gqa=kind(0), return_lse=kind(1))
        assert_near(o, reference.attention(*tensors(), causal=True)[0])
    assert len(launches) == 1 and launches[0].problem.is_causal is True


BAD_PRECISIONS = ["fp16", "TF32", "", None, True, 32, [], np.ones(2), torch.float32]


@pytest.mark.parametrize("precision", BAD_PRECISIONS, ids=repr)
def test_precision_that_is_none(launches, precision):
    said = r"^precision is .*: it must be one of 'fp32', 'tf32'$"
    arrays = tensors()
    for function in (numba_attn.attention, numba_attn.explain):
        with pytest.raises(ValueError, match=said):
            function(*arrays, precision=precision)
    with pytest.raises(ValueError, match=said):
        numba_attn.attention(*(t.numpy() for t in arrays), precision=precision)
    with pytest.raises(ValueError, match=said):
        numba_attn.sim.attention(*(t.numpy() for t in arrays), precision=precision)
    assert not launches


def test_precision_is_a_fact_of_the_problem(launches):
    for precision in ("fp32", "tf32", "tf32"):
        numba_attn.attention(*tensors(), precision=precision, kernel="flash_split_half_sm80")
    numba_attn.attention(*tensors(), precision="tf32", kernel="flash_fp32", out=torch.empty(2, 3, 5, 4))
    assert [plan.problem.precision for plan in launches] == ["fp32", "tf32", "tf32"]
    told = numba_attn.explain(*tensors(), precision="tf32")
    assert told.problem.precision == "tf32" and told.accuracy == "fp32", "few rows: a kernel without that mode"
    long = tensors((2, 3, 600, 64), (2, 3, 7000, 64), (2, 3, 7000, 64))
    told = numba_attn.explain(*long, precision="tf32")
    assert (told.chosen, told.accuracy) == ("flash_split_half_sm90", "tf32")
    assert ", precision tf32 gives tf32 (" in repr(told)
    assert numba_attn.explain(*long).accuracy == "fp32" and "precision" not in repr(numba_attn.explain(*long))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_flags_of_torch_change_no_precision(launches, precision):
    torch.set_float32_matmul_precision(precision)
    try:
        numba_attn.attention(*tensors())
        numba_attn.scaled_dot_product_attention(*tensors())
        assert numba_attn.explain(*tensors()).problem.precision == "fp32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {plan.problem.precision for plan in launches} == {"fp32"}


@pytest.mark.parametrize("kernel", [[], {}, 3])
def test_kernel_that_is_no_kernel(launches, kernel):
    with pytest.raises(TypeError, match="^kernel is a .*: a name or a Kernel is needed"):
        numba_attn.attention(*tensors(), kernel=kernel)


def test_lse(launches):
    q, k, v = tensors()
    o, lse = numba_attn.attention(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, causal=True)
    assert lse.shape == (2, 3, 5)
    assert_near(o, expected)
    assert_near(lse, expected_lse)
    assert isinstance(numba_attn.attention(q, k, v), torch.Tensor)


@pytest.mark.parametrize("shapes", [((5, 8), (0, 8), (0, 4)), ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 0))])
def test_without_keys_nothing_is_launched(launches, shapes):
    o, lse = numba_attn.attention(*tensors(*shapes), return_lse=True)
    assert not launches
    assert (o == 0).all() and (lse == -math.inf).all()


def test_lse_without_value_columns_is_that_of_the_scores(launches):
    q, k, v = tensors(v=(2, 3, 7, 0))
    o, lse = numba_attn.attention(q, k, v, return_lse=True)
    assert o.shape == (2, 3, 5, 0)
    assert_near(lse, reference.attention(q, k, v)[1])


@pytest.mark.parametrize("out", [torch.empty(2, 3, 5, 0), torch.empty(2, 3, 5, 64)[..., :0]], ids=["plain", "strided"])
def test_without_value_columns_kernels_write_to_scratch(launches, out):
    # They got the layout of `out` for the pointer of the scratch: rows of no columns, one upon the other.
    q, k, v = tensors(v=(2, 3, 7, 0))
    o, lse = numba_attn.attention(q, k, v, return_lse=True, out=out)
    assert o is out and launches[0].layouts["O"] == View.contiguous((2, 3, 5, 1))
    assert_near(lse, reference.attention(q, k, v)[1])


def strided(name: str, shape):
    B, H, L, D = shape
    return {
        "transposed": lambda: torch.randn(B, L, H, D).transpose(1, 2),
        "packed": lambda: torch.randn(B, L, 3, H, D)[:, :, 1].transpose(1, 2),
        "every_other": lambda: torch.randn(B, H, L, 2 * D)[..., ::2],
        "storage_transposed": lambda: torch.randn(B, H, D, L).mT,
        "offset": lambda: torch.randn(B * H * L * D + 1)[1:].view(shape),
        "expanded": lambda: torch.randn(1, 1, L, D).expand(shape),
    }[name]()


@pytest.mark.parametrize("layout", ["transposed", "packed", "every_other", "storage_transposed", "offset", "expanded"])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_strides_are_passed_on(launches, layout, which):
    arrays = tensors()
    for index in which:
        arrays[index] = strided(layout, tuple(arrays[index].shape))
    assert_near(numba_attn.attention(*arrays), reference.attention(*arrays)[0])
    # The same shapes in another layout are another call.
    assert_near(numba_attn.attention(*tensors()), reference.attention(*tensors())[0])


def test_alignment_is_part_of_the_call(launches):
    q, k, v = tensors(v=(2, 3, 7, 8))
    shifted = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    assert_near(numba_attn.attention(q, k, v), numba_attn.attention(shifted, k, v))
    aligned = 1 if any(t.data_ptr() % 16 for t in (q, k, v)) else 4
    assert [plan.problem.vector for plan in launches] == [aligned, 1]


@pytest.mark.parametrize("layout", ["transposed", "packed", "every_other", "storage_transposed", "offset"])
def test_out_takes_the_result(launches, layout):
    q, k, v = tensors()
    out = strided(layout, (2, 3, 5, 4))
    result = numba_attn.attention(q, k, v, out=out)
    assert result is out
    assert_near(out, reference.attention(q, k, v)[0])


def test_out_between_the_inputs_of_one_buffer(launches):
    packed = torch.randn(2, 5, 4, 3, 8)
    q, k, v, out = (packed[:, :, i].transpose(1, 2) for i in range(4))
    expected = reference.attention(q, k, v)[0]
    assert_near(numba_attn.attention(q, k, v, out=out), expected)


@pytest.mark.parametrize("which", range(3))
def test_out_that_overlaps_an_input(launches, which):
    arrays = tensors(k=(2, 3, 5, 8), v=(2, 3, 5, 8))
    buffer = torch.randn(2 * 3 * 5 * 8 + 4)
    arrays[which] = buffer[4:].view(2, 3, 5, 8)
    with pytest.raises(ValueError, match=f"^out shares memory with {'qkv'[which]}"):
        numba_attn.attention(*arrays, out=buffer[:-4].view(2, 3, 5, 8))
    with pytest.raises(ValueError, match="^out shares memory"):
        numba_attn.attention(*arrays, out=arrays[which])


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (ValueError, lambda: torch.empty(2, 3, 5, 5)),
        (ValueError, lambda: torch.empty(3, 5, 4)),
        (NotImplementedError, lambda: torch.empty(2, 3, 5, 4, dtype=torch.float16)),
        (TypeError, lambda: torch.empty(2, 3, 5, 4, dtype=torch.int32)),
        (TypeError, lambda: np.empty((2, 3, 5, 4), np.float32)),
        (ValueError, lambda: torch.empty(1, 1, 1, 4).expand(2, 3, 5, 4)),
    ],
)
def test_out_that_does_not_fit(launches, error, out):
    with pytest.raises(error, match="^out "):
        numba_attn.attention(*tensors(), out=out())


def test_warm_calls_prepare_once(launches):
    for _ in range(3):
        numba_attn.attention(*tensors())
    assert len(launches) == 1
    numba_attn.attention(*tensors(), causal=True)
    numba_attn.attention(*tensors(), return_lse=True)
    assert len(launches) == 3


def test_a_call_does_not_wait_for_another_that_is_prepared(launches, monkeypatch):
    prepare, entered, done = call.launch.prepare, threading.Event(), threading.Event()

    def slowly(kernel, problem, device_index, layouts):
        if problem.Lq == 3:
            entered.set()
            assert done.wait(30)
        return prepare(kernel, problem, device_index, layouts)

    monkeypatch.setattr(call.launch, "prepare", slowly)
    cold = threading.Thread(target=numba_attn.attention, args=tensors(q=(1, 1, 3, 4), k=(1, 1, 7, 4), v=(1, 1, 7, 4)))
    cold.start()
    assert entered.wait(30)
    numba_attn.attention(*tensors())
    done.set()
    cold.join()
    assert len(launches) == 2


def test_kept_calls_are_bounded(launches, monkeypatch):
    monkeypatch.setattr(prepared, "KEPT_CALLS", 16)
    for length in range(1, 100):
        numba_attn.attention(*tensors(q=(1, 1, length, 4), k=(1, 1, 7, 4), v=(1, 1, 7, 4)))
    assert len(call.calls._calls) == 16


def test_threads_that_prepare_at_once_keep_one_call(launches):
    barrier = threading.Barrier(8)
    arrays = tensors()
    results = []

    def work():
        barrier.wait()
        results.append(numba_attn.attention(*arrays))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(result, results[0]) for result in results)
    prepared = len(launches)
    numba_attn.attention(*arrays)
    assert 1 <= prepared <= 8 and len(launches) == prepared


def test_kernel_by_name_and_by_record(launches):
    q, k, v = tensors()
    for kernel in KERNELS:
        numba_attn.attention(q, k, v, kernel=kernel.name)
        assert launches[-1].kernel is kernel
    own = replace(KERNELS[0], name="with_workspace")
    assert_near(numba_attn.attention(q, k, v, kernel=own), reference.attention(q, k, v)[0])
    assert launches[-1].kernel is own
    refuses = replace(KERNELS[0], name="small_only", supports=lambda problem, device: f"D = {problem.D} is over 4")
    with pytest.raises(ValueError, match="^kernel small_only cannot serve this call: D = 8 is over 4"):
        numba_attn.attention(q, k, v, kernel=refuses)
    with pytest.raises(ValueError, match="^kernel 'nope' is not one of"):
        numba_attn.attention(q, k, v, kernel="nope")


def test_not_there_yet():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="^attn_mask .*not there yet"):
        numba_attn.scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match="attn_mask and is_causal"):
        numba_attn.scaled_dot_product_attention(q, k, v, torch.ones(5, 7), is_causal=True)
    with pytest.raises(NotImplementedError, match="^dropout_p .*not there yet"):
        numba_attn.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    for function in (numba_attn.attention, numba_attn.explain):
        with pytest.raises(NotImplementedError, match="^mask .*not there yet"):
            function(q, k, v, mask=torch.ones(5, 7))


@pytest.mark.parametrize("which", range(3))
def test_gradients_are_refused_loudly(launches, which):
    arrays = tensors()
    arrays[which].requires_grad_()
    name = ("query", "key", "value")[which]
    with pytest.raises(NotImplementedError, match=f"^{name} requires grad"):
        numba_attn.scaled_dot_product_attention(*arrays)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_near(numba_attn.attention(*arrays), reference.attention(*(t.detach() for t in arrays))[0])
    # A call kept from the modes above must not let this one through.
    with pytest.raises(NotImplementedError, match="requires grad"):
        numba_attn.scaled_dot_product_attention(*arrays)


def wrong(index, make):
    arrays = tensors()
    arrays[index] = make(arrays[index])
    return arrays


WRONG = [
    *[
        (NotImplementedError, i, "float32", lambda t, d=d: t.to(d))
        for i in range(3)
        for d in (torch.half, torch.double)
    ],
    *[(TypeError, i, "int32", lambda t: t.int()) for i in range(3)],
    *[(ValueError, i, "dimensions", lambda t: t[0, 0, 0]) for i in range(3)],
    *[(TypeError, i, "list", lambda t: t.tolist()) for i in range(3)],
    *[(TypeError, i, "library", lambda t: t.numpy()) for i in (1, 2)],
    *[(TypeError, i, "strided", lambda t: t.to_sparse()) for i in range(3)],
    (ValueError, 1, "head dim", lambda t: t[..., 1:]),
    (ValueError, 2, "length", lambda t: t[..., 1:, :]),
    (ValueError, 1, "heads", lambda t: t[:, 1:]),
    (ValueError, 2, "heads", lambda t: t[:, 1:]),
    (ValueError, 2, "batch", lambda t: t.repeat(2, 1, 1, 1)),
    (ValueError, 0, "negation", lambda t: torch.complex(t, t).conj().imag),
]


@pytest.mark.parametrize(("error", "index", "word", "make"), WRONG)
@pytest.mark.parametrize("names", [("query", "key", "value"), ("q", "k", "v")], ids=["torch_names", "short_names"])
def test_wrong_arguments_are_named(launches, names, error, index, word, make):
    function = numba_attn.attention if names[0] == "q" else numba_attn.scaled_dot_product_attention
    with pytest.raises(error, match=f"^{names[index]} .*{word}") as caught:
        function(*wrong(index, make))
    assert "\n" not in str(caught.value)
    assert not launches


@pytest.mark.parametrize("index", range(3))
def test_cpu_tensors_are_refused_by_name(index):
    if torch.cuda.is_available():
        arrays = [t.cuda() for t in tensors()]
        arrays[index] = arrays[index].cpu()
    else:
        arrays, index = tensors(), 0
    name = ("query", "key", "value")[index]
    with pytest.raises(ValueError, match=rf"^{name} is on cpu: a CUDA tensor.*numba_attn\.sim\.attention"):
        numba_attn.scaled_dot_product_attention(*arrays)


@pytest.mark.skipif(call.launch.device_count() > 0, reason="there is a GPU")
def test_numpy_without_a_gpu():
    q, k, v = (t.numpy() for t in tensors())
    with pytest.raises(RuntimeError, match=r"numba_attn\.sim\.attention") as caught:
        numba_attn.attention(q, k, v)
    assert "\n" not in str(caught.value)
    told = numba_attn.explain(q, k, v, causal=True)
    assert told.problem.is_causal and told.chosen in [kernel.name for kernel in KERNELS]
    assert "no GPU here" in repr(told)
    assert numba_attn.explain(q, k, v, kernel="unfused_fp32").chosen is None, "it needs torch's or CuPy's product"
    with pytest.raises(ValueError, match="^k has head dim"):
        numba_attn.attention(q, k[..., 1:], v)
    with pytest.raises(ValueError, match="^out shares memory with v"):
        numba_attn.attention(q, k, v, out=v[:, :, :5])
    with pytest.raises(TypeError, match="^q is >f4"):
        numba_attn.attention(q.astype(">f4"), k, v)


def test_explain_uses_the_caller_s_kernel(launches):
    told = numba_attn.explain(*tensors(), kernel=KERNELS[-1].name)
    assert told.chosen == KERNELS[-1].name
    assert list(told.reasons) == [kernel.name for kernel in KERNELS]
    assert not launches


@pytest.mark.parametrize("head_dim", [8, 300])
@pytest.mark.parametrize("empty", [0, 1, 2], ids=["B", "H", "Lq"])
def test_explain_where_there_is_no_row(launches, empty, head_dim):
    """Broke once: no batches to share rows into."""
    shape = [2, 3, 4, head_dim]
    shape[empty] = 0
    q, k = np.zeros(shape, np.float32), np.zeros([*shape[:2], 5, head_dim], np.float32)
    told = numba_attn.explain(q, k, k)
    assert told.chosen in [kernel.name for kernel in KERNELS]
    for kernel in KERNELS:
        assert kernel.supports(told.problem, H200) is None or kernel.name.startswith("flash_split_half")


def test_explain_tells_a_kernel_from_the_registered_one_of_its_name(launches):
    own = replace(KERNELS[0], summary="mine")
    told = numba_attn.explain(*tensors(), kernel=own)
    given = f"{own.name} (given)"
    assert list(told.reasons) == [given, *(kernel.name for kernel in KERNELS)]
    assert told.reasons[given] == "chosen"
    assert all(told.reasons[kernel.name] == f"can, but {given} was asked for" for kernel in KERNELS)
    equal = replace(KERNELS[0])
    assert numba_attn.explain(*tensors(), kernel=equal).reasons == told.reasons


def test_explain_a_kernel_that_was_asked_for_and_cannot(launches):
    refuses = replace(KERNELS[0], name="small_only", supports=lambda problem, device: "too large")
    told = numba_attn.explain(*tensors(), kernel=refuses)
    assert told.chosen is None and told.reasons["small_only"] == "cannot: too large"
    assert all(told.reasons[kernel.name] == "can, but small_only was asked for" for kernel in KERNELS)
