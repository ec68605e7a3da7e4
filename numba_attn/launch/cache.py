"""Disk cache of machine code, keyed by everything that the code is made from.

A key covers the text of every module of ours and of the user's that the kernel reaches through the names it uses,
its code and closure constants, the compiler's flags, the architecture and the versions of the tools. An edit to any
of them, in any file, makes a new key; nothing depends on file times.

An entry is one file: a line of JSON with a digest, then the cubin. It is written to a temporary file and renamed, so
that many processes may start cold at once. An entry that does not match its digest counts as missing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import types as python_types
import warnings
from functools import cache as memoise
from pathlib import Path

ENVIRONMENT_VARIABLE = "NUMBA_ATTN_CACHE_DIR"
TOOLS = ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc")


def directory() -> Path:
    """`$NUMBA_ATTN_CACHE_DIR`, else `numba_attn` in the user's cache directory."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "numba_attn"


def usage() -> tuple[int, int]:
    """Entries in the directory, and their bytes."""
    sizes = [entry.stat().st_size for entry in directory().glob("*.cubin")]
    return len(sizes), sum(sizes)


def key(function, facts: dict) -> str:
    """Digest of everything that decides the machine code of `function` under `facts`."""
    seen = _Sources()
    seen.add(function)
    parts = {"facts": facts, "tools": tool_versions(), "sources": seen.digests(), "values": seen.values}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


@memoise
def tool_versions() -> dict[str, str | None]:
    """Installed versions of what takes part in compiling; None where a tool comes from elsewhere than a wheel."""
    versions: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


class _Sources:
    """Walks from a function through the names that it uses, collecting module texts and constant values."""

    def __init__(self):
        self.modules: set[str] = set()
        self.values: list = []
        self._visited: set[int] = set()

    def digests(self) -> dict[str, str]:
        return {name: _text_digest(sys.modules[name]) for name in sorted(self.modules)}

    def add(self, value, name: str = "") -> None:
        if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
            self.values.append((name, repr(value)))
            return
        if id(value) in self._visited:
            return
        self._visited.add(id(value))
        if isinstance(value, tuple | list | set | frozenset):
            for item in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
                self.add(item, name)
        elif isinstance(value, python_types.ModuleType):
            self._add_module(value.__name__)
        elif hasattr(value, "py_func"):
            self.add(value.py_func, name)
        elif hasattr(value, "_defn"):  # an intrinsic
            self.add(value._defn, name)
        elif isinstance(value, python_types.FunctionType):
            self._add_function(value)
        else:
            # numpy scalars and Numba types say all about themselves in their repr.
            self.values.append((name, type(value).__qualname__, repr(value) if _is_plain(value) else ""))

    def _add_function(self, function) -> None:
        if not self._add_module(function.__module__):
            return
        self._add_code(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.add(cell.cell_contents, name)
        for default in function.__defaults__ or ():
            self.add(default, function.__name__)
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self.add(function.__globals__[name], name)

    def _add_code(self, code) -> None:
        self.values.append((code.co_name, hashlib.sha256(code.co_code).hexdigest()))
        for constant in code.co_consts:
            if isinstance(constant, python_types.CodeType):
                self._add_code(constant)
            else:
                # The order in which a set is shown differs from process to process.
                constant = sorted(constant, key=repr) if isinstance(constant, frozenset) else constant
                self.values.append((code.co_name, repr(constant)))

    def _add_module(self, name: str) -> bool:
        """Whether the module is one whose text counts: not of the tools, which count by their version."""
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None or name.split(".")[0] in _by_version():
            return False
        if name not in self.modules:
            self.modules.add(name)
            # What a module of ours names, it may bake into its verbs when they are made.
            for value in vars(module).values():
                if isinstance(value, python_types.ModuleType):
                    self._add_module(value.__name__)
                elif isinstance(getattr(value, "__module__", None), str):
                    self._add_module(value.__module__)
        return True


@memoise
def _by_version() -> frozenset[str]:
    return frozenset(sys.stdlib_module_names) | {"numba", "llvmlite", "numpy", "cuda", "numba_cuda", "torch", "cupy"}


def _is_plain(value) -> bool:
    return type(value).__module__.split(".")[0] in ("numpy", "numba", "numba_attn")


def _names(code) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            names |= _names(constant)
    return names


def _text_digest(module) -> str:
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


def read(entry: str) -> tuple[dict, bytes] | None:
    """The report and cubin of an entry, or None if it is missing or broken."""
    try:
        header, _, cubin = (directory() / f"{entry}.cubin").read_bytes().partition(b"\n")
        meta = json.loads(header)
        return (meta["report"], cubin) if meta["sha256"] == hashlib.sha256(cubin).hexdigest() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


_warned = False


def write(entry: str, report: dict, cubin: bytes) -> None:
    """Store an entry; a directory that cannot be written costs one warning and nothing else."""
    global _warned
    header = json.dumps({"report": report, "sha256": hashlib.sha256(cubin).hexdigest()}).encode()
    folder = directory()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            file.write(header + b"\n" + cubin)
        os.replace(file.name, folder / f"{entry}.cubin")
    except OSError as error:
        if not _warned:
            _warned = True
            warnings.warn(
                f"kernels are compiled anew in each process: cannot write the cache in {folder} ({error})", stacklevel=2
            )
