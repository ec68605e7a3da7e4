"""Instructions that numba-cuda has no name for, each once: with `ptx_sm90` and `ptx_cluster`, the only inline PTX.

An emitter takes an llvmlite builder and values and appends one instruction; the device function of the same
instruction, where kernels call it directly, is an intrinsic beside it. Verbs on tiles (`smem`, `tile`) call the
emitters. Every intrinsic has its numpy twin for the simulator.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from numba_attn.device.verb import twin_of

VOID = ir.VoidType()
F32 = ir.FloatType()
I32 = ir.IntType(32)


def emit(builder, text: str, result, operands, constraints: str, *, memory: bool = False, convergent: bool = False):
    """Append one asm statement.

    `memory` keeps it in order with every other access to memory, `convergent` out of branches that it is not in.
    """
    constraints += ",~{memory}" if memory else ""
    function = ir.FunctionType(result, [value.type for value in operands])
    asm = ir.InlineAsm(function, text, constraints.lstrip(","), side_effect=memory)
    return builder.call(asm, operands, attrs=("convergent",) if convergent else ())


def emit_store_shared(builder, address, words):
    """`st.shared[.v2|.v4].b32`: 32-bit values to a 32-bit shared address, aligned to all of them."""
    n = len(words)
    vector, registers = f".v{n}" if n > 1 else "", ", ".join(f"${i + 1}" for i in range(n))
    kinds = ["f" if word.type == F32 else "r" for word in words]
    text = f"st.shared{vector}.b32 [$0], {{{registers}}};" if n > 1 else "st.shared.b32 [$0], $1;"
    emit(builder, text, VOID, [address, *words], ",".join(["r", *kinds]), memory=True)


def emit_load_shared(builder, address, n: int):
    """`ld.shared[.v2|.v4].f32`: n fp32 at a 32-bit shared address, aligned to all of them; stays behind waits."""
    if n == 1:
        return [emit(builder, "ld.shared.f32 $0, [$1];", F32, [address], "=f,r", memory=True)]
    text = f"ld.shared.v{n}.f32 {{{', '.join(f'${i}' for i in range(n))}}}, [${n}];"
    result = ir.LiteralStructType([F32] * n)
    values = emit(builder, text, result, [address], ",".join(["=f"] * n + ["r"]), memory=True)
    return [builder.extract_value(values, i) for i in range(n)]


def emit_cp_async(builder, destination, source, n_bytes: int, valid_bytes):
    """`cp.async.{ca,cg}.shared.global [destination], [source], n_bytes, valid_bytes` (sm_80).

    destination: 32-bit shared address; source: 64-bit global address, both multiples of `n_bytes` (4, 8 or 16);
    valid_bytes: 32-bit count of bytes read, the rest is filled with zeros. Completes at `cp_async_wait`.
    """
    # Only 16-byte copies may bypass L1.
    cache = "cg" if n_bytes == 16 else "ca"
    text = f"cp.async.{cache}.shared.global [$0], [$1], {n_bytes}, $2;"
    emit(builder, text, VOID, [destination, source, valid_bytes], "r,l,r", memory=True)


def emit_cp_async_behind(builder, destination, source, to_bytes: int, from_bytes: int):
    """`cp.async.cg.shared.global [destination + to_bytes], [source + from_bytes], 16`, see `emit_cp_async`.

    Up to 2047 bytes behind `source` take no instruction of their own.
    """
    text = f"cp.async.cg.shared.global [$0+{to_bytes}], [$1+{from_bytes}], 16;"
    emit(builder, text, VOID, [destination, source], "r,l", memory=True)


def emit_store_if(builder, condition, address, values):
    """`@condition st.global[.v2|.v4]`: 32-bit values to a 64-bit global address, aligned to all of them.

    No branch: between branches the compiler would find each address anew.
    """
    n, kind = len(values), "f" if values[0].type == F32 else "r"
    vector, registers = f".v{n}" if n > 1 else "", ", ".join(f"${i + 2}" for i in range(n))
    text = f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global{vector}.b32 [$1], {{{registers}}}; }}"
    flag = builder.zext(condition, I32)
    emit(builder, text, VOID, [flag, address, *values], ",".join(["r", "l", *[kind] * n]), memory=True)


def emit_from_lane_0(builder, x):
    """`shfl.sync.idx.b32 d, x, 0`: lane 0's value of a 32-bit x in all 32 lanes, which must all be there."""
    text = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return emit(builder, text, I32, [x], "=r,r", memory=True, convergent=True)


def emit_shfl_bfly(builder, x, distance: int):
    """`shfl.sync.bfly.b32 d, x, distance`: the fp32 x of lane `lane ^ distance`; all 32 lanes must be there."""
    return emit(
        builder, f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", F32, [x], "=f,f", memory=True, convergent=True
    )


def emit_shfl_idx(builder, x, lane):
    """`shfl.sync.idx.b32 d, x, lane`: the fp32 x of a lane; all 32 lanes must be there."""
    return emit(
        builder, "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", F32, [x, lane], "=f,f,r", memory=True, convergent=True
    )


