"""What the threads that meet at a shuffle, vote or counting barrier get back."""

from __future__ import annotations

import numpy as np

from numba_attn.sim.errors import fail

WARP = 32


def _source(thread, values: dict, lane: int):
    """The value of a lane that takes part."""
    if lane not in values:
        file, line = thread.grid.site_line(thread.site)
        what = f"{thread.request} with mask {thread.mask:#x} reads lane {lane}, which does not take part"
        fail(thread, what, file=file, line=line)
    return values[lane]


def _shfl(thread, values):
    return _source(thread, values, thread.value[1] % WARP)


def _shfl_up(thread, values):
    lane = thread.lane - thread.value[1]
    return _source(thread, values, lane if lane >= 0 else thread.lane)


def _shfl_down(thread, values):
    lane = thread.lane + thread.value[1]
    return _source(thread, values, lane if lane < WARP else thread.lane)


def _shfl_xor(thread, values):
    lane = thread.lane ^ thread.value[1]
    return _source(thread, values, lane if lane < WARP else thread.lane)


_SHUFFLES = {"shfl_sync": _shfl, "shfl_up_sync": _shfl_up, "shfl_down_sync": _shfl_down, "shfl_xor_sync": _shfl_xor}


def _bits(value):
    """Key by which a match compares values."""
    return value.tobytes() if isinstance(value, np.generic) else value


def _ballot(lanes) -> int:
    return sum(1 << thread.lane for thread in lanes if thread.value)


def _eq(lanes) -> bool:
    return len({bool(thread.value) for thread in lanes}) == 1


def _match_any(lanes) -> list[int]:
    keys = [_bits(thread.value) for thread in lanes]
    return [sum(1 << other.lane for other, k in zip(lanes, keys, strict=True) if k == key) for key in keys]


def _match_all(lanes, present):
    same = len({_bits(thread.value) for thread in lanes}) == 1
    return (present if same else 0, same)


_UNIFORM = {
    "all_sync": lambda lanes, present: all(thread.value for thread in lanes),
    "any_sync": lambda lanes, present: any(thread.value for thread in lanes),
    "eq_sync": lambda lanes, present: _eq(lanes),
    "ballot_sync": lambda lanes, present: _ballot(lanes),
    "match_all_sync": _match_all,
    "activemask": lambda lanes, present: present,
    "exchange": lambda lanes, present: {thread.lane: thread.value for thread in lanes},
    "cluster_arrive": lambda lanes, present: None,
    "cluster_wait": lambda lanes, present: None,
}
"""Collectives whose result is the same in all lanes."""

WARP_WIDE = {"syncwarp", "match_any_sync", *_SHUFFLES, *_UNIFORM}

BLOCK_WIDE = {
    "syncthreads": lambda values: None,
    "syncthreads_count": lambda values: sum(1 for value in values if value),
    "syncthreads_and": lambda values: int(all(values)),
    "syncthreads_or": lambda values: int(any(values)),
}
"""Block barriers: what they return, of the values that the threads bring."""


def answer(request: str, present: int, lanes) -> list:
    """Per lane, the result of a warp collective other than the barrier."""
    if request in _SHUFFLES:
        shuffle = _SHUFFLES[request]
        values = {thread.lane: thread.value[0] for thread in lanes}
        return [shuffle(thread, values) for thread in lanes]
    if request == "match_any_sync":
        return _match_any(lanes)
    return [_UNIFORM[request](lanes, present)] * len(lanes)
