"""The problems that benchmarks run, by name, the target of the project first."""

from __future__ import annotations

from dataclasses import replace

from numba_attn.cli.measure import HEADLINE
from numba_attn.problem import Problem

PROBLEMS = {
    "headline": HEADLINE,
    "headline_causal": replace(HEADLINE, is_causal=True),
    "headline_b4": replace(HEADLINE, B=4),
    "d64_l4096": Problem(B=2, H=16, Hkv=16, Lq=4096, Lk=4096, D=64, Dv=64),
    "decode_b32_k4096": Problem(B=32, H=32, Hkv=32, Lq=1, Lk=4096, D=128, Dv=128),
    "decode_b1_k65536": Problem(B=1, H=32, Hkv=32, Lq=1, Lk=65536, D=128, Dv=128),
    "d128_l2048_causal": Problem(B=4, H=16, Hkv=16, Lq=2048, Lk=2048, D=128, Dv=128, is_causal=True),
}

AS_A_TEST = {"small": Problem(B=2, H=3, Hkv=3, Lq=65, Lk=130, D=72, Dv=72)}
"""What each benchmark runs, once, where timings are off."""
