"""Contract under test: scales, images and records of tiles, and when a block is safe, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from half_images import image_of
from numba import cuda, float32, int32
from toys import nans, randn, simulate

from numba_attn.device import fragments
from numba_attn.device import split_half as sh
from numba_attn.device.math import LOG2E, bits, from_bits
from numba_attn.device.mma_tile import lane_of_rows
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import shared_memory
from numba_attn.device.split_half import extremes, is_safe, peak_of, scales, unit_of
from numba_attn.device.split_kernel import build_split
from numba_attn.device.split_tile import SplitConfig
from numba_attn.device.unrolled import unrolled

INF, NAN = np.float32(np.inf), np.float32(np.nan)
LARGEST, DENORMAL = np.finfo(np.float32).max, np.float32(2.0**-149)
wait_all = cp_async_wait(0)


def test_bits(run):
    @cuda.jit
    def kernel(A, I, O):
        t = cuda.threadIdx.x
        I[t] = bits(A[t])
        O[t] = from_bits(I[t])

    A = randn(32)
    A[:8] = [0, -0.0, INF, -INF, NAN, DENORMAL, LARGEST, -1]
    codes, O = np.zeros(32, np.int32), nans(32)
    run(kernel, A, codes, O)
    np.testing.assert_array_equal(codes, A.view(np.int32))
    np.testing.assert_array_equal(O.view(np.int32), A.view(np.int32))


@cuda.jit
def scales_kernel(A, O):
    for i in range(cuda.threadIdx.x, A.shape[0], 32):
        up, down = scales(bits(A[i]))
        O[i, 0], O[i, 1], O[i, 2] = up, down, A[i] * up


def scaled(run, A):
    A = np.asarray(A, np.float32)
    O = nans(len(A), 3)
    run(scales_kernel, A, O)
    return O.T


def test_scales_of_every_exponent(run):
    powers = 2.0 ** np.arange(-149, 128)
    A = np.concatenate([powers, powers * (1 + 2.0**-23), powers * (2 - 2.0**-22)]).astype(np.float32)
    up, down, x = scaled(run, A)
    np.testing.assert_array_equal(up * down, 1)
    assert np.all(np.log2(up) == np.floor(np.log2(up)))
    large = A >= 2.0**-112
    assert np.all((x[large] >= 2**14) & (x[large] < 2**15))
    np.testing.assert_array_equal(up[~large], 2.0**126)
    np.testing.assert_array_equal(x, A.astype(np.float64) * up)
    # Below, all bits are kept at that: no half is denormal that has a bit to lose.
    assert np.all(A[~large].astype(np.float64) * 2.0**126 < 2**15)


def test_scales_at_the_ends(run):
    up, down, x = scaled(run, [0, DENORMAL, LARGEST, INF, NAN])
    np.testing.assert_array_equal(up[:3], [2.0**126, 2.0**126, 2.0**-113])
    assert np.all(np.isfinite(up)) and np.all(up > 0) and np.all(up * down == 1)
    assert x[0] == 0 and 2**14 <= x[2] < 2**15 and not np.isfinite(x[3]) and np.isnan(x[4])


def test_unit_of(run):
    @cuda.jit
    def kernel(A, O):
        O[cuda.threadIdx.x] = unit_of(A[cuda.threadIdx.x, 0], A[cuda.threadIdx.x, 1])

    A = np.ones((32, 2), np.float32)
    A[:4] = [[2.0**-20, 2.0**-30], [2.0**-126, 2.0**-126], [2.0**-63, 2.0**-63], [2.0**113, 2.0**-126]]
    O = nans(32)
    run(kernel, A, O)
    np.testing.assert_array_equal(O[:5], [2.0**-50, 2.0**-126, 2.0**-126, 2.0**-13, 1])
    assert np.all(O * np.float32(0) == 0)


def test_peak_of(run):
    @cuda.jit
    def kernel(A, O):
        O[cuda.threadIdx.x] = peak_of(A[cuda.threadIdx.x, 0], A[cuda.threadIdx.x, 1])

    A = np.ones((32, 2), np.float32)
    A[:3] = [[2.0**-20, 2.0**20], [2.0**-30, 2.0**20], [2.0**-126, 2.0**-113]]
    O = nans(32)
    run(kernel, A, O)
    np.testing.assert_array_equal(O[:4], [2.0**14, 2.0**4, 2.0**-86, 2.0**14])


@pytest.mark.parametrize(
    ("first", "tiles", "k_tiles", "v_tiles"),
    [(0, 70, 70, 70), (3, 1, 12, 41), (31, 34, 50, 1), (0, 2, 64, 64), (5, 2, 0, 3)],
)
def test_extremes(run, first, tiles, k_tiles, v_tiles):
    @cuda.jit
    def kernel(rQ, rK, rV, O):
        t = cuda.threadIdx.x
        x = cuda.local.array(6, float32)
        extremes(x, rQ, first, tiles, rK, rV, t)
        for i in range(6):
            O[t, i] = x[i]

    records = [np.abs(randn(n, sh.RECORD, seed=n)) for n in (72, k_tiles, v_tiles)]
    for record in records:
        if len(record) > 43:
            record[40, sh.AMAX], record[41, sh.LEVEL], record[42, sh.ROW_MIN] = INF, 0, INF
    O = nans(32, 6)
    run(kernel, *records, O)
    if k_tiles == 0:
        expected = 3 * [0, -INF]  # no key, so nothing is looked at
    else:
        rQ, rK, rV = records[0][first : first + tiles], *records[1:]
        least = [(rQ, sh.LEVEL), (rK, sh.LEVEL), (rV, sh.ROW_MIN)]
        expected = [n for record, of in least for n in (record[:, sh.AMAX].max(), -record[:, of].min())]
    np.testing.assert_array_equal(O, np.broadcast_to(expected, (32, 6)))


def below(x) -> np.float32:
    return np.nextafter(np.float32(x), np.float32(-np.inf))


def above(x) -> np.float32:
    return np.nextafter(np.float32(x), INF)


# D, then largest magnitude and level of Q and of K, then largest magnitude of V and that of its smallest row.
USUAL = {"D": 64, "q_amax": 4, "q_level": 0.25, "k_amax": 4, "k_level": 0.25, "v_amax": 4, "v_min": 1}
SPARSE = {**USUAL, "q_level": 0, "k_level": 0}
LARGE = {**USUAL, "q_amax": 2**10, "q_level": 2**3, "k_amax": 2**12, "k_level": 2**5}

SAFE = {
    "usual": USUAL,
    "fewest columns": {**USUAL, "D": 16},
    "sparse, small scores": SPARSE,
    "sparse, the largest scores": {**SPARSE, "q_amax": 2.0**4, "k_amax": 2.0**1},
    "dense, large scores": LARGE,
    "dense, scores that are nearly infinite": {
        **LARGE,
        "q_amax": 2.0**62,
        "q_level": 2.0**55,
        "k_amax": 2.0**59,
        "k_level": 2.0**52,
    },
    "smallest row of V": {**USUAL, "v_min": 2.0**-10},
    "V of zeros": {**USUAL, "v_amax": 0, "v_min": INF},
    "Q of zeros": {**USUAL, "q_amax": 0, "q_level": INF},
    "K of zeros": {**USUAL, "k_amax": 0, "k_level": INF},
    "largest V": {**USUAL, "v_amax": LARGEST, "v_min": LARGEST},
    "denormal V": {**USUAL, "v_amax": DENORMAL, "v_min": DENORMAL},
    "denormal Q": {**USUAL, "q_amax": DENORMAL, "q_level": 0},
    "all scores are 0": {**USUAL, "q_amax": 0, "q_level": INF, "k_amax": 0, "k_level": INF},
}
UNSAFE = {
    "sparse, larger scores": {**SPARSE, "q_amax": above(2.0**4), "k_amax": 2.0**1},
    "sparse Q": {**LARGE, "q_level": below(2**3)},
    "sparse K": {**LARGE, "k_level": below(2**5)},
    "few columns": {**USUAL, "D": 15},
    "more columns": {**SPARSE, "q_amax": 2.0**4, "k_amax": 2.0**1, "D": 65},
    "infinite scores": {**LARGE, "q_amax": 2.0**62, "q_level": 2.0**62, "k_amax": 2.0**60, "k_level": 2.0**60},
    "a small row of V": {**USUAL, "v_min": below(2.0**-10)},
    "Q not finite": {**USUAL, "q_amax": INF},
    "K not finite": {**USUAL, "k_amax": INF},
    "V not finite": {**USUAL, "v_amax": INF, "v_min": INF},
    "K not finite, Q of zeros": {**USUAL, "k_amax": INF, "q_amax": 0, "q_level": INF},
}


# What one half serves that two leave to the rescue, and what it leaves too.
SAFE_OF_ONE_HALF = {
    "a small row of V": UNSAFE["a small row of V"],
    "smallest row of V of one half": {**USUAL, "v_min": 2.0**-22},
    "small row of large V": {**USUAL, "v_amax": LARGEST, "v_min": LARGEST / 2},
}
LARGE_SCORES = ("dense, large scores", "dense, scores that are nearly infinite")
UNSAFE_OF_ONE_HALF = {
    **{name: SAFE[name] for name in LARGE_SCORES},
    **{name: case for name, case in UNSAFE.items() if name != "a small row of V"},
    "a small row of V": {**USUAL, "v_min": below(2.0**-22)},
}


def test_is_safe(run):
    @cuda.jit
    def kernel(A, O):
        for i in range(cuda.threadIdx.x, A.shape[0], 32):
            safe = is_safe(A[i, 0], A[i, 1], A[i, 2], A[i, 3], A[i, 4], A[i, 5], A[i, 6], A[i, 7])
            O[i] = float32(1) if safe else float32(0)

    cases = {(name, 2): (case, True) for name, case in SAFE.items()}
    cases |= {(name, 2): (case, False) for name, case in UNSAFE.items()}
    cases |= {(name, 1): (case, name not in LARGE_SCORES) for name, case in SAFE.items()}
    cases |= {(f"one half, {name}", 1): (case, True) for name, case in SAFE_OF_ONE_HALF.items()}
    cases |= {(f"one half, {name}!", 1): (case, False) for name, case in UNSAFE_OF_ONE_HALF.items()}
    A = np.array([[*case.values(), sh.SLACK[n]] for (_, n), (case, _) in cases.items()], np.float32)
    O = nans(len(A))
    run(kernel, A, O)
    assert not [name for (name, (_, safe)), x in zip(cases.items(), O, strict=True) if x != safe]


def test_split(run):
    @unrolled
    def divide(e, x, y, scale):
        hi, lo = sh.split(e, x[0], x[1], scale)
        y[0], y[1] = e.unpack(hi)
        y[2], y[3] = e.unpack(lo)

    @cuda.jit
    def kernel(A, O, S):
        for i in range(cuda.threadIdx.x, A.shape[0], 32):
            x, y = cuda.local.array(2, float32), cuda.local.array(4, float32)
            x[0], x[1] = A[i, 0], A[i, 1]
            divide(x, y, S[0])
            for k in range(4):
                O[i, k] = y[k]

    for scale in (1, 2.0**10, 2.0**-90):
        # From the largest half down to what vanishes.
        sizes = np.float32(2.0) ** np.linspace(14, -40, 96)[:, None]
        A = (sizes * (1 + np.random.default_rng(0).random((96, 2))) / scale).astype(np.float32)
        A[::2] *= -1
        A[0] = [1 + 2.0**-11, 1 - 2.0**-24] / np.float32(scale)
        O = nans(96, 4)
        run(kernel, A, O, np.array([scale], np.float32))
        exact, hi, lo = A.astype(np.float64) * scale, O[:, :2].astype(np.float64), O[:, 2:].astype(np.float64)
        np.testing.assert_array_equal(hi, exact.astype(np.float16))
        np.testing.assert_array_equal(lo, (exact - hi).astype(np.float16))
        assert np.all(np.abs(hi + lo - exact) <= np.maximum(2.0**-23 * np.abs(exact), 2.0**-39 * 2**14))


def test_split_of_a_product_that_is_not_rounded(run):
    # 1.1 scale log2(e) has more bits than fp32; hi + lo has some of them.
    @unrolled
    def divide(e, x, y):
        hi, lo = sh.split(e, x[0], x[0], x[1])
        y[0], _ = e.unpack(hi)
        y[1], _ = e.unpack(lo)

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        x, y = cuda.local.array(2, float32), cuda.local.array(2, float32)
        x[0], x[1] = A[t, 0], A[t, 1]
        divide(x, y)
        O[t, 0], O[t, 1] = y[0], y[1]

    A, O = 1 + np.abs(randn(32, 2)), nans(32, 2)
    run(kernel, A, O)
    exact = A[:, 0].astype(np.float64) * A[:, 1]
    assert np.all(np.abs(O.astype(np.float64).sum(1) - exact) <= 2.0**-23 * exact)
    np.testing.assert_array_equal(O[:, 1], (exact - O[:, 0]).astype(np.float16))


def test_split_of_a_factor_of_two_parts(run):
    @unrolled
    def divide(e, x, y):
        hi, lo = sh.split(e, x[0], x[0], x[1], x[2])
        y[0], _ = e.unpack(hi)
        y[1], _ = e.unpack(lo)

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        x, y = cuda.local.array(3, float32), cuda.local.array(2, float32)
        for i in range(3):
            x[i] = A[t, i]
        divide(x, y)
        O[t, 0], O[t, 1] = y[0], y[1]

    A, O = 1 + np.abs(randn(32, 3)), nans(32, 2)
    A[:, 2] *= 2.0**-18
    run(kernel, A, O)
    exact = A[:, 0].astype(np.float64) * (A[:, 1].astype(np.float64) + A[:, 2])
    assert np.all(np.abs(O.astype(np.float64).sum(1) - exact) <= 2.0**-22.9 * exact)


@pytest.mark.parametrize("lost", [0.0, 2.0**-23, 2.0**-18])
def test_of_log2e(run, lost):
    units = sh.units_of(lost)

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        O[t, 0], O[t, 1] = sh.of_log2e(A[t], units)

    A, O = randn(32), nans(32, 2)
    A[:4] = [0.125, 1e30, 1e-30, 0]
    run(kernel, A, O)
    exact = A.astype(np.float64) * np.log2(np.e) * (1 + lost)
    np.testing.assert_allclose(O.astype(np.float64).sum(1), exact, rtol=2.0**-40, atol=0)
    np.testing.assert_array_equal(O[:, 0], A * LOG2E)


def split_tiles(
    run,
    Q,
    K,
    V,
    rows: int,
    columns: int,
    vector: int = 1,
    scale: float = 1 / float(LOG2E),
    q_tiles=None,
    lost=0.0,
    halves=2,
    of_block=1,
):
    """Images and records of Q, K, V as [Q, K, V] x [heads, tiles, ..] by the split kernel; tiles of zeros included."""
    heads = Q.shape[0] * Q.shape[1]
    tiles = [-(-X.shape[2] // rows) * -(-X.shape[3] // columns) for X in (Q, K, V)]
    tiles[0] = q_tiles or tiles[0]
    images = [np.full((heads, n * sh.image_words(rows, columns, halves)), 0xFFFFFFFF, np.uint32) for n in tiles]
    records = [nans(heads, n, sh.RECORD) for n in tiles]
    config = SplitConfig(rows, columns, vector, halves, of_block)
    arguments = (Q, K, V, *images, *records, np.float32(scale), sh.units_of(lost), 0)
    run(build_split(config), *arguments, threads=config.threads, grid=heads * sum(-(-n // of_block) for n in tiles))
    return [image.reshape(heads, n, -1) for image, n in zip(images, tiles, strict=True)], records


def factor_of(scale, lost: float = 0.0) -> np.float64:
    """Of Q's image."""
    return np.float64(np.float32(scale)) * np.log2(np.e) * (1 + lost)


