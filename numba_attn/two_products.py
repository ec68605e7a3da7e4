"""What surrounds kernels that make S and O in two launches, P in memory between: images, and the order of launches.

    split     see `images`
    scores    per block of rows and keys:    S = Q K^T     m_g = rowmax S     P = 2^(S - m_g)     l_g = rowsum P
    weights   per row, over groups g of keys: w_g = 2^(m_g - m) / l, see `device.weights_kernel`
    outputs   per block of rows and columns:  O = sum_g w_g P V
    rescue    see `images`

Tiles of all operands, P too, are 64 x 64, and a group has 64 keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from numba_attn import images
from numba_attn.device.math import cdiv
from numba_attn.device.mma_product import TILE
from numba_attn.device.mma_tile import lost_by_scores
from numba_attn.device.split_half import image_words
from numba_attn.device.weights_kernel import WeightsConfig, build_weights
from numba_attn.images import IMAGES, RECORDS, Batch, ImageBatches
from numba_attn.kernel import Launch, Workspace
from numba_attn.problem import Problem

FUSED_COLUMNS = 256


def unsuited(problem: Problem) -> str | None:
    """Why another kernel should be preferred, or None."""
    if max(problem.D, problem.Dv) <= FUSED_COLUMNS:
        return f"head dims up to {FUSED_COLUMNS}: P need not go through memory"
    return images.unsuited(problem)


STEPS_OF_SPLIT = 0.2
"""What splitting a tile takes an SM, in steps of a block of a product: 64 columns, or keys."""


def sms_of_product(blocks: int, steps: int, tiles: int, sms: int) -> int:
    """How many of all SMs take the blocks of a product, so that it ends soon, and with it the splitting of tiles."""

    def time(own: int) -> float:
        return max(cdiv(blocks, own) * steps, tiles * STEPS_OF_SPLIT / (sms - own))

    return min(range(1, sms), key=lambda own: (time(own), own))


@dataclass(frozen=True)
class TwoProducts:
    """One problem in blocks of `block_m` rows and `block_n` keys or columns.

    key_step: P and the images of K and V have whole multiples of so many keys.
    most_blocks: of a launch, the rest is dealt out in turns; 0: one for each block of S or O.
    """

    problem: Problem
    block_m: int
    block_n: int
    key_step: int
    most_blocks: int = 0
    steps_of_sum: int = 4
    """Of 16 columns, in sums of S in the tensor cores."""
    halves: int = 2
    beside: bool = False
    """Tiles are split beside the products, by those of `most_blocks` SMs that these leave free: `launches_beside`."""

    @property
    def images(self) -> ImageBatches:
        lost = lost_by_scores(self.problem.D, self.steps_of_sum, small_first=True) if self.halves == 2 else 0.0
        return ImageBatches(self.problem, TILE, TILE, self.block_m, self.key_step, self._more, lost, self.halves)

    def _more(self, heads: int, m_blocks: int) -> dict[str, Workspace]:
        groups, rows = cdiv(self.problem.Lk, self.key_step) * (self.key_step // TILE), m_blocks * self.block_m
        statistics = Workspace((heads, groups, rows))
        return {
            "P_image": Workspace((heads, rows // TILE * groups * image_words(TILE, TILE, self.halves)), "uint32"),
            "M": statistics,
            "L": statistics,
            "V_amax": Workspace((heads,)),
        }

    def launches(
        self,
        build_scores: Callable,
        build_outputs: Callable,
        config: Hashable,
        threads: int,
        smem_bytes: int,
        min_blocks: int = 1,
    ) -> tuple[Launch, ...]:
        """All steps; `build_scores` and `build_outputs` are given `config`."""
        problem = self.problem
        weights = WeightsConfig(self.block_m, TILE, problem.is_causal, self.halves)
        n_blocks, d_blocks = cdiv(problem.Lk, self.block_n), cdiv(problem.Dv, self.block_n)

        def product(build: Callable, args: tuple, blocks: int, steps: int, tiles: int) -> Launch:
            most = sms_of_product(blocks, steps, tiles, self.most_blocks) if tiles else self.most_blocks
            return Launch(
                build, config, args, max(1, min(blocks, most or blocks)), threads, smem_bytes, min_blocks=min_blocks
            )

        def between(batch: Batch, of_values: int = 0, of_next: int = 0) -> tuple[Launch, ...]:
            blocks, row = batch.heads * batch.m_blocks, batch.first_row
            Q_image, K_image, V_image = batch.parts(*IMAGES)
            Q_record, K_record, V_record = records = batch.parts(*RECORDS)
            Q, K, O, lse = batch.parts("Q", "K", "O", "lse")
            P, M, L, V_amax, unsafe = batch.parts("P_image", "M", "L", "V_amax", "unsafe")
            of_scores = (Q, K, Q_image, K_image, Q_record, K_record, P, M, L, unsafe, row)
            of_weights = (Q, K, *records, M, L, V_amax, unsafe, lse, row)
            of_outputs = (Q, K, P, V_image, V_record, M, V_amax, unsafe, O, row)
            return (
                product(build_scores, of_scores, blocks * n_blocks, cdiv(problem.D, TILE), of_values),
                Launch(build_weights, weights, of_weights, blocks, weights.rows),
                product(build_outputs, of_outputs, blocks * d_blocks, cdiv(problem.Lk, TILE), of_next),
            )

        return self.images.launches_beside(between) if self.beside else self.images.launches(between)
