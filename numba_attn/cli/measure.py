"""Checks and timings that the demo and the benchmarks share: float64 on sampled heads, CUDA events, torch's own call.

Arrays are torch tensors where torch has CUDA, else Numba device arrays. All work is queued on the default stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np

from numba_attn import launch, testing
from numba_attn.interop import numpy_arrays
from numba_attn.kernel import Kernel
from numba_attn.problem import Problem

HEADLINE = Problem(B=32, H=32, Hkv=32, Lq=512, Lk=512, D=1024, Dv=1024)
SAMPLED_HEADS = 3
TORCH_TOLERANCE = 1e-4  # absolute and relative: is torch's result the same attention, not is it as accurate
SHORT_MS = 1.0  # a round of shorter calls has several of them, or the events' own resolution would show


def cuda_torch():
    """(torch, None), or (None, why there is no torch to use)."""
    try:
        import torch
    except ImportError:
        return None, "torch is not installed"
    return (torch, None) if torch.cuda.is_available() else (None, f"torch {torch.__version__} finds no GPU")


def why_left_out(kernel: Kernel) -> str | None:
    """Why a kernel cannot be run here: without torch, arrays are Numba's, which have no product."""
    _, why_no_torch = cuda_torch() if kernel.uses_matmul else (None, None)
    return why_no_torch and f"it multiplies with torch or CuPy, and {why_no_torch}"


def uniform_inputs(problem: Problem, torch) -> tuple:
    """q, k, v uniform in [0, 1), the same in every run: torch tensors, or Numba device arrays if torch is None."""
    B, H, Lq, Lk, D, Dv = problem.B, problem.H, problem.Lq, problem.Lk, problem.D, problem.Dv
    shapes = (B, H, Lq, D), (B, problem.Hkv, Lk, D), (B, problem.Hkv, Lk, Dv)
    if torch is not None:
        generator = torch.Generator("cuda").manual_seed(0)
        return tuple(torch.rand(shape, device="cuda", generator=generator) for shape in shapes)
    rng = np.random.default_rng(0)
    return tuple(numpy_arrays.to_device(rng.random(shape, np.float32), None) for shape in shapes)


class Sample:
    """The first, a middle and the last head of a call in float64 (`numba_attn.reference`, from copies on the host)."""

    def __init__(self, q, k, v, problem: Problem):
        numbers = np.linspace(0, problem.B * problem.H - 1, SAMPLED_HEADS).astype(int)
        self.heads = [divmod(int(number), problem.H) for number in dict.fromkeys(numbers)]
        self.expected = testing.Expected(*map(self.of, (q, k, v)), causal=problem.is_causal)

    def of(self, array) -> np.ndarray:
        """The sampled heads of an array on the GPU."""
        heads = (array[b, h] for b, h in self.heads)
        return np.stack([head.cpu().numpy() if hasattr(head, "cpu") else head.copy_to_host() for head in heads])

    def check(self, o, lse, accuracy: str) -> None:
        """Raise AssertionError unless the heads are as accurate as the class promises."""
        try:
            self.expected.check(self.of(o), self.of(lse), accuracy=accuracy)
        except AssertionError as error:
            # The oracle counts the sampled heads as 0, 1, ...
            raise AssertionError(f"of the heads {self.heads}: {error}") from None

    def check_torch(self, o) -> None:
        """Raise AssertionError unless the heads are close to float64."""
        np.testing.assert_allclose(self.of(o), self.expected.o, rtol=TORCH_TOLERANCE, atol=TORCH_TOLERANCE)

    def errors(self, o) -> tuple[float, float]:
        """||O - O64|| / ||O64|| and max |O - O64| over the sampled heads."""
        difference = self.of(o) - self.expected.o
        return float(np.linalg.norm(difference) / np.linalg.norm(self.expected.o)), float(np.abs(difference).max())


class Timer:
    """GPU times of one call in milliseconds, a round at a time."""

    def __init__(self, work):
        self.work = work
        self.rounds_ms: list[float] = []
        self._calls = max(1, round(SHORT_MS / max(launch.elapsed_ms(work), 1e-3)))

    def round(self) -> None:
        self.rounds_ms.append(launch.elapsed_ms(self.work, calls=self._calls))

    @property
    def median_ms(self) -> float:
        return median(self.rounds_ms)


def tflops(problem: Problem, ms: float) -> float:
    return problem.flop / ms / 1e9


@contextmanager
def tf32_off(torch) -> Iterator[None]:
    """fp32 products of torch in fp32, whatever its flags say; they are restored."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


def torch_backend(torch, q, k, v, is_causal: bool) -> str:
    """The backend that torch's own choice falls on, or 'unknown' where it does not tell."""
    try:
        choice = torch._fused_sdp_choice(q, k, v, is_causal=is_causal)  # private: there is no public way to ask
        return torch.nn.attention.SDPBackend(choice).name.lower()
    except (AttributeError, TypeError, ValueError):
        return "unknown"
