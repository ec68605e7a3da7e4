"""Scalar verbs and constants."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from numba_attn.device.verb import twin_of, verb

LOG2E = np.float32(1.4426950408889634)
LN2 = np.float32(0.693147122859955)
LN2_REST = np.float32(np.log(2) - float(LN2))
"""Positive, so that -inf times ln 2 is -inf in both parts."""
ZERO = np.float32(0)


def cdiv(a: int, b: int) -> int:
    """ceil(a / b) of host integers."""
    return -(-a // b)


@intrinsic
def fma(typingctx, a, b, c):
    """round(a * b + c) in fp32: one instruction, one rounding (`fma.rn.f32`)."""

    def codegen(context, builder, signature, args):
        values = [context.cast(builder, v, t, types.float32) for v, t in zip(args, signature.args, strict=True)]
        return builder.fma(*values)

    return types.float32(a, b, c), codegen


@twin_of(fma)
def _fma(thread, a, b, c):
    # The product of two fp32 numbers is exact in fp64; the sum is rounded there first, which matters one time in 2^29.
    return _ONE * (float(a) * float(b) + float(c))


_ONE = np.float32(1)  # times a Python float: the fastest way to round to fp32


@intrinsic
def bits(typingctx, x):
    """The 32 bits of an fp32 number as a signed integer; those of magnitudes are ordered as these are, NaN last."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(context.cast(builder, args[0], signature.args[0], types.float32), ir.IntType(32))

    return types.int32(x), codegen


@twin_of(bits)
def _bits(thread, x):
    return int(np.float32(x).view(np.int32))


@intrinsic
def from_bits(typingctx, i):
    """The fp32 number of 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(context.cast(builder, args[0], signature.args[0], types.int32), ir.FloatType())

    return types.float32(i), codegen


@twin_of(from_bits)
def _from_bits(thread, i):
    return np.int32(i).view(np.float32)


@verb
def product_of(a, b):
    """a b, rounded: no compiler contracts it with a sum that it is a term of, as it may a product of `*`."""
    return fma(a, b, ZERO)


@verb
def two_sum(a, b):
    """(a + b, what its rounding lost), exactly, whichever is larger. Source: Knuth, TAOCP 2, 4.2.2."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@verb
def add_product(total, rest, a, b):
    """(total, rest) + a b to twice fp32's digits; without `rest`, and where not finite, the plain sum."""
    product = product_of(a, b)
    total, lost = two_sum(total, product)
    return total, rest + (lost + fma(a, b, -product))


@intrinsic
def quotient(typingctx, a, b):
    """a // b of two 32-bit integers that are not negative: Numba's own is one of 64 bits."""

    def codegen(context, builder, signature, args):
        values = [context.cast(builder, v, t, types.int32) for v, t in zip(args, signature.args, strict=True)]
        return builder.udiv(*values)

    return types.int32(a, b), codegen


@twin_of(quotient)
def _quotient(thread, a, b):
    return a // b
