"""Contract under test: blocks of a cluster run together and reach each other's memory and barriers; what they do to
each other out of order is an error that names the line, the blocks and the threads; the same kernel without it runs."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from numba import cuda, float32, int32

from numba_attn import sim
from numba_attn.device.ptx_cluster import (
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    mbarrier_wait_cluster,
)
from numba_attn.device.ptx_sm90 import (
    fence_mbarrier_init,
    fence_proxy_async,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_sync,
)
from numba_attn.device.smem import shared_memory
from numba_attn.device.unrolled import unrolled
from numba_attn.device.wgmma_fragments import Matrix

TILE, ROUNDS = 32 * 16, 3
MAKERS, READERS = 32, 32  # threads of a block: a warp that makes tiles and sends them, a warp that reads them


@unrolled
def load(e, x, address):
    for i, value in enumerate(e.load_shared(address, 4)):
        x[i] = value


@unrolled
def store(e, address, x):
    e.store_shared(address, [x[i] for i in range(4)])


@unrolled
def send(e, target, source, barrier, rank):
    e.copy_bulk_to(target, source, TILE, barrier, rank)


@unrolled
def send_little(e, target, source, barrier, rank):
    e.copy_bulk_to(target, source, 16, barrier, rank)


@unrolled
def arrive_at(e, barrier, rank, condition):
    e.mbarrier_arrive_at(barrier, rank, condition)


@unrolled
def tell_at(e, barrier, rank, condition):
    e.mbarrier_arrive_at(barrier, rank, condition, releases=False)


def exchange(blocks: int, fault: str = ""):
    """Each round every block makes a tile, sends it to all, and reads those of all: O[block, round, tile, lane, 4]."""
    SLOTS, FULL, FREE = TILE, TILE + blocks * TILE, TILE + blocks * TILE + 8
    COUNT = blocks + 1 if fault == "one arrival more" else blocks
    # Lanes run in order: the last one finds what the others would do without waiting.
    SENDER = MAKERS - 1 if fault in ("no barrier", "late fence") else 0
    N_BYTES = blocks * TILE + {"bytes missing": 16, "bytes too many": -16}.get(fault, 0)

    @cuda.jit
    def kernel(A, O):
        tid, rank = cuda.threadIdx.x, cluster_rank()
        smem = shared_memory()
        full, free = smem + FULL, smem + FREE
        if rank == 1 and (fault == "returns" or (fault == "missing" and tid >= MAKERS)):
            return
        if tid == 0 and fault != "no barriers":
            mbarrier_init(full, 1)
            mbarrier_init(free, COUNT)
            if fault != "no init fence":
                fence_mbarrier_init()
        if fault not in ("no cluster barrier", "returns", "no barriers"):
            cluster_arrive()
            if fault == "arrives twice":
                cluster_arrive()  # FAULT: arrives twice
            if fault == "some lanes" and tid < 16:
                cluster_arrive()  # FAULT: some lanes
            cluster_wait()  # FAULT: missing
        if fault in ("no cluster barrier", "returns", "no barriers"):
            cuda.syncthreads()
        x = cuda.local.array(4, float32)
        if tid < MAKERS:
            for turn in range(ROUNDS):
                if fault == "own bytes" and turn > 0:
                    mbarrier_wait(full, (turn & 1) ^ 1)
                elif fault != "overwrites the source":
                    if fault == "releases":
                        mbarrier_wait_cluster(free, (turn & 1) ^ 1)
                    else:
                        mbarrier_wait(free, (turn & 1) ^ 1)  # FAULT: waits
                for i in range(4):
                    x[i] = A[cuda.blockIdx.x, turn, tid, i]
                store(smem + tid * 16, x)  # FAULT: overwrites the source
                if fault not in ("no fence", "late fence"):
                    fence_proxy_async()
                if fault != "no barrier":
                    cuda.syncwarp()
                if fault == "late fence":
                    fence_proxy_async()
                if tid == SENDER:
                    for other in range(blocks):
                        to = other + 7 if fault == "rank" else other
                        target = smem + SLOTS + rank * TILE + (16 * blocks if fault == "over a barrier" else 0)
                        source = smem + (TILE * (blocks + 1) + 16 if fault == "source" else 0)
                        send(target, source, full, to)  # FAULT: sends
                if fault == "overwrites soon" and turn == 0:
                    store(smem + tid * 16, x)  # FAULT: overwrites soon
        else:
            lane = tid - MAKERS
            for turn in range(ROUNDS):
                if lane == 0:
                    mbarrier_arrive_expect(full, N_BYTES)
                if fault == "arrives early" and lane < blocks:
                    tell_at(free, lane, True)
                if fault != "reads early" and (fault != "reads for one" or lane == 0):
                    mbarrier_wait(full, turn & 1)  # FAULT: waits
                if fault == "reads for one":
                    cuda.shfl_sync(0xFFFFFFFF, lane, 0)
                for tile in range(blocks):
                    load(x, smem + SLOTS + tile * TILE + lane * 16)  # FAULT: reads
                    for i in range(4):
                        O[cuda.blockIdx.x, turn, tile, lane, i] = x[i]
                if fault != "one lane arrives":
                    cuda.syncwarp()
                if fault == "releases":
                    arrive_at(free, lane, lane < blocks)
                elif fault != "arrives early":
                    tell_at(free, lane, lane < blocks)  # FAULT: arrives
        if fault not in ("ends early", "returns"):
            cluster_arrive()
            cluster_wait()

    return kernel


def launch(kernel, blocks: int, grid: int | None = None):
    grid = 2 * blocks if grid is None else grid
    A = np.random.default_rng(0).standard_normal((grid, ROUNDS, 32, 4), dtype=np.float32)
    O = np.zeros((grid, ROUNDS, blocks, 32, 4), np.float32)
    sim.launch(kernel, grid, MAKERS + READERS, (A, O), TILE * (blocks + 2) + 16, cluster=blocks)
    return A, O


def fault_of(kernel, words: str, marker: str, run, *numbers) -> sim.SimulationError:
    with pytest.raises(sim.SimulationError) as caught:
        run(kernel, *numbers)
    lines, first = inspect.getsourcelines(kernel.py_func)
    marked = [first + i for i, line in enumerate(lines) if f"# FAULT: {marker}" in line]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.line in marked, str(caught.value)
    return caught.value


@pytest.mark.parametrize("fault", ["", "releases"])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_exchange(blocks, fault):
    A, O = launch(exchange(blocks, fault), blocks)
    for block in range(len(A)):
        first = block // blocks * blocks
        np.testing.assert_array_equal(O[block], A[first : first + blocks].swapaxes(0, 1))


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize(
    ("fault", "words", "marker"),
    [
        ("no fence", "stored by thread 0 of block 0 without fence_proxy_async since", "sends"),
        ("late fence", "whose fence_proxy_async comes after the barrier between", "sends"),
        ("no barrier", "written by thread 0 of block 0 with no barrier between", "sends"),
        ("overwrites the source", "by thread 0 of block 0, reads", "overwrites the source"),
        ("overwrites soon", "which a bulk copy of 512 bytes, issued at", "overwrites soon"),
        ("source", "which nobody has written", "sends"),
        ("over a barrier", "over mbarrier", "sends"),
        ("rank", f"a bulk copy in block 7 of a cluster of {2}", "sends"),
        ("no cluster barrier", "of block 1, initialised by thread 0 of block 1 with no barrier between", "sends"),
        ("no init fence", "given to other blocks without fence_mbarrier_init by thread 0 of block 0", "sends"),
        ("returns", "a bulk copy in block 1, which has ended", "sends"),
        ("ends early", "the block may end before a bulk copy of 512 bytes", "sends"),
        ("reads early", "which nobody has written", "reads"),
        ("reads for one", "written by a bulk copy with no barrier between", "reads"),
        ("arrives early", "bulk copy", "overwrites the source"),
        ("own bytes", "read by a bulk copy with no barrier between", "overwrites the source"),
        ("one lane arrives", "with no barrier between", "sends"),
        ("one arrival more", "wait for a phase that nobody completes", "waits"),
        ("bytes missing", "16 bytes missing", "waits"),
        ("bytes too many", "16 bytes more than announced", "waits"),
        ("missing", "cluster barrier not reached by all threads of the cluster", "missing"),
        ("arrives twice", "cluster_arrive once more, without cluster_wait between", "arrives twice"),
        ("some lanes", "cluster_arrive with mask 0xffffffff not reached by all its lanes in warp 0", "some lanes"),
    ],
)
def test_faults(fault, words, marker, blocks):
    words = words.replace("cluster of 2", f"cluster of {blocks}")
    fault_of(exchange(blocks, fault), words, marker, launch, blocks)


def test_who_is_missing():
    with pytest.raises(sim.SimulationError) as caught:
        launch(exchange(2, "missing"), 2)
    assert "block 0, threads 0-63; block 1, threads 0-31 at cluster barrier" in str(caught.value)
    assert "block 1, threads 32-63 returned" in str(caught.value)
    assert set(caught.value.threads) == set(range(64))


def run(kernel, threads=64, blocks=2, grid=None, smem_bytes=2048):
    A, O = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    sim.launch(kernel, grid or blocks, threads, (A, O), smem_bytes, cluster=blocks)
    return A, O


# Barriers


def test_a_block_barrier_is_of_one_block():
    @cuda.jit
    def kernel(A, O):
        tid, smem = cuda.threadIdx.x, shared_memory()
        x = cuda.local.array(4, float32)
        for turn in range(3 if cluster_rank() == 0 else 5):
            for i in range(4):
                x[i] = turn + tid
            store(smem + 16 * tid, x)
            cuda.syncthreads()
            load(x, smem + 16 * (tid ^ 32))
            cuda.syncthreads()
            if turn == 2:
                named_barrier_sync(1, 64)
        O[cuda.blockIdx.x * 64 + tid] = x[0]

    _, O = run(kernel)
    np.testing.assert_array_equal(O[:128], np.r_[(np.arange(64) ^ 32) + 2, (np.arange(64) ^ 32) + 4])


def global_memory(fault: str):
    """Block 0 writes O, block 1 reads it."""

    @cuda.jit
    def kernel(A, O):
        tid, smem = cuda.threadIdx.x, shared_memory()
        if tid == 0:
            mbarrier_init(smem, 64)
            fence_mbarrier_init()
        cluster_arrive()
        cluster_wait()
        if cluster_rank() == 0:
            O[tid] = A[tid]
            if fault == "relaxed":
                tell_at(smem, 1, True)
            elif fault in ("mbarrier", "plain wait"):
                arrive_at(smem, 1, True)
        if fault in ("barrier", "no wait"):
            cluster_arrive()
            if fault == "barrier":
                cluster_wait()
        if cluster_rank() == 1:
            if fault in ("mbarrier", "relaxed"):
                mbarrier_wait_cluster(smem, 0)
            if fault == "plain wait":
                mbarrier_wait(smem, 0)
            O[128 + tid] = O[tid ^ 1]  # FAULT: reads
        if fault == "no wait":
            cluster_wait()
        cluster_arrive()
        cluster_wait()

    return kernel


@pytest.mark.parametrize("fault", ["mbarrier", "barrier"])
def test_global_memory_is_ordered(fault):
    A, O = run(global_memory(fault))
    np.testing.assert_array_equal(O[128:192], A[np.arange(64) ^ 1])


@pytest.mark.parametrize("fault", ["relaxed", "plain wait", "no wait"])
def test_global_memory_is_not_ordered(fault):
    error = fault_of(global_memory(fault), "race: read of tensor O[1]", "reads", run)
    assert "block 1, thread 0 (warp 0, lane 0); block 0, thread 1 (warp 0, lane 1)" in str(error)


def test_a_wait_without_arrival():
    @cuda.jit
    def kernel(A, O):
        cluster_wait()  # FAULT: waits

    fault_of(kernel, "cluster_wait without cluster_arrive before", "waits", run)


# Bytes and their announcement


def early_bytes(fault: str):
    """Block 0 sends twice to block 1, which announces the second bytes after they have come."""

    @cuda.jit
    def kernel(A, O):
        tid, rank, smem = cuda.threadIdx.x, cluster_rank(), shared_memory()
        x = cuda.local.array(4, float32)
        first, second = smem + 1024, smem + 1032
        if tid == 0:
            mbarrier_init(first, 1)
            mbarrier_init(second, 1)
            fence_mbarrier_init()
        cluster_arrive()
        cluster_wait()
        if rank == 0:
            if tid == 0:
                for i in range(4):
                    x[i] = A[i]
                store(smem, x)
                fence_proxy_async()
                send_little(smem + 16, smem, first, 1)
                send_little(smem + 32, smem, second, 1)  # FAULT: sends
        else:
            if tid == 0:
                mbarrier_arrive_expect(first, 16)
            mbarrier_wait(first, 0)
            if fault == "barrier":
                cuda.syncthreads()
                load(x, smem + 32)  # FAULT: reads
            if tid == 0 and fault != "never announced":
                mbarrier_arrive_expect(second, 16)
            if fault != "never announced":
                mbarrier_wait(second, 0)
                load(x, smem + 32)
                O[tid] = x[3]
            if tid == 0 and fault == "announced twice":
                mbarrier_arrive_expect(second, 16)
        cluster_arrive()
        cluster_wait()

    return kernel


def test_bytes_before_their_announcement():
    A, O = run(early_bytes(""))
    np.testing.assert_array_equal(O[:64], A[3])


def test_no_barrier_stands_for_the_wait_for_bytes():
    fault_of(early_bytes("barrier"), "written by a bulk copy with no barrier between", "reads", run)


def test_bytes_that_are_never_announced():
    fault_of(early_bytes("never announced"), "the block may end before a bulk copy of 16 bytes", "sends", run)


def test_bytes_that_never_come():
    with pytest.raises(
        sim.SimulationError, match="ended with mbarrier 1032: phase 1, 1 of 1 arrivals, 16 bytes missing; .*block 1"
    ):
        run(early_bytes("announced twice"))


# Operands that threads store


@unrolled
def product(e, S, at):
    (sums,) = e.wgmma(64, [[(Matrix(at, 0), Matrix(at, 0))]])
    for i, x in enumerate(sums):
        S[i] = x


@unrolled
def store_packed(e, address, word):
    e.store_shared(address, [word] * 4)


def stored_operand(fault: str):
    """A warpgroup stores 64 rows of halves 1, 2, and multiplies them by themselves."""

    @cuda.jit
    def kernel(A, O):
        tid, smem = cuda.threadIdx.x, shared_memory()
        S = cuda.local.array(32, float32)
        if fault == "fence before":
            fence_proxy_async()
        for chunk in range(tid, 512, 128):
            store_packed(smem + 16 * chunk, int32(0x40003C00))
        if fault == "":
            fence_proxy_async()
        if fault == "one warp less" and tid < 96:
            fence_proxy_async()
        if fault == "no barrier":
            fence_proxy_async()
            cuda.syncwarp()
        else:
            cuda.syncthreads()
        if fault == "fence after":
            fence_proxy_async()
        product(S, smem)  # FAULT: products
        O[tid] = S[0]

    return kernel


def run_products(kernel):
    return run(kernel, 128, 1, 2, 64 * 128)[1]


def test_operands_that_are_stored():
    np.testing.assert_array_equal(run_products(stored_operand(""))[:128], 16 * (1 + 4) / 2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fence before", "stored by thread 0 without fence_proxy_async since"),
        ("fence after", "stored by thread 0, whose fence_proxy_async comes after the barrier between"),
        ("one warp less", "without fence_proxy_async since"),
        ("no barrier", "race: an operand has byte 0 of shared memory, written by thread 0 with no barrier between"),
    ],
)
def test_operands_that_are_not_there(fault, words):
    fault_of(stored_operand(fault), words, "products", run_products)


# Launches


def test_launches_that_no_gpu_would_start():
    kernel = global_memory("barrier")
    for options in ({"blocks": 2, "grid": 3}, {"blocks": 16}, {"blocks": 8, "threads": 288}):
        with pytest.raises(ValueError, match="cluster: "):
            run(kernel, **options)


def test_four_blocks_of_256_threads():
    @cuda.jit
    def kernel(A, O):
        tid, rank, smem = cuda.threadIdx.x, cluster_rank(), shared_memory()
        x = cuda.local.array(4, float32)
        if tid == 0:
            mbarrier_init(smem + 8192, 256)
            mbarrier_init(smem + 8200, 1)
            fence_mbarrier_init()
        cluster_arrive()
        cluster_wait()
        for i in range(4):
            x[i] = A[tid] + rank
        store(smem + 16 * tid, x)
        fence_proxy_async()
        arrive_at(smem + 8192, rank, True)
        if tid < 8:
            mbarrier_wait(smem + 8192, 0)
            send(smem + 4096 + TILE * tid, smem + TILE * tid, smem + 8200, (rank + 1) & 3)
        if tid == 0:
            mbarrier_arrive_expect(smem + 8200, 8 * TILE)
        mbarrier_wait(smem + 8200, 0)
        load(x, smem + 4096 + 16 * tid)
        if tid == 255:
            O[cuda.blockIdx.x] = x[0]
        cluster_arrive()
        cluster_wait()

    A, O = run(kernel, 256, 4, 8, 8208)
    np.testing.assert_array_equal(O[:8], [258, 255, 256, 257] * 2)
