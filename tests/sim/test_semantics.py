"""Contract under test: what a simulated kernel computes is what the instructions compute."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import cuda, float32, float64, int8, int32, int64, uint32
from numba.cuda import libdevice, threadIdx

from numba_attn import sim
from numba_attn.device import softmax
from numba_attn.device.verb import twin_of

FULL = 0xFFFFFFFF
LANES = np.arange(32)


def _lanes(kernel, dtype=np.float32, count=32):
    """O of a kernel that is given A[i] = i."""
    A = np.arange(count, dtype=dtype)
    O = np.zeros(count, dtype)
    sim.launch(kernel, 1, count, (A, O))
    return O


@pytest.mark.parametrize("delta", [0, 1, 5, 16, 31])
def test_shuffles(delta):
    def up(A, O):
        O[cuda.laneid] = cuda.shfl_up_sync(FULL, A[cuda.laneid], delta)

    def down(A, O):
        O[cuda.laneid] = cuda.shfl_down_sync(-1, A[cuda.laneid], delta)

    def xor(A, O):
        O[cuda.laneid] = cuda.shfl_xor_sync(FULL, A[cuda.laneid], delta)

    def any_lane(A, O):
        O[cuda.laneid] = cuda.shfl_sync(FULL, A[cuda.laneid], cuda.laneid + delta)

    np.testing.assert_array_equal(_lanes(up), np.where(delta <= LANES, LANES - delta, LANES))
    np.testing.assert_array_equal(_lanes(down), np.where(LANES + delta < 32, LANES + delta, LANES))
    np.testing.assert_array_equal(_lanes(xor), LANES ^ delta)
    np.testing.assert_array_equal(_lanes(any_lane), (LANES + delta) % 32)


def test_votes():
    def kernel(A, O):
        lane = cuda.laneid
        O[0] = cuda.ballot_sync(FULL, lane % 3 == 0)
        O[1] = cuda.all_sync(FULL, lane < 32)
        O[2] = cuda.all_sync(FULL, lane < 31)
        O[3] = cuda.any_sync(FULL, lane == 31)
        O[4] = cuda.any_sync(FULL, lane == 32)
        O[5] = cuda.eq_sync(FULL, lane < 32)
        O[6] = cuda.eq_sync(FULL, lane < 16)
        if lane == 5:
            O[7] = cuda.activemask()
        mask, same = cuda.match_all_sync(FULL, A[0])
        O[8] = mask
        O[9] = same

    def match(A, O):
        O[cuda.laneid] = cuda.match_any_sync(FULL, cuda.laneid % 2)

    multiples = sum(1 << i for i in range(0, 32, 3))
    assert _lanes(kernel, np.int64)[:10].tolist() == [multiples, 1, 0, 1, 0, 1, 0, 1 << 5, FULL, 1]
    np.testing.assert_array_equal(_lanes(match, np.int64), np.where(LANES % 2, 0xAAAAAAAA, 0x55555555))


def test_counting_barriers():
    def kernel(A, O):
        tid = cuda.threadIdx.x
        O[0] = cuda.syncthreads_count(tid % 3 == 0)
        O[1] = cuda.syncthreads_and(tid < 64)
        O[2] = cuda.syncthreads_and(tid < 63)
        O[3] = cuda.syncthreads_or(tid == 63)
        O[4] = cuda.syncthreads_or(tid == 64)

    assert _lanes(kernel, np.int32, 64)[:5].tolist() == [22, 1, 0, 1, 0]


def test_positions():
    def kernel(O):
        x, y = cuda.grid(2)
        inside = cuda.threadIdx.x + cuda.blockDim.x * (cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z)
        O[x, y, cuda.threadIdx.z, cuda.blockIdx.z] = inside * 100 + threadIdx.x + cuda.gridsize(1)

    O = np.zeros((6, 4, 2, 2), np.int32)
    sim.launch(kernel, (2, 2, 2), (3, 2, 2), (O,))
    x, y, z, _ = np.indices(O.shape)
    np.testing.assert_array_equal(O, (x % 3 + 3 * (y % 2 + 2 * z)) * 100 + x % 3 + 6)


def test_bits():
    def kernel(A, O):
        O[0] = cuda.popc(0xF0F)
        O[1] = cuda.ffs(0x80)
        O[2] = cuda.ffs(0)
        O[3] = cuda.clz(1)
        O[4] = cuda.clz(0)
        O[5] = cuda.brev(1)
        O[6] = cuda.popc(-1)
        O[7] = cuda.selp(A[1] > 0, 3, 4)
        O[8] = cuda.lanemask_lt()

    A, O = np.ones(2, np.int64), np.zeros(9, np.int64)
    sim.launch(kernel, 1, 1, (A, O))
    assert O.tolist() == [8, 8, 0, 31, 32, 1 << 31, 32, 3, 0]


ATOMICS = {
    "add": lambda old, values: old + values.sum(),
    "sub": lambda old, values: old - values.sum(),
    "max": lambda old, values: max(old, values.max()),
    "min": lambda old, values: min(old, values.min()),
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64])
def test_atomics(name, dtype):
    def kernel(A, O):
        s = cuda.shared.array(1, A.dtype)
        if cuda.threadIdx.x == 0:
            s[0] = A[7]
        cuda.syncthreads()
        getattr(cuda.atomic, name)(s, 0, A[cuda.threadIdx.x])
        getattr(cuda.atomic, name)(O, (0, 0), A[cuda.threadIdx.x])
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            O[0, 1] = s[0]

    A = (np.arange(64) * 37 % 64).astype(dtype)
    O = np.full((1, 2), A[7], dtype)
    sim.launch(kernel, 1, 64, (A, O))
    assert O.tolist() == [[ATOMICS[name](A[7], A)] * 2]


def test_atomics_return_the_old_value():
    def kernel(A, O):
        O[0] = cuda.atomic.exch(A, 0, 5)
        O[1] = cuda.atomic.cas(A, 0, 5, 6)
        O[2] = cuda.atomic.cas(A, 0, 5, 7)
        O[3] = cuda.atomic.inc(A, 0, 6)
        O[4] = cuda.atomic.dec(A, 0, 9)
        O[5] = cuda.atomic.or_(A, 1, 6)
        O[6] = cuda.atomic.and_(A, 1, 3)
        O[7] = cuda.atomic.xor(A, 1, 1)

    A, O = np.array([3, 1], np.uint32), np.zeros(8, np.uint32)
    sim.launch(kernel, 1, 1, (A, O))
    assert O.tolist() == [3, 5, 6, 6, 0, 1, 7, 3]
    assert A.tolist() == [9, 2]


FUNCTIONS = {
    math.exp: [-200, -1.5, 0, 88, 89, 800, math.inf, -math.inf, math.nan],
    math.exp2: [-150, -0.5, 127.5, 128, 2000, -math.inf],
    math.log: [0, -1, 1e-40, 2.5, math.inf, math.nan],
    math.log2: [0, -1, 3, math.inf],
    math.sqrt: [-1, 0, 2, math.inf],
    math.tanh: [-3, 0.1, 200],
    math.sin: [0.5, math.inf],
    math.erf: [-1, 0.5, math.inf],
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_math_has_the_type_of_its_argument_and_never_raises(function, dtype):
    types = []

    def kernel(X, Y):
        for i in range(X.shape[0]):
            y = function(X[i])
            types.append(type(y))
            Y[i] = y

    X = np.array(FUNCTIONS[function], dtype)
    Y = np.zeros_like(X)
    sim.launch(kernel, 1, 1, (X, Y))
    with np.errstate(all="ignore"):
        by_numpy = np.array([math.erf(x) for x in X], dtype) if function is math.erf else None
        names = {"exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2}
        names |= {"sqrt": np.sqrt, "tanh": np.tanh, "sin": np.sin}
        expected = by_numpy if by_numpy is not None else names[function.__name__](X)
    np.testing.assert_allclose(Y, expected, rtol=4 * np.finfo(dtype).eps)
    assert set(types) == {dtype}


def test_fp32_stays_fp32_and_divides_by_zero():
    types = []

    def kernel(A, O):
        x = A[1] * 0.5 + 2
        types.append(type(x))
        O[0] = x / A[0]
        O[1] = A[0] / A[0]
        O[2] = float32(1e30) * float32(1e30)
        O[3] = max(A[0] / A[0], A[1])
        O[4] = min(A[1], A[0] / A[0], A[2])
        O[5] = abs(-A[2])
        O[6] = libdevice.fmaf(A[1], A[2], A[3])
        O[7] = math.inf

    O = np.zeros(8, np.float32)
    sim.launch(kernel, 1, 1, (np.arange(4, dtype=np.float32), O))
    np.testing.assert_array_equal(O, [np.inf, np.nan, np.inf, 1, 1, 2, 5, np.inf])
    assert types == [np.float32]


def test_fused_multiply_add_rounds_once():
    def kernel(A, O):
        O[0] = cuda.fma(A[0], A[0], -A[1])
        O[1] = A[0] * A[0] - A[1]

    x = np.float32(1 + 2**-12)
    A, O = np.array([x, x * x], np.float32), np.zeros(2, np.float32)
    sim.launch(kernel, 1, 1, (A, O))
    assert O.tolist() == [2.0**-24, 0]


def test_casts():
    def kernel(A, O):
        O[0] = int32(A[0])
        O[1] = int32(-A[0])
        O[2] = int32(1 << 31)
        O[3] = uint32(-1)
        O[4] = int8(200)
        O[5] = int64(A[1])
        O[6] = int32(A[2])
        O[7] = int(A[0])

    A, O = np.array([2.75, 1e30, np.nan], np.float64), np.zeros(8, np.int64)
    sim.launch(kernel, 1, 1, (A, O))
    assert O.tolist() == [2, -2, -(1 << 31), FULL, -56, (1 << 63) - 1, 0, 2]


def test_stores_convert():
    def kernel(A, O):
        r = cuda.local.array(2, int32)
        s = cuda.shared.array(2, int32)
        f = cuda.local.array(1, float64)
        r[0] = 1 << 31
        s[0] = A[0]
        f[0] = A[0]
        O[0] = r[0]
        O[1] = s[0]
        O[2] = f[0]

    O = np.zeros(3, np.float64)
    sim.launch(kernel, 1, 1, (np.array([2.5], np.float32), O))
    assert O.tolist() == [-(2**31), 2, 2.5]


def test_aliasing_tiles_share_their_bits():
    class Stub:
        pass

    tile = Stub()
    twin_of(tile)(lambda thread, offset, shape, dtype: thread.shared_tile(offset, shape, (1,), dtype))

    def kernel(A, O):
        f, i, b, d = tile(0, (4,), "float32"), tile(0, (4,), "int32"), tile(0, (16,), "uint8"), tile(8, (1,), float64)
        f[0] = A[0]
        O[0] = i[0]
        O[1] = b[3]
        d[0] = -2.0
        O[2] = i[3]
        b[12] = 1
        O[3] = i[3]
        O[4] = f[0]

    O = np.zeros(5, np.float64)
    sim.launch(kernel, 1, 1, (np.ones(1, np.float32), O), smem_bytes=16)
    assert O.tolist() == [0x3F800000, 0x3F, -(2**30), -(2**30) + 1, 1]


def test_tiles_of_many_dimensions_and_their_parts():
    def kernel(A, O):
        s = cuda.shared.array((2, 3, 4), float32)
        for i in range(24):
            s[i // 12, i // 4 % 3, i % 4] = A[i]
        part = s[1]
        row = part[2]
        O[0] = part[2, 3] + row[0] + s[0][1, 1]
        O[1] = len(s) * 100 + part.shape[0] * 10 + row.shape[0]

    A, O = np.arange(24, dtype=np.float32), np.zeros(2, np.float32)
    sim.launch(kernel, 1, 1, (A, O))
    assert O.tolist() == [23 + 20 + 5, 234]


def test_names_are_rebound_where_they_are_reached():
    scale = np.float32(3)

    def helper(x):
        return softmax.warp_sum(x) * scale

    def kernel(A, O):
        O[cuda.laneid] = helper(A[cuda.laneid])

    np.testing.assert_array_equal(_lanes(cuda.jit(kernel)), 3 * LANES.sum())


def test_strided_and_read_only_arguments():
    def kernel(A, O):
        for i in range(A.shape[0]):
            for j in range(A.shape[1]):
                O[i, j] = A[i, j]

    A = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3].T
    A.flags.writeable = False
    O = np.zeros((2, 4), np.float32)[:, ::2]
    sim.launch(kernel, 1, 1, (A, O))
    np.testing.assert_array_equal(O, A)


@pytest.mark.parametrize(("grid", "threads"), [(0, 32), (1, 0), (1, 2048), ((1, 1, 1, 1), 32)])
def test_sizes_that_no_gpu_launches(grid, threads):
    with pytest.raises(ValueError, match="grid|threads"):
        sim.launch(lambda: None, grid, threads, ())


def test_not_a_function():
    with pytest.raises(TypeError, match="py_func"):
        sim.launch(3, 1, 1, ())
