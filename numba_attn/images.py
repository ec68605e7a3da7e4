"""What surrounds kernels that multiply halves: images of their operands, in batches, and one rescue after them all.

Arrays take at most `MAX_WORKSPACE_BYTES`; batches follow each other on the stream, in the same memory. Flags alone, of
blocks left to the rescue, are those of the whole problem. A batch is some heads, or some blocks of query rows of one
head where the head is too large. See `device.split_half` for images and records.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from math import prod

from numba_attn.device.math import cdiv
from numba_attn.device.rescue_kernel import MOST_BLOCKS, RescueConfig, build_rescue
from numba_attn.device.split_half import FEW_COLUMNS, RECORD, image_words, padded, units_of
from numba_attn.device.split_kernel import build_split
from numba_attn.device.split_tile import SplitConfig
from numba_attn.kernel import Launch, Part, Workspace
from numba_attn.problem import ITEM_BYTES, Problem

MAX_WORKSPACE_BYTES = 512_000_000
MOST_BATCHES = 16384  # of up to five launches: a call makes them all before the first runs
TILES_BESIDE = 8
"""That one block splits beside another launch, where few SMs have to keep many bytes on their way."""
LEAST_ROWS, LEAST_FLOP = 64, 1e9  # below which other kernels are faster


def unsuited(problem: Problem) -> str | None:
    """Why a kernel that multiplies halves is not a good choice, or None."""
    if problem.D < FEW_COLUMNS:
        return f"fewer than {FEW_COLUMNS} columns: done a few keys at a time in fp32, halves would lose digits"
    if problem.Lq < LEAST_ROWS:
        return f"fewer than {LEAST_ROWS} rows a head: most of a block would be empty"
    if problem.flop < LEAST_FLOP:
        return f"less than {LEAST_FLOP:.0e} operations: splitting takes longer than it saves"
    return None


@dataclass(frozen=True)
class Batch:
    """What one round of launches does: `m_blocks` blocks of query rows, from `first_row` on, of each head."""

    heads: int
    m_blocks: int
    first_row: int
    keys_are_there: bool
    """The images of K and V are those of the round before."""
    part: Callable[[str], str | Part]
    """From the name of an array to what this batch has of it."""

    def parts(self, *names: str) -> tuple[str | Part, ...]:
        return tuple(map(self.part, names))


def no_more(heads: int, m_blocks: int) -> dict[str, Workspace]:
    """Images and records are all that is needed."""
    return {}


@dataclass(frozen=True)
class ImageBatches:
    """The images of one problem: tiles of `rows` rows and `columns` columns, blocks of `block_m` query rows.

    more: further arrays of a batch, from its heads and its blocks of query rows.
    """

    problem: Problem
    rows: int
    columns: int
    block_m: int
    block_n: int = 1
    """Keys of a block: K and V have tiles for whole blocks."""
    more: Callable[[int, int], dict[str, Workspace]] = no_more
    lost: float = 0.0
    """Of a sum of Q K^T in the tensor cores, see `device.mma_tile.lost_by_scores`: Q's images make up for it."""
    halves: int = 2
    """1 for accuracy class tf32."""
    has_q: bool = True
    """False: the kernel splits its rows of Q itself; there are no tiles of them, and it is not given any."""

    @property
    def workspace(self) -> dict[str, Workspace]:
        """Images and records of Q, K and V, and more, of one batch; of all what blocks were left to the rescue."""
        return {**self._of(*self._most), **self._flags}

    @property
    def refusal(self) -> str | None:
        """Why the images of a single block of rows are too large, or the batches too many; or None."""
        n_bytes = _bytes_of({**self._of(1, 1), **self._flags})
        if n_bytes > MAX_WORKSPACE_BYTES:
            return f"needs {n_bytes} bytes of workspace for one head at a time, {MAX_WORKSPACE_BYTES} are allowed"
        if 0 in (self.problem.B, self.problem.H, self.problem.Lq):
            return None  # no row to share out
        of_b, of_h, of_blocks = self._steps
        batches = cdiv(self.problem.B, of_b) * cdiv(self.problem.H, of_h) * cdiv(self.m_blocks, of_blocks)
        if batches > MOST_BATCHES:
            return f"needs {batches} batches of {MAX_WORKSPACE_BYTES} bytes of workspace, more than {MOST_BATCHES}"
        return None

    def launches(self, between: Callable[[Batch], tuple[Launch, ...]]) -> tuple[Launch, ...]:
        """Per batch: split, the launches between; then the rescue."""
        steps = []
        for batch in self._batches():
            operands = ("Q" if self.has_q else "") + ("" if batch.keys_are_there else "KV")
            split = [self._split(batch, operands)] if operands else []
            steps += [*split, *between(batch)]
        return (*steps, self._rescue())

    def launches_beside(self, between: Callable[[Batch, int, int], tuple[Launch, ...]]) -> tuple[Launch, ...]:
        """As `launches`, but V is split beside the first launch between, and beside the last Q and K of the next batch.

        between: from a batch and how many tiles are split beside the first and the last, at least two launches. For
        kernels whose Q has images.
        """
        batches = list(self._batches())
        steps = [self._split(batches[0], "QK")]
        for i, batch in enumerate(batches):
            values = "" if batch.keys_are_there else "V"
            following = next(iter(batches[i + 1 :]), None)
            of_next = "" if following is None else "Q" if following.keys_are_there else "QK"
            first, *rest = between(batch, self._tiles_of(batch, values), self._tiles_of(following, of_next))
            steps.append(first)
            if values:
                steps.append(self._split(batch, values, is_beside=True))
            steps += rest
            if of_next:
                # Ends after this batch, before the next: that may write over all but flags, which have their own place.
                steps.append(self._split(following, of_next, is_beside=True))
        return (*steps, self._rescue())

    def launches_around(self, build: Callable, config: Hashable, more: tuple = (), **sizes) -> tuple[Launch, ...]:
        """With one launch between, a block per block of query rows: a fused kernel. See `has_q` for its arguments."""
        first = 0 if self.has_q else 1

        def between(batch: Batch) -> tuple[Launch, ...]:
            names = ("Q", "K", *IMAGES[first:], *RECORDS[first:], "unsafe", "O", "lse")
            args = (*batch.parts(*names), batch.first_row, *more)
            return (Launch(build, config, args, batch.heads * batch.m_blocks, **sizes),)

        return self.launches(between)

    def _tiles_of(self, batch: Batch | None, operands: str) -> int:
        return sum(batch.heads * self.tiles(name, batch.m_blocks) for name in operands)

    def _split(self, batch: Batch, operands: str, is_beside: bool = False) -> Launch:
        """Some of the operands QKV that follow each other."""
        vector, tiles = 4 if self.problem.vector == 4 else 1, TILES_BESIDE if is_beside else 1
        config = SplitConfig(self.rows, padded(self.columns), vector, self.halves, tiles, is_beside)
        blocks = {name: batch.heads * cdiv(self.tiles(name, batch.m_blocks), tiles) for name in "QKV"}
        # Whoever splits V alone skips the blocks of Q and K.
        first = sum(blocks[name] for name in "QKV"[: "QKV".index(operands[0])])
        args = (*batch.parts("Q", "K", "V", *IMAGES, *RECORDS), "scale", units_of(self.lost), first)
        bounds = {"min_blocks": config.min_blocks, "is_beside": is_beside}
        return Launch(build_split, config, args, sum(blocks[name] for name in operands), config.threads, **bounds)

    def _rescue(self) -> Launch:
        """Of all batches: looking at flags takes 10 us however few they are."""
        config, blocks = RescueConfig(self.problem.is_causal), prod(self._flags["unsafe"].shape)
        args = ("Q", "K", "V", "unsafe", "O", "lse", "scale", self.block_m)
        return Launch(build_rescue, config, args, min(blocks, MOST_BLOCKS), config.threads)

    @property
    def m_blocks(self) -> int:
        return cdiv(self.problem.Lq, self.block_m)

    def tiles(self, name: str, m_blocks: int) -> int:
        """Tiles of an operand of one head."""
        problem, slab = self.problem, padded(self.columns)
        if name == "Q" and not self.has_q:
            return 0
        rows = m_blocks * self.block_m if name == "Q" else cdiv(problem.Lk, self.block_n) * self.block_n
        return cdiv(rows, self.rows) * cdiv(problem.Dv if name == "V" else problem.D, slab)

    def _of(self, heads: int, m_blocks: int) -> dict[str, Workspace]:
        words = image_words(self.rows, self.columns, self.halves)
        tiles = [self.tiles(name, m_blocks) for name in "QKV"]
        images = {name: Workspace((heads, n * words), "uint32") for name, n in zip(IMAGES, tiles, strict=True)}
        records = {name: Workspace((heads, n, RECORD)) for name, n in zip(RECORDS, tiles, strict=True)}
        return {**images, **records, **self.more(heads, m_blocks)}

    @property
    def _flags(self) -> dict[str, Workspace]:
        """Of the whole problem, 4 bytes for a block of query rows of one head."""
        return {"unsafe": Workspace((self.problem.B * self.problem.H, self.m_blocks), "int32")}

    @property
    def _most(self) -> tuple[int, int]:
        """Heads and blocks of query rows of the largest batch."""
        B, H, m_blocks = self.problem.B, self.problem.H, self.m_blocks
        room = max(0, MAX_WORKSPACE_BYTES - _bytes_of(self._flags))
        # Where there is nothing to split, a head has no bytes but its flags.
        fitting = room // max(1, _bytes_of(self._of(1, m_blocks)))
        if not fitting:
            keys, block = _bytes_of(self._of(1, 0)), _bytes_of(self._of(1, 1))
            most = max(1, (room - keys) // max(1, block - keys))
            return 1, cdiv(m_blocks, cdiv(m_blocks, most))
        # Batches of one size, so that the last is not a small one: whole batch indices, or else heads of one of them.
        if fitting >= H:
            return cdiv(B, cdiv(B, fitting // H)) * H, m_blocks
        return cdiv(H, cdiv(H, fitting)), m_blocks

    @property
    def _steps(self) -> tuple[int, int, int]:
        """Of the largest batch: batch indices, heads of each, and blocks of query rows of each."""
        heads, m_blocks = self._most
        return max(1, heads // self.problem.H), min(heads, self.problem.H), m_blocks

    def _batches(self) -> Iterator[Batch]:
        B, H, (of_b, of_h, of_blocks) = self.problem.B, self.problem.H, self._steps
        if (of_b, of_h, of_blocks) == (B, H, self.m_blocks):
            yield Batch(B * H, of_blocks, 0, False, lambda name: name)
            return
        for b in range(0, B, of_b):
            for h in range(0, H, of_h):
                for block in range(0, self.m_blocks, of_blocks):
                    heads = slice(b, min(b + of_b, B)), slice(h, min(h + of_h, H))
                    yield self._batch(heads, slice(block, min(block + of_blocks, self.m_blocks)))

    def _batch(self, index: tuple[slice, slice], blocks: slice) -> Batch:
        heads, m_blocks = prod(i.stop - i.start for i in index), blocks.stop - blocks.start
        rows = slice(blocks.start * self.block_m, min(blocks.stop * self.block_m, self.problem.Lq))
        whole, space = self.workspace, self._of(heads, m_blocks)
        first = index[0].start * self.problem.H + index[1].start

        def part(name: str) -> str | Part:
            if name in ("K", "V") or (name in ("Q", "O", "lse") and m_blocks == self.m_blocks):
                return Part(name, index)
            if name in ("Q", "O", "lse"):
                return Part(name, (*index, rows))
            if name == "unsafe":
                # Of whole b or of one: its heads follow each other.
                return Part(name, (slice(first, first + heads), blocks))
            leading = [slice(n) for n in space[name].shape]
            while len(leading) > 1 and whole[name].shape[len(leading) - 1] == leading[-1].stop:
                leading.pop()
            return Part(name, tuple(leading))

        return Batch(heads, m_blocks, rows.start, blocks.start > 0, part)


IMAGES = ("Q_image", "K_image", "V_image")
RECORDS = ("Q_record", "K_record", "V_record")


def _bytes_of(workspace: dict[str, Workspace]) -> int:
    return sum(ITEM_BYTES * prod(space.shape) for space in workspace.values())
