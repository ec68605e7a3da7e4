"""The CUDA driver: devices, loading machine code, launching it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache

from cuda.bindings import driver as cu

from numba_attn.launch.compiler import Binary
from numba_attn.problem import Device

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*, the keys of cuLaunchKernel's `extra`

_process = os.getpid()


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


def _check(result):
    """Unpack what a driver call returned, or raise what it says."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        raise DriverError(_describe(int(status)))
    return values[0] if len(values) == 1 else values or None


def _describe(status: int) -> str:
    if os.getpid() != _process and status == cu.CUresult.CUDA_ERROR_NOT_INITIALIZED:
        return "CUDA was used before this process was forked; start it with the spawn method instead"
    code = cu.CUresult(status)
    text = cu.cuGetErrorString(code)[1]
    return f"{code.name}: {text.decode() if text else 'unknown error'}"


@cache
def _initialised(process: int) -> None:
    _check(cu.cuInit(0))


def initialise() -> None:
    """Initialise the driver in this process; raises `DriverError` where there is none."""
    try:
        _initialised(os.getpid())
    except DriverError:
        raise
    except Exception as error:  # cuda.bindings raises bare RuntimeErrors where libcuda is missing
        raise DriverError(f"no CUDA driver: {error}") from error


def device_count() -> int:
    """GPUs that the driver shows; 0 where there is no driver."""
    try:
        initialise()
        return _check(cu.cuDeviceGetCount())
    except DriverError:
        return 0


def driver_version() -> tuple[int, int] | None:
    """CUDA version that the driver supports, or None where there is no driver."""
    try:
        version = _check(cu.cuDriverGetVersion())
    except Exception:  # as in `initialise`
        return None
    return version // 1000, version % 1000 // 10


@cache
def device_facts(index: int) -> Device:
    """What choices may know of GPU `index`."""
    initialise()
    device = _check(cu.cuDeviceGet(index))
    attribute = cu.CUdevice_attribute

    def read(name: str) -> int:
        return _check(cu.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    return Device(
        name=_check(cu.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
        cc=(read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        sm_count=read("MULTIPROCESSOR_COUNT"),
        smem_per_block_bytes=read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=read("L2_CACHE_SIZE"),
    )


@cache
def _primary_context(index: int) -> int:
    initialise()
    return int(_check(cu.cuDevicePrimaryCtxRetain(_check(cu.cuDeviceGet(index)))))


@contextmanager
def _entered(index: int):
    """GPU `index` as this thread's current device."""
    _check(cu.cuCtxPushCurrent(_primary_context(index)))
    try:
        yield
    finally:
        _check(cu.cuCtxPopCurrent())


def free_bytes(index: int) -> int:
    """Memory of GPU `index` that nobody has taken."""
    with _entered(index):
        return _check(cu.cuMemGetInfo())[0]


def synchronize(index: int) -> None:
    """Wait for all work on GPU `index`; raises `DriverError` if any of it failed."""
    with _entered(index):
        _check(cu.cuCtxSynchronize())


def elapsed_ms(work: Callable[[], object], index: int = 0, stream: int = 0, calls: int = 1) -> float:
    """GPU time between two events on `stream`, before and after `calls` calls of `work`, per call; waits for them."""
    with _entered(index):
        start, stop = _check(cu.cuEventCreate(0)), _check(cu.cuEventCreate(0))
        try:
            _check(cu.cuEventRecord(start, stream))
            for _ in range(calls):
                work()
            _check(cu.cuEventRecord(stop, stream))
            _check(cu.cuEventSynchronize(stop))
            return _check(cu.cuEventElapsedTime(start, stop)) / calls
        finally:
            for event in (start, stop):
                _check(cu.cuEventDestroy(event))


@cache
def _library() -> ctypes.CDLL:
    """libcuda by ctypes, for the calls of every launch: a fifth of the host time of the general binding."""
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    library.cuCtxGetCurrent.argtypes = [ctypes.c_void_p]
    library.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
    library.cuCtxPopCurrent_v2.argtypes = [ctypes.c_void_p]
    return library


class _Current(threading.local):
    """Where this thread's current context is written by the driver."""

    def __init__(self):
        self.context = ctypes.c_void_p()
        self.address = ctypes.addressof(self.context)


_current = _Current()


class LoadedKernel:
    """One kernel's machine code on one device, ready to launch."""

    def __init__(self, binary: Binary, device_index: int, smem_bytes: int):
        self.binary = binary
        self.device_index = device_index
        self.smem_bytes = smem_bytes
        self._context = _primary_context(device_index)
        self._cuda = _library()
        self._cubin = binary.cubin  # the driver may read it until the library is unloaded
        self._library = _check(cu.cuLibraryLoadData(self._cubin, [], [], 0, [], [], 0))
        kernel = _check(cu.cuLibraryGetKernel(self._library, binary.entry.encode()))
        if smem_bytes + binary.static_smem_bytes > 48 * 1024:  # what needs no opting in
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(cu.cuKernelSetAttribute(attribute, smem_bytes, kernel, _check(cu.cuDeviceGet(device_index))))
        # The driver takes a context-free kernel handle wherever it takes a function.
        self._function = int(kernel)

    def launch(self, grid: int, threads: int, stream: int, arguments: bytes) -> None:
        """Start the kernel on `stream` with a packed argument buffer; the current device stays what it was."""
        cuda = self._cuda
        size = ctypes.c_size_t(len(arguments))
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.cast(arguments, ctypes.c_void_p), _BUFFER_SIZE, ctypes.addressof(size), _END
        )
        cuda.cuCtxGetCurrent(_current.address)
        elsewhere = _current.context.value != self._context
        if elsewhere:
            self._require(cuda.cuCtxPushCurrent_v2(self._context))
        status = cuda.cuLaunchKernel(
            self._function, grid, 1, 1, threads, 1, 1, self.smem_bytes, stream, None, ctypes.addressof(extra)
        )
        if elsewhere:
            cuda.cuCtxPopCurrent_v2(_current.address)
        self._require(status)

    def _require(self, status: int) -> None:
        if status:
            raise DriverError(f"launching {self.binary.entry} on device {self.device_index}: {_describe(status)}")
