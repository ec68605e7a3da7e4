"""Contract: what `testing` ships accepts a good result, and each kind of wrong one is refused with its place."""

import numpy as np
import pytest

from numba_attn import reference, testing
from numba_attn.testing import Case, Expected, assert_accurate


@pytest.fixture
def call():
    q, k, v = testing.make_inputs(Case(2, 2, 20, 33, 8, 6, is_causal=True))
    return q, k, v, *reference.attention_fp32(q, k, v, causal=True)


def test_the_references_are_accurate(call):
    q, k, v, o, lse = call
    assert_accurate(o, lse, q, k, v, causal=True)
    assert_accurate(o, None, q, k, v, causal=True)
    assert_accurate(*reference.attention(q, k, v, causal=True), q, k, v, causal=True)
    assert_accurate(o[0, 0], lse[0, 0], q[0, 0], k[0, 0], v[0, 0], causal=True)


def _one_element(o, lse):
    o[1, 0, 7, 3] += 1e-4


def _one_small_row(o, lse):
    o[1, 0, 7] *= 1 + 1e-5


def _one_head(o, lse):
    o[1, 0] *= 1 + 4e-7


def _lse(o, lse):
    lse[1, 0, 7] += 1e-5


def _base_two(o, lse):
    lse[1, 0] *= np.float32(1.4427)


def _nan(o, lse):
    o[1, 0, 7, 3] = np.nan


def _inf(o, lse):
    lse[1, 0, 7] = -np.inf


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (_one_element, r"o\[1, 0, 7, 3\]"),
        (_one_small_row, r"o\[1, 0, 7, \d\].*head \(1, 0\)"),
        (_one_head, r"o\[1, 0, .*head of head \(1, 0\): error"),
        (_lse, r"lse\[1, 0, 7\].*budget"),
        (_base_two, r"lse\[1, 0, \d+\]"),
        (_nan, r"o\[1, 0, 7, 3\] = nan, float64 gives -?\d"),
        (_inf, r"lse\[1, 0, 7\] = -inf"),
    ],
)
def test_damage_is_found_where_it_is(call, damage, place):
    q, k, v, o, lse = call
    damage(o, lse)
    with pytest.raises(AssertionError, match=place):
        assert_accurate(o, lse, q, k, v, causal=True)


def test_a_small_row_is_judged_on_its_own_scale():
    q, k, v = testing.make_inputs(Case(1, 1, 200, 200, 4, 4))
    q, k = 1e4 * np.eye(200, dtype=np.float32)[None, None], np.eye(200, dtype=np.float32)[None, None]
    v = np.where(np.arange(200)[:, None] == 5, np.float32(1e-6), 1e6) * v
    o, lse = reference.attention_fp32(q, k, v)
    assert_accurate(o, lse, q, k, v)
    o[0, 0, 5] *= 1 + 1e-5
    with pytest.raises(AssertionError, match=r"o\[0, 0, 5, \d\].*worst row"):
        assert_accurate(o, lse, q, k, v)


def test_nothing_is_judged_where_fp32_fails():
    q, k, v = testing.make_inputs(Case(1, 1, 3, 5, 4, 4))
    q[0, 0, 1] *= np.float32(1e30)
    k[0, 0, 2] = 1e30
    o, lse = reference.attention_fp32(q, k, v)
    assert not np.isfinite(o[0, 0, 1]).any()
    assert np.isfinite(reference.attention(q, k, v)[0]).all()
    o[0, 0, 1], lse[0, 0, 1] = 7, 7
    assert_accurate(o, lse, q, k, v)


def test_a_row_without_keys_is_exactly_zero():
    q, k, v = testing.make_inputs(Case(1, 1, 3, 5, 4, 4))
    mask = np.array([[True], [False], [True]])
    o, lse = reference.attention_fp32(q, k, v, mask=mask)
    assert_accurate(o, lse, q, k, v, mask=mask)
    o[0, 0, 1, 2] = 1e-45
    with pytest.raises(AssertionError, match=r"o\[0, 0, 1, 2\].*no key left"):
        assert_accurate(o, lse, q, k, v, mask=mask)
    with pytest.raises(AssertionError, match=r"lse\[0, 0, 1\]"):
        assert_accurate(np.where(o == o[0, 0, 1, 2], 0, o), np.nan_to_num(lse), q, k, v, mask=mask)


