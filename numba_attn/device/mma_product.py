"""Verbs on tiles of halves in a product whose operands are both images: C += factor A B.

A warp owns a patch of C: `m_rows` rows, 16 m each, and panels of 64 columns. C[p m + i, j, r], register r of the
fragment of rows 16 i .. + 15 and columns 8 j .. + 7 of panel p, is as in `mma_tile`: panels stand where rows do. Its
operands are tiles of `TILE` rows and `TILE` columns, images of `split_half`, that come to shared memory in slabs.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_attn.device.fragments import K, M, N
from numba_attn.device.math import quotient
from numba_attn.device.mma_tile import half_of, lane_of_chunks, lane_of_rows, products_of
from numba_attn.device.split_half import (
    BLOCK_COLUMNS,
    LOWEST,
    ROW_BYTES,
    UNSCALE,
    WORD_BYTES,
    image_bytes,
)
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb

HALVES, PRODUCTS = 2, 3
TILE = BLOCK_COLUMNS
"""Rows and columns of a tile: one block of columns."""
TILE_BYTES = image_bytes(TILE, TILE)
PLANE_BYTES = TILE_BYTES // HALVES
TILE_WORDS = TILE_BYTES // WORD_BYTES


def place(heaviest_first: bool):
    """The verb `place(block, heads, m_blocks, d_blocks)`: which head, block of rows and of columns.

    Under causality the last rows have the most keys: those of all heads come first, so that no long block comes last.
    """

    @verb
    def place(block, heads, m_blocks, d_blocks):
        rows = quotient(block, d_blocks)
        if heaviest_first:
            m_block = quotient(rows, heads)
            return rows - m_block * heads, m_blocks - 1 - m_block, block - rows * d_blocks
        head = quotient(rows, m_blocks)
        return head, rows - head * m_blocks, block - rows * d_blocks

    return place


@dataclass(frozen=True)
class Slab:
    """What a slot of the ring holds: of tiles of A, and behind them of B, what belongs to 64 or 32 columns of the sum.

    A tile's part has two planes, as the tile has. That of half a tile whose columns are summed over has rows r and
    r + 4 of each eight in one line of 128 bytes: where one has chunks 0 .. 3 in the image, the other has 4 .. 7. So
    chunks keep their place, and `ldmatrix` its banks.
    """

    columns: int
    transposed: bool
    """B has rows along the sum: those of V."""
    threads: int

    @property
    def parts(self) -> int:
        """Of a tile."""
        return TILE // self.columns

    @property
    def plane_bytes(self) -> int:
        return PLANE_BYTES // self.parts

    @property
    def tile_bytes(self) -> int:
        return HALVES * self.plane_bytes

    @property
    def turns(self) -> int:
        """Chunks that a thread copies of a plane: in lines that follow each other, one address for all."""
        turns, rest = divmod(self.plane_bytes, 16 * self.threads)
        if rest or (self.parts > 1 and turns not in (1, 2, 4)):
            raise ValueError(f"{self.threads} threads cannot share {self.plane_bytes} bytes")
        return turns

    def row_bytes(self, row: int, is_right: bool) -> int:
        """From the first row to another one, in eights."""
        return row * ROW_BYTES // (1 if is_right and self.transposed else self.parts)


def lanes_of(slab: Slab) -> tuple:
    """The verbs `left(lane)` and `right(lane)`: this lane's part of shared addresses of A and B."""
    if slab.parts == 1:
        return lane_of_rows, lane_of_rows if slab.transposed else lane_of_chunks

    @verb
    def left(lane):
        r = lane & 7
        return ((lane >> 3 & 1) * 4 + (r & 3)) * ROW_BYTES + (((lane >> 4) ^ r) << 4)

    @verb
    def right(lane):
        r = lane & 7
        return ((lane >> 4) * 4 + (r & 3)) * ROW_BYTES + (((lane >> 3 & 1) ^ r) << 4)

    return left, lane_of_rows if slab.transposed else right


def places_of(slab: Slab) -> tuple:
    """The verbs `to(tid)`, `left(tile, part, tid)` and `right(tile, part, tid)`: the first chunk that a thread copies.

    to: bytes from a tile's part in a slot; left, right: those in an image of A and B, to a part of a tile.
    """
    TURNS, HALF_ROW, HALF_PLANE = slab.turns, (slab.parts - 1) * ROW_BYTES // 2, (slab.parts - 1) * PLANE_BYTES // 2

    @verb
    def to(tid):
        return (tid >> 3) * (TURNS * ROW_BYTES) + ((tid & 7) << 4)

    @verb
    def of_rows(tile, part, tid):
        return tile * TILE_BYTES + part * HALF_PLANE + to(tid)

    @verb
    def of_columns(tile, part, tid):
        line = (tid >> 3) * TURNS
        row = (line >> 2) * 8 + (line & 3) + (tid & 4)
        return tile * TILE_BYTES + row * ROW_BYTES + (((tid & 7) << 4) ^ (part * HALF_ROW))

    left = of_rows if slab.parts == 1 else of_columns
    return to, left, of_rows if slab.transposed else left


