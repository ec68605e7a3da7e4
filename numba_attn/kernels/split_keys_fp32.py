"""Few queries, many keys: warps take chunks of keys and write partial results; a second kernel merges them.

Seventh rung of the ladder. To the others, in which one warp or block meets all keys of its rows, it adds a split of the
keys: as many warps share them as fill the GPU. Bound by reading K and V once, by issue slots from about 8 rows on.

Algorithm. The keys of a head are cut into chunks. For each chunk and ROWS query rows, KEYS keys at a time:

    1.  S = scale Q K^T              a part of each dot product per lane, summed over the lanes by five shuffles
    2.  m_new = max(m, rowmax S)     alpha = exp(m - m_new)     P = exp(S - m_new)
    3.  l = alpha l + rowsum P       acc = alpha acc + P V
    and after the chunk (m, l, acc) is written as it is. Then, for each row, over its chunks i:
    4.  m = max_i m_i                w_i = exp(m_i - m)
    5.  l = sum_i w_i l_i            O = sum_i w_i acc_i / l    lse = m + ln l

Work split. A block is one warp, for (batch, head, chunk, ROWS query rows); blocks of one chunk follow each other, so
that rows after the first ROWS find K and V in L2. Lane t owns the columns 4 t + 128 u .. + 3. Merge: one warp for
(batch, head, row, 32 columns); lane t has column t and the weight of chunk t, broadcast like p in warp_tile_fp32.

Memory. No shared memory. ROWS COLUMNS registers a lane each for Q and acc, KEYS COLUMNS each for K and V, where COLUMNS
is the bucket of head dims over 32. The next K is loaded before P V: up to 8 KEYS D bytes a warp are in flight.
Workspace: m and l of every chunk, and acc of all but the first one, which waits in O itself.

Numerics. A score is 32 chains of D / 32 FMAs, summed pairwise; exp by ex2.approx. acc is one chain over the keys of a
chunk, rescaled every KEYS keys; the chunks are one chain in order. Against float64, normwise, at D = 128: 1.1e-7 on
uniform inputs, 2.5e-7 on normal ones. A pair that does not count is left out by its position.

Limits. D and Dv up to 1024 (registers), a grid below 2^31 blocks, 8 bytes a row within WORKSPACE_BYTES.

Source. Flash-decoding (Dao, Haziza, Massa and Sizov 2023); merging: Milakov and Gimelshein 2018, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from numba import cuda, float32, int32

from numba_attn.device.mask import Mask
from numba_attn.device.math import cdiv, fma
from numba_attn.device.smem import vector_store
from numba_attn.device.softmax import NEG_INF, ONE, ZERO, exp, finite_max, log_sum_exp, of_row, warp_max, warp_sum
from numba_attn.device.tile import WARP, fill, register_rows
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import ITEM_BYTES, MAX_GRID, Device, Problem


@dataclass(frozen=True)
class Config:
    vector: int  # elements of a load
    rows: int  # of a warp
    keys: int  # at a time
    dv_bucket: int  # of D too
    min_blocks: int
    is_causal: bool
    side: int = 4  # columns that a lane owns side by side
    least_keys: int = 64  # of a chunk: its start and its merge cost as much as some keys

    def __post_init__(self):
        if self.dv_bucket % (WARP * self.side) or self.side % self.vector:
            raise ValueError(f"{WARP} times {self.side=} must divide {self.dv_bucket=}, and {self.vector=} the side")


@dataclass(frozen=True)
class MergeConfig:
    is_causal: bool


# vector, rows, keys, dv_bucket, min_blocks. More rows or keys at once would leave too few warps an SM. Single elements
# need more registers, for their addresses; their layouts change no bit, which fixes the keys.
TILES = (
    (4, 1, 8, 128, 16),
    (4, 4, 4, 128, 16),
    (4, 2, 1, 1024, 8),
    (1, 1, 8, 128, 8),
    (1, 4, 4, 128, 8),
    (1, 1, 1, 1024, 8),
)
DV_BUCKETS = (128, 1024)
WARPS = 4096  # that a call aims at: two waves on the largest GPUs, the second of which evens out the first
AHEAD = 8  # partial results that are loaded together
WORKSPACE_BYTES = 512 * 10**6
# What `suits` compares, see the note: rows of a head (twice as many for full lanes), keys, rows of flash_fp32's tile.
MOST_ROWS, LEAST_KEYS, FLASH_ROWS = 4, 256, 16


def dv_bucket(problem: Problem) -> int | None:
    return next((bucket for bucket in DV_BUCKETS if bucket >= max(problem.D, problem.Dv)), None)


def supports(problem: Problem, device: Device) -> str | None:
    if dv_bucket(problem) is None:
        return f"keeps D and Dv in registers, up to {DV_BUCKETS[-1]}: D={problem.D} Dv={problem.Dv}"
    rows = problem.B * problem.H * problem.Lq
    if 2 * ITEM_BYTES * rows > WORKSPACE_BYTES:
        return f"needs {2 * ITEM_BYTES * rows} bytes of workspace, more than {WORKSPACE_BYTES}"
    if (blocks := rows * cdiv(problem.Dv, WARP)) > MAX_GRID:
        return f"needs {blocks} blocks, a grid holds {MAX_GRID}"
    return None


def attended(problem: Problem) -> int:
    """Keys that some row attends."""
    return min(problem.Lk, problem.Lq) if problem.is_causal else problem.Lk


def suits(problem: Problem, device: Device) -> str | None:
    if attended(problem) < LEAST_KEYS:
        return f"fewer than {LEAST_KEYS} keys a row: the second launch costs more than it saves"
    blocks = problem.B * problem.H * cdiv(problem.Lq, FLASH_ROWS)
    most_rows = MOST_ROWS * (2 if 64 < max(problem.D, problem.Dv) <= DV_BUCKETS[0] else 1)
    if problem.Lq > most_rows and 2 * blocks > device.sm_count:
        return f"reads K and V again every few rows: for {most_rows} rows a head, or where half of the SMs would idle"
    return None


def configs():
    for tile, is_causal in product(TILES, (False, True)):
        yield Config(*tile, is_causal)


def config(problem: Problem, device: Device) -> Config:
    options = (4 if problem.vector == 4 else 1, dv_bucket(problem))
    fitting = [tile for tile in TILES if (tile[0], tile[3]) == options]
    return Config(*next((tile for tile in fitting if tile[1] >= problem.Lq), fitting[-1]), problem.is_causal)


def small_config(problem: Problem) -> Config:
    vector, side = 4 if problem.vector == 4 else 1, 1 if problem.D % 4 or problem.Dv % 4 else 4
    return Config(vector, 2, 3, dv_bucket(problem), 1, problem.is_causal, side, least_keys=7)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    """As many chunks as give WARPS warps, if they are long enough; the kernels see their number as its shape."""
    rows, groups = (problem.B * problem.H * cdiv(problem.Lq, n) for n in (1, config.rows))
    room = WORKSPACE_BYTES // (ITEM_BYTES * rows * (2 + problem.Dv))
    chunks = max(1, min(cdiv(WARPS, groups), attended(problem) // config.least_keys, room))
    sums = Workspace((rows, chunks))
    return {"chunk_m": sums, "chunk_l": sums, "chunk_acc": Workspace((rows, chunks - 1, problem.Dv))}


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    rows, chunks = (partial := workspace(problem, config))["chunk_m"].shape
    grid = problem.B * problem.H * chunks * cdiv(problem.Lq, config.rows)
    merge, merge_grid = MergeConfig(config.is_causal), rows * cdiv(problem.Dv, WARP)
    return (
        Launch(build, config, ("Q", "K", "V", "O", *partial, "scale"), grid, WARP, min_blocks=config.min_blocks),
        Launch(build_merge, merge, ("K", "O", "lse", *partial), merge_grid, WARP),
    )


def build(config: Config):
    ROWS, KEYS, SIDE, VECTOR = config.rows, config.keys, config.side, config.vector
    COLUMNS = config.dv_bucket // WARP
    end_of_row = Mask(config.is_causal).end  # the first key past a row's last one
    column, load_rows = register_rows(SIDE, VECTOR)
    store = vector_store(VECTOR)

    @cuda.jit
    def split_keys_fp32(Q, K, V, O, chunk_m, chunk_l, chunk_acc, scale):
        # who am I: block -> batch, head, chunk of keys, ROWS query rows
        H, Lq, D = Q.shape[1], Q.shape[2], Q.shape[3]
        Lk, Dv = K.shape[2], V.shape[3]
        m_blocks, chunks = (Lq + ROWS - 1) // ROWS, chunk_m.shape[1]
        group, row0 = cuda.blockIdx.x // m_blocks, cuda.blockIdx.x % m_blocks * ROWS
        head, chunk = group // chunks, group % chunks
        b, h = head // H, head % H
        lane = cuda.threadIdx.x
        gQ, gK, gV, gO = Q[b, h], K[b, h], V[b, h], O[b, h]
        length = (Lk + chunks - 1) // chunks
        n0 = chunk * length
        n_end = min(n0 + length, end_of_row(min(row0 + ROWS, Lq) - 1, Lk))
        if n0 >= n_end:
            return  # the merge reads nothing of a chunk without keys
        rQ = cuda.local.array((ROWS, COLUMNS), float32)
        rK = cuda.local.array((KEYS, COLUMNS), float32)
        rV = cuda.local.array((KEYS, COLUMNS), float32)
        S = cuda.local.array((ROWS, KEYS), float32)  # then P
        acc = cuda.local.array((ROWS, COLUMNS), float32)
        m, l = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        load_rows(rQ, gQ, row0, Lq, lane)
        load_rows(rK, gK, n0, n_end, lane)
        fill(acc, ZERO)
        for r in range(ROWS):
            m[r], l[r] = NEG_INF, ZERO

        for n in range(n0, n_end, KEYS):
            # S = Q K^T: V is on its way meanwhile
            load_rows(rV, gV, n, n_end, lane)
            for r in range(ROWS):
                for k in range(KEYS):
                    s = ZERO
                    for c in range(0, COLUMNS, VECTOR):
                        total = s
                        for i in range(VECTOR):
                            total = fma(rQ[r, c + i], rK[k, c + i], total)
                        s = total if column(c, lane) < D else s
                    S[r, k] = warp_sum(s)
            # the next keys, on their way during the rest
            load_rows(rK, gK, n + KEYS, n_end, lane)
            for r in range(ROWS):
                # P = exp(scale S - m) where the key counts
                n_keys = int32(min(n_end, end_of_row(row0 + r, Lk)) - n)
                m_new = m[r]
                for k in range(KEYS):
                    S[r, k] = S[r, k] * scale if k < n_keys else NEG_INF
                    m_new = max(m_new, S[r, k])
                base = finite_max(m_new)
                alpha = exp(m[r] - base)
                m[r], l[r] = m_new, l[r] * alpha
                for k in range(KEYS):
                    S[r, k] = exp(S[r, k] - base)
                    l[r] += S[r, k]
                # acc = alpha acc + P V
                for c in range(COLUMNS):
                    acc[r, c] *= alpha
                for k in range(KEYS):
                    if k < n_keys:
                        for c in range(COLUMNS):
                            acc[r, c] = fma(S[r, k], rV[k, c], acc[r, c])

        # finish: m, l and acc as they are
        for r in range(ROWS):
            row = row0 + r
            if row < Lq:
                line = head * Lq + row
                target = gO[row] if chunk == 0 else chunk_acc[line, chunk - 1]
                if lane == 0:
                    chunk_m[line, chunk], chunk_l[line, chunk] = m[r], l[r]
                for c in range(0, COLUMNS, VECTOR):
                    if column(c, lane) < Dv:
                        store(target, column(c, lane), ONE, acc, (r, c))

    return split_keys_fp32


def build_merge(config: MergeConfig):
    end_of_row = Mask(config.is_causal).end

    @cuda.jit
    def split_keys_merge(K, O, lse, chunk_m, chunk_l, chunk_acc):
        # who am I: block -> batch, head, row, 32 columns; lane t has a column, and the weight of a chunk
        H, Lq, Dv = O.shape[1], O.shape[2], O.shape[3]
        Lk, chunks = K.shape[2], chunk_m.shape[1]
        dv_blocks = (Dv + WARP - 1) // WARP
        line, dv_block = cuda.blockIdx.x // dv_blocks, cuda.blockIdx.x % dv_blocks
        head, row = line // Lq, line % Lq
        b, h = head // H, head % H
        lane = cuda.threadIdx.x
        col = dv_block * WARP + lane
        inside = col < Dv
        length = max((Lk + chunks - 1) // chunks, 1)
        end = end_of_row(row, Lk)
        n_chunks = (end + length - 1) // length  # those with keys of this row
        m, l, acc = NEG_INF, ZERO, ZERO
        if end > 0:
            m, l = chunk_m[line, 0], chunk_l[line, 0]
            acc = O[b, h, row, col] if inside else ZERO
        part = cuda.local.array(AHEAD, float32)

        for i0 in range(1, n_chunks, WARP):
            # weights: lane t has chunk i0 + t
            there = i0 + lane < n_chunks
            m_i = chunk_m[line, i0 + lane] if there else NEG_INF
            l_i = chunk_l[line, i0 + lane] if there else ZERO
            m_new = max(m, warp_max(m_i))
            base = finite_max(m_new)
            alpha, w = exp(m - base), exp(m_i - base)
            m, l = m_new, fma(l, alpha, warp_sum(w * l_i))
            # acc = alpha acc + sum_i w_i acc_i, AHEAD chunks on their way at once
            acc *= alpha
            for t0 in range(0, min(WARP, n_chunks - i0), AHEAD):
                for t in range(AHEAD):
                    i = min(i0 + t0 + t, n_chunks - 1)
                    part[t] = chunk_acc[line, i - 1, col] if inside else ZERO
                for t in range(AHEAD):
                    total = fma(of_row(w, t0 + t), part[t], acc)
                    acc = total if i0 + t0 + t < n_chunks else acc

        # finish: O = acc / l, lse = m + ln l; a row without keys is 0 and -inf
        if inside:
            O[b, h, row, col] = acc * (ONE / l if end > 0 else ZERO)
        if lane == 0 and dv_block == 0 and row < lse.shape[2]:
            lse[b, h, row] = log_sum_exp(m, l)

    return split_keys_merge


KERNEL = Kernel(
    name="split_keys_fp32",
    summary="few queries, many keys: warps take chunks of keys, a second kernel merges them",
    accuracy="fp32",
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
)
