"""Contract under test: Hopper's instructions compile to their mnemonics, and their twins compute their values."""

from __future__ import annotations

import re

import numpy as np
import pytest
from half_images import image_of, split
from numba import cuda, float32, int32
from test_ptx import instructions
from toys import nans, ptx_of, randn

from numba_attn.device.ptx_sm90 import (
    fence_mbarrier_init,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
    setmaxnreg,
)
from numba_attn.device.smem import shared_memory
from numba_attn.device.split_half import ROW_BYTES, image_bytes
from numba_attn.device.unrolled import unrolled
from numba_attn.device.wgmma_fragments import STEP, Matrix

BLOCK = 64 * ROW_BYTES  # bytes of 64 rows of one block of columns


def product(columns: int, depth: int, transposed: bool, left: str, wait: bool = True):
    """O[t] = registers of thread t of the product of the planes of hi of two images in shared memory.

    A is an image [64, depth], B one [columns, depth], or `transposed` one [depth, columns]; `left` says where A is:
    shared memory, or registers, of which each thread finds its own in R[t].
    """
    a_bytes = image_bytes(64, depth)
    b_rows, b_columns = (depth, columns) if transposed else (columns, depth)
    b_bytes = image_bytes(b_rows, b_columns)
    b_block, steps, n_sums = b_rows * ROW_BYTES, depth // STEP, columns // 2

    def right(b, step: int) -> Matrix:
        if transposed:
            return Matrix(b, step * STEP * ROW_BYTES, b_block, True)
        return Matrix(b, step // 4 * b_block + step % 4 * 2 * STEP)

    @unrolled
    def multiply(e, S, a, b, R):
        lefts = [[R[step, r] for r in range(4)] for step in range(steps)]
        if left == "shared":
            lefts = [Matrix(a, step // 4 * BLOCK + step % 4 * 2 * STEP) for step in range(steps)]
        chain = [(lefts[step], right(b, step)) for step in range(steps)]
        (sums,) = e.wgmma(columns, [chain], wait=wait)
        if not wait:
            registers = [] if left == "shared" else sum(lefts, [])
            sums = e.wgmma_wait(0, sums, registers)
        for i, x in enumerate(sums):
            S[i] = x

    @unrolled
    def copy(e, target, A, B, first, barrier):
        e.copy_bulk(target, e.address(A, first), 0, a_bytes, barrier)
        e.copy_bulk(target + a_bytes, e.address(B, first), 0, b_bytes, barrier)

    fewer = setmaxnreg(168, more=False)
    more = setmaxnreg(232, more=True)
    r_shape = (steps, 4)

    @cuda.jit
    def kernel(A, B, R, O):
        tid = cuda.threadIdx.x
        smem = shared_memory()
        barrier = smem + a_bytes + b_bytes
        if tid == 0:
            mbarrier_init(barrier, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if tid >= 128:
            fewer()
            if tid == 128:
                mbarrier_arrive_expect(barrier, a_bytes + b_bytes)
                copy(smem, A, B, 0, barrier)
        else:
            more()
            S = cuda.local.array(n_sums, float32)
            own = cuda.local.array(r_shape, int32)
            for step in range(steps):
                for r in range(4):
                    own[step, r] = R[tid, 4 * step + r]
            mbarrier_wait(barrier, 0)
            multiply(S, smem, smem + a_bytes, own)
            for i in range(n_sums):
                O[tid, i] = S[i]

    return kernel, a_bytes + b_bytes + 8


def registers_of(A) -> np.ndarray:
    """Packed registers [128, 4 depth / 16] of A[64, depth]: rows g and g + 8, columns 2 t and 2 t + 8 of each step."""
    pairs = np.ascontiguousarray(A).view(np.int32)  # [row, pair of columns]
    t, steps = np.arange(128), np.arange(A.shape[1] // STEP)
    row, pair = t // 32 * 16 + t % 32 // 4, t % 4
    found = [pairs[row[:, None] + 8 * (r % 2), pair[:, None] + 8 * steps + 4 * (r // 2)] for r in range(4)]
    return np.ascontiguousarray(np.stack(found, axis=2).reshape(128, -1))


def matrix_of(O) -> np.ndarray:
    """[64, columns] of the registers [128, columns / 2]."""
    S = np.empty((64, 2 * O.shape[1]), np.float32)
    for t in range(128):
        for i in range(O.shape[1]):
            j, r = divmod(i, 4)
            S[t // 32 * 16 + t % 32 // 4 + 8 * (r // 2), 8 * j + 2 * (t % 4) + r % 2] = O[t, i]
    return S


@pytest.mark.parametrize("left", ["shared", "registers"])
@pytest.mark.parametrize(
    ("columns", "depth", "transposed"),
    [(64, 64, False), (64, 16, False), (128, 64, False), (256, 64, False), (64, 128, False)]
    + [(64, 64, True), (128, 64, True), (256, 64, True), (16, 16, True), (200, 32, True)],
)
def test_products(run, columns, depth, transposed, left):
    A, B = randn(64, depth), randn(columns, depth, seed=1)
    kernel, smem_bytes = product(columns, depth, transposed, left)
    O = nans(128, columns // 2)
    image_b = image_of(B.T.copy() if transposed else B)
    run(kernel, image_of(A), image_b, registers_of(split(A)[0]), O, threads=256, smem_bytes=smem_bytes)
    expected = split(A)[0].astype(np.float64) @ split(B)[0].astype(np.float64).T
    np.testing.assert_allclose(matrix_of(O), expected, rtol=1e-5, atol=2e-5)


def test_a_wait_of_its_own(run):
    A, B, outputs = randn(64, 64), randn(64, 64, seed=1), []
    for wait in (True, False):
        kernel, smem_bytes = product(64, 64, False, "registers", wait)
        outputs.append(nans(128, 32))
        args = image_of(A), image_of(B), registers_of(split(A)[0]), outputs[-1]
        run(kernel, *args, threads=256, smem_bytes=smem_bytes)
    np.testing.assert_array_equal(*outputs)


def test_instructions_of_products():
    kernel, _ = product(128, 64, True, "shared")
    ptx = ptx_of(kernel, 1, 1, 2, 2, threads=256, dtype="int32")
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16") == 4
    for name in (
        "wgmma.fence.sync.aligned",
        "wgmma.commit_group.sync.aligned",
        "wgmma.wait_group.sync.aligned",
        "fence.mbarrier_init.release.cluster",
        "mbarrier.init.shared.b64",
        "mbarrier.arrive.expect_tx.shared.b64",
        "setmaxnreg.dec.sync.aligned.u32",
        "setmaxnreg.inc.sync.aligned.u32",
    ):
        assert len(re.findall(re.escape(name) + r"[ ;]", ptx)) == 1, name
    assert ptx.count("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes") == 2
    assert "mbarrier.try_wait.parity.shared.b64" in ptx
    # From zero, neither operand negated, A as it is and B transposed.
    assert [", 0, 1, 1, 0, 1;" in ptx, ptx.count(", 1, 1, 1, 0, 1;")] == [True, 3]


@pytest.mark.parametrize(("left", "addresses"), [("shared", 2), ("registers", 1)])
def test_addresses_of_operands_are_one_number_for_the_warp(left, addresses):
    kernel, _ = product(64, 64, False, left)
    ptx = ptx_of(kernel, 1, 1, 2, 2, threads=256, dtype="int32")
    assert ptx.count("redux.sync.or.b32") == addresses
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16") == 4


def test_named_barriers(run):
    @cuda.jit
    def kernel(A, O):
        tid = cuda.threadIdx.x
        if tid < 32:
            O[tid] = A[tid]
            named_barrier_arrive(3, 64)
        else:
            named_barrier_sync(3, 64)
            O[tid] = O[tid - 32] + A[tid]

    A, O = randn(64), nans(64)
    run(kernel, A, O, threads=64)
    np.testing.assert_array_equal(O, np.concatenate([A[:32], A[:32] + A[32:]]))
    found = instructions(ptx_of(kernel, 1, 1, threads=64))
    assert found.count("barrier.sync") == found.count("barrier.arrive") == 1
