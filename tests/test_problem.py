"""Contract under test: what three operands amount to, and one line that names the operand where they do not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from numba_attn import choice
from numba_attn.kernel import Kernel
from numba_attn.kernels import KERNELS
from numba_attn.problem import (
    H200,
    MAX_LENGTH,
    PRECISIONS,
    Operand,
    Problem,
    View,
    check_out,
    contiguous_strides,
    describe,
    strides_in_elements,
    vector_width,
)


def operand(name: str, *shape: int, strides=None, dtype="float32", device=0, pointer=256) -> Operand:
    return Operand(name, shape, contiguous_strides(shape) if strides is None else strides, dtype, device, pointer)


def operands(q=(2, 3, 5, 8), k=(2, 3, 7, 8), v=(2, 3, 7, 4)) -> list[Operand]:
    return [operand("query", *q), operand("key", *k), operand("value", *v)]


def test_facts_of_a_plain_call():
    geometry = describe(*operands(), is_causal=True)
    assert geometry.problem == Problem(2, 3, 3, 5, 7, 8, 4, is_causal=True, vector=4)
    assert geometry.Q == View((2, 3, 5, 8), (120, 40, 8, 1))
    assert geometry.o_shape == (2, 3, 5, 4) and geometry.lse_shape == (2, 3, 5)
    assert geometry.scale == pytest.approx(8**-0.5) and geometry.device == 0


@pytest.mark.parametrize(
    ("q", "k", "v", "o_shape", "facts"),
    [
        ((5, 8), (7, 8), (7, 4), (5, 4), (1, 1)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 4), (3, 5, 4), (1, 3)),
        ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 4), (2, 2, 3, 5, 4), (4, 3)),
        ((2, 3, 5, 8), (1, 3, 7, 8), (3, 7, 4), (2, 3, 5, 4), (2, 3)),
        ((1, 3, 5, 8), (2, 3, 7, 8), (1, 3, 7, 4), (2, 3, 5, 4), (2, 3)),
        ((4, 1, 5, 8), (7, 8), (7, 4), (4, 1, 5, 4), (4, 1)),
        ((6, 2, 3, 5, 8), (1, 1, 3, 7, 8), (3, 7, 4), (6, 2, 3, 5, 4), (12, 3)),
    ],
)
def test_ranks_and_batches_broadcast_as_in_torch(q, k, v, o_shape, facts):
    geometry = describe(*operands(q, k, v))
    assert geometry.o_shape == o_shape
    assert (geometry.problem.B, geometry.problem.H) == facts


shapes = st.lists(st.integers(1, 3), min_size=0, max_size=3)


@given(shapes, st.randoms(use_true_random=False))
def test_views_are_numpys_broadcast(batch, random):
    def part():
        own = [size if random.random() < 0.7 else 1 for size in batch]
        return tuple(own[random.randint(0, len(own)) :])

    arrays = [np.random.default_rng(i).random((*part(), 2, 3, 4)) for i in range(3)]
    q, k, v = (operand(n, *a.shape) for n, a in zip("qkv", arrays, strict=True))
    full = np.broadcast_shapes(*(a.shape[:-3] for a in arrays))
    try:
        geometry = describe(q, k, v)
    except ValueError as error:
        assert "several batch dimensions" in str(error) and len(full) > 1
        return
    for array, view in zip(arrays, (geometry.Q, geometry.K, geometry.V), strict=True):
        seen = as_strided(array, view.shape, tuple(8 * stride for stride in view.strides))
        expected = np.broadcast_to(array, (*full, 2, 3, 4)).reshape(-1, 2, 3, 4)
        np.testing.assert_array_equal(seen, expected)


def changed(index: int, **facts) -> list[Operand]:
    triple = operands()
    triple[index] = operand(triple[index].name, *facts.pop("shape", triple[index].shape), **facts)
    return triple


NAMES = ("query", "key", "value")
REFUSED = [
    *[(ValueError, name, changed(i, shape=(8,)), "dimensions") for i, name in enumerate(NAMES)],
    *[(ValueError, name, changed(i, device=1), "device") for i, name in ((1, "key"), (2, "value"))],
    *[(ValueError, name, changed(i, pointer=6), "address") for i, name in enumerate(NAMES)],
    *[
        (TypeError, name, changed(i, dtype=t), t)
        for i, name in enumerate(NAMES)
        for t in ("int32", "bool", "complex64")
    ],
    *[
        (NotImplementedError, name, changed(i, dtype=t), "float32")
        for i, name in enumerate(NAMES)
        for t in ("float16", "bfloat16", "float64")
    ],
    (ValueError, "key", changed(1, shape=(2, 3, 7, 9)), "head dim"),
    (ValueError, "value", changed(2, shape=(2, 3, 6, 4)), "length"),
    (ValueError, "value", changed(2, shape=(2, 4, 7, 4)), "heads"),
    (ValueError, "key", operands(k=(4, 3, 7, 8), v=(4, 3, 7, 4)), "batch"),
    (ValueError, "value", changed(2, shape=(3, 3, 7, 4)), "batch"),
    (ValueError, "query", changed(0, shape=(2, 3, MAX_LENGTH + 1, 8), strides=(0, 0, 0, 1)), str(MAX_LENGTH)),
    (ValueError, "key", operands((2, 2, 3, 5, 8), (2, 1, 3, 7, 8), (2, 2, 3, 7, 4)), "one"),
    *[
        (ValueError, "key", operands((1, H, 5, 8), (1, G, 7, 8), (1, G, 7, 4)), "gqa")
        for H, G in ((6, 4), (2, 4), (8, 1))
    ],
]


@pytest.mark.parametrize(("error", "name", "triple", "word"), REFUSED)
def test_refusals_name_the_operand_in_one_line(error, name, triple, word):
    with pytest.raises(error, match=rf"^{name} .*{word}") as caught:
        describe(*triple)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("H", "Hkv", "error"),
    [
        (6, 4, ValueError),
        (2, 4, ValueError),
        (2, 0, ValueError),
        (6, 2, NotImplementedError),
        (8, 1, NotImplementedError),
    ],
)
def test_grouped_heads_when_asked_for(H, Hkv, error):
    with pytest.raises(error, match="^key has .* heads"):
        describe(*operands((1, H, 5, 8), (1, Hkv, 7, 8), (1, Hkv, 7, 4)), enable_gqa=True)


@pytest.mark.parametrize("axis", range(6), ids="B H Lq Lk D Dv".split())
def test_empty_operands_keep_their_shape(axis):
    sizes = [2, 3, 4, 5, 8, 8]
    sizes[axis] = 0
    B, H, Lq, Lk, D, Dv = sizes
    geometry = describe(*operands((B, H, Lq, D), (B, H, Lk, D), (B, H, Lk, Dv)))
    assert geometry.o_shape == (B, H, Lq, Dv)
    assert geometry.nothing_to_launch(return_lse=False) == (axis != 4)
    assert geometry.nothing_to_launch(return_lse=True) == (axis not in (4, 5))
    assert geometry.problem.D >= 1 and geometry.problem.Dv >= 1
    assert geometry.stand_ins == {4: ("Q", "K"), 5: ("V",)}.get(axis, ())


@pytest.mark.parametrize(
    ("shape", "strides", "pointer", "width"),
    [
        ((2, 3, 4, 8), (96, 32, 8, 1), 0, 4),
        ((2, 3, 4, 8), (96, 32, 8, 1), 8, 2),
        ((2, 3, 4, 8), (96, 32, 8, 1), 4, 1),
        ((2, 3, 4, 6), (72, 24, 6, 1), 16, 2),
        ((2, 3, 4, 65), (780, 260, 65, 1), 16, 1),
        ((2, 3, 4, 8), (96, 32, 8, 2), 16, 1),
        ((1, 1, 4, 8), (7, 13, 8, 1), 16, 4),
        ((2, 3, 4, 8), (0, 0, 8, 1), 16, 4),
        ((2, 3, 4, 8), (96, 32, -8, 1), 16, 4),
        ((1, 1, 1, 1), (1, 1, 1, 5), 16, 1),
    ],
)
def test_vector_width(shape, strides, pointer, width):
    assert vector_width(View(shape, strides), pointer) == width


def test_vector_of_a_problem_is_the_narrowest():
    for index in range(3):
        assert describe(*changed(index, pointer=8)).problem.vector == 2
        assert describe(*changed(index, pointer=4)).problem.vector == 1


def test_byte_strides():
    assert strides_in_elements("k", (32, -4), 4) == (8, -1)
    with pytest.raises(ValueError, match="^k has byte strides"):
        strides_in_elements("k", (32, 6), 4)


@pytest.mark.parametrize(
    ("error", "facts", "word"),
    [
        (ValueError, {"shape": (2, 3, 5, 8)}, "shape"),
        (ValueError, {"shape": (3, 5, 4)}, "shape"),
        (TypeError, {"dtype": "int32"}, "int32"),
        (NotImplementedError, {"dtype": "float16"}, "float16"),
        (ValueError, {"device": 1}, "device"),
        (ValueError, {"pointer": 2}, "address"),
        (ValueError, {"strides": (0, 20, 4, 1)}, "share memory"),
        (ValueError, {"strides": (60, 20, 3, 1)}, "share memory"),
    ],
)
def test_out_is_refused_by_name(error, facts, word):
    out = operand("out", *facts.pop("shape", (2, 3, 5, 4)), **facts)
    with pytest.raises(error, match=f"^out .*{word}"):
        check_out(out, describe(*operands()), operands()[0])


def test_out_with_any_strides():
    out = operand("out", 2, 3, 5, 4, strides=(60, 4, 12, 1))
    assert check_out(out, describe(*operands()), operands()[0]) == View((2, 3, 5, 4), (60, 4, 12, 1))
    transposed = operand("out", 5, 4, strides=(1, 5))
    triple = operands((5, 8), (7, 8), (7, 4))
    assert check_out(transposed, describe(*triple), triple[0]).strides[2:] == (1, 5)


@pytest.mark.parametrize("precision", ["tf33", "FP32", None, 1.0, [], np.zeros(3)], ids=repr)
def test_unknown_precision(precision):
    with pytest.raises(ValueError, match="^precision is .*: it must be one of 'fp32', 'tf32'$") as caught:
        describe(*operands(), precision=precision)
    assert "\n" not in str(caught.value)


def test_precision_is_a_fact():
    assert describe(*operands()).problem.precision == "fp32"
    assert describe(*operands(), precision="tf32").problem == replace(describe(*operands()).problem, precision="tf32")


def test_flop_counts_only_pairs_that_count():
    assert Problem(1, 1, 1, 3, 3, 8, 8).flop == 2 * 9 * 16
    assert Problem(1, 1, 1, 3, 3, 8, 8, is_causal=True).flop == 2 * 6 * 16
    assert Problem(1, 1, 1, 2, 5, 8, 8, is_causal=True).flop == 2 * 3 * 16
    assert Problem(1, 1, 1, 5, 2, 8, 8, is_causal=True).flop == 2 * 9 * 16


def fake_kernel(name: str, cannot: str | None = None, rather: str | None = None) -> Kernel:
    return Kernel(
        name=name,
        summary="",
        accuracy="fp32",
        supports=lambda problem, device: cannot,
        config=lambda problem, device: 0,
        configs=lambda: (0,),
        small_config=lambda problem: 0,
        launches=lambda problem, config: (),
        suits=lambda problem, device: rather,
    )


PROBLEM = Problem(1, 1, 1, 16, 16, 64, 64)


def test_choice_is_the_first_that_suits_then_the_first_that_can():
    a, b, c = fake_kernel("a", cannot="too big"), fake_kernel("b", rather="slow"), fake_kernel("c")
    assert choice.choose(None, (a, b, c), PROBLEM, H200) is c
    assert choice.choose(None, (a, b), PROBLEM, H200) is b
    with pytest.raises(ValueError, match="a: too big"):
        choice.choose(None, (a,), PROBLEM, H200)


def test_a_named_kernel_never_falls_back():
    a, b = fake_kernel("a", cannot="too big"), fake_kernel("b", rather="slow")
    with pytest.raises(ValueError, match="kernel a cannot serve this call: too big"):
        choice.choose("a", (a, b), PROBLEM, H200)
    assert choice.choose("b", (a, b), PROBLEM, H200) is b
    assert choice.choose(b, (), PROBLEM, H200) is b
    with pytest.raises(ValueError, match="'z' is not one of a, b"):
        choice.choose("z", (a, b), PROBLEM, H200)
    with pytest.raises(TypeError, match="kernel is a int"):
        choice.choose(3, (a, b), PROBLEM, H200)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_lower_precision_is_served_by_all_and_told(precision):
    problem = replace(PROBLEM, precision=precision)
    exact, lower = fake_kernel("exact"), replace(fake_kernel("lower"), lower_accuracies=("tf32",))
    assert choice.choose("exact", (lower, exact), problem, H200) is exact
    for kernel, gives in ((exact, "fp32"), (lower, precision)):
        told = choice.explain(kernel, (lower, exact), problem, H200, has_gpu=True)
        assert (told.chosen, told.accuracy) == (kernel.name, gives)
        assert (f", precision tf32 gives {gives} (" in repr(told)) == (precision == "tf32")
    refusing = fake_kernel("none", cannot="too big")
    assert choice.explain(None, (refusing,), problem, H200, has_gpu=True).accuracy is None


def test_kernels_with_a_mode_are_chosen_for_a_lower_precision():
    for D, Dv in ((64, 64), (128, 128), (256, 256), (80, 96)):
        problem = Problem(4, 16, 16, 4096, 4096, D, Dv, precision="tf32")
        for is_causal in (False, True):
            chosen = choice.choose(None, KERNELS, replace(problem, is_causal=is_causal), H200)
            assert chosen.accuracy_at(problem) == "tf32"
    few = choice.choose(None, KERNELS, Problem(32, 32, 32, 1, 4096, 128, 128, precision="tf32"), H200)
    assert few.name == "split_keys_fp32"


def test_explanation_has_a_line_for_each_kernel():
    a, b, c = fake_kernel("a", cannot="too big"), fake_kernel("b", rather="slow"), fake_kernel("c")
    told = choice.explain(None, (a, b, c), PROBLEM, H200, has_gpu=False)
    assert told.chosen == "c"
    assert told.reasons == {"a": "cannot: too big", "b": "can, but slow", "c": "chosen"}
    assert "H200" in repr(told) and "no GPU" in repr(told) and "too big" in str(told)
    assert choice.explain(b, (c,), PROBLEM, H200, has_gpu=True).reasons["b"] == "chosen"
    assert choice.explain("a", (a, b, c), PROBLEM, H200, has_gpu=True).chosen is None


def test_products_need_a_library_that_multiplies():
    a, b = replace(fake_kernel("a"), uses_matmul=True), fake_kernel("b", rather="slow")
    assert choice.choose(None, (a, b), PROBLEM, H200) is a
    assert choice.choose(None, (a, b), PROBLEM, H200, has_matmul=False) is b
    with pytest.raises(ValueError, match="kernel a cannot serve this call: multiplies"):
        choice.choose(a, (a, b), PROBLEM, H200, has_matmul=False)
    told = choice.explain("a", (a, b), PROBLEM, H200, has_gpu=True, has_matmul=False)
    assert told.chosen is None and told.reasons == {
        "a": f"cannot: {choice.NO_PRODUCTS}",
        "b": "can, but a was asked for",
    }


def test_every_registered_kernel_has_its_own_name_and_is_chosen_or_says_why():
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
    told = choice.explain(None, KERNELS, PROBLEM, H200, has_gpu=False)
    assert list(told.reasons.values()).count("chosen") == 1
    assert all(len(reason) > len("can, but ") or reason == "chosen" for reason in told.reasons.values())
