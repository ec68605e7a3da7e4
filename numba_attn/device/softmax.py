"""Online softmax: the running maximum m, the running sum l and the factor alpha that rescales what came before."""

from __future__ import annotations

from math import log

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from numba_attn.device.math import LOG2E, ZERO, two_sum
from numba_attn.device.ptx import emit_ex2, emit_ex2_ftz, emit_max, emit_shfl_bfly, emit_shfl_idx
from numba_attn.device.verb import twin_of, verb

NEG_INF = np.float32(-np.inf)
ONE = np.float32(1)
ALL_LANES = 0xFFFFFFFF
LEAST_EXPONENT = -126
"""Of a number that is not denormal."""


def _butterfly(combine):
    """Code generator of a reduction over the 32 lanes, the same bits in every lane."""

    def codegen(context, builder, signature, args):
        x = args[0]
        for distance in (16, 8, 4, 2, 1):
            x = combine(builder, x, emit_shfl_bfly(builder, x, distance))
        return x

    return codegen


def _butterfly_twin(thread, x, combine):
    for distance in (16, 8, 4, 2, 1):
        lanes = thread.exchange(ALL_LANES, x)
        x = combine(x, lanes[thread.lane ^ distance])
    return x


@intrinsic
def warp_max(typingctx, x):
    """max over the 32 lanes, in every lane; NaN is passed over."""
    return types.float32(types.float32), _butterfly(emit_max)


@twin_of(warp_max)
def _warp_max(thread, x):
    return _butterfly_twin(thread, x, np.fmax)


@intrinsic
def warp_sum(typingctx, x):
    """Sum over the 32 lanes, the same bits in every lane."""
    return types.float32(types.float32), _butterfly(lambda builder, a, b: builder.fadd(a, b))


@twin_of(warp_sum)
def _warp_sum(thread, x):
    return _butterfly_twin(thread, x, np.add)


@verb
def warp_two_sum(x, rest):
    """Sum of (x, rest) over the 32 lanes to twice fp32's digits, the same bits in every lane; x as by `warp_sum`."""
    for distance in (16, 8, 4, 2, 1):
        other_rest = cuda.shfl_xor_sync(ALL_LANES, rest, distance)
        x, lost = two_sum(x, cuda.shfl_xor_sync(ALL_LANES, x, distance))
        rest = (rest + other_rest) + lost
    return x, rest


@intrinsic
def of_row(typingctx, x, i):
    """x of lane i, in every lane; whole warps must call it."""

    def codegen(context, builder, signature, args):
        lane = context.cast(builder, args[1], signature.args[1], types.int32)
        return emit_shfl_idx(builder, args[0], lane)

    return types.float32(types.float32, i), codegen


@twin_of(of_row)
def _of_row(thread, x, i):
    return thread.exchange(ALL_LANES, x)[i]


@intrinsic
def finite_max(typingctx, m):
    """m, or 0 for a row that has met no key: exp(-inf - 0) is 0 where exp(-inf - -inf) is NaN."""

    def codegen(context, builder, signature, args):
        m = args[0]
        return builder.select(builder.fcmp_ordered(">", m, m.type(-np.inf)), m, m.type(0.0))

    return types.float32(types.float32), codegen


@twin_of(finite_max)
def _finite_max(thread, m):
    return m if m > NEG_INF else ZERO


@intrinsic
def exp(typingctx, x):
    """e^x as `ex2(x log2 e)`, for x <= 0: relative error below 2^-22 + |x| 2^-24."""

    def codegen(context, builder, signature, args):
        return emit_ex2(builder, builder.fmul(args[0], args[0].type(float(LOG2E))))

    return types.float32(types.float32), codegen


@twin_of(exp)
def _exp(thread, x):
    return np.exp2(x * LOG2E)


@intrinsic
def exp2(typingctx, x):
    """2^x within 2 ulp, 0 where that is below 2^-126."""

    def codegen(context, builder, signature, args):
        return emit_ex2_ftz(builder, args[0])

    return types.float32(types.float32), codegen


@twin_of(exp2)
def _exp2(thread, x):
    return ZERO if x < LEAST_EXPONENT else np.exp2(x)


@verb
def reciprocal(l, has_keys):
    """1 / l, and 0 for a row without keys, so that its output is exactly 0.

    A row whose scores are all -inf has keys and l = 0: it becomes NaN, as the formula says.
    """
    return ONE / l if has_keys else ZERO


@verb
def log_sum_exp(m, l):
    """m + ln l: -inf for a row without keys, for which both terms are."""
    return m + log(l)
