"""Contract under test: every row is some warp's, and where two turns are whole, all warps have as many keys."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from numba_attn.device.rescue_kernel import in_turns


@pytest.mark.parametrize("n", [1, 5, 8, 13, 16, 20, 32])
def test_rows_in_turns(run, n):
    turn = in_turns(8)

    @cuda.jit
    def kernel(O):
        if cuda.threadIdx.x < n:
            O[cuda.threadIdx.x] = turn(cuda.threadIdx.x, n)

    O = np.full(32, -1, np.int32)
    run(kernel, O)
    assert sorted(O[:n]) == list(range(n)) and np.all(O[n:] == -1)
    if n % 16 == 0:
        of_warps = O[:n].reshape(-1, 8).sum(axis=0)
        assert np.all(of_warps == of_warps[0])
