"""The problems that are measured, and the names under which their results are kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from numba_attn.choice import choose
from numba_attn.kernel import Kernel
from numba_attn.problem import ITEM_BYTES, MAX_LENGTH, Device, Problem, View, vector_width

DTYPES = {"fp32": "float32"}
FEW_ROWS = 16  # up to which kernels for decoding are measured

_NAME = re.compile(r"b(\d+)_h(\d+)_q(\d+)_k(\d+)_d(\d+)(?:_v(\d+))?(?:_(fp32|tf32))?(?:_(full|causal))?")


@dataclass(frozen=True)
class NamedProblem:
    """A problem, how its inputs are distributed and which kernels a standard run times on it."""

    problem: Problem
    name: str
    """Short, for the command line."""
    inputs: str = "normal"
    every_kernel: bool = False

    @property
    def full_name(self) -> str:
        """As results are kept: `b32_h32_q512_k512_d1024_v1024_fp32_full`."""
        return full_name(self.problem)


def make_problem(
    B: int,
    H: int,
    Lq: int,
    Lk: int,
    D: int,
    Dv: int,
    dtype: str = "fp32",
    is_causal: bool = False,
    precision: str = "fp32",
) -> Problem:
    """The facts of a call with contiguous inputs."""
    shapes = (B, H, Lq, D), (B, H, Lk, D), (B, H, Lk, Dv)
    vector = min(vector_width(View.contiguous(shape), 0) for shape in shapes)
    return Problem(B, H, H, Lq, Lk, D, Dv, DTYPES[dtype], is_causal, vector, precision)


def full_name(problem: Problem) -> str:
    dtype = next(name for name, dtype in DTYPES.items() if dtype == problem.dtype)
    numbers = dtype if problem.precision == "fp32" else problem.precision
    lengths = f"b{problem.B}_h{problem.H}_q{problem.Lq}_k{problem.Lk}_d{problem.D}_v{problem.Dv}"
    return f"{lengths}_{numbers}_{'causal' if problem.is_causal else 'full'}"


def short_name(problem: Problem) -> str:
    """The full name without what goes without saying: Dv = D, fp32, not causal."""
    name = full_name(problem).replace("_fp32", "").removesuffix("_full")
    return name.replace(f"_d{problem.D}_v{problem.D}", f"_d{problem.D}")


def parse(name: str) -> Problem:
    """The problem of a full or short name. Raises ValueError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not like b4_h16_q4096_k4096_d128 or b4_h16_q4096_k4096_d128_v64_fp32_causal")
    *sizes, precision, mask = match.groups()
    B, H, Lq, Lk, D, Dv = (int(size or match[5]) for size in sizes)
    if not all(1 <= size <= MAX_LENGTH for size in (B, H, Lq, Lk, D, Dv)):
        raise ValueError(f"{name!r}: sizes are 1 to {MAX_LENGTH}")
    return make_problem(B, H, Lq, Lk, D, Dv, is_causal=mask == "causal", precision=precision or "fp32")


HEADLINE = make_problem(32, 32, 512, 512, 1024, 1024)

PROBLEMS = (
    NamedProblem(HEADLINE, "headline", inputs="uniform", every_kernel=True),
    *(
        NamedProblem(parse(name), name)
        for name in (
            "b4_h16_q4096_k4096_d64",
            "b4_h16_q4096_k4096_d128",
            "b4_h16_q4096_k4096_d128_causal",
            "b2_h16_q4096_k4096_d256",
            "b2_h16_q4096_k4096_d512",
            "b32_h32_q512_k512_d64",
            "b32_h32_q512_k512_d128",
            "b32_h32_q512_k512_d256",
            "b4_h16_q1024_k1024_d64",
            "b3_h7_q1000_k777_d80_v96",
            "b32_h32_q1_k4096_d128",
            "b1_h32_q1_k65536_d128",
            "b4_h16_q4096_k4096_d64_tf32",
            "b4_h16_q4096_k4096_d128_tf32",
            "b2_h16_q4096_k4096_d256_tf32",
        )
    ),
    NamedProblem(replace(HEADLINE, precision="tf32"), "headline_tf32", inputs="uniform"),
)


def named(problem: Problem) -> NamedProblem:
    """The registered problem of the same facts, or a new one."""
    return next((known for known in PROBLEMS if known.problem == problem), NamedProblem(problem, short_name(problem)))


def find(text: str) -> NamedProblem:
    """A problem by its registered, short or full name. Raises ValueError."""
    known = {known.name: known for known in PROBLEMS}
    return known[text] if text in known else named(parse(text))


def changed(known: NamedProblem, **facts) -> NamedProblem:
    """The same inputs and kernels for other facts of the problem: under causality, or at another precision."""
    problem = replace(known.problem, **facts)
    return replace(known, problem=problem, name=named(problem).name)


def standard_kernels(known: NamedProblem, kernels: Sequence[Kernel], device: Device) -> list[Kernel]:
    """Kernels that a run times where none are asked for, in their order.

    At the headline problem all that can serve. Elsewhere the one chosen by default, those that suit, `flash_fp32` as
    the yardstick of plain FP32 arithmetic, and `split_keys_fp32` where there are few rows.
    """
    problem = known.problem
    able = [kernel for kernel in kernels if kernel.supports(problem, device) is None]
    if known.every_kernel or not able:
        return able
    names = {"flash_fp32", choose(None, able, problem, device).name}
    names |= {"split_keys_fp32"} if problem.Lq <= FEW_ROWS else set()
    return [kernel for kernel in able if kernel.name in names or kernel.suits(problem, device) is None]


def input_bytes(problem: Problem) -> int:
    elements = problem.H * problem.Lq * problem.D + problem.Hkv * problem.Lk * (problem.D + problem.Dv)
    return ITEM_BYTES * problem.B * elements


def output_bytes(problem: Problem) -> int:
    return ITEM_BYTES * problem.B * problem.H * problem.Lq * problem.Dv
