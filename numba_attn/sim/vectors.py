"""Accesses of several consecutive elements, and asynchronous copies, on shared views and tensors."""

from __future__ import annotations

from numba_attn.sim.errors import caller_line, fail
from numba_attn.sim.marks import IN_FLIGHT
from numba_attn.sim.shared import InFlight
from numba_attn.sim.tensors import Tensor
from numba_attn.sim.views import View

WORD = 4


def load(thread, array, index, n: int) -> tuple:
    """Elements `array[..., i], ..., array[..., i + n - 1]` in one access."""
    values = array.run(index, n) if isinstance(array, View) else None
    if values is None:
        *lead, first = _vector(thread, array, index, n)
        values = tuple([array[(*lead, first + k)] for k in range(n)])
    return values


def store(thread, array, index, values) -> None:
    """Write `values` to consecutive elements in one access."""
    values = tuple(values)
    index = _vector(thread, array, index, len(values))
    for k, value in enumerate(values):
        array[(*index[:-1], index[-1] + k)] = value


def copy_async(thread, target, target_index, source, source_index, n: int, valid: int) -> None:
    """Start copying `valid` elements of `source`, then zeros, to `n` elements of the shared `target`."""
    valid = int(valid)
    if not 0 <= valid <= n:
        fail(thread, f"an asynchronous copy of {n} elements with {valid} of them valid")
    n_bytes = n * target.dtype.itemsize
    if n_bytes not in (4, 8, 16):
        fail(thread, f"an asynchronous copy of {n_bytes} bytes: 4, 8 and 16 are possible")
    if not isinstance(target, View):
        fail(thread, "an asynchronous copy to something that is not shared memory")
    first = target.run_cell(target_index, n)
    if first is None:
        target_index = _vector(thread, target, target_index, n)
        first = target.element(target_index)
    values = [target.scalar(0)] * n
    if valid:
        *lead, start = _vector(thread, source, source_index, n, valid)
        for k in range(valid):
            values[k] = target.scalar(source[(*lead, start + k)])
    memory = target.memory
    span = target.dtype.itemsize // memory.unit
    file, line = caller_line(thread)
    block_mark = memory.clock.block_mark
    for k, value in enumerate(values):
        raw = value.tobytes() if span > 1 else b""
        for i in range(span):
            cell = first + k * span + i
            if memory.readers[cell] or memory.marks[cell] >= block_mark:
                *lead, start = target_index if isinstance(target_index, tuple) else (target_index,)
                index = (*lead, start + k)
                memory.check_write(target, thread, cell, index, "asynchronous copy")
            piece = raw[i * memory.unit : (i + 1) * memory.unit] if span > 1 else value
            memory.cells[cell] = InFlight(piece, thread.index, file, line)
            memory.marks[cell] = IN_FLIGHT
            thread.copies.append((memory, cell))


def load_at(thread, address: int, n: int) -> tuple:
    """`n` fp32 at an address of dynamic shared memory, in one aligned access."""
    return load(thread, _pool(thread, "float32"), (_place(thread, address, n),), n)


def store_at(thread, address: int, words) -> None:
    """Write 32-bit words to an address of dynamic shared memory, in one aligned access."""
    pool, first = _pool(thread, "uint32"), _place(thread, address, len(words))
    for place, word in enumerate(words, first):
        pool[place] = word


def _pool(thread, dtype: str) -> View:
    """This thread's view of all dynamic shared memory."""
    if dtype not in thread.pools:
        thread.pools[dtype] = thread.shared_tile(0, (thread.block.dynamic.size // WORD,), (1,), dtype)
    return thread.pools[dtype]


def _place(thread, address: int, n: int) -> int:
    """Number of the word at an address."""
    if n not in (1, 2, 4):
        fail(thread, f"an access of {n} words of shared memory: 1, 2 and 4 are possible")
    if address % (WORD * n):
        fail(thread, f"misaligned access to {n} words at byte {address} of shared memory")
    return int(address) // WORD


def land(thread, copies) -> None:
    """What has arrived counts as written by the thread that waited, now."""
    for memory, cell in copies:
        memory.cells[cell] = memory.cells[cell].value
        memory.marks[cell] = memory.clock.mark + thread.index


def _vector(thread, array, index, n: int, valid: int | None = None) -> tuple:
    """The index as a tuple, after the checks of an access of `n` elements of which the first `valid` exist."""
    index = index if isinstance(index, tuple) else (index,)
    count = n if valid is None else valid
    if not isinstance(array, (View, Tensor)):
        fail(thread, "a vector access to something that is neither a shared tile nor a tensor")
    if n > 1 and array.shape and _last_stride(array) != 1:
        fail(thread, f"vector access to {array.text(index)}, whose last stride is {_last_stride(array)}")
    first = array.element(index)
    if count > 1:
        array.element((*index[:-1], index[-1] + count - 1))
    n_bytes = n * array.dtype.itemsize
    if isinstance(array, View):
        address = first * array.memory.unit
        if array.memory.alignment % n_bytes:
            fail(thread, f"vector access to {array.text(index)}, declared with alignment {array.memory.alignment}")
    else:
        address = array.address() + sum(int(i) * s for i, s in zip(first, array.array.strides, strict=True))
    if address % n_bytes:
        what = f"misaligned vector access to {array.text(index)}: {n} elements at byte {address}" + (
            "" if isinstance(array, View) else " of memory"
        )
        fail(thread, f"{what}, not a multiple of {n_bytes}")
    return index


def _last_stride(array) -> int:
    if isinstance(array, View):
        return array.strides[-1] * array.memory.unit // array.dtype.itemsize
    return array.strides[-1]