def record_of(X, D: int) -> list[float]:
    """The record of a tile whose rows and columns may be fewer than an image's; UNSCALE apart."""
    magnitudes = np.abs(X)
    amax = magnitudes.max() if np.all(np.isfinite(X)) else INF
    rows = magnitudes.max(axis=1)
    rows = rows[rows > 0]
    if not len(rows):
        return [amax, INF, INF]
    near = np.sum(magnitudes >= amax * np.float32(2.0**-5), axis=1)[magnitudes.max(axis=1) > 0]
    return [amax, amax * np.float32(2.0**-5) if np.all(2 * near > D) else 0, rows.min()]


SIZES = [(16, 16, 1), (16, 40, 4), (32, 64, 4), (32, 70, 1), (32, 128, 4)]


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("rows", "columns", "vector"), SIZES)
def test_images(run, rows, columns, vector, halves):
    D, Dv = columns - columns % vector, columns - 4
    Q, K, V = (
        randn(2, 1, 3, D),
        100 * randn(2, 1, rows + 5, D, seed=1),
        np.float32(1e-30) * randn(2, 1, rows + 5, Dv, seed=2),
    )
    images, records = split_tiles(run, Q, K, V, rows, columns, vector, q_tiles=2, halves=halves)
    factors = factor_of(1 / float(LOG2E)), 1, 1
    for X, own_images, own_records, factor in zip((Q, K, V), images, records, factors, strict=True):
        for head in range(2):
            for tile in range(2):
                part = np.zeros((rows, columns), np.float32)
                there = X[head, 0, tile * rows : (tile + 1) * rows]
                part[: len(there), : X.shape[3]] = there
                amax, level, row_min = record_of(part, X.shape[3])
                record = own_records[head, tile]
                np.testing.assert_array_equal(record[: sh.UNSCALE], [amax, level, row_min])
                up = 1 / record[sh.UNSCALE]
                assert amax == 0 or 2**14 <= amax * up < 2**15
                np.testing.assert_array_equal(own_images[head, tile], image_of(part * np.float64(factor), up, halves))


