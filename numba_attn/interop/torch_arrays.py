"""torch tensors. Imported only when a caller's array is one."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from torch.autograd import forward_ad

from numba_attn.interop.flags import turned_off
from numba_attn.problem import Operand

DEVICE_TYPE = "cuda"


def adopt(array: torch.Tensor, name: str, stream) -> torch.Tensor:
    return array


def read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names) -> tuple[tuple[int, int, int], Hashable]:
    # Spelled out for all three: this is a third of a warm call's own time.
    try:
        return (q.data_ptr(), k.data_ptr(), v.data_ptr()), (
            q.shape,
            k.shape,
            v.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            q.dtype,
            k.dtype,
            v.dtype,
            # -1 for all that is not a GPU's.
            q.get_device(),
            k.get_device(),
            v.get_device(),
            (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled(),
            forward_ad._current_level >= 0 and (_is_dual(q) or _is_dual(k) or _is_dual(v)),
        )
    except (RuntimeError, NotImplementedError) as error:
        name = next((n for n, x in zip(names, (q, k, v), strict=True) if not _is_plain(x)), names[0])
        raise TypeError(f"{name} is not a plain strided tensor: {str(error).splitlines()[0]}") from None


# Private, but a public way to ask would take longer than the rest of `read`.
if not hasattr(forward_ad, "_current_level"):
    forward_ad = SimpleNamespace(_current_level=-1)


def _is_dual(array: torch.Tensor) -> bool:
    """Whether the tensor carries a tangent of forward-mode differentiation."""
    return forward_ad.unpack_dual(array).tangent is not None


def _is_plain(array: torch.Tensor) -> bool:
    try:
        return bool(array.stride()) and array.data_ptr() >= 0
    except (RuntimeError, NotImplementedError):
        return False


def operand(array: torch.Tensor, name: str) -> Operand:
    if array.device.type != DEVICE_TYPE:
        raise ValueError(
            f"{name} is on {array.device}: a CUDA tensor is needed (numba_attn.sim.attention runs on a CPU)"
        )
    (pointer, _, _), _ = read(array, array, array, (name,) * 3)
    if array.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} requires grad: gradients are not there yet (torch.no_grad() turns them off)")
    if forward_ad._current_level >= 0 and _is_dual(array):
        raise NotImplementedError(f"{name} is a dual tensor: forward-mode gradients are not there yet")
    if array.is_neg():
        raise ValueError(f"{name} carries torch's pending negation: pass {name}.resolve_neg()")
    dtype = str(array.dtype).removeprefix("torch.")
    return Operand(name, tuple(array.shape), array.stride(), dtype, array.device.index, pointer)


def empty(like: torch.Tensor, shape, strides, dtype: str, stream) -> torch.Tensor:
    if stream is not None:
        with _entered(stream, like.device):
            return empty(like, shape, strides, dtype, None)
    if dtype == "float32":
        return like.new_empty_strided(shape, strides)
    return like.new_empty_strided(shape, strides, dtype=getattr(torch, dtype))


def fill(array: torch.Tensor, value: float, stream) -> None:
    if stream is None:
        array.fill_(value)
    else:
        with _entered(stream, array.device):
            array.fill_(value)


def pointer(array: torch.Tensor) -> int:
    return array.data_ptr()


def _public_current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# The private call takes a tenth of a microsecond, the public one five.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _public_current_stream)


def stream_handle(device: int, stream) -> int:
    return _current_stream(device) if stream is None else _as_stream(stream, device).cuda_stream


def check_stream(stream, like: torch.Tensor) -> None:
    # A tensor on a CPU is refused by its name, later.
    if like.device.type == DEVICE_TYPE or not isinstance(stream, torch.cuda.Stream | int):
        _as_stream(stream, like.device)


def release(adopted: tuple, stream) -> None:
    pass


def view(array: torch.Tensor, shape, strides, offset: int) -> torch.Tensor:
    return array.as_strided(shape, strides, array.storage_offset() + offset)


def matmul(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, stream) -> None:
    with _tf32_off(), nullcontext() if stream is None else _entered(stream, out.device):
        torch.bmm(left, right, out=out)


def _tf32_off():
    switch = torch.backends.cuda.matmul
    if not hasattr(switch, "fp32_precision"):  # before torch 2.9
        return turned_off(lambda: switch.allow_tf32 or None, partial(setattr, switch, "allow_tf32"), False)
    # Reading the old flag raises where the new one was set.
    return turned_off(_precision_to_put_back, partial(setattr, switch, "fp32_precision"), "ieee")


def _precision_to_put_back() -> str | None:
    switch = torch.backends.cuda.matmul
    found = switch.fp32_precision
    if found in ("ieee", "none"):
        return None
    # What comes from a wider setting goes on following that.
    switch.fp32_precision = "none"
    return "none" if switch.fp32_precision == found else found


def _as_stream(stream, device) -> torch.cuda.Stream:
    if isinstance(stream, torch.cuda.Stream):
        if stream.device_index != (device if isinstance(device, int) else device.index):
            raise ValueError(f"stream is of {stream.device} and the tensors are on another device")
        return stream
    if isinstance(stream, int):
        return torch.cuda.ExternalStream(stream, device=device)
    raise TypeError(f"stream is a {type(stream).__name__}: a torch.cuda.Stream or a driver handle is needed")


def _entered(stream, device):
    return torch.cuda.stream(_as_stream(stream, device))