def emit_ex2(builder, x):
    """`ex2.approx.f32 d, x`: 2^x within 2 ulp, denormal results included; 2^-inf is 0."""
    return emit(builder, "ex2.approx.f32 $0, $1;", F32, [x], "=f,f")


def emit_ex2_ftz(builder, x):
    """`ex2.approx.ftz.f32 d, x`: 2^x within 2 ulp, 0 where that is below 2^-126: a third of the instructions."""
    return emit(builder, "ex2.approx.ftz.f32 $0, $1;", F32, [x], "=f,f")


def emit_max(builder, a, b):
    """`max.f32 d, a, b`: the larger one; NaN only if both are."""
    return emit(builder, "max.f32 $0, $1, $2;", F32, [a, b], "=f,f,f")


def emit_max_magnitude(builder, a, b):
    """`max.NaN.f32 d, |a|, |b|` (sm_80): the larger magnitude; NaN if either is."""
    text = "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; max.NaN.f32 $0, a, b; }"
    return emit(builder, text, F32, [a, b], "=f,f,f")


def emit_count_magnitudes(builder, counts, pair, least):
    """`add.f16x2 d, counts, set.ge(|pair|, least)` (sm_53): in each half one more where a magnitude is large enough."""
    text = "{ .reg .b32 a; abs.f16x2 a, $2; set.ge.f16x2.f16x2 a, a, $3; add.rn.f16x2 $0, $1, a; }"
    return emit(builder, text, I32, [counts, pair, least], "=r,r,r,r")


def emit_ldmatrix_x4(builder, address, *, transposed: bool):
    """`ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16` (sm_75): four 8 x 8 matrices of halves, four 32-bit registers.

    address: 32-bit shared address of this lane's row of 16 bytes, aligned to them. Lane map: see `fragments`. All 32
    lanes must be there.
    """
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    result = ir.LiteralStructType([I32] * 4)
    registers = emit(builder, text, result, [address], "=r,=r,=r,=r,r", memory=True, convergent=True)
    return [builder.extract_value(registers, i) for i in range(4)]


def emit_mma_m16n8k16(builder, a, b, c):
    """`mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32` (sm_80): C + A B, fp16 products summed in fp32.

    a: four, b: two 32-bit registers of two halves, c: four fp32. Lane map: see `fragments`. The sum is truncated, not
    rounded. All 32 lanes must be there.
    """
    text = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    result = ir.LiteralStructType([F32] * 4)
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["0", "1", "2", "3"])
    registers = emit(builder, text, result, [*a, *b, *c], constraints, convergent=True)
    return [builder.extract_value(registers, i) for i in range(4)]


def emit_halves(builder, low, high):
    """`cvt.rn.f16x2.f32 d, high, low` (sm_80): two fp32 rounded to halves, packed in 32 bits."""
    return emit(builder, "cvt.rn.f16x2.f32 $0, $1, $2;", I32, [high, low], "=r,f,f")


@intrinsic
def cp_async_commit(typingctx):
    """`cp.async.commit_group` (sm_80): close the group of this thread's copies issued since the last one."""

    def codegen(context, builder, signature, args):
        emit(builder, "cp.async.commit_group;", VOID, [], "", memory=True)
        return context.get_dummy_value()

    return types.none(), codegen


@twin_of(cp_async_commit)
def _cp_async_commit(thread):
    thread.commit_async()


def cp_async_wait(pending: int):
    """`cp.async.wait_group pending` (sm_80): wait until at most `pending` of this thread's groups are in flight.

    Orders the copies of this thread only: the other threads see them after a barrier.
    """

    @intrinsic
    def cp_async_wait_group(typingctx):
        def codegen(context, builder, signature, args):
            emit(builder, f"cp.async.wait_group {pending};", VOID, [], "", memory=True)
            return context.get_dummy_value()

        return types.none(), codegen

    @twin_of(cp_async_wait_group)
    def _cp_async_wait_group(thread):
        thread.wait_async(pending)

    return cp_async_wait_group


@intrinsic
def opaque(typingctx, x):
    """`mov.b32`: the 32-bit integer x, of unknown origin, so that what is computed from it stays in its loop.

    Addresses of a loop's copies are else hoisted out of it, into registers that the accumulators need.
    """

    def codegen(context, builder, signature, args):
        x = context.cast(builder, args[0], signature.args[0], types.int32)
        return emit(builder, "mov.b32 $0, $1;", I32, [x], "=r,r", memory=True)

    return types.int32(x), codegen


@twin_of(opaque)
def _opaque(thread, x):
    return x


@intrinsic
def of_warp(typingctx, x):
    """`redux.sync.or.b32` (sm_80): x, a 32-bit integer that all lanes of the warp have, as the compiler then knows.

    What is computed from it takes uniform registers, and so does what stands behind a branch on it.
    """

    def codegen(context, builder, signature, args):
        x = context.cast(builder, args[0], signature.args[0], types.int32)
        text = "redux.sync.or.b32 $0, $1, 0xffffffff;"
        return emit(builder, text, I32, [x], "=r,r", convergent=True)

    return types.int32(x), codegen


@twin_of(of_warp)
def _of_warp(thread, x):
    return reduce(or_, thread.exchange(0xFFFFFFFF, int(x)).values())
