"""Contract: names of problems are unique, mean what they say, and choose sensible contenders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from numba_attn.bench import inputs, problems
from numba_attn.bench.problems import HEADLINE, PROBLEMS, NamedProblem, make_problem
from numba_attn.choice import choose
from numba_attn.kernels import KERNELS, flash_fp32, warp_tile_fp32
from numba_attn.problem import H200, Operand, contiguous_strides, describe


def test_the_headline_is_first_and_has_every_kernel():
    known = PROBLEMS[0]
    assert (known.name, known.inputs, known.every_kernel) == ("headline", "uniform", True)
    assert known.full_name == "b32_h32_q512_k512_d1024_v1024_fp32_full"
    assert problems.standard_kernels(known, KERNELS, H200) == [k for k in KERNELS if not k.supports(HEADLINE, H200)]
    assert [other.name for other in PROBLEMS if other.every_kernel] == ["headline"]
    assert [other.name for other in PROBLEMS if other.inputs != "normal"] == ["headline", "headline_tf32"]


@pytest.mark.parametrize("known", PROBLEMS, ids=lambda known: known.name)
def test_names(known):
    assert problems.find(known.name) is known
    assert problems.find(known.full_name) is known
    assert problems.find(problems.short_name(known.problem)) is known
    assert problems.parse(known.full_name) == known.problem
    assert known.problem.is_causal == known.full_name.endswith("_causal")


def test_names_are_unique():
    assert len({known.name for known in PROBLEMS}) == len({known.problem for known in PROBLEMS}) == len(PROBLEMS)


def test_problems_that_are_not_registered():
    known = problems.find("b1_h2_q3_k4_d5_v6_causal")
    assert known.problem == make_problem(1, 2, 3, 4, 5, 6, is_causal=True)
    assert known.name == "b1_h2_q3_k4_d5_v6_causal"
    assert known.full_name == "b1_h2_q3_k4_d5_v6_fp32_causal"
    assert problems.short_name(make_problem(1, 1, 1, 1, 64, 6)) == "b1_h1_q1_k1_d64_v6"
    assert problems.changed(PROBLEMS[0], is_causal=True).name == "b32_h32_q512_k512_d1024_causal"
    assert problems.changed(PROBLEMS[0], is_causal=True).inputs == "uniform"
    assert problems.find("b1_h2_q3_k4_d5_tf32_causal").problem.precision == "tf32"
    assert problems.changed(known, precision="tf32").full_name == "b1_h2_q3_k4_d5_v6_tf32_causal"
    assert problems.changed(PROBLEMS[0], precision="tf32").name == "headline_tf32"


@pytest.mark.parametrize("name", ["", "tail", "b4_h16", "b4_h16_q8_k8_d8_fp16", "b0_h1_q1_k1_d1", "b4_h16_q8_k8_d8 "])
def test_names_of_nothing(name):
    with pytest.raises(ValueError, match="b4_h16|sizes are 1 to"):
        problems.find(name)


@pytest.mark.parametrize("known", PROBLEMS, ids=lambda known: known.name)
def test_the_facts_are_those_of_the_call(known):
    """What is chosen for the digest is what the API chooses for contiguous arrays."""
    p = known.problem
    shapes = (p.B, p.H, p.Lq, p.D), (p.B, p.H, p.Lk, p.D), (p.B, p.H, p.Lk, p.Dv)
    operands = (
        Operand(name, shape, contiguous_strides(shape), "float32", 0, 256)
        for name, shape in zip("qkv", shapes, strict=True)
    )
    assert describe(*operands, is_causal=p.is_causal, precision=p.precision).problem == p


@pytest.mark.parametrize("known", PROBLEMS[1:], ids=lambda known: known.name)
def test_elsewhere_the_likely_kernels(known):
    names = [kernel.name for kernel in problems.standard_kernels(known, KERNELS, H200)]
    assert {"flash_fp32", choose(None, KERNELS, known.problem, H200).name} <= set(names)
    assert ("warp_tile_fp32" in names) == (warp_tile_fp32.KERNEL.suits(known.problem, H200) is None)


def test_kernels_for_few_rows_and_kernels_that_cannot():
    split = replace(warp_tile_fp32.KERNEL, name="split_keys_fp32")
    refusing = replace(flash_fp32.KERNEL, supports=lambda problem, device: "not today")
    decode, long = problems.find("b32_h32_q1_k4096_d128"), problems.find("b4_h16_q4096_k4096_d64")
    assert split in problems.standard_kernels(decode, (flash_fp32.KERNEL, split), H200)
    assert split not in problems.standard_kernels(long, (flash_fp32.KERNEL, split), H200)
    assert problems.standard_kernels(decode, (refusing,), H200) == []
    assert problems.standard_kernels(PROBLEMS[0], (refusing, split), H200) == [split]


def test_sizes():
    problem = make_problem(2, 3, 5, 7, 11, 13)
    assert problems.input_bytes(problem) == 4 * 6 * (5 * 11 + 7 * 11 + 7 * 13)
    assert problems.output_bytes(problem) == 4 * 6 * 5 * 13


def test_sets_pass_three_times_the_cache():
    problem = make_problem(1, 1, 1, 64, 64, 64)
    size = problems.input_bytes(problem)
    for sets in (1, 2, 7):
        for l2_bytes in (sets * size // 3, sets * size // 3 - 20):
            count = inputs.number_of_sets(problem, l2_bytes, 1 << 40)
            assert count * size >= 3 * l2_bytes > (count - 1) * size
    assert inputs.number_of_sets(HEADLINE, H200.l2_bytes, 1 << 37) == 1
    assert inputs.number_of_sets(problem, 1 << 30, 10 * size) == 5
    assert inputs.number_of_sets(problem, 1 << 30, size) == 1


def test_what_memory_lacks():
    problem = make_problem(1, 1, 8, 8, 8, 8)
    assert inputs.lacking_bytes(problem, 5 * 256) == 0
    assert inputs.lacking_bytes(problem, 5 * 256 - 1) == 1


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_inputs(fake_gpu, distribution):
    known = NamedProblem(make_problem(2, 3, 50, 70, 20, 24), "small", inputs=distribution)
    first, second = inputs.make_sets(known, 2, None)
    assert [x.shape for x in first] == [(2, 3, 50, 20), (2, 3, 70, 20), (2, 3, 70, 24)]
    for x, other, again in zip(first, second, inputs.make_sets(known, 2, None)[0], strict=True):
        assert (x == again).all()
        assert (x != other).any()
        low, mean, deviation = (0, 0.5, 12**-0.5) if distribution == "uniform" else (-9, 0, 1)
        assert x.min() >= low
        assert abs(x.mean() - mean) < 0.05
        assert abs(x.std() - deviation) < 0.05


def test_the_same_numbers_of_torch(fake_gpu_with_torch):
    torch = fake_gpu_with_torch.torch
    known = NamedProblem(make_problem(2, 3, 50, 70, 20, 24), "small")
    (q, k, v), other = inputs.make_sets(known, 2, torch)
    assert [tuple(x.shape) for x in (q, k, v)] == [(2, 3, 50, 20), (2, 3, 70, 20), (2, 3, 70, 24)]
    assert q.equal(inputs.make_sets(known, 2, torch)[0][0])
    assert not q.equal(other[0])
    assert abs(v.std().item() - 1) < 0.05
    assert inputs.poisoned_output(known.problem, torch).isnan().all()
