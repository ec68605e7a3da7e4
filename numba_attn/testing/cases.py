"""The matrix of problems that every kernel answers: small ones for the simulator, larger ones for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from numba_attn.problem import Problem, View, vector_width
from numba_attn.testing.inputs import DISTRIBUTIONS, POISONS, distribution
from numba_attn.testing.layouts import LAYOUTS, Placed, place


@dataclass(frozen=True)
class Case:
    """One call: its shapes, and how its inputs are made. Equal cases have equal inputs."""

    B: int
    H: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    is_causal: bool = False
    scale: float | None = None
    inputs: str = "normal"
    layout: str = "contiguous"
    poison: str | None = None
    precision: str = "fp32"

    def __str__(self) -> str:
        size = f"{self.B}x{self.H}-{self.Lq}x{self.Lk}-{self.D}x{self.Dv}"
        options = ["causal"] if self.is_causal else []
        options += [] if self.scale is None else [f"scale={self.scale:g}"]
        options += [self.inputs] if self.inputs != "normal" else []
        options += [self.layout] if self.layout != "contiguous" else []
        options += [self.precision] if self.precision != "fp32" else []
        return "-".join([size, *options, *([self.poison] if self.poison else [])])

    @property
    def kwargs(self) -> dict:
        """What the call computes: options of `reference.attention` and of `numba_attn.attention`."""
        return {"causal": self.is_causal, "scale": self.scale}

    @property
    def options(self) -> dict:
        """Options of `numba_attn.attention` and of `numba_attn.sim.attention`: how precisely, too."""
        return {**self.kwargs, "precision": self.precision}

    @property
    def problem(self) -> Problem:
        """Its facts, for buffers that are themselves aligned."""
        widths = (
            vector_width(View(placed.shape, placed.strides), placed.offset * placed.buffer.itemsize)
            for placed in place_inputs(self)
        )
        sizes = self.B, self.H, self.H, self.Lq, self.Lk, self.D, self.Dv
        return Problem(*sizes, is_causal=self.is_causal, vector=min(widths), precision=self.precision)


def place_inputs(case: Case) -> tuple[Placed, Placed, Placed]:
    """q, k, v as buffers with a layout, to be laid out the same way in another library's memory."""
    heads, seed = (case.B, case.H), case.Lq + 1000 * case.Lk + 7 * case.D
    shapes = (*heads, case.Lq, case.D), (*heads, case.Lk, case.D), (*heads, case.Lk, case.Dv)
    arrays = distribution(case.inputs, *shapes, seed=seed)
    if case.poison is not None:
        POISONS[case.poison](*arrays)
    return tuple(place(array, case.layout, slot) for slot, array in enumerate(arrays))


def make_inputs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [B, H, Lq, D], k [B, H, Lk, D], v [B, H, Lk, Dv] as fp32 numpy arrays with the case's layout."""
    return tuple(placed.view for placed in place_inputs(case))


def small_cases() -> tuple[Case, ...]:
    """For the simulator: fewer than 64 rows and keys, head dims to 40, every kind once."""
    return tuple(dict.fromkeys(_small()))


def cases() -> tuple[Case, ...]:
    """For a GPU: every head dim, length, tile edge, distribution, layout and poison."""
    return tuple(dict.fromkeys(_large()))


def _kinds(base: Case) -> Iterator[Case]:
    """The same shapes with each distribution, layout and poison; causal and not."""
    for name in DISTRIBUTIONS:
        yield replace(base, inputs=name)
        yield replace(base, inputs=name, is_causal=True)
    for name in LAYOUTS:
        yield replace(base, layout=name)
        yield replace(base, layout=name, is_causal=True)
    for name in POISONS:
        yield replace(base, poison=name, is_causal=True)
    for name in ("q_nan", "k_nan", "v_inf"):
        yield replace(base, poison=name)
    for scale in (0.0, -1.0, 1e-45, 0.125):
        yield replace(base, scale=scale)


