"""Contract under test: on a GPU every library gets its own arrays back, in the order of its own streams."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from processes import run_python

import numba_attn
from numba_attn import reference

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu


def tensors(q=(2, 3, 65, 64), k=(2, 3, 70, 64), v=(2, 3, 70, 64)):
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cuda") for shape in (q, k, v)]


def test_numpy_comes_back_as_numpy():
    rng = np.random.default_rng(0)
    q, k, v = (rng.random((2, 3, 33, 40), np.float32) for _ in range(3))
    o, lse = numba_attn.attention(q, k[:, :, ::-1], v.transpose(0, 1, 2, 3), causal=True, return_lse=True)
    assert type(o) is type(lse) is np.ndarray
    expected, expected_lse = reference.attention(q, k[:, :, ::-1], v, causal=True)
    np.testing.assert_allclose(o, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-5)
    out = np.zeros((2, 33, 3, 40), np.float32).transpose(0, 2, 1, 3)
    assert numba_attn.attention(q, k, v, out=out) is out
    np.testing.assert_allclose(out, reference.attention(q, k, v)[0], rtol=1e-4, atol=1e-5)
    o, lse = numba_attn.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (o == 0).all() and (lse == -np.inf).all()


def test_cupy_comes_back_as_cupy():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    host = [t.cpu().numpy() for t in tensors()]
    q, k, v = (cupy.asarray(array) for array in host)
    expected, _ = reference.attention(*host)
    o, lse = numba_attn.attention(q, k, v, return_lse=True)
    assert isinstance(o, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    np.testing.assert_allclose(o.get(), expected, rtol=1e-4, atol=1e-5)
    strided = cupy.asarray(host[1].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)[:, :, ::-1]
    np.testing.assert_allclose(numba_attn.attention(q, strided[:, :, ::-1], v).get(), expected, rtol=1e-4, atol=1e-5)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        inside = numba_attn.attention(q * 1, k, v)
    given = numba_attn.attention(q, k, v, stream=stream)
    stream.synchronize()
    assert (inside == o).all() and (given == o).all()
    o, lse = numba_attn.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (o == 0).all() and (lse == -np.inf).all()
    with pytest.raises(TypeError, match="^k is a torch array and q a cupy one"):
        numba_attn.attention(q, torch.zeros(2, 3, 70, 64, device="cuda"), v)


def test_numba_comes_back_as_numba():
    from numba import cuda

    host = [t.cpu().numpy() for t in tensors()]
    expected, _ = reference.attention(*host)
    q, k, v = (cuda.to_device(array) for array in host)
    o, lse = numba_attn.attention(q, k, v, return_lse=True)
    assert cuda.is_cuda_array(o) and type(o) is type(q) and type(lse) is type(q)
    np.testing.assert_allclose(o.copy_to_host(), expected, rtol=1e-4, atol=1e-5)
    stream = cuda.stream()
    ordered = [cuda.to_device(array, stream=stream) for array in host]
    for given in (None, stream, int(stream.handle)):
        o = numba_attn.attention(*ordered, stream=given)
        stream.synchronize()
        np.testing.assert_allclose(o.copy_to_host(), expected, rtol=1e-4, atol=1e-5)
    out = cuda.device_array((2, 3, 65, 64), np.float32)
    assert numba_attn.attention(q, k, v, out=out) is out
    np.testing.assert_allclose(out.copy_to_host(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="^out shares memory with q"):
        numba_attn.attention(q, k, v, out=q)
    empty = cuda.device_array((2, 3, 0, 64), np.float32)
    o, lse = numba_attn.attention(q, empty, empty, return_lse=True)
    assert (o.copy_to_host() == 0).all() and (lse.copy_to_host() == -np.inf).all()


class Producer:
    """A library that only speaks one of the two protocols."""

    def __init__(self, tensor):
        self.tensor = tensor


class ByDLPack(Producer):
    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class ByInterface(Producer):
    @property
    def __cuda_array_interface__(self):
        return self.tensor.__cuda_array_interface__


@pytest.mark.parametrize("kind", [ByDLPack, ByInterface])
def test_other_producers_get_numba_arrays(kind):
    from numba import cuda

    arrays = tensors()
    arrays[1] = arrays[1].transpose(1, 2).contiguous().transpose(1, 2)
    expected = numba_attn.attention(*arrays)
    torch.cuda.synchronize()
    o = numba_attn.attention(*map(kind, arrays))
    assert isinstance(o, type(cuda.device_array(1)))
    np.testing.assert_array_equal(o.copy_to_host(), expected.cpu().numpy())


@pytest.mark.skipif(find_spec("jaxlib") is None, reason="jax is not installed")
def test_jax_gets_numba_arrays():
    # In a process of its own: jax sets up the GPU for itself.
    run_python(
        """
import numpy as np, jax, numba_attn
from numba_attn import reference
if jax.default_backend() == "gpu":
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 3, 65, 64)) for i in range(3))
    o = numba_attn.attention(q, k * 1, v + 0)
    expected, _ = reference.attention(*map(np.asarray, (q, k, v)))
    np.testing.assert_allclose(o.copy_to_host(), expected, rtol=1e-4, atol=1e-4)
""",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
