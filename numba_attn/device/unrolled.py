"""Verbs unrolled by Python: a function of registers that runs when the kernel is compiled, and emits it.

    @unrolled
    def scale_rows(e, O, alpha):
        for i in range(ROWS):
            for c in range(COLUMNS):
                O[i, c] = O[i, c] * alpha[i]

`scale_rows(O, alpha)` inside a kernel becomes straight-line code: each loop is Python's own, each operation one
instruction, so that local arrays surely stay in registers. In the simulator the same text runs on numbers: there is
no second description to keep equal.

`e` has the operations that have no operator (`fma`, `max`, `mma`, `ldmatrix`, ...). Arguments are local arrays (read
and written with constant subscripts), 32-bit integers, fp32 numbers, conditions and global tensors. A verb returns
nothing; results go to local arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from numba_attn.device import ptx, ptx_sm90
from numba_attn.device.evaluator import Evaluator
from numba_attn.device.verb import twin_of
from numba_attn.device.wgmma_fragments import Matrix
from numba_attn.tensor import Tensor, element_pointer, in_global_memory

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_WORD_BYTES = 4


def unrolled(function: Callable) -> Callable:
    """Make `function(e, *args)` a verb `function(*args)` of kernels."""

    def verb(typingctx, *args):
        def codegen(context, builder, sig, values):
            e = _Emitter(context, builder)
            function(e, *(e.argument(t, v) for t, v in zip(sig.args, values, strict=True)))
            return context.get_dummy_value()

        return types.none(*(types.unliteral(arg) for arg in args)), codegen

    # Numba reads the names of the arguments off the signature; the first is the typing context, in place of `e`.
    verb.__signature__ = inspect.signature(function)
    verb = intrinsic(verb)

    @twin_of(verb)
    def _verb(thread, *args):
        function(Evaluator(thread), *args)

    return verb


class _Value:
    """A number in a register: operators append instructions."""

    __slots__ = ("e", "ir")

    def __init__(self, e: _Emitter, value):
        self.e = e
        self.ir = value

    def _binary(self, other, floating: str | None, integer: str | None):
        builder, a = self.e.builder, self.ir
        b = other.ir if isinstance(other, _Value) else a.type(other)
        name = floating if a.type == _F32 else integer
        return _Value(self.e, getattr(builder, name)(a, b))

    def __add__(self, other):
        return self._binary(other, "fadd", "add")

    def __sub__(self, other):
        return self._binary(other, "fsub", "sub")

    def __mul__(self, other):
        return self._binary(other, "fmul", "mul")

    def __rshift__(self, other):
        return self._binary(other, None, "lshr")

    def __truediv__(self, other):
        return self._binary(other, "fdiv", None)

    def __xor__(self, other):
        return self._binary(other, None, "xor")

    def __and__(self, other):
        return self._binary(other, None, "and_")

    def __neg__(self):
        # As NVVM spells it.
        return _Value(self.e, self.e.builder.fsub(self.ir.type(-0.0), self.ir))

    def __lt__(self, other):
        return self._compare("<", other)

    def __le__(self, other):
        return self._compare("<=", other)

    def __gt__(self, other):
        return self._compare(">", other)

    def _compare(self, operator: str, other):
        builder, a = self.e.builder, self.ir
        b = other.ir if isinstance(other, _Value) else a.type(other)
        compare = builder.fcmp_ordered if a.type == _F32 else builder.icmp_signed
        return _Value(self.e, compare(operator, a, b))

    __radd__, __rmul__ = __add__, __mul__


class _Patch:
    """A local array of the kernel."""

    def __init__(self, e: _Emitter, array_type, value):
        self.e = e
        self.type = array_type
        self.array = e.context.make_array(array_type)(e.context, e.builder, value)

    def _pointer(self, index):
        index = [_I64(subscript) for subscript in (index if isinstance(index, tuple) else (index,))]
        context, builder = self.e.context, self.e.builder
        return cgutils.get_item_pointer(context, builder, self.type, self.array, index, wraparound=False)

    def __getitem__(self, index):
        return _Value(self.e, self.e.builder.load(self._pointer(index)))

    def __setitem__(self, index, value):
        pointer = self._pointer(index)
        self.e.builder.store(value.ir if isinstance(value, _Value) else pointer.type.pointee(value), pointer)


class _Global:
    """A tensor of the kernel, written by elements."""

    def __init__(self, e: _Emitter, tensor_type: Tensor, value):
        self.e, self.type, self.value = e, tensor_type, value

    def pointer(self, index):
        kind = types.UniTuple(types.int32, len(index))
        packed = self.e.context.make_tuple(self.e.builder, kind, [i.ir for i in index])
        pointer = element_pointer(self.e.context, self.e.builder, self.type, self.value, kind, packed)[0]
        return in_global_memory(self.e.builder, pointer)


class _Emitter:
    """`e` where the kernel is compiled."""

    def __init__(self, context, builder):
        self.context = context
        self.builder = builder

    def argument(self, kind, value):
        if isinstance(kind, types.Array):
            return _Patch(self, kind, value)
        if isinstance(kind, Tensor):
            return _Global(self, kind, value)
        if isinstance(kind, types.Integer):
            return _Value(self, self.context.cast(self.builder, value, kind, types.int32))
        return _Value(self, value)

    def number(self, x: float) -> _Value:
        return _Value(self, _F32(x))

    def _of(self, x):
        return x.ir if isinstance(x, _Value) else _F32(x)

    def fma(self, a, b, c):
        """a b + c with one rounding."""
        return _Value(self, self.builder.fma(*map(self._of, (a, b, c))))

    def max(self, a, b):
        """The larger number; NaN only if both are."""
        return _Value(self, ptx.emit_max(self.builder, self._of(a), self._of(b)))

    def ex2(self, x):
        """2^x, or 0 where that is below 2^-126."""
        return _Value(self, ptx.emit_ex2_ftz(self.builder, self._of(x)))

    def where(self, condition, a, b):
        return _Value(self, self.builder.select(condition.ir, self._of(a), self._of(b)))

    def shfl_xor(self, x, distance: int):
        """x of lane `lane ^ distance`."""
        return _Value(self, ptx.emit_shfl_bfly(self.builder, x.ir, distance))

    def halves(self, low, high):
        """Two numbers rounded to fp16, packed."""
        return _Value(self, ptx.emit_halves(self.builder, low.ir, high.ir))

    def unpack(self, packed) -> tuple:
        """The two halves as fp32."""
        pair = self.builder.bitcast(packed.ir, ir.VectorType(ir.HalfType(), 2))
        return tuple(
            _Value(self, self.builder.fpext(self.builder.extract_element(pair, _I32(i)), _F32)) for i in (0, 1)
        )

    def ldmatrix(self, address, transposed: bool = False) -> list:
        """Four 8 x 8 matrices of halves, this lane's row of them being at a shared address."""
        registers = ptx.emit_ldmatrix_x4(self.builder, address.ir, transposed=transposed)
        return [_Value(self, register) for register in registers]

    def mma(self, a, b, c) -> list:
        """C + A B, see `fragments`."""
        registers = ptx.emit_mma_m16n8k16(self.builder, *([self._of(x) for x in operand] for operand in (a, b, c)))
        return [_Value(self, register) for register in registers]

    def wgmma(self, columns: int, chains: list, *, wait: bool = True) -> list:
        """For each chain of (left, right) the registers of the sum of left @ right, see `wgmma_fragments`.

        right, and left where it is no list of registers: a `Matrix`. Without `wait`, `wgmma_wait` must follow.
        """

        def plain(operand):
            if not isinstance(operand, Matrix):
                return [register.ir for register in operand]
            address = operand.address.ir
            first = firsts.setdefault(id(address), self.builder.lshr(address, _I32(4)))
            return first, *operand.words, operand.transposed

        firsts = {}
        chains = [[(plain(left), plain(right)) for left, right in chain] for chain in chains]
        sums = ptx_sm90.emit_wgmma(self.builder, columns, chains, wait=wait)
        return [[_Value(self, register) for register in registers] for registers in sums]

    def wgmma_wait(self, pending: int, sums: list, registers: list) -> list:
        """`sums`, once at most `pending` statements of `wgmma` are in flight; `registers`: their left operands."""
        values = ptx_sm90.emit_wgmma_wait(self.builder, pending, [x.ir for x in sums], [x.ir for x in registers])
        return [_Value(self, value) for value in values]

    def address(self, tensor: _Global, *index):
        """Where an element is, for `copy_async`."""
        return _Value(self, self.builder.ptrtoint(tensor.pointer(index), _I64))

    def copy_async(self, target, source, step_bytes: int) -> None:
        """Start a copy of 16 bytes from `step_bytes` behind a global address to as far behind a shared one."""
        target, source = target + step_bytes, source + step_bytes
        ptx.emit_cp_async(self.builder, target.ir, source.ir, 16, _I32(16))

    def copy_bulk(self, target, source, step_bytes: int, n_bytes: int, barrier) -> None:
        """Copy n_bytes from `step_bytes` behind a global address to a shared one, counted by a barrier."""
        source = source + step_bytes
        ptx_sm90.emit_copy_bulk(self.builder, target.ir, source.ir, n_bytes, barrier.ir)

    def mbarrier_wait(self, barrier, parity) -> None:
        """Wait until the barrier's phase of this parity is complete."""
        ptx_sm90.emit_mbarrier_wait(self.builder, barrier.ir, parity.ir)

    def mbarrier_arrive(self, barrier, condition) -> None:
        """One arrival, by threads for which the condition holds."""
        with self.builder.if_then(condition.ir):
            ptx_sm90.emit_mbarrier_arrive(self.builder, barrier.ir)

    def store(self, tensor: _Global, index, values, condition=None) -> None:
        """Write consecutive elements in one access, where the condition holds."""
        if condition is not None:
            with self.builder.if_then(condition.ir):
                self.store(tensor, index, values)
            return
        pointer = tensor.pointer(index)
        if len(values) == 1:
            self.builder.store(values[0].ir, pointer)
            return
        kind = ir.VectorType(pointer.type.pointee, len(values))
        vector = ir.Constant(kind, ir.Undefined)
        for i, value in enumerate(values):
            vector = self.builder.insert_element(vector, value.ir, _I32(i))
        pointer = self.builder.bitcast(pointer, ir.PointerType(kind, pointer.type.addrspace))
        self.builder.store(vector, pointer, align=_WORD_BYTES * len(values))
