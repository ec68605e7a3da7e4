"""What `numba.cuda` means to one simulated thread."""

from __future__ import annotations

import sys
from math import prod

from numba_attn.sim.errors import actor_text, fail
from numba_attn.sim.local import LocalArray
from numba_attn.sim.scalars import dtype_of, fused_multiply_add, maximum, minimum
from numba_attn.sim.shared import SharedMemory
from numba_attn.sim.threads import FULL, WARP, Thread

MAX_STATIC_BYTES = 48 * 1024  # more than that must be dynamic


class Dim3:
    """Three lengths or positions."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x: int, y: int, z: int):
        self.x, self.y, self.z = x, y, z


class Cuda:
    """The names of `numba.cuda` that kernels may use, bound to one thread."""

    def __init__(self, thread: Thread):
        grid = thread.grid
        x, y, _ = grid.block_dim
        i = thread.tid
        self._thread = thread
        self.threadIdx = Dim3(i % x, i // x % y, i // (x * y))
        self.blockIdx = Dim3(0, 0, 0)
        self.blockDim = Dim3(*grid.block_dim)
        self.gridDim = Dim3(*grid.grid_dim)
        self.laneid = thread.lane
        self.warpsize = WARP
        self.shared = SharedArrays(thread)
        self.local = LocalArrays(thread)
        self.atomic = Atomics(thread)

    def start_block(self) -> None:
        """The thread is in the block that runs now."""
        number = self._thread.block.number
        x, y, _ = self._thread.grid.grid_dim
        self.blockIdx.x = number % x
        self.blockIdx.y = number // x % y
        self.blockIdx.z = number // (x * y)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        fail(self._thread, f"cuda.{name} has no twin in the simulator")

    def grid(self, ndim: int):
        each = [
            getattr(self.blockIdx, axis) * getattr(self.blockDim, axis) + getattr(self.threadIdx, axis)
            for axis in "xyz"[:ndim]
        ]
        return each[0] if ndim == 1 else tuple(each)

    def gridsize(self, ndim: int):
        each = [getattr(self.gridDim, axis) * getattr(self.blockDim, axis) for axis in "xyz"[:ndim]]
        return each[0] if ndim == 1 else tuple(each)

    def syncthreads(self):
        self._thread.meet("syncthreads", FULL)

    def syncthreads_count(self, predicate):
        return self._thread.meet("syncthreads_count", FULL, predicate)

    def syncthreads_and(self, predicate):
        return self._thread.meet("syncthreads_and", FULL, predicate)

    def syncthreads_or(self, predicate):
        return self._thread.meet("syncthreads_or", FULL, predicate)

    def syncwarp(self, mask=FULL):
        self._thread.meet("syncwarp", mask)

    def shfl_sync(self, mask, value, src_lane):
        return self._thread.meet("shfl_sync", mask, (value, src_lane))

    def shfl_up_sync(self, mask, value, delta):
        return self._thread.meet("shfl_up_sync", mask, (value, delta))

    def shfl_down_sync(self, mask, value, delta):
        return self._thread.meet("shfl_down_sync", mask, (value, delta))

    def shfl_xor_sync(self, mask, value, lane_mask):
        return self._thread.meet("shfl_xor_sync", mask, (value, lane_mask))

    def all_sync(self, mask, predicate):
        return self._thread.meet("all_sync", mask, predicate)

    def any_sync(self, mask, predicate):
        return self._thread.meet("any_sync", mask, predicate)

    def eq_sync(self, mask, predicate):
        return self._thread.meet("eq_sync", mask, predicate)

    def ballot_sync(self, mask, predicate):
        return self._thread.meet("ballot_sync", mask, predicate)

    def match_any_sync(self, mask, value):
        return self._thread.meet("match_any_sync", mask, value)

    def match_all_sync(self, mask, value):
        return self._thread.meet("match_all_sync", mask, value)

    def activemask(self):
        return self._thread.meet("activemask", FULL)

    def lanemask_lt(self):
        return (1 << self.laneid) - 1

    def threadfence(self):
        """Fences order nothing here: races are judged by barriers."""

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, ns):
        """Time passes at barriers only."""

    @staticmethod
    def fma(a, b, c):
        return fused_multiply_add(a, b, c)

    @staticmethod
    def selp(condition, a, b):
        return a if condition else b

    @staticmethod
    def cbrt(x):
        return type(x)(float(x) ** (1 / 3) if x >= 0 else -(float(-x) ** (1 / 3)))

    @staticmethod
    def popc(x):
        return (int(x) & _mask(x)).bit_count()

    @staticmethod
    def ffs(x):
        x = int(x) & _mask(x)
        return (x & -x).bit_length()

    @staticmethod
    def clz(x):
        return _mask(x).bit_length() - (int(x) & _mask(x)).bit_length()

    @staticmethod
    def brev(x):
        width = _mask(x).bit_length()
        return int(f"{int(x) & _mask(x):0{width}b}"[::-1], 2)


def _mask(x) -> int:
    # Types of ints are not tracked: what fits into 32 bits is taken to have 32.
    return FULL if -(1 << 31) <= x <= FULL else (1 << 64) - 1


class LocalArrays:
    """`cuda.local`"""

    def __init__(self, thread: Thread):
        self._thread = thread

    def array(self, shape, dtype, alignment=None):
        return LocalArray(self._thread, shape, dtype)


class SharedArrays:
    """`cuda.shared`"""

    def __init__(self, thread: Thread):
        self._thread = thread

    def array(self, shape, dtype, alignment=None):
        thread = self._thread
        block = thread.block
        dtype = dtype_of(dtype)
        shape = tuple(map(int, shape)) if isinstance(shape, (tuple, list)) else (int(shape),)
        if shape == (0,):
            return block.dynamic.view(thread, 0, (block.dynamic.size // dtype.itemsize,), (1,), dtype)
        site = thread.grid.site(sys._getframe(1))
        if site not in block.static:
            size = dtype.itemsize * prod(shape)
            memory = SharedMemory(block.clock, size, dtype.itemsize, alignment or dtype.itemsize, "static shared")
            block.static[site] = (memory, shape, dtype, thread.index)
            total = sum(entry[0].size for entry in block.static.values())
            if total > MAX_STATIC_BYTES:
                fail(thread, f"{total} bytes of static shared memory: a block may have {MAX_STATIC_BYTES}")
        memory, first_shape, first_dtype, first = block.static[site]
        if (shape, dtype) != (first_shape, first_dtype):
            what = f"one shared array declared as {dtype} of shape {shape} here"
            fail(
                thread, f"{what} and as {first_dtype} of shape {first_shape} by {actor_text(thread.grid, first)}", first
            )
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return memory.view(thread, 0, shape, strides, dtype)


def _wrap(top):
    """Update of `inc`: counts up to `top`, then from 0."""
    return lambda old: 0 if old >= top else old + 1


def _unwrap(top):
    """Update of `dec`: counts down from `top`."""
    return lambda old: top if old == 0 or old > top else old - 1


class Atomics:
    """`cuda.atomic`: each returns the old value."""

    def __init__(self, thread: Thread):
        self._thread = thread

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        fail(self._thread, f"cuda.atomic.{name} has no twin in the simulator")

    def _update(self, array, index, update):
        if not hasattr(array, "atomic"):
            fail(self._thread, "an atomic operation on something that is neither shared nor global memory")
        return array.atomic(index, update)

    def add(self, array, index, value):
        return self._update(array, index, lambda old: old + value)

    def sub(self, array, index, value):
        return self._update(array, index, lambda old: old - value)

    def max(self, array, index, value):
        return self._update(array, index, lambda old: maximum(old, value))

    def min(self, array, index, value):
        return self._update(array, index, lambda old: minimum(old, value))

    nanmax, nanmin = max, min

    def and_(self, array, index, value):
        return self._update(array, index, lambda old: old & value)

    def or_(self, array, index, value):
        return self._update(array, index, lambda old: old | value)

    def xor(self, array, index, value):
        return self._update(array, index, lambda old: old ^ value)

    def inc(self, array, index, value):
        return self._update(array, index, _wrap(value))

    def dec(self, array, index, value):
        return self._update(array, index, _unwrap(value))

    def exch(self, array, index, value):
        return self._update(array, index, lambda old: value)

    def cas(self, array, index, old, value):
        return self._update(array, index, lambda now: value if now == old else now)

    def compare_and_swap(self, array, old, value):
        return self.cas(array, 0, old, value)
