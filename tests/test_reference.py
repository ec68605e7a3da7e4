"""Contract: `reference` is attention by its definition, on closed forms that need no other implementation."""

import numpy as np
import pytest

from numba_attn import reference

EVALUATIONS = {"fp64": (reference.attention, 1e-14), "fp32": (reference.attention_fp32, 2e-6)}
EVALUATIONS["tf32"] = (reference.attention_tf32, 4e-3)


def rounded(attend, x):
    """Values as products take them."""
    return reference._tf32(x) if attend is reference.attention_tf32 else x


@pytest.fixture(params=EVALUATIONS)
def evaluation(request):
    return EVALUATIONS[request.param]


def _inputs(rng, Lq=5, Lk=7, D=4, Dv=3, heads=(2, 3)):
    return tuple(rng.standard_normal((*heads, *shape)) for shape in ((Lq, D), (Lk, D), (Lk, Dv)))


def _pair_by_pair(q, k, v, keep, bias, scale):
    """One head by scalar arithmetic, keys that do not count left out."""
    o, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for row in range(len(q)):
        keys = np.flatnonzero(keep[row])
        if len(keys):
            weights = np.exp([scale * sum(q[row] * k[key]) + bias[row, key] for key in keys])
            o[row], lse[row] = weights @ v[keys] / weights.sum(), np.log(weights.sum())
    return o, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_is_the_definition(evaluation, rng, causal, mask):
    attend, tolerance = evaluation
    q, k, v = _inputs(rng)
    keep = np.ones((2, 3, 5, 7), bool) if mask != "bool" else rng.random((2, 3, 5, 7)) < 0.6
    bias = rng.standard_normal((2, 3, 5, 7)) if mask == "float" else np.zeros((2, 3, 5, 7))
    o, lse = attend(q, k, v, causal=causal, scale=0.3, mask={None: None, "bool": keep, "float": bias}[mask])
    keep = keep & np.tri(5, 7, dtype=bool) if causal else keep
    for head in np.ndindex(2, 3):
        expected = _pair_by_pair(q[head], k[head], v[head], keep[head], bias[head], 0.3)
        np.testing.assert_allclose(o[head], expected[0], rtol=0, atol=tolerance)
        np.testing.assert_allclose(lse[head], expected[1], rtol=0, atol=tolerance)


def test_one_key_gives_its_value(evaluation, rng):
    attend, tolerance = evaluation
    q, k, v = _inputs(rng, Lk=1)
    o, lse = attend(q, k, v)
    np.testing.assert_array_equal(o, rounded(attend, np.broadcast_to(v, o.shape).astype(o.dtype)))
    np.testing.assert_allclose(lse, (q * k).sum(-1) / 2, rtol=0, atol=tolerance)


def test_equal_keys_average_the_values(evaluation, rng):
    attend, tolerance = evaluation
    q, k, v = _inputs(rng)
    o, lse = attend(q, np.broadcast_to(k[..., :1, :], k.shape), v)
    np.testing.assert_allclose(o, np.broadcast_to(v.mean(-2, keepdims=True), o.shape), rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, (q * k[..., :1, :]).sum(-1) / 2 + np.log(7), rtol=0, atol=tolerance)


def test_one_hot(evaluation, rng):
    attend, tolerance = evaluation
    q, k, v = 5e8 * np.eye(6), 5e8 * np.eye(6)[::-1], rng.standard_normal((6, 3))
    o, lse = attend(q, k, v)
    np.testing.assert_array_equal(o, rounded(attend, v[::-1].astype(o.dtype)))
    np.testing.assert_allclose(lse, 25e16 / np.sqrt(6), rtol=max(tolerance, 1e-6))


def test_a_shift_of_all_scores_moves_lse_alone(rng):
    q, k, v = _inputs(rng)
    o, lse = reference.attention(q, k, v)
    shifted, shifted_lse = reference.attention(q, k, v, mask=np.float64(300))
    np.testing.assert_allclose(shifted, o, rtol=0, atol=1e-12)
    np.testing.assert_allclose(shifted_lse, lse + 300, rtol=1e-14)


def test_rows_without_a_key(evaluation, rng):
    attend, _ = evaluation
    q, k, v = _inputs(rng)
    keep = np.ones((5, 7), bool)
    keep[1] = False
    for mask in (keep, np.where(keep, 0.0, -np.inf)):
        o, lse = attend(q, k, v, mask=mask)
        assert (o[..., 1, :] == 0).all()
        assert np.isneginf(lse[..., 1]).all()
        np.testing.assert_array_equal(o[..., [0, 2], :], attend(q[..., [0, 2], :], k, v)[0])


