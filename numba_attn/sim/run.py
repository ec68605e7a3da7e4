"""The simulator's entries: one launch of any kernel, and one attention call."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from functools import partial
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from numba_attn.kernel import Kernel, Matmul, Part
from numba_attn.problem import H200, Geometry, Operand, Problem, check_precision, describe
from numba_attn.sim.blocks import GROUP, Grid
from numba_attn.sim.errors import SimulationError
from numba_attn.sim.lockstep import Hub
from numba_attn.sim.marks import COPIES
from numba_attn.sim.rebind import Binder, python_function
from numba_attn.sim.shared import FinerUnitsError
from numba_attn.sim.tensors import Log, Tensor

WORD = 4
MAX_THREADS_PER_BLOCK = 1024
MAX_CLUSTER = 8


def launch(function, grid, threads, args, smem_bytes: int = 0, cluster: int = 1) -> None:
    """Run a kernel on numpy arrays, in place.

    Args:
        function: a `@cuda.jit` kernel or its plain Python function.
        grid: blocks, an int or a tuple of up to three.
        threads: threads of a block, likewise; 1024 at most.
        args: the kernel's arguments: numpy arrays become global tensors, everything else is passed on as it is.
        smem_bytes: dynamic shared memory of a block.
        cluster: consecutive blocks of a thread block cluster, which run together.

    Raises:
        SimulationError: the kernel is at fault, or uses something that has no twin.
        ValueError: sizes that no GPU would launch.
    """
    names = python_function(function).__code__.co_varnames
    logs = [Log(arg.shape, np.ones(arg.shape, bool)) if isinstance(arg, np.ndarray) else None for arg in args]
    _launch(function, _dim3("grid", grid), _dim3("threads", threads), args, names, logs, smem_bytes, cluster)


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel=None,
    config=None,
    precision="fp32",
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`O = softmax(scale Q K^T + mask) V` by a kernel's own source.

    Args:
        q: fp32 [B, H, Lq, D], any strides.
        k: fp32 [B, H, Lk, D], any strides.
        v: fp32 [B, H, Lk, Dv], any strides.
        causal: key j counts for row i only if i >= j.
        scale: multiplies Q K^T. None: 1 / sqrt(D).
        enable_gqa: fewer heads in `k` and `v` than in `q`: not there yet.
        return_lse: also return the log-sum-exp of the scores.
        kernel: a `Kernel`, registered or not, or a registered one's name. None: the first that supports the problem.
        config: the kernel's config. None: its `small_config`.
        precision: "fp32", or "tf32" for one product of 11 significant bits where the kernel has that mode.

    Returns:
        O: fp32 [B, H, Lq, Dv]; with `return_lse`, (O, lse) with lse fp32 [B, H, Lq].

    As on a GPU no kernel runs where no result depends on an input, and none is given an array without columns.

    Raises:
        SimulationError: the kernel is at fault.
        ValueError: shapes that do not fit together, an unknown kernel or precision, or a problem that the kernel does
            not support.
        TypeError: an argument that is not an fp32 numpy array, a scale that is no number, or a flag that is no bool.
        NotImplementedError: grouped heads.
    """
    check_precision(precision)
    for name, flag in {"causal": causal, "enable_gqa": enable_gqa, "return_lse": return_lse}.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name} is a {type(flag).__name__}: True or False is needed")
    scale = None if scale is None else _as_float(scale)
    given, geometry = _read(q, k, v, is_causal=bool(causal), enable_gqa=bool(enable_gqa), precision=precision)
    candidates = _candidates(kernel)
    if geometry.nothing_to_launch(return_lse):
        o, lse = np.zeros(geometry.o_shape, np.float32), np.full(geometry.lse_shape, -np.inf, np.float32)
        return (o, lse) if return_lse else o
    return _simulated(_choose(candidates, geometry.problem), config, geometry, given, scale, return_lse)


def of_kernel(kernel: Kernel, q, k, v, causal: bool, return_lse: bool) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """What the kernel itself makes of them, without a key too: `attention` then asks no kernel."""
    given, geometry = _read(q, k, v, is_causal=causal)
    return _simulated(_choose([kernel], geometry.problem), None, geometry, given, None, return_lse)