def test_shapes_and_classes(call):
    q, k, v, o, lse = call
    with pytest.raises(AssertionError, match=r"o has shape \(2, 2, 20, 5\), expected \(2, 2, 20, 6\)"):
        assert_accurate(o[..., :5], lse, q, k, v, causal=True)
    with pytest.raises(AssertionError, match="lse has shape"):
        assert_accurate(o, lse[..., None], q, k, v, causal=True)
    with pytest.raises(ValueError, match="unknown accuracy class 'fp8', known: fp32, tf32"):
        assert_accurate(o, lse, q, k, v, causal=True, accuracy="fp8")


@pytest.mark.parametrize("axis", range(6))
def test_empty_results(axis):
    sizes = [2, 3, 4, 5, 8, 8]
    sizes[axis] = 0
    B, H, Lq, Lk, D, Dv = sizes
    q, k, v = np.ones((B, H, Lq, D)), np.ones((B, H, Lk, D)), np.ones((B, H, Lk, Dv))
    assert_accurate(*reference.attention_fp32(q, k, v), q, k, v)


@pytest.mark.parametrize("inputs", testing.DISTRIBUTIONS)
@pytest.mark.parametrize("size", [(1, 1, 8, 8), (1, 2, 1, 1), (2, 3, 2, 2), (5, 17, 3, 4), (33, 65, 16, 16)])
def test_another_order_of_the_sums_is_accurate(inputs, size):
    q, k, v = testing.make_inputs(Case(20, 5, *size, inputs=inputs))
    assert_accurate(*reference.attention_fp32(q[..., ::-1], k[..., ::-1], v), q, k, v)
    assert_accurate(*reference.attention_fp32(q, k[..., ::-1, :], v[..., ::-1, :]), q, k, v)


