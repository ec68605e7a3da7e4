"""Marks: when and by which thread a cell of shared memory was last written, in one integer; and the clock of a launch.

A mark is `time * MAX_THREADS + thread`. Time advances at barriers only, so that marks compare as the times do.
"""

from __future__ import annotations

MAX_THREADS = 1 << 12
ATOMIC = MAX_THREADS - 1  # "thread" of a mark: several threads may have written, all atomically
NEVER = -MAX_THREADS
COPIES = 1 << 10  # "thread" that the bulk copies of the first mbarrier are; those of the others follow
TENSOR_CORES = 1 << 11  # and that the tensor cores are which read for warp 0
KNOWN = TENSOR_CORES + 32
IN_FLIGHT = (1 << 62) + ATOMIC - 1  # later than all other marks, by no thread


class Clock:
    """Time of a launch: the number of barriers passed, by warps or blocks."""

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
