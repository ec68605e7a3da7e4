"""Contract under test: a mask's verbs agree with the matrix of the pairs that count, and with each other."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32
from toys import nans

from numba_attn.device.mask import Mask

LENGTHS = [(1, 1), (5, 5), (3, 7), (7, 3), (4, 1), (5, 0)]


def pairs(is_causal: bool, Lq: int, Lk: int) -> np.ndarray:
    """[Lq, Lk]: whether key col counts for query row."""
    every = np.ones((Lq, Lk), bool)
    return np.tril(every) if is_causal else every


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("Lq", "Lk"), LENGTHS)
def test_attends_and_end(run, is_causal, Lq, Lk):
    mask = Mask(is_causal)
    attends, end = mask.attends, mask.end

    @cuda.jit
    def kernel(A, E):
        row = cuda.threadIdx.x
        if row < A.shape[0]:
            E[row] = float32(end(row, Lk))
            for col in range(A.shape[1]):
                A[row, col] = float32(1) if attends(row, col, Lk) else float32(0)

    past = 3  # columns behind the last key
    A, E = nans(Lq, Lk + past), nans(Lq)
    run(kernel, A, E)
    expected = np.pad(pairs(is_causal, Lq, Lk), ((0, 0), (0, past)))
    np.testing.assert_array_equal(A, expected)
    ends = [1 + max(np.flatnonzero(row), default=-1) for row in expected]
    np.testing.assert_array_equal(E, ends)
    assert np.all(np.diff(E) >= 0)