def test_a_mask_of_the_lowest_number_still_averages(evaluation, rng):
    attend, tolerance = evaluation
    q, k, v = _inputs(rng, D=1)
    o, _ = attend(q, k, v, mask=np.full(7, np.finfo(np.float32).min, np.float32), scale=0.0)
    np.testing.assert_allclose(o, np.broadcast_to(v.mean(-2, keepdims=True), o.shape), rtol=0, atol=tolerance)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_removed_key_contributes_nothing(evaluation, rng, value):
    attend, _ = evaluation
    q, k, v = _inputs(rng, Lq=7)
    clean = attend(q, k, v, causal=True)
    k[..., 4:, :], v[..., 4:, :] = value, value
    o, lse = attend(q, k, v, causal=True)
    np.testing.assert_array_equal(o[..., :4, :], clean[0][..., :4, :])
    np.testing.assert_array_equal(lse[..., :4], clean[1][..., :4])
    assert not np.isfinite(o[..., 4:, :]).any()


def test_nan_reaches_the_rows_that_attend_it(evaluation, rng):
    attend, _ = evaluation
    q, k, v = _inputs(rng, Lq=7)
    q[0, 0, 1, 0] = np.nan
    k[1, 0, 2, 0] = np.nan
    v[1, 1, 2, 1] = np.inf
    o, _ = attend(q, k, v, causal=True)
    expected = np.zeros(o.shape, bool)
    expected[0, 0, 1] = expected[1, 0, 2:] = expected[1, 1, 2:, 1] = True
    np.testing.assert_array_equal(~np.isfinite(o), expected)
    assert np.isposinf(o[1, 1, 2:, 1]).all()
    assert np.isnan(o[1, 0, 2:]).all()


@pytest.mark.parametrize("axis", ["B", "H", "Lq", "Lk", "D", "Dv"])
def test_empty_axes(evaluation, axis):
    attend, _ = evaluation
    size = {"B": 2, "H": 3, "Lq": 4, "Lk": 5, "D": 8, "Dv": 8, axis: 0}
    B, H, Lq, Lk, D, Dv = size.values()
    o, lse = attend(np.ones((B, H, Lq, D)), np.ones((B, H, Lk, D)), np.full((B, H, Lk, Dv), 2.0))
    assert o.shape == (B, H, Lq, Dv)
    assert lse.shape == (B, H, Lq)
    assert (o == (0 if axis == "Lk" else 2)).all()
    assert axis != "Lk" or np.isneginf(lse).all()


