"""What blocks of a cluster do to each other: arrivals at barriers and copies into the memory of another block.

Each block must be there for it: its barriers made, with the fence, before an arrival of theirs that the visitor knows
of, and a thread of its own must know that the visit is over before it ends, whichever block happens to run first here.
A copy reads its source while it is in flight, so that whoever writes there fails.
"""

from __future__ import annotations

import numpy as np

from numba_attn.sim.errors import SimulationError, actor_text, caller_line, fail, file_line
from numba_attn.sim.marks import UNENDED
from numba_attn.sim.mbarriers import COPY_BYTES, FULL, BulkCopy, Mbarrier, check_made, check_place, start_copy
from numba_attn.sim.operands import check_operand


class ClusterBarrier:
    """The barrier of all threads of a cluster, in two halves."""

    def __init__(self, grid):
        self.grid = grid
        self.phase = 0
        self.released = None
        """What all threads did before they arrived at the phase before."""
        self._missing = self._all = grid.cluster * grid.block_threads
        self._arrived = grid.nothing_known()

    def arrive(self, thread) -> None:
        np.maximum(self._arrived, thread.released(), out=self._arrived)
        self._missing -= 1
        if self._missing == 0:
            self.phase += 1
            self._missing, self.released, self._arrived = self._all, self._arrived, self.grid.nothing_known()


def arrive(thread) -> None:
    if thread.cluster_phase is not None:
        fail(thread, "cluster_arrive once more, without cluster_wait between")
    barrier = thread.grid.cluster_barrier
    thread.cluster_phase = barrier.phase
    barrier.arrive(thread)


def wait(thread) -> None:
    if thread.cluster_phase is None:
        fail(thread, "cluster_wait without cluster_arrive before")
    if may_pass(thread):
        thread.cluster_phase = None
    else:
        thread.meet("cluster barrier", FULL)
    thread.learn(thread.grid.cluster_barrier.released)


def may_pass(thread) -> bool:
    """Whether all threads have arrived at the phase at which this one has."""
    return thread.grid.cluster_barrier.phase != thread.cluster_phase


def _visited(thread, rank: int, address: int, what: str):
    """The block of a rank and its barrier, if this thread may use it."""
    grid = thread.grid
    if not 0 <= rank < grid.cluster:
        fail(thread, f"{what} in block {rank} of a cluster of {grid.cluster}")
    block = grid.blocks[rank]
    if block.running == 0:
        fail(thread, f"{what} in {block}, which has ended")
    barrier = block.mbarriers.get(address)
    if barrier is None:
        fail(thread, f"{what} in {block}: mbarrier {address}, which nobody has initialised")
    check_made(thread, barrier, f" of {block}")
    return block, barrier


def arrive_at(thread, address: int, rank: int, *, releases: bool) -> None:
    """One arrival; without `releases` it tells only what is over."""
    block, barrier = _visited(thread, int(rank), address, f"an arrival at mbarrier {address}")
    barrier.count(thread, 0)
    time, released = thread.block.clock.time, thread.released()
    if not releases and thread.grid.cluster > 1:
        released[0] = 0
    barrier.add(released, is_remote=block is not thread.block)
    barrier.turn()
    if block is not thread.block:
        place = file_line(*caller_line(thread))
        what = f"an arrival at mbarrier {address}, issued at {place} by {actor_text(thread.grid, thread.index)}"
        block.visits[thread.index] = (time, what, *caller_line(thread))


class CopyBetween(BulkCopy):
    """A bulk copy from the shared memory of one block to that of another, or the same."""

    def __init__(self, thread, source: slice, block, first: int, barrier: Mbarrier, n_bytes: int):
        memory = thread.block.dynamic
        super().__init__(thread, block.dynamic, first, memory.cells[source], barrier, n_bytes)
        self.source, self.source_cells = memory, source
        self.blocks = (thread.block, block)

    def land(self) -> None:
        super().land()
        writer, time = self.barrier.writer, self.landed_at
        others = [copy for copy in self.grid.copies if isinstance(copy, CopyBetween) and copy.barrier is self.barrier]
        still = {cell for copy in others if copy.source is self.source for cell in _range(copy.source_cells)}
        for cell in _range(self.source_cells):
            if cell not in still:
                self.source.readers[cell][writer] = time
        for block in self.blocks:
            block.visits[writer] = (time, str(self), self.file, self.line)


def _range(cells: slice) -> range:
    return range(cells.start, cells.stop)


def copy_bulk_to(thread, target: int, source: int, n_bytes: int, address: int, rank: int) -> None:
    """Start a copy from a shared address to one of a block of the cluster, counted by a barrier there."""
    block, barrier = _visited(thread, int(rank), address, "a bulk copy")
    memory = thread.block.dynamic
    check_place(thread, block, target, n_bytes)
    if not 0 <= source <= memory.size - n_bytes:
        fail(thread, f"a bulk copy from bytes {source} to {source + n_bytes} of {memory.size} of shared memory")
    if source % COPY_BYTES:
        fail(thread, f"a bulk copy with source {source}, not a multiple of {COPY_BYTES}")
    cells = slice(source // memory.unit, (source + n_bytes) // memory.unit)
    check_operand(thread, [thread], memory, _range(cells), "the source of a bulk copy")
    copy = CopyBetween(thread, cells, block, target // memory.unit, barrier, n_bytes)
    start_copy(thread, copy)
    for cell in _range(cells):
        readers = memory.readers[cell]
        if readers is None:
            readers = memory.readers[cell] = {}
        readers[barrier.writer] = UNENDED


def end_block(thread) -> None:
    """`thread`, the last of its block, has returned: nothing of the others may come any more."""
    block, grid = thread.block, thread.grid
    for copy in grid.copies:
        if block in copy.blocks:
            what = f"the block ended with {copy} in flight; kernel `{grid.name}`, {block}"
            raise SimulationError(what, copy.file, copy.line, (copy.thread % grid.stride,))
    for barrier in block.mbarriers.values():
        if barrier.n_bytes:
            fail(thread, f"the block ended with {barrier}")
    threads = [other for other in grid.threads.values() if other.block is block]
    for actor, (time, what, file, line) in block.visits.items():
        if not any(other.ordered(actor, time, -1) for other in threads):
            what = f"the block may end before {what}, which none of its threads has waited for"
            fail(thread, what, actor, file=file, line=line)
