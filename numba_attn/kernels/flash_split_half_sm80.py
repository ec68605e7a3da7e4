"""fp32 accuracy on tensor cores: operands split into fp16 halves, three products each, by `mma.sync`.

Algorithm. Three launches:

    split    tiles of Q, K and V become images of halves, with one exponent per tile and a record of what was lost.
    flash    per block of query rows, over tiles of keys, in base 2:
             1.  S = Q K^T              hi hi + hi lo + lo hi on the tensor cores, 16 columns at a time
             2.  m_new = max(m, rowmax S)     alpha = 2^(m - m_new)     P = 2^(S - m_new)
             3.  l = alpha l + rowsum P
             4.  O = alpha O + P V      P split in the registers that S was summed in
             and after the last tile O = O / l, lse = m + ln l.
    rescue   blocks for which halves would lose digits (`is_safe`) are done in plain fp32.

Work split. One block per (batch, head, WARPS Q_ROWS query rows); a warp owns Q_ROWS of them whole, so that row
statistics need two shuffles and P never leaves its registers. Tiles of K and V take turns in a ring of SLOTS slots.

Memory. Images take the bytes of Q, K and V again, columns padded to 64. Shared: 4 WARPS Q_ROWS PADDED bytes for Q, 4
K_ROWS PADDED for each slot. Registers per lane: Q_ROWS COLUMNS / 32 for O, Q_ROWS K_ROWS / 32 for S.

Numerics. A number is off by 2^-23, a product by 2^-22 of it at most; sums are truncated within 16 S_CHAIN columns
(S) or 16 O_CHAIN keys (O), and rounded to nearest beyond. Against float64, normwise: 5e-7 on normal inputs.

Limits. Compute capability 8.0, head dims up to 256, images of at most 512 MB, a grid below 2^31 blocks.

Source. Split and sums: Ootomo and Yokota 2022. FlashAttention-2 (Dao 2023). PTX ISA, "Matrix fragments for
mma.m16n8k16".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from numba import cuda, float32, int32

from numba_attn.device import mma_tile
from numba_attn.device.mask import Mask
from numba_attn.device.math import LN2, bits, cdiv
from numba_attn.device.mma_tile import lane_of_chunks, lane_of_rows
from numba_attn.device.ptx import cp_async_commit, cp_async_wait, opaque
from numba_attn.device.rescue_kernel import RescueConfig, build_rescue
from numba_attn.device.smem import shared_memory
from numba_attn.device.split_half import (
    PEAK,
    RECORD,
    ROW_BYTES,
    UNSCALE,
    copy_image,
    extremes,
    image_bytes,
    image_words,
    is_safe,
    peak_of,
    scales,
    unit_of,
)
from numba_attn.device.split_kernel import SplitConfig, build_split
from numba_attn.device.tile import WARP
from numba_attn.kernel import Kernel, Launch, Workspace
from numba_attn.problem import MAX_GRID, Device, Problem

MAX_WORKSPACE_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class Config:
    warps: int
    q_rows: int
    k_rows: int
    columns: int
    slots: int
    s_chain: int
    """Steps of 16 columns after which a sum of S moves on to fp32."""
    o_chain: int
    """Steps of 16 keys, of O."""
    min_blocks: int
    """Blocks that an SM holds."""
    is_causal: bool

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
    def q_bytes(self) -> int:
        return image_bytes(self.block_m, self.columns)

    @property
    def slot_bytes(self) -> int:
        return image_bytes(self.k_rows, self.columns)

    @property
    def smem_bytes(self) -> int:
        """Q, and behind it the ring of slots for K and V."""
        return self.q_bytes + self.slots * self.slot_bytes


@dataclass(frozen=True)
class Tiles:
    """Tile sizes for head dims up to `columns`."""

    columns: int
    warps: int
    q_rows: int
    k_rows: int
    slots: int
    min_blocks: int

    def config(self, is_causal: bool) -> Config:
        sizes = (self.warps, self.q_rows, self.k_rows, self.columns, self.slots)
        return Config(*sizes, s_chain=4, o_chain=2, min_blocks=self.min_blocks, is_causal=is_causal)


# 32 rows a warp halve the shared loads per product, where registers for O last. 8 warps of 255 registers fill an SM.
TILES = (
    Tiles(64, warps=4, q_rows=32, k_rows=32, slots=4, min_blocks=2),
    Tiles(96, warps=8, q_rows=32, k_rows=32, slots=4, min_blocks=1),
    Tiles(128, warps=8, q_rows=32, k_rows=32, slots=4, min_blocks=1),
    Tiles(192, warps=8, q_rows=16, k_rows=32, slots=4, min_blocks=1),
    Tiles(256, warps=8, q_rows=16, k_rows=32, slots=3, min_blocks=1),
)


def supports(problem: Problem, device: Device) -> str | None:
    if device.cc < (8, 0):
        return f"multiplies halves by mma.m16n8k16, from compute capability 8.0 on: {device.name} has {device.cc}"
    if max(problem.D, problem.Dv) > TILES[-1].columns:
        return f"keeps O in registers, up to {TILES[-1].columns} columns: D={problem.D}, Dv={problem.Dv}"
    chosen = config(problem, device)
    if device.smem_per_block_bytes < chosen.smem_bytes:
        return f"needs {chosen.smem_bytes} bytes of shared memory a block, {device.name} has less"
    n_bytes = sum(4 * math.prod(space.shape) for space in workspace(problem, chosen).values())
    if n_bytes > MAX_WORKSPACE_BYTES:
        return f"needs {n_bytes} bytes of workspace, {MAX_WORKSPACE_BYTES} are allowed"
    blocks = max(launch.grid for launch in launches(problem, chosen))
    return f"needs {blocks} blocks, a grid holds {MAX_GRID}" if blocks > MAX_GRID else None


def config(problem: Problem, device: Device) -> Config:
    tiles = next(tiles for tiles in TILES if tiles.columns >= max(problem.D, problem.Dv))
    return tiles.config(problem.is_causal)


def configs():
    for tiles, is_causal in product(TILES, (False, True)):
        yield tiles.config(is_causal)


def small_config(problem: Problem) -> Config:
    tiles = Tiles(cdiv(max(problem.D, problem.Dv), 16) * 16, warps=2, q_rows=16, k_rows=32, slots=3, min_blocks=1)
    return tiles.config(problem.is_causal)


def workspace(problem: Problem, config: Config) -> dict[str, Workspace]:
    heads, m_blocks = problem.B * problem.H, cdiv(problem.Lq, config.block_m)
    tiles = {"Q": m_blocks * config.block_m // config.k_rows}
    tiles["K"] = tiles["V"] = cdiv(problem.Lk, config.k_rows)
    words = image_words(config.k_rows, config.columns)
    images = {f"{name}_image": Workspace((heads, n * words), "uint32") for name, n in tiles.items()}
    records = {f"{name}_record": Workspace((heads, n, RECORD)) for name, n in tiles.items()}
    return {**images, **records, "unsafe": Workspace((heads, m_blocks), "int32")}


def launches(problem: Problem, config: Config) -> tuple[Launch, ...]:
    space = workspace(problem, config)
    images = tuple(name for name in space if name != "unsafe")
    split = SplitConfig(config.k_rows, config.columns, 4 if problem.vector == 4 else 1)
    tiles = sum(math.prod(space[name].shape[:2]) for name in space if name.endswith("_record"))
    blocks = math.prod(space["unsafe"].shape)
    rescue = RescueConfig(config.block_m, config.is_causal)
    return (
        Launch(
            build_split, split, ("Q", "K", "V", *images, "scale"), tiles, split.threads, min_blocks=split.min_blocks
        ),
        Launch(
            build_flash,
            config,
            ("Q", "K", *images, "unsafe", "O", "lse"),
            blocks,
            config.threads,
            config.smem_bytes,
            min_blocks=config.min_blocks,
        ),
        Launch(build_rescue, rescue, ("Q", "K", "V", "unsafe", "O", "lse", "scale"), blocks, rescue.threads),
    )


def build_flash(config: Config):
    Q_ROWS, K_ROWS, SLOTS, COLUMNS = config.q_rows, config.k_rows, config.slots, config.columns
    BLOCK_M, Q_BYTES, SLOT_BYTES = config.block_m, config.q_bytes, config.slot_bytes
    Q_IMAGE_BYTES, Q_TILES, BLOCK_WORDS, SLOT_WORDS = SLOT_BYTES, BLOCK_M // K_ROWS, Q_BYTES // 4, SLOT_BYTES // 4
    # With an even number of slots K and V of a tile arrive together: half the barriers, and warps drift apart, so that
    # one multiplies while another exponentiates.
    PAIRED = SLOTS % 2 == 0
    AHEAD = SLOTS - 2 if PAIRED else SLOTS - 1  # slots in flight while others are read
    AHEAD_IS_V = AHEAD % 2 == 1  # what is copied while a tile of K is read
    IS_CAUSAL, M_TILES = config.is_causal, Q_ROWS // 16
    S_SHAPE, O_SHAPE, ROW_SHAPE = (M_TILES, K_ROWS // 8, 4), (M_TILES, cdiv(COLUMNS, 16) * 2, 4), (M_TILES, 2)
    end_of_row = Mask(config.is_causal).end
    copy_q = copy_image(Q_BYTES, config.threads)
    copy_tile = copy_image(SLOT_BYTES, config.threads)
    wait_slot = cp_async_wait(AHEAD // 2 - 1 if PAIRED else AHEAD - 1)
    start = mma_tile.start(Q_ROWS, COLUMNS)
    following = mma_tile.ring(SLOTS)
    qk = mma_tile.scores(Q_ROWS, K_ROWS, K_ROWS, COLUMNS, config.s_chain)
    mask = mma_tile.masked(Q_ROWS, K_ROWS)
    softmax = mma_tile.softmax(Q_ROWS, K_ROWS)
    pv = mma_tile.outputs(Q_ROWS, K_ROWS, COLUMNS, config.o_chain)
    finish = mma_tile.finish(Q_ROWS, COLUMNS)

    @cuda.jit
    def flash_split_half(Q, K, Q_image, K_image, V_image, Q_record, K_record, V_record, unsafe, O, lse):
        # who am I: block -> batch, head, m_block; a warp owns Q_ROWS query rows
        H, Lq, D, Lk = Q.shape[1], Q.shape[2], Q.shape[3], K.shape[2]
        m_blocks = unsafe.shape[1]
        head, m_block = cuda.blockIdx.x // m_blocks, cuda.blockIdx.x % m_blocks
        if IS_CAUSAL:
            # The last rows have the most keys: start with those of all heads, so that no long block comes last.
            heads = unsafe.shape[0]
            head, m_block = cuda.blockIdx.x % heads, m_blocks - 1 - cuda.blockIdx.x // heads
        b, h = head // H, head % H
        tid = cuda.threadIdx.x
        lane = tid & 31
        m0 = m_block * BLOCK_M
        rQ, rK, rV, gK, gV = Q_record[head], K_record[head], V_record[head], K_image[head], V_image[head]

        # halves only where they lose nothing
        q_tile = m_block * Q_TILES
        q_amax, q_level, _ = extremes(rQ, q_tile, q_tile + Q_TILES, lane)
        k_amax, k_level, _ = extremes(rK, 0, rK.shape[0], lane)
        v_amax, _, v_min = extremes(rV, 0, rV.shape[0], lane)
        safe = is_safe(D, q_amax, q_level, k_amax, k_level, v_amax, v_min)
        if tid == 0:
            unsafe[head, m_block] = 0 if safe else 1
        if not safe:
            return

        # load Q and the first slots, K and V of each tile in turn; reset m, l, acc
        smem = shared_memory()
        ring = smem + Q_BYTES
        n_end = end_of_row(min(m0 + BLOCK_M, Lq) - 1, Lk)
        n_blocks = (n_end + K_ROWS - 1) // K_ROWS
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
        ends = cuda.local.array(ROW_SHAPE, int32)
        start(acc, m, l)
        q_unscale = rQ[q_tile + (tid >> 5) * Q_ROWS // K_ROWS, UNSCALE]
        v_scale, v_unscale = scales(bits(v_amax))

        for n_block in range(n_blocks):
            n0 = n_block * K_ROWS
            unit = unit_of(q_unscale, rK[n_block, UNSCALE])
            peak = peak_of(rV[n_block, UNSCALE], v_scale)

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
            # Found anew for each tile: registers are short.
            thread = opaque(tid)
            lane, own_row = thread & 31, (thread >> 5) * Q_ROWS
            row0 = m0 + own_row
            has_keys = n0 < end_of_row(min(row0 + Q_ROWS, Lq) - 1, Lk)
            if has_keys:
                q_at = smem + own_row // K_ROWS * Q_IMAGE_BYTES + own_row % K_ROWS * ROW_BYTES
                qk(S, q_at + lane_of_rows(lane), ring + slot * SLOT_BYTES + lane_of_chunks(lane))
                if n0 + K_ROWS > end_of_row(row0, Lk):
                    for i in range(M_TILES):
                        for r in range(2):
                            row = row0 + (lane >> 2) + 16 * i + 8 * r
                            ends[i, r] = end_of_row(row, Lk) - n0 - 2 * (lane & 3)
                    mask(S, ends)
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
            if has_keys:
                pv(acc, S, alpha, ring + slot * SLOT_BYTES + lane_of_rows(opaque(tid) & 31))
            slot, free = following(slot), following(free)

        # finish: O = acc / l, lse = m + ln l
        lane, row0 = tid & 31, m0 + (tid >> 5) * Q_ROWS
        finish(O[b, h], acc, l, v_unscale / PEAK, row0, lane)
        if lane & 3 == 0:
            for i in range(M_TILES):
                for r in range(2):
                    row = row0 + (lane >> 2) + 16 * i + 8 * r
                    if row < lse.shape[2]:
                        lse[b, h, row] = m[i, r] * LN2 + math.log(l[i, r])

    return flash_split_half


KERNEL = Kernel(
    name="flash_split_half_sm80",
    summary="operands split into fp16 halves, three tensor-core products each, by mma.sync",
    accuracy="fp32",
    supports=supports,
    config=config,
    configs=configs,
    small_config=small_config,
    launches=launches,
    workspace=workspace,
)
