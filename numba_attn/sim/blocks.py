"""One launch, and the blocks of it that run now: one, or those of a cluster."""

from __future__ import annotations

import numpy as np

from numba_attn.sim.clusters import ClusterBarrier
from numba_attn.sim.errors import threads_text
from numba_attn.sim.marks import COPIES, KNOWN, Clock
from numba_attn.sim.shared import SharedMemory

GROUP = 128


class Block:
    """A block that runs: its shared memory and barriers."""

    def __init__(self, grid: Grid, rank: int, number: int):
        self.grid = grid
        self.rank = rank
        self.number = number
        self.clock = grid.clocks[rank]
        self.clock.new_block()
        # The pool of dynamic shared memory is aligned to a row of banks.
        self.dynamic = SharedMemory(self.clock, grid.smem_bytes, grid.unit, 128, "dynamic shared")
        self.static = {}
        self.mbarriers = {}  # by address
        self.named = {}  # barriers that some warps have reached, by name
        self.passed = []  # and those that all have
        self.visits = {}
        """What other blocks did here last, by the "thread" that did it."""
        self.running = grid.block_threads

    @property
    def first(self) -> int:
        """Number of the first thread."""
        return self.rank * self.grid.stride

    @property
    def end(self) -> int:
        return self.first + self.grid.stride

    def __str__(self) -> str:
        x, y, z = self.grid.grid_dim
        if y * z == 1:
            return f"block {self.number}"
        return f"block {self.number} ({self.number % x}, {self.number // x % y}, {self.number // (x * y)})"


class Grid:
    """One launch: its dimensions, its threads and the blocks that run now."""

    def __init__(self, name: str, kernel_code, grid_dim, block_dim, smem_bytes: int, unit: int, cluster: int = 1):
        self.name = name
        self.kernel_code = kernel_code
        self.codes = {kernel_code}
        self.grid_dim = grid_dim
        self.block_dim = block_dim
        self.block_threads = block_dim[0] * block_dim[1] * block_dim[2]
        self.smem_bytes = smem_bytes
        self.unit = unit
        self.cluster = cluster
        """Blocks of a cluster."""
        # Warps and warpgroups have consecutive numbers.
        self.stride = COPIES if cluster == 1 else -(-self.block_threads // GROUP) * GROUP
        self.clocks = [Clock() for _ in range(cluster)]
        self.threads = {}  # by number
        self.number = -1  # of the cluster that runs
        self.blocks = []
        self.copies = []  # bulk copies in flight
        self.n_mbarriers = 0
        self.cluster_barrier = None
        self._sites = {}
        self._places = []
        self._site_of = {}

    def start(self, number: int) -> list[Block]:
        """The blocks of the next cluster, with fresh shared memory."""
        self.number = number
        self.blocks = [Block(self, rank, number * self.cluster + rank) for rank in range(self.cluster)]
        self.copies, self.n_mbarriers = [], 0
        self.cluster_barrier = ClusterBarrier(self)
        return self.blocks

    def nothing_known(self) -> np.ndarray:
        """What a `Thread.known` starts from: the last row is of what is over, no more."""
        return np.zeros((1 if self.cluster == 1 else 2, KNOWN), np.int64)

    def text(self, numbers) -> str:
        """Threads by their numbers: `thread 5 (warp 0, lane 5)`, in a cluster `block 1, threads 0-15; block 2, ...`."""
        if self.cluster == 1:
            return threads_text(numbers)
        of_block = {}
        for number in numbers:
            of_block.setdefault(self.blocks[number // self.stride], []).append(number % self.stride)
        return "; ".join(f"{block}, {threads_text(own)}" for block, own in of_block.items())

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
