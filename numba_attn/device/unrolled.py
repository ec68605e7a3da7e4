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
nothing; results go to local arrays. Conditions are for `where` and `store`: Python cannot branch on what is not known
yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from numba_attn.device import ptx, ptx_cluster, ptx_sm90
from numba_attn.device.evaluator import Evaluator
from numba_attn.device.registers import BOOL, F32, I32, I64, Global, Patch, Value, of
from numba_attn.device.verb import twin_of
from numba_attn.device.wgmma_fragments import Matrix
from numba_attn.tensor import Tensor

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


class _Emitter:
    """`e` where the kernel is compiled."""

    def __init__(self, context, builder):
        self.context = context
        self.builder = builder

    def argument(self, kind, value):
        if isinstance(kind, types.Array):
            return Patch(self, kind, value)
        if isinstance(kind, Tensor):
            return Global(self, kind, value)
        if isinstance(kind, types.Integer):
            return Value(self, self.context.cast(self.builder, value, kind, types.int32))
        return Value(self, value)

    def number(self, x: float) -> Value:
        return Value(self, F32(x))

    def fma(self, a, b, c):
        """a b + c with one rounding."""
        return Value(self, self.builder.fma(*map(of, (a, b, c))))

    def max(self, a, b):
        """The larger number; NaN only if both are."""
        return Value(self, ptx.emit_max(self.builder, of(a), of(b)))

    def max_magnitude(self, a, b):
        """The larger magnitude; NaN if either is."""
        return Value(self, ptx.emit_max_magnitude(self.builder, of(a), of(b)))

    def ex2(self, x):
        """2^x, or 0 where that is below 2^-126."""
        return Value(self, ptx.emit_ex2_ftz(self.builder, of(x)))

    def where(self, condition, a, b):
        return Value(self, self.builder.select(of(condition, BOOL), of(a), of(b)))

    def shfl_xor(self, x, distance: int):
        """x of lane `lane ^ distance`."""
        return Value(self, ptx.emit_shfl_bfly(self.builder, of(x), distance))

    def halves(self, low, high):
        """Two numbers rounded to fp16, packed."""
        return Value(self, ptx.emit_halves(self.builder, of(low), of(high)))

    def unpack(self, packed) -> tuple:
        """The two halves as fp32."""
        pair = self.builder.bitcast(of(packed, I32), ir.VectorType(ir.HalfType(), 2))
        return tuple(Value(self, self.builder.fpext(self.builder.extract_element(pair, I32(i)), F32)) for i in (0, 1))

    def count_magnitudes(self, counts, pair, least):
        """Two counts as halves, one more for each of two halves whose magnitude reaches that in `least`."""
        operands = (of(x, I32) for x in (counts, pair, least))
        return Value(self, ptx.emit_count_magnitudes(self.builder, *operands))

    def ldmatrix(self, address, transposed: bool = False) -> list:
        """Four 8 x 8 matrices of halves, this lane's row of them being at a shared address."""
        registers = ptx.emit_ldmatrix_x4(self.builder, of(address, I32), transposed=transposed)
        return [Value(self, register) for register in registers]

    def mma(self, a, b, c) -> list:
        """C + A B, see `fragments`."""
        operands = ([of(x, kind) for x in operand] for operand, kind in ((a, I32), (b, I32), (c, F32)))
        return [Value(self, register) for register in ptx.emit_mma_m16n8k16(self.builder, *operands)]

    def wgmma(self, columns: int, chains: list, *, wait: bool = True) -> list:
        """For each chain of (left, right) the registers of the sum of left @ right, see `wgmma_fragments`.

        right, and left where it is no list of registers: a `Matrix`. Without `wait`, `wgmma_wait` must follow.
        """

        def plain(operand):
            if not isinstance(operand, Matrix):
                return [of(register, I32) for register in operand]
            address = of(operand.address, I32)
            first = firsts.setdefault(id(address), self.builder.lshr(address, I32(4)))
            return first, *operand.words, operand.transposed

        firsts = {}
        chains = [[(plain(left), plain(right)) for left, right in chain] for chain in chains]
        sums = ptx_sm90.emit_wgmma(self.builder, columns, chains, wait=wait)
        return [[Value(self, register) for register in registers] for registers in sums]

    def wgmma_wait(self, pending: int, sums: list, registers: list) -> list:
        """`sums`, once at most `pending` statements of `wgmma` are in flight; `registers`: their left operands."""
        sums, registers = [of(x) for x in sums], [of(x, I32) for x in registers]
        return [Value(self, value) for value in ptx_sm90.emit_wgmma_wait(self.builder, pending, sums, registers)]

    def address(self, tensor: Global, *index):
        """Where an element is, for `copy_async`."""
        return Value(self, self.builder.ptrtoint(tensor.pointer(index), I64))

    def copy_async(self, target, source, step_bytes: int) -> None:
        """Start a copy of 16 bytes from `step_bytes` behind a global address to as far behind a shared one."""
        target, source = of(target + step_bytes, I32), source + step_bytes
        ptx.emit_cp_async(self.builder, target, source.ir, 16, I32(16))

    def copies_async_if(self, condition, target, copies) -> None:
        """Start copies of 16 bytes where the condition holds, behind one branch.

        copies: (to_bytes, source, offset, from_bytes), from `offset` + from_bytes behind a global address to to_bytes
        behind the shared address `target`.
        """
        with self.builder.if_then(of(condition, BOOL)):
            for to_bytes, source, offset, from_bytes in copies:
                address = self.builder.add(source.ir, self.builder.sext(of(offset, I32), I64))
                ptx.emit_cp_async_behind(self.builder, of(target, I32), address, to_bytes, from_bytes)

    def copy_bulk(self, target, source, step_bytes: int, n_bytes: int, barrier) -> None:
        """Copy n_bytes from `step_bytes` behind a global address to a shared one, counted by a barrier."""
        source = source + step_bytes
        ptx_sm90.emit_copy_bulk(self.builder, of(target, I32), source.ir, n_bytes, of(barrier, I32))

    def mbarrier_wait(self, barrier, parity) -> None:
        """Wait until the barrier's phase of this parity is complete."""
        ptx_sm90.emit_mbarrier_wait(self.builder, of(barrier, I32), of(parity, I32))

    def mbarrier_arrive(self, barrier, condition) -> None:
        """One arrival, by threads for which the condition holds."""
        with self.builder.if_then(of(condition, BOOL)):
            ptx_sm90.emit_mbarrier_arrive(self.builder, of(barrier, I32))

    def mbarrier_wait_cluster(self, barrier, parity) -> None:
        """The same, and acquire what other blocks of the cluster released."""
        ptx_cluster.emit_mbarrier_wait_cluster(self.builder, of(barrier, I32), of(parity, I32))

    def mbarrier_arrive_at(self, barrier, rank, condition, *, releases: bool = True) -> None:
        """One arrival at the barrier of the cluster's block `rank`, by threads for which the condition holds.

        Without `releases` it says only that reads are over, and costs no fence.
        """
        operands = of(barrier, I32), of(rank, I32), of(condition, BOOL)
        ptx_cluster.emit_mbarrier_arrive_at(self.builder, *operands, releases=releases)

    def copy_bulk_to(self, target, source, n_bytes: int, barrier, rank) -> None:
        """Copy n_bytes from a shared address to one of block `rank`, counted by its barrier."""
        target, source, barrier, rank = (of(x, I32) for x in (target, source, barrier, rank))
        ptx_cluster.emit_copy_bulk_to(self.builder, target, source, n_bytes, barrier, rank)

    def store_shared(self, address, words: list) -> None:
        """Write 1, 2 or 4 registers to a shared address, aligned to all of them."""
        ptx.emit_store_shared(self.builder, of(address, I32), [of(word, I32) for word in words])

    def load_shared(self, address, n: int) -> list:
        """1, 2 or 4 fp32 at a shared address, aligned to all of them."""
        return [Value(self, x) for x in ptx.emit_load_shared(self.builder, of(address, I32), n)]

    def load(self, tensor: Global, index, n: int, behind: int = 0) -> list:
        """n consecutive elements, the first so many behind that of the index, in one access of aligned addresses."""
        pointer = self.builder.gep(tensor.pointer(index), [I64(behind)])
        kind = ir.PointerType(ir.VectorType(pointer.type.pointee, n), pointer.type.addrspace)
        vector = self.builder.load(self.builder.bitcast(pointer, kind), align=_WORD_BYTES * n)
        return [Value(self, self.builder.extract_element(vector, I32(i))) for i in range(n)]

    def store(self, tensor: Global, index, values, condition=None, behind: int = 0) -> None:
        """Write consecutive elements, as `load` reads them, where the condition holds: behind a branch."""
        if condition is not None:
            with self.builder.if_then(of(condition, BOOL)):
                self.store(tensor, index, values, behind=behind)
            return
        pointer = self.builder.gep(tensor.pointer(index), [I64(behind)])
        values = [of(value, pointer.type.pointee) for value in values]
        if len(values) == 1:
            self.builder.store(values[0], pointer)
            return
        kind = ir.VectorType(pointer.type.pointee, len(values))
        vector = ir.Constant(kind, ir.Undefined)
        for i, value in enumerate(values):
            vector = self.builder.insert_element(vector, value, I32(i))
        pointer = self.builder.bitcast(pointer, ir.PointerType(kind, pointer.type.addrspace))
        self.builder.store(vector, pointer, align=_WORD_BYTES * len(values))

    def store_if(self, condition, tensor: Global, index, values, behind: int = 0) -> None:
        """The same by a predicate: for many stores behind one index, whose address then is found once."""
        pointer = self.builder.gep(tensor.pointer(index), [I64(behind)])
        values = [of(value, pointer.type.pointee) for value in values]
        ptx.emit_store_if(self.builder, of(condition, BOOL), self.builder.ptrtoint(pointer, I64), values)
