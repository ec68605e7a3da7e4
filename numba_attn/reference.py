"""Attention by its definition, in numpy alone: what everything else here is judged by.

`attention` is the float64 oracle; `attention_fp32` is the textbook fp32 evaluation whose error sets the budget of
accuracy class `fp32`, `attention_tf32` the same with TF32's operands, for class `tf32`. All select keys by position: a
removed key contributes nothing whatever its K and V hold, and a NaN or Inf that is attended reaches exactly the rows
that attend it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

TEMPORARY = 1 << 17  # elements of one temporary: it stays in a core's cache, and memory stays bounded


def attention(q, k, v, *, mask=None, causal=False, scale=None, enable_gqa=False) -> tuple[np.ndarray, np.ndarray]:
    """Attention and its log-sum-exp in float64.

    `O = softmax(scale * Q K^T + mask) V`, `lse = ln(sum_j exp(scale * q . k_j + mask_j))`, natural logarithm.

    Args:
        q: [..., H, Lq, D] or [Lq, D], any real dtype and strides.
        k: [..., Hkv, Lk, D] or [Lk, D]. Dimensions before the heads broadcast by numpy's rules.
        v: [..., Hkv, Lk, Dv] or [Lk, Dv], likewise.
        mask: broadcast to [..., Lq, Lk] by numpy's rules. bool: True keeps the key. Floating: added to the scaled
            score; -inf removes the key.
        causal: keep key j for row i only if i >= j (top-left aligned); both this and `mask` apply.
        scale: multiplies Q K^T. None: 1 / sqrt(D).
        enable_gqa: k and v may have fewer heads than q: head h reads head h // (H / Hkv) of theirs.

    Returns:
        O: [..., H, Lq, Dv] float64; exactly 0 in a row with no key left.
        lse: [..., H, Lq] float64; -inf in a row with no key left.

    Raises:
        ValueError: ranks, batch shapes, head dims, lengths or head counts that do not fit together, or a mask that
            does not broadcast.
        TypeError: a mask that is neither bool nor floating.

    Numerics: every operation in float64. With D = 0 every score is 0.
    """
    return _evaluate(q, k, v, mask, causal, scale, enable_gqa, np.float64, _scores, _sums)


def attention_fp32(q, k, v, *, mask=None, causal=False, scale=None, enable_gqa=False) -> tuple[np.ndarray, np.ndarray]:
    """The textbook evaluation in fp32: arguments, rules and errors as in `attention`, results in float32.

    Numerics: inputs, scale and mask are rounded to fp32; a mask that is -inf then removes the key. Each score is one
    running fp32 sum over d = 0, 1, ... of separately rounded products, then times scale, then plus mask. exp(s - max)
    is the correctly rounded fp32 value, so that the budget does not depend on the CPU. The row sum and each output are
    one running fp32 sum over keys in index order, the output divided by the row sum at the end. Nothing is flushed to
    zero.
    """
    return _evaluate(q, k, v, mask, causal, scale, enable_gqa, np.float32, _running_scores, _running_sums)


def attention_tf32(q, k, v, *, mask=None, causal=False, scale=None, enable_gqa=False) -> tuple[np.ndarray, np.ndarray]:
    """The textbook evaluation with TF32's products: `attention_fp32`, but for one rounding more of each factor.

    Numerics: Q, K, V and exp(s - max) are rounded to 11 significant bits (to nearest, ties to even; below 2^-126 to
    multiples of 2^-136) before they are multiplied. The row sum is of what was not rounded.
    """
    return _evaluate(q, k, v, mask, causal, scale, enable_gqa, np.float32, _running_scores_tf32, _running_sums_tf32)


def _evaluate(q, k, v, mask, causal, scale, enable_gqa, dtype, scores: Callable, sums: Callable):
    q, k, v, lead = _align(np.asarray(q), np.asarray(k), np.asarray(v), enable_gqa)
    *heads, Lq, D = q.shape
    Lk, Dv = v.shape[-2:]
    group = heads[-1] // max(k.shape[-3], 1)
    if mask is not None:
        mask = _broadcast_mask(mask, (*lead, Lq, Lk))
        mask = mask if lead else mask[None]
    scale = dtype(1 / math.sqrt(max(D, 1)) if scale is None else scale)
    O = np.zeros((*heads, Lq, Dv), dtype)
    lse = np.zeros((*heads, Lq), dtype)

    for chosen, row_blocks in _blocks(tuple(heads), Lq, max(D, Dv, Lk)):
        shared = (*chosen[:-1], chosen[-1] // group)
        gQ, gK, gV = q[chosen].astype(dtype), k[shared].astype(dtype), v[shared].astype(dtype)
        gMask = None if mask is None else mask[chosen]
        for rows in row_blocks:
            with np.errstate(all="ignore"):
                S = scores(gQ[:, rows], gK) * scale
                S, keep = _select(S, None if gMask is None else gMask[:, rows], causal, rows.start)
                empty = ~keep.any(axis=-1)
                m = np.where(empty, dtype(0), S.max(axis=-1, initial=-np.inf))
                # In float64 and rounded once: numpy's own fp32 exp differs from one CPU to another.
                P = np.exp((S - m[..., None]).astype(np.float64)).astype(dtype)
                l, acc = sums(P, gV, keep)
                O[(*chosen, rows)] = np.where(empty[..., None], 0, acc / l[..., None])
                lse[(*chosen, rows)] = m + np.log(l.astype(np.float64)).astype(dtype)
    return O.reshape(*lead, Lq, Dv), lse.reshape(*lead, Lq)


def _align(q, k, v, enable_gqa: bool):
    """q, k and v with one batch shape and a dimension of heads, and the result's leading dimensions."""
    arrays = {"q": q, "k": k, "v": v}
    for name, x in arrays.items():
        if x.ndim < 2:
            raise ValueError(f"{name} needs 2 dimensions or more, it has {x.ndim}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k need the same head dim: {q.shape[-1]}, {k.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v need the same length: {k.shape[-2]}, {v.shape[-2]}")
    H, Hk, Hv = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    if Hk != Hv:
        raise ValueError(f"k and v need the same number of heads: {Hk}, {Hv}")
    if H != Hk and not (enable_gqa and Hk and H % Hk == 0):
        raise ValueError(f"q and k need the same number of heads, or a multiple of k's with enable_gqa: {H}, {Hk}")
    try:
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    except ValueError as error:
        raise ValueError(f"batch shapes of q, k and v do not broadcast: {error}") from None
    lead = (*batch, H) if max(x.ndim for x in (q, k, v)) > 2 else ()
    heads = {"q": H, "k": Hk, "v": Hv}
    aligned = (np.broadcast_to(x, (*batch, heads[name], *x.shape[-2:])) for name, x in arrays.items())
    return *aligned, lead


