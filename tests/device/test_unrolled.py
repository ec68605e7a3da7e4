"""Contract under test: each operation of `e` has its value in the simulator and on the card, by its instruction."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32
from numba.cuda import types
from toys import nans, ptx_of, randn, simulate

from numba_attn import sim
from numba_attn.device import fragments
from numba_attn.device.ptx import cp_async_commit, cp_async_wait
from numba_attn.device.smem import shared_memory, shared_tile
from numba_attn.device.unrolled import unrolled

INF, NAN = np.inf, np.nan
wait_all = cp_async_wait(0)


def applying(operation, inputs: int, outputs: int, kind=float32, result=float32):
    """A kernel `(A, O)`: lane t has x = A[t, :] in registers, and O[t, :] = operation(e, *x)."""

    @unrolled
    def apply(e, x, y):
        for i, value in enumerate(operation(e, *(x[i] for i in range(inputs)))):
            y[i] = value

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        x = cuda.local.array(inputs, kind)
        y = cuda.local.array(outputs, result)
        for i in range(inputs):
            x[i] = A[t, i]
        apply(x, y)
        for i in range(outputs):
            O[t, i] = y[i]

    return kernel


def applied(run, operation, A, outputs: int = 1, kind=float32, result=float32):
    """operation of the rows of A [n, inputs], n at most 32: [n, outputs]."""
    rows = np.zeros((32, A.shape[1]), kind.name)
    rows[: len(A)] = A
    O = np.full((32, outputs), 77, result.name)
    run(applying(operation, A.shape[1], outputs, kind, result), rows, O)
    return O[: len(A)]


def instructions(ptx: str) -> list[str]:
    return re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z]\w*\.[\w.:]+)", ptx, re.MULTILINE)


def emitted(operation, inputs: int, outputs: int = 1) -> list[str]:
    """What `operation` compiles to: instructions on fp32 and halves, loads and stores apart."""
    found = instructions(ptx_of(applying(operation, inputs, outputs), 2, 2))
    return [name for name in found if re.search(r"\.(f32|f16|f16x2|b16)\b", name) and name[:3] not in ("ld.", "st.")]


def arithmetic(e, a, b):
    half, third = e.number(0.5), np.float32(1 / 3)
    numbers = a + b, a - b, a * b, a / b, -a, 2.0 + a, 2.0 * a, 2.0 - a, 2.0 / b, a + 0.5, a - half, a * 0.5, a / 4.0
    return *numbers, 0.1 * a, third * a, third - a


def test_operators_on_numbers(run):
    A = randn(32, 2)
    A[:3] = [[0, -1], [1e38, 1e-3], [1e-40, 3e-39]]
    a, b = A.T
    with np.errstate(over="ignore"):
        expected = [a + b, a - b, a * b, a / b, -a, 2 + a, 2 * a, 2 - a, 2 / b, a + 0.5, a - 0.5, a * 0.5, a / 4]
        expected += [np.float32(0.1) * a, np.float32(1 / 3) * a, np.float32(1 / 3) - a]
    O = applied(run, arithmetic, A, len(expected))
    np.testing.assert_array_equal(O, np.stack(expected, axis=1).astype(np.float32))
    assert np.signbit(O[0, 4]), "-0 is negated"


def test_operators_on_integers(run):
    def operation(e, a, b):
        return a + b, a - b, a * b, a ^ b, a & b, -a, 3 + a, 3 * a, 100 - a, a + 1, a ^ 48, a & 7, 48 ^ a, 7 & a

    A = np.random.default_rng(0).integers(-(2**15), 2**15, (32, 2)).astype(np.int32)
    a, b = A.T
    expected = [a + b, a - b, a * b, a ^ b, a & b, -a, 3 + a, 3 * a, 100 - a, a + 1, a ^ 48, a & 7, a ^ 48, a & 7]
    O = applied(run, operation, A, len(expected), int32, int32)
    np.testing.assert_array_equal(O, np.stack(expected, axis=1))


EDGES = np.array([[1, 2], [2, 1], [1, 1], [0, -0.0], [-1, 1], [INF, 1], [-INF, -INF], [NAN, 1], [1, NAN]], np.float32)


def test_comparisons_and_where(run):
    def compared(a, b):
        return a < b, a <= b, a > b, a >= b, a == b, a != b, a < 1.0, a > -INF, 1.0 > a, (a < b) & (b > 1.0)

    def operation(e, a, b):
        chosen = [e.where(condition, a, 5.0) for condition in compared(a, b)]
        return [*chosen, e.where(a < b, 1.0, b), e.where(True, a, b)]

    a, b = EDGES.T
    expected = [np.where(condition, a, np.float32(5)) for condition in compared(a, b)] + [np.where(a < b, 1, b), a]
    np.testing.assert_array_equal(applied(run, operation, EDGES, len(expected)), np.stack(expected, axis=1))


def test_comparisons_of_integers(run):
    def compared(a, b):
        return a < b, a <= b, a > b, a >= b, a == b, a != b, a > 0, 0 < a, (a < b) & (b < 3)

    A = np.array([[1, 2], [2, 1], [1, 1], [-1, 2], [-5, -4], [3, 4]], np.int32)
    expected = np.stack(compared(*A.T), axis=1)
    O = applied(run, lambda e, a, b: [e.where(x, 1.0, 0.0) for x in compared(a, b)], A, expected.shape[1], int32)
    np.testing.assert_array_equal(O, expected)


def test_constants_instead_of_numbers(run):
    def operation(e, a):
        return *e.unpack(e.halves(1.5, a)), *e.unpack(0x3C004000), e.shfl_xor(2.5, 1), e.max(a, 0.5)

    A = randn(32, 1)
    half = A[:, 0].astype(np.float16)
    expected = np.stack(np.broadcast_arrays(1.5, half, 2, 1, 2.5, np.fmax(A[:, 0], 0.5)), axis=1)
    np.testing.assert_array_equal(applied(run, operation, A, 6), expected)


def test_a_condition_of_python_is_refused():
    # The simulator would follow it: each thread has its number there.
    with pytest.raises(TypeError, match="use e.where"):
        ptx_of(applying(lambda e, a: [a if a > 0.0 else -a], 1, 1), 2, 2)


def test_max(run):
    A = np.concatenate([EDGES, [[NAN, NAN], [-INF, NAN]]]).astype(np.float32)
    O = applied(run, lambda e, a, b: (e.max(a, b), e.max(a, 0.5)), A, 2)
    np.testing.assert_array_equal(O, np.stack([np.fmax(*A.T), np.fmax(A[:, 0], 0.5)], axis=1))


def test_max_magnitude(run):
    A = np.concatenate([EDGES, [[NAN, NAN], [-INF, NAN], [-3, 2], [1e-40, -2e-40]]]).astype(np.float32)
    O = applied(run, lambda e, a, b: (e.max_magnitude(a, b), e.max_magnitude(a, -0.5)), A, 2)
    expected = np.stack([np.maximum(*np.abs(A.T)), np.maximum(np.abs(A[:, 0]), 0.5)], axis=1)
    np.testing.assert_array_equal(O, expected)
    assert not np.signbit(O[~np.isnan(O)]).any()


def test_count_magnitudes(run):
    def operation(e, a, b, least):
        counts, threshold = e.halves(0.0, 3.0), e.halves(least, least)
        for low, high in ((a, b), (b, a), (-a, 1.0)):
            counts = e.count_magnitudes(counts, e.halves(low, high), threshold)
        return e.unpack(counts)

    A = np.concatenate([np.c_[EDGES, np.ones(len(EDGES))], [[2.0**-24, 0, 2.0**-24], [INF, -INF, INF]]])
    a, b, least = np.abs(A.astype(np.float32).T)
    reach_a, reach_b, reach_1 = ((x >= least).astype(int) for x in (a, b, 1))
    expected = np.stack([2 * reach_a + reach_b, 3 + reach_a + reach_b + reach_1], axis=1)
    np.testing.assert_array_equal(applied(run, operation, A, 2), expected)


def test_fma(run):
    tiny = 2.0**-12
    A = np.array(
        [[1 + tiny, 1 - tiny, -1], [1 + tiny, 1 + tiny, -1], [1e-40, 1, 1e-40], [3e38, 2, -INF], [NAN, 0, 0]],
        np.float32,
    )
    O = applied(run, lambda e, a, b, c: (e.fma(a, b, c), e.fma(a, b, -1.0)), A, 2)
    exact = A[:, 0].astype(np.float64) * A[:, 1] + A[:, 2]
    np.testing.assert_array_equal(O[:, 0], exact.astype(np.float32))
    assert O[0, 0] == -(2.0**-24) == O[0, 1], "the product is not rounded"


def test_ex2(run):
    x = np.concatenate([np.linspace(-125.9, 0, 20), [0.3, 1.5, 17.25, 127.5]]).astype(np.float32)[:, None]
    O, exact = applied(run, lambda e, a: [e.ex2(a)], x), np.exp2(x.astype(np.float64))
    assert np.all(np.abs(O - exact) <= 2.0**-22 * exact)
    x = np.array([0, -0.0, -INF, -1e30, -126.5, -130, -149, -200, 129, INF, NAN], np.float32)
    O = applied(run, lambda e, a: [e.ex2(a)], x[:, None])[:, 0]
    np.testing.assert_array_equal(O, [1, 1, 0, 0, 0, 0, 0, 0, INF, INF, NAN])


@pytest.mark.parametrize("distance", [1, 2, 16])
def test_shfl_xor(run, distance):
    A = randn(32, 1)
    O = applied(run, lambda e, a: [e.shfl_xor(a, distance)], A)
    np.testing.assert_array_equal(O, A[np.arange(32) ^ distance])


def test_halves_and_unpack(run):
    A = randn(32, 2)
    special = [[1 + 2.0**-11, 1 + 3 * 2.0**-11], [65504, 65519], [65520, -1e30], [INF, -INF], [-0.0, 2.0**-25]]
    A[:8] = [*special, [2.0**-24, 1.5 * 2.0**-24], [3 * 2.0**-25, -(2.0**-14)], [NAN, 0]]

    def there_and_back(e, a, b):
        return e.unpack(e.halves(a, b))

    O = applied(run, there_and_back, A, 2)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(O, A.astype(np.float16))
    assert O[0].tolist() == [1, 1 + 2.0**-9], "ties go to the even one"
    assert O[2].tolist() == [INF, -INF] and O[4, 1] == 0 and O[5, 0] == 2.0**-24

    packed = applied(run, lambda e, a, b: [e.halves(a, b)], A[:1], result=uint32)
    assert packed[0, 0] == 0x3C003C00 + 0x00020000, "the first one is the lower half"


def half_words(matrix) -> np.ndarray:
    """Rows of halves as 32-bit words."""
    return np.ascontiguousarray(matrix, np.float16).view(np.uint32)


ROW_WORDS = 4 * 5  # rows 80 bytes apart: no two of eight share their banks


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(run, transposed):
    SHARED = shared_tile(0, (32 * ROW_WORDS,), dtype=types.uint32)

    @unrolled
    def load(e, x, address):
        for i, register in enumerate(e.ldmatrix(address, transposed)):
            x[i] = register

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        smem = shared_memory()
        tile = SHARED(smem)
        for i in range(4):
            tile[ROW_WORDS * t + i] = A[t, i]
        cuda.syncthreads()
        x = cuda.local.array(4, int32)
        # This lane's row is another lane's: addresses count, not lanes.
        load(x, smem + (t ^ 9) * (4 * ROW_WORDS))
        for i in range(4):
            O[t, i] = x[i]

    matrices = np.arange(1, 257).reshape(32, 8)
    O = np.zeros((32, 4), np.int32)
    run(kernel, half_words(matrices), O, smem_bytes=4 * 32 * ROW_WORDS)
    expected = fragments.ldmatrix(matrices[np.arange(32) ^ 9], transposed)
    np.testing.assert_array_equal(O.view(np.uint32), expected)


@cuda.jit
def mma_kernel(A, B, C, O):
    t = cuda.threadIdx.x
    a, b, c = cuda.local.array(4, uint32), cuda.local.array(2, uint32), cuda.local.array(4, float32)
    for i in range(4):
        a[i], c[i] = A[t, i], C[t, i]
    for i in range(2):
        b[i] = B[t, i]
    multiply(a, b, c)
    for i in range(4):
        O[t, i] = c[i]


@unrolled
def multiply(e, a, b, c):
    registers = e.mma([a[i] for i in range(4)], [b[0], b[1]], [c[0], c[1], c[2], c[3]])
    for i, x in enumerate(registers):
        c[i] = x


def random_operands(seed: int, size: float = 1.0, integers: bool = False) -> tuple:
    """A [16, 16], B [16, 8], C [16, 8] as fp16, fp16 and fp32."""
    rng = np.random.default_rng(seed)
    shapes = (16, 16), (16, 8), (16, 8)
    A, B, C = (rng.integers(-60, 60, s) if integers else rng.standard_normal(s) for s in shapes)
    return (A if integers else size * A).astype(np.float16), B.astype(np.float16), C.astype(np.float32)


def by_lanes(A, B, C) -> tuple:
    """Registers of the operands, gathered by the fragments' maps."""
    f, words = fragments, []
    for matrix, rows, cols, down in ((A, f.A_ROW, f.A_COL, 0), (B, f.B_ROW, f.B_COL, 1)):
        pair = np.stack([matrix[rows, cols], matrix[rows + down, cols + 1 - down]], axis=-1)
        words.append(pair.view(np.uint32)[..., 0])
    return *words, f.scatter_c(C)


