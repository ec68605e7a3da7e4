"""How the tests of device code run their toy kernels."""

from __future__ import annotations

import pytest
from toys import compiled, run_on_gpu, simulate

from numba_attn.launch import cache


def compile_and_simulate(kernel, *arrays, **sizes) -> None:
    """The simulator takes what the compiler would refuse: without a GPU a kernel has to satisfy both."""
    compiled(kernel, *arrays, **sizes)
    simulate(kernel, *arrays, **sizes)


@pytest.fixture(
    params=[compile_and_simulate, pytest.param(run_on_gpu, marks=pytest.mark.gpu)], ids=["simulator", "gpu"]
)
def run(request, tmp_path_factory, monkeypatch):
    """`run(kernel, *arrays, threads=32, grid=1, smem_bytes=0, cluster=1)`: a toy kernel on numpy arrays, in place."""
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path_factory.getbasetemp() / "compiled"))
    return request.param
