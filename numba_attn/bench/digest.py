"""Which code a result was measured on: a digest that changes with the machine code's sources and with nothing else.

It covers the syntax trees of the kernel's file and of every module of the package that its imports reach, the config
and launches for the problem, and the compiler's flags. Comments, docstrings and formatting do not count, and neither
does the version of Python that computes it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from numba_attn.kernel import Kernel
from numba_attn.launch import compiler
from numba_attn.problem import Device, Problem

PACKAGE = Path(__file__).resolve().parents[1]
LENGTH = 16  # hexadecimal digits
ALWAYS = ("tensor.py",)  # how every kernel's accesses are lowered


def code_digest(kernel: Kernel, problem: Problem, device: Device) -> str:
    """Digest of all that decides the kernel's machine code for a problem on a device."""
    config = kernel.config(problem, device)
    parts = {
        "trees": trees(file_of(kernel)),
        "config": described(config),
        "launches": [described(launch) for launch in kernel.launches(problem, config)],
        "flags": [compiler.FLAGS, compiler.LINK_FLAGS, device.arch],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:LENGTH]


def file_of(kernel: Kernel) -> Path:
    return Path(sys.modules[kernel.launches.__module__].__file__).resolve()


def trees(file: Path, package: Path = PACKAGE) -> dict[str, str]:
    """Digests of the syntax trees of a kernel's file and of the modules that it reaches, by path."""
    found: dict[str, str] = {}
    todo = [file, *(package / name for name in ALWAYS)]
    while todo:
        path = todo.pop()
        name = path.relative_to(package).as_posix() if path.is_relative_to(package) else path.name
        if name not in found:
            source = path.read_text(encoding="utf-8")
            found[name] = tree_digest(source)
            todo += imported(source, path, package)
    return found


@cache
def tree_digest(source: str) -> str:
    return hashlib.sha256(canonical(ast.parse(source)).encode()).hexdigest()


def canonical(node) -> str:
    """A syntax tree as text, without positions, docstrings and fields that some versions of Python alone have."""
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__} {node.value!r}"
    if isinstance(node, ast.AST):
        parts = {name: value for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment")}
        # Fields that are empty are absent: a newer Python has more of them.
        filled = (f"{name}={canonical(value)}" for name, value in parts.items() if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(filled)})"
    if isinstance(node, list):
        return f"[{', '.join(canonical(item) for item in node if not _is_docstring(item))}]"
    return repr(node)


def _is_docstring(node) -> bool:
    """Whether a statement is a lone string, which does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def imported(source: str, path: Path, package: Path) -> Iterator[Path]:
    """Files of the package's modules that a source imports; a file outside it may import its neighbours too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            base = node.module.split(".")
            names = [base, *([*base, alias.name] for alias in node.names)]
        elif isinstance(node, ast.ImportFrom) and path.is_relative_to(package):
            parents = path.relative_to(package.parent).parts[: -node.level]
            base = [*parents, *(node.module.split(".") if node.module else [])]
            names = [base, *([*base, alias.name] for alias in node.names)]
        else:
            continue
        for root, *rest in names:
            if root == package.name and rest:
                file = package.joinpath(*rest)
                candidates = file.with_suffix(".py"), file / "__init__.py"
                yield from (candidate for candidate in candidates if candidate.is_file())
            elif not path.is_relative_to(package) and (file := path.with_name(f"{root}.py")).is_file():
                yield file


def described(value) -> str:
    """A record of compile-time facts as text that is the same in every process; functions by their names."""
    if is_dataclass(value):
        parts = (f"{field.name}={described(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(described, value))}]"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
