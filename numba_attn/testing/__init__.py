"""Check an attention kernel, yours or one of ours: inputs that break kernels, error budgets and guarded outputs.

    from numba_attn import testing

    for case in testing.small_cases():
        q, k, v = testing.make_inputs(case)
        o, lse = my_attention(q, k, v, causal=case.is_causal)
        testing.assert_accurate(o, lse, q, k, v, causal=case.is_causal)

Everything is numpy; nothing is read from the environment, so a check means the same everywhere.
"""

from numba_attn.testing.accuracy import CLASSES, MIN_ROWS, AccuracyClass, Expected, assert_accurate
from numba_attn.testing.cases import Case, cases, make_inputs, place_inputs, small_cases
from numba_attn.testing.inputs import DISTRIBUTIONS, POISONS, distribution
from numba_attn.testing.layouts import LAYOUTS, Guarded, Placed, guarded, place

__all__ = [
    "CLASSES",
    "DISTRIBUTIONS",
    "LAYOUTS",
    "MIN_ROWS",
    "POISONS",
    "AccuracyClass",
    "Case",
    "Expected",
    "Guarded",
    "Placed",
    "assert_accurate",
    "cases",
    "distribution",
    "guarded",
    "make_inputs",
    "place",
    "place_inputs",
    "small_cases",
]
