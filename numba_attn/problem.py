"""The facts of one attention call and of one GPU, from which every choice is made.

Nothing here touches a GPU, an array library or a kernel, so each choice that follows from a `Problem` and a
`Device` can be tested anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

MAX_GRID = 2**31 - 1  # blocks in the x direction of a CUDA grid
MAX_LENGTH = 2**31 - 1  # kernels take lengths as 32-bit integers
ITEM_BYTES = 4
PRECISIONS = ("fp32", "tf32")
"""Accuracy classes that a call may ask for (`numba_attn.testing`): its result is of that one or a better one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One call: `O = softmax(scale Q K^T + mask) V` for every batch and head.

    Q is [B, H, Lq, D], K [B, Hkv, Lk, D], V [B, Hkv, Lk, Dv], O [B, H, Lq, Dv]. The scale is a run-time value and
    therefore not a fact; strides count only through `vector`.
    """

    B: int
    H: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    dtype: str = "float32"
    is_causal: bool = False
    vector: int = 1
    """Elements (1, 2 or 4) that travel in one aligned access to the rows of Q, K, V and O: 1 unless their last stride
    is 1 and their pointers, other strides and last lengths are multiples."""
    precision: str = "fp32"
    """One of `PRECISIONS`."""

    @property
    def flop(self) -> int:
        """Floating-point operations of the two products; under causality only the pairs that count."""
        pairs = self.Lq * self.Lk
        if self.is_causal:
            square = min(self.Lq, self.Lk)
            pairs = square * (square + 1) // 2 + max(self.Lq - self.Lk, 0) * self.Lk
        return 2 * self.B * self.H * pairs * (self.D + self.Dv)


@dataclass(frozen=True, slots=True)
class Device:
    """What a choice may know of a GPU."""

    name: str
    cc: tuple[int, int]
    sm_count: int
    smem_per_block_bytes: int
    """Largest shared memory of one block, opted in."""
    l2_bytes: int

    @property
    def arch(self) -> str:
        """Compiler target: the architecture's own instructions included where it has any (`sm_90a`)."""
        major, minor = self.cc
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


H200 = Device("NVIDIA H200", (9, 0), 132, 227 * 1024, 60 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Operand:
    """One array of a call, under the name by which the caller knows it."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    dtype: str
    device: int | None = None
    """None where nobody can say: an empty array, or one on the host."""
    pointer: int = 0


class View(NamedTuple):
    """How a kernel sees an array: shape and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, shape: tuple[int, ...]) -> View:
        """A row-major array."""
        return cls(shape, contiguous_strides(shape))

    @property
    def transposed(self) -> View:
        """The last two dimensions exchanged."""
        return View(*((*dims[:-2], dims[-1], dims[-2]) for dims in self))


@dataclass(frozen=True, slots=True)
class Geometry:
    """What three checked operands amount to: the problem, the 4-D views of them and the shapes of the results."""

    problem: Problem
    Q: View
    K: View
    V: View
    o_shape: tuple[int, ...]
    """As the caller sees it: the broadcast batch shape, heads if any operand has them, Lq and Dv."""
    scale: float
    """The default, 1 / sqrt(D)."""
    device: int | None
    stand_ins: tuple[str, ...] = ()
    """Operands without elements in their last dimension. One zero element repeated stands for each, and the problem
    has a head dim of 1: with D = 0 every score is 0, and with Dv = 0 only lse is of interest."""

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.o_shape[:-1]

    def nothing_to_launch(self, return_lse: bool) -> bool:
        """No element of a result depends on an input."""
        return 0 in (self.lse_shape if return_lse else self.o_shape) or self.problem.Lk == 0


def check_precision(precision) -> str:
    """The same. Raises ValueError unless it is one of `PRECISIONS`."""
    if isinstance(precision, str) and precision in PRECISIONS:
        return precision
    raise ValueError(f"precision is {precision!r}: it must be one of {', '.join(map(repr, PRECISIONS))}")