@pytest.mark.parametrize("inputs", ["uniform", "normal", "peaked", "cancelling", "wide", "denormal"])
def test_half_precision_is_not(inputs):
    q, k, v = testing.make_inputs(Case(2, 2, 33, 40, 16, 16, inputs=inputs))
    kept = [(x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (q, k, v)]  # ten bits of mantissa, as TF32
    with pytest.raises(AssertionError):
        assert_accurate(*reference.attention(*kept), q, k, v)


@pytest.mark.parametrize("inputs", testing.DISTRIBUTIONS)
def test_class_tf32(inputs):
    """TF32's products in another order are of the class, and so is fp32; eight bits are not, nor is one element off."""
    q, k, v = testing.make_inputs(Case(2, 2, 33, 40, 16, 16, inputs=inputs))
    expected = Expected(q, k, v)
    o, lse = reference.attention_tf32(q[..., ::-1], k[..., ::-1, ::-1], v[..., ::-1, :])
    expected.check(o, lse, accuracy="tf32")
    expected.check(*reference.attention_fp32(q, k, v), accuracy="tf32")
    o[1, 0, 7, 3] += 0.02 * np.abs(v[1, 0]).max()
    with pytest.raises(AssertionError, match=r"o\[1, 0, 7, 3\].*of the textbook evaluation"):
        expected.check(o, lse, accuracy="tf32")
    if inputs not in ("constant", "denormal", "large"):  # averages that are exact, scores that decide everything
        kept = [(x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in (q, k, v)]
        with pytest.raises(AssertionError):
            expected.check(*reference.attention(*kept), accuracy="tf32")


@pytest.mark.parametrize("flushed", [0, 2])
def test_flushed_denormals_are_not_accurate(flushed):
    inputs = testing.make_inputs(Case(1, 2, 33, 40, 16, 16, inputs="denormal"))
    q, k, v = (np.where(abs(x) < 1.2e-38, 0, x) if i == flushed else x for i, x in enumerate(inputs))
    with pytest.raises(AssertionError):
        assert_accurate(*reference.attention_fp32(q, k, v), *inputs)


@pytest.mark.parametrize("name", testing.DISTRIBUTIONS)
def test_distributions(name):
    shapes = (2, 3, 50, 16), (2, 3, 60, 16), (2, 3, 60, 8)
    q, k, v = testing.distribution(name, *shapes, seed=1)
    for x, shape in zip((q, k, v), shapes, strict=True):
        assert x.shape == shape
        assert x.dtype == np.float32
        assert np.isfinite(x).all()
    np.testing.assert_array_equal(q, testing.distribution(name, *shapes, seed=1)[0])
    assert (q != testing.distribution(name, *shapes, seed=2)[0]).any()
    o, lse = reference.attention_fp32(q, k, v)
    assert np.isfinite(o).all()
    assert np.isfinite(lse).all()
    largest = np.abs(np.einsum("bhid,bhjd->bhij", q.astype(float), k) / 4).max()
    low, high = {"peaked": (20, 60), "denormal": (0.3, 3), "large": (1e17, 1e19)}.get(name, (0, 12))
    assert low <= largest <= high


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("slot", range(3))
def test_layouts(layout, slot):
    values = np.broadcast_to(np.arange(20.0, dtype=np.float32).reshape(4, 5), (2, 3, 4, 5))
    placed = testing.place(values, layout, slot)
    np.testing.assert_array_equal(placed.view, values)
    assert np.shares_memory(placed.view, placed.buffer)
    assert placed.view.strides == tuple(4 * stride for stride in placed.strides)
    used = np.unique(np.lib.stride_tricks.as_strided(
        np.arange(placed.buffer.size)[placed.offset :], placed.shape, [8 * stride for stride in placed.strides]
    ))  # fmt: skip
    assert np.isnan(np.delete(placed.buffer, used)).all()


def test_layouts_differ():
    shape = (2, 3, 4, 5)
    seen = {layout: function(shape, 1) for layout, function in testing.LAYOUTS.items()}
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("layout", [None, *testing.LAYOUTS])
def test_guarded_outputs(layout):
    output = testing.guarded((2, 3, 4, 5), layout=layout)
    assert np.isnan(output.view).all()
    output.view[...] = 1
    output.check()
    copy = output.buffer.copy()
    for stray in (output.offset - 1, output.offset + output.buffer.size - 2 * 256, 0, -1):
        copy[:] = output.buffer
        copy[stray] = np.nan
        with pytest.raises(AssertionError, match="outside the output"):
            output.check(copy)


def test_guarded_gaps_count():
    output = testing.guarded((1, 1, 2, 4), layout="every_other")
    output.buffer[output.offset + 1] = 0
    with pytest.raises(AssertionError, match="1 elements outside the output were written, the first at 1 elements"):
        output.check()


@pytest.mark.parametrize("matrix", [testing.small_cases, testing.cases])
def test_matrix(matrix):
    chosen = matrix()
    assert len({str(case) for case in chosen}) == len(chosen)
    assert {case.inputs for case in chosen} == set(testing.DISTRIBUTIONS)
    assert {case.layout for case in chosen} == set(testing.LAYOUTS)
    assert {case.poison for case in chosen} == {None, *testing.POISONS}
    for case in chosen:
        first, second = testing.make_inputs(case), testing.make_inputs(case)
        for x, y in zip(first, second, strict=True):
            np.testing.assert_array_equal(x, y)


def test_small_cases_are_small():
    for case in testing.small_cases():
        assert max(case.Lq, case.Lk) < 64
        assert max(case.D, case.Dv) <= 40


@pytest.mark.parametrize("poison", testing.POISONS)
def test_poisons_spare_the_rows_before(poison):
    case = Case(1, 2, 5, 37, 9, 10, is_causal=True, poison=poison)
    expected = Expected(*testing.make_inputs(case), **case.kwargs)
    spoilt = ~np.isfinite(expected.o).all(axis=(0, 1, 3))
    first = {"q_nan": 1, "k_nan": 2, "v_inf": 2}.get(poison, 5)
    assert not spoilt[:first].any()
    assert spoilt[first:].any() == (first < 5)


def test_facts_of_layouts():
    case = Case(1, 2, 5, 9, 8, 8)
    widths = {layout: Case(1, 2, 5, 9, 8, 8, layout=layout).problem.vector for layout in testing.LAYOUTS}
    assert case.problem.vector == 4
    assert widths == {
        "contiguous": 4,
        "transposed": 4,
        "packed": 4,
        "every_other": 1,
        "storage_transposed": 1,
        "misaligned": 1,
        "padded": 1,
        "expanded": 4,
    }
