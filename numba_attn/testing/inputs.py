"""Input distributions by name, each there for a fault that the others do not show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def _uniform(q, k, v, rng) -> Arrays:
    return tuple(rng.random(x.shape) for x in (q, k, v))


def _normal(q, k, v, rng) -> Arrays:
    return q, k, v


def _peaked(q, k, v, rng) -> Arrays:
    return 8 * q, k, v


def _cancelling(q, k, v, rng) -> Arrays:
    sign = np.where(np.arange(v.shape[-2]) % 2, -1.0, 1.0)
    return 0.1 * q, k, sign[:, None] * (100 + v)


def _constant(q, k, v, rng) -> Arrays:
    return q, np.broadcast_to(k[..., :1, :], k.shape), np.broadcast_to(v[..., :1, :], v.shape)


def _wide(q, k, v, rng) -> Arrays:
    def magnitudes(x, low, high):
        return 10.0 ** rng.uniform(low, high, (*x.shape[:-1], 1))

    return q * magnitudes(q, -4, 0.5), k * magnitudes(k, -4, 0), v * magnitudes(v, -6, 6)


def _tiny(q, k, v, rng) -> Arrays:
    return 1e-3 * q, 1e-3 * k, 1e-3 * v


def _denormal(q, k, v, rng) -> Arrays:
    return 4e-39 * q, np.sign(k) * rng.uniform(1e37, 1e38, k.shape), 1e-39 * v


def _large(q, k, v, rng) -> Arrays:
    return 5e8 * q, 5e8 * k, v


DISTRIBUTIONS: dict[str, Callable[..., Arrays]] = {
    "uniform": _uniform,
    "normal": _normal,
    "peaked": _peaked,
    "cancelling": _cancelling,
    "constant": _constant,
    "wide": _wide,
    "tiny": _tiny,
    "denormal": _denormal,
    "large": _large,
}
"""Name -> function of N(0, 1) arrays q, k, v and a generator.

`uniform` [0, 1): the softmax is nearly flat and errors average away. `peaked`: scores of 8 N(0, 1), one key dominates.
`cancelling`: V of alternating sign, O far smaller than V. `constant`: all keys equal, all values equal: O is that
value. `wide`: rows of Q, K and V over many orders of magnitude. `tiny`: everything times 1e-3. `denormal`: Q and V
below fp32's normal range, K huge, so that scores are near 1: anything flushed to zero shows. `large`: scores near
1e17, one-hot results.
"""


def distribution(name: str, q_shape, k_shape, v_shape, seed: int = 0) -> Arrays:
    """q, k, v of the named distribution as fp32 arrays; the same for the same arguments, whatever the platform."""
    rng = np.random.default_rng(seed)
    normal = tuple(rng.standard_normal(shape) for shape in (q_shape, k_shape, v_shape))
    return tuple(x.astype(np.float32) for x in DISTRIBUTIONS[name](*normal, rng))


def _q_nan(q, k, v) -> None:
    q[0, 0, 1, 0] = np.nan


def _k_nan(q, k, v) -> None:
    k[0, 0, 2, 0] = np.nan


def _v_inf(q, k, v) -> None:
    v[0, 0, 2, -1] = np.inf


def _v_later_nan(q, k, v) -> None:
    v[..., v.shape[-2] // 2 :, :] = np.nan


def _later_inf(q, k, v) -> None:
    k[..., k.shape[-2] // 2 :, :] = np.inf
    v[..., v.shape[-2] // 2 :, :] = -np.inf


def _unattended_nan(q, k, v) -> None:
    k[..., q.shape[-2] :, :] = np.nan
    v[..., q.shape[-2] :, :] = np.nan


POISONS: dict[str, Callable[..., None]] = {
    "q_nan": _q_nan,
    "k_nan": _k_nan,
    "v_inf": _v_inf,
    "v_later_nan": _v_later_nan,
    "later_inf": _later_inf,
    "unattended_nan": _unattended_nan,
}
"""Name -> function that writes NaN or Inf into q, k or v: it reaches exactly the rows that attend it.

The last three are for causal calls: rows before the poisoned keys stay clean. `unattended_nan`: keys past the last
query, which no row attends.
"""
