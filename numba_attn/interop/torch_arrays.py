"""torch tensors. Imported only when a caller's array is one."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from numba_attn.problem import Operand

DEVICE_TYPE = "cuda"


def adopt(array: torch.Tensor, name: str, stream) -> torch.Tensor:
    return array


def read(array: torch.Tensor, name: str) -> tuple[int, Hashable]:
    try:
        strides = array.stride()
        return array.data_ptr(), (
            array.shape,
            strides,
            array.dtype,
            array.device,
            array.requires_grad and torch.is_grad_enabled(),
            # Only views of complex tensors carry the bit, and their last stride is 2 or more.
            bool(strides) and strides[-1] != 1 and array.is_neg(),
        )
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"{name} is not a plain strided tensor: {str(error).splitlines()[0]}") from None


def operand(array: torch.Tensor, name: str) -> Operand:
    if array.device.type != DEVICE_TYPE:
        raise ValueError(
            f"{name} is on {array.device}: a CUDA tensor is needed (numba_attn.sim.attention runs on a CPU)"
        )
    pointer, (shape, strides, dtype, device, grad, negated) = read(array, name)
    if grad:
        raise NotImplementedError(f"{name} requires grad: gradients are not there yet (torch.no_grad() turns them off)")
    if negated:
        raise ValueError(f"{name} carries torch's pending negation: pass {name}.resolve_neg()")
    return Operand(name, tuple(shape), strides, str(dtype).removeprefix("torch."), device.index, pointer)


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


def release(adopted: tuple, stream) -> None:
    pass


def _as_stream(stream, device) -> torch.cuda.Stream:
    if isinstance(stream, torch.cuda.Stream):
        return stream
    if isinstance(stream, int):
        return torch.cuda.ExternalStream(stream, device=device)
    raise TypeError(f"stream is a {type(stream).__name__}: a torch.cuda.Stream or a driver handle is needed")


def _entered(stream, device):
    return torch.cuda.stream(_as_stream(stream, device))
