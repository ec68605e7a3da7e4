"""The public functions."""

from __future__ import annotations

from numba_attn import choice
from numba_attn.call import as_float, attend, device_of, facts_of, flags
from numba_attn.kernels import KERNELS


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Attention with the names, defaults, rank rules and semantics of torch's function.

    `O = softmax(scale * Q K^T) V` for every batch and head.

    Args:
        query: [..., H, Lq, D] float32, or [Lq, D] or [H, Lq, D]; any strides. A torch CUDA tensor, a CuPy array, a
            Numba or other device array, or a numpy array (copied to the device and back).
        key: [..., H, Lk, D], of the library and device of `query`. Batch dimensions broadcast.
        value: [..., H, Lk, Dv], likewise.
        attn_mask: not there yet.
        dropout_p: not there yet; 0.
        is_causal: row i attends the keys j <= i (top-left aligned).
        scale: multiplies Q K^T; None means 1 / sqrt(D).
        enable_gqa: fewer heads in `key` and `value` than in `query`: not there yet.

    Returns:
        O: [..., H, Lq, Dv] float32, contiguous, of the caller's library and device, ordered on its current stream.

    Raises:
        NotImplementedError: what is not there yet, a floating-point type other than float32, or an input that
            requires grad while grad mode is on.
        TypeError: no array, arrays of different libraries, a type that is not floating-point, or a flag that is no
            bool.
        ValueError: shapes or devices that do not fit together, a CPU tensor, or both `attn_mask` and `is_causal`.
        RuntimeError: no GPU.

    Numerics: accuracy class of the kernel that serves (`explain`); scores, softmax and sums in fp32 or better. A row
        without keys (Lk = 0) is 0.
    """
    if attn_mask is not None:
        if flags(("query", "key", "value"), is_causal, enable_gqa)[0]:
            raise ValueError("attn_mask and is_causal=True must not be given together")
        raise NotImplementedError("attn_mask is not there yet: only is_causal removes keys")
    if not (type(dropout_p) is float and dropout_p == 0.0) and as_float("dropout_p", dropout_p) != 0.0:
        raise NotImplementedError("dropout_p is not there yet: only 0.0 is served")
    return attend(("query", "key", "value"), query, key, value, is_causal, scale, enable_gqa)[0]


def attention(
    q,
    k,
    v,
    *,
    mask=None,
    causal=False,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel=None,
    out=None,
    stream=None,
    precision="fp32",
):
    """Attention with a choice of kernel, output array and stream.

    `O = softmax(scale * Q K^T) V`, `lse = ln(sum_j exp(scale * q . k_j))` for every batch and head.

    Args:
        q, k, v: as `query`, `key`, `value` of `scaled_dot_product_attention`.
        mask: not there yet.
        causal: row i attends the keys j <= i (top-left aligned).
        scale: multiplies Q K^T; None means 1 / sqrt(D).
        enable_gqa: fewer heads in `k` and `v` than in `q`: not there yet.
        return_lse: return (O, lse).
        kernel: name of a registered kernel, or a `Kernel`, registered or not; None: the choice that `explain` shows.
        out: array for O, of the result's shape, type, library and device, with any strides; it must share no memory
            with the inputs.
        stream: where to queue the work: a stream of the arrays' library, or a driver handle; None: its current one.
            With a stream, the caller keeps the arrays alive until the work is done.
        precision: "fp32", or "tf32" for a kernel that multiplies operands of 11 significant bits where there is one
            for the call: class `tf32` of `numba_attn.testing`. Nothing else, no flag of torch either, turns it on.

    Returns:
        O: [..., H, Lq, Dv] float32: `out`, or a new contiguous array of the caller's library and device, ordered on
            the stream.
        lse: [..., H, Lq] float32, natural logarithm, only if `return_lse`.

    Raises:
        ValueError: the kernel asked for cannot serve (the message has its reason: there is no fallback), or `out`
            does not fit or overlaps an input, or `precision` is neither of the two. Otherwise as
            `scaled_dot_product_attention`.

    Numerics: as `scaled_dot_product_attention`. At precision "tf32" a product is `fl11(a) fl11(b)`, where fl11 rounds
        to 11 significant bits and a, b are Q and K, or P and V; sums and softmax stay in fp32, as does a kernel that
        has no such mode. A row without keys has lse = -inf.
    """
    if mask is not None:
        raise NotImplementedError("mask is not there yet: only causal removes keys")
    o, lse = attend(("q", "k", "v"), q, k, v, causal, scale, enable_gqa, return_lse, kernel, out, stream, precision)
    return (o, lse) if return_lse else o


def explain(
    q,
    k,
    v,
    *,
    mask=None,
    causal=False,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel=None,
    out=None,
    stream=None,
    precision="fp32",
) -> choice.Explanation:
    """Which kernel serves `attention` with these arguments, and for each of the others why not.

    Args:
        As in `attention`. Nothing is launched; `scale`, `return_lse`, `out` and `stream` are checked and change no
            choice.

    Returns:
        Its repr has a line for each kernel, and for precision "tf32" the class of what the chosen one gives. Without a
        GPU, numpy arrays are judged by the facts of an H200.

    Raises:
        As `attention`, but a problem that no kernel serves is an answer, not an error.
    """
    if mask is not None:
        raise NotImplementedError("mask is not there yet: only causal removes keys")
    names = ("q", "k", "v")
    causal, enable_gqa, _ = flags(names, causal, enable_gqa, return_lse)
    geometry, has_matmul = facts_of(names, q, k, v, causal, enable_gqa, stream, precision, scale, out)
    device, has_gpu = device_of(geometry)
    return choice.explain(kernel, KERNELS, geometry.problem, device, has_gpu, has_matmul)
