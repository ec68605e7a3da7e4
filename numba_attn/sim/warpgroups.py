"""The threads of a warpgroup that meet at a product, and the products that are in flight.

What a product reads of shared memory is read by the "thread" `TENSOR_CORES` + warp, until that warp waits for it.
"""

from __future__ import annotations

import numpy as np

from numba_attn.sim.errors import caller_line, fail, file_line
from numba_attn.sim.marks import TENSOR_CORES
from numba_attn.sim.operands import Operands

CHUNK_BYTES = 16


class Warpgroup:
    """128 threads at one product."""

    def __init__(self, threads):
        self.threads = threads
        self.values = [thread.value for thread in threads]
        clock = threads[0].block.clock
        self.time = clock.tick()
        clock.tick()
        self.operands = Operands(threads)
        self.result = None
        """What the first thread that goes on makes of the values, for all."""

    def require_equal(self, thread, values: list) -> None:
        """Fail unless all threads ask for the same product."""
        for other, value in zip(self.threads, values, strict=True):
            if value != values[0]:
                what = f"the threads of a warpgroup ask for different products: {value} and {values[0]}"
                fail(thread, what, other.index)

    def halves(self, thread, chunks: np.ndarray) -> np.ndarray:
        """[row, chunk, half] of the chunks at these addresses [row, chunk]."""
        memory = thread.block.dynamic
        if chunks.min() < 0 or chunks.max() > memory.size - CHUNK_BYTES or (chunks % CHUNK_BYTES).any():
            fail(thread, f"an operand at bytes {chunks.min()} to {chunks.max() + CHUNK_BYTES} of {memory.size}")
        cells = (chunks[..., None] // memory.unit + np.arange(CHUNK_BYTES // memory.unit)).ravel().tolist()
        self.operands.check(thread, memory, cells, "an operand")
        values = [memory.cells[cell] for cell in cells]
        raw = b"".join(value if type(value) is bytes else value.tobytes() for value in values)
        return np.frombuffer(raw, np.float16).reshape(*chunks.shape, CHUNK_BYTES // 2)

    def mark(self, thread, chunks: np.ndarray, warps) -> None:
        """Remember that the tensor cores have read the chunks for these warps of the group."""
        memory, first = thread.block.dynamic, self.threads[0].warp
        cells = (np.unique(chunks)[:, None] // memory.unit + np.arange(CHUNK_BYTES // memory.unit)).ravel().tolist()
        readers = dict.fromkeys((TENSOR_CORES + first + warp for warp in warps), self.time)
        for cell in cells:
            if memory.readers[cell] is None:
                memory.readers[cell] = readers.copy()
            else:
                memory.readers[cell].update(readers)


class InFlightProduct:
    """One statement of products as one thread knows it."""

    def __init__(self, thread, group: Warpgroup, registers: list):
        self.time = group.time
        self.registers = registers
        self.is_done = False
        self.file, self.line = caller_line(thread)
        thread.products.append(self)


class Sum:
    """A register of a sum in flight: whoever computes with it before the wait fails."""

    __slots__ = ("thread", "product", "value")

    def __init__(self, thread, product: InFlightProduct, value):
        self.thread, self.product, self.value = thread, product, value

    def fail(self, *_):
        place = file_line(self.product.file, self.product.line)
        fail(self.thread, f"use of a sum of products, issued at {place}, before the wait for it")

    __float__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = fail
    __truediv__ = __lt__ = __le__ = __gt__ = fail


def wait(thread, pending: int, sums: list, registers: list) -> list:
    """The values of `sums`, once at most `pending` of this thread's statements are in flight."""
    while len(thread.products) > pending:
        product = thread.products.pop(0)
        product.is_done = True
        if not set(product.registers) <= set(registers):
            place = file_line(product.file, product.line)
            fail(thread, f"a wait for products, issued at {place}, whose left registers may be overwritten before it")
        released = thread.grid.nothing_known()
        released[:, TENSOR_CORES + thread.warp] = product.time + 1
        thread.learn(released)
    for x in sums:
        if isinstance(x, Sum) and not x.product.is_done:
            x.fail()
    return [x.value if isinstance(x, Sum) else x for x in sums]
