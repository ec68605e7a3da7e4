"""What surrounds a kernel that multiplies halves: images of its operands, in batches of heads, and a rescue after it.

The images of one batch of heads take at most `MAX_WORKSPACE_BYTES`; batches follow each other on the stream, in the
same memory. See `device.split_half` for images and records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from numba_attn.device.math import cdiv
from numba_attn.device.rescue_kernel import RescueConfig, build_rescue
from numba_attn.device.split_half import RECORD, image_words, padded
from numba_attn.device.split_kernel import SplitConfig, build_split
from numba_attn.kernel import Launch, Part, Workspace
from numba_attn.problem import ITEM_BYTES, Problem

MAX_WORKSPACE_BYTES = 512_000_000


@dataclass(frozen=True)
class ImageBatches:
    """The images of one problem: tiles of `rows` rows and `columns` columns, blocks of `block_m` query rows."""

    problem: Problem
    rows: int
    columns: int
    block_m: int
    lost: float = 0.0
    """Of a sum of Q K^T in the tensor cores, see `device.mma_tile.lost_by_scores`: Q's images make up for it."""

    @property
    def workspace(self) -> dict[str, Workspace]:
        """Images and records of Q, K and V, and what blocks were left to the rescue."""
        return self._of_heads(self._batch_heads)

    @property
    def refusal(self) -> str | None:
        """Why the images of a single head are too large, or None."""
        n_bytes = _bytes_of(self._of_heads(1))
        if n_bytes > MAX_WORKSPACE_BYTES:
            return f"needs {n_bytes} bytes of workspace for one head, {MAX_WORKSPACE_BYTES} are allowed"
        return None

    def launches(self, flash: Callable[[int, tuple], Launch]) -> tuple[Launch, ...]:
        """Split, flash and rescue of each batch of heads.

        flash: the launch between, from a number of blocks and the arguments Q, K, images, records, unsafe, O and lse.
        """
        problem, steps = self.problem, []
        split = SplitConfig(self.rows, padded(self.columns), 4 if problem.vector == 4 else 1, self.lost)
        rescue = RescueConfig(problem.is_causal)
        for heads, part in self._batches():
            space = self._of_heads(heads)
            images = tuple(part(name) for name in space if name != "unsafe")
            tiles = sum(prod(space[name].shape[:2]) for name in space if name.endswith("_record"))
            blocks = prod(space["unsafe"].shape)
            Q, K, V, O, lse, unsafe = map(part, ("Q", "K", "V", "O", "lse", "unsafe"))
            steps += [
                Launch(
                    build_split, split, (Q, K, V, *images, "scale"), tiles, split.threads, min_blocks=split.min_blocks
                ),
                flash(blocks, (Q, K, *images, unsafe, O, lse)),
                Launch(build_rescue, rescue, (Q, K, V, unsafe, O, lse, "scale", self.block_m), blocks, rescue.threads),
            ]
        return tuple(steps)

    def _of_heads(self, heads: int) -> dict[str, Workspace]:
        m_blocks = cdiv(self.problem.Lq, self.block_m)
        tiles = {"Q": m_blocks * self.block_m // self.rows}
        tiles["K"] = tiles["V"] = cdiv(self.problem.Lk, self.rows)
        words = image_words(self.rows, self.columns)
        images = {f"{name}_image": Workspace((heads, n * words), "uint32") for name, n in tiles.items()}
        records = {f"{name}_record": Workspace((heads, n, RECORD)) for name, n in tiles.items()}
        return {**images, **records, "unsafe": Workspace((heads, m_blocks), "int32")}

    @property
    def _batch_heads(self) -> int:
        """Heads of a batch: whole batch indices where one fits, else as many heads of one."""
        B, H = self.problem.B, self.problem.H
        fitting = max(1, MAX_WORKSPACE_BYTES // _bytes_of(self._of_heads(1)))
        if fitting >= H:
            # Batches of one size, so that the last is not a small one.
            return cdiv(B, cdiv(B, fitting // H)) * H
        return cdiv(H, cdiv(H, fitting))

    def _batches(self) -> Iterator[tuple[int, Callable]]:
        """Per batch: its heads, and the function from an array's name to its part of the array."""
        B, H, most = self.problem.B, self.problem.H, self._batch_heads
        if most == B * H:
            yield B * H, lambda name: name
            return
        of_b, of_h = max(1, most // H), min(most, H)
        for b in range(0, B, of_b):
            for h in range(0, H, of_h):
                index = slice(b, min(b + of_b, B)), slice(h, min(h + of_h, H))
                heads = (index[0].stop - b) * (index[1].stop - h)
                operands = {name: Part(name, index) for name in ("Q", "K", "V", "O", "lse")}
                yield (
                    heads,
                    lambda name, heads=heads, operands=operands: operands.get(name, Part(name, (slice(heads),))),
                )


def _bytes_of(workspace: dict[str, Workspace]) -> int:
    return sum(ITEM_BYTES * prod(space.shape) for space in workspace.values())
