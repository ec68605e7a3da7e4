"""`Tensor`: the type of a kernel's array arguments.

A Tensor is a global pointer, 32-bit lengths and 64-bit strides in elements. Inside a kernel `K[b, h, j, d]` reads
or writes an element, `K[b, h]` is the tensor of the remaining dimensions, and `K.shape[i]` is a length. Offsets are
64-bit before the first product. Indices are used as they are: a negative one does not count from the end.

Unlike a stock Numba array it carries no parent, itemsize or address space to guess: accesses compile to
`ld.global` and `st.global`, and four operands pack into one argument buffer in about a microsecond.
"""

from __future__ import annotations

import operator
import struct

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.cudadecl import registry as declarations
from numba.cuda.cudaimpl import registry as implementations
from numba.cuda.extending import make_attribute_wrapper, models, register_model
from numba.cuda.typing.templates import AbstractTemplate, signature

_GLOBAL = 1  # the address space of global memory in NVVM IR


class Tensor(types.Type):
    """Numba type of an `ndim`-dimensional array of `dtype` in global memory, with any strides."""

    def __init__(self, dtype, ndim: int):
        self.dtype = dtype
        self.ndim = ndim
        super().__init__(name=f"Tensor({dtype}, {ndim})")


def packing(ndim: int) -> str:
    """`struct` format of one Tensor in a kernel's argument buffer: pointer, lengths, strides, naturally aligned."""
    return f"P{ndim}i{ndim}q"


@register_model(Tensor)
class _TensorModel(models.StructModel):
    def __init__(self, manager, tensor):
        members = [
            ("data", types.CPointer(tensor.dtype)),
            ("shape", types.UniTuple(types.int32, tensor.ndim)),
            ("strides", types.UniTuple(types.int64, tensor.ndim)),
        ]
        super().__init__(manager, tensor, members)


make_attribute_wrapper(Tensor, "shape", "shape")


def index_types(index) -> list:
    """Types of the subscripts in `x[index]`."""
    return list(index.types) if isinstance(index, types.BaseTuple) else [index]


def index_values(context, builder, index, value) -> list:
    """The subscripts in `x[index]` as 64-bit integers."""
    values = cgutils.unpack_tuple(builder, value) if isinstance(index, types.BaseTuple) else [value]
    return [context.cast(builder, v, t, types.int64) for v, t in zip(values, index_types(index), strict=True)]


@declarations.register_global(operator.getitem)
class _GetItem(AbstractTemplate):
    def generic(self, args, kws):
        tensor, index = args
        if isinstance(tensor, Tensor):
            left = tensor.ndim - len(index_types(index))
            if left >= 0:
                return signature(Tensor(tensor.dtype, left) if left else tensor.dtype, tensor, index)


@declarations.register_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args, kws):
        tensor, index, _ = args
        if isinstance(tensor, Tensor) and len(index_types(index)) == tensor.ndim:
            return signature(types.none, tensor, index, tensor.dtype)


def element_pointer(context, builder, tensor, value, index, index_value):
    """Pointer to `tensor[index]`, with the lengths and strides of the dimensions that `index` leaves."""
    parts = cgutils.create_struct_proxy(tensor)(context, builder, value=value)
    strides = cgutils.unpack_tuple(builder, parts.strides)
    shape = cgutils.unpack_tuple(builder, parts.shape)
    subscripts = index_values(context, builder, index, index_value)
    offset = context.get_constant(types.int64, 0)
    for subscript, stride in zip(subscripts, strides, strict=False):
        offset = builder.add(offset, builder.mul(subscript, stride))
    used = len(subscripts)
    return builder.gep(parts.data, [offset]), shape[used:], strides[used:]


def in_global_memory(builder, pointer):
    """The pointer as one to global memory, which a choice between tensors hides from the compiler."""
    return builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, _GLOBAL))


@implementations.lower(operator.getitem, Tensor, types.Any)
def _getitem(context, builder, sig, args):
    pointer, shape, strides = element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
    if not shape:
        return builder.load(in_global_memory(builder, pointer))
    view = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    view.data = pointer
    view.shape = cgutils.pack_array(builder, shape)
    view.strides = cgutils.pack_array(builder, strides)
    return view._getvalue()


@implementations.lower(operator.setitem, Tensor, types.Any, types.Any)
def _setitem(context, builder, sig, args):
    pointer, _, _ = element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
    builder.store(args[2], in_global_memory(builder, pointer))
    return context.get_dummy_value()


class ArgumentBuffer:
    """A kernel's arguments as it reads them: Tensors by their layouts, ints as they are, an fp32 scalar for None.

    template: the bytes, pointers and fp32 scalars being 0; positions: where each argument's pointer or scalar is.
    """

    def __init__(self, layouts: list):
        formats, values, self.positions = "", [], []
        for layout in layouts:
            if layout is None or isinstance(layout, int):
                code, content = ("f", [0.0]) if layout is None else ("i", [layout])
            else:
                code, content = packing(len(layout.shape)), [0, *layout.shape, *layout.strides]
            # A layout of no elements more, so that the size ends on the alignment of what follows.
            self.positions.append(struct.calcsize(f"{formats}0{code[0]}"))
            formats += code
            values += content
        self.template = struct.pack(formats, *values)
