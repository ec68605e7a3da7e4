"""Contract under test: what goes wrong between warps that copy and warpgroups that multiply is an error that names the
line and the threads, and the same kernel without the fault runs."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from numba import cuda, float32

from numba_attn import sim
from numba_attn.device.ptx_sm90 import (
    fence_mbarrier_init,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
)
from numba_attn.device.smem import shared_memory, shared_tile
from numba_attn.device.unrolled import unrolled
from numba_attn.device.wgmma_fragments import Matrix

TILE_BYTES, TILE_WORDS, ALL_TILES = 64 * 128, 64 * 32, 3
SLOT, FULL, READ, SMEM_BYTES = 0, 2 * TILE_BYTES, 2 * TILE_BYTES + 8, 2 * TILE_BYTES + 16
COPYING = 128  # the thread that copies
STORED = shared_tile(TILE_BYTES, (64,))


def copying(n_bytes: int):
    @unrolled
    def copy(e, target, image, word, barrier):
        e.copy_bulk(target, e.address(image, word), 0, n_bytes, barrier)

    return copy


copy_tile, copy_little = copying(TILE_BYTES), copying(16)


@unrolled
def arrive(e, barrier, condition):
    e.mbarrier_arrive(barrier, condition)


def square(fault: str):
    """The verb `square(S, slot, left)`: S = X X^T of the tile X, or of its first 16 columns in `left`."""

    @unrolled
    def square(e, S, slot, left, read, condition):
        steps = [(Matrix(slot, 32 * step), Matrix(slot, 32 * step)) for step in range(4)]
        registers = [left[r] for r in range(4)]
        chain = [(registers, Matrix(slot, 0))] if "registers" in fault else steps
        waits = fault not in ("arrives early", "sum too early", "registers not kept", "never waits")
        (sums,) = e.wgmma(64, [chain], wait=waits)
        if fault == "arrives early":
            e.mbarrier_arrive(read, condition)
        if fault == "sum too early":
            S[0] = sums[0] + 1.0
        if not waits and fault != "never waits":
            sums = e.wgmma_wait(0, sums, [] if fault == "registers not kept" else registers)
        if fault == "never waits":
            sums = [e.number(0.0)] * 32
        if fault != "arrives early":
            e.mbarrier_arrive(read, condition)
        for i, x in enumerate(sums):
            S[i] = x

    return square


def pipeline(fault: str = ""):
    """A thread copies tiles to one slot, a warpgroup multiplies each by itself."""
    multiply = square(fault)
    TILES = 1 if fault == "never waits" else ALL_TILES

    @cuda.jit
    def kernel(A, O):
        tid = cuda.threadIdx.x
        smem = shared_memory()
        slot, full, read = smem + SLOT, smem + FULL, smem + READ
        if tid == 0:
            mbarrier_init(full, 1)
            if fault != "one mbarrier":
                mbarrier_init(read, 4)
            if fault == "twice":
                mbarrier_init(full, 1)  # FAULT: twice
            if fault != "no fence":
                fence_mbarrier_init()
        if fault != "no barrier":
            cuda.syncthreads()
        if tid >= 128:
            if tid == COPYING:
                for tile in range(TILES):
                    if fault != "copies early":
                        mbarrier_wait(read, tile & 1 ^ 1)  # FAULT: never read # FAULT: one mbarrier # FAULT: no barrier
                    n_bytes = TILE_BYTES + 16 if fault == "bytes missing" else TILE_BYTES
                    mbarrier_arrive_expect(full, n_bytes)  # FAULT: copies early
                    word = tile * TILE_WORDS + (1 if fault == "misaligned" else 0)
                    target = slot + (2 * TILE_BYTES if fault == "out of range" else 0)
                    target += TILE_BYTES + 16 if fault == "over a barrier" else 0
                    copy_tile(target, A, word, full)  # FAULT: copies
                if fault == "never lands":
                    mbarrier_wait(read, TILES & 1 ^ 1)
                    mbarrier_arrive_expect(full, 16)
                    copy_little(slot, A, 0, full)  # FAULT: never lands
        else:
            S = cuda.local.array(32, float32)
            left = cuda.local.array(4, "int32")
            for r in range(4):
                left[r] = 0
            for tile in range(TILES):
                if fault == "stored":
                    mbarrier_wait(full, tile & 1)
                    cuda.syncwarp()
                    if tid < 64:
                        STORED(smem)[tid] = float32(1)
                    multiply(S, slot + TILE_BYTES, left, read, tid % 32 == 0)  # FAULT: stored
                if fault != "reads early":
                    parity = 1 if fault == "parity" else tile & 1
                    mbarrier_wait(full, parity)  # FAULT: full
                if fault == "one warp less" and tid >= 96:
                    break
                if fault == "arrives first":
                    arrive(read, tid % 32 == 0)
                own = slot + (32 if fault == "different operands" and tid == 77 else 0)
                reporter = tid % 32 == (32 if fault in ("never read", "arrives first") else 0)
                multiply(S, own, left, read, reporter)  # FAULT: products
                if tid < 64:
                    O[tile, tid] = S[0]

    return kernel


def launch(kernel):
    X = np.random.default_rng(0).standard_normal((ALL_TILES, 64, 64)).astype(np.float16)
    chunks = X.reshape(ALL_TILES, 64, 8, 8)
    image = np.stack([chunks[:, r, np.arange(8) ^ r % 8] for r in range(64)], axis=1)
    O = np.zeros((ALL_TILES, 64), np.float32)
    A = np.concatenate([image.ravel().view(np.uint32), np.zeros(TILE_WORDS, np.uint32)])
    sim.launch(kernel, 1, 160, (A, O), SMEM_BYTES)
    return X.astype(np.float64), O


def fault_of(kernel, words: str, marker: str, threads=None) -> None:
    with pytest.raises(sim.SimulationError) as caught:
        launch(kernel)
    lines, first = inspect.getsourcelines(kernel.py_func)
    marked = [first + i for i, line in enumerate(lines) if f"# FAULT: {marker}" in line]
    assert words in str(caught.value)
    assert caught.value.line in marked, str(caught.value)
    if threads is not None:
        assert set(caught.value.threads) == set(threads), str(caught.value)


def test_the_pipeline_without_a_fault():
    X, O = launch(pipeline())
    # Lane 4 g of warp w has the elements (16 w + g, 0) in its first register.
    for tile in range(ALL_TILES):
        squares = X[tile] @ X[tile].T
        for warp in range(2):
            np.testing.assert_allclose(
                O[tile, 32 * warp : 32 * warp + 32 : 4], squares[16 * warp :, 0][:8], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize(
    ("fault", "words", "marker", "threads"),
    [
        ("twice", "mbarrier 16384 is initialised again", "twice", [0]),
        ("one mbarrier", "mbarrier 16392, which nobody has initialised", "one mbarrier", [COPYING]),
        ("no barrier", "race: mbarrier 16384, initialised by thread 0 with no barrier between", "full", None),
        ("no fence", "without fence_mbarrier_init", "copies", [COPYING]),
        ("copies early", "more than 1 arrivals in one phase", "copies early", [COPYING]),
        ("misaligned", "a bulk copy with source", "copies", [COPYING]),
        ("out of range", "a bulk copy to bytes 16384 to 24576 of 16400", "copies", [COPYING]),
        ("over a barrier", "over mbarrier 16384", "copies", [COPYING]),
        ("never lands", "the block ended with a bulk copy of 16 bytes", "never lands", [COPYING]),
        ("reads early", "asynchronous copy to it", "products", None),
        ("bytes missing", "wait for a phase that nobody completes", "never read", [COPYING]),
        ("never read", "wait for a phase that nobody completes", "never read", [COPYING]),
        ("arrives early", "by the tensor cores for warp 0 with no barrier between", "copies", [COPYING]),
        ("arrives first", "by the tensor cores for warp 0 with no barrier between", "copies", [COPYING]),
        ("sum too early", "before the wait for it", "products", None),
        ("registers not kept", "may be overwritten before it", "products", None),
        ("never waits", "the thread ended with products in flight", "products", None),
        ("one warp less", "products not reached by the whole warpgroup", "products", range(96)),
        ("different operands", "ask for different products", "products", None),
        ("parity", "asynchronous copy to it", "products", None),
        ("stored", "stored by thread", "stored", None),
    ],
)
def test_faults(fault, words, marker, threads):
    fault_of(pipeline(fault), words, marker, threads)


def test_what_waits_is_told():
    with pytest.raises(sim.SimulationError, match="mbarrier 16384: phase 0, 1 of 1 arrivals, 16 bytes missing"):
        launch(pipeline("bytes missing"))


# Shared memory between warps


TILE = shared_tile(16, (32,))


def handing_over(release: str, acquire: str):
    """Warp 0 stores, warp 1 loads; between them an mbarrier or a named barrier."""

    @cuda.jit
    def kernel(A, O):
        tid = cuda.threadIdx.x
        smem = shared_memory()
        tile = TILE(smem)
        if tid == 0:
            mbarrier_init(smem, 1)
        cuda.syncthreads()
        if tid < 32:
            tile[tid] = A[tid]
            if release == "mbarrier":
                cuda.syncwarp()
            if release in ("mbarrier", "mbarrier of one lane"):
                arrive(smem, tid == 0)
            if release == "named":
                named_barrier_arrive(1, 64)
        else:
            if acquire == "mbarrier":
                mbarrier_wait(smem, 0)
            if acquire == "named":
                named_barrier_sync(1, 64)  # FAULT: nobody
            O[tid - 32] = tile[tid - 32]  # FAULT: race

    return kernel


def hand_over(kernel):
    A, O = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    sim.launch(kernel, 1, 64, (A, O), 144)
    np.testing.assert_array_equal(O, A)


@pytest.mark.parametrize("kind", ["mbarrier", "named"])
def test_barriers_of_some_warps_order(kind):
    hand_over(handing_over(kind, kind))
    with pytest.raises(sim.SimulationError, match="race: read"):
        hand_over(handing_over(kind, "none"))


def test_an_arrival_releases_what_its_thread_knows():
    with pytest.raises(sim.SimulationError, match=r"race: read of shared array tile\[1\]"):
        hand_over(handing_over("mbarrier of one lane", "mbarrier"))


def test_named_barriers():
    with pytest.raises(
        sim.SimulationError, match="named barrier that is not reached by all its threads.*32 of 64"
    ) as caught:
        hand_over(handing_over("none", "named"))
    assert set(caught.value.threads) == set(range(32, 64))

    @cuda.jit
    def different(A, O):
        named_barrier_sync(1, 64 if cuda.threadIdx.x < 32 else 32)

    @cuda.jit
    def unnamed(A, O):
        named_barrier_sync(16, 64)

    with pytest.raises(sim.SimulationError, match="of 32 threads here and of 64 elsewhere"):
        hand_over(different)
    with pytest.raises(sim.SimulationError, match="names are 1 to 15"):
        hand_over(unnamed)


def test_ping_pong_by_named_barriers():
    """Two warps take turns with one tile: each turn is ordered after the one before."""

    @cuda.jit
    def turns(A, O):
        tid = cuda.threadIdx.x
        warp, lane = tid // 32, tid % 32
        tile = TILE(shared_memory())
        for turn in range(3):
            if warp == 1:
                named_barrier_sync(1, 64)
            elif turn > 0:
                named_barrier_sync(2, 64)
            tile[lane] = A[lane] + (tile[lane] if turn > 0 or warp == 1 else 0)
            if warp == 0:
                named_barrier_arrive(1, 64)
            elif turn < 2:
                named_barrier_arrive(2, 64)
        if warp == 1:
            O[lane] = tile[lane] / 6

    hand_over(turns)