def _broadcast_mask(mask, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.asarray(mask)
    if mask.dtype != np.bool_ and not np.issubdtype(mask.dtype, np.floating):
        raise TypeError(f"mask must be bool or floating, not {mask.dtype}")
    return np.broadcast_to(mask, shape)


def _blocks(heads: tuple[int, ...], Lq: int, width: int) -> Iterator[tuple[tuple[np.ndarray, ...], list[slice]]]:
    """Index arrays of some heads, and row blocks that walk them with temporaries of `TEMPORARY` elements."""
    count = math.prod(heads)
    rows = max(1, min(Lq, TEMPORARY // max(width, 1)))
    step = max(1, TEMPORARY // (rows * max(width, 1))) if rows >= Lq else 1
    row_blocks = [slice(first, min(first + rows, Lq)) for first in range(0, Lq, rows)]
    for first in range(0, count, step):
        yield np.unravel_index(np.arange(first, min(first + step, count)), heads), row_blocks


def _select(S: np.ndarray, mask: np.ndarray | None, causal: bool, first_row: int) -> tuple[np.ndarray, np.ndarray]:
    """Masked scores, -inf where the key is removed, and which keys each row keeps."""
    rows, Lk = S.shape[-2:]
    keep = np.ones(S.shape, bool)
    if causal:
        keep &= np.arange(first_row, first_row + rows)[:, None] >= np.arange(Lk)
    if mask is not None and mask.dtype == np.bool_:
        keep &= mask
    elif mask is not None:
        # A number beyond the type's range is -inf in it, and removes the key likewise.
        mask = mask.astype(S.dtype)
        keep &= mask != -np.inf
        S = S + mask
    return np.where(keep, S, S.dtype.type(-np.inf)), keep


def _scores(Q: np.ndarray, K: np.ndarray) -> np.ndarray:
    return Q @ K.swapaxes(-1, -2)


def _sums(P: np.ndarray, V: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row sums of P, and P V in which a removed key meets no product."""
    clean = np.isfinite(V).all(axis=-1)
    acc = P @ np.where(clean[..., None], V, 0)
    for head, key in np.argwhere(~clean):
        rows = keep[head, :, key]
        acc[head, rows] += P[head, rows, key, None] * V[head, key]
    return P.sum(axis=-1), acc


def _running_scores(Q: np.ndarray, K: np.ndarray) -> np.ndarray:
    S = np.zeros((*Q.shape[:2], K.shape[1]), Q.dtype)
    product = np.empty_like(S)
    Qt, Kt = np.ascontiguousarray(np.moveaxis(Q, -1, 0)), np.ascontiguousarray(np.moveaxis(K, -1, 0))
    for q, k in zip(Qt, Kt, strict=True):
        S += np.multiply(q[:, :, None], k[:, None, :], out=product)
    return S


def _running_scores_tf32(Q: np.ndarray, K: np.ndarray) -> np.ndarray:
    return _running_scores(_tf32(Q), _tf32(K))


def _running_sums_tf32(P: np.ndarray, V: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _running_sums(P, _tf32(V), keep, _tf32(P))


def _tf32(x: np.ndarray) -> np.ndarray:
    """fp32 numbers rounded to TF32, as fp32; NaN and Inf as they are."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0xFFF + (bits >> 13 & 1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def _running_sums(
    P: np.ndarray, V: np.ndarray, keep: np.ndarray, factors: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Row sums of P, and P V; `factors` take the place of P in the products."""
    factors = P if factors is None else factors
    l = np.zeros(P.shape[:2], P.dtype)
    acc = np.zeros((*P.shape[:2], V.shape[-1]), P.dtype)
    product = np.empty_like(acc)
    clean = np.isfinite(V).all(axis=(0, 2))
    for key in range(V.shape[1]):
        rows = keep[:, :, key, None]
        l += P[:, :, key]
        np.multiply(factors[:, :, key, None], V[:, key, None, :], out=product)
        acc += product if clean[key] else np.where(rows, product, P.dtype.type(0))
    return l, acc