@pytest.mark.parametrize("vector", [1, 4])
@pytest.mark.parametrize("of_block", [2, 5, 100])
def test_tiles_of_one_block_are_those_of_several(run, of_block, vector):
    """Row by row of tiles, which are 2, 1 and 3 wide; the last block of a head has fewer."""
    arrays = [randn(2, 2, 50, 72), randn(2, 2, 33, 64, seed=1), randn(2, 2, 33, 136, seed=2)]
    sizes = {"rows": 16, "columns": 64, "vector": vector}
    of_one, of_many = split_tiles(run, *arrays, **sizes), split_tiles(run, *arrays, **sizes, of_block=of_block)
    assert [record.shape[1] for record in of_one[1]] == [8, 3, 9]
    for expected, seen in zip(of_one, of_many, strict=True):
        for x, y in zip(expected, seen, strict=True):
            np.testing.assert_array_equal(x, y)


def padded(X) -> np.ndarray:
    """With the columns of an image: zeros, whose sign is that of the factor."""
    return np.pad(X.astype(np.float64), ((0, 0), (0, -X.shape[1] % sh.BLOCK_COLUMNS)))


def test_images_of_scaled_queries(run):
    Q, K, V = randn(1, 1, 16, 16), randn(1, 1, 16, 16, seed=1), randn(1, 1, 16, 16, seed=2)
    times = np.float32(-0.3) * LOG2E
    (q_image, k_image, _), (q_record, k_record, _) = split_tiles(run, Q, K, V, 16, 16, 4, scale=-0.3, lost=2.0**-20)
    amax, level = np.abs(Q).max() * -times, np.abs(Q).max() * np.float32(2.0**-5) * -times
    dense = np.all(np.sum(np.abs(Q[0, 0]) >= np.abs(Q).max() * np.float32(2.0**-5), axis=1) > 8)
    np.testing.assert_array_equal(q_record[0, 0, :2], [amax, level if dense else 0])
    up = 1 / q_record[0, 0, sh.UNSCALE]
    assert 2**14 <= amax * up < 2**15
    np.testing.assert_array_equal(q_image[0, 0], image_of(padded(Q[0, 0]) * factor_of(-0.3, 2.0**-20), up))
    np.testing.assert_array_equal(k_image[0, 0], image_of(K[0, 0], 1 / k_record[0, 0, sh.UNSCALE]))


