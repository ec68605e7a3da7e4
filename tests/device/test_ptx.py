"""Contract under test: each instruction compiles to its mnemonic, and its twin computes its value."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
from numba import cuda, float32
from toys import nans, ptx_of, randn, simulate

from numba_attn import sim
from numba_attn.device.math import LOG2E, cdiv, fma
from numba_attn.device.ptx import cp_async_commit, cp_async_wait, of_warp, opaque
from numba_attn.device.smem import async_copy, shared_memory, shared_tile
from numba_attn.device.softmax import ALL_LANES, exp, of_row, warp_max


@cuda.jit
def fma_kernel(A, B, C, O):
    for i in range(cuda.threadIdx.x, O.shape[0], 32):
        O[i] = fma(A[i], B[i], C[i])


def instructions(ptx: str) -> list[str]:
    return re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z]\w*\.[\w.:]+)", ptx, re.MULTILINE)


def test_exp_instruction():
    @cuda.jit
    def kernel(A, O):
        O[0] = exp(A[0])

    found = [
        name for name in instructions(ptx_of(kernel, 1, 1)) if name.endswith(".f32") and name[:2] not in ("ld", "st")
    ]
    assert found == ["mul.f32", "ex2.approx.f32"]


def test_fma_instruction():
    found = instructions(ptx_of(fma_kernel, 1, 1, 1, 1))
    assert {name for name in found if name.startswith(("fma.", "mul.f", "add.f"))} == {"fma.rn.f32"}


def rounded(exact: Fraction) -> np.float32:
    """The fp32 number nearest to `exact`, the even one of two."""
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


FMA_SCALES = {
    "normal": (1, 1, 1),
    "cancelling": (1, 1, None),
    "denormal operand": (1e-40, 1, 1e-40),
    "denormal result": (1e-20, 1e-20, 1e-40),
    "denormal product": (1e-22, 1e-22, 1e-44),
    "far apart": (1, 1, 1e-9),
}


@pytest.mark.parametrize("scales", FMA_SCALES.values(), ids=FMA_SCALES)
def test_fma_rounds_once(run, scales):
    a, b, c = (randn(200, seed=seed) * np.float32(1 if s is None else s) for seed, s in enumerate(scales))
    if scales[2] is None:
        c = -(a * b)
    o, inputs = nans(200), (a, b, c)
    run(fma_kernel, *inputs, o)
    expected = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(*inputs, strict=True)
    ]
    np.testing.assert_array_equal(o, expected)
    if scales == (1, 1, None):
        assert not np.any(o == 0), "the rounding error of the product is left"


def test_fma_of_special_values(run):
    inf, nan = np.inf, np.nan
    a, b, c = np.array(
        [[inf, 1, 1], [inf, 0, 1], [inf, 1, -inf], [nan, 0, 0], [0, 0, nan], [3e38, 2, 0], [-0.0, 1, -0.0]], np.float32
    ).T.copy()
    o = nans(7)
    run(fma_kernel, a, b, c, o)
    np.testing.assert_array_equal(o, [inf, nan, nan, nan, nan, inf, -0.0])
    assert np.signbit(o[-1])


def test_opaque(run):
    @cuda.jit
    def kernel(O):
        t = opaque(cuda.threadIdx.x)
        O[t] = float32(t)

    o = nans(32)
    run(kernel, o)
    np.testing.assert_array_equal(o, np.arange(32))
    assert "mov.b32" in instructions(ptx_of(kernel, 1))


def test_of_warp(run):
    @cuda.jit
    def kernel(O):
        O[cuda.threadIdx.x] = float32(of_warp(cuda.threadIdx.x >> 5))

    o = nans(64)
    run(kernel, o, threads=64)
    np.testing.assert_array_equal(o, np.repeat([0, 1], 32))
    assert "redux.sync.or.b32" in instructions(ptx_of(kernel, 1))


def test_max_and_shuffle_instructions():
    @cuda.jit
    def kernel(A, O):
        O[cuda.threadIdx.x] = warp_max(A[cuda.threadIdx.x])

    ptx = ptx_of(kernel, 1, 1)
    found = instructions(ptx)
    assert found.count("max.f32") == found.count("shfl.sync.bfly.b32") == 5
    assert re.findall(r"shfl\.sync\.bfly\.b32\s+[^;]*, (\d+), 31, -1;", ptx) == ["16", "8", "4", "2", "1"]
    assert not [name for name in found if name.startswith(("setp.nan", "max.NaN", "selp"))]


def test_of_row_instruction():
    @cuda.jit
    def kernel(A, O):
        O[cuda.threadIdx.x] = of_row(A[cuda.threadIdx.x], 5)

    ptx = ptx_of(kernel, 1, 1)
    assert re.search(r"shfl\.sync\.idx\.b32\s+[^;]*, %?\w+, 31, -1;", ptx)


def test_start_of_shared_memory():
    TILE = shared_tile(0, (32,))

    @cuda.jit
    def kernel(O):
        tile = TILE(shared_memory())
        tile[cuda.threadIdx.x] = float32(1)
        cuda.syncthreads()
        O[cuda.threadIdx.x] = tile[31 - cuda.threadIdx.x]

    ptx = ptx_of(kernel, 1)
    assert instructions(ptx).count("shfl.sync.idx.b32") == 1
    assert re.search(r"\.extern \.shared \.align 1024 \.b8 \w+\[\]", ptx)


def copying(n: int, wait: int = 0, groups: int = 1):
    """A kernel of one warp that copies `groups` rows of 32 n elements, waits until `wait` are left, and reads row 0."""
    copy, cp_async_wait_some, cp_async_wait_all = (
        async_copy(n, range(1), range(1)),
        cp_async_wait(wait),
        cp_async_wait(0),
    )
    TILE = shared_tile(0, (groups, 32 * n))

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        tile = TILE(shared_memory())
        for row in range(groups):
            copy(tile, (row, n * t), A, (row, n * t), A.shape[0] - row, 1)
            cp_async_commit()
        cp_async_wait_some()
        for i in range(n):
            O[n * t + i] = tile[0, n * t + i]
        cp_async_wait_all()

    return kernel


@pytest.mark.parametrize(("n", "cache"), [(1, "ca"), (2, "ca"), (4, "cg")])
def test_asynchronous_copy_instructions(n, cache):
    ptx = ptx_of(copying(n, wait=1, groups=2), 2, 1)
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[%r\d+\], \[%rd\d+\], (\d+), %r\d+;", ptx)
    assert set(copies) == {(cache, str(4 * n))}
    assert "cp.async.commit_group;" in ptx
    assert re.findall(r"cp\.async\.wait_group (\d);", ptx) == ["1", "0"]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_asynchronous_copy(run, n):
    A, o = randn(3, 32 * n), nans(32 * n)
    run(copying(n, wait=2, groups=3), A, o, smem_bytes=3 * 128 * n)
    np.testing.assert_array_equal(o, A[0])


def test_reading_a_copy_before_its_wait():
    A, o = randn(2, 32), nans(32)
    simulate(copying(1, wait=1, groups=2), A, o, smem_bytes=256)
    with pytest.raises(sim.SimulationError, match="in flight"):
        simulate(copying(1, wait=2, groups=2), A, o, smem_bytes=256)


def test_constants():
    assert np.float64(LOG2E) == np.float32(np.log2(np.e))
    assert LOG2E.dtype == np.float32
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert ALL_LANES == 2**32 - 1
