"""`SimulationError` and the sentences it is made of: what happened, at which line, in which block and threads."""

from __future__ import annotations

import linecache
import os
import sys

from numba_attn.sim.marks import COPIES, TENSOR_CORES

MAX_LISTED = 8  # ranges of threads or places of a message; a warp that falls apart lane by lane has 32


class SimulationError(Exception):
    """A kernel did something that a GPU would answer with wrong values, a hang or a fault.

    The message is one paragraph. `file` and `line` are those of the kernel's or verb's source line (None where no
    line is at fault), `threads` the linear numbers, each within its block, of the threads involved.
    """

    def __init__(self, message: str, file: str | None = None, line: int | None = None, threads: tuple[int, ...] = ()):
        super().__init__(message)
        self.file = file
        self.line = line
        self.threads = threads


def fail(thread, what: str, *others: int, file: str | None = None, line: int | None = None) -> None:
    """Raise `SimulationError` for `what` at the line that `thread` executes now.

    `others` are further threads involved; `file` and `line` stand in where the thread has left the kernel.
    """
    chain = stack(thread.grid, sys._getframe(1))
    where = _where(chain, thread.grid)
    if chain:
        file, line = chain[0][0].co_filename, chain[0][1]
    elif file:
        where += f", {file_line(file, line)}"
    numbers = tuple(dict.fromkeys(number for number in (thread.index, *others) if number < COPIES))
    threads = tuple({number % thread.grid.stride: None for number in numbers})
    raise SimulationError(f"{what}; {where}; {places_text(thread, numbers)}", file, line, threads)


def fail_from(thread, error: Exception) -> None:
    """Raise `SimulationError` for an ordinary exception that `thread`'s kernel code raised."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in thread.grid.codes:
            frames.insert(0, (traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    where = _where(frames, thread.grid)
    file, line = (frames[0][0].co_filename, frames[0][1]) if frames else (None, None)
    place = f"{where}; {places_text(thread, (thread.index,))}"
    raise SimulationError(f"{type(error).__name__}: {error}; {place}", file, line, (thread.tid,)) from error


def stack(grid, frame) -> list[tuple]:
    """(code, line) of the kernel and verb calls under way, innermost first."""
    chain = []
    while frame is not None:
        if frame.f_code in grid.codes:
            chain.append((frame.f_code, frame.f_lineno))
            if frame.f_code is grid.kernel_code:
                break
        frame = frame.f_back
    return chain


def name_of(thread, value) -> str:
    """The name by which the kernel or verb under way knows `value`, or ''."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in thread.grid.codes:
            return next((name for name, local in frame.f_locals.items() if local is value), "")
        frame = frame.f_back
    return ""


def caller_line(thread) -> tuple[str, int]:
    """File and line of the kernel or verb that calls a twin now."""
    frame = sys._getframe(2)
    while frame.f_code not in thread.grid.codes:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _where(chain, grid) -> str:
    if not chain:
        return f"kernel `{grid.name}`"
    code, line = chain[0]
    text = linecache.getline(code.co_filename, line).strip()
    place = f"{file_line(code.co_filename, line)}" + (f" (`{text}`)" if text else "")
    if len(chain) == 1:
        return f"kernel `{grid.name}`, {place}"
    callers = ", ".join(f"{caller.co_name} {file_line(caller.co_filename, at)}" for caller, at in chain[1:])
    return f"kernel `{grid.name}`, verb `{code.co_name}`, {place}, called from {callers}"


def file_line(file: str, line: int) -> str:
    """`path:line`, the path relative to the working directory where that is shorter."""
    try:
        relative = os.path.relpath(file)
    except ValueError:  # another drive
        relative = file
    return f"{min(relative, file, key=len)}:{line}"


def actor_text(grid, number: int) -> str:
    """Who a thread of a mark is."""
    if COPIES <= number < TENSOR_CORES:
        return "a bulk copy"
    number, what = (number, "thread") if number < COPIES else ((number - TENSOR_CORES) * 32, "warp")
    rank, tid = divmod(number, grid.stride)
    who = f"thread {tid}" if what == "thread" else f"the tensor cores for warp {tid // 32}"
    return who if grid.cluster == 1 else f"{who} of {grid.blocks[rank]}"


def places_text(thread, numbers) -> str:
    """The block and the threads involved."""
    text = thread.grid.text(numbers)
    return text if thread.grid.cluster > 1 else f"{thread.block}, {text}"


def threads_text(numbers) -> str:
    """`thread 5 (warp 0, lane 5)` or `threads 0-15, 17`."""
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return f"thread {numbers[0]} (warp {numbers[0] // 32}, lane {numbers[0] % 32})"
    ranges = []
    for n in numbers:
        if ranges and ranges[-1][1] == n - 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges[:MAX_LISTED])
    return f"threads {text}" + (" ..." if len(ranges) > MAX_LISTED else "")
