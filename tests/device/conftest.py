"""How the tests of device code run their toy kernels."""

from __future__ import annotations

import pytest
from toys import run_on_gpu, simulate

from numba_attn.launch import cache


@pytest.fixture(params=[simulate, pytest.param(run_on_gpu, marks=pytest.mark.gpu)], ids=["simulator", "gpu"])
def run(request, tmp_path_factory, monkeypatch):
    """`run(kernel, *arrays, threads=32, grid=1, smem_bytes=0)`: a toy kernel on numpy arrays, in place."""
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path_factory.getbasetemp() / "compiled"))
    return request.param
