"""Verbs on tiles of halves in a product whose operands are both images: C += factor A B.

A warp owns a patch of C, `TILE` rows and columns, fragments C[i, j, r] as in `mma_tile`, the columns too. Its operands
are tiles of as many rows and columns, images of `split_half`, that come to shared memory in slabs: what belongs to
`SLAB` columns of the sum.

A tile's slab has two planes, as the tile has. Where its columns are summed over, rows r and r + 4 of each eight share a
line of 128 bytes: where one has chunks 0 .. 3 in the image, the other has 4 .. 7. So chunks keep their place, and
`ldmatrix` its banks.
"""

from __future__ import annotations

from numba_attn.device.fragments import K, M, N
from numba_attn.device.math import quotient
from numba_attn.device.mma_tile import half_of, lane_of_rows, products_of
from numba_attn.device.split_half import BLOCK_COLUMNS, LOWEST, ROW_BYTES, UNSCALE, WORD_BYTES, image_bytes
from numba_attn.device.unrolled import unrolled
from numba_attn.device.verb import verb

HALVES, PRODUCTS = 2, 3
TILE = BLOCK_COLUMNS
"""Rows and columns of a tile: one block of columns."""
M_TILES = TILE // M
TILE_BYTES = image_bytes(TILE, TILE)
PLANE_BYTES = TILE_BYTES // HALVES
TILE_WORDS = TILE_BYTES // WORD_BYTES
SLAB = 32
"""Columns of a slab: a sum of so many moves on to fp32."""
SLABS = TILE // SLAB
"""Of a tile."""
STEPS = SLAB // K
"""Of products, in a slab."""
SLAB_BYTES = TILE_BYTES // SLABS
SLAB_PLANE_BYTES = SLAB_BYTES // HALVES


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


def _turns(threads: int) -> int:
    """Chunks that a thread copies of a slab's plane: in lines that follow each other, one address for all."""
    turns, rest = divmod(SLAB_PLANE_BYTES, 16 * threads)
    if rest or turns not in (1, 2, 4):
        raise ValueError(f"{threads} threads cannot share {SLAB_PLANE_BYTES} bytes")
    return turns


def lanes_of(transposed: bool) -> tuple:
    """The verbs `left(lane)` and `right(lane)`: this lane's part of shared addresses of A and B."""

    @verb
    def left(lane):
        r = lane & 7
        return ((lane >> 3 & 1) * 4 + (r & 3)) * ROW_BYTES + (((lane >> 4) ^ r) << 4)

    @verb
    def right(lane):
        r = lane & 7
        return ((lane >> 4) * 4 + (r & 3)) * ROW_BYTES + (((lane >> 3 & 1) ^ r) << 4)

    return left, lane_of_rows if transposed else right


def places_of(transposed: bool, threads: int) -> tuple:
    """The verbs `to(tid)`, `left(tile, slab, tid)` and `right(tile, slab, tid)`: the first chunk that a thread copies.

    to: bytes from a tile's slab in a slot; left, right: those in an image of A and B, to a slab of a tile.
    """
    TURNS, SLAB_ROW_BYTES = _turns(threads), ROW_BYTES // SLABS

    @verb
    def to(tid):
        return (tid >> 3) * (TURNS * ROW_BYTES) + ((tid & 7) << 4)

    @verb
    def of_rows(tile, slab, tid):
        return tile * TILE_BYTES + slab * SLAB_PLANE_BYTES + to(tid)

    @verb
    def of_columns(tile, slab, tid):
        line = (tid >> 3) * TURNS
        row = (line >> 2) * 8 + (line & 3) + (tid & 4)
        return tile * TILE_BYTES + row * ROW_BYTES + (((tid & 7) << 4) ^ (slab * SLAB_ROW_BYTES))

    return to, of_columns, of_rows if transposed else of_columns


def _copies(left: int, right: int, threads: int) -> list:
    """Of each chunk that a thread copies: is it of B, tile, plane, turn."""
    tiles = [(False, i) for i in range(left)] + [(True, i) for i in range(right)]
    return [(*tile, plane, turn) for tile in tiles for plane in range(HALVES) for turn in range(_turns(threads))]


