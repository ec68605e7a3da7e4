"""Exact attention on NVIDIA GPUs, by kernels written in Python that can be opened, edited and checked.

`scaled_dot_product_attention` has torch's signature, `attention` has every option, `explain` tells which kernel
serves a call, and `KERNELS` are the registered kernels. `reference`, `sim` and `testing` are modules for checking.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from numba_attn import versions

if TYPE_CHECKING:
    from numba_attn.api import attention, explain, scaled_dot_product_attention
    from numba_attn.kernels import KERNELS

__version__ = versions.version("numba-attn") or "0+unknown"
__all__ = ["KERNELS", "attention", "explain", "scaled_dot_product_attention"]
_MODULES = ("reference", "sim", "testing")

_problem = versions.package_problem()


def __getattr__(name: str):
    """Loads what is asked for at its first use: Numba's import is most of a second, and not all need it."""
    if name in _MODULES:
        return import_module(f"numba_attn.{name}")
    if name in __all__:
        # Not at import: `python -m numba_attn info` must be able to tell.
        if _problem is not None:
            raise ImportError(_problem)
        value = getattr(import_module("numba_attn.kernels" if name == "KERNELS" else "numba_attn.api"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
