"""Disk cache of machine code, keyed by everything that the code is made from.

A key covers the text of every module of ours and of the user's that the kernel reaches through the names it uses,
their code as it was imported, the kernel's own code and constants, the compiler's flags, the architecture and the
versions of the tools. An edit to any of them, in any file, makes a new key, and one after the import cannot put the
old code under the new text's key; nothing depends on file times.

An entry is one file: a digest of the rest, a line of JSON, then the cubin. It is written to a temporary file and
renamed, so that many processes may start cold at once. An entry that does not match its digest counts as missing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import sys
import sysconfig
import tempfile
import types as python_types
import warnings
from enum import EnumType
from functools import cache as memoise
from pathlib import Path

import numpy as np
from cuda.bindings import nvjitlink, nvvm

ENVIRONMENT_VARIABLE = "NUMBA_ATTN_CACHE_DIR"
TOOLS = ("numba", "numba-cuda", "llvmlite", "cuda-core")


def directory() -> Path:
    """`$NUMBA_ATTN_CACHE_DIR`, else `numba_attn` in the user's cache directory; an absolute path.

    Raises OSError if there is none, as where the user has no home directory.
    """
    try:
        if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
            return Path(chosen).expanduser().absolute()
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        else:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base).absolute() / "numba_attn"
    except RuntimeError:
        raise FileNotFoundError("there is no home directory" + (f" for {chosen}" if chosen else "")) from None


def problem() -> str | None:
    """One line that says why nothing can be kept in the directory, or None. Makes nothing."""
    try:
        folder = directory()
    except OSError as error:
        return f"cannot write the cache: {error} (${ENVIRONMENT_VARIABLE} moves it)"
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir():
        why = f"{nearest} is no directory"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"no permission to write in {nearest}"
    else:
        return None
    return f"cannot write the cache in {folder}: {why} (${ENVIRONMENT_VARIABLE} moves it)"


def usage() -> tuple[int, int]:
    """Entries in the directory, and their bytes. Raises OSError if there is none."""
    sizes = [entry.stat().st_size for entry in directory().glob("*.cubin")]
    return len(sizes), sum(sizes)


def key(function, facts: dict) -> str | None:
    """Digest of everything that decides the machine code of `function` under `facts`.

    None if not all of it can be seen: a module's file is gone, or a function names no module. Nothing is kept then.
    """
    seen = _Sources()
    seen.add(function)
    # How arguments are lowered, and the linker's options.
    for module in ("numba_attn.tensor", "numba_attn.launch.compiler"):
        seen.add_module(module)
    parts = {"facts": facts, "tools": tool_versions(), "sources": seen.digests(), "values": seen.values}
    if not seen.is_complete:
        return None
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


@memoise
def tool_versions() -> dict[str, str | None]:
    """Versions of what takes part in compiling; NVVM and nvJitLink say theirs, wherever they come from."""
    versions: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions | {"nvvm": str(nvvm.version()), "nvjitlink": str(nvjitlink.version())}


class _Sources:
    """Walks from a function through the names that it uses, collecting module texts and constant values."""

    def __init__(self):
        self.modules: set[str] = set()
        self.values: list = []
        self.is_complete = True
        self._visited: set[int] = set()

    def digests(self) -> dict[str, tuple[str, str]]:
        """Of each module, its text as it is now and its code as it was imported."""
        try:
            return {name: (_text_digest(sys.modules[name]), _code_digest(sys.modules[name])) for name in self.modules}
        except OSError:
            self.is_complete = False
            return {}

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
            self.add_module(value.__name__)
        elif hasattr(value, "py_func"):
            self.add(value.py_func, name)
        elif hasattr(value, "_defn"):  # an intrinsic
            self.add(value._defn, name)
        elif isinstance(value, python_types.FunctionType):
            self._add_function(value)
        elif isinstance(value, EnumType):
            self.add([(member.name, member.value) for member in value], name)
        elif isinstance(value, np.ndarray):
            self.values.append((name, str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()))
        else:
            self.values.append((name, type(value).__qualname__, _shown(value)))

    def _add_function(self, function) -> None:
        # A function made by `exec` without a `__name__`.
        if function.__module__ in (None, "builtins"):
            self.is_complete = False
            return
        if _is_tool(function.__module__):
            return
        self.add_module(function.__module__)
        self.values += _facts_of_code(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: cell.cell_contents for name, cell in cells}
        for default in function.__defaults__ or ():
            self.add(default, function.__name__)
        self._add_names(closure, function.__globals__, names=_names(function.__code__) | closure.keys())

    def _add_names(self, *scopes: dict, names: set[str]) -> None:
        """What the names stand for, those of `module.name` too: a module's text may be newer than what it holds."""
        todo, modules = list(scopes), set()
        while todo:
            scope = todo.pop(0)
            for name in sorted(names & scope.keys()):
                value = scope[name]
                self.add(value, name)
                if isinstance(value, python_types.ModuleType) and not (_is_tool(value.__name__) or value in modules):
                    modules.add(value)
                    todo.append(vars(value))

    def add_module(self, name: str) -> None:
        """Count the text of a module, and of the modules that it names; tools count by their version."""
        module = sys.modules.get(name)
        if name in self.modules or getattr(module, "__file__", None) is None or _is_tool(name):
            return
        self.modules.add(name)
        # What a module of ours names, it may bake into its verbs when they are made.
        for value in vars(module).values():
            if isinstance(value, python_types.ModuleType):
                self.add_module(value.__name__)
            elif isinstance(getattr(value, "__module__", None), str):
                self.add_module(value.__module__)


