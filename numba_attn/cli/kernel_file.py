"""Finds a kernel by its registered name, or in a file of the user's."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from numba_attn.cli.errors import CommandError
from numba_attn.cli.screen import one_line
from numba_attn.kernel import Kernel
from numba_attn.kernels import KERNELS

KERNEL_HELP = "a registered kernel's name, or FILE.py[:NAME] with a Kernel called NAME (KERNEL unless given)"


def find(text: str) -> tuple[Kernel, Path, str]:
    """The kernel, its file, and what the file calls it."""
    match = re.fullmatch(r"(.*\.py)(?::(\w+))?", text)
    if match is None:
        for kernel in KERNELS:
            if kernel.name == text:
                return kernel, Path(sys.modules[kernel.launches.__module__].__file__), "KERNEL"
        known = ", ".join(kernel.name for kernel in KERNELS)
        raise CommandError(f"{text!r} is neither a kernel ({known}) nor FILE.py[:NAME]", status=2)
    path, name = Path(match[1]), match[2] or "KERNEL"
    if not path.is_file():
        raise CommandError(f"{path} is no file", status=2)
    kernel = getattr(load(path.resolve()), name, None)
    if not isinstance(kernel, Kernel):
        raise CommandError(f"{path} has no Kernel called {name}", status=2)
    return kernel, path, name


def load(path: Path) -> ModuleType:
    """The file as a module. It may import its neighbours, as a script does, and is part of the package it lies in."""
    packages, folder = [], path.parent
    while (folder / "__init__.py").exists():
        packages.insert(0, folder.name)
        folder = folder.parent
    # Outside a package never the name of a module of Python's or of a tool: the cache takes those as unchanging.
    name = ".".join([*packages, path.stem]) if packages else f"kernel_file_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and Path(loaded.__file__) == path:
        return loaded
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{lines[-1]}" if lines else path
        raise CommandError(f"{where} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
    return module
