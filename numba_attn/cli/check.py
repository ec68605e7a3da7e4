"""The command `check`: kernels against the matrix of problems, on the GPU or in the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from numba_attn import api, launch, sim, testing
from numba_attn.bench import torch_backends
from numba_attn.cli.errors import CommandError, require_toolkit
from numba_attn.cli.kernel_file import KERNEL_HELP, find
from numba_attn.cli.precompile import refusal
from numba_attn.cli.screen import Progress, one_line
from numba_attn.interop import numpy_arrays
from numba_attn.kernel import Kernel
from numba_attn.kernels import KERNELS
from numba_attn.problem import H200, PRECISIONS, Device
from numba_attn.sim.time_limit import TimeLimit, time_limit

DESCRIPTION = """Hold kernels to the matrix of problems (numba_attn.testing): O and lse against float64, with the error
budget of the class that the kernel gives at the problem's precision, and every stray write. On the GPU if there is one;
in the simulator with --sim or without a GPU: smaller problems, at the kernel's smallest tiles, every access checked and
no case longer than a minute. One line per failing case, but a failure that many share is counted after its first few;
exit status 1 if there is any."""

SIMULATED_CASE_S = 60
SHOWN = 3  # of the failures with the same message


def add_arguments(parser) -> None:
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help=f"{KERNEL_HELP}; all registered ones without it")
    parser.add_argument("--sim", action="store_true", help="in the simulator, also where there is a GPU")
    precision = "the same problems at this precision: fp32, or tf32, for which by itself there are only a few"
    parser.add_argument("--precision", choices=PRECISIONS, help=precision)
    parser.add_argument("-k", dest="only", metavar="TEXT", help="only the cases with TEXT in their name, like causal")


def run(args) -> int:
    kernels = KERNELS if args.kernel is None else [find(args.kernel)[0]]
    in_simulator = args.sim or launch.device_count() == 0
    if in_simulator:
        print("in the simulator" + ("" if args.sim else ": no GPU is found"))
        device, matrix, evaluate = H200, testing.small_cases(), simulate
    else:
        require_toolkit()
        device, matrix, evaluate = launch.device_facts(0), testing.cases(), run_on_gpu
        print(f"on {device.name}")
        kernels = list(those_that_run(kernels, device))
    if args.precision:
        matrix = dict.fromkeys(replace(case, precision=args.precision) for case in matrix)
    cases = [case for case in matrix if args.only is None or args.only in str(case)]
    if not cases:
        raise CommandError(f"no case has {args.only!r} in its name", status=2)
    tally = {kernel.name: Counter() for kernel in kernels}
    failures = Counter()
    with Progress() as progress:
        for done, case in enumerate(cases):
            progress.show(done, len(cases), str(case))
            for kernel, outcome, why in check_case(case, kernels, device, evaluate):
                tally[kernel.name][outcome] += 1
                if outcome == "failed":
                    failures[kernel.name, why] += 1
                    if failures[kernel.name, why] <= SHOWN:
                        progress.say(f"FAIL {kernel.name} {case}: {why}")
            if not in_simulator and (lost := lost_gpu()):
                raise CommandError(f"stopped after {case}: the GPU takes no more work from this process: {lost}")
    for (name, why), count in failures.items():
        if count > SHOWN:
            print(f"FAIL {name} in {count - SHOWN} more cases: {why}")
    for name, counts in tally.items():
        refused = f", {counts['refused']} refused by its `supports`" if counts["refused"] else ""
        print(f"{name}: {len(cases)} cases, {counts['passed']} passed, {counts['failed']} failed{refused}")
    return 0 if all(counts["passed"] and not counts["failed"] for counts in tally.values()) else 1


def why_left_out(kernel: Kernel, device: Device) -> str | None:
    """Why a kernel cannot be run here: the GPU is another one, or arrays are Numba's, which have no product."""
    if reason := refusal(kernel, device):
        return reason
    _, why_no_torch = torch_backends.cuda_torch() if kernel.uses_matmul else (None, None)
    return why_no_torch and f"it multiplies with torch or CuPy, and {why_no_torch}"


def those_that_run(kernels, device: Device) -> Iterator[Kernel]:
    """The kernels that can be run here; the others are told, and one that was asked for is an error."""
    for kernel in kernels:
        reason = why_left_out(kernel, device)
        if reason is None:
            yield kernel
        elif len(kernels) == 1:
            raise CommandError(f"{kernel.name} cannot be checked: {reason}")
        else:
            print(f"{kernel.name}: left out: {reason}")


def check_case(case: testing.Case, kernels, device, evaluate):
    """(kernel, outcome, why) for each kernel: passed, failed or refused."""
    expected = None
    for kernel in kernels:
        try:
            if reason := kernel.supports(case.problem, device):
                yield kernel, "refused", reason
                continue
            expected = expected or testing.Expected(*testing.make_inputs(case), **case.kwargs)
            expected.check(*evaluate(kernel, case), accuracy=kernel.accuracy_at(case.problem))
        except TimeLimit:
            yield kernel, "failed", f"not done after {SIMULATED_CASE_S:g} s in the simulator"
        except (AssertionError, sim.SimulationError) as error:
            yield kernel, "failed", one_line(error)
        except Exception as error:  # a kernel under work may fail in any way
            yield kernel, "failed", f"{type(error).__name__}: {one_line(error)}"
        else:
            yield kernel, "passed", None


def simulate(kernel: Kernel, case: testing.Case) -> tuple[np.ndarray, np.ndarray]:
    with time_limit(SIMULATED_CASE_S):
        return sim.attention(*testing.make_inputs(case), **case.options, return_lse=True, kernel=kernel)


def run_on_gpu(kernel: Kernel, case: testing.Case) -> tuple[np.ndarray, np.ndarray]:
    """O and lse, after a check of the memory around O."""
    target = testing.guarded((case.B, case.H, case.Lq, case.Dv))
    out = OnGpu(target)
    arrays = [*map(OnGpu, testing.place_inputs(case)), out]
    if kernel.uses_matmul:
        torch, _ = torch_backends.cuda_torch()
        arrays = [torch.as_tensor(array, device="cuda") for array in arrays]
    q, k, v, o = arrays
    _, lse = api.attention(q, k, v, **case.options, return_lse=True, kernel=kernel, out=o)
    buffer = out.buffer.copy_to_host()
    target.check(buffer)
    lse = lse.cpu().numpy() if hasattr(lse, "cpu") else lse.copy_to_host()
    return testing.Placed(buffer, target.shape, target.strides, target.offset).view, lse


class OnGpu:
    """A placed array on the GPU, its layout kept, for any library that takes `__cuda_array_interface__`."""

    def __init__(self, placed: testing.Placed):
        self.buffer = numpy_arrays.to_device(placed.buffer, None)
        self.placed = placed

    @property
    def __cuda_array_interface__(self) -> dict:
        item = self.placed.buffer.itemsize
        address, read_only = self.buffer.__cuda_array_interface__["data"]
        return {
            "version": 3,
            "shape": self.placed.shape,
            "strides": tuple(item * stride for stride in self.placed.strides),
            "typestr": self.placed.buffer.dtype.str,
            "data": (address + item * self.placed.offset, read_only),
        }


def lost_gpu() -> str | None:
    """Why the GPU runs nothing more in this process, as after an access outside memory; None if it does."""
    try:
        launch.synchronize(0)
    except launch.DriverError as error:
        return str(error)
    return None
