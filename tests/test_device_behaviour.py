"""Contract under test: on a GPU the call behaves as a good citizen: layouts, streams, devices, graphs, threads and
memory. Values are judged here only as far as these need it.
"""

from __future__ import annotations

import gc
import resource
import threading

import numpy as np
import pytest

import numba_attn
from numba_attn import reference
from numba_attn.kernels import KERNELS

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

every_kernel = pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])

# A library's product may sum in another order for another layout.
every_kernel_with_own_products = pytest.mark.parametrize("kernel", [k.name for k in KERNELS if not k.uses_matmul])


def tensors(q=(2, 3, 65, 64), k=(2, 3, 70, 64), v=(2, 3, 70, 64), seed=0, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device) for shape in (q, k, v)]


def assert_near(o, q, k, v, **kwargs):
    """Within torch's own tolerance of float64."""
    expected, _ = reference.attention(*(np.asarray(t.cpu() if hasattr(t, "cpu") else t) for t in (q, k, v)), **kwargs)
    np.testing.assert_allclose(o.cpu() if hasattr(o, "cpu") else o, expected, rtol=1e-4, atol=1e-4)


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "packed": lambda t: torch.stack([t * 7, t, t * 5], 3).permute(3, 0, 1, 2, 4)[1],
    "every_other": lambda t: torch.stack([t, t * 3], -1).flatten(-2)[..., ::2],
    "storage_transposed": lambda t: t.mT.contiguous().mT,
    "rows_of_65": lambda t: torch.nn.functional.pad(t, (0, 1), value=float("nan"))[..., :-1],
    "rows_of_66": lambda t: torch.nn.functional.pad(t, (0, 2), value=float("nan"))[..., :-2],
}


@every_kernel_with_own_products
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_is_bitwise_the_contiguous_call(kernel, layout):
    arrays = tensors()
    expected = numba_attn.attention(*arrays, causal=True, kernel=kernel)
    for which in ([0], [1], [2], [0, 1, 2]):
        strided = [LAYOUTS[layout](t) if i in which else t for i, t in enumerate(arrays)]
        assert all(torch.equal(s, t) for s, t in zip(strided, arrays, strict=True))
        assert torch.equal(numba_attn.attention(*strided, causal=True, kernel=kernel), expected), which
    out = LAYOUTS[layout](torch.zeros_like(expected))
    assert numba_attn.attention(*arrays, causal=True, kernel=kernel, out=out) is out
    assert torch.equal(out, expected)


def test_tf32_flags_change_nothing():
    q = 1 + 1e-4 * torch.randn(1, 1, 256, 1024, device="cuda")
    _, k, v = tensors(*[(1, 1, 256, 1024)] * 3)
    matmul, cudnn, precision = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )
    expected = numba_attn.attention(q, k, v)
    try:
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
            for setting in ("highest", "high", "medium"):
                torch.set_float32_matmul_precision(setting)
                assert torch.equal(numba_attn.attention(q, k, v), expected)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    assert_near(expected, q, k, v)


@pytest.mark.parametrize("shape", [(65536, 1, 1, 8), (1, 65536, 1, 8), (256, 257, 1, 8), (1, 1, 2**22 + 1, 8)], ids=str)
@every_kernel
def test_grid_limits(kernel, shape):
    B, H, Lq, D = shape
    q, k, v = tensors(shape, (B, H, 3, D), (B, H, 3, D))
    o = numba_attn.attention(q, k, v, kernel=kernel)
    torch.testing.assert_close(o, torch.softmax(q @ k.mT * D**-0.5, -1) @ v, rtol=1e-4, atol=1e-4)


