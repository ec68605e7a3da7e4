"""Mutants of a kernel file: its source with one small fault planted in the code that runs on the device.

Mutated are the functions defined inside `build` functions, and verbs. A mutant differs from the file in one line, so
that line numbers of messages stay those of the file.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_ORDERING = re.compile(r"(^|_)(sync\w*|wait|commit)(_|$)")
_SWAPS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted fault."""

    description: str
    line: int
    text: str
    """The line before the fault, stripped; with the description it identifies the mutant."""
    source: str
    """The whole file with the fault."""


@dataclass(frozen=True, slots=True)
class _Edit:
    description: str
    start: tuple[int, int]
    end: tuple[int, int]
    """(line, byte in the line), as `ast` counts them."""
    replacement: str


def mutants(path_or_module: str | Path | ModuleType) -> list[Mutant]:
    """All mutants of a file of kernels or verbs, in the order of its lines."""
    if isinstance(path_or_module, ModuleType):
        path_or_module = inspect.getsourcefile(path_or_module)
    source = Path(path_or_module).read_text(encoding="utf-8")
    edits = [
        edit
        for function in _device_functions(ast.parse(source))
        for statement in function.body
        for edit in _edits(statement, source)
    ]
    return [_apply(edit, source) for edit in sorted(edits, key=lambda edit: (edit.start, edit.description))]


def _device_functions(node, in_build: bool = False) -> Iterator[ast.FunctionDef]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield from _device_functions(child, in_build)
        elif in_build or any(isinstance(d, ast.Name) and d.id == "verb" for d in child.decorator_list):
            yield child
        else:
            yield from _device_functions(child, child.name.startswith("build"))


def _edits(tree, source: str) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _ORDERING.search(_called(node.value)):
                yield _replace(node, f"drop `{ast.unparse(node)}`", "pass")
        elif isinstance(node, ast.Subscript):
            yield from _shifts(node, source)
        elif isinstance(node, (ast.If, ast.IfExp)):
            yield from _dropped(node.test)
        elif isinstance(node, ast.Assign):
            yield from _dropped(node.value)
        elif isinstance(node, ast.Call) and _called(node) in ("max", "min"):
            other = "min" if _called(node) == "max" else "max"
            yield _replace(node.func, f"{_called(node)} -> {other} in `{ast.unparse(node)}`", other)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            yield _between(node, node.target, node.value, old, new, source)
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if type(op) in _SWAPS:
                    yield _between(node, left, right, *_SWAPS[type(op)], source)


def _called(call: ast.Call) -> str:
    """Last part of the name of what is called."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def _shifts(node: ast.Subscript, source: str) -> Iterator[_Edit]:
    # A length is no element of an array.
    if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return
    several = isinstance(node.slice, ast.Tuple)
    for i, index in enumerate(node.slice.elts if several else [node.slice]):
        where = f"subscript {i} of" if several else "the subscript of"
        replacement = f"({ast.get_source_segment(source, index)}) + 1"
        yield _replace(index, f"add 1 to {where} `{ast.unparse(node)}`", replacement)


def _dropped(test) -> Iterator[_Edit]:
    """The comparisons of a test or condition, each made true."""
    if isinstance(test, ast.Compare):
        yield _replace(test, f"drop the test `{ast.unparse(test)}`", "True")
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _dropped(part)


def _replace(node, description: str, replacement: str) -> _Edit:
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return _Edit(description, start, end, replacement)


def _between(node, left, right, old: str, new: str, source: str) -> _Edit:
    """Replace the operator between two operands of `node`."""
    lines = source.encode().splitlines(keepends=True)
    line, byte = left.end_lineno, left.end_col_offset
    while (at := lines[line - 1].find(old.encode(), byte)) < 0:
        line, byte = line + 1, 0
    return _Edit(f"{old} -> {new} in `{ast.unparse(node)}`", (line, at), (line, at + len(old)), new)


def _apply(edit: _Edit, source: str) -> Mutant:
    lines = source.encode().splitlines(keepends=True)
    (first, start), (last, end) = edit.start, edit.end
    before, after = lines[first - 1][:start], lines[last - 1][end:]
    text = lines[first - 1].decode().strip()
    # Lines that the replacement swallows stay as empty ones.
    swallowed = [b"\n"] * (last - first)
    lines[first - 1 : last] = [before + edit.replacement.encode() + after, *swallowed]
    return Mutant(edit.description, first, text, b"".join(lines).decode())
