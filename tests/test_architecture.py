"""Contract: which module may import which, and what may be written where. Anything not allowed here fails."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from numba_attn.kernels import KERNELS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "numba_attn"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
ANYTHING = None

# First match counts. Names are modules or packages of numba_attn, whose submodules are included.
MAY_IMPORT = (
    (r"problem\.py", set()),
    (r"kernel\.py", {"problem"}),
    (r"reference\.py", set()),
    (r"testing/.*", {"testing", "reference", "problem"}),
    (r"versions\.py", set()),
    (r"tensor\.py", set()),
    (r"device/.*", {"device", "tensor"}),
    (r"kernels/__init__\.py", {"kernels"}),
    (r"images\.py", {"device", "kernel", "problem"}),
    (r"two_products\.py", {"device", "images", "kernel", "problem"}),
    (r"kernels/.*", {"device", "images", "kernel", "problem", "two_products"}),
    (r"sim/.*", {"sim", "kernels", "device", "kernel", "problem", "reference", "testing"}),
    (r"launch/.*", {"launch", "tensor", "kernel", "problem", "versions"}),
    (r"interop/.*", {"interop", "problem"}),
    (r"choice\.py", {"kernel", "problem"}),
    (r"prepared\.py", {"choice", "interop", "launch", "kernels", "kernel", "problem", "versions"}),
    (r"call\.py", {"prepared", "choice", "interop", "launch", "kernels", "kernel", "problem"}),
    (r"api\.py", {"call", "choice", "interop", "launch", "kernels", "kernel", "problem", "versions"}),
    (r"__init__\.py", {"api", "kernels", "versions"}),
    (
        r"bench/.*",
        {"bench", "api", "choice", "interop", "kernels", "kernel", "launch", "problem", "testing", "versions"},
    ),
    (r"torch_ops\.py", {"api", "interop", "reference", "problem"}),
    (r"cli(\.py|/.*)|__main__\.py", ANYTHING),
)

# Package -> where it may be imported. What is not listed here and is no part of Python may be imported nowhere.
THIRD_PARTY = {
    "numpy": r".*",
    "numba": r"(device|kernels|launch|sim)/.*|tensor\.py|interop/(numpy|device)_arrays\.py",
    "llvmlite": r"device/.*|tensor\.py",
    "cuda": r"launch/.*|interop/device_arrays\.py|versions\.py",
    "greenlet": r"sim/.*",
    "torch": r"interop/torch_arrays\.py|torch_ops\.py|bench/torch_backends\.py",
    "pytest_benchmark": r"bench/document\.py",
    "cupy": r"interop/cupy_arrays\.py",
}
ONLY_NUMPY = r"reference\.py|testing/.*|problem\.py|kernel\.py|choice\.py"

MAX_LINES = 300
HEADINGS = ["Algorithm", "Work split", "Memory", "Numerics", "Limits", "Source"]  # of a kernel's docstring
LOG2E_OR_LN2 = re.compile(r"1\.442[67]\d*|0?\.693[12]\d*")  # also the pattern of a hook in .pre-commit-config.yaml


def imports(path: Path):
    """Dotted names of what a file imports, imports inside functions included; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rule(name: str) -> set[str] | None:
    for pattern, allowed in MAY_IMPORT:
        if re.fullmatch(pattern, name):
            return allowed
    pytest.fail(f"numba_attn/{name} has no place in MAY_IMPORT")


@pytest.mark.parametrize("name", SOURCES)
def test_arrows(name):
    allowed = rule(name)
    ours = {full.split(".")[1] for full in imports(SOURCES[name]) if full.split(".")[0] == "numba_attn"}
    if allowed is not ANYTHING:
        assert ours <= allowed


@pytest.mark.parametrize("name", SOURCES)
def test_third_party(name):
    packages = {full.split(".")[0] for full in imports(SOURCES[name])} - sys.stdlib_module_names - {"numba_attn"}
    for package in packages:
        assert package in THIRD_PARTY, f"{package} is no dependency"
        assert re.fullmatch(THIRD_PARTY[package], name), f"{package} in {name}"
    if re.fullmatch(ONLY_NUMPY, name):
        assert packages <= {"numpy"}


@pytest.mark.parametrize("name", [name for name in SOURCES if re.fullmatch(r"kernels/(?!__init__).*", name)])
def test_kernel_files(name):
    text = SOURCES[name].read_text()
    assert ".reshape(" not in text, "a reshaped shared array costs generic loads and local memory: use shared_tile"
    module = importlib.import_module("numba_attn." + name.removesuffix(".py").replace("/", "."))
    assert module.KERNEL in KERNELS
    assert name == f"kernels/{module.KERNEL.name}.py"
    last = ast.parse(text).body[-1]
    assert isinstance(last, ast.Assign)
    assert last.targets[0].id == "KERNEL"
    assert re.findall(rf"^({'|'.join(HEADINGS)})\. ", module.__doc__, re.MULTILINE) == HEADINGS
    assert module.__doc__.count("\n") <= 40


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_written_where(name):
    text = SOURCES[name].read_text()
    if name != "device/ptx.py":
        assert "InlineAsm" not in text
    if name != "device/math.py":
        assert not LOG2E_OR_LN2.search(text), "log2(e) and ln 2 have one spelling, in device/math.py"


@pytest.mark.parametrize("name", SOURCES)
def test_files_are_short_and_no_drawers(name):
    lines = len(SOURCES[name].read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines"
    assert Path(name).stem not in ("utils", "util", "common", "helpers", "misc")


def test_the_linter_is_one_version():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pinned,) = [requirement for requirement in extras["test"] if requirement.startswith("ruff")]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"rev: v{pinned.removeprefix('ruff==')}\n" in hooks
    assert LOG2E_OR_LN2.pattern in hooks