def describe(q: Operand, k: Operand, v: Operand, *, is_causal=False, enable_gqa=False, precision="fp32") -> Geometry:
    """Check the three operands and describe the call.

    Ranks as in torch: [Lq, D], [H, Lq, D], [..., H, Lq, D]. Batch dimensions (all before the heads) broadcast with
    stride 0, and several of them are viewed as one.

    Raises:
        TypeError: an operand is not floating-point, or the types differ.
        NotImplementedError: a floating-point type other than float32, or grouped heads.
        ValueError: rank, lengths, head dims, head counts, batch shapes, devices, alignment, or batch dimensions
            that cannot be viewed as one without a copy: each message names the operand. An unknown precision.
    """
    check_precision(precision)
    for operand in (q, k, v):
        _check_type(operand, q)
        _check_rank(operand)
    _check_device(k, q)
    _check_device(v, q if q.device is not None else k)
    H, Lq, D = _heads(q), q.shape[-2], q.shape[-1]
    Hkv, Lk, Dv = _heads(k), k.shape[-2], v.shape[-1]
    if k.shape[-1] != D:
        raise ValueError(f"{k.name} has head dim {k.shape[-1]} and {q.name} has {D}: they must be equal")
    if v.shape[-2] != Lk:
        raise ValueError(f"{v.name} has length {v.shape[-2]} and {k.name} has {Lk}: they must be equal")
    _check_groups(q, k, H, Hkv, enable_gqa)
    if _heads(v) != Hkv:
        raise ValueError(f"{v.name} has {_heads(v)} heads and {k.name} has {Hkv}: they must be equal")

    batch = _broadcast_batch(q, k, v)
    named = {"Q": q, "K": k, "V": v}
    views = {name: _view(operand, batch) for name, operand in named.items()}
    stand_ins = tuple(name for name, view in views.items() if view.shape[-1] == 0)
    for name in stand_ins:
        views[name] = View((*views[name].shape[:3], 1), (0, 0, 0, 0))
    vector = min(vector_width(view, named[name].pointer) for name, view in views.items())
    sizes = math.prod(batch), H, Hkv, Lq, Lk, max(D, 1), max(Dv, 1)
    problem = Problem(*sizes, q.dtype, is_causal, vector, precision)
    heads = (H,) if max(len(operand.shape) for operand in named.values()) > 2 else ()
    device = next((operand.device for operand in named.values() if operand.device is not None), None)
    o_shape = (*batch, *heads, Lq, Dv)
    return Geometry(problem, **views, o_shape=o_shape, scale=max(D, 1) ** -0.5, device=device, stand_ins=stand_ins)


def check_out(out: Operand, geometry: Geometry, like: Operand) -> View:
    """Check a caller's output array and give the 4-D view of it.

    Raises:
        TypeError: its type is not that of the operands.
        ValueError: its shape, its device, its alignment, or two of its elements share memory.
    """
    if out.shape != geometry.o_shape:
        raise ValueError(f"{out.name} has shape {out.shape} and the result has {geometry.o_shape}")
    _check_type(out, like)
    _check_device(out, like)
    extent = 0
    for size, stride in sorted(zip(out.shape, out.strides, strict=True), key=lambda dim: abs(dim[1])):
        if size > 1 and abs(stride) <= extent:
            raise ValueError(f"{out.name} has strides {out.strides}: its elements share memory")
        extent += (size - 1) * abs(stride)
    return _view(out, geometry.o_shape[:-3])


