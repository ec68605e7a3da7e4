"""One launch and its threads: what a simulated thread knows, and what it can do apart from computing."""

from __future__ import annotations

import sys

import numpy as np

from numba_attn.sim import mbarriers, vectors, warpgroups
from numba_attn.sim.errors import fail, file_line
from numba_attn.sim.marks import KNOWN, Clock
from numba_attn.sim.shared import SharedMemory

WARP = 32
FULL = 0xFFFFFFFF


class Grid:
    """One launch: its dimensions, its threads and the state of the block that runs now."""

    def __init__(self, name: str, kernel_code, grid_dim, block_dim, smem_bytes: int, unit: int):
        self.name = name
        self.kernel_code = kernel_code
        self.codes = {kernel_code}
        self.grid_dim = grid_dim
        self.block_dim = block_dim
        self.smem_bytes = smem_bytes
        self.unit = unit
        self.clock = Clock()
        self.block = 0
        self.dynamic = None
        self.static = {}
        self.mbarriers = {}  # by address
        self.named = {}  # barriers that some warps have reached, by name
        self.passed = []  # and those that all have
        self.copies = []  # bulk copies in flight
        self._sites = {}
        self._places = []
        self._site_of = {}

    def start_block(self, block: int) -> None:
        """Fresh shared memory for the next block."""
        self.clock.new_block()
        self.block = block
        # The pool of dynamic shared memory is aligned to a row of banks.
        self.dynamic = SharedMemory(self.clock, self.smem_bytes, self.unit, 128, "dynamic shared")
        self.static = {}
        self.mbarriers, self.named, self.passed, self.copies = {}, {}, [], []

    def block_text(self) -> str:
        x, y, z = self.grid_dim
        if y * z == 1:
            return f"block {self.block}"
        return f"block {self.block} ({self.block % x}, {self.block // x % y}, {self.block // (x * y)})"

    def site(self, frame) -> int:
        """Number of the place in the source from which the calls up to `frame` come; equal for equal places."""
        key = []
        kernel = self.kernel_code
        first = frame
        while frame is not None:
            code = frame.f_code
            key.append(id(code))
            key.append(frame.f_lasti)
            if code is kernel:
                break
            frame = frame.f_back
        key = tuple(key)
        site = self._site_of.get(key)
        if site is None:
            site = self._site_of[key] = self._new_site(first)
        return site

    def _new_site(self, frame) -> int:
        # The compiler may have put one place of the source into the code twice, as it does with a `while` test.
        place = []
        while frame is not None:
            code = frame.f_code
            if code in self.codes:
                at = list(code.co_positions())[frame.f_lasti // 2]
                place.append((code, frame.f_lineno, at))
            if code is self.kernel_code:
                break
            frame = frame.f_back
        place = tuple(place)
        if place not in self._sites:
            self._sites[place] = len(self._sites)
            self._places.append(place)
        return self._sites[place]

    def site_line(self, site: int) -> tuple[str | None, int | None]:
        """File and line of a site."""
        place = self._places[site]
        return (place[0][0].co_filename, place[0][1]) if place else (None, None)


class Thread:
    """One thread: what twins of intrinsics are given as their first argument."""

    def __init__(self, grid: Grid, index: int, hub):
        self.grid = grid
        self.index = index
        self.warp = index // WARP
        self.lane = index % WARP
        self.seen = [0] * WARP  # per lane of the warp: its accesses before this time are ordered before ours
        self.warp_mark = 0
        self.known = None
        """By number of the thread, the same for those of all warps and for what is no thread (`marks`)."""
        self.request = None
        self.mask = FULL
        self.value = None
        self.site = -1
        self.answer = None
        self.copies = []
        self.groups = []
        self.products = []  # of the tensor cores, in flight
        self.greenlet = None
        self._hub = hub

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

    def ordered(self, other: int, time: int) -> bool:
        """Whether a barrier stands between what thread `other` of this block did at `time` and this thread now."""
        if time < self.grid.clock.block_time:
            return True
        if other // WARP == self.warp and time < self.seen[other % WARP]:
            return True
        return self.known is not None and bool(time < self.known[other])

    def learn(self, released) -> None:
        """What others have released is ordered before what this thread does now."""
        self.known = released.copy() if self.known is None else np.maximum(self.known, released)

    def released(self):
        """Per thread, the time before which its accesses are ordered before whoever acquires this one's arrival."""
        now = np.zeros(KNOWN, np.int64) if self.known is None else self.known.copy()
        first = self.warp * WARP
        now[first : first + WARP] = np.maximum(now[first : first + WARP], self.seen)
        now[self.index] = self.grid.clock.tick()
        return now

    def shared_tile(self, offset_bytes: int, shape, strides, dtype):
        """This thread's view of dynamic shared memory at a byte offset; strides in elements."""
        return self.grid.dynamic.view(self, offset_bytes, tuple(shape), tuple(strides), dtype)

    def load(self, array, index, n: int) -> tuple:
        """`n` consecutive elements of a shared view or tensor, in one aligned access."""
        return vectors.load(self, array, index, n)

    def store(self, array, index, values) -> None:
        """Write consecutive elements of a shared view or tensor, in one aligned access."""
        vectors.store(self, array, index, values)

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

    def mbarrier_wait(self, address: int, parity: int) -> None:
        mbarriers.wait(self, address, parity)

    def copy_bulk(self, target: int, source, n_bytes: int, barrier: int) -> None:
        """Start a copy from `source`, a tensor and the index of the first element, to a shared address."""
        mbarriers.copy_bulk(self, target, source, n_bytes, barrier)

    def named_barrier(self, name: int, threads: int, *, wait: bool) -> None:
        mbarriers.named(self, name, threads, wait=wait)

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
