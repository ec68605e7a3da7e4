"""Instructions that numba-cuda has no name for, each once: the only file with inline PTX.

An emitter takes an llvmlite builder and values and appends one instruction; the device function of the same
instruction, where kernels call it directly, is an intrinsic beside it. Verbs on tiles (`smem`, `tile`) call the
emitters. Every intrinsic has its numpy twin for the simulator.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from numba_attn.device.verb import twin_of

_VOID = ir.VoidType()
_F32 = ir.FloatType()
_I32 = ir.IntType(32)


def _emit(builder, text: str, result, operands, constraints: str, *, memory: bool = False, convergent: bool = False):
    """Append one asm statement.

    `memory` keeps it in order with every other access to memory, `convergent` out of branches that it is not in.
    """
    constraints += ",~{memory}" if memory else ""
    function = ir.FunctionType(result, [value.type for value in operands])
    asm = ir.InlineAsm(function, text, constraints.lstrip(","), side_effect=memory)
    return builder.call(asm, operands, attrs=("convergent",) if convergent else ())


def emit_cp_async(builder, destination, source, n_bytes: int, valid_bytes):
    """`cp.async.{ca,cg}.shared.global [destination], [source], n_bytes, valid_bytes` (sm_80).

    destination: 32-bit shared address; source: 64-bit global address, both multiples of `n_bytes` (4, 8 or 16);
    valid_bytes: 32-bit count of bytes read, the rest is filled with zeros. Completes at `cp_async_wait`.
    """
    # Only 16-byte copies may bypass L1.
    cache = "cg" if n_bytes == 16 else "ca"
    text = f"cp.async.{cache}.shared.global [$0], [$1], {n_bytes}, $2;"
    _emit(builder, text, _VOID, [destination, source, valid_bytes], "r,l,r", memory=True)


def emit_from_lane_0(builder, x):
    """`shfl.sync.idx.b32 d, x, 0`: lane 0's value of a 32-bit x in all 32 lanes, which must all be there."""
    text = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return _emit(builder, text, _I32, [x], "=r,r", memory=True, convergent=True)


def emit_shfl_bfly(builder, x, distance: int):
    """`shfl.sync.bfly.b32 d, x, distance`: the fp32 x of lane `lane ^ distance`; all 32 lanes must be there."""
    return _emit(
        builder, f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", _F32, [x], "=f,f", memory=True, convergent=True
    )


def emit_shfl_idx(builder, x, lane):
    """`shfl.sync.idx.b32 d, x, lane`: the fp32 x of a lane; all 32 lanes must be there."""
    return _emit(
        builder, "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", _F32, [x, lane], "=f,f,r", memory=True, convergent=True
    )


def emit_ex2(builder, x):
    """`ex2.approx.f32 d, x`: 2^x within 2 ulp, denormal results included; 2^-inf is 0."""
    return _emit(builder, "ex2.approx.f32 $0, $1;", _F32, [x], "=f,f")


def emit_ex2_ftz(builder, x):
    """`ex2.approx.ftz.f32 d, x`: 2^x within 2 ulp, 0 where that is below 2^-126: a third of the instructions."""
    return _emit(builder, "ex2.approx.ftz.f32 $0, $1;", _F32, [x], "=f,f")


def emit_max(builder, a, b):
    """`max.f32 d, a, b`: the larger one; NaN only if both are."""
    return _emit(builder, "max.f32 $0, $1, $2;", _F32, [a, b], "=f,f,f")


def emit_ldmatrix_x4(builder, address, *, transposed: bool):
    """`ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16` (sm_75): four 8 x 8 matrices of halves, four 32-bit registers.

    address: 32-bit shared address of this lane's row of 16 bytes, aligned to them. Lane map: see `fragments`. All 32
    lanes must be there.
    """
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    result = ir.LiteralStructType([_I32] * 4)
    registers = _emit(builder, text, result, [address], "=r,=r,=r,=r,r", memory=True, convergent=True)
    return [builder.extract_value(registers, i) for i in range(4)]


