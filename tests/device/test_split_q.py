"""Contract under test: a warp's own rows of Q as halves in shared memory, their scale, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest
from half_images import image_of
from numba import cuda, float32
from test_split_half import factor_of, record_of
from toys import nans, randn

from numba_attn.device import split_half as sh
from numba_attn.device import split_q
from numba_attn.device.smem import shared_memory, shared_tile

BLOCK_M = 64


def split_rows(run, Q, columns, vector, K_record=None, V_record=None, scale=1.0, lost=0.0, halves=2):
    """Image [words], units of eights of rows, facts of slabs, and (safe, v_amax), of 64 rows, of which Q has fewer."""
    (load, judge, units), X_SHAPE = split_q.verbs(columns, 1, halves), split_q.x_shape(columns)
    n_bytes, facts_shape = sh.image_bytes(BLOCK_M, columns, halves), split_q.facts_shape(4, columns)
    FACT, WORDS, N = shared_tile(n_bytes, facts_shape), shared_tile(0, (n_bytes // 4,), dtype=float32), n_bytes // 4

    @cuda.jit
    def kernel(Q, K_record, V_record, image, eights, facts, result, scale, lost, vector):
        tid, smem = cuda.threadIdx.x, shared_memory()
        x = cuda.local.array(X_SHAPE, float32)
        sFact, sWord = FACT(smem), WORDS(smem)
        unit = cuda.local.array((1, 2), float32)
        gQ, row0 = Q[0, 0], (tid >> 5) * 16
        load(x, gQ, row0, tid, vector)
        safe, v_amax = judge(x, gQ, row0, vector, smem, sFact, K_record[0], V_record[0], scale, lost, tid)
        for i in range(tid, N, cuda.blockDim.x):
            image[i] = sWord[i]
        if tid & 31 == 0 and tid < 128:
            units(unit, sFact, tid >> 5, float32(0.5))
            eights[tid >> 5, 0], eights[tid >> 5, 1] = unit[0, 0], unit[0, 1]
        if tid < facts.shape[0]:
            for i in range(3):
                facts[tid, i] = sFact[tid, i]
        if tid == 0:
            result[0], result[1] = 1 if safe else 0, v_amax

    image, eights, facts, result = nans(N), nans(4, 2), nans(*facts_shape), nans(2)
    ones = np.ones((1, 1, sh.RECORD), np.float32)
    records = [ones if record is None else record for record in (K_record, V_record)]
    arguments = (Q, *records, image, eights, facts, result, np.float32(scale), sh.units_of(lost), vector)
    run(kernel, *arguments, threads=256, smem_bytes=n_bytes + split_q.facts_bytes(4, columns))
    return image.view(np.uint32), eights, facts, result


@pytest.mark.parametrize(
    ("columns", "D", "vector", "rows"),
    [
        (16, 16, 4, 64),
        (64, 60, 4, 64),
        (64, 61, 1, 50),
        (128, 128, 4, 64),
        (128, 100, 2, 64),
        (80, 80, 4, 33),
        (192, 130, 1, 60),
        (256, 256, 4, 64),
        (256, 255, 1, 41),
    ],
)
def test_rows_of_warps(run, columns, D, vector, rows):
    Q = randn(1, 1, rows, D) * np.float32(2.0) ** np.arange(0, 2 * rows, 2, dtype=np.float32)[:, None] / 2**60
    image, eights, facts, _ = split_rows(run, Q, columns, vector, scale=-0.3, lost=2.0**-20)
    np.testing.assert_array_equal(eights, 0.5 * np.repeat(facts[:, 2], 8 // len(facts)).reshape(4, 2))
    part = np.zeros((BLOCK_M, sh.padded(columns)))
    part[:rows, :D] = Q[0, 0]
    expected = []
    for fact, own in zip(facts, np.split(part, len(facts)), strict=True):
        amax, level, _ = record_of(own.astype(np.float32), D)
        times = np.abs(np.float32(-0.3) * sh.LOG2E)
        np.testing.assert_array_equal(fact[:2], [amax * times, -np.float32(level) * times])
        up = 1 / np.float64(fact[2])
        assert amax == 0 or 2**14 <= amax * times * up < 2**15
        expected.append(own * factor_of(-0.3, 2.0**-20) * up)
    # An element near the middle of two halves may go to either: hi and lo together are what counts.
    seen, expected = (
        x.view(np.float16).reshape(2, -1).astype(float) for x in (image, image_of(np.concatenate(expected)))
    )
    np.testing.assert_allclose(seen[0], expected[0], rtol=2.0**-10, atol=2.0**-24)
    np.testing.assert_allclose(seen.sum(0), expected.sum(0), rtol=2.0**-22, atol=2.0**-24)


@pytest.mark.parametrize(
    ("change", "k_amax", "is_safe"),
    [
        (lambda Q: None, 1.0, True),
        (lambda Q: Q.__setitem__((0, 0, 40, 3), np.nan), 1.0, False),
        (lambda Q: Q.__setitem__((0, 0, 63, 15), -np.inf), 1.0, False),
        (lambda Q: Q.__imul__(np.float32(2.0**20)), 1.0, True),  # large, and most elements are near the largest
        (lambda Q: Q.__setitem__((0, 0, 20, slice(1, None)), 0), 2.0**20, False),  # large, of one element
        (lambda Q: Q.__setitem__((0, 0, 20), 0), 2.0**20, True),  # rows of zeros do not count
        (lambda Q: Q.__setitem__((0, 0, slice(16)), 2.0**-10), 2.0**20, False),  # a warp's rows far below the others
        (lambda Q: Q.__setitem__((0, 0, slice(16)), 2.0**-10), 1.0, True),
    ],
)
def test_verdict_over_all_warps(run, change, k_amax, is_safe):
    Q = np.copysign(np.float32(1), randn(1, 1, 64, 16)) + np.float32(0.25) * randn(1, 1, 64, 16, seed=1)
    change(Q)
    K_record, V_record = np.ones((1, 3, sh.RECORD), np.float32), np.ones((1, 3, sh.RECORD), np.float32)
    K_record[0, :, : sh.ROW_MIN] = k_amax
    V_record[0, 1, : sh.ROW_MIN] = 7.0
    assert list(split_rows(run, Q, 16, 4, K_record, V_record)[3]) == [is_safe, 7.0]


FACTORS = [(1e-30, 2e38, True), (1e-30, 3e38, False), (1e-44, 2e38, False), (1.0, np.inf, False), (1.0, np.nan, False)]


@pytest.mark.parametrize(("x", "scale", "is_safe"), FACTORS)
def test_a_factor_out_of_range_is_not_safe(run, x, scale, is_safe):
    Q = np.full((1, 1, 64, 16), x, np.float32)
    *_, facts, result = split_rows(run, Q, 16, 4, scale=scale)
    assert np.all(np.isfinite(facts[:, 0])) == is_safe == result[0]


def test_rows_of_zeros_are_safe_with_any_scale(run):
    # 2^126, what zeros would be scaled by, times a scale of 4 and more is out of range.
    Q = randn(1, 1, 40, 16)
    Q[..., :16, :] = 0
    image, _, facts, result = split_rows(run, Q, 16, 4, scale=8.0)
    assert result[0] and list(facts[[0, 3], 0]) == [0, 0] and np.all(np.isneginf(facts[[0, 3], 1]))
    halves = image.view(np.float16).reshape(2, BLOCK_M, -1)
    assert not halves[:, :16].any() and not halves[:, 40:].any() and np.all(np.isfinite(halves))


@pytest.mark.parametrize(("large", "is_dense"), [(11, True), (10, False)])
def test_more_than_half_of_the_columns_that_count_are_large(run, large, is_dense):
    Q = np.full((1, 1, 64, 20), 2.0**-10, np.float32)
    Q[..., :large] = 1
    facts = split_rows(run, Q, 64, 4)[2]
    assert np.all((facts[:, 1] < 0) == is_dense)


@pytest.mark.parametrize(("columns", "D", "vector"), [(64, 61, 1), (256, 256, 4)])
def test_one_half(run, columns, D, vector):
    Q = randn(1, 1, 40, D)
    image, _, facts, _ = split_rows(run, Q, columns, vector, scale=0.3, halves=1)
    part = np.zeros((BLOCK_M, sh.padded(columns)))
    part[:40, :D] = Q[0, 0] * factor_of(0.3, 0.0) / np.repeat(facts[:, 2], BLOCK_M // len(facts))[:40, None]
    seen, expected = (x.view(np.float16).astype(float) for x in (image, image_of(part, halves=1)))
    np.testing.assert_allclose(seen, expected, rtol=2.0**-10, atol=2.0**-24)


@pytest.mark.parametrize(("halves", "is_safe"), [(1, False), (2, True)])
def test_one_half_loses_more(run, halves, is_safe):
    # Scores beyond 2^12: dense rows of two halves lose nothing at that.
    Q, K_record = np.ones((1, 1, 64, 16), np.float32), np.full((1, 1, sh.RECORD), 200, np.float32)
    assert split_rows(run, Q, 16, 4, K_record, halves=halves)[3][0] == is_safe
