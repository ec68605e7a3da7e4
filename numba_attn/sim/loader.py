"""Loads a kernel from changed source: its own, or that of a module of the package that it depends on."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

PACKAGE = "numba_attn"


class Loader:
    """Executes sources as modules, from files in `folder`, so that messages can show their lines."""

    def __init__(self, path: Path, folder: Path, name: str):
        self.path = path
        self.folder = folder
        self.name = name
        self.source = path.read_text(encoding="utf-8")
        self.count = 0
        self.modules: list[str] = []
        """Modules of the package that the kernel depends on, each after those that it depends on itself."""
        self._imports: dict[str, set[str]] = {}
        self._visit(self.source)

    def kernel(self, source: str | None = None, module: str | None = None):
        """The kernel with `source` in place of that of `module`, or of its own file."""
        if module is None:
            return getattr(self._execute(self.path.stem, source or self.source), self.name)
        changed = {}
        originals = {name: sys.modules[name] for name in self.modules}
        try:
            for name in self.modules:
                # Who imports verbs from a changed module must import them anew.
                if name == module or self._imports[name] & changed.keys():
                    text = source if name == module else inspect.getsource(originals[name])
                    changed[name] = self._execute(name, text)
                    _install(name, changed[name])
            return getattr(self._execute(self.path.stem, self.source), self.name)
        finally:
            for name in changed:
                _install(name, originals[name])

    def reached(self) -> dict[str, list[range]]:
        """Lines of each module's top-level definitions that the kernel's file uses, directly or through others."""
        trees = {name: ast.parse(inspect.getsource(sys.modules[name])) for name in self.modules}
        imported = {name: _imported(tree) for name, tree in trees.items()}
        defined = {name: _defined(tree) for name, tree in trees.items()}
        lines: dict[str, list[range]] = {name: [] for name in self.modules}
        source = ast.parse(self.source)
        names = _imported(source)
        todo, seen = [*names.values(), *_used(source, names)], set()
        while todo:
            module, name = todo.pop()
            if (module, name) in seen or module not in trees:
                continue
            seen.add((module, name))
            node = defined[module].get(name)
            if node is None:
                todo += [imported[module][name]] if name in imported[module] else []
                continue
            lines[module].append(range(node.lineno, node.end_lineno + 1))
            todo += _used(node, imported[module])
            todo += [(module, inner.id) for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        return lines

    def _visit(self, source: str) -> set[str]:
        imported = {module for module, _ in _imported(ast.parse(source)).values()}
        for name in sorted(imported):
            if name not in self._imports:
                self._imports[name] = set()  # already, for modules that import each other
                self._imports[name] = self._visit(inspect.getsource(importlib.import_module(name)))
                self.modules.append(name)
        return imported

    def _execute(self, name: str, source: str):
        self.count += 1
        file = self.folder / f"{name.rpartition('.')[2]}_{self.count}.py"
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up.
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[spec.name]
        return module


def _imported(tree: ast.AST) -> dict[str, tuple[str, str | None]]:
    """Names that a source imports from the package: module and name there, which is None for a module itself."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                origin = (module, None) if _is_module(module) else (node.module, alias.name)
                # The package's own names stand for everything.
                if origin[0] != PACKAGE:
                    found[alias.asname or alias.name] = origin
    return found


def _is_module(name: str) -> bool:
    package = name.rpartition(".")[0]
    return hasattr(importlib.import_module(package), "__path__") and importlib.util.find_spec(name) is not None


def _used(node: ast.AST, imported: dict[str, tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """What a piece of source uses of the names that its file imports, and of the modules among them."""
    found = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in imported:
            found.append(imported[inner.id])
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            module, name = imported.get(inner.value.id, ("", ""))
            found += [(module, inner.attr)] if name is None else []
    return found


def _defined(tree: ast.Module) -> dict[str, ast.stmt]:
    """Functions and classes at the top of a source, by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def _install(name: str, module) -> None:
    package, _, attribute = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[package], attribute, module)