def tile_with(change) -> np.ndarray:
    X = np.copysign(np.float32(1), randn(16, 16)) + np.float32(0.25) * randn(16, 16, seed=1)
    change(X)
    return X


def put(index, value):
    def change(X):
        X[index] = value

    return change


def times(index, factor):
    def change(X):
        X[index] *= np.float32(factor)

    return change


def at_the_level(X):
    X[...] = 2.0**-5
    X[5, 5] = 1


TILES = {
    "at the level": at_the_level,
    "usual": put((0, 0), 1),
    "zeros": put(slice(None), 0),
    "-0": put(slice(None), -0.0),
    "NaN": put((15, 15), NAN),
    "-NaN": put((15, 15), -NAN),
    "Inf": put((0, 15), INF),
    "-Inf": put((15, 0), -INF),
    "NaN and Inf": put((3, slice(3, 5)), [INF, NAN]),
    "zero rows": put(slice(2, 9), 0),
    "all but one row zero": put(slice(1, None), 0),
    "outlier": put((7, 7), -(2.0**20)),
    "half of a row small": times((5, slice(8)), 2.0**-10),
    "less than half of a row small": times((5, slice(7)), 2.0**-10),
    "small row": times(11, 2.0**-30),
    "small column": times((slice(None), 11), 2.0**-30),
    "one element": put((slice(None), slice(1, None)), 0),
    "denormals": times(slice(None), 2.0**-130),
    "denormal row": times(3, 2.0**-130),
    "denormal": put((slice(None), slice(None)), DENORMAL),
    "largest": put((2, 3), LARGEST),
    "large": times(slice(None), 2.0**126),
    "constant": put(slice(None), -3),
}


