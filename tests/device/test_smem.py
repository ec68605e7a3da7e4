"""Contract under test: a shared tile is a typed window on the block's shared memory; vectors and asynchronous copies
move what plain assignments would.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from numba import cuda, float32
from toys import nans, ptx_of, randn, simulate

from numba_attn import sim
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import (
    async_copy,
    shared_memory,
    shared_tile,
    tile_bytes,
    tile_strides,
    vector_load,
    vector_store,
)
from numba_attn.device.verb import verb

SHAPES = [((7,), None), ((3, 5), None), ((3, 5), 9), ((2, 3, 4), None), ((2, 3, 4), 8), ((2, 2, 2, 3), 4)]

wait_all = cp_async_wait(0)


@pytest.mark.parametrize(("shape", "row_stride"), SHAPES)
def test_strides_and_bytes(shape, row_stride):
    padded = np.zeros((*shape[:-1], row_stride or shape[-1]), np.float32)
    assert tile_strides(shape, row_stride) == tuple(stride // 4 for stride in padded.strides)
    assert tile_bytes(shape, row_stride) == padded.nbytes
    assert tile_bytes(shape, row_stride, itemsize=2) == padded.nbytes // 2


OFFSET = 64  # bytes in front of the tile
STAGES, ROWS, COLUMNS, ROW_STRIDE = 2, 3, 5, 7


def copying_through_a_tile(put, get):
    """A kernel that puts A into a padded tile, and gets O out of it through another view of the same memory."""
    TILE = shared_tile(OFFSET, (STAGES, ROWS, COLUMNS), ROW_STRIDE)
    FLAT = shared_tile(0, (OFFSET // 4 + STAGES * ROWS * ROW_STRIDE,))

    @cuda.jit
    def kernel(A, O):
        smem = shared_memory()
        tile, flat = TILE(smem), FLAT(smem)
        if cuda.threadIdx.x == 0:
            for s in range(STAGES):
                for r in range(ROWS):
                    for c in range(COLUMNS):
                        put(tile, flat, A, s, r, c)
        cuda.syncthreads()
        if cuda.threadIdx.x == 31:
            for s in range(STAGES):
                for r in range(ROWS):
                    for c in range(COLUMNS):
                        O[s, r, c] = get(tile, flat, s, r, c)

    return kernel


@verb
def at(s, r, c):
    return OFFSET // 4 + (s * ROWS + r) * ROW_STRIDE + c


@verb
def put_element(tile, flat, A, s, r, c):
    tile[s, r, c] = A[s, r, c]


@verb
def put_by_parts(tile, flat, A, s, r, c):
    if c % 2:
        tile[s][r, c] = A[s, r, c]
    else:
        tile[s, r][c] = A[s][r, c]


@verb
def put_flat(tile, flat, A, s, r, c):
    flat[at(s, r, c)] = A[s, r, c]


@verb
def get_element(tile, flat, s, r, c):
    return tile[s, r, c]


@verb
def get_by_parts(tile, flat, s, r, c):
    return tile[s][r][c]


@verb
def get_flat(tile, flat, s, r, c):
    return flat[at(s, r, c)]


@pytest.mark.parametrize(
    ("put", "get"),
    [(put_element, get_flat), (put_by_parts, get_flat), (put_flat, get_element), (put_flat, get_by_parts)],
    ids=["element written", "parts written", "element read", "parts read"],
)
def test_elements(run, put, get):
    A, O = randn(STAGES, ROWS, COLUMNS), nans(STAGES, ROWS, COLUMNS)
    smem_bytes = OFFSET + tile_bytes((STAGES, ROWS, COLUMNS), ROW_STRIDE)
    run(copying_through_a_tile(put, get), A, O, smem_bytes=smem_bytes)
    np.testing.assert_array_equal(O, A)


def test_shapes(run):
    TILE = shared_tile(0, (2, 3, 5), 7)

    @cuda.jit
    def kernel(O):
        tile = TILE(shared_memory())
        if cuda.threadIdx.x == 0:
            O[0], O[1], O[2] = float32(tile.shape[0]), float32(tile.shape[1]), float32(tile.shape[2])
            O[3], O[4], O[5] = float32(tile[1].shape[0]), float32(tile[1].shape[1]), float32(tile[1, 2].shape[0])

    O = nans(6)
    run(kernel, O, smem_bytes=tile_bytes((2, 3, 5), 7))
    np.testing.assert_array_equal(O, [2, 3, 5, 3, 5, 5])


def test_accesses_to_tiles_are_shared_ones():
    ptx = ptx_of(copying_through_a_tile(put_element, get_element), 3, 3)
    assert re.search(r"\bst\.shared\.", ptx) and re.search(r"\bld\.shared\.", ptx)
    assert not re.search(r"\b(ld|st)\.[bf]32", ptx), "an access that does not know its memory"
    assert ".local" not in ptx


WIDTHS = (1, 2, 4)
TWO, HALF = np.float32(2), np.float32(0.5)


def moving(n: int, row_stride: int = 12, shift: int = 0):
    """A kernel that moves A [4, 8] to O by accesses of `n` elements, through the columns from `shift` on of a tile."""
    load, store = vector_load(n), vector_store(n)
    TILE = shared_tile(0, (4, 12), row_stride)

    @cuda.jit
    def kernel(A, O):
        patch = cuda.local.array((2, 4), float32)
        tile = TILE(shared_memory())
        row, col = cuda.threadIdx.x // 8, cuda.threadIdx.x % 8
        moves = col % n == 0
        if moves:
            load(patch, (1, 0), A, (row, col))
            store(tile, (row, col + shift), TWO, patch, (1, 0))
        cuda.syncwarp()
        if moves:
            load(patch, (0, 4 - n), tile, (row, col + shift))
            store(O, (row, col), HALF, patch, (0, 4 - n))

    return kernel


MOVING_BYTES = 4 * 4 * 16


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("shift", [0, 4])
def test_vectors(run, n, shift):
    A, O = randn(4, 8), nans(4, 8)
    run(moving(n, shift=shift), A, O, smem_bytes=MOVING_BYTES)
    np.testing.assert_array_equal(O, A)


@pytest.mark.parametrize("n", WIDTHS)
def test_vectors_of_parts_of_arrays(run, n):
    A, O = randn(6, 20), nans(4, 24)
    run(moving(n), A[1:5, 4:12], O[:, 8:16], smem_bytes=MOVING_BYTES)
    np.testing.assert_array_equal(O[:, 8:16], A[1:5, 4:12])
    assert np.all(np.isnan(O[:, :8])) and np.all(np.isnan(O[:, 16:]))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize(
    ("row_stride", "shift", "columns", "words"),
    [
        (12, 1, slice(0, 8), "misaligned vector access to"),
        (13, 0, slice(0, 8), "misaligned vector access to"),
        (12, 0, slice(1, 9), "misaligned vector access to tensor"),
        (12, 0, slice(0, 16, 2), "last stride is 2"),
    ],
    ids=["column", "row stride", "start of the tensor", "last stride"],
)
def test_misaligned_vectors(n, row_stride, shift, columns, words):
    A, O = randn(4, 16), nans(4, 8)
    arguments = (moving(n, row_stride, shift), A[:, columns], O)
    if n == 1:
        simulate(*arguments, smem_bytes=MOVING_BYTES)
        np.testing.assert_array_equal(O, A[:, columns])
    else:
        with pytest.raises(sim.SimulationError, match=words):
            simulate(*arguments, smem_bytes=MOVING_BYTES)


@pytest.mark.parametrize(("n", "suffix"), [(1, ""), (2, r"\.v2"), (4, r"\.v4")])
def test_vector_instructions(n, suffix):
    ptx = ptx_of(moving(n), 2, 2)
    for access in (r"ld\.global", r"st\.shared", r"ld\.shared", r"st\.global"):
        found = re.findall(rf"\b{access}\.\S+", ptx)
        assert found
        assert all(re.fullmatch(rf"{access}{suffix}\.[bf]32", name) for name in found), found
    assert ".local" not in ptx


COPIED = (6, 16)  # rows and columns of the tile


def copying(n: int, start: int, end: int, inside_columns: int, row_step: int = 2):
    """A kernel whose 32 threads copy rows `start` .. of A to a tile and the tile to O.

    Each thread copies three rows `row_step` apart; columns from `inside_columns` on are not inside.
    """
    rows, columns = COPIED
    across = columns // n
    copy = async_copy(n, range(0, rows, row_step), range(1))
    TILE = shared_tile(0, COPIED, columns + 4)

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        tile = TILE(shared_memory())
        for i in range(t, across * row_step, 32):
            r, c = i // across, i % across * n
            copy(tile, (r, c), A, (start + r, c), end - (start + r), inside_columns - c)
        cp_async_commit()
        wait_all()
        cuda.syncthreads()
        for i in range(t, rows * columns, 32):
            O[i // columns, i % columns] = tile[i // columns, i % columns]

    return kernel


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize(
    ("start", "end", "inside_columns", "row_step"),
    [(0, 6, 16, 2), (1, 6, 16, 2), (3, 6, 8, 3), (4, 5, 4, 1), (9, 6, 16, 2), (0, 6, 0, 2)],
    ids=["all", "last row past the end", "half the columns", "one row", "behind the end", "no column"],
)
def test_asynchronous_copies(run, n, start, end, inside_columns, row_step):
    # Of A there is no more than what counts; around it NaN, which a read too many would bring in.
    surrounding = nans(end + 4, 24)
    A = surrounding[:end, 4 : 4 + max(inside_columns, 1)]
    A[...] = randn(*A.shape)
    O = nans(*COPIED)
    run(copying(n, start, end, inside_columns, row_step), A, O, smem_bytes=tile_bytes(COPIED, 20))
    rows = A[start:, :inside_columns]
    np.testing.assert_array_equal(O, np.pad(rows, ((0, 6 - len(rows)), (0, 16 - rows.shape[1]))))


@pytest.mark.parametrize("n", [2, 4])
def test_misaligned_asynchronous_copies(n):
    A = randn(6, 21)[:, 1:17]
    with pytest.raises(sim.SimulationError, match="misaligned vector access to tensor"):
        simulate(copying(n, 0, 6, 16), A, nans(*COPIED), smem_bytes=tile_bytes(COPIED, 20))


def test_asynchronous_copies_across_strided_columns(run):
    """Element by element, several per thread along the row: steps in the tensor are of its own column stride."""
    copy = async_copy(1, range(0, 4, 2), range(0, 12, 4))
    TILE = shared_tile(0, (4, 12), 12)

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        tile = TILE(shared_memory())
        if t < 8:
            copy(tile, (t // 4, t % 4), A, (t // 4, t % 4), 4 - t // 4, 10 - t % 4)
        cp_async_commit()
        wait_all()
        cuda.syncthreads()
        for i in range(t, 48, 32):
            O[i // 12, i % 12] = tile[i // 12, i % 12]

    A, O = randn(4, 20)[:, ::2], nans(4, 12)
    run(kernel, A, O, smem_bytes=tile_bytes((4, 12)))
    np.testing.assert_array_equal(O, np.pad(A, ((0, 0), (0, 2))))