def test_grouped_heads(evaluation, rng):
    attend, _ = evaluation
    q, k, v = rng.standard_normal((2, 6, 5, 4)), rng.standard_normal((2, 2, 7, 4)), rng.standard_normal((2, 2, 7, 3))
    grouped = attend(q, k, v, enable_gqa=True)
    repeated = attend(q, k.repeat(3, axis=1), v.repeat(3, axis=1))
    for x, y in zip(grouped, repeated, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("heads", [(), (3,), (2, 3), (2, 2, 3)])
def test_ranks(evaluation, rng, heads):
    attend, _ = evaluation
    q, k, v = _inputs(rng, heads=heads)
    mask = rng.random((*heads, 5, 7)) < 0.5
    o, lse = attend(q, k, v, mask=mask)
    assert o.shape == (*heads, 5, 3)
    for head in np.ndindex(heads):
        one, one_lse = attend(q[head], k[head], v[head], mask=mask[head])
        np.testing.assert_allclose(o[head], one, rtol=1e-12)
        np.testing.assert_allclose(lse[head], one_lse, rtol=1e-12)


def test_batches_broadcast(evaluation, rng):
    attend, _ = evaluation
    q, k, v = rng.standard_normal((2, 3, 5, 4)), rng.standard_normal((1, 3, 7, 4)), rng.standard_normal((3, 7, 2))
    o, _ = attend(q, k, v)
    np.testing.assert_array_equal(o, attend(q, k.repeat(2, axis=0), np.stack([v, v]))[0])


def test_blocks_of_rows_and_heads_change_nothing(evaluation, rng, monkeypatch):
    attend, tolerance = evaluation
    q, k, v = _inputs(rng, Lq=23, heads=(3, 4))
    mask = rng.random((4, 23, 7)) < 0.7
    whole = attend(q, k, v, mask=mask, causal=True)
    for temporary in (1, 50, 7 * 23 * 5):
        monkeypatch.setattr(reference, "TEMPORARY", temporary)
        for x, y in zip(attend(q, k, v, mask=mask, causal=True), whole, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def test_strides_change_nothing(evaluation, rng):
    attend, _ = evaluation
    q, k, v = _inputs(rng)
    strided = (np.asfortranarray(q), np.stack([k, k], -1)[..., 0], np.broadcast_to(v[:1], v.shape))
    contiguous = (np.ascontiguousarray(x) for x in strided)
    np.testing.assert_array_equal(attend(*strided)[0], attend(*contiguous)[0])


def test_fp32_sums_in_index_order():
    big = np.array([[1e8, 1.0, -1e8]], np.float32)
    ones = np.ones((1, 3), np.float32)
    assert reference.attention_fp32(big, ones, ones, scale=1)[1] == 0  # 1e8 swallows the 1
    assert reference.attention(big, ones, ones, scale=1)[1] == 1
    values = np.array([[1e8], [1.0], [-1e8]], np.float32)
    assert reference.attention_fp32(np.zeros((1, 1)), np.zeros((3, 1)), values)[0] == 0


def test_tf32_rounds_factors_to_eleven_bits():
    exact = [1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-20, 2.0**-20 - 2, 1e-45]
    rounded = [1 + 2.0**-10, 1, 1 + 2.0**-9, 1 + 2.0**-10, -2, 0]
    ones = np.ones((1, 1), np.float32)
    for value, expected in zip(np.float32(exact), rounded, strict=True):
        assert reference.attention_tf32(ones, ones, value * ones)[0] == expected
        assert reference.attention_tf32(value * ones, ones, ones, scale=1)[1] == expected
        assert reference.attention_tf32(ones, value * ones, ones, scale=1)[1] == expected
    largest = np.finfo(np.float32).max * ones
    assert np.isposinf(reference.attention_tf32(ones, ones, largest)[0])
    for value in (np.nan, np.inf, -np.inf):
        np.testing.assert_array_equal(reference.attention_tf32(ones, ones, np.float32(value) * ones)[0], value)


def test_tf32_rounds_p_in_products_only():
    # Two keys, p = 1 and exp(-1): their sum is not rounded, the product with V is.
    q, k, v = np.ones((1, 1), np.float32), np.float32([[1], [0]]), np.float32([[0], [1]])
    o, lse = reference.attention_tf32(q, k, v, scale=1)
    p = np.float32(np.exp(-1))
    l = np.float32(1) + p
    assert o[0, 0] == reference._tf32(p) / l and reference._tf32(p) != p
    assert abs(lse[0] - (1 + np.log(np.float64(l)))) <= 2.0**-23


def test_fp32_keeps_denormals():
    v = np.full((3, 2), 1e-40, np.float32)
    o, _ = reference.attention_fp32(np.zeros((1, 1)), np.zeros((3, 1)), v)
    np.testing.assert_allclose(o, 1e-40, rtol=1e-4)
    q, k = np.array([[2e-39]], np.float32), np.array([[1e38], [0.0]], np.float32)
    assert abs(reference.attention_fp32(q, k, np.ones((2, 1)))[1] - np.log(np.exp(0.2) + 1)) < 1e-5


@pytest.mark.parametrize(
    ("shapes", "kwargs", "message"),
    [
        (((4,), (7, 4), (7, 3)), {}, "q needs 2 dimensions"),
        (((5, 4), (7, 5), (7, 3)), {}, "same head dim: 4, 5"),
        (((5, 4), (7, 4), (6, 3)), {}, "same length: 7, 6"),
        (((6, 5, 4), (2, 7, 4), (2, 7, 3)), {}, "heads"),
        (((6, 5, 4), (4, 7, 4), (4, 7, 3)), {"enable_gqa": True}, "heads"),
        (((6, 5, 4), (6, 7, 4), (2, 7, 3)), {}, "k and v need the same number of heads: 6, 2"),
        (((2, 1, 5, 4), (3, 1, 7, 4), (3, 1, 7, 3)), {}, "batch shapes"),
        (((5, 4), (7, 4), (7, 3)), {"mask": np.ones((6,), bool)}, "broadcast"),
    ],
)
def test_shapes_that_do_not_fit(evaluation, shapes, kwargs, message):
    with pytest.raises(ValueError, match=message):
        evaluation[0](*map(np.ones, shapes), **kwargs)


def test_integer_masks_are_refused(evaluation):
    with pytest.raises(TypeError, match="bool or floating, not int64"):
        evaluation[0](np.ones((5, 4)), np.ones((7, 4)), np.ones((7, 3)), mask=np.ones(7, np.int64))


@pytest.mark.parametrize("evaluate", [reference.attention_fp32, reference.attention_tf32])
def test_a_mask_beyond_fp32_removes_the_key(evaluate):
    """Rows were NaN: the key was kept, with a score of -inf."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 3, 4)).astype(np.float32) for _ in range(3))
    o, lse = evaluate(q, k, v, mask=np.full((3, 3), -1e300))
    assert (o == 0).all() and (lse == -np.inf).all()
    mask = np.zeros((3, 3))
    mask[:, 1] = -1e300
    for got, expected in zip(evaluate(q, k, v, mask=mask), evaluate(q, k, v, mask=mask == 0), strict=True):
        np.testing.assert_array_equal(got, expected)
