"""`e` of unrolled verbs in the simulator: the same operations on one thread's numbers."""

from __future__ import annotations

import functools

import numpy as np

from numba_attn.device import fragments
from numba_attn.device.wgmma_fragments import GROUP_ROWS, GROUP_THREADS, Matrix, of_registers, sum_of_products

ALL_LANES = 0xFFFFFFFF
_HALF_BYTES, _WORD_BYTES = 2, 4
_LEAST_EXPONENT = -126


class Evaluator:
    """`e` in the simulator: the same operations on one thread's numbers."""

    def __init__(self, thread):
        self.thread = thread

    def number(self, x: float):
        return np.float32(x)

    def fma(self, a, b, c):
        return np.float32(float(a) * float(b) + float(c))

    def max(self, a, b):
        return np.fmax(np.float32(a), np.float32(b))

    def max_magnitude(self, a, b):
        return np.maximum(np.abs(np.float32(a)), np.abs(np.float32(b)))

    def ex2(self, x):
        return np.float32(0) if x < _LEAST_EXPONENT else np.exp2(np.float32(x))

    def where(self, condition, a, b):
        return np.float32(a if condition else b)

    def shfl_xor(self, x, distance: int):
        return self.thread.exchange(ALL_LANES, x)[self.thread.lane ^ distance]

    def halves(self, low, high):
        return int(np.array([low, high], np.float32).astype(np.float16).view(np.uint32)[0])

    def unpack(self, packed) -> tuple:
        return tuple(np.float32(x) for x in fragments.halves(packed))

    def count_magnitudes(self, counts, pair, least):
        counts, pair, least = map(fragments.halves, (counts, pair, least))
        return int((counts + (np.abs(pair) >= least)).astype(np.float16).view(np.uint32)[0])

    def ldmatrix(self, address, transposed: bool = False) -> list:
        memory = self.thread.block.dynamic
        pool = self.thread.shared_tile(0, (memory.size // _HALF_BYTES,), (1,), "float16")
        row = self.thread.load(pool, (int(address) // _HALF_BYTES,), 8)
        rows = self.thread.exchange(ALL_LANES, row)
        if "registers" not in rows:
            rows["registers"] = fragments.ldmatrix([rows[lane] for lane in range(32)], transposed)
        return [int(register) for register in rows["registers"][self.thread.lane]]

    def mma(self, a, b, c) -> list:
        lanes = self.thread.exchange(ALL_LANES, (a, b, c))
        if "registers" not in lanes:
            operands = ([lanes[lane][i] for lane in range(32)] for i in range(3))
            lanes["registers"] = fragments.mma(*operands)
        return list(lanes["registers"][self.thread.lane])

    def address(self, tensor, *index):
        return tensor, index

    def copy_async(self, target, source, step_bytes: int) -> None:
        tensor, (*lead, last) = source
        pool = self.thread.shared_tile(0, (self.thread.block.dynamic.size // _WORD_BYTES,), (1,), "uint32")
        to, step = (int(target) + step_bytes) // _WORD_BYTES, step_bytes // _WORD_BYTES
        self.thread.copy_async(pool, (to,), tensor, (*lead, last + step), 4, 4)

    def copies_async_if(self, condition, target, copies) -> None:
        for to_bytes, (tensor, (*lead, last)), offset, from_bytes in copies if condition else ():
            source = tensor, (*lead, last + (int(offset) + from_bytes) // _WORD_BYTES)
            self.copy_async(int(target) + to_bytes, source, 0)

    def load(self, tensor, index, n: int, behind: int = 0) -> list:
        *lead, last = index
        return list(self.thread.load(tensor, (*lead, last + behind), n))

    def store(self, tensor, index, values, condition=None, behind: int = 0) -> None:
        if condition is None or condition:
            *lead, last = index
            self.thread.store(tensor, (*lead, last + behind), values)

    def store_if(self, condition, tensor, index, values, behind: int = 0) -> None:
        self.store(tensor, index, values, condition, behind)

    def wgmma(self, columns: int, chains: list, *, wait: bool = True) -> list:
        group = self.thread.meet_warpgroup((columns, chains))
        if group.result is None:
            group.result = _sums(self.thread, group)
        registers = [x for chain in chains for left, _ in chain if not isinstance(left, Matrix) for x in left]
        sums = self.thread.start_products(group, registers, list(group.result[self.thread.index % GROUP_THREADS]))
        if wait:
            sums = self.thread.wait_products(0, sums, registers)
        return [sums[i : i + columns // 2] for i in range(0, len(sums), columns // 2)]

    def wgmma_wait(self, pending: int, sums: list, registers: list) -> list:
        return self.thread.wait_products(pending, sums, registers)

    def copy_bulk(self, target, source, step_bytes: int, n_bytes: int, barrier) -> None:
        tensor, (*lead, last) = source
        self.thread.copy_bulk(target, (tensor, (*lead, last + step_bytes // _WORD_BYTES)), n_bytes, barrier)

    def mbarrier_wait(self, barrier, parity) -> None:
        self.thread.mbarrier_wait(barrier, parity)

    def mbarrier_arrive(self, barrier, condition) -> None:
        if condition:
            self.thread.mbarrier_arrive(barrier)

    def mbarrier_wait_cluster(self, barrier, parity) -> None:
        self.thread.mbarrier_wait(barrier, parity, of_cluster=True)

    def mbarrier_arrive_at(self, barrier, rank, condition, *, releases: bool = True) -> None:
        if condition:
            self.thread.mbarrier_arrive_at(barrier, rank, releases=releases)

    def copy_bulk_to(self, target, source, n_bytes: int, barrier, rank) -> None:
        self.thread.copy_bulk_to(target, source, n_bytes, barrier, rank)

    def store_shared(self, address, words: list) -> None:
        words = [int(np.float32(x).view(np.uint32)) if isinstance(x, float | np.floating) else x for x in words]
        self.thread.store_shared(address, words)

    def load_shared(self, address, n: int) -> list:
        return self.thread.load_shared(address, n)


def _sums(thread, group) -> np.ndarray:
    """[128, registers] of all chains, of what the threads of a warpgroup bring."""
    (columns, chains), warps = group.values[0], range(GROUP_ROWS // fragments.M)

    def shape_of(chains) -> list:
        return [[(left if isinstance(left, Matrix) else None, right) for left, right in chain] for chain in chains]

    group.require_equal(thread, [(columns, shape_of(chains)) for columns, chains in group.values])

    @functools.cache
    def matrix_of(matrix: Matrix, n: int, is_left: bool) -> np.ndarray:
        chunks = matrix.chunks(n)
        found = matrix.of_chunks(group.halves(thread, chunks))
        if is_left and not matrix.transposed:
            for warp, rows in zip(warps, np.split(chunks, len(warps)), strict=True):
                group.mark(thread, rows, [warp])
        else:
            group.mark(thread, chunks, warps)
        return found

    def left_of(chain: int, step: int, left) -> np.ndarray:
        if isinstance(left, Matrix):
            return matrix_of(left, GROUP_ROWS, True)
        return of_registers([chains[chain][step][0] for _, chains in group.values])

    sums = []
    for i, chain in enumerate(chains):
        lefts = [left_of(i, step, left) for step, (left, _) in enumerate(chain)]
        sums.append(sum_of_products(lefts, [matrix_of(right, columns, False) for _, right in chain]))
    return np.concatenate(sums, axis=1)
