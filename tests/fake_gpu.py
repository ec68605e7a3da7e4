"""A GPU that is not there: arrays on the host, kernels that are the fp32 evaluation, a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from numba_attn import launch, testing, versions
from numba_attn.bench import contenders, float64, inputs, measure, torch_backends
from numba_attn.interop import numpy_arrays
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200

NO_TORCH = "torch is not installed"


class FakeGpu:
    """What the tests may change: `ms` by kernel's name, and `damage(name, o, lse)` of results."""

    def __init__(self, torch=None):
        self.torch = torch
        self.ms: dict[str, float] = {}
        self.damage = lambda name, o, lse: None
        self.calls: list[tuple[str, int]] = []
        """Kernel and address of q of each call."""
        self._current = ""

    def attention(self, q, k, v, *, causal, kernel, return_lse=False, out=None, precision="fp32"):
        self._current = kernel.name
        self.calls.append((kernel.name, q.__array_interface__["data"][0] if self.torch is None else q.data_ptr()))
        if not return_lse:
            return None
        expected = testing.Expected(np.asarray(q), np.asarray(k), np.asarray(v), causal=causal)
        o, lse = expected.textbook().o.copy(), expected.textbook().lse.copy()
        self.damage(kernel.name, o, lse)
        if self.torch is None:
            out[...] = o
            return out, lse
        return out.copy_(self.torch.from_numpy(o)), self.torch.from_numpy(lse)

    def elapsed_ms(self, work, calls=1):
        self._current = "torch"
        for _ in range(calls):
            work()
        return self.ms.get(self._current, 0.5)


def install(monkeypatch, torch=None) -> FakeGpu:
    gpu = FakeGpu(torch)
    monkeypatch.setattr(launch, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "free_bytes", lambda index: 1 << 40)
    monkeypatch.setattr(launch, "device_facts", lambda index: H200)
    monkeypatch.setattr(launch, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(launch, "elapsed_ms", gpu.elapsed_ms)
    monkeypatch.setattr(launch, "synchronize", lambda index: None)
    monkeypatch.setattr(versions, "problem", lambda driver: None)
    monkeypatch.setattr(inputs, "CACHES", 0)
    monkeypatch.setattr(inputs, "DEVICE", "cpu")
    monkeypatch.setattr(contenders, "api", SimpleNamespace(attention=gpu.attention))
    monkeypatch.setattr(torch_backends, "cuda_torch", lambda: (torch, None if torch else NO_TORCH))
    if torch is None:
        monkeypatch.setattr(numpy_arrays, "to_device", lambda array, stream: array)
        monkeypatch.setattr(float64.Sample, "_of", lambda self, array: np.stack([array[b, h] for b, h in self.heads]))
    else:
        monkeypatch.setattr(measure, "peak_bytes", lambda torch, contender, inputs: 10_000_000)
    return gpu


FIRST, *_, LAST = (kernel.name for kernel in KERNELS)
