"""What every test shares: seeds, the gpu marker and its reason, inputs and guarded outputs on the GPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import settings

from numba_attn import cli, testing

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@functools.cache
def why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no GPU: torch.cuda.is_available() is False"


def pytest_report_header() -> str:
    reason = why_no_gpu()
    return f"tests marked gpu: {'run' if reason is None else f'skipped, {reason}'}"


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and why_no_gpu() is not None:
            item.add_marker(pytest.mark.skip(reason=why_no_gpu()))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def call(capsys):
    """Function of arguments that gives exit status, output and errors of a command."""

    def call(*argv):
        status = cli.main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture(scope="session")
def to_gpu():
    """Function of a `testing.Placed` that gives a torch CUDA tensor of the same values, strides and offset."""
    import torch

    def upload(placed: testing.Placed):
        buffer = torch.from_numpy(placed.buffer).cuda()
        return torch.as_strided(buffer, placed.shape, placed.strides, placed.offset)

    return upload


@pytest.fixture(scope="session")
def guarded_output(to_gpu):
    """Function of a shape and a layout that gives a NaN-filled CUDA tensor and a check of all the memory around it."""

    def make(shape, layout: str | None = None):
        guarded = testing.guarded(shape, layout=layout)
        tensor = to_gpu(guarded)
        return tensor, lambda: guarded.check(tensor._base.cpu().numpy())

    return make


@pytest.fixture
def fake_gpu(monkeypatch):
    """A `fake_gpu.FakeGpu` without torch, and in place of the driver."""
    import fake_gpu

    return fake_gpu.install(monkeypatch)


@pytest.fixture
def fake_gpu_with_torch(monkeypatch):
    """The same with torch's CPU tensors and its own attention."""
    import fake_gpu

    return fake_gpu.install(monkeypatch, pytest.importorskip("torch"))
