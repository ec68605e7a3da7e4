"""Verb of a candidate for `device.wgmma_tile`: two tiles' products in flight during the softmax between them.

    begin S_t = Q K_t^T and, but for columns that registers do not suffice for, P_{t-1} V_{t-1}
    wait for S_t, begin the columns left
    m, l and P_t from S_t
    wait for P_{t-1} V_{t-1}        O = alpha O + P_{t-1} V_{t-1}

Registers a thread: COLUMNS / 2 for O, 32 for S, 32 for P in halves, and for what is in flight 32 for each 64 columns
of S and O_COLUMNS / 2 for each sum of O: up to 128 columns. V_{t-1} and K_t lie in the ring together. Chains of
products and softmax are written as in `wgmma_tile` and `mma_tile`, and become theirs when this verb does: until then
an edit there would make every saved result older. Source. FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

import numpy as np

from numba_attn.device.mma_tile import SMALL_FIRST, left_fragment
from numba_attn.device.split_half import BLOCK_COLUMNS, ROW_BYTES, plane_bytes
from numba_attn.device.unrolled import unrolled
from numba_attn.device.wgmma_fragments import GROUP_ROWS, STEP, Matrix
from numba_attn.device.wgmma_ring import slot_of


def advance(columns: int, products: int, slots: int, o_columns: int):
    """The verb `advance(O, left, m, l, alpha, q, ring, barriers, v_turn, k_turn, unit, peak, is_reporter)`.

    O = alpha O + P V of one tile, whose P is `left` and whose factor of O is `alpha`, and S, m, l and P of the next, of
    which every key counts: `left` and `alpha` are that one's then. The turns are those of V and of the next K.
    """
    block, plane = GROUP_ROWS * ROW_BYTES, plane_bytes(GROUP_ROWS, columns)
    steps = range(GROUP_ROWS // STEP)
    *small, large = SMALL_FIRST[-products:]
    of_values = [(step, *halves) for step in steps for halves in SMALL_FIRST[1:3]] + [(step, 0, 0) for step in steps]

    def of_scores(q, slot, first: int) -> list:
        k_steps = range(-(-min(columns - first, BLOCK_COLUMNS) // STEP))
        at = first // BLOCK_COLUMNS * block

        def product(step: int, a: int, b: int):
            return Matrix(q, a * plane + at + step * 2 * STEP), Matrix(slot, b * plane + at + step * 2 * STEP)

        return [product(s, *halves) for s in k_steps for halves in small] + [product(s, *large) for s in k_steps]

    def of_outputs(lefts, slot, first: int) -> list:
        at = first // BLOCK_COLUMNS * block
        return [
            (lefts[a][step], Matrix(slot, b * plane + at + step * STEP * ROW_BYTES, block, True))
            for step, a, b in of_values
        ]

    @unrolled
    def advance(e, O, left, m, l, alpha, q, ring, barriers, v_turn, k_turn, unit, peak, is_reporter):
        lefts = [[[left[half, step, r] for r in range(4)] for step in steps] for half in range(2)]
        kept = [register for half in lefts for step in half for register in step]
        v_slot, v_full, v_read, v_parity = slot_of(v_turn, ring, barriers, 2 * plane, slots)
        k_slot, k_full, k_read, k_parity = slot_of(k_turn, ring, barriers, 2 * plane, slots)
        firsts = list(range(0, columns, o_columns))

        def begin(first: int) -> list:
            (sums,) = e.wgmma(min(o_columns, columns - first), [of_outputs(lefts, v_slot, first)], wait=False)
            return sums

        # Both on their way: the copies' bytes are there for whoever waited, and for the tensor cores.
        e.mbarrier_wait(k_full, k_parity)
        chains = [of_scores(q, k_slot, first) for first in range(0, columns, BLOCK_COLUMNS)]
        scores = e.wgmma(GROUP_ROWS, chains, wait=False)
        e.mbarrier_wait(v_full, v_parity)
        outputs = [begin(firsts[0])]

        # S, while P V goes on
        scores = e.wgmma_wait(1, [x for sums in scores for x in sums], kept)
        e.mbarrier_arrive(k_read, is_reporter)
        S = scores[: GROUP_ROWS // 2]
        for i in range(GROUP_ROWS // 2, len(scores), GROUP_ROWS // 2):
            S = [a + b for a, b in zip(S, scores[i : i + GROUP_ROWS // 2], strict=True)]
        outputs += [begin(first) for first in firsts[1:]]

        # the softmax of `mma_tile`, P in place of S
        factors = []
        for h in range(2):
            places = [4 * j + 2 * h + r for j in range(GROUP_ROWS // 8) for r in range(2)]
            highest = tree(e.max, [S[place] for place in places])
            for distance in (1, 2):
                highest = e.max(highest, e.shfl_xor(highest, distance))
            m_old, m_new = m[0, h], e.max(m[0, h], highest * unit)
            base = e.where(m_new > -np.inf, m_new, 0.0)
            factors.append(e.ex2(m_old - base))
            m[0, h] = m_new
            probabilities = [e.ex2(e.fma(S[place], unit, -base)) for place in places]
            for place, p in zip(places, probabilities, strict=True):
                S[place] = p * peak
            l[0, h] = e.fma(l[0, h], factors[h], tree(lambda a, b: a + b, probabilities))

        # O = alpha O + P V
        for i, (first, sums) in enumerate(zip(firsts, outputs, strict=True)):
            sums = e.wgmma_wait(len(firsts) - 1 - i, sums, kept)
            if first == firsts[-1]:
                # The products are done: this warp has read the slot.
                e.mbarrier_arrive(v_read, is_reporter)
            for k, x in enumerate(sums):
                place = first // 8 + k // 4, k % 4
                O[0, *place] = e.fma(O[0, *place], alpha[0, place[1] // 2], x)
        for h in range(2):
            alpha[0, h] = factors[h]
        P = {(0, k // 4, k % 4): x for k, x in enumerate(S)}
        for step in steps:
            for half, registers in enumerate(left_fragment(e, P, 0, step)):
                for r, register in enumerate(registers):
                    left[half, step, r] = register

    return advance


def tree(combine, values: list):
    """All values combined, in pairs; an even number of them at each turn."""
    while len(values) > 1:
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
