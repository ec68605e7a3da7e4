"""Scalar types, `math`, and `max` and `min` as kernels mean them.

Real values are numpy scalars, so that fp32 stays fp32. Integers are Python ints, because Numba computes them in 64
bits; they wrap only where a kernel casts or stores them. Casts named in a kernel (`float32(x)`, `int32(x)`) and
dtypes passed to `cuda.shared.array` are the same objects, so both work.
"""

from __future__ import annotations

import math

import numpy as np

_ONE = np.float32(1)  # times a Python float rounds it to fp32, in half the time of a call of `float32`
_NAMES = {"bool": "bool_", "boolean": "bool_", "intp": "int64", "uintp": "uint64"}


class IntegerCast:
    """A numba integer type called as a function: truncates towards zero, then wraps; NaN gives 0."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype
        self._span = 1 << 8 * dtype.itemsize
        self._lowest = int(np.iinfo(dtype).min)
        self._highest = int(np.iinfo(dtype).max)

    def __call__(self, x) -> int:
        if not isinstance(x, int):
            if x != x:
                return 0
            if isinstance(x, (float, np.floating)):
                # The conversion instruction saturates.
                return int(min(max(x, self._lowest), self._highest)) if abs(x) != math.inf else self._limit(x)
            x = int(x)
        return x if self._lowest <= x <= self._highest else (x - self._lowest) % self._span + self._lowest

    def _limit(self, x) -> int:
        return self._highest if x > 0 else self._lowest


def dtype_of(dtype) -> np.dtype:
    """The numpy dtype of a numba type, a cast, a numpy type or a name."""
    if isinstance(dtype, np.dtype):
        return dtype
    dtype = getattr(dtype, "dtype", dtype) if isinstance(dtype, IntegerCast) else getattr(dtype, "name", dtype)
    return np.dtype(_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype)


_CASTS: dict[np.dtype, object] = {}


def cast_of(dtype):
    """What a value becomes when it is stored as `dtype`: a callable of one value."""
    dtype = dtype_of(dtype)
    if dtype not in _CASTS:
        _CASTS[dtype] = IntegerCast(dtype) if dtype.kind in "iu" else dtype.type
    return _CASTS[dtype]


def maximum(a, b, *more):
    """`max` on a GPU: a NaN loses against a number."""
    a = b if b > a or a != a else a
    return maximum(a, *more) if more else a


def minimum(a, b, *more):
    """`min` on a GPU: a NaN loses against a number."""
    a = b if b < a or a != a else a
    return minimum(a, *more) if more else a


def power(a, b):
    """`pow` without Python's exceptions."""
    return np.power(a, b) if isinstance(a, np.generic) else _scalar(np.power(np.float64(a), b))


def _scalar(x):
    return x.item() if isinstance(x, np.float64) else x


def _wrapped(function, by_numpy):
    """`function` with the argument's precision; arguments for which Python has exceptions go to numpy."""
    float32 = np.float32

    def call(x):
        try:
            return _ONE * function(x) if type(x) is float32 else _typed(x, function(x))
        except (OverflowError, ValueError, ZeroDivisionError):
            return by_numpy(x) if isinstance(x, np.generic) else _scalar(by_numpy(np.float64(x)))

    call.__name__ = function.__name__
    return call


def _typed(x, y):
    return type(x)(y) if isinstance(x, np.floating) else y


class Math:
    """The `math` module as simulated kernels see it: results in the argument's type, inf and nan instead of errors."""

    _NUMPY = {
        "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
        "log1p": np.log1p, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh,
        "cosh": np.cosh, "tanh": np.tanh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
        "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "fabs": np.fabs,
        "erf": None, "erfc": None,  # defined everywhere
    }  # fmt: skip

    def __init__(self):
        for name, by_numpy in self._NUMPY.items():
            setattr(self, name, _wrapped(getattr(math, name), by_numpy))
        self.pow = power
        self.fmod = np.fmod
        self.atan2 = np.arctan2
        self.hypot = np.hypot
        self.copysign = np.copysign
        self.ldexp = np.ldexp
        self.ceil = _rounded(math.ceil)
        self.floor = _rounded(math.floor)
        self.trunc = _rounded(math.trunc)

    def __getattr__(self, name):
        # Predicates and constants are right as they are.
        return getattr(math, name)


def _rounded(function):
    return lambda x: function(x) if math.isfinite(x) else 0


def fused_multiply_add(a, b, c):
    """a * b + c with the last rounding only, in the type of the operands."""
    if isinstance(a, np.float64):
        return a * b + c
    return _ONE * (float(a) * float(b) + float(c))


def reciprocal_sqrt(x):
    """1 / sqrt(x)"""
    return type(x)(1) / np.sqrt(x)


MATH = Math()

LIBDEVICE = {
    "fmaf": fused_multiply_add, "fmaf_rn": fused_multiply_add, "fma": fused_multiply_add, "fma_rn": fused_multiply_add,
    "expf": MATH.exp, "exp": MATH.exp, "fast_expf": MATH.exp, "exp2f": MATH.exp2, "exp2": MATH.exp2,
    "logf": MATH.log, "log": MATH.log, "fast_logf": MATH.log, "log2f": MATH.log2, "log2": MATH.log2,
    "fast_log2f": MATH.log2, "sqrtf": MATH.sqrt, "sqrt": MATH.sqrt, "fsqrt_rn": MATH.sqrt, "tanhf": MATH.tanh,
    "rsqrtf": reciprocal_sqrt, "rsqrt": reciprocal_sqrt, "fmaxf": maximum, "fmax": maximum, "fminf": minimum,
    "fmin": minimum, "fabsf": abs, "fabs": abs,
}  # fmt: skip
"""Functions of `numba.cuda.libdevice` that have a twin; their approximate forms are computed exactly."""