def _copies(slab: Slab, left: int, right: int) -> list:
    """Of each chunk that a thread copies: is it of B, tile, plane, turn."""
    tiles = [(False, i) for i in range(left)] + [(True, i) for i in range(right)]
    return [(*tile, plane, turn) for tile in tiles for plane in range(HALVES) for turn in range(slab.turns)]


def _copy(e, slab: Slab, left: int, chunks: list, there, target, A, a, a_step, B, b, b_step) -> None:
    copies, sources, firsts = [], {False: e.address(A, 0), True: e.address(B, 0)}, {(False, 0): a, (True, 0): b}
    for is_right, tile, plane, turn in chunks:
        for i in range(tile):
            if (is_right, i + 1) not in firsts:
                firsts[is_right, i + 1] = firsts[is_right, i] + (b_step if is_right else a_step)
        to = (tile + is_right * left) * slab.tile_bytes + plane * slab.plane_bytes + turn * ROW_BYTES
        copies.append((to, sources[is_right], firsts[is_right, tile], plane * PLANE_BYTES + turn * ROW_BYTES))
    e.copies_async_if(there, target, copies)


def copy_slab(slab: Slab, left: int, right: int):
    """The verb `copy(there, target, A, a, a_step, B, b, b_step)`: a slab of so many tiles of A and B, if it is there.

    A, B: 1-D tensors; target, a, b: address and bytes of the chunk that this thread copies first, see `places_of`;
    a_step, b_step: from each tile to the next. Returns without waiting, see `cp_async_wait`.
    """
    chunks = _copies(slab, left, right)

    @unrolled
    def copy(e, there, target, A, a, a_step, B, b, b_step):
        _copy(e, slab, left, chunks, there, target, A, a, a_step, B, b, b_step)

    return copy


def load_unscales(panels: int):
    """The verb `load(x, record, first, step)`: x[p], UNSCALE of the tiles first + p step."""

    @unrolled
    def load(e, x, record, first, step):
        for p in range(panels):
            (x[p],) = e.load(record, (first, UNSCALE), 1)
            first = first + step

    return load


def load_weights(m_rows: int):
    """The verb `load(w, gW, g, row0, lane)`: w[i, h] = gW[g, row0 + row]."""

    @unrolled
    def load_rows(e, w, gW, g, row):
        for i in range(m_rows // M):
            for h in range(2):
                (w[i, h],) = e.load(gW, (g, row), 1, behind=M * i + 8 * h)

    @verb
    def load(w, gW, g, row0, lane):
        load_rows(w, gW, g, row0 + (lane >> 2))

    return load


def multiply(slab: Slab, m_rows: int, panels: int, chain: int, left: int, right: int, bunches: int):
    """The verb `multiply(C, a, b, w, unscale, times, there, ..)`: C += w unit A B (`transposed`), or unit A B^T.

    Over one slab of each; between the products another one is copied in `bunches`, as `copy_slab(there, ..)` does it.
    a: shared address of the patch's first row, b: that of its first tile of B, both plus `lanes_of`. w[i, h] is that of
    a row, unit that of a panel: unscale[p] times. A sum moves on to fp32 after `chain` steps of 16.
    """
    m_tiles, steps, chunks = m_rows // M, slab.columns // K, _copies(slab, left, right)
    turns = -(-steps // chain) * panels * (TILE // N // 2)

    def load(e, address, is_right: bool, row: int, chunk: int) -> list:
        start = (address ^ (chunk << 4)) + slab.row_bytes(row, is_right)
        trans = is_right and slab.transposed
        return [e.ldmatrix(start + half * slab.plane_bytes, trans) for half in range(HALVES)]

    @unrolled
    def multiply(e, C, a, b, w, unscale, times, there, target, A, a_from, a_step, B, b_from, b_step):
        turn = 0
        for first in range(0, steps, chain):
            now = range(first, min(first + chain, steps))
            lefts = [[load(e, a, False, M * i, 2 * step) for step in now] for i in range(m_tiles)]
            for p in range(panels):
                unit, rows = unscale[p] * times, [(i, h) for i in range(m_tiles) for h in range(2)]
                if slab.transposed:
                    factor = {row: w[row] * unit for row in rows}
                else:
                    factor = dict.fromkeys(rows, e.max(unit, LOWEST))  # not 0, so that 0 times inf is 0
                for j in range(0, TILE // N, 2):
                    places = [(K * step, j) if slab.transposed else (N * j, 2 * step) for step in now]
                    pairs = [load(e, b + p * slab.tile_bytes, True, *place) for place in places]
                    sums = products_of(e, lefts, [[half_of(pair, n) for pair in pairs] for n in range(2)], PRODUCTS)
                    for (i, n), registers in sums.items():
                        for r, x in enumerate(registers):
                            place = p * m_tiles + i, j + n, r
                            C[place] = e.fma(x, factor[i, r // 2], C[place])
                    turn += 1
                    if turn * bunches % turns == 0:
                        bunch, size = turn * bunches // turns, len(chunks) // bunches
                        share = chunks[(bunch - 1) * size : bunch * size]
                        _copy(e, slab, left, share, there, target, A, a_from, a_step, B, b_from, b_step)

    return multiply
