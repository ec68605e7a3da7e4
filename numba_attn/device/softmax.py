"""Online softmax: the running maximum m, the running sum l and the factor alpha that rescales what came before."""

from __future__ import annotations

from math import log

import numpy as np
from numba import cuda, float32

from numba_attn.device.math import LOG2E
from numba_attn.device.ptx import ex2
from numba_attn.device.verb import verb

NEG_INF = np.float32(-np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)
ALL_LANES = 0xFFFFFFFF


@verb
def warp_max(x):
    """max over the 32 lanes, in every lane; NaN is passed over."""
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 16))
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 8))
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 4))
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))
    return max(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))


@verb
def warp_sum(x):
    """Sum over the 32 lanes, the same bits in every lane."""
    x += cuda.shfl_xor_sync(ALL_LANES, x, 16)
    x += cuda.shfl_xor_sync(ALL_LANES, x, 8)
    x += cuda.shfl_xor_sync(ALL_LANES, x, 4)
    x += cuda.shfl_xor_sync(ALL_LANES, x, 2)
    return x + cuda.shfl_xor_sync(ALL_LANES, x, 1)


@verb
def finite_max(m):
    """m, or 0 for a row that has met no key: exp(-inf - 0) is 0 where exp(-inf - -inf) is NaN."""
    return m if m > NEG_INF else ZERO


@verb
def exp(x):
    """e^x by `ex2`, for x <= 0: relative error below 2^-22 + |x| 2^-24."""
    return ex2(float32(x * LOG2E))


@verb
def reciprocal(l, has_keys):
    """1 / l, and 0 for a row without keys, so that its output is exactly 0.

    A row whose scores are all -inf has keys and l = 0: it becomes NaN, as the formula says.
    """
    return ONE / l if has_keys else ZERO


@verb
def log_sum_exp(m, l, has_keys):
    """m + ln l, and -inf for a row without keys."""
    return m + log(l) if has_keys else NEG_INF
