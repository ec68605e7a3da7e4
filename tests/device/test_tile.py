"""Contract under test: each verb on patches and tiles does what its equation says, on partial tiles too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numba import cuda, float32
from toys import nans, ptx_of, randn, run_on_gpu, simulate

from numba_attn import sim
from numba_attn.device.mask import Mask
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import shared_memory, shared_tile, tile_bytes
from numba_attn.device.tile import (
    ROWS_AHEAD,
    copy_tile_async,
    fill,
    mma_AB,
    mma_AB_where,
    mma_ABt,
    output_rows,
    register_rows,
    scale_and_mask,
    store_rows,
)
from numba_attn.device.verb import verb

wait_all = cp_async_wait(0)

ROWS = 2 * ROWS_AHEAD
ROW0 = 3  # of the left operand: a warp's rows start anywhere


def fused(a, b, c):
    """round(a b + c) in fp32, of arrays."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def s_columns(columns: int) -> np.ndarray:
    """[lane, j]: column of S."""
    return np.arange(32)[:, None] + 32 * np.arange(columns)


def o_columns(columns: int, vector: int) -> np.ndarray:
    """[lane, c]: column of O."""
    c = np.arange(columns)
    return vector * (np.arange(32)[:, None] + 32 * (c // vector)) + c % vector


def test_fill_and_store_rows(run):
    TILE = shared_tile(0, (ROW0 + 4, 64), 68)

    @cuda.jit
    def kernel(A, O):
        lane = cuda.threadIdx.x
        tile = TILE(shared_memory())
        patch = cuda.local.array((4, 2), float32)
        fill(patch, float32(7))
        for i in range(3):
            patch[i, 0], patch[i, 1] = A[i, lane], A[i, lane + 32]
        store_rows(tile, patch, ROW0, lane)
        cuda.syncwarp()
        for i in range(4):
            O[i, lane], O[i, 63 - lane] = tile[ROW0 + i, lane], tile[ROW0 + i, 63 - lane]

    A, O = randn(3, 64), nans(4, 64)
    run(kernel, A, O, smem_bytes=tile_bytes((ROW0 + 4, 64), 68))
    np.testing.assert_array_equal(O, np.vstack([A, np.full(64, 7)]))


def tile_copier(rows, columns, threads, vector, row0, col0, end):
    copy = copy_tile_async(rows, columns, threads, vector)
    TILE = shared_tile(0, (rows, columns), columns + 4)

    @cuda.jit
    def kernel(A, O):
        tid = cuda.threadIdx.x
        tile = TILE(shared_memory())
        copy(tile, A, row0, col0, end, tid)
        cp_async_commit()
        wait_all()
        cuda.syncthreads()
        for i in range(tid, rows * columns, threads):
            O[i // columns, i % columns] = tile[i // columns, i % columns]

    return kernel


TILE_SHAPES = [(8, 16, 32), (16, 32, 64), (4, 256, 32), (1, 256, 64)]


@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize(("rows", "columns", "threads"), TILE_SHAPES)
@pytest.mark.parametrize("part", ["whole", "edge", "outside"])
def test_copy_tile_async(run, rows, columns, threads, vector, part):
    row0, col0 = {"whole": (2, 8), "edge": (rows // 2 + 1, columns // 2), "outside": (3 * rows, 0)}[part]
    end = rows + 2
    surrounding = nans(end + 3, columns + 24)
    A = surrounding[:end, 4 : 12 + columns]  # columns are a multiple of the vector
    A[...] = randn(*A.shape)
    O = nans(rows, columns)
    kernel = tile_copier(rows, columns, threads, vector, row0, col0, end)
    run(kernel, A, O, threads=threads, smem_bytes=tile_bytes((rows, columns), columns + 4))
    source = A[row0 : row0 + rows, col0 : col0 + columns]
    padding = [(0, have - there) for have, there in zip((rows, columns), source.shape, strict=True)]
    np.testing.assert_array_equal(O, np.pad(source, padding))


def test_copy_tile_async_up_to_an_end(run):
    # Rows that exist but lie past `end`, which is where the last key that counts ends.
    A, O = randn(8, 16), nans(8, 16)
    run(tile_copier(8, 16, 32, 4, 0, 0, 5), A, O, smem_bytes=tile_bytes((8, 16), 20))
    np.testing.assert_array_equal(O, np.vstack([A[:5], np.zeros((3, 16))]))


@pytest.mark.parametrize(("rows", "columns", "threads", "vector"), [(8, 18, 32, 4), (8, 24, 32, 1), (3, 16, 32, 1)])
def test_copy_tile_async_that_does_not_come_out_even(rows, columns, threads, vector):
    with pytest.raises(ValueError, match=f"{threads} threads do not share a tile of {rows} x {columns} evenly"):
        copy_tile_async(rows, columns, threads, vector)


def padded(A: np.ndarray, pad: int) -> np.ndarray:
    return np.pad(A, ((0, 0), (0, pad)), constant_values=np.nan)


def multiplier(make_verb, rows, columns, a_shape, b_shape, b_pad, map_columns):
    """A kernel that loads sA and sB from A and B, and a patch from O, and multiplies: O += sA sB or sA sB^T."""
    A_TILE = shared_tile(0, a_shape, a_shape[1] + 4)
    B_TILE = shared_tile(tile_bytes(a_shape, a_shape[1] + 4), b_shape, b_shape[1] + b_pad)

    @cuda.jit
    def kernel(A, B, O):
        lane = cuda.threadIdx.x
        smem = shared_memory()
        sA, sB = A_TILE(smem), B_TILE(smem)
        for i in range(lane, a_shape[0] * a_shape[1], 32):
            sA[i // a_shape[1], i % a_shape[1]] = A[i // a_shape[1], i % a_shape[1]]
        for i in range(lane, b_shape[0] * b_shape[1], 32):
            sB[i // b_shape[1], i % b_shape[1]] = B[i // b_shape[1], i % b_shape[1]]
        cuda.syncthreads()
        patch = cuda.local.array((rows, columns), float32)
        for i in range(rows):
            for c in range(columns):
                patch[i, c] = O[i, map_columns(lane, c)]
        make_verb(patch, sA, sB, lane)
        for i in range(rows):
            for c in range(columns):
                O[i, map_columns(lane, c)] = patch[i, c]

    smem_bytes = tile_bytes(a_shape, a_shape[1] + 4) + tile_bytes(b_shape, b_shape[1] + b_pad)
    return kernel, smem_bytes


@pytest.mark.parametrize(("columns", "depth"), [(1, 4), (2, 12)])
def test_mma_ABt(run, columns, depth):
    mma = mma_ABt(ROWS, columns)

    @verb
    def multiply(patch, sA, sB, lane):
        mma(patch, sA, ROW0, sB, lane)

    @verb
    def column(lane, j):
        return lane + 32 * j

    A, B, start = randn(ROW0 + ROWS, depth), randn(32 * columns, depth, seed=1), randn(ROWS, 32 * columns, seed=2)
    kernel, smem_bytes = multiplier(multiply, ROWS, columns, A.shape, B.shape, 4, column)
    O = start.copy()
    run(kernel, A, B, O, smem_bytes=smem_bytes)
    expected = start
    for d in range(depth):
        expected = fused(A[ROW0:, d, None], B[None, :, d], expected)
    np.testing.assert_array_equal(O, expected)
    np.testing.assert_allclose(O, start + A[ROW0:].astype(np.float64) @ B.T, rtol=1e-5, atol=1e-5)


O_SHAPES = [(1, 1), (2, 2), (4, 4), (4, 2), (8, 4)]  # columns and vector


def o_column(vector):
    @verb
    def column(lane, c):
        return vector * (lane + 32 * (c // vector)) + c % vector

    return column


@pytest.mark.parametrize(("columns", "vector"), O_SHAPES)
def test_mma_AB(run, columns, vector):
    mma, a_col0, keys = mma_AB(ROWS, columns, vector), 4, 8

    @verb
    def multiply(patch, sA, sB, lane):
        mma(patch, sA, ROW0, a_col0, sB, lane)

    A, B, start = randn(ROW0 + ROWS, 16), randn(keys, 32 * columns, seed=1), randn(ROWS, 32 * columns, seed=2)
    kernel, smem_bytes = multiplier(multiply, ROWS, columns, A.shape, B.shape, 0, o_column(vector))
    O = start.copy()
    run(kernel, A, B, O, smem_bytes=smem_bytes)
    expected = start
    for k in range(keys):
        expected = fused(A[ROW0:, a_col0 + k, None], B[k], expected)
    np.testing.assert_array_equal(O, expected)
    assert sorted(o_columns(columns, vector).ravel()) == list(range(32 * columns)), "columns that no lane has"


@pytest.mark.parametrize(("is_causal", "Lk"), [(True, 100), (True, 7), (False, 9), (False, 100)])
@pytest.mark.parametrize(("columns", "vector"), [(2, 2), (4, 4)])
def test_mma_AB_where(run, is_causal, Lk, columns, vector):
    attends = Mask(is_causal).attends
    a_col0, keys, row, col = 4, 8, 5, 4
    mma = mma_AB_where(ROWS, columns, vector, attends)

    @verb
    def multiply(patch, sA, sB, lane):
        mma(patch, sA, ROW0, a_col0, sB, lane, row, col, Lk)

    rows_of_S, cols_of_S = row + np.arange(ROWS), col + np.arange(keys)
    counts = (cols_of_S < Lk) & (~np.array(is_causal) | (cols_of_S <= rows_of_S[:, None]))
    A, B, start = randn(ROW0 + ROWS, 16), randn(keys, 32 * columns, seed=1), randn(ROWS, 32 * columns, seed=2)
    kernel, smem_bytes = multiplier(multiply, ROWS, columns, A.shape, B.shape, 0, o_column(vector))
    expected = start
    for k in range(keys):
        expected = np.where(counts[:, k, None], fused(A[ROW0:, a_col0 + k, None], B[k], expected), expected)

    O = start.copy()
    run(kernel, A, B, O, smem_bytes=smem_bytes)
    np.testing.assert_array_equal(O, expected)

    # What a row does not attend never reaches it, whatever it is; the rows that attend it get it.
    for poison in (np.nan, np.inf):
        for k in range(keys):
            poisoned = B.copy()
            poisoned[k] = poison
            O = start.copy()
            if run is not run_on_gpu and k not in (0, 3, 5, keys - 1):
                continue
            run(kernel, A, poisoned, O, smem_bytes=smem_bytes)
            np.testing.assert_array_equal(O[~counts[:, k]], expected[~counts[:, k]])
            assert not np.any(np.isfinite(O[counts[:, k]]))


def test_fmas_are_fused_and_vectors_are_loaded():
    mma = mma_AB(ROWS, 4, 4)

    @verb
    def multiply(patch, sA, sB, lane):
        mma(patch, sA, ROW0, 0, sB, lane)

    kernel, _ = multiplier(multiply, ROWS, 4, (ROW0 + ROWS, 4), (4, 128), 0, o_column(4))
    ptx = ptx_of(kernel, 2, 2, 2)
    assert ptx.count("fma.rn.f32") == ROWS * 4 * 4
    assert ptx.count("ld.shared.v4") == ROWS + 4
    assert ".local" not in ptx and "mul.f32" not in ptx and ".ftz" not in ptx


@pytest.mark.parametrize(
    ("is_causal", "row0", "col0", "Lk"), [(False, 0, 0, 40), (True, 30, 0, 200), (True, 0, 64, 70)]
)
def test_scale_and_mask(run, is_causal, row0, col0, Lk):
    attends = Mask(is_causal).attends
    scale = np.float32(-0.3)

    @cuda.jit
    def kernel(S):
        lane = cuda.threadIdx.x
        patch = cuda.local.array((3, 2), float32)
        for i in range(3):
            for j in range(2):
                patch[i, j] = S[i, lane + 32 * j]
        scale_and_mask(patch, scale, attends, row0, col0, Lk, lane)
        for i in range(3):
            for j in range(2):
                S[i, lane + 32 * j] = patch[i, j]

    S = randn(3, 64)
    S[0, 50] = np.nan  # a pair that does not count is -inf whatever its score was
    row, col = row0 + np.arange(3)[:, None], col0 + np.arange(64)
    counts = (col < Lk) & (col <= row) if is_causal else np.broadcast_to(col < Lk, S.shape)
    expected = np.where(counts, S * scale, np.float32(-np.inf))
    run(kernel, S)
    np.testing.assert_array_equal(S, expected)
    assert not np.all(counts)


def output_kernel(rows, columns, vector, travels, row0, dv0, load_it=True):
    """A kernel that loads rows of O scaled by ALPHA, adds one, and stores them scaled by BETA."""
    load, store = output_rows(rows, columns, vector, travels)

    @cuda.jit
    def kernel(O, ALPHA, BETA):
        lane = cuda.threadIdx.x
        patch = cuda.local.array((rows, columns), float32)
        alpha = ALPHA[lane] if lane < rows else float32(0)
        beta = BETA[lane] if lane < rows else float32(0)
        load(patch, O, row0, dv0, alpha, lane)
        for i in range(rows):
            for c in range(columns):
                patch[i, c] += float32(1)
        store(O, patch, row0, dv0, beta, lane)

    return kernel


@pytest.mark.parametrize(
    ("columns", "vector", "travels"), [(1, 1, 1), (2, 2, 2), (2, 2, 1), (4, 4, 4), (4, 4, 1), (8, 4, 4)]
)
@pytest.mark.parametrize("tail", ["none", "rows", "columns", "both", "outside"])
def test_output_rows(run, columns, vector, travels, tail):
    rows, row0, dv0 = 4, 2, 32
    Lq = row0 + {"rows": 3, "both": 1, "outside": 0}.get(tail, rows + 1)
    Dv = dv0 + {"columns": 24, "both": 4, "outside": 0}.get(tail, 32 * columns + 4)
    surrounding = np.full((Lq + 3, Dv + 12), 77, np.float32)
    O = surrounding[:Lq, 4 : 4 + Dv]
    O[...] = randn(Lq, Dv)
    before = surrounding.copy()
    alpha, beta = randn(rows, seed=1), randn(rows, seed=2)
    run(output_kernel(rows, columns, vector, travels, row0, dv0), O, alpha, beta)
    expected = before.copy()
    part = expected[row0 : min(row0 + rows, Lq), 4 + dv0 : 4 + min(dv0 + 32 * columns, Dv)]
    n = len(part)
    # alpha x + 1 may be one rounding or two.
    part[...] = beta[:n, None] * (alpha[:n, None] * part + 1)
    np.testing.assert_allclose(surrounding, expected, rtol=1e-5, atol=1e-6)
    untouched = np.ones_like(surrounding, bool)
    untouched[row0 : row0 + n, 4 + dv0 : 4 + dv0 + part.shape[1]] = False
    np.testing.assert_array_equal(surrounding[untouched], before[untouched])


@pytest.mark.parametrize("travels", [2, 4])
def test_output_rows_that_are_not_aligned(travels):
    surrounding = randn(4, 140)
    with pytest.raises(sim.SimulationError, match="misaligned vector access to tensor"):
        simulate(output_kernel(4, 4, 4, travels, 0, 0), surrounding[:, 1:129], randn(4), randn(4))


@pytest.mark.parametrize(("columns", "vector", "travels"), [(1, 1, 1), (4, 4, 4), (4, 4, 1), (4, 1, 1), (8, 4, 4)])
@pytest.mark.parametrize("end", [7, 5, 3])
def test_register_rows(run, columns, vector, travels, end):
    column, load = register_rows(vector, travels)

    @cuda.jit
    def kernel(A, O):
        lane = cuda.threadIdx.x
        patch = cuda.local.array((4, columns), float32)
        load(patch, A, 2, end, lane)
        for i in range(4):
            for c in range(columns):
                O[i, lane, c] = patch[i, c]
                O[4 + i, lane, c] = float32(column(c, lane))

    width = 32 * columns - 8
    A, O = randn(end, width), nans(8, 32, columns)
    run(kernel, A, O)
    expected = np.broadcast_to(o_columns(columns, vector), (4, 32, columns))
    np.testing.assert_array_equal(O[4:], expected)
    rows = np.minimum(2 + np.arange(4), end - 1)[:, None, None]
    inside = np.broadcast_to(expected < width, expected.shape)
    np.testing.assert_array_equal(O[:4][inside], A[rows, np.minimum(expected, width - 1)][inside])
    assert np.isin(O[:4], A).all()


def test_column_maps_are_a_partition():
    for columns, vector in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        if columns % vector == 0:
            assert len(set(o_columns(columns, vector).ravel())) == 32 * columns
    assert len(set(s_columns(3).ravel())) == 96
