"""Contract under test: each fault of a kernel is an error that names the kernel's line and the threads, and the same
kernel without the fault runs."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8

from numba_attn import sim
from numba_attn.device.verb import twin_of, verb

FULL = 0xFFFFFFFF


def _launch(kernel, block_threads=32, grid=1, size=64, smem_bytes=0, dtype=np.float32):
    A = np.arange(size, dtype=dtype)
    O = np.zeros(size, dtype)
    sim.launch(kernel, grid, block_threads, (A, O), smem_bytes)
    return O


def _fault(kernel, words: str, threads=None, marker="FAULT", **options) -> sim.SimulationError:
    """The error of a kernel whose faulty line carries `# FAULT`."""
    with pytest.raises(sim.SimulationError) as caught:
        _launch(kernel, **options)
    error = caught.value
    lines, first = inspect.getsourcelines(getattr(kernel, "py_func", kernel))
    marked = [first + i for i, line in enumerate(lines) if marker in line]
    assert words in str(error)
    assert "\n" not in str(error)
    assert error.line in marked, str(error)
    assert error.file == __file__
    assert f":{error.line}" in str(error)
    assert re.search(r"block 0\b", str(error))
    if threads is not None:
        assert set(error.threads) == set(threads), str(error)
    return error


# Unwritten memory


def test_unwritten_shared():
    def kernel(A, O):
        s = cuda.shared.array(32, float32)
        if cuda.threadIdx.x != 3:
            s[cuda.threadIdx.x] = A[0]
        O[cuda.threadIdx.x] = s[cuda.threadIdx.x]  # FAULT

    error = _fault(kernel, "read of shared array s[3]", threads=[3])
    assert "kernel `kernel`" in str(error)
    assert "thread 3 (warp 0, lane 3)" in str(error)


def test_unwritten_dynamic_shared_of_the_next_block():
    def kernel(A, O):
        s = cuda.shared.array(0, float32)
        if cuda.blockIdx.x == 0:
            s[cuda.threadIdx.x] = A[0]
        O[cuda.threadIdx.x] = s[cuda.threadIdx.x]

    _launch(kernel, smem_bytes=128)
    with pytest.raises(sim.SimulationError, match=r"nobody has written.*block 1"):
        _launch(kernel, grid=2, smem_bytes=128)


@pytest.mark.parametrize("shape", [4, (2, 2), (2, 1, 2)])
def test_unwritten_local(shape):
    last = (1, 0, 1) if shape == (2, 1, 2) else (1, 1) if shape == (2, 2) else 3

    def kernel(A, O):
        r = cuda.local.array(shape, float32)
        O[0] = r[last]  # FAULT

    def clean(A, O):
        r = cuda.local.array(shape, float32)
        r[last] = A[0]
        O[0] = r[last]

    _fault(kernel, "read of local array r[", threads=[0])
    _launch(clean)


def test_unwritten_local_through_a_part():
    def kernel(A, O):
        r = cuda.local.array((2, 2), float32)
        r[0][1] = A[0]
        O[0] = r[0][1]
        O[0] = r[1][1]  # FAULT

    _fault(kernel, "read of local array", threads=[0])


# Indices


@pytest.mark.parametrize("index", [-1, 4])
def test_local_index(index):
    def read(A, O):
        r = cuda.local.array(4, float32)
        r[0] = A[0]
        O[0] = r[index]  # FAULT

    def write(A, O):
        r = cuda.local.array(4, float32)
        r[index] = A[0]  # FAULT

    _fault(read, "out of range: local array r[", threads=[0])
    _fault(write, "out of range: local array r[", threads=[0])


@pytest.mark.parametrize("index", [(-1, 0), (0, 4), (2, 0), (0, -1)])
def test_index_of_two_dimensions(index):
    def local(A, O):
        r = cuda.local.array((2, 4), float32)
        r[index] = A[0]  # FAULT

    def shared(A, O):
        s = cuda.shared.array((2, 4), float32)
        s[index] = A[0]  # FAULT

    def shared_read(A, O):
        s = cuda.shared.array((2, 4), float32)
        O[0] = s[index]  # FAULT

    for kernel in (local, shared, shared_read):
        _fault(kernel, "out of range", threads=[0])


@pytest.mark.parametrize("index", [-1, 64])
def test_tensor_index(index):
    def read(A, O):
        O[0] = A[index]  # FAULT

    def write(A, O):
        O[index] = A[0]  # FAULT

    assert "tensor A[" in str(_fault(read, "out of range", threads=[0]))
    assert "tensor O[" in str(_fault(write, "out of range", threads=[0]))


def test_row_of_a_tensor():
    def kernel(A, O):
        row = A[1]
        O[0] = row[3]
        O[0] = row[4]  # FAULT

    A, O = np.zeros((2, 4), np.float32), np.zeros(1, np.float32)
    with pytest.raises(sim.SimulationError, match=r"tensor row\[4\]"):
        sim.launch(kernel, 1, 1, (A, O))


def test_number_of_subscripts():
    def tensor(A, O):
        O[0] = A[0, 0]  # FAULT

    def shared(A, O):
        s = cuda.shared.array((2, 4), float32)
        s[0] = A[0]  # FAULT

    def shared_read(A, O):
        s = cuda.shared.array((2, 4), float32)
        O[0] = s[0, 0, 0]  # FAULT

    def local(A, O):
        s = cuda.local.array((2, 4), float32)
        s[0] = A[0]  # FAULT

    for kernel in (tensor, shared, shared_read, local):
        _fault(kernel, "subscripts", threads=[0])


def test_tile_beyond_dynamic_memory():
    def kernel(A, O):
        s = _tile_at(64)  # FAULT
        s[0] = A[0]

    error = _fault(kernel, "ends at byte 80 of 72", threads=[0], smem_bytes=72)
    assert "`s = _tile_at(64)" in str(error)
    _launch(kernel, smem_bytes=80, block_threads=1)


# Barriers and collectives


def test_barrier_skipped_by_some():
    def kernel(A, O):
        if cuda.threadIdx.x < 40:
            cuda.syncthreads()  # FAULT
        O[0] = A[0]

    error = _fault(kernel, "barrier not reached by all threads", threads=range(40), block_threads=64)
    assert "threads 40-63 returned" in str(error)


def test_barriers_at_two_lines():
    def kernel(A, O):
        if cuda.threadIdx.x == 5:
            cuda.syncthreads()  # FAULT
        else:
            cuda.syncthreads()

    _fault(kernel, "barrier not reached by all threads", threads=[5])


def test_shuffle_skipped_by_some():
    def kernel(A, O):
        x = A[0]
        if cuda.laneid != 7:
            x = cuda.shfl_sync(FULL, x, 0)  # FAULT
        cuda.syncthreads()

    error = _fault(kernel, "shfl_sync with mask 0xffffffff not reached by all its lanes in warp 0")
    assert "thread 7 (warp 0, lane 7) at syncthreads" in str(error)


def test_shuffles_at_two_lines():
    def kernel(A, O):
        if cuda.laneid < 16:
            x = cuda.shfl_xor_sync(FULL, A[0], 1)  # FAULT
        else:
            x = cuda.shfl_xor_sync(FULL, A[0], 1)  # FAULT
        O[cuda.laneid] = x

    _fault(kernel, "not reached by all its lanes")


def test_one_verb_called_from_two_lines():
    @verb
    def swap(x):
        return cuda.shfl_xor_sync(FULL, x, 1)  # FAULT

    def kernel(A, O):
        if cuda.laneid < 16:
            O[cuda.laneid] = swap(A[0])
        else:
            O[cuda.laneid] = swap(A[0])

    with pytest.raises(sim.SimulationError, match="not reached by all its lanes"):
        _launch(kernel)


def test_different_collectives():
    def kernel(A, O):
        if cuda.laneid < 16:
            cuda.any_sync(FULL, True)  # FAULT
        else:
            cuda.syncwarp()  # FAULT

    _fault(kernel, "not reached by all its lanes")


def test_full_mask_in_a_short_warp():
    def kernel(A, O):
        O[cuda.threadIdx.x] = cuda.shfl_sync(FULL, A[0], 0)  # FAULT

    _fault(kernel, "in warp 1, which has 8 lanes", block_threads=40)


def test_lane_outside_its_mask():
    def kernel(A, O):
        cuda.syncwarp(0xFFFF)  # FAULT

    _fault(kernel, "not in its mask")


def test_shuffle_from_a_lane_outside_the_mask():
    def kernel(A, O):
        if cuda.laneid < 16:
            O[cuda.laneid] = cuda.shfl_sync(0xFFFF, A[0], 16)  # FAULT

    _fault(kernel, "reads lane 16, which does not take part", threads=[0])


def test_halves_of_a_warp_and_a_while_test_are_fine():
    def kernel(A, O):
        lane = cuda.laneid
        if lane < 16:
            O[lane] = cuda.shfl_xor_sync(0xFFFF, A[lane], 1)
        else:
            O[lane] = cuda.shfl_xor_sync(0xFFFF0000, A[lane], 2)
        n = 0
        while cuda.any_sync(FULL, n < lane):
            n += 1
        O[32 + lane] = n

    O = _launch(kernel)
    lanes = np.arange(32)
    np.testing.assert_array_equal(O[:32], np.where(lanes < 16, lanes ^ 1, lanes ^ 2))
    np.testing.assert_array_equal(O[32:], 31)


# Races


def _exchange(barrier: str):
    """Neighbours of one warp, or of two, swap values through shared memory."""

    def none(A, O):
        s = cuda.shared.array(64, float32)
        tid = cuda.threadIdx.x
        s[tid] = A[tid]
        O[tid] = s[tid ^ A.shape[0] // 64]  # FAULT

    def shuffle(A, O):
        s = cuda.shared.array(64, float32)
        tid = cuda.threadIdx.x
        s[tid] = A[tid]
        cuda.shfl_sync(FULL, A[0], 0)
        O[tid] = s[tid ^ A.shape[0] // 64]  # FAULT

    def warp(A, O):
        s = cuda.shared.array(64, float32)
        tid = cuda.threadIdx.x
        s[tid] = A[tid]
        cuda.syncwarp()
        O[tid] = s[tid ^ A.shape[0] // 64]  # FAULT

    def block(A, O):
        s = cuda.shared.array(64, float32)
        tid = cuda.threadIdx.x
        s[tid] = A[tid]
        cuda.syncthreads()
        O[tid] = s[tid ^ A.shape[0] // 64]  # FAULT

    return {"none": none, "shuffle": shuffle, "warp": warp, "block": block}[barrier]


@pytest.mark.parametrize("barrier", ["shuffle", "warp", "block"])
@pytest.mark.parametrize("distance", [1, 32])
def test_read_after_write(barrier, distance):
    kernel = _exchange(barrier)
    size = 64 * distance
    if barrier == "block" or (barrier == "warp" and distance == 1):
        tid = np.arange(64)
        np.testing.assert_array_equal(_launch(kernel, block_threads=64, size=size)[:64], tid ^ distance)
    elif barrier == "warp":
        # Warp 1 has written nothing yet, or has and raced.
        with pytest.raises(sim.SimulationError, match="race|nobody has written"):
            _launch(kernel, block_threads=64, size=size)
    elif distance == 1:
        _fault(kernel, "race: read of shared array s", threads=[0, 1], block_threads=64, size=size)


def test_write_after_read():
    def kernel(A, O):
        s = cuda.shared.array(1, float32)
        if cuda.threadIdx.x == 0:
            s[0] = A[1]
        cuda.syncthreads()
        O[cuda.threadIdx.x] = s[0]
        if cuda.threadIdx.x == 31:
            s[0] = A[2]  # FAULT

    def clean(A, O):
        s = cuda.shared.array(1, float32)
        if cuda.threadIdx.x == 0:
            s[0] = A[1]
        cuda.syncthreads()
        O[cuda.threadIdx.x] = s[0]
        cuda.syncwarp()
        if cuda.threadIdx.x == 31:
            s[0] = A[2]

    _fault(kernel, "race: write of shared array s[0]", threads=[0, 31])
    _launch(clean)


def test_two_writers():
    def kernel(A, O):
        s = cuda.shared.array(1, float32)
        s[0] = A[0]  # FAULT

    _fault(kernel, "race: write of shared array s[0]", threads=[0, 1])


def test_partial_warp_barrier_orders_its_lanes_only():
    def kernel(A, O):
        s = cuda.shared.array(32, float32)
        lane = cuda.laneid
        s[lane] = A[lane]
        if lane < 16:
            cuda.syncwarp(0xFFFF)
            O[lane] = s[lane ^ 1]
        else:
            cuda.syncwarp(0xFFFF0000)
            O[lane] = s[lane ^ 16]  # FAULT

    _fault(kernel, "race: read of shared array s[0]", threads=[0, 16])


def test_warp_barriers_are_transitive():
    def kernel(A, O):
        s = cuda.shared.array(1, float32)
        lane = cuda.laneid
        if lane == 0:
            s[0] = A[5]
        if lane < 2:
            cuda.syncwarp(0b011)
        if lane == 1 or lane == 2:
            cuda.syncwarp(0b110)
        if lane == 2:
            O[0] = s[0]

    assert _launch(kernel)[0] == 5


@pytest.mark.parametrize("dtype", [float32, int32, uint8, np.float16, np.float64])
def test_aliasing_tiles(dtype):
    def kernel(A, O):
        s = _tile_at(0)
        t = _tile_at(0, dtype, (2, 1))
        if cuda.threadIdx.x == 0:
            s[0] = A[1]
            s[1] = A[1]
        if cuda.threadIdx.x == 1:
            t[0, 0] = 0  # FAULT

    def clean(A, O):
        s = _tile_at(0)
        t = _tile_at(16, dtype, (2, 1))
        if cuda.threadIdx.x == 0:
            s[0] = A[1]
        if cuda.threadIdx.x == 1:
            t[0, 0] = 0

    error = _fault(kernel, "race: write of shared array t[0, 0]", threads=[0, 1], smem_bytes=64)
    assert error.threads == (1, 0)
    _launch(clean, smem_bytes=64)


def test_bytes_of_one_word_do_not_race():
    def kernel(A, O):
        s = _tile_at(0, uint8, (64,))
        s[cuda.threadIdx.x] = cuda.threadIdx.x
        cuda.syncwarp()
        O[cuda.threadIdx.x] = s[cuda.threadIdx.x ^ 1]

    np.testing.assert_array_equal(_launch(kernel, smem_bytes=64)[:32], np.arange(32) ^ 1)


def test_atomics_race_with_plain_accesses_only():
    def kernel(A, O):
        s = cuda.shared.array(1, float32)
        if cuda.threadIdx.x == 0:
            s[0] = A[0]
        cuda.syncthreads()
        cuda.atomic.add(s, 0, A[1])
        if cuda.threadIdx.x == 1:
            O[cuda.threadIdx.x] = s[0]  # FAULT

    def clean(A, O):
        s = cuda.shared.array(1, float32)
        if cuda.threadIdx.x == 0:
            s[0] = A[0]
        cuda.syncthreads()
        cuda.atomic.add(s, 0, A[1])
        cuda.atomic.max(s, 0, A[1])
        cuda.syncthreads()
        O[cuda.threadIdx.x] = s[0]

    def first(A, O):
        s = cuda.shared.array(1, float32)
        if cuda.threadIdx.x == 0:
            s[0] = A[0]
        cuda.atomic.add(s, 0, A[1])  # FAULT

    _fault(kernel, "race: read of shared array s[0]", threads=[1, 0], block_threads=2)
    _fault(first, "race: atomic update of shared array s[0]", threads=[1, 0])
    assert _launch(clean)[0] == 32


def test_static_array_of_two_shapes():
    def kernel(A, O):
        s = cuda.shared.array(A.shape[0] + cuda.threadIdx.x, float32)  # FAULT
        s[0] = A[0]

    _fault(kernel, "one shared array declared as", threads=[0, 1])


def test_two_values_for_one_global_element():
    def kernel(A, O):
        O[0] = A[cuda.threadIdx.x]  # FAULT

    def same(A, O):
        O[0] = A[0]

    def ordered(A, O):
        if cuda.threadIdx.x == 0:
            O[0] = A[1]
        cuda.syncthreads()
        if cuda.threadIdx.x == 1:
            O[0] = A[2]

    def blocks(A, O):
        if cuda.threadIdx.x == 0:
            O[0] = A[cuda.blockIdx.x]

    def added(A, O):
        cuda.atomic.add(O, 0, A[1])

    _fault(kernel, "two values written to tensor O[0]", threads=[0, 1])
    _launch(same, grid=2)
    assert _launch(ordered)[0] == 2
    with pytest.raises(sim.SimulationError, match=r"of block 0.*block 1"):
        _launch(blocks, grid=2)
    assert _launch(added, grid=2)[0] == 64


def test_global_read_of_what_another_thread_wrote():
    def kernel(A, O):
        O[cuda.threadIdx.x] = A[cuda.threadIdx.x]
        O[32 + cuda.threadIdx.x] = O[cuda.threadIdx.x ^ A.shape[0] // 64]  # FAULT

    def clean(A, O):
        O[cuda.threadIdx.x] = A[cuda.threadIdx.x]
        cuda.syncwarp()
        O[32 + cuda.threadIdx.x] = O[cuda.threadIdx.x ^ 1]

    _fault(kernel, "race: read of tensor O[0]", threads=[0, 1])
    np.testing.assert_array_equal(_launch(clean)[32:], np.arange(32) ^ 1)


# Vectors and asynchronous copies: intrinsics stand in for the device library's.


def _intrinsic(twin):
    class Stub:
        pass

    stub = Stub()
    twin_of(stub)(twin)
    return stub


_tile_at = _intrinsic(
    lambda thread, offset, dtype=float32, shape=(4,): thread.shared_tile(
        offset, shape, (shape[-1], 1)[-len(shape) :], dtype
    )
)
_load2 = _intrinsic(lambda thread, array, index: thread.load(array, index, 2))
_store2 = _intrinsic(lambda thread, array, index, values: thread.store(array, index, values))
_copy2 = _intrinsic(lambda thread, tile, i, tensor, j, valid: thread.copy_async(tile, i, tensor, j, 2, valid))
_commit = _intrinsic(lambda thread: thread.commit_async())
_wait = _intrinsic(lambda thread, pending: thread.wait_async(pending))


def test_misaligned_vectors():
    def tensor(A, O):
        O[0], O[1] = _load2(A, 1)  # FAULT

    def shared(A, O):
        s = _tile_at(0, float32, (4,))
        _store2(s, 1, (A[0], A[1]))  # FAULT

    def static(A, O):
        s = cuda.shared.array(4, float32)
        _store2(s, 0, (A[0], A[1]))  # FAULT

    def clean(A, O):
        s = _tile_at(0, float32, (4,))
        t = cuda.shared.array(4, float32, alignment=8)
        _store2(s, 2, _load2(A, 2))
        _store2(t, 2, _load2(s, 2))
        O[0], O[1] = _load2(t, 2)

    _fault(tensor, "misaligned vector access to tensor A", threads=[0])
    _fault(shared, "misaligned vector access to shared array s", threads=[0], smem_bytes=16)
    _fault(static, "declared with alignment 4", threads=[0])
    np.testing.assert_array_equal(_launch(clean, block_threads=1, smem_bytes=16)[:2], [2, 3])


def test_vector_past_the_end_or_strided():
    def past(A, O):
        O[0], O[1] = _load2(A, A.shape[0] - 1)  # FAULT

    def strided(A, O):
        O[0], O[1] = _load2(A, 0)  # FAULT

    with pytest.raises(sim.SimulationError, match="out of range"):
        sim.launch(past, 1, 1, (np.zeros(3, np.float32), np.zeros(2, np.float32)))
    with pytest.raises(sim.SimulationError, match="whose last stride is 2"):
        sim.launch(strided, 1, 1, (np.zeros(8, np.float32)[::2], np.zeros(2, np.float32)))


def test_copy_read_before_the_wait():
    def kernel(A, O):
        s = _tile_at(0)
        if cuda.threadIdx.x == 0:
            _copy2(s, 0, A, 2, 2)
            _commit()
            O[0] = s[0]  # FAULT

    def overwritten(A, O):
        s = _tile_at(0)
        if cuda.threadIdx.x == 0:
            _copy2(s, 0, A, 2, 2)
            s[1] = A[0]  # FAULT

    _fault(kernel, "in flight", threads=[0], smem_bytes=16)
    _fault(overwritten, "in flight", threads=[0], smem_bytes=16)


def test_copy_read_without_a_barrier():
    def kernel(A, O):
        s = _tile_at(0)
        if cuda.threadIdx.x == 0:
            _copy2(s, 0, A, 2, 1)
            _commit()
            _wait(0)
        O[cuda.threadIdx.x] = s[0]  # FAULT

    def clean(A, O):
        s = _tile_at(0)
        if cuda.threadIdx.x == 0:
            _copy2(s, 0, A, 2, 1)
            _commit()
            _copy2(s, 2, A, 999, 0)
            _commit()
            _wait(1)
            O[32] = s[0] + s[1]
            _wait(0)
        cuda.syncthreads()
        O[cuda.threadIdx.x] = s[0] + s[3]

    _fault(kernel, "race: read", threads=[0, 1], smem_bytes=16)
    O = _launch(clean, smem_bytes=16)
    np.testing.assert_array_equal(O[:33], 2)


def test_copy_over_what_another_thread_reads():
    def kernel(A, O):
        s = _tile_at(0)
        if cuda.threadIdx.x == 1:
            s[0] = A[0]
        cuda.syncthreads()
        O[cuda.threadIdx.x] = s[0]
        if cuda.threadIdx.x == 1:
            _copy2(s, 0, A, 2, 2)  # FAULT
            _commit()
            _wait(0)

    error = _fault(kernel, "race: asynchronous copy", threads=[0, 1], smem_bytes=16)
    assert error.threads[0] == 1


def test_thread_ends_with_a_copy_in_flight():
    def kernel(A, O):
        s = _tile_at(0)
        if cuda.threadIdx.x == 3:
            _copy2(s, 0, A, 2, 2)  # FAULT
            _commit()
            _wait(1)

    _fault(kernel, "the thread ended with 2 copied words in flight", threads=[3], smem_bytes=16)


# Everything else that stops a kernel


def test_ordinary_exceptions_name_the_line():
    def kernel(A, O):
        if A[0] > 1:
            x = A[0]
        O[0] = x  # FAULT

    assert "UnboundLocalError" in str(_fault(kernel, "'x'", threads=[0]))


def test_a_name_without_a_twin():
    without_twin = type("_Intrinsic", (), {"__call__": None, "_name": "mma_unknown"})()

    def intrinsic(A, O):
        without_twin(A)  # FAULT

    def name(A, O):
        cuda.cg.this_grid()  # FAULT

    _fault(intrinsic, "mma_unknown has no twin", threads=[0])
    _fault(name, "cuda.cg has no twin", threads=[0])


def test_a_verb_is_named_with_its_caller():
    @verb
    def put(T, i):
        T[i + 64] = 1.0  # FAULT

    def kernel(A, O):
        put(O, 0)

    with pytest.raises(sim.SimulationError) as caught:
        _launch(kernel)
    assert "verb `put`" in str(caught.value)
    assert "called from kernel" in str(caught.value)
    assert caught.value.line == inspect.getsourcelines(put.py_func)[1] + 2
