"""The small problems on which `mutate` tries each mutant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Case:
    """One small attention call."""

    B: int
    H: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    causal: bool = False
    lse: bool = True
    poison: int | None = None
    """K and V are NaN from this row on, those that causality removes from every row included."""
    spread: float = 4
    """Standard deviation of the scores; where it is large, exp overflows unless the maximum is subtracted."""
    dense: bool = False
    """No element of Q and K is small beside the others."""
    minus_inf: int = 0
    """The scores of the first keys are -inf."""
    last_inf: bool = False
    """The last element of V is Inf."""
    inf_column: bool = False
    """The last column of V is Inf."""
    tiny_row: bool = False
    """The last row of V is 2^-30 times the others, and the last query attends it alone."""
    large_column: str = ""
    """The first column of this operand, q or k, is 2^28; that of the other is 0, and its others are 1 or -1."""
    tolerance: float = 1e-5
    """Of a row's norm; fp32 evaluations of these sizes differ by less than 1e-6. 0 for one key: that gives V itself."""

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v, the same in every run."""
        generator = np.random.default_rng(0)
        shapes = ((self.Lq, self.D), (self.Lk, self.D), (self.Lk, self.Dv))
        q, k, v = (generator.standard_normal((self.B, self.H, *shape), dtype=np.float32) for shape in shapes)
        if self.dense:
            q, k = (np.sign(x) * (np.abs(x) % 1 + np.float32(0.5)) for x in (q, k))
        q *= self.spread
        if self.poison is not None:
            k[:, :, self.poison :] = v[:, :, self.poison :] = np.nan
        if self.minus_inf:
            q[..., 0] = 1
            k[:, :, : self.minus_inf, 0] = -np.inf
        if self.last_inf:
            v[..., -1, -1] = np.inf
        if self.inf_column:
            v[..., -1] = np.inf
        if self.tiny_row:
            v[..., -1, :] *= 2.0**-30
            k[..., -1, :] = 8 * q[..., -1, :]
        if self.large_column:
            large, none = (q, k) if self.large_column == "q" else (k, q)
            none[...] = np.sign(none)
            large[..., 0], none[..., 0] = 2.0**28, 0
        return q, k, v


CASES = (
    Case(1, 1, 3, 5, 5, 3),
    Case(1, 2, 5, 37, 6, 9),
    Case(1, 1, 6, 6, 8, 4, causal=True, lse=False),
    Case(2, 1, 9, 40, 12, 36),
    Case(1, 1, 11, 9, 4, 5, causal=True),
    Case(1, 1, 5, 40, 4, 4, causal=True, poison=5),
    Case(1, 1, 36, 40, 3, 2, causal=True, poison=17),
    Case(1, 1, 36, 40, 3, 2, causal=True, poison=33),
    Case(2, 2, 3, 70, 20, 70, lse=False),
    Case(1, 1, 40, 70, 9, 33, causal=True),
    Case(1, 1, 4, 64, 32, 64),
    Case(1, 1, 3, 9, 70, 7),
    Case(1, 1, 3, 40, 72, 68),
    Case(1, 1, 3, 70, 4, 4, minus_inf=40),
    Case(1, 1, 3, 5, 1, 4, minus_inf=2),
    Case(1, 1, 3, 70, 4, 4, spread=200),
    Case(1, 1, 40, 40, 4, 4, spread=1000, dense=True, tolerance=1e-3),
    Case(1, 1, 3, 40, 4, 4, last_inf=True),
    Case(1, 1, 1, 1, 3, 33, lse=False, tolerance=0),
    Case(1, 1, 1, 40, 3, 33, causal=True, lse=False, tolerance=0),
    Case(1, 1, 3, 40, 4, 4, spread=1, inf_column=True),
    Case(1, 1, 3, 40, 4, 4, tiny_row=True),
    Case(1, 1, 3, 40, 8, 4, large_column="q"),
    Case(1, 1, 3, 40, 8, 4, large_column="k"),
    Case(1, 1, 1, 245, 2, 4),
    Case(1, 1, 3, 0, 4, 4),
    # Kernels of halves leave fewer than 16 columns to fp32.
    Case(1, 1, 40, 40, 17, 20, causal=True),
    Case(2, 1, 36, 70, 20, 9),
    Case(1, 1, 70, 70, 16, 3, causal=True, lse=False),
    Case(1, 1, 36, 40, 16, 2, causal=True, poison=33),
    Case(1, 1, 3, 70, 16, 4, spread=200),
    Case(1, 1, 40, 40, 16, 4, spread=1000, dense=True, tolerance=1e-3),
    Case(1, 1, 20, 40, 16, 16),
    Case(1, 1, 3, 40, 16, 4, spread=1, inf_column=True),
    Case(1, 1, 3, 40, 16, 4, tiny_row=True),
    Case(1, 1, 3, 40, 16, 4, large_column="q"),
    Case(1, 1, 3, 40, 16, 4, large_column="k"),
)
"""Tails in every length, several tiles and slices, both kinds of causal excess, keys that must not be touched, an Inf
that is attended, an infinity in the last column of K, more chunks than a warp has lanes."""
