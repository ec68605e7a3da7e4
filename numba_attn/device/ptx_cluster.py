"""Instructions of thread block clusters (sm_90): what blocks do in each other's shared memory (see `ptx`).

The blocks of a cluster run at the same time. A shared address means the own block's memory; `mapa` makes of it the
same place in the block of a rank. Nothing may reach a block before its barriers are there, or after it has ended: both
are what `cluster_arrive` and `cluster_wait` are for.
"""

from __future__ import annotations

from numba.cuda import types
from numba.cuda.extending import intrinsic

from numba_attn.device.ptx import I32, VOID, emit
from numba_attn.device.ptx_sm90 import of_integers
from numba_attn.device.verb import twin_of


def emit_mbarrier_arrive_at(builder, barrier, rank, condition, *, releases: bool):
    """`mapa`, `@condition mbarrier.arrive.{release,relaxed}.cluster.shared::cluster.b64 _, [at block rank]` (sm_90).

    Releases what this thread did before to who waits in the other block by `mbarrier_wait_cluster`: a fence of the GPU,
    which waits for stores to global memory too. Relaxed it is one instruction, and tells that reads are over.
    """
    order = "release" if releases else "relaxed"
    text = f"""{{ .reg .pred p; .reg .b32 remote;
setp.ne.b32 p, $2, 0;
mapa.shared::cluster.u32 remote, $0, $1;
@p mbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [remote]; }}"""
    emit(builder, text, VOID, [barrier, rank, builder.zext(condition, I32)], "r,r,r", memory=True)


def emit_copy_bulk_to(builder, target, source, n_bytes: int, barrier, rank):
    """`cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes` (sm_90): n_bytes to block `rank`.

    target, barrier: addresses as the own block knows them, mapped to that block; source: in the own block. Addresses
    and size are multiples of 16. The bytes are there, for all who wait for it, when the barrier's phase is complete;
    no earlier may the source be written. They are those stored before `fence_proxy_async`.
    """
    text = f"""{{ .reg .b32 target, barrier;
mapa.shared::cluster.u32 target, $0, $3;
mapa.shared::cluster.u32 barrier, $2, $3;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [target], [$1], {n_bytes}, [barrier]; }}"""
    emit(builder, text, VOID, [target, source, barrier, rank], "r,r,r,r", memory=True)


def emit_mbarrier_wait_cluster(builder, barrier, parity):
    """`mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64`, repeated (sm_90): see `emit_mbarrier_wait`.

    Acquires what arrivals of other blocks released too.
    """
    text = """{ .reg .pred done;
AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1;
@done bra DONE;
bra AGAIN;
DONE: }"""
    emit(builder, text, VOID, [barrier, parity], "r,r", memory=True)


@intrinsic
def mbarrier_wait_cluster(typingctx, barrier, parity):
    """See `emit_mbarrier_wait_cluster`."""

    def codegen(context, builder, signature, args):
        values = [context.cast(builder, x, t, types.int32) for x, t in zip(args, signature.args, strict=True)]
        emit_mbarrier_wait_cluster(builder, *values)
        return context.get_dummy_value()

    return types.none(barrier, parity), codegen


@twin_of(mbarrier_wait_cluster)
def _mbarrier_wait_cluster(thread, barrier, parity):
    thread.mbarrier_wait(barrier, parity, of_cluster=True)


@intrinsic
def cluster_rank(typingctx):
    """`mov.u32 d, %cluster_ctarank` (sm_90): the block's number in its cluster."""

    def codegen(context, builder, signature, args):
        return emit(builder, "mov.u32 $0, %cluster_ctarank;", I32, [], "=r")

    return types.int32(), codegen


@twin_of(cluster_rank)
def _cluster_rank(thread):
    return thread.cluster_rank()


@intrinsic
def cluster_arrive(typingctx):
    """`barrier.cluster.arrive.release.aligned` (sm_90): all threads of all blocks of the cluster, whole warps."""
    return types.none(), of_integers("barrier.cluster.arrive.release.aligned;", convergent=True)


@twin_of(cluster_arrive)
def _cluster_arrive(thread):
    thread.cluster_arrive()


@intrinsic
def cluster_wait(typingctx):
    """`barrier.cluster.wait.acquire.aligned` (sm_90): until all have arrived, and see what they did before."""
    return types.none(), of_integers("barrier.cluster.wait.acquire.aligned;", convergent=True)


@twin_of(cluster_wait)
def _cluster_wait(thread):
    thread.cluster_wait()