def _small() -> Iterator[Case]:
    for Lq, Lk, D, Dv in ((1, 1, 1, 1), (1, 1, 8, 8), (3, 2, 1, 4), (2, 3, 4, 1), (4, 31, 8, 8), (5, 32, 3, 5)):
        yield Case(1, 1, Lq, Lk, D, Dv)
    for Lq, Lk in ((2, 5), (5, 2), (1, 40), (3, 32), (4, 33), (5, 34), (33, 34), (34, 33)):
        yield Case(1, 1, Lq, Lk, 8, 8, is_causal=True)
    for D in (2, 7, 15, 16, 17, 31, 32, 33, 40):
        yield Case(1, 1, 5, 9, D, D)
    for Dv in (1, 16, 18, 31, 32, 33, 40):
        yield Case(1, 1, 3, 33, 17, Dv, is_causal=Dv % 2 == 0)
    yield Case(1, 1, 2, 63, 12, 12)
    yield Case(2, 3, 5, 7, 4, 4)
    yield Case(3, 1, 3, 7, 5, 6, is_causal=True)
    yield from _kinds(Case(1, 2, 5, 37, 9, 10))
    for name in LAYOUTS:
        yield Case(2, 2, 5, 33, 8, 8, layout=name)
    yield Case(1, 2, 5, 35, 5, 9, layout="padded")  # rows a multiple of 4 apart, head dims not
    few = Case(1, 2, 5, 37, 9, 10, precision="tf32")
    yield from (few, replace(few, is_causal=True), Case(2, 1, 34, 33, 40, 17, precision="tf32"))
    for name in ("wide", "tiny", "denormal"):
        yield replace(few, inputs=name)
    yield replace(few, poison="v_inf")
    yield replace(few, Lq=34, poison="later_inf", is_causal=True)
    yield replace(few, layout="every_other", scale=-1.0)


def _large() -> Iterator[Case]:
    for D in (1, 2, 3, 5, 7, 8, 12, 17, 33, 63, 65, 96, 100, 127, 129, 257, 320, 511, 1000, 1023, 1024):
        yield Case(1, 2, 33, 65, D, D)
        yield Case(1, 1, 65, 33, D, D, is_causal=True)
    for D in (64, 100):
        for Dv in (1, D - 1, D + 1, 64, 1024):
            yield Case(1, 2, 17, 300, D, Dv)
    yield Case(1, 1, 17, 63, 1024, 64, is_causal=True)
    lengths = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65)
    for Lq in lengths:
        for Lk in lengths:
            for is_causal in (False, True):
                D = 64 if (Lq + Lk) % 2 else 33
                yield Case(1, 1, Lq, Lk, D, D, is_causal=is_causal)
    for Lq, Lk in ((513, 512), (512, 513), (1, 100), (2, 5), (5, 2), (300, 40), (40, 300)):
        yield Case(1, 2, Lq, Lk, 64, 64, is_causal=True)
    for Lk in (32, 255, 256, 257, 511, 512, 513):
        yield Case(1, 1, 20, Lk, 72, 72)
    for Lq in (127, 128, 129, 255, 257):
        yield Case(1, 1, Lq, 40, 72, 40)
        yield Case(1, 1, Lq, 260, 40, 72, is_causal=True)
    # Several blocks of rows, chunks of keys and slices of both head dims, whatever the tiles.
    for D, Dv in (
        (24, 32),
        (64, 32),
        (64, 64),
        (90, 80),
        (72, 128),
        (180, 190),
        (72, 256),
        (100, 300),
        (72, 512),
        (36, 1024),
        (63, 31),
        (33, 63),
        (65, 127),
    ):
        for is_causal in (False, True):
            yield Case(1, 2, 260, 530, D, Dv, is_causal=is_causal)
            yield Case(1, 1, 260, 300, D - 1, Dv - 1, is_causal=is_causal)
    yield Case(7, 300, 5, 7, 8, 8)
    yield Case(300, 1, 3, 33, 8, 5, is_causal=True)
    yield Case(1, 1, 256, 256, 1024, 1024)
    yield Case(1, 1, 64, 2048, 128, 128)
    # Few rows: more chunks of keys than a warp has lanes, where keys are shared out.
    for D in (64, 61, 144):
        yield Case(1, 2, 1, 2500, D, D)
        yield Case(1, 1, 3, 2300, D, D)
    yield from _kinds(Case(2, 3, 65, 130, 64, 64))
    yield from _kinds(Case(1, 2, 40, 300, 100, 100))
    for name in LAYOUTS:
        yield Case(1, 2, 33, 65, 31, 257, layout=name)
    for D, Dv in ((5, 9), (61, 93), (1, 1), (1021, 1)):
        yield Case(1, 2, 40, 70, D, Dv, layout="padded")  # rows a multiple of 4 apart, head dims not
    # Each bucket of head dims once; more would be machine code for little.
    for D in (64, 128, 256):
        for is_causal in (False, True):
            yield Case(1, 2, 260, 530, D, D, is_causal=is_causal, precision="tf32")
            yield Case(1, 1, 260, 300, D - 4, D, is_causal=is_causal, precision="tf32")
    for is_causal in (False, True):
        yield Case(1, 1, 150, 300, 270, 263, is_causal=is_causal, precision="tf32")  # rows not by vectors of four
    few = Case(1, 2, 65, 130, 100, 72, precision="tf32")
    for name in ("uniform", "wide", "tiny", "denormal", "peaked"):
        yield replace(few, inputs=name)
    for name in ("k_nan", "v_inf", "later_inf"):
        yield replace(few, poison=name, is_causal=True)