def multiplied(run, A, B, C) -> np.ndarray:
    O = nans(32, 4)
    run(mma_kernel, *by_lanes(A, B, C), O)
    return fragments.gather_c(O)


def test_mma(run):
    A, B, C = random_operands(0, integers=True)
    np.testing.assert_array_equal(multiplied(run, A, B, C), C + A.astype(np.float64) @ B.astype(np.float64))
    A, B, C = random_operands(1)
    exact = C + A.astype(np.float64) @ B.astype(np.float64)
    largest = np.maximum(np.abs(C), np.abs(A[:, :, None].astype(np.float64) * B[None]).max(1))
    assert np.all(np.abs(multiplied(run, A, B, C) - exact) <= 17 * 2.0**-23 * largest)


def test_mma_truncates(run):
    A, B, C = np.zeros((16, 16), np.float16), np.zeros((16, 8), np.float16), np.ones((16, 8), np.float32)
    C[8:] = -1
    # Rounded to nearest, 1 + 3/4 of an ulp were 1 + ulp, and 16 eighths were two.
    A[0, 0], A[8, 0], A[1], A[9] = 0.75 * 2.0**-12, -0.75 * 2.0**-12, 2.0**-15, -(2.0**-15)
    A[2, 0] = 2.0**-12
    B[...] = 2.0**-11
    expected = C.copy()
    expected[2] += 2.0**-23
    np.testing.assert_array_equal(multiplied(run, A, B, C), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1, 100])