def _read(q, k, v, **facts) -> tuple[list[np.ndarray], Geometry]:
    """The arrays as kernels can read them, and what is known of the call."""
    given = {name: _aligned(name, array) for name, array in (("q", q), ("k", k), ("v", v))}
    return list(given.values()), describe(*(_operand(name, array) for name, array in given.items()), **facts)


def _simulated(kernel: Kernel, config, geometry: Geometry, given: list[np.ndarray], scale, return_lse: bool):
    """O, or O and lse, of the kernel's launches."""
    problem = geometry.problem
    config = kernel.small_config(problem) if config is None else config
    scale = geometry.scale if scale is None else scale
    B, H, Lq, Dv = problem.B, problem.H, problem.Lq, problem.Dv
    arrays = dict(zip("QKV", _views(geometry, given), strict=True))
    arrays |= {"O": _poisoned((B, H, Lq, Dv)), "lse": _poisoned((B, H, Lq if return_lse else 0))}
    for name, space in kernel.workspace(problem, config).items():
        arrays[name] = _poisoned(space.shape, space.dtype)
    written = {name: np.zeros(array.shape, bool) for name, array in arrays.items() if name not in ("Q", "K", "V")}
    for step in kernel.launches(problem, config):
        if isinstance(step, Matmul):
            _multiply(step, arrays, written)
            continue
        names = [argument.name if isinstance(argument, Part) else str(argument) for argument in step.args]
        args = [np.float32(scale) if x == "scale" else x if isinstance(x, int) else _of(arrays, x) for x in step.args]
        # A launch races with none before it: its logs start empty.
        logs = [
            Log(arg.shape, _of(written, x)) if isinstance(arg, np.ndarray) else None
            for arg, x in zip(args, step.args, strict=True)
        ]
        function = step.build(step.config)
        sizes = (step.grid, 1, 1), (step.threads, 1, 1)
        _launch(function, *sizes, args, names, logs, step.smem_bytes, step.cluster)
    for name in ("O", "lse"):
        missing = np.argwhere(~written[name])
        if len(missing):
            first = ", ".join(map(str, missing[0]))
            what = f"{len(missing)} of {written[name].size} elements of {name} left unwritten"
            raise SimulationError(f"{what}, the first {name}[{first}]; kernel `{kernel.name}`, {problem}")
    o = arrays["O"][..., : geometry.o_shape[-1]]
    return (o, arrays["lse"]) if return_lse else o


def _of(arrays: dict[str, np.ndarray], operand: str | Part) -> np.ndarray | None:
    """The array, or the part of it, that a step names."""
    name, index = (operand.name, operand.index) if isinstance(operand, Part) else (operand, ())
    return arrays[name][index] if name in arrays else None


def _multiply(step: Matmul, arrays: dict[str, np.ndarray], written: dict[str, np.ndarray]) -> None:
    """A product of the caller's library: fp32 sums, here in order of the index and the same on every machine."""
    for operand in (step.left, step.right):
        known = _of(written, operand)
        if known is not None and not known.all():
            raise SimulationError(f"product of {operand}: {np.count_nonzero(~known)} elements that nobody has written")
    left, right, out = (_of(arrays, operand) for operand in (step.left, step.right, step.out))
    right = right.swapaxes(1, 2) if step.transpose_right else right
    out[...] = 0
    with np.errstate(all="ignore"):
        for k in range(left.shape[2]):
            out += left[:, :, k, None] * right[:, k, None]
    _of(written, step.out)[...] = True