def test_records(run):
    X = np.stack([tile_with(change) for change in TILES.values()])[None]
    images, records = split_tiles(run, X, X, X, 16, 16)
    expected = np.array([record_of(tile, 16) for tile in X[0]], np.float32)
    for image, record, times in zip(images, records, (factor_of(1 / float(LOG2E)), 1, 1), strict=True):
        np.testing.assert_array_equal(record[:, 0, : sh.UNSCALE], expected)
        up = 1 / record[:, 0, sh.UNSCALE]
        for name, tile, words, factor in zip(TILES, X[0], image[:, 0], up, strict=True):
            if np.all(np.isfinite(tile)):
                np.testing.assert_array_equal(words, image_of(tile * np.float64(times), factor), err_msg=name)


@pytest.mark.parametrize("scale", [0, -0.0, 1e-45, 1e30, 3e38, -1e38, INF, -INF, NAN])
def test_records_at_odd_scales(run, scale):
    Q = tile_with(TILES["usual"])[None, None]
    (image, *_), (record, *_) = split_tiles(run, Q, Q, Q, 16, 16, scale=scale)
    with np.errstate(all="ignore"):
        factor = np.float32(scale) * LOG2E
        amax = np.abs(Q).max() * abs(factor)
        up = 1 / record[0, 0, sh.UNSCALE]
        has_scale = amax < INF and abs(factor) * up < INF
    assert record[0, 0, sh.AMAX] == (amax if has_scale else INF)
    if has_scale:
        times = factor_of(scale) if abs(factor) > 1e-38 else factor  # a denormal one has no more digits
        np.testing.assert_array_equal(image[0, 0], image_of(padded(Q[0, 0]) * times, up))
    else:
        assert not abs(scale) <= 1e30


