"""What the arguments of an unrolled verb are where the kernel is compiled: numbers in registers, local arrays, tensors.

Operators are those that numbers of the simulator have, so that one text serves both; what only one of the two could
follow is refused here.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import cgutils, types

from numba_attn.tensor import Tensor, element_pointer, in_global_memory

F32, I32, I64, BOOL = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(1)


class Value:
    """A number in a register: operators append instructions."""

    __slots__ = ("e", "ir")
    __array_ufunc__ = None  # numpy's scalars leave operators to this class

    def __init__(self, e, value):
        self.e = e
        self.ir = value

    def __bool__(self):
        # The simulator knows the number, so only this refuses what would always be true.
        raise TypeError("a value that the compiler does not know: use e.where, or a condition of e.store")

    def _with(self, other):
        return other.ir if isinstance(other, Value) else self.ir.type(other)

    def _binary(self, a, b, floating: str | None, integer: str | None):
        name = floating if self.ir.type == F32 else integer
        if name is None:
            raise TypeError(f"no such operation on {self.ir.type}")
        return Value(self.e, getattr(self.e.builder, name)(a, b))

    def _compare(self, operator: str, other):
        builder = self.e.builder
        compare = builder.fcmp_ordered if self.ir.type == F32 else builder.icmp_signed
        return Value(self.e, compare(operator, self.ir, self._with(other)))

    def __add__(self, other):
        return self._binary(self.ir, self._with(other), "fadd", "add")

    def __sub__(self, other):
        return self._binary(self.ir, self._with(other), "fsub", "sub")

    def __rsub__(self, other):
        return self._binary(self._with(other), self.ir, "fsub", "sub")

    def __mul__(self, other):
        return self._binary(self.ir, self._with(other), "fmul", "mul")

    def __rshift__(self, other):
        return self._binary(self.ir, self._with(other), None, "ashr")

    def __truediv__(self, other):
        return self._binary(self.ir, self._with(other), "fdiv", None)

    def __rtruediv__(self, other):
        return self._binary(self._with(other), self.ir, "fdiv", None)

    def __xor__(self, other):
        return self._binary(self.ir, self._with(other), None, "xor")

    def __and__(self, other):
        return self._binary(self.ir, self._with(other), None, "and_")

    __radd__, __rmul__, __rxor__, __rand__ = __add__, __mul__, __xor__, __and__

    def __neg__(self):
        # -0.0 - x is how NVVM spells it; 0 - x would make 0 of -0.
        return (-0.0 if self.ir.type == F32 else 0) - self

    def __lt__(self, other):
        return self._compare("<", other)

    def __le__(self, other):
        return self._compare("<=", other)

    def __gt__(self, other):
        return self._compare(">", other)

    def __ge__(self, other):
        return self._compare(">=", other)

    def __eq__(self, other):
        return self._compare("==", other)

    def __ne__(self, other):
        builder = self.e.builder
        # True for NaN, as in Python.
        compare = builder.fcmp_unordered if self.ir.type == F32 else builder.icmp_signed
        return Value(self.e, compare("!=", self.ir, self._with(other)))

    __hash__ = None


def of(x, kind=F32):
    """The IR value of a number in a register, or a constant of that type."""
    return x.ir if isinstance(x, Value) else kind(x)


class Patch:
    """A local array of the kernel."""

    def __init__(self, e, array_type, value):
        self.e = e
        self.type = array_type
        self.array = e.context.make_array(array_type)(e.context, e.builder, value)

    def _pointer(self, index):
        index = [I64(subscript) for subscript in (index if isinstance(index, tuple) else (index,))]
        context, builder = self.e.context, self.e.builder
        return cgutils.get_item_pointer(context, builder, self.type, self.array, index, wraparound=False)

    def __getitem__(self, index):
        return Value(self.e, self.e.builder.load(self._pointer(index)))

    def __setitem__(self, index, value):
        pointer = self._pointer(index)
        self.e.builder.store(of(value, pointer.type.pointee), pointer)


class Global:
    """A tensor of the kernel, written by elements."""

    def __init__(self, e, tensor_type: Tensor, value):
        self.e, self.type, self.value = e, tensor_type, value

    def pointer(self, index):
        kind = types.UniTuple(types.int32, len(index))
        packed = self.e.context.make_tuple(self.e.builder, kind, [of(i, I32) for i in index])
        pointer = element_pointer(self.e.context, self.e.builder, self.type, self.value, kind, packed)[0]
        return in_global_memory(self.e.builder, pointer)
