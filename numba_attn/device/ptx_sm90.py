"""Hopper's own instructions: products of warpgroups, bulk copies, barriers in shared memory (see `ptx`)."""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from numba_attn.device.ptx import F32, VOID, emit
from numba_attn.device.verb import twin_of


def emit_wgmma(builder, columns: int, chains: list, *, wait: bool):
    """`wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16` (sm_90a): fp16 products summed in fp32, from zero.

    chains: one or several lists of (left, right), issued in this order; each list makes one sum of 64 x `columns`.
    right: (first, low, high, transposed), a matrix in shared memory whose descriptor has the low word `first` (32 bits)
    + `low` and the high word `high`; left: the same, or four 32-bit registers. Returns columns / 2 fp32 for each chain.
    See `wgmma_fragments`. All 128 threads of a warpgroup must be there.

    By a reduction (`redux`) the compiler knows addresses as one number for the warp, and a descriptor takes an addition
    of uniform registers; else, and behind a branch that it does not know as one of the warp (`ptx.of_warp`), each is
    made in every lane and handed over (R2UR).

    One statement, so that nothing moves into it. Without `wait` the sums, and left registers, may not be touched before
    `emit_wgmma_wait`.
    """
    inputs, numbers, firsts, n_sums = [], {}, {}, len(chains) * columns // 2

    def number(value) -> str:
        if id(value) not in numbers:
            numbers[id(value)] = n_sums + len(inputs)
            inputs.append(value)
        return f"${numbers[id(value)]}"

    def address(first) -> str:
        if id(first) not in firsts:
            firsts[id(first)] = f"first{len(firsts)}"
            lines.insert(1, f".reg .b32 {firsts[id(first)]};")
            lines.append(f"redux.sync.or.b32 {firsts[id(first)]}, {number(first)}, 0xffffffff;")
        return firsts[id(first)]

    def descriptor(name: str, matrix) -> str:
        first, low, high, _ = matrix
        lines.append(f"add.u32 low, {address(first)}, {low};")
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
    result = ir.LiteralStructType([F32] * n_sums)
    sums = emit(builder, text, result, inputs, constraints, memory=True, convergent=True)
    sums = [builder.extract_value(sums, i) for i in range(n_sums)]
    return [sums[i : i + columns // 2] for i in range(0, n_sums, columns // 2)]


def emit_wgmma_wait(builder, pending: int, sums: list, registers: list):
    """`wgmma.wait_group.sync.aligned pending` (sm_90a): wait until at most `pending` groups are in flight.

    Returns `sums`, as they are then: whoever uses them comes after the wait. `registers`, left operands, are not
    overwritten before.
    """
    constraints = ",".join(["=f"] * len(sums) + ["r"] * len(registers) + [str(i) for i in range(len(sums))])
    text = f"wgmma.wait_group.sync.aligned {pending};"
    result = ir.LiteralStructType([F32] * len(sums))
    sums = emit(builder, text, result, [*registers, *sums], constraints, memory=True, convergent=True)
    return [builder.extract_value(sums, i) for i in range(len(result.elements))]


def emit_copy_bulk(builder, target, source, n_bytes: int, barrier):
    """`cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes` (sm_90): n_bytes, by the copy engine.

    target, barrier: 32-bit shared, source: 64-bit global address; addresses and size are multiples of 16. The bytes
    are there, for all who wait for it, when the barrier's phase is complete.
    """
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {n_bytes}, [$2];"
    emit(builder, text, VOID, [target, source, barrier], "r,l,r", memory=True)


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
    emit(builder, text, VOID, [barrier, parity], "r,r", memory=True)


def emit_mbarrier_arrive(builder, barrier):
    """`mbarrier.arrive.shared.b64 _, [barrier]` (sm_80): one arrival; releases what this thread did before."""
    emit(builder, "mbarrier.arrive.shared.b64 _, [$0];", VOID, [barrier], "r", memory=True)


def of_integers(text: str, *, convergent: bool = False):
    """Code generation of one asm statement of 32-bit integers, without a result."""

    def codegen(context, builder, signature, args):
        values = [context.cast(builder, x, t, types.int32) for x, t in zip(args, signature.args, strict=True)]
        emit(builder, text, VOID, values, ",".join("r" * len(values)), memory=True, convergent=convergent)
        return context.get_dummy_value()

    return codegen


@intrinsic
def mbarrier_init(typingctx, barrier, arrivals):
    """`mbarrier.init.shared.b64 [barrier], arrivals` (sm_80): a phase is complete after so many arrivals."""
    return types.none(barrier, arrivals), of_integers("mbarrier.init.shared.b64 [$0], $1;")


@twin_of(mbarrier_init)
def _mbarrier_init(thread, barrier, arrivals):
    thread.mbarrier_init(barrier, arrivals)


@intrinsic
def fence_mbarrier_init(typingctx):
    """`fence.mbarrier_init.release.cluster` (sm_90): barriers made before it may be given to the copy engine."""
    return types.none(), of_integers("fence.mbarrier_init.release.cluster;")


@twin_of(fence_mbarrier_init)
def _fence_mbarrier_init(thread):
    thread.mbarrier_fence()


@intrinsic
def mbarrier_arrive_expect(typingctx, barrier, n_bytes):
    """`mbarrier.arrive.expect_tx.shared.b64 _, [barrier], n_bytes` (sm_90): an arrival, and bytes to wait for."""
    return types.none(barrier, n_bytes), of_integers("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;")


@twin_of(mbarrier_arrive_expect)
def _mbarrier_arrive_expect(thread, barrier, n_bytes):
    thread.mbarrier_arrive(barrier, n_bytes)


@intrinsic
def mbarrier_wait(typingctx, barrier, parity):
    """See `emit_mbarrier_wait`."""

    def codegen(context, builder, signature, args):
        values = [context.cast(builder, x, t, types.int32) for x, t in zip(args, signature.args, strict=True)]
        emit_mbarrier_wait(builder, *values)
        return context.get_dummy_value()

    return types.none(barrier, parity), codegen


@twin_of(mbarrier_wait)
def _mbarrier_wait(thread, barrier, parity):
    thread.mbarrier_wait(barrier, parity)


def setmaxnreg(registers: int, *, more: bool):
    """`setmaxnreg.{inc,dec}.sync.aligned.u32 registers` (sm_90a): registers a thread, for the rest of this branch.

    All warps of a warpgroup must execute it; `more` waits until others have given up as many.
    """
    text = f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {registers};"

    @intrinsic
    def setmaxnreg(typingctx):
        return types.none(), of_integers(text, convergent=True)

    twin_of(setmaxnreg)(lambda thread: None)
    return setmaxnreg


@intrinsic
def named_barrier_sync(typingctx, name, threads):
    """`barrier.sync name, threads`: wait until so many threads, whole warps, have arrived at one of 16 barriers."""
    return types.none(name, threads), of_integers("barrier.sync $0, $1;", convergent=True)


@twin_of(named_barrier_sync)
def _named_barrier_sync(thread, name, threads):
    thread.named_barrier(name, threads, wait=True)


@intrinsic
def named_barrier_arrive(typingctx, name, threads):
    """`barrier.arrive name, threads`: arrive without waiting."""
    return types.none(name, threads), of_integers("barrier.arrive $0, $1;", convergent=True)


@twin_of(named_barrier_arrive)
def _named_barrier_arrive(thread, name, threads):
    thread.named_barrier(name, threads, wait=False)


@intrinsic
def let_next_launch_start(typingctx):
    """`griddepcontrol.launch_dependents`: once all blocks have come here, a launch beside this one may start."""
    return types.none(), of_integers("griddepcontrol.launch_dependents;")


@intrinsic
def wait_for_launch_before(typingctx):
    """`griddepcontrol.wait`: wait until the launch that this one runs beside has ended, and see what it wrote."""
    return types.none(), of_integers("griddepcontrol.wait;")


@twin_of(let_next_launch_start)
def _let_next_launch_start(thread):
    pass


@twin_of(wait_for_launch_before)
def _wait_for_launch_before(thread):
    pass


@intrinsic
def fence_proxy_async(typingctx):
    """`fence.proxy.async.shared::cta` (sm_90): what this thread stored before is there for bulk copies and `wgmma`.

    Whoever starts these is ordered behind the fence as behind any access: by a barrier.
    """
    return types.none(), of_integers("fence.proxy.async.shared::cta;")


@twin_of(fence_proxy_async)
def _fence_proxy_async(thread):
    thread.fence_proxy_async()