def test_twin_of_mma_has_every_bit_of_hopper(size):
    import torch
    from toys import run_on_gpu

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the twin sums as compute capability 9.0 does")
    for seed in range(20):
        operands = random_operands(seed, size)
        expected = nans(32, 4)
        simulate(mma_kernel, *by_lanes(*operands), expected)
        np.testing.assert_array_equal(multiplied(run_on_gpu, *operands), fragments.gather_c(expected))


def test_copies_from_an_address(run):
    STEPS = (0, 512, 1536)
    SHARED = shared_tile(0, (512,), dtype=types.uint32)

    @unrolled
    def copy(e, target, tensor, word):
        source = e.address(tensor, 1, word)
        for step in STEPS:
            e.copy_async(target, source, step)

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        smem = shared_memory()
        tile = SHARED(smem)
        copy(smem + 16 * t, A, 8 + 4 * t)
        cp_async_commit()
        wait_all()
        cuda.syncthreads()
        for step in range(3):
            at = 128 * step + (128 if step == 2 else 0)
            for i in range(4):
                O[128 * step + 4 * t + i] = tile[at + 4 * (31 - t) + i]

    A, O = np.arange(2 * 640, dtype=np.uint32).reshape(2, 640), np.zeros(384, np.uint32)
    run(kernel, A, O, smem_bytes=2048)
    expected = [A[1, 8 + step // 4 :][:128].reshape(32, 4)[::-1].ravel() for step in STEPS]
    np.testing.assert_array_equal(O, np.concatenate(expected))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_load(run, n):
    N = 2 * n

    @unrolled
    def get(e, x, tensor, row, col):
        for i, number in enumerate(e.load(tensor, (row, col), n) + e.load(tensor, (row, 0), n, behind=2 * n)):
            x[i] = number

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        x = cuda.local.array(N, float32)
        get(x, A, t, n)
        for i in range(N):
            O[t, i] = x[i]

    A, O = randn(32, 4 * n), nans(32, N)
    run(kernel, A, O)
    np.testing.assert_array_equal(O, A[:, n : 3 * n])


def test_load_out_of_range():
    @unrolled
    def get(e, x, tensor):
        x[0] = e.load(tensor, (0, 0), 4, behind=4)[0]

    @cuda.jit
    def kernel(O):
        x = cuda.local.array(1, float32)
        get(x, O)

    with pytest.raises(sim.SimulationError, match="out of range"):
        simulate(kernel, nans(2, 4))


@pytest.mark.parametrize("is_conditional", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_store(run, n, is_conditional):
    @unrolled
    def put(e, tensor, x, row, col, limit):
        condition = row < limit if is_conditional else None
        e.store(tensor, (row, col), [x[i] for i in range(n)], condition)
        e.store(tensor, (row, col), [x[n - 1 - i] for i in range(n)], condition, behind=n)

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        x = cuda.local.array(n, float32)
        for i in range(n):
            x[i] = A[t, i]
        put(O, x, t, 4, 20)

    A = randn(32, n)
    O = nans(32, 4 + 2 * n + 4)
    run(kernel, A, O)
    expected = nans(*O.shape)
    rows = slice(20 if is_conditional else 32)
    expected[rows, 4 : 4 + n], expected[rows, 4 + n : 4 + 2 * n] = A[rows], A[rows, ::-1]
    np.testing.assert_array_equal(O, expected)


def test_store_of_words(run):
    @unrolled
    def put(e, tensor, x, at):
        e.store(tensor, (at,), [e.halves(x[0], x[1]), e.halves(x[1], x[0])])

    @cuda.jit
    def kernel(A, O):
        x = cuda.local.array(2, float32)
        x[0], x[1] = A[cuda.threadIdx.x, 0], A[cuda.threadIdx.x, 1]
        put(O, x, 2 * cuda.threadIdx.x)

    A, O = randn(32, 2), np.zeros(64, np.uint32)
    run(kernel, A, O)
    np.testing.assert_array_equal(O.view(np.float16).reshape(32, 4), A.astype(np.float16)[:, [0, 1, 1, 0]])


def test_local_arrays_of_several_dimensions(run):
    @unrolled
    def transpose(e, x, y):
        for i in range(2):
            for j in range(3):
                y[j, i] = x[i, j]
        y[2, 1] = 9.0
        y[0, 0] = 1

    @cuda.jit
    def kernel(A, O):
        t = cuda.threadIdx.x
        x, y = cuda.local.array((2, 3), float32), cuda.local.array((3, 2), float32)
        for i in range(2):
            for j in range(3):
                x[i, j] = A[t, i, j]
        transpose(x, y)
        for i in range(3):
            for j in range(2):
                O[t, i, j] = y[i, j]

    A, O = randn(32, 2, 3), nans(32, 3, 2)
    run(kernel, A, O)
    expected = A.swapaxes(1, 2).copy()
    expected[:, 2, 1], expected[:, 0, 0] = 9, 1
    np.testing.assert_array_equal(O, expected)


@pytest.mark.parametrize("index", [4, -1, (0, 0), 2])
def test_subscripts_out_of_range(index):
    @unrolled
    def read(e, x):
        x[0] = x[index]

    @cuda.jit
    def kernel(O):
        x = cuda.local.array(4, float32)
        x[0] = O[0]
        read(x)

    said = "which this thread has not written" if index == 2 else "index out of range|2 subscripts for"
    with pytest.raises(sim.SimulationError, match=said):
        simulate(kernel, nans(1))


def test_store_out_of_range():
    @unrolled
    def put(e, tensor, x, at, is_there):
        e.store(tensor, (at,), [x[0], x[0]], is_there)

    @cuda.jit
    def kernel(O, last):
        x = cuda.local.array(1, float32)
        x[0] = float32(1)
        put(O, x, 2 * cuda.threadIdx.x, cuda.threadIdx.x < last)

    simulate(kernel, nans(10), 5)
    with pytest.raises(sim.SimulationError, match="index out of range"):
        simulate(kernel, nans(10), 6)
    with pytest.raises(sim.SimulationError, match="misaligned"):
        simulate(kernel, nans(11)[1:], 5)


OPERATIONS = {
    "fma": (lambda e, a, b, c: [e.fma(a, b, c)], 3, ["fma.rn.f32"]),
    "max": (lambda e, a, b: [e.max(a, b)], 2, ["max.f32"]),
    "ex2": (lambda e, a: [e.ex2(a)], 1, ["ex2.approx.ftz.f32"]),
    "negation": (lambda e, a: [-a], 1, ["neg.f32"]),
    "difference": (lambda e, a, b: [a - b], 2, ["sub.f32"]),
    "quotient": (lambda e, a, b: [a / b], 2, ["div.rn.f32"]),
    "where": (lambda e, a, b: [e.where(a > b, a, 0.0)], 2, ["setp.gt.f32", "selp.f32"]),
    "halves": (lambda e, a, b: e.unpack(e.halves(a, b)), 2, ["cvt.rn.f16x2.f32", "cvt.f32.f16", "cvt.f32.f16"]),
}


@pytest.mark.parametrize(("operation", "inputs", "names"), OPERATIONS.values(), ids=OPERATIONS)
def test_instructions(operation, inputs, names):
    assert emitted(operation, inputs, len([n for n in names if n == "cvt.f32.f16"]) or 1) == names


def test_shuffle_instruction():
    ptx = ptx_of(applying(lambda e, a: [e.shfl_xor(a, 2)], 1, 1), 2, 2)
    assert re.findall(r"shfl\.sync\.bfly\.b32\s+[^;]*, (\d+), 31, -1;", ptx) == ["2"]


def test_mma_instruction():
    ptx = ptx_of(mma_kernel, 2, 2, 2, 2)
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") == 1
    assert ".local" not in ptx


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_instruction(transposed):
    @unrolled
    def load(e, x, address):
        for i, register in enumerate(e.ldmatrix(address, transposed)):
            x[i] = register

    @cuda.jit
    def kernel(O):
        x = cuda.local.array(4, int32)
        load(x, shared_memory() + 16 * cuda.threadIdx.x)
        for i in range(4):
            O[cuda.threadIdx.x, i] = x[i]

    ptx = ptx_of(kernel, 2, dtype="int32")
    trans = ".trans" if transposed else ""
    name = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16"
    assert [found for found in instructions(ptx) if found.startswith("ldmatrix")] == [name]


@pytest.mark.parametrize(("n", "mnemonic"), [(1, "st.global"), (2, "st.global.v2"), (4, "st.global.v4")])
def test_store_instruction(n, mnemonic):
    @unrolled
    def put(e, tensor, x, at):
        e.store(tensor, (at,), [x[0] for _ in range(n)])

    @cuda.jit
    def kernel(A, O):
        x = cuda.local.array(1, float32)
        x[0] = A[0]
        put(O, x, 4 * cuda.threadIdx.x)

    stores = [found for found in instructions(ptx_of(kernel, 1, 1)) if found.startswith("st.")]
    assert len(stores) == 1 and re.fullmatch(re.escape(mnemonic) + r"\.[bf]32", stores[0])


def test_copy_instruction():
    @unrolled
    def copy(e, target, tensor, word):
        e.copy_async(target, e.address(tensor, word), 64)

    @cuda.jit
    def kernel(A):
        copy(shared_memory() + 16 * cuda.threadIdx.x, A, 4 * cuda.threadIdx.x)

    assert re.findall(r"cp\.async\.(\w+)\.shared\.global \[%r\d+\], \[%rd\d+\], (\d+), %r\d+;", ptx_of(kernel, 1)) == [
        ("cg", "16")
    ]
