"""What a simulated thread knows, and what it can do apart from computing."""

from __future__ import annotations

import sys
from bisect import bisect_left

import numpy as np

from numba_attn.sim import clusters, mbarriers, vectors, warpgroups
from numba_attn.sim.blocks import Block, Grid
from numba_attn.sim.errors import fail, file_line
from numba_attn.sim.marks import UNENDED

WARP = 32
FULL = 0xFFFFFFFF


class Thread:
    """One thread: what twins of intrinsics are given as their first argument."""

    def __init__(self, grid: Grid, rank: int, tid: int, hub):
        self.grid = grid
        self.rank = rank
        self.tid = tid
        self.index = tid if rank == 0 else rank * grid.stride + tid
        """Its number among the threads of the cluster."""
        self.warp = self.index // WARP
        self.lane = tid % WARP
        self.block = None
        self.warp_lanes = (1 << min(WARP, grid.block_threads - tid // WARP * WARP)) - 1
        self.seen = [0] * WARP  # per lane of the warp: its accesses before this time are ordered before ours
        self.warp_mark = 0
        self.known = None
        """By number of the thread, the same for those of all warps and for what is no thread (`marks`). In a cluster a
        second row of what is over, reads and copies: it may be written over, but not read. Never changed in place."""
        self.fences = []
        """When it has executed `fence_proxy_async`."""
        self.cluster_phase = None
        """The phase of the cluster's barrier at which it has arrived without waiting yet."""
        self.request = None
        self.mask = FULL
        self.value = None
        self.site = -1
        self.answer = None
        self.copies = []
        self.groups = []
        self.products = []  # of the tensor cores, in flight
        self.pools = {}
        self.greenlet = None
        self._hub = hub
        self._first, self._end = rank * grid.stride, (rank + 1) * grid.stride

    def start(self, block: Block, program) -> None:
        """The thread is at the beginning of a block."""
        self.block = block
        self.copies, self.groups, self.products, self.known = [], [], [], None
        self.fences, self.cluster_phase, self.pools = [], None, {}
        self.request, self.answer = None, None
        self.greenlet = program

    def meet(self, request: str, mask: int, value=None):
        """Wait at a barrier or collective until all threads that take part are there; returns this one's result."""
        self.request = request
        self.mask = int(mask) & FULL
        self.value = value
        self.site = self.grid.site(sys._getframe(1))
        return self._hub.switch()

    def exchange(self, mask: int, value) -> dict:
        """{lane: value} of all lanes in `mask`: the collective from which twins build others (`mma`, for one)."""
        return self.meet("exchange", mask, value)

    def ordered(self, other: int, time: int, row: int = 0) -> bool:
        """Whether a barrier stands between what thread `other` did at `time` and this thread now.

        Row 0 of what it knows, or -1 for what need only be over.
        """
        if time < self.block.clock.block_time and self._first <= other < self._end:
            return True
        if other // WARP == self.warp and time < self.seen[other % WARP]:
            return True
        return self.known is not None and bool(time < self.known[row, other])

    def until(self) -> np.ndarray:
        """Per thread of the cluster, the time before which its accesses are ordered before this thread now."""
        n = self._end if self.grid.cluster == 1 else self.grid.cluster * self.grid.stride
        found = np.zeros(n, np.int64) if self.known is None else self.known[0, :n].copy()
        own, first = found[self._first : self._end], self.warp * WARP
        np.maximum(own, self.block.clock.block_time, out=own)
        found[first : first + WARP] = np.maximum(found[first : first + WARP], self.seen)
        found[self.index] = UNENDED
        return found

    def fenced(self, time: int) -> int | None:
        """When the thread first executed `fence_proxy_async` after a store at `time`."""
        i = bisect_left(self.fences, time + 1)
        return self.fences[i] if i < len(self.fences) else None

    def learn(self, released) -> None:
        """What others have released is ordered before what this thread does now."""
        self.known = released.copy() if self.known is None else np.maximum(self.known, released)

    def released(self):
        """Per thread, the time before which its accesses are ordered before whoever acquires this one's arrival."""
        now = self.grid.nothing_known() if self.known is None else self.known.copy()
        clock, first = self.block.clock, self.warp * WARP
        if self.grid.cluster > 1:
            own = now[:, self._first : self._end]
            np.maximum(own, clock.block_time, out=own)
        own = now[:, first : first + WARP]
        np.maximum(own, self.seen, out=own)
        now[:, self.index] = clock.tick()
        return now

    def shared_tile(self, offset_bytes: int, shape, strides, dtype):
        """This thread's view of dynamic shared memory at a byte offset; strides in elements."""
        return self.block.dynamic.view(self, offset_bytes, tuple(shape), tuple(strides), dtype)

    def load(self, array, index, n: int) -> tuple:
        """`n` consecutive elements of a shared view or tensor, in one aligned access."""
        return vectors.load(self, array, index, n)

    def store(self, array, index, values) -> None:
        """Write consecutive elements of a shared view or tensor, in one aligned access."""
        vectors.store(self, array, index, values)

    def load_shared(self, address: int, n: int) -> list:
        """`n` fp32 at an address of dynamic shared memory."""
        return list(vectors.load_at(self, address, n))

    def store_shared(self, address: int, words: list) -> None:
        """Write 32-bit words to an address of dynamic shared memory."""
        vectors.store_at(self, address, words)

    def copy_async(self, target, target_index, source, source_index, n: int, valid: int) -> None:
        """Start an asynchronous copy of `n` elements of a tensor, zeros after the first `valid`, to shared memory."""
        vectors.copy_async(self, target, target_index, source, source_index, n, valid)

    def commit_async(self) -> None:
        """Close the group of the copies started since the last one."""
        self.groups.append(self.copies)
        self.copies = []

    def wait_async(self, pending: int) -> None:
        """Wait until at most `pending` of this thread's groups are in flight."""
        while len(self.groups) > pending:
            vectors.land(self, self.groups.pop(0))

    def mbarrier_init(self, address: int, arrivals: int) -> None:
        mbarriers.init(self, address, arrivals)

    def mbarrier_fence(self) -> None:
        mbarriers.fence_init(self)

    def mbarrier_arrive(self, address: int, n_bytes: int = 0) -> None:
        """One arrival, after `n_bytes` have been announced."""
        mbarriers.arrive(self, address, n_bytes)

    def mbarrier_wait(self, address: int, parity: int, *, of_cluster: bool = False) -> None:
        """Wait for a phase; `of_cluster`: acquire what other blocks released too."""
        mbarriers.wait(self, address, parity, of_cluster=of_cluster)

    def copy_bulk(self, target: int, source, n_bytes: int, barrier: int) -> None:
        """Start a copy from `source`, a tensor and the index of the first element, to a shared address."""
        mbarriers.copy_bulk(self, target, source, n_bytes, barrier)

    def named_barrier(self, name: int, threads: int, *, wait: bool) -> None:
        mbarriers.named(self, name, threads, wait=wait)

    def fence_proxy_async(self) -> None:
        """What the thread has stored is there for bulk copies and products that are ordered behind now."""
        self.fences.append(self.block.clock.tick())

    def cluster_rank(self) -> int:
        return self.rank

    def cluster_arrive(self) -> None:
        self.meet("cluster_arrive", self.warp_lanes)
        clusters.arrive(self)

    def cluster_wait(self) -> None:
        self.meet("cluster_wait", self.warp_lanes)
        clusters.wait(self)

    def mbarrier_arrive_at(self, address: int, rank: int, *, releases: bool = True) -> None:
        """One arrival in block `rank` of the cluster."""
        clusters.arrive_at(self, address, rank, releases=releases)

    def copy_bulk_to(self, target: int, source: int, n_bytes: int, barrier: int, rank: int) -> None:
        """Start a copy from a shared address to one of block `rank`, counted by its barrier."""
        clusters.copy_bulk_to(self, target, source, n_bytes, barrier, rank)

    def meet_warpgroup(self, value) -> warpgroups.Warpgroup:
        """Wait for the other threads of the warpgroup, which bring their values: for twins of its products."""
        return self.meet("warpgroup product", FULL, value)

    def start_products(self, group, registers: list, sums: list) -> list:
        """The sums of a statement of products, in flight until `wait_products`; `registers`: its left operands."""
        product = warpgroups.InFlightProduct(self, group, registers)
        return [warpgroups.Sum(self, product, x) for x in sums]

    def wait_products(self, pending: int, sums: list, registers: list) -> list:
        """`sums`, once at most `pending` statements are in flight; `registers`: the left operands of the others."""
        return warpgroups.wait(self, pending, sums, registers)

    def end(self) -> None:
        """The thread has returned."""
        if self.products:
            flight = self.products[0]
            place = file_line(flight.file, flight.line)
            what = f"the thread ended with products in flight, issued at {place}"
            fail(self, what, file=flight.file, line=flight.line)
        left = [copy for group in [*self.groups, self.copies] for copy in group]
        if left:
            memory, cell = left[0]
            flight = memory.cells[cell]
            place = file_line(flight.file, flight.line)
            what = f"the thread ended with {len(left)} copied words in flight, the first issued at {place}"
            fail(self, what, file=flight.file, line=flight.line)
        self.block.running -= 1
        if self.block.running == 0:
            clusters.end_block(self)
