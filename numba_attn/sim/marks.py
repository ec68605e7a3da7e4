"""Marks: when and by which thread a cell of shared memory was last written, in one integer; and the clock of a block.

A mark is `time * MAX_THREADS + thread`. Time advances at barriers only, so that marks compare as the times do. Threads
are numbered through the blocks of a cluster, whose clocks differ: a time is compared with others of the same thread.
"""

from __future__ import annotations

MAX_THREADS = 1 << 12
ATOMIC = MAX_THREADS - 1  # "thread" of a mark: several threads may have written, all atomically
NEVER = -MAX_THREADS
COPIES = 1 << 11  # "thread" that the bulk copies of the first mbarrier are; those of the others follow
MAX_MBARRIERS = 1 << 9
TENSOR_CORES = COPIES + MAX_MBARRIERS  # and that the tensor cores are which read for warp 0
KNOWN = TENSOR_CORES + COPIES // 32
IN_FLIGHT = (1 << 62) + ATOMIC - 1  # later than all other marks, by no thread
LANDED = 1 << 40  # added to times of bulk copies: no barrier of the block orders them, but the wait for them
UNENDED = 1 << 48  # time of a read of shared memory that is not over


class Clock:
    """Time of a block: the number of barriers passed, by warps or all."""

    __slots__ = ("time", "mark", "block_time", "block_mark")

    def __init__(self):
        self.time = 0
        self.tick()
        self.new_block()

    def tick(self) -> int:
        """A barrier has been passed."""
        self.time += 1
        self.mark = self.time * MAX_THREADS
        return self.time

    def new_block(self) -> None:
        """Everything before now is ordered before everything after."""
        self.block_time = self.tick()
        self.block_mark = self.mark
