"""torch as a baseline: is it there, its switches, and the backends of its attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

BACKENDS = {"torch_default": None, "torch_math": "MATH", "torch_efficient": "EFFICIENT_ATTENTION"}
"""Names of the baselines; torch's name of the backend that each is held to, None for torch's own choice."""
TF32_BACKENDS = {"torch_math_tf32": "MATH"}
"""The same of those whose products are TF32's."""


def cuda_torch():
    """(torch, None), or (None, why there is no torch to use)."""
    try:
        import torch
    except ImportError:
        return None, "torch is not installed"
    return (torch, None) if torch.cuda.is_available() else (None, f"torch {torch.__version__} finds no GPU")


@contextmanager
def tf32(torch, on: bool) -> Iterator[None]:
    """fp32 products of torch in TF32 or in fp32, whatever its flags say; they are restored."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = on
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


@contextmanager
def held_to(torch, name: str) -> Iterator[None]:
    """A context in which torch's attention takes the baseline's backend or raises RuntimeError."""
    backend = {**BACKENDS, **TF32_BACKENDS}[name]
    kernel = torch.nn.attention.sdpa_kernel
    with kernel([getattr(torch.nn.attention.SDPBackend, backend)]) if backend else nullcontext():
        with tf32(torch, on=True) if name in TF32_BACKENDS else nullcontext():
            yield


def backend_of(torch, name: str, q, k, v, is_causal: bool) -> str:
    """The backend that serves the baseline, or 'unknown' where torch does not tell."""
    if backend := {**BACKENDS, **TF32_BACKENDS}[name]:
        return backend.lower()
    try:
        choice = torch._fused_sdp_choice(q, k, v, is_causal=is_causal)  # private: there is no public way to ask
        return torch.nn.attention.SDPBackend(choice).name.lower()
    except (AttributeError, TypeError, ValueError):
        return "unknown"