def _launch(function, grid_dim, block_dim, args, names, logs, smem_bytes: int, cluster: int) -> None:
    if not 1 <= prod(block_dim) <= MAX_THREADS_PER_BLOCK:
        raise ValueError(f"threads: a block has 1 to {MAX_THREADS_PER_BLOCK} threads, not {prod(block_dim)}")
    if not 1 <= cluster <= MAX_CLUSTER or grid_dim[0] % cluster:
        raise ValueError(f"cluster: 1 to {MAX_CLUSTER} blocks that divide the grid's {grid_dim[0]}, not {cluster}")
    if cluster > 1 and cluster * -(-prod(block_dim) // GROUP) * GROUP > COPIES:
        raise ValueError(f"cluster: of more than {COPIES} threads in all, which is not simulated")
    function = python_function(function)
    outputs = [arg for arg in args if isinstance(arg, np.ndarray)]
    # A view with smaller elements than the cells of shared memory asks for smaller cells: start again.
    before = [array.copy() for array in outputs]
    written = [None if log is None or log.written is None else log.written.copy() for log in logs]
    unit = WORD
    while True:
        grid = Grid(function.__name__, function.__code__, grid_dim, block_dim, smem_bytes, unit, cluster)
        try:
            _run(grid, function, args, names, logs)
            return
        except FinerUnitsError as finer:
            unit = finer.unit
        for array, values in zip(outputs, before, strict=True):
            if array.flags.writeable:
                array[...] = values
        for log, values in zip(logs, written, strict=True):
            if log is not None:
                log.writes.fill(None)
                if values is not None:
                    log.written[...] = values


def _run(grid: Grid, function, args, names, logs) -> None:
    # Each thread computes under this context: fp32 overflow and the like give inf and nan, as on a GPU.
    with np.errstate(all="ignore"):
        context = contextvars.copy_context()
    hub = Hub(grid, context)
    binders = [Binder(thread) for thread in hub.threads]
    programs = []
    for thread, binder in zip(hub.threads, binders, strict=True):
        own = [
            arg if log is None else Tensor(thread, arg, log, name)
            for arg, name, log in zip(args, names, logs, strict=False)
        ]
        programs.append(partial(_call, binder, binder.function(function), own))
    for number in range(prod(grid.grid_dim) // grid.cluster):
        hub.run(number, programs)


def _call(binder: Binder, function, args, _) -> None:
    binder.cuda.start_block()
    function(*args)


def _dim3(name: str, size) -> tuple[int, int, int]:
    size = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if not 1 <= len(size) <= 3 or any(int(n) < 1 for n in size):
        raise ValueError(f"{name}: one to three lengths of at least 1, not {size}")
    return (*map(int, size), *(1,) * (3 - len(size)))


def _poisoned(shape, dtype="float32") -> np.ndarray:
    dtype = np.dtype(dtype)
    return np.full(shape, np.nan if dtype.kind == "f" else np.iinfo(dtype).min, dtype)


def _aligned(name: str, array) -> np.ndarray:
    """The array, or a copy of one whose elements do not lie at multiples of their size."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray) or array.dtype != np.float32:
        raise TypeError(f"{name}: a numpy array of float32 is needed")
    if array.ndim != 4:
        raise ValueError(f"{name}: four dimensions are needed, not {array.ndim}")
    return array if array.flags.aligned else array.copy()


def _as_float(scale) -> float:
    try:
        if not isinstance(scale, str | bytes):
            return float(scale)
    except OverflowError:
        raise ValueError("scale is beyond the range of floating-point numbers") from None
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"scale is a {type(scale).__name__}: a number or None is needed")


def _operand(name: str, array: np.ndarray) -> Operand:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Operand(name, array.shape, strides, str(array.dtype), pointer=array.ctypes.data)


def _views(geometry: Geometry, arrays) -> Iterator[np.ndarray]:
    """What kernels are given for Q, K and V: one zero, repeated, for an array without columns."""
    for name, array in zip("QKV", arrays, strict=True):
        shape, strides = getattr(geometry, name)
        memory = np.zeros(1, np.float32) if name in geometry.stand_ins else array
        yield as_strided(memory, shape, tuple(memory.itemsize * stride for stride in strides))


def _candidates(kernel) -> list[Kernel]:
    """The kernel asked for; all registered ones without it."""
    if not isinstance(kernel, Kernel | str | None):
        raise TypeError(f"kernel: a name or a Kernel is needed, not a {type(kernel).__name__}")
    if isinstance(kernel, Kernel):
        return [kernel]
    # Late, so that a broken kernel file does not break the simulator of another.
    from numba_attn.kernels import KERNELS

    known = [k for k in KERNELS if kernel in (None, k.name)]
    if not known:
        names = ", ".join(k.name for k in KERNELS)
        raise ValueError(f"kernel: no registered kernel is called {kernel!r}: there are {names}")
    return known


def _choose(candidates: list[Kernel], problem: Problem) -> Kernel:
    kernel = next((k for k in candidates if k.supports(problem, H200) is None), candidates[0])
    reason = kernel.supports(problem, H200)
    if reason is not None:
        raise ValueError(f"kernel: {kernel.name} does not support this problem: {reason}")
    return kernel