def _shown(value) -> str:
    """The value as text that is the same in every process: sets sorted, addresses left out."""
    if isinstance(value, frozenset | set):
        return repr(sorted(map(repr, value)))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


@memoise
def _is_tool(name: str) -> bool:
    """Whether a module belongs to Python or to a package that counts by its version."""
    if name.split(".")[0] in ("numba", "llvmlite", "numpy", "cuda", "numba_cuda", "torch", "cupy", "builtins"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return file.startswith(sysconfig.get_paths()["stdlib"] + os.sep) and "site-packages" not in file


def _names(code) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            names |= _names(constant)
    return names


def _text_digest(module) -> str:
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


def _code_digest(module) -> str:
    """Of the functions and methods that the module has defined: of some, like lowerings, no kernel knows a name."""
    facts = []
    for name, value in sorted(vars(module).items()):
        if getattr(value, "__module__", None) == module.__name__:
            for member in [vars(value)[key] for key in sorted(vars(value))] if isinstance(value, type) else [value]:
                function = _function_of(member)
                if isinstance(function, python_types.FunctionType):
                    facts.append((name, _kept_digest(function.__code__)))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _function_of(value):
    """What a decorator was given: Numba's, a method's, or another that keeps it."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    # Not by `getattr`: objects may make up any attribute.
    own = getattr(value, "__dict__", {})
    return next((own[name] for name in ("py_func", "_defn", "__wrapped__") if name in own), value)


@memoise
def _kept_digest(code) -> str:
    return hashlib.sha256(repr(_facts_of_code(code)).encode()).hexdigest()


def _facts_of_code(code) -> list[tuple]:
    facts = [(code.co_name, hashlib.sha256(code.co_code).hexdigest(), code.co_names, code.co_varnames)]
    for constant in code.co_consts:
        is_code = isinstance(constant, python_types.CodeType)
        facts += _facts_of_code(constant) if is_code else [(code.co_name, _shown(constant))]
    return facts


def read(entry: str | None) -> tuple[dict, bytes] | None:
    """The report and cubin of an entry, or None if it is missing or broken."""
    if entry is None:
        return None
    try:
        digest, _, content = (directory() / f"{entry}.cubin").read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            return None
        report, _, cubin = content.partition(b"\n")
        return json.loads(report), cubin
    except (OSError, ValueError):
        return None


def store(entry: str | None, report: dict, cubin: bytes) -> None:
    """Store an entry. Raises OSError if it cannot be stored."""
    if entry is None:
        raise OSError("cannot write the cache: not all sources of the kernel are there")
    content = json.dumps(report).encode() + b"\n" + cubin
    try:
        folder, part = directory(), None
    except OSError as error:
        raise OSError(f"cannot write the cache: {error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            part = Path(file.name)
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        os.replace(part, folder / f"{entry}.cubin")
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        raise OSError(f"cannot write the cache in {folder} ({error})") from error


_warned = False


def write(entry: str | None, report: dict, cubin: bytes) -> None:
    """Store an entry, if it has a key; a directory that cannot be written costs one warning and nothing else."""
    global _warned
    if entry is None:
        return
    try:
        store(entry, report, cubin)
    except OSError as error:
        if not _warned:
            _warned = True
            warnings.warn(f"kernels are compiled anew in each process: {error}", stacklevel=3)