def test_more_than_2_to_31_elements():
    rows = 2**21 + 64
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    long = torch.empty(1, 1, rows, 1024, device="cuda").normal_()
    _, k, v = tensors(k=(1, 1, 64, 1024), v=(1, 1, 64, 1024))
    o = numba_attn.attention(long, k, v)
    assert_near(o[:, :, -64:], long[:, :, -64:], k, v)
    assert_near(o[:, :, :64], long[:, :, :64], k, v)
    del o
    query = torch.randn(1, 1, 1, 1024, device="cuda")
    o = numba_attn.attention(query, long, long)
    scores = (long[0, 0] @ query[0, 0, 0] / 32).double()
    weights = torch.softmax(scores, 0).float()
    torch.testing.assert_close(o[0, 0, 0], weights @ long[0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", range(6), ids="B H Lq Lk D Dv".split())
def test_empty(axis):
    sizes = [2, 3, 4, 5, 8, 8]
    sizes[axis] = 0
    B, H, Lq, Lk, D, Dv = sizes
    q, k, v = tensors((B, H, Lq, D), (B, H, Lk, D), (B, H, Lk, Dv))
    o, lse = numba_attn.attention(q, k, v, return_lse=True)
    expected, expected_lse = reference.attention(*(t.cpu().numpy() for t in (q, k, v)))
    np.testing.assert_allclose(o.cpu(), expected, atol=1e-5)
    np.testing.assert_allclose(lse.cpu(), expected_lse, atol=1e-5)


def test_work_is_queued_on_the_current_stream_without_waiting():
    q, k, v = tensors()
    other = tensors(seed=1)[0]
    expected = numba_attn.attention(other, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for given in (None, side):
        target = q.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            target.copy_(other)
            if given is None:
                o = numba_attn.attention(target, k, v)
        if given is not None:
            o = numba_attn.attention(target, k, v, stream=given)
        assert not side.query(), "the call waited for the stream"
        with torch.cuda.stream(side):
            result = o.clone()
        side.synchronize()
        assert torch.equal(result, expected)


def test_a_stream_of_the_wrong_kind():
    with pytest.raises(TypeError, match="^stream is a str"):
        numba_attn.attention(*tensors(), stream="side")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device():
    here, there = tensors(), tensors(device="cuda:1")
    torch.cuda.set_device(0)
    for _ in range(3):
        for arrays in (here, there):
            o, lse = numba_attn.attention(*arrays, return_lse=True)
            assert o.device == lse.device == arrays[0].device
            assert torch.cuda.current_device() == 0
            assert_near(o, *arrays)
    for index, name in ((1, "k"), (2, "v")):
        mixed = [there[i] if i == index else here[i] for i in range(3)]
        with pytest.raises(ValueError, match=f"^{name} is on device 1 and q on device 0"):
            numba_attn.attention(*mixed)
    with pytest.raises(ValueError, match="^out is on device 1"):
        numba_attn.attention(*here, out=torch.empty_like(there[0]))


def test_graph_replay_sees_new_inputs():
    q, k, v = tensors()
    numba_attn.attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = numba_attn.attention(q, k, v)
    for seed in (1, 2):
        q.copy_(tensors(seed=seed)[0])
        graph.replay()
        assert torch.equal(o, numba_attn.attention(q, k, v))


@every_kernel
def test_repeats_are_bitwise_equal_beside_other_work(kernel):
    arrays = tensors((2, 4, 300, 96), (2, 4, 300, 96), (2, 4, 300, 96))
    expected = numba_attn.attention(*arrays, causal=True, kernel=kernel)
    load, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        with torch.cuda.stream(side):
            load @ load
        wrong += (numba_attn.attention(*arrays, causal=True, kernel=kernel) != expected).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_never_dropped_in_silence(mode):
    q, k, v = tensors()
    expected = numba_attn.attention(q, k, v)
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="^q requires grad"):
        numba_attn.attention(q, k, v)
    with mode():
        assert torch.equal(numba_attn.attention(q, k, v), expected)


def test_threads_share_a_warm_call():
    arrays = tensors()
    expected = numba_attn.attention(*arrays)
    torch.cuda.synchronize()
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                o = numba_attn.attention(*arrays)
            torch.cuda.current_stream().synchronize()
            results.append(o)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8 and all(torch.equal(o, expected) for o in results)


def test_memory_is_flat_over_changing_shapes():
    buffer = torch.randn(3, 300 * 64, device="cuda")

    def calls(start, count):
        for i in range(start, start + count):
            L, D = 1 + i % 300, 1 + i // 7 % 64
            q, k, v = (buffer[n, : L * D].view(1, 1, L, D) for n in range(3))
            numba_attn.attention(q, k, v)
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    calls(0, 3000)
    device_before, host_before = calls(3000, 1000)
    device_after, host_after = calls(4000, 6000)
    assert device_after == device_before
    assert host_after - host_before < 8 * 1024, "kilobytes grown"