def _copy(e, left: int, chunks: list, there, target, A, a, a_step, B, b, b_step) -> None:
    copies, sources, firsts = [], {False: e.address(A, 0), True: e.address(B, 0)}, {(False, 0): a, (True, 0): b}
    for is_right, tile, plane, turn in chunks:
        for i in range(tile):
            if (is_right, i + 1) not in firsts:
                firsts[is_right, i + 1] = firsts[is_right, i] + (b_step if is_right else a_step)
        to = (tile + is_right * left) * SLAB_BYTES + plane * SLAB_PLANE_BYTES + turn * ROW_BYTES
        copies.append((to, sources[is_right], firsts[is_right, tile], plane * PLANE_BYTES + turn * ROW_BYTES))
    e.copies_async_if(there, target, copies)


def copy_slabs(left: int, right: int, threads: int):
    """The verb `copy(there, target, A, a, a_step, B, b, b_step)`: slabs of so many tiles of A and B, if they are there.

    A, B: 1-D tensors; target, a, b: address and bytes of the chunk that this thread copies first, see `places_of`;
    a_step, b_step: from each tile to the next. Returns without waiting, see `cp_async_wait`.
    """
    chunks = _copies(left, right, threads)

    @unrolled
    def copy(e, there, target, A, a, a_step, B, b, b_step):
        _copy(e, left, chunks, there, target, A, a, a_step, B, b, b_step)

    return copy


@unrolled
def load_unscale(e, x, record, tile):
    """x[0], UNSCALE of a tile."""
    (x[0],) = e.load(record, (tile, UNSCALE), 1)


@unrolled
def _load_rows(e, w, gW, row):
    for i in range(M_TILES):
        for h in range(2):
            (w[i, h],) = e.load(gW, (row,), 1, behind=M * i + 8 * h)


@verb
def load_weights(w, gW, row0, lane):
    """w[i, h] = gW[row0 + row]."""
    _load_rows(w, gW, row0 + (lane >> 2))


def multiply(left: int, right: int, threads: int, bunches: int, transposed: bool):
    """The verb `multiply(C, a, b, w, unscale, times, there, ..)`: C += w unit A B (`transposed`), or unit A B^T.

    Over one slab of each; between the products others are copied in `bunches`, as `copy_slabs(there, ..)` does it.
    a: shared address of the patch's first row, b: that of its tile of B, both plus `lanes_of`. w[i, h] is that of a
    row, unit is unscale[0] times.
    """
    turns, chunks = TILE // N // 2, _copies(left, right, threads)

    def load(e, address, row_bytes: int, row: int, chunk: int, trans: bool) -> list:
        start = (address ^ (chunk << 4)) + row * row_bytes
        return [e.ldmatrix(start + half * SLAB_PLANE_BYTES, trans) for half in range(HALVES)]

    def load_by_row(e, address, row: int, step: int) -> list:
        return load(e, address, ROW_BYTES // SLABS, row, 2 * step, False)

    def load_right(e, b, j: int, step: int) -> list:
        return load(e, b, ROW_BYTES, K * step, j, True) if transposed else load_by_row(e, b, N * j, step)

    @unrolled
    def multiply(e, C, a, b, w, unscale, times, there, target, A, a_from, a_step, B, b_from, b_step):
        lefts = [[load_by_row(e, a, M * i, step) for step in range(STEPS)] for i in range(M_TILES)]
        unit, rows = unscale[0] * times, [(i, h) for i in range(M_TILES) for h in range(2)]
        if transposed:
            factor = {row: w[row] * unit for row in rows}
        else:
            factor = dict.fromkeys(rows, e.max(unit, LOWEST))  # not 0, so that 0 times inf is 0
        for turn in range(turns):
            j = 2 * turn
            pairs = [load_right(e, b, j, step) for step in range(STEPS)]
            sums = products_of(e, lefts, [[half_of(pair, n) for pair in pairs] for n in range(2)], PRODUCTS)
            for (i, n), registers in sums.items():
                for r, x in enumerate(registers):
                    C[i, j + n, r] = e.fma(x, factor[i, r // 2], C[i, j + n, r])
            if (turn + 1) * bunches % turns == 0:
                bunch = (turn + 1) * bunches // turns
                share = chunks[len(chunks) * (bunch - 1) // bunches : len(chunks) * bunch // bunches]
                _copy(e, left, share, there, target, A, a_from, a_step, B, b_from, b_step)

    return multiply
