"""The CUDA driver: devices, loading machine code, launching it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial

from cuda.bindings import driver as cu

from numba_attn.kernel import Launch
from numba_attn.launch.compiler import Binary
from numba_attn.problem import Device

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*, the keys of a launch's `extra`
# What a launch answers where the kernel's device is not this thread's current one, or there is none.
_ELSEWHERE = (cu.CUresult.CUDA_ERROR_INVALID_CONTEXT, cu.CUresult.CUDA_ERROR_INVALID_HANDLE)
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_*

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


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the dimensions of a thread block cluster, or 1 for what is on."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    ]


@cache
def _library() -> ctypes.CDLL:
    """libcuda by ctypes, for the calls of every launch: a fraction of the host time of the general binding."""
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


class LoadedKernel:
    """One kernel's machine code on one device."""

    def __init__(self, binary: Binary, device_index: int, smem_bytes: int):
        self.binary = binary
        self.device_index = device_index
        self.smem_bytes = smem_bytes
        self._cubin = binary.cubin  # the driver may read it until the library is unloaded
        with _entered(device_index):
            self._library = _check(cu.cuLibraryLoadData(self._cubin, [], [], 0, [], [], 0))
            kernel = _check(cu.cuLibraryGetKernel(self._library, binary.entry.encode()))
            if smem_bytes + binary.static_smem_bytes > 48 * 1024:  # what needs no opting in
                attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(cu.cuKernelSetAttribute(attribute, smem_bytes, kernel, _check(cu.cuDeviceGet(device_index))))
            # The kernel as a function of this device's context: what launches without a look-up.
            self.function = int(_check(cu.cuKernelGetFunction(kernel)))


class Launcher:
    """One grid of a loaded kernel with its argument buffer, for one thread.

    `words[i]` and `floats[i]` write the buffer in units of 8 and 4 bytes.
    """

    def __init__(self, kernel: LoadedKernel, launch: Launch, arguments: bytes):
        self._kernel = kernel
        self._buffer = ctypes.create_string_buffer(arguments, -(-len(arguments) // 8) * 8)
        view = memoryview(self._buffer).cast("B")
        self.words, self.floats = view.cast("Q"), view.cast("f")
        self._size = ctypes.c_size_t(len(arguments))
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(self._buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END
        )
        self._config = _LaunchConfig((launch.grid, 1, 1), (launch.threads, 1, 1), kernel.smem_bytes)
        values = {_CLUSTER_DIMENSION: launch.cluster} if launch.cluster > 1 else {}
        if launch.is_beside:
            values[_PROGRAMMATIC_STREAM_SERIALIZATION] = 1
        self._attributes = (_Attribute * len(values))(
            *(_Attribute(kind, value=(value, 1, 1)) for kind, value in values.items())
        )
        self._config.attributes, self._config.n_attributes = ctypes.addressof(self._attributes), len(values)
        config, extra = ctypes.addressof(self._config), ctypes.addressof(self._extra)
        self._launch = partial(_library().cuLaunchKernelEx, config, kernel.function, None, extra)

    def launch(self, stream: int) -> None:
        """Start the kernel on `stream`; the current device stays what it was."""
        self._config.stream = stream
        status = self._launch()
        if status and status in _ELSEWHERE:
            with _entered(self._kernel.device_index):
                status = self._launch()
        if status:
            where = f"launching {self._kernel.binary.entry} on device {self._kernel.device_index}"
            raise DriverError(f"{where}: {_describe(status)}")


class LauncherOfThread(threading.local):
    """A `Launcher` of its own for each thread that asks."""

    def __init__(self, *arguments):
        self.launcher = Launcher(*arguments)
