"""Python function to cubin, without a GPU: Numba and NVVM to LTO-IR, nvJitLink to machine code.

Linking LTO-IR, not PTX, keeps `setmaxnreg` in force and reports registers and spills. Nothing here loads or runs
anything.
"""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

from numba import cuda
from numba.cuda import types

from numba_attn.kernel import OPERANDS, Launch, Part, Workspace
from numba_attn.launch import cache
from numba_attn.tensor import Tensor

FLAGS = {"fastmath": False, "output": "ltoir", "device": False, "abi": "numba"}
"""fastmath would flush denormals and approximate divisions: never for a kernel that is held to a class of accuracy."""
LINK_FLAGS = {"link_time_optimization": True, "ptxas_options": ["-v"]}

_compiling = threading.Lock()


def _after_fork() -> None:
    """Undo what a compilation in another thread of the parent had in hand."""
    global _compiling
    if _compiling.locked():
        gc.enable()
    _compiling = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def _compilation():
    """One compilation at a time, without garbage collections: they are a quarter of the time and find nothing."""
    with _compiling:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code of one kernel and what ptxas says of it."""

    cubin: bytes
    entry: str
    """The mangled name in the cubin."""
    registers: int
    spill_bytes: int
    """Bytes of spill stores plus spill loads."""
    stack_bytes: int
    static_smem_bytes: int

    @property
    def report(self) -> dict:
        return {k: v for k, v in asdict(self).items() if k != "cubin"}


_REPORTED = {field.name for field in fields(Binary)} - {"cubin"}


def argument_types(launch: Launch, workspace: Mapping[str, Workspace]) -> tuple:
    """Numba types of the kernel's parameters."""
    result = []
    for argument in launch.args:
        if argument == "scale" or isinstance(argument, int):
            result.append(types.float32 if argument == "scale" else types.int32)
            continue
        name, less = (argument.name, argument.dimensions_less) if isinstance(argument, Part) else (argument, 0)
        if name in OPERANDS:
            result.append(Tensor(types.float32, OPERANDS[name] - less))
        else:
            result.append(Tensor(getattr(types, workspace[name].dtype), len(workspace[name].shape) - less))
    return tuple(result)


def compute_capability(arch: str) -> tuple:
    """`sm_90a` as Numba spells it: (9, 0, "a")."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if match is None:
        raise ValueError(f"arch must be like sm_80, sm_90a or sm_120, not {arch!r}")
    major, minor, suffix = match.groups()
    return (int(major), int(minor), suffix) if suffix else (int(major), int(minor))


def binary(launch: Launch, workspace: Mapping[str, Workspace], arch: str, keep=cache.write) -> Binary:
    """The launch's machine code for `arch`, from the disk cache, or compiled now and given to `keep`."""
    function, signature, options = _inputs(launch, workspace)
    key = cache.key(function, {"signature": str(signature), "options": options, "arch": arch})
    report, cubin = cache.read(key) or ({}, b"")
    if set(report) == _REPORTED:
        return Binary(cubin=cubin, **report)
    with _compilation():
        made = _link(_ltoir(function, signature, options, arch), arch)
    keep(key, made.report, made.cubin)
    return made


def ptx(launch: Launch, workspace: Mapping[str, Workspace], arch: str) -> str:
    """The launch's PTX after link-time optimisation, for reading and for the compile gates."""
    function, signature, options = _inputs(launch, workspace)
    with _compilation():
        code, _ = _run_linker(_ltoir(function, signature, options, arch), arch, "ptx")
    return code.decode()


def _inputs(launch: Launch, workspace: Mapping[str, Workspace]) -> tuple:
    """What the compiler is given: the kernel, its signature and the flags."""
    options = {**FLAGS, "launch_bounds": (launch.threads, launch.min_blocks)}
    return launch.build(launch.config), types.void(*argument_types(launch, workspace)), options


def _ltoir(function, signature, options: dict, arch: str) -> bytes:
    code, _ = cuda.compile(function.py_func, signature, cc=compute_capability(arch), **options)
    return code


def _run_linker(ltoir: bytes, arch: str, target: str) -> tuple[bytes, str]:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=arch, ptx=target == "ptx", **LINK_FLAGS)
    linker = Linker(ObjectCode.from_ltoir(ltoir), options=options)
    code = bytes(linker.link(target).code)
    return code, linker.get_info_log()


def _link(ltoir: bytes, arch: str) -> Binary:
    cubin, log = _run_linker(ltoir, arch, "cubin")

    def total(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return Binary(
        cubin=cubin,
        entry=re.search(rb"\x00\.text\.(\w+)\x00", cubin).group(1).decode(),
        registers=total(r"Used (\d+) registers"),
        spill_bytes=total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        static_smem_bytes=total(r"(\d+) bytes smem"),
    )
