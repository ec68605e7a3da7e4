"""Which keys count: the one place that decides it, for elements of S and for whole blocks of keys.

`Mask(is_causal)` gives the verbs of one configuration; a kernel unpacks them into closure names. All positions are
rows and columns of the whole matrix S.
"""

from __future__ import annotations

from numba_attn.device.verb import verb


@verb
def _attends_all(row, col, Lk):
    return col < Lk


@verb
def _attends_causal(row, col, Lk):
    return (col <= row) & (col < Lk)


@verb
def _end_all(row, Lk):
    return Lk


@verb
def _end_causal(row, Lk):
    return min(row + 1, Lk)


class Mask:
    """The verbs that say which keys a query attends.

    attends(row, col, Lk): whether key `col` counts for query `row`;
    end(row, Lk): first key past the last one that query `row` attends, non-decreasing in `row`.
    """

    def __init__(self, is_causal: bool):
        self.attends = _attends_causal if is_causal else _attends_all
        self.end = _end_causal if is_causal else _end_all