def vector_width(view: View, pointer: int) -> int:
    """Elements (4, 2 or 1) of four bytes that travel in one aligned access; rows are a whole number of them."""
    *row_dims, last_stride = view.strides
    if last_stride != 1:
        return 1
    strides = [stride for size, stride in zip(view.shape, row_dims, strict=False) if size > 1]
    for width in (4, 2):
        if pointer % (ITEM_BYTES * width) == 0 and all(n % width == 0 for n in (view.shape[-1], *strides)):
            return width
    return 1


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def strides_in_elements(name: str, strides: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Strides given in bytes, for the libraries that count so."""
    if any(stride % item_bytes for stride in strides):
        raise ValueError(f"{name} has byte strides {strides} that are not multiples of its {item_bytes}-byte elements")
    return tuple(stride // item_bytes for stride in strides)


def _check_type(operand: Operand, like: Operand) -> None:
    name, dtype = operand.name, operand.dtype
    if dtype != "float32":
        if dtype in ("float16", "bfloat16", "float64"):
            raise NotImplementedError(f"{name} is {dtype}: only float32 is there yet")
        raise TypeError(f"{name} is {dtype}: it must be float32")
    if dtype != like.dtype:
        raise TypeError(f"{name} is {dtype} and {like.name} is {like.dtype}: all must have one type")
    if operand.pointer % ITEM_BYTES:
        raise ValueError(f"{name} starts at an address that is not a multiple of its {ITEM_BYTES}-byte elements")


def _check_rank(operand: Operand) -> None:
    if len(operand.shape) < 2:
        raise ValueError(f"{operand.name} has {len(operand.shape)} dimensions: it needs 2 (length, head dim) or more")
    for size in operand.shape:
        if size > MAX_LENGTH:
            raise ValueError(f"{operand.name} has a dimension of {size}: {MAX_LENGTH} is the largest served")


def _check_device(operand: Operand, like: Operand) -> None:
    if operand.device != like.device and None not in (operand.device, like.device):
        raise ValueError(f"{operand.name} is on device {operand.device} and {like.name} on device {like.device}")


def _check_groups(q: Operand, k: Operand, H: int, Hkv: int, enable_gqa: bool) -> None:
    if H == Hkv:
        return
    if not enable_gqa:
        raise ValueError(f"{k.name} has {Hkv} heads and {q.name} has {H}: they must be equal unless enable_gqa=True")
    if Hkv == 0 or H % Hkv:
        raise ValueError(f"{k.name} has {Hkv} heads, which does not divide the {H} heads of {q.name}")
    raise NotImplementedError(f"{k.name} has {Hkv} heads for the {H} of {q.name}: grouped heads are not there yet")


def _heads(operand: Operand) -> int:
    return operand.shape[-3] if len(operand.shape) > 2 else 1


def _broadcast_batch(*operands: Operand) -> tuple[int, ...]:
    """The batch shape that all operands broadcast to; sizes must be equal or 1."""
    rank = max(len(operand.shape) for operand in operands)
    batch: list[int] = []
    for axis in range(-rank, -3):
        sizes = {operand.shape[axis]: operand.name for operand in reversed(operands) if len(operand.shape) >= -axis}
        wide = [size for size in sizes if size != 1]
        if len(wide) > 1:
            (size, name), (first, first_name) = ((size, sizes[size]) for size in wide[:2])
            raise ValueError(f"{name} has batch size {size} and {first_name} has {first}: they must be equal or 1")
        batch.append(wide[0] if wide else 1)
    if math.prod(batch) > MAX_LENGTH:
        raise ValueError(f"{operands[0].name} has {math.prod(batch)} batches: {MAX_LENGTH} is the largest served")
    return tuple(batch)


def _view(operand: Operand, batch: tuple[int, ...]) -> View:
    """The operand as [B, heads, length, head dim], broadcast to the batch shape."""
    missing = len(batch) + 3 - len(operand.shape)
    shape = (1,) * missing + operand.shape
    strides = (0,) * missing + operand.strides
    dims = [(size, 0 if own == 1 else stride) for size, own, stride in zip(batch, shape, strides, strict=False)]
    B_stride, extent = 0, None
    for size, stride in reversed([dim for dim in dims if dim[0] != 1]):
        if extent is None:
            B_stride = stride
        elif stride != extent and 0 not in batch:
            raise ValueError(
                f"{operand.name} has batch strides {operand.strides[:-3]} for the batch shape {batch}: "
                f"several batch dimensions must be viewable as one, so expand it to {batch} and copy it"
            )
        extent = size * stride
    return View((math.prod(batch), *shape[-3:]), (B_stride, *strides[-3:]))
