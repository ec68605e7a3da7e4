"""Contract under test: instructions of clusters compile to their mnemonics, and two blocks exchange what they made."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numba import cuda, float32, int32
from toys import compiled, nans, ptx_of, randn

from numba_attn.device.ptx_cluster import (
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    mbarrier_wait_cluster,
)
from numba_attn.device.ptx_sm90 import fence_mbarrier_init, fence_proxy_async, mbarrier_arrive_expect, mbarrier_init
from numba_attn.device.smem import shared_memory
from numba_attn.device.unrolled import unrolled

WORDS = 4
N_BYTES, FULL, FREE, SMEM_BYTES = 32 * 4 * WORDS, 64 * 4 * WORDS, 64 * 4 * WORDS + 8, 64 * 4 * WORDS + 16


def exchange(n: int, releases: bool = True):
    """O[rank] = the tile that the other block of two made; n words in one access."""

    @unrolled
    def put(e, smem, lane, packed, x):
        words = [packed[0], x[0], packed[1], x[1]]
        for i in range(0, WORDS, n):
            e.store_shared(smem + lane * 4 * WORDS + 4 * i, words[i : i + n])

    @unrolled
    def send(e, smem, rank):
        e.copy_bulk_to(smem + N_BYTES, smem, N_BYTES, smem + FULL, rank)

    @unrolled
    def take(e, found, smem, lane, rank, condition):
        e.mbarrier_wait_cluster(smem + FULL, 0)
        for i in range(0, WORDS, n):
            for j, x in enumerate(e.load_shared(smem + N_BYTES + lane * 4 * WORDS + 4 * i, n)):
                found[i + j] = x
        e.mbarrier_arrive_at(smem + FREE, rank, condition, releases=releases)

    @cuda.jit
    def kernel(A, O):
        tid, rank = cuda.threadIdx.x, cluster_rank()
        smem = shared_memory()
        if tid == 0:
            mbarrier_init(smem + FULL, 1)
            mbarrier_init(smem + FREE, 1)
            fence_mbarrier_init()
        cluster_arrive()
        cluster_wait()
        packed = cuda.local.array(2, int32)
        x = cuda.local.array(2, float32)
        found = cuda.local.array(WORDS, float32)
        for i in range(2):
            packed[i] = 0x3F800000 + (tid << 12)
            x[i] = A[rank, tid, i]
        put(smem, tid, packed, x)
        fence_proxy_async()
        cuda.syncthreads()
        if tid == 0:
            mbarrier_arrive_expect(smem + FULL, N_BYTES)
            send(smem, rank ^ 1)
        take(found, smem, tid, rank ^ 1, tid == 0)
        for i in range(WORDS):
            O[rank, tid, i] = found[i]
        mbarrier_wait_cluster(smem + FREE, 0)
        cluster_arrive()
        cluster_wait()

    return kernel


def test_instructions():
    ptx = ptx_of(exchange(4), 3, 3)
    for name, count in {
        "%cluster_ctarank": 1,
        "barrier.cluster.arrive.release.aligned": 2,
        "barrier.cluster.wait.acquire.aligned": 2,
        "fence.proxy.async.shared::cta": 1,
        "mapa.shared::cluster.u32": 3,
        "mbarrier.arrive.release.cluster.shared::cluster.b64": 1,
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64": 2,
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes": 1,
        "st.shared.v4.b32": 1,
        "ld.shared.v4.f32": 1,
    }.items():
        assert len(re.findall(re.escape(name) + r"[ ;]", ptx)) == count, name


@pytest.mark.parametrize(("n", "vector"), [(1, ""), (2, ".v2")])
def test_instructions_of_fewer_words(n, vector):
    ptx = ptx_of(exchange(n), 3, 3)
    assert ptx.count(f"st.shared{vector}.b32 [") == ptx.count(f"ld.shared{vector}.f32 ") == WORDS // n


def test_an_arrival_that_does_not_release():
    ptx = ptx_of(exchange(4, releases=False), 3, 3)
    assert ptx.count("mbarrier.arrive.relaxed.cluster.shared::cluster.b64") == 1
    assert "mbarrier.arrive.release.cluster.shared::cluster.b64" not in ptx


def test_machine_code():
    binary = compiled(exchange(4), nans(2, 32, 2), nans(2, 32, WORDS), grid=2, smem_bytes=SMEM_BYTES, cluster=2)
    assert binary.spill_bytes == binary.stack_bytes == 0


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("releases", [True, False])
def test_exchange(run, n, releases):
    A, O = randn(2, 32, 2), nans(2, 32, WORDS)
    run(exchange(n, releases), A, O, grid=2, smem_bytes=SMEM_BYTES, cluster=2)
    made = 1 + np.arange(32, dtype=np.float32) / 2048
    for rank in range(2):
        np.testing.assert_array_equal(O[rank, :, ::2], np.stack([made, made], 1))
        np.testing.assert_array_equal(O[rank, :, 1::2], A[rank ^ 1])