def emit_mma_m16n8k16(builder, a, b, c):
    """`mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32` (sm_80): C + A B, fp16 products summed in fp32.

    a: four, b: two 32-bit registers of two halves, c: four fp32. Lane map: see `fragments`. The sum is truncated, not
    rounded. All 32 lanes must be there.
    """
    text = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    result = ir.LiteralStructType([_F32] * 4)
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["0", "1", "2", "3"])
    registers = _emit(builder, text, result, [*a, *b, *c], constraints, convergent=True)
    return [builder.extract_value(registers, i) for i in range(4)]


def emit_halves(builder, low, high):
    """`cvt.rn.f16x2.f32 d, high, low` (sm_80): two fp32 rounded to halves, packed in 32 bits."""
    return _emit(builder, "cvt.rn.f16x2.f32 $0, $1, $2;", _I32, [high, low], "=r,f,f")


def emit_wgmma(builder, columns: int, chains: list, *, wait: bool):
    """`wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16` (sm_90a): fp16 products summed in fp32, from zero.

    chains: one or several lists of (left, right), issued in this order; each list makes one sum of 64 x `columns`.
    right: (first, low, high, transposed), a matrix in shared memory whose descriptor has the low word `first` (32 bits)
    + `low` and the high word `high`; left: the same, or four 32-bit registers. Returns columns / 2 fp32 for each chain.
    See `wgmma_fragments`. All 128 threads of a warpgroup must be there.

    One statement, so that nothing moves into it. Without `wait` the sums, and left registers, may not be touched before
    `emit_wgmma_wait`.
    """
    inputs, numbers, n_sums = [], {}, len(chains) * columns // 2

    def number(value) -> str:
        if id(value) not in numbers:
            numbers[id(value)] = n_sums + len(inputs)
            inputs.append(value)
        return f"${numbers[id(value)]}"

    def descriptor(name: str, matrix) -> str:
        first, low, high, _ = matrix
        lines.append(f"add.u32 low, {number(first)}, {low};")
        lines.append(f"mov.b64 {name}, {{low, {high}}};")
        return name

    lines = ["{ .reg .b64 left, right; .reg .b32 low;", "wgmma.fence.sync.aligned;"]
    for i, chain in enumerate(chains):
        sums = ", ".join(f"${k}" for k in range(i * columns // 2, (i + 1) * columns // 2))
        for step, (left, right) in enumerate(chain):
            b, b_flag = descriptor("right", right), int(right[3])
            if isinstance(left, tuple):
                a, flags = descriptor("left", left), f"{int(left[3])}, {b_flag}"
            else:
                a, flags = f"{{{', '.join(map(number, left))}}}", str(b_flag)
            name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
            lines.append(f"{name} {{{sums}}}, {a}, {b}, {int(step > 0)}, 1, 1, {flags};")
    lines.append("wgmma.commit_group.sync.aligned;")
    if wait:
        lines.append("wgmma.wait_group.sync.aligned 0;")
    text = "\n".join([*lines, "}"])
    constraints = ",".join(["=f"] * n_sums + ["r"] * len(inputs))
    result = ir.LiteralStructType([_F32] * n_sums)
    sums = _emit(builder, text, result, inputs, constraints, memory=True, convergent=True)
    sums = [builder.extract_value(sums, i) for i in range(n_sums)]
    return [sums[i : i + columns // 2] for i in range(0, n_sums, columns // 2)]


def emit_wgmma_wait(builder, pending: int, sums: list, registers: list):
    """`wgmma.wait_group.sync.aligned pending` (sm_90a): wait until at most `pending` groups are in flight.

    Returns `sums`, as they are then: whoever uses them comes after the wait. `registers`, left operands, are not
    overwritten before.
    """
    constraints = ",".join(["=f"] * len(sums) + ["r"] * len(registers) + [str(i) for i in range(len(sums))])
    text = f"wgmma.wait_group.sync.aligned {pending};"
    result = ir.LiteralStructType([_F32] * len(sums))
    sums = _emit(builder, text, result, [*registers, *sums], constraints, memory=True, convergent=True)
    return [builder.extract_value(sums, i) for i in range(len(result.elements))]


def emit_copy_bulk(builder, target, source, n_bytes: int, barrier):
    """`cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes` (sm_90): n_bytes, by the copy engine.

    target, barrier: 32-bit shared, source: 64-bit global address; addresses and size are multiples of 16. The bytes
    are there, for all who wait for it, when the barrier's phase is complete.
    """
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {n_bytes}, [$2];"
    _emit(builder, text, _VOID, [target, source, barrier], "r,l,r", memory=True)


@intrinsic
def cp_async_commit(typingctx):
    """`cp.async.commit_group` (sm_80): close the group of this thread's copies issued since the last one."""

    def codegen(context, builder, signature, args):
        _emit(builder, "cp.async.commit_group;", _VOID, [], "", memory=True)
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
            _emit(builder, f"cp.async.wait_group {pending};", _VOID, [], "", memory=True)
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
        return _emit(builder, "mov.b32 $0, $1;", _I32, [x], "=r,r", memory=True)

    return types.int32(x), codegen


@twin_of(opaque)
def _opaque(thread, x):
    return x


def emit_mbarrier_wait(builder, barrier, parity):
    """`mbarrier.try_wait.parity.shared.b64`, repeated (sm_90): until the barrier's phase of this parity is complete.

    The first phase has parity 0; the one before it, parity 1, counts as complete. Acquires what the arrivals released,
    and the bytes that the phase counted.
    """
    text = """{ .reg .pred done;
AGAIN: mbarrier.try_wait.parity.shared.b64 done, [$0], $1;
@done bra DONE;
bra AGAIN;
DONE: }"""
    _emit(builder, text, _VOID, [barrier, parity], "r,r", memory=True)


def emit_mbarrier_arrive(builder, barrier):
    """`mbarrier.arrive.shared.b64 _, [barrier]` (sm_80): one arrival; releases what this thread did before."""
    _emit(builder, "mbarrier.arrive.shared.b64 _, [$0];", _VOID, [barrier], "r", memory=True)


def _of_integers(text: str, *, convergent: bool = False):
    """Code generation of one asm statement of 32-bit integers, without a result."""

    def codegen(context, builder, signature, args):
        values = [context.cast(builder, x, t, types.int32) for x, t in zip(args, signature.args, strict=True)]
        _emit(builder, text, _VOID, values, ",".join("r" * len(values)), memory=True, convergent=convergent)
        return context.get_dummy_value()

    return codegen


@intrinsic
def mbarrier_init(typingctx, barrier, arrivals):
    """`mbarrier.init.shared.b64 [barrier], arrivals` (sm_80): a phase is complete after so many arrivals."""
    return types.none(barrier, arrivals), _of_integers("mbarrier.init.shared.b64 [$0], $1;")


@intrinsic
def fence_mbarrier_init(typingctx):
    """`fence.mbarrier_init.release.cluster` (sm_90): barriers made before it may be given to the copy engine."""
    return types.none(), _of_integers("fence.mbarrier_init.release.cluster;")


@intrinsic
def mbarrier_arrive_expect(typingctx, barrier, n_bytes):
    """`mbarrier.arrive.expect_tx.shared.b64 _, [barrier], n_bytes` (sm_90): an arrival, and bytes to wait for."""
    return types.none(barrier, n_bytes), _of_integers("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;")


@intrinsic
def mbarrier_wait(typingctx, barrier, parity):
    """See `emit_mbarrier_wait`."""

    def codegen(context, builder, signature, args):
        values = [context.cast(builder, x, t, types.int32) for x, t in zip(args, signature.args, strict=True)]
        emit_mbarrier_wait(builder, *values)
        return context.get_dummy_value()

    return types.none(barrier, parity), codegen


def setmaxnreg(registers: int, *, more: bool):
    """`setmaxnreg.{inc,dec}.sync.aligned.u32 registers` (sm_90a): registers a thread, for the rest of this branch.

    All warps of a warpgroup must execute it; `more` waits until others have given up as many.
    """
    text = f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {registers};"

    @intrinsic
    def setmaxnreg(typingctx):
        return types.none(), _of_integers(text, convergent=True)

    twin_of(setmaxnreg)(lambda thread: None)
    return setmaxnreg


@intrinsic
def named_barrier_sync(typingctx, name, threads):
    """`barrier.sync name, threads`: wait until so many threads, whole warps, have arrived at one of 16 barriers."""
    return types.none(name, threads), _of_integers("barrier.sync $0, $1;", convergent=True)


@intrinsic
def named_barrier_arrive(typingctx, name, threads):
    """`barrier.arrive name, threads`: arrive without waiting."""
    return types.none(name, threads), _of_integers("barrier.arrive $0, $1;", convergent=True)
