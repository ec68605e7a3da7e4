"""Mutants of a kernel file: its source with one small fault planted in the code that runs on the device.

Mutated are the functions defined inside `build` functions, verbs, unrolled verbs, and the functions of the same file
that these call while they unroll. A mutant differs from the file in one line, so that line numbers of messages stay
those of the file.
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
    tree = ast.parse(source)
    unrolled = [*_decorated(tree, "unrolled"), *_helpers(tree)]
    edits = [edit for function in _device_functions(tree) for edit in _edits(function, source)]
    edits += [edit for function in unrolled for edit in (*_edits(function, source), *_shortened(function, source))]
    return [_apply(edit, source) for edit in sorted(edits, key=lambda edit: (edit.start, edit.description))]


def _device_functions(node, in_build: bool = False) -> Iterator[ast.FunctionDef]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield from _device_functions(child, in_build)
        elif in_build or "verb" in _decorators(child):
            yield child
        else:
            yield from _device_functions(child, child.name.startswith("build"))


def _decorated(tree, name: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and name in _decorators(node)]


def _decorators(function: ast.FunctionDef) -> list[str]:
    return [decorator.id for decorator in function.decorator_list if isinstance(decorator, ast.Name)]


def _helpers(tree: ast.Module) -> list[ast.FunctionDef]:
    """Functions at the top that unrolled verbs call, and those that take an `e` as these do, for other files' verbs."""
    top = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list}
    found = {name: node for name, node in top.items() if node.args.args and node.args.args[0].arg == "e"}
    todo = [*_decorated(tree, "unrolled"), *found.values()]
    while todo:
        for node in ast.walk(todo.pop()):
            if isinstance(node, ast.Name) and node.id in top and node.id not in found:
                found[node.id] = top[node.id]
                todo.append(top[node.id])
    return list(found.values())


def _edits(function: ast.FunctionDef, source: str) -> Iterator[_Edit]:
    for node in (node for statement in function.body for node in ast.walk(statement)):
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
        elif isinstance(node, ast.Call) and _called(node) == "where":
            yield from _dropped(node.args[0])
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            yield _between(node, node.target, node.value, old, new, source)
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if type(op) in _SWAPS:
                    yield _between(node, left, right, *_SWAPS[type(op)], source)


def _shortened(function: ast.FunctionDef, source: str) -> Iterator[_Edit]:
    """Each loop that Python unrolls, without its last turn."""
    for node in ast.walk(function):
        if isinstance(node, (ast.For, ast.comprehension)):
            loop = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            replacement = f"list({ast.get_source_segment(source, node.iter)})[:-1]"
            yield _replace(node.iter, f"leave out the last turn of `{loop}`", replacement)


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
        if isinstance(index, ast.Slice):
            where, index = f"the start of {where}", index.lower
            if index is None:
                continue
        replacement = f"({ast.get_source_segment(source, index)}) + 1"
        yield _replace(index, f"add 1 to {where} `{ast.unparse(node)}`", replacement)


def _dropped(test) -> Iterator[_Edit]:
    """The comparisons of a test or condition, each made true."""
    if isinstance(test, ast.Compare):
        yield _replace(test, f"drop the test `{ast.unparse(test)}`", "True")
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _dropped(part)
    elif isinstance(test, ast.BinOp) and isinstance(test.op, ast.BitAnd):
        for part in (test.left, test.right):
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