@pytest.mark.parametrize(("factor", "scale"), [(2.0**-120, 1e30), (INF, 0)])
def test_queries_without_a_scale_count_as_infinite(run, factor, scale):
    # 1e30 times the power of two that suits 2^-120 is infinite; Inf times 0 is NaN.
    Q = (factor * tile_with(TILES["usual"]))[None, None].astype(np.float32)
    _, (record, *_) = split_tiles(run, Q, Q, Q, 16, 16, scale=scale)
    assert record[0, 0, sh.AMAX] == INF


@pytest.mark.parametrize(("rows", "columns", "warps"), [(16, 16, 2), (32, 64, 2), (16, 128, 4)])
def test_round_trip(run, rows, columns, warps):
    """What the split kernel writes, copied to shared memory and read as fragments, is the matrix."""
    X = randn(1, 1, 2 * rows, columns)
    (_, images, _), (_, records, _) = split_tiles(run, X, X, X, rows, columns)
    m_tiles, steps, threads = rows // 16, columns // 16, 32 * warps
    copy, words = sh.copy_image(sh.image_bytes(rows, columns), threads), sh.image_words(rows, columns)
    shape = (m_tiles, steps, 2, 4)

    @unrolled
    def load(e, x, address):
        for i in range(m_tiles):
            for step in range(steps):
                block, chunk = divmod(2 * step, 8)
                at = (address ^ (chunk * 16)) + (block * rows + 16 * i) * sh.ROW_BYTES
                for plane in range(2):
                    for r, register in enumerate(e.ldmatrix(at + plane * sh.plane_bytes(rows, columns))):
                        x[i, step, plane, r] = register

    @cuda.jit
    def kernel(image, O):
        tid = cuda.threadIdx.x
        lane = tid & 31
        smem = shared_memory()
        copy(smem, image, words, tid)  # the second tile
        cp_async_commit()
        wait_all()
        cuda.syncthreads()
        x = cuda.local.array(shape, int32)
        load(x, smem + lane_of_rows(lane))
        for i in range(m_tiles):
            for step in range(steps):
                for plane in range(2):
                    for r in range(4):
                        O[tid, i, step, plane, r] = x[i, step, plane, r]

    O = np.zeros((threads, *shape), np.int32)
    run(kernel, images[0].reshape(-1), O, threads=threads, smem_bytes=sh.image_bytes(rows, columns))
    part, up = X[0, 0, rows:].astype(np.float64), 1 / records[0, 1, sh.UNSCALE]
    for warp in range(warps):
        registers = O[32 * warp : 32 * warp + 32].view(np.uint32)
        for i in range(m_tiles):
            for step in range(steps):
                hi, lo = (fragments.gather_a(registers[:, i, step, plane]).astype(np.float64) for plane in range(2))
                exact = part[16 * i : 16 * i + 16, 16 * step : 16 * step + 16] * up
                assert np.all(np.abs(hi + lo - exact) <= np.maximum(2.0**-23 * np.abs(exact), 2.0**-25))


