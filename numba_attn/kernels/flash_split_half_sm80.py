"""fp32 accuracy on tensor cores: operands split into fp16 halves, three products each, by `mma.sync`.

Ninth rung of the ladder. To the eighth, flash_fp32, it adds tensor cores. Bound by their time and by the issue slots of
all other instructions, which hardly overlap. For precision tf32 the same with one half and one product each.

Algorithm. Three launches:

    split    tiles of Q, K and V become images of halves, with one exponent and a record of what was lost per tile.
    flash    per block of query rows, over tiles of keys, in base 2:
             1.  S = Q K^T              hi hi + hi lo + lo hi on the tensor cores, 16 columns at a time
             2.  m_new = max(m, rowmax S)     alpha = 2^(m - m_new)     P = 2^(S - m_new)
             3.  l = alpha l + rowsum P
             4.  O = alpha O + P V      P split in the registers that S was summed in
             and after the last tile O = O / l, lse = m + ln l.
    rescue   blocks for which halves would lose digits (`verdict`), and rows with few keys: fp32 without tensor cores,
             scores to twice its digits.

Work split. One block per (batch, head, WARPS Q_ROWS query rows); a warp owns Q_ROWS of them whole, so that row
statistics need two shuffles and P never leaves its registers. Tiles of K and V take turns in a ring of SLOTS slots.

Memory. Images take the bytes of Q, K and V again; with one half, half of that. Their rows have PADDED columns, those of
the config's d_bucket in whole 64s. Shared: 2 HALVES WARPS Q_ROWS PADDED bytes for Q, 2 HALVES K_ROWS PADDED for each
slot. Registers per lane: Q_ROWS COLUMNS / 32 for O, Q_ROWS K_ROWS / 32 for S.

Numerics. A number is off by 2^-23, a product by 2^-22 of it at most; sums are truncated within 16 S_CHAIN columns (S)
or 16 O_CHAIN keys (O), and rounded to nearest beyond; what S loses by that on average is made up for. With one half a
number is off by 2^-12, a product by 2^-11: normwise 4e-4.

Limits. Compute capability 8.0; head dims up to 256 with 163 KB of shared memory a block, up to 64 with 99 KB (precision
tf32: up to 256); images of K and V of one head and of one block of query rows within 512 MB.

Source. Split and sums: Ootomo and Yokota 2022. FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from numba import cuda, float32

from numba_attn.device import mma_epilogue, mma_tile, split_half
from numba_attn.device.mask import Mask
from numba_attn.device.math import bits, cdiv, quotient
from numba_attn.device.mma_tile import lane_of_chunks, lane_of_rows
from numba_attn.device.ptx import cp_async_commit, cp_async_wait, opaque
from numba_attn.device.rescue_kernel import FEW_KEYS
from numba_attn.device.smem import shared_memory
from numba_attn.device.split_half import PEAK, ROW_BYTES, UNSCALE, peak_of, scales, unit_of, verdict
from numba_attn.device.tile import WARP
from numba_attn.images import ImageBatches, unsuited
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import Device, Problem


@dataclass(frozen=True)
class Config:
    d_bucket: int
    warps: int
    q_rows: int
    k_rows: int
    slots: int
    min_blocks: int = 1
    s_chain: int = 2
    """After so many steps of 16 columns a sum of S is added up in fp32 and starts anew. With one product (tf32) this is
    ignored: a sum runs over all columns."""
    o_chain: int = 2
    """The same for O, in steps of 16 keys."""
    products: int = 3
    """Of halves: 1 for precision tf32. The fourth, lo lo of Q K^T, shows beside rounding errors of short sums only."""
    is_causal: bool = False

    def __post_init__(self):
        if self.q_rows % 16 or self.k_rows % 16 or self.k_rows % self.q_rows or self.block_m % self.k_rows:
            raise ValueError(f"16 must divide {self.q_rows=}, that {self.k_rows=}, and that {self.block_m=}")

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def block_m(self) -> int:
        return self.warps * self.q_rows

    @property
    def halves(self) -> int:
        return mma_tile.halves_of(self.products)

    def bytes_of(self, rows: int) -> int:
        return split_half.image_bytes(rows, self.d_bucket, self.halves)

    @property
    def smem_bytes(self) -> int:
        """Q, and behind it the ring of slots for K and V."""
        return self.bytes_of(self.block_m) + self.slots * self.bytes_of(self.k_rows)


# 32 rows a warp halve the shared loads per product, where registers for O last; 8 warps of 255 registers fill an SM.
# Where two entries have the same d_bucket, the second is for GPUs with less shared memory.
TILES = (
    Config(32, warps=4, q_rows=32, k_rows=32, slots=4, min_blocks=2, products=4),
    Config(64, warps=4, q_rows=32, k_rows=32, slots=4, min_blocks=2, s_chain=4),
    Config(96, warps=8, q_rows=32, k_rows=32, slots=4),
    Config(128, warps=8, q_rows=32, k_rows=32, slots=4, s_chain=4),
    Config(128, warps=4, q_rows=32, k_rows=32, slots=4, s_chain=4),
    Config(192, warps=8, q_rows=16, k_rows=32, slots=4),
    Config(256, warps=8, q_rows=16, k_rows=32, slots=3),
    Config(256, warps=4, q_rows=16, k_rows=32, slots=3),
)
# For precision tf32: images of half the size.
ONE_PRODUCT = (
    Config(64, warps=4, q_rows=32, k_rows=32, slots=4, min_blocks=2, products=1),
    Config(128, warps=8, q_rows=32, k_rows=32, slots=4, products=1),
    Config(256, warps=8, q_rows=16, k_rows=32, slots=4, products=1),
    Config(256, warps=4, q_rows=16, k_rows=32, slots=4, products=1),
)


def supports(problem: Problem, device: Device) -> str | None:
    if device.cc < (8, 0):
        return f"multiplies halves by mma.m16n8k16, from compute capability 8.0 on: {device.name} has {device.cc}"
    if max(problem.D, problem.Dv) > TILES[-1].d_bucket:
        return f"keeps O in registers, up to {TILES[-1].d_bucket} columns: D={problem.D}, Dv={problem.Dv}"
    chosen = config(problem, device)
    if device.smem_per_block_bytes < chosen.smem_bytes:
        return f"needs {chosen.smem_bytes} bytes of shared memory a block, {device.name} has less"
    return images(problem, chosen).refusal


def suits(problem: Problem, device: Device) -> str | None:
    return unsuited(problem)


def config(problem: Problem, device: Device) -> Config:
    table = ONE_PRODUCT if problem.precision == "tf32" else TILES
    wide = [tiles for tiles in table if tiles.d_bucket >= max(problem.D, problem.Dv)]
    fitting = [tiles for tiles in wide if tiles.smem_bytes <= device.smem_per_block_bytes]
    return replace((fitting or table[-1:])[0], is_causal=problem.is_causal)


def configs():
    for tiles, is_causal in product(TILES + ONE_PRODUCT, (False, True)):
        yield replace(tiles, is_causal=is_causal)


def small_config(problem: Problem) -> Config:
    d_bucket = cdiv(max(problem.D, problem.Dv), 16) * 16
    products = 1 if problem.precision == "tf32" else 4 if d_bucket <= 32 else 3
    tiles = Config(d_bucket, warps=2, q_rows=16, k_rows=32, slots=3, products=products, is_causal=problem.is_causal)
    return replace(tiles, s_chain=next((own.s_chain for own in TILES if own.d_bucket >= d_bucket), TILES[-1].s_chain))


def images(problem: Problem, config: Config) -> ImageBatches:
    halves = config.halves
    small_first = config.d_bucket <= mma_tile.SHORT
    lost = mma_tile.lost_by_scores(problem.D, config.s_chain, small_first) if halves == 2 else 0.0
    return ImageBatches(problem, config.k_rows, config.d_bucket, config.block_m, lost=lost, halves=halves)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    return images(problem, config).workspace


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    sizes = {"threads": config.threads, "smem_bytes": config.smem_bytes, "min_blocks": config.min_blocks}
    return images(problem, config).launches_around(build_flash, config, **sizes)


def build_flash(config: Config):
    Q_ROWS, K_ROWS, SLOTS, COLUMNS = config.q_rows, config.k_rows, config.slots, config.d_bucket
    BLOCK_M, Q_BYTES, SLOT_BYTES = config.block_m, config.bytes_of(config.block_m), config.bytes_of(K_ROWS)
    # Tiles of Q have K_ROWS rows too.
    Q_IMAGE_BYTES, Q_TILES, BLOCK_WORDS, SLOT_WORDS = SLOT_BYTES, BLOCK_M // K_ROWS, Q_BYTES // 4, SLOT_BYTES // 4
    # With an even number of slots K and V of a tile arrive together, with half the barriers.
    PAIRED = SLOTS % 2 == 0
    AHEAD = SLOTS - 2 if PAIRED else SLOTS - 1  # slots in flight while others are read
    AHEAD_IS_V = AHEAD % 2 == 1  # what is copied while a tile of K is read
    IS_CAUSAL, M_TILES = config.is_causal, Q_ROWS // 16
    S_SHAPE, O_SHAPE, ROW_SHAPE = (M_TILES, K_ROWS // 8, 4), (M_TILES, cdiv(COLUMNS, 16) * 2, 4), (M_TILES, 2)
    SLACK, S_CHAIN = split_half.SLACK[config.halves], COLUMNS if config.halves == 1 else config.s_chain
    end_of_row = Mask(config.is_causal).end
    copy_q, copy_tile = (split_half.copy_image(n_bytes, config.threads) for n_bytes in (Q_BYTES, SLOT_BYTES))
    wait_slot = cp_async_wait(AHEAD // 2 - 1 if PAIRED else AHEAD - 1)
    wait_all = cp_async_wait(0)
    start = mma_tile.start(Q_ROWS, COLUMNS)
    following = mma_tile.ring(SLOTS)
    qk = mma_tile.scores(Q_ROWS, K_ROWS, K_ROWS, COLUMNS, S_CHAIN, config.products)
    mask = mma_tile.masked(Q_ROWS, K_ROWS, end_of_row)
    softmax = mma_tile.softmax(Q_ROWS, K_ROWS)
    pv = mma_tile.outputs(Q_ROWS, K_ROWS, COLUMNS, config.o_chain, min(config.products, 3))
    finish = mma_epilogue.finish(Q_ROWS, COLUMNS)
    store_lse = mma_epilogue.store_lse(Q_ROWS)

    @cuda.jit
    def flash_split_half(Q, K, Q_image, K_image, V_image, Q_record, K_record, V_record, unsafe, O, lse, first_row):
        # who am I: block -> batch, head, m_block; a warp owns Q_ROWS query rows
        H, Lq, D, Lk = Q.shape[1], Q.shape[2], Q.shape[3], K.shape[2]
        m_blocks = unsafe.shape[1]
        head = quotient(cuda.blockIdx.x, m_blocks)
        m_block = cuda.blockIdx.x - head * m_blocks
        if IS_CAUSAL:
            # The last rows have the most keys: start with those of all heads, so that no long block comes last.
            m_block = m_blocks - 1 - quotient(cuda.blockIdx.x, unsafe.shape[0])
            head = cuda.blockIdx.x - (m_blocks - 1 - m_block) * unsafe.shape[0]
        tid = cuda.threadIdx.x
        lane, own_row = tid & 31, (tid >> 5) * Q_ROWS
        m0, row0 = m_block * BLOCK_M, m_block * BLOCK_M + own_row
        rK, rV, gK, gV = K_record[head], V_record[head], K_image[head], V_image[head]

        # halves only where they lose nothing
        q_tile = m_block * Q_TILES
        safe, v_amax = verdict(Q_record, K_record, V_record, head, q_tile, Q_TILES, D, SLACK, lane)
        safe &= Lk >= FEW_KEYS
        if tid == 0:
            unsafe[head, m_block] = not safe
        if not safe:
            return

        # load Q and the first slots, K and V of each tile in turn; reset m, l, acc
        smem = shared_memory()
        ring = smem + Q_BYTES
        n_end = end_of_row(first_row + min(m0 + BLOCK_M, Lq) - 1, Lk)
        n_blocks = quotient(n_end + (K_ROWS - 1), K_ROWS)
        copy_q(smem, Q_image[head], m_block * BLOCK_WORDS, tid)
        for step in range(AHEAD):
            if step < 2 * n_blocks:
                copy_tile(ring + step * SLOT_BYTES, gV if step & 1 else gK, (step >> 1) * SLOT_WORDS, tid)
            if not PAIRED or step & 1:
                cp_async_commit()
        slot, free = 0, AHEAD
        S = cuda.local.array(S_SHAPE, float32)  # then P
        acc = cuda.local.array(O_SHAPE, float32)
        m = cuda.local.array(ROW_SHAPE, float32)
        l = cuda.local.array(ROW_SHAPE, float32)
        alpha = cuda.local.array(ROW_SHAPE, float32)
        start(acc, m, l)
        q_unscale = Q_record[head, q_tile + quotient(own_row, K_ROWS), UNSCALE]
        warp_end = end_of_row(first_row + min(row0 + Q_ROWS, Lq) - 1, Lk)
        q_at = smem + quotient(own_row, K_ROWS) * Q_IMAGE_BYTES + own_row % K_ROWS * ROW_BYTES + lane_of_rows(lane)
        k_lane, v_lane = lane_of_chunks(lane), lane_of_rows(lane)
        v_bits = bits(v_amax)

        for n_block in range(n_blocks):
            n0 = n_block * K_ROWS
            unit = unit_of(q_unscale, rK[n_block, UNSCALE])
            peak = peak_of(rV[n_block, UNSCALE], scales(opaque(v_bits))[0])

            # S = Q K^T, P = 2^(S - m)
            wait_slot()
            # The tile of K is visible to all, and all are done with the slot that is filled next.
            cuda.syncthreads()
            ahead = n_block + AHEAD // 2
            if ahead < n_blocks:
                copy_tile(ring + free * SLOT_BYTES, gV if AHEAD_IS_V else gK, ahead * SLOT_WORDS, tid)
                if PAIRED:
                    copy_tile(ring + following(free) * SLOT_BYTES, gV, ahead * SLOT_WORDS, tid)
            cp_async_commit()
            if n0 < warp_end:
                qk(S, q_at, ring + slot * SLOT_BYTES + k_lane)
                if n0 + K_ROWS > end_of_row(first_row + row0, Lk):
                    mask(S, first_row + row0, n0, Lk, lane)
                softmax(S, m, l, alpha, unit, peak)
            slot, free = following(slot), following(free)

            # O = alpha O + P V
            if not PAIRED:
                wait_slot()
                # The same for the tile of V.
                cuda.syncthreads()
                ahead = n_block + (AHEAD + 1) // 2
                if ahead < n_blocks:
                    copy_tile(ring + free * SLOT_BYTES, gK if AHEAD_IS_V else gV, ahead * SLOT_WORDS, tid)
                cp_async_commit()
            if n0 < warp_end:
                pv(acc, S, alpha, ring + slot * SLOT_BYTES + v_lane)
            slot, free = following(slot), following(free)

        # finish: O = acc / l, lse = m + ln l; found anew, so that registers serve the tiles
        wait_all()  # without a key, for Q
        b, of_lane, v_unscale = quotient(opaque(head), H), opaque(tid) & 31, scales(opaque(v_bits))[1]
        row0 = m_block * BLOCK_M + (opaque(tid) >> 5) * Q_ROWS
        finish(O[b, head - b * H], acc, l, v_unscale / PEAK, row0, of_lane)
        store_lse(lse[b, head - b * H], m, l, row0, of_lane)

    return flash_split_half


KERNEL = Kernel(
    name="flash_split_half_sm80",
    summary="operands split into fp16 halves, three tensor-core products each, by mma.sync",
    accuracy="fp32",
    lower_accuracies=("tf32",),
    supports=supports,
    suits=suits,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
)
