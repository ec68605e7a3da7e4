"""A small attention kernel for the tests of the mutations: one warp per query row, one key per lane, keys by 32."""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import cuda, float32

from numba_attn.kernel import Kernel, Launch

FULL = 0xFFFFFFFF


@dataclass(frozen=True)
class Config:
    is_causal: bool


def build(config):
    CAUSAL = config.is_causal

    @cuda.jit
    def toy(Q, K, V, O, lse, scale):
        head, row = cuda.blockIdx.x // Q.shape[2], cuda.blockIdx.x % Q.shape[2]
        b, h = head // Q.shape[1], head % Q.shape[1]
        lane = cuda.laneid
        sP = cuda.shared.array(32, float32)
        end = min(row + 1, K.shape[2]) if CAUSAL else K.shape[2]
        m, l = float32(-math.inf), float32(0)
        for n0 in range(0, end, 32):
            s = float32(-math.inf)
            if n0 + lane < end:
                s = float32(0)
                for d in range(Q.shape[3]):
                    s += Q[b, h, row, d] * K[b, h, n0 + lane, d]
                s *= scale
            top = s
            for offset in (16, 8, 4, 2, 1):
                top = max(top, cuda.shfl_xor_sync(FULL, top, offset))
            m_new = max(m, top)
            base = m_new if m_new > float32(-math.inf) else float32(0)
            cuda.syncwarp()
            sP[lane] = math.exp(s - base)
            cuda.syncwarp()
            alpha = math.exp(m - base)
            l *= alpha
            for k in range(min(32, end - n0)):
                l += sP[k]
            for d in range(lane, V.shape[3], 32):
                acc = O[b, h, row, d] * alpha if n0 > 0 else float32(0)
                for k in range(min(32, end - n0)):
                    acc += sP[k] * V[b, h, n0 + k, d]
                O[b, h, row, d] = acc
            m = m_new
        for d in range(lane, V.shape[3], 32):
            O[b, h, row, d] = O[b, h, row, d] / l if end > 0 else float32(0)
        if lane == 0 and row < lse.shape[2]:
            lse[b, h, row] = m + math.log(l)

    return toy


def launches(problem, config):
    grid = problem.B * problem.H * problem.Lq
    return (Launch(build, config, ("Q", "K", "V", "O", "lse", "scale"), grid, 32),)


def small_config(problem):
    return Config(problem.is_causal)


KERNEL = Kernel(
    name="toy",
    summary="a toy",
    accuracy="fp32",
    supports=lambda problem, device: None,
    suits=lambda problem, device: None,
    config=lambda problem, device: small_config(problem),
    configs=lambda: [Config(False), Config(True)],
    small_config=small_config,
    launches=launches,
)