def test_eight_rows_of_a_chunk_are_in_different_banks():
    word = sh.image_word(16)

    @cuda.jit
    def kernel(O):
        t = cuda.threadIdx.x
        for row in range(16):
            O[row, t] = word(row, t)

    O = np.zeros((16, 32), np.int32)
    simulate(kernel, O)
    assert len(set(O.ravel())) == O.size and sorted(O.ravel()) == list(range(0, 4 * O.size, 4))
    for first in (0, 8):
        assert np.all(np.sort(O[first : first + 8] % 32 // 4, axis=0) == np.arange(8)[:, None])


def test_copy_image_that_does_not_come_out_even():
    with pytest.raises(ValueError, match="96 threads do not share 4096 bytes evenly, 16 bytes each"):
        sh.copy_image(4096, 96)


@pytest.mark.parametrize(("columns", "wide"), [(1, 64), (64, 64), (65, 128), (256, 256)])
def test_sizes(columns, wide):
    assert sh.padded(columns) == wide
    assert sh.image_bytes(16, columns) == 2 * sh.plane_bytes(16, columns) == 4 * 16 * wide
    assert sh.image_bytes(16, columns, halves=1) == sh.plane_bytes(16, columns)
    assert sh.image_words(16, columns) == 2 * sh.image_words(16, columns, 1) == 16 * wide
    assert SplitConfig(16, columns, 1).threads == wide // 2
