"""Contract: a digest changes with what machine code is made from, and with nothing else."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from numba_attn.bench import digest
from numba_attn.bench.problems import HEADLINE, make_problem
from numba_attn.kernels import KERNELS, flash_fp32, warp_tile_fp32
from numba_attn.launch import compiler
from numba_attn.problem import H200

ANNOTATIONS = "from __future__ import annotations\n"
OTHER = make_problem(2, 2, 64, 64, 64, 64)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    package = tmp_path_factory.mktemp("original") / "numba_attn"
    shutil.copytree(digest.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


@pytest.fixture
def package(original, tmp_path) -> Path:
    """A copy of the package to edit."""
    return shutil.copytree(original, tmp_path / "numba_attn")


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def trees(package: Path, kernel: str = "flash_fp32") -> dict[str, str]:
    return digest.trees(package / "kernels" / f"{kernel}.py", package)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels/flash_fp32.py", "fill(S, ZERO)", "fill(S, ZERO)  # from the start"),
        ("kernels/flash_fp32.py", '"""Register tiles', '"""Tiles in registers'),
        ("kernels/flash_fp32.py", '"""P, and behind it', '"""P, then'),
        ("kernels/flash_fp32.py", "AHEAD = STAGES - 1", "AHEAD = (STAGES\n        - 1)"),
        ("device/tile.py", '"""patch = value"""', '"""Every element of patch is value."""'),
        ("problem.py", '"""Largest shared memory of one block, opted in."""', ""),
        ("kernels/warp_tile_fp32.py", "range(0, n_end, WARP)", "range(WARP, n_end, WARP)"),
        ("kernels/__init__.py", "KERNELS = ", "KERNELS = () or "),
        ("api.py", "def explain", "def explained"),
    ],
)
def test_what_does_not_count(original, package, file, old, new):
    edit(package / file, old, new)
    assert trees(package) == trees(original)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels/flash_fp32.py", "AHEAD = STAGES - 1", "AHEAD = STAGES - 2"),
        ("kernels/flash_fp32.py", "PAD = 4", "PAD = 8"),
        ("device/tile.py", "mma(S, sA, row0, sB, lane):", "mma(S, sA, row0, sB, ln):"),
        ("device/math.py", "builder.fma(", "builder.fmul("),  # reached through device/tile.py
        ("device/ptx.py", "cp.async.{cache}", "cp.async.ca"),
        ("tensor.py", "types.int64", "types.int32"),  # reached by none, and by all
    ],
)
def test_what_counts(original, package, file, old, new):
    edit(package / file, old, new)
    before, after = trees(original), trees(package)
    assert {name for name in before if before[name] != after[name]} == {file}


def test_a_module_that_one_kernel_alone_uses(original, package):
    (package / "device/other.py").write_text("X = 1\n")
    edit(package / "kernels/warp_tile_fp32.py", *(ANNOTATIONS, f"{ANNOTATIONS}from numba_attn.device import other\n"))
    assert "device/other.py" in trees(package, "warp_tile_fp32")
    assert "device/other.py" not in trees(package)
    assert trees(package) == trees(original)


def test_relative_imports_and_files_outside_the_package(package, tmp_path):
    (package / "kernels" / "mine.py").write_text("from ..device.mask import Mask\nfrom . import flash_fp32\n")
    assert {"device/mask.py", "kernels/flash_fp32.py"} <= set(trees(package, "mine"))
    mine = tmp_path / "mine.py"
    mine.write_text("import numba_attn.device.mask\nimport os.path\nfrom . import other\n")
    assert set(digest.trees(mine, package)) == {"mine.py", "device/mask.py", "device/verb.py", "tensor.py"}
    beside = mine.with_name("beside.py")
    beside.write_text("import math\nX = 1\n")
    mine.write_text(mine.read_text() + "from beside import X\n")
    before = digest.trees(mine, package)
    beside.write_text("import math\nX = 2\n")
    assert "beside.py" in before and digest.trees(mine, package) != before


def test_all_of_our_modules_that_a_kernel_loads_are_reached():
    for kernel in KERNELS:
        names = set(digest.trees(digest.file_of(kernel)))
        module = sys.modules[kernel.launches.__module__]
        used = {getattr(value, "__module__", "") or "" for value in vars(module).values()}
        ours = {name for name in used if name.startswith("numba_attn.")}
        assert {f"{name.partition('.')[2].replace('.', '/')}.py" for name in ours} <= names


def test_digests_of_all_kernels_differ():
    digests = {digest.code_digest(kernel, HEADLINE, H200) for kernel in KERNELS}
    assert len(digests) == len(KERNELS)
    assert all(len(code) == digest.LENGTH for code in digests)


def test_a_digest_has_the_config_the_launch_and_the_flags(monkeypatch):
    kernel = flash_fp32.KERNEL
    code = digest.code_digest(kernel, HEADLINE, H200)
    assert digest.code_digest(kernel, HEADLINE, H200) == code
    assert digest.code_digest(kernel, OTHER, H200) != code
    other = flash_fp32.TILES[1].config(8, 4, False)
    assert digest.code_digest(replace(kernel, config=lambda problem, device: other), HEADLINE, H200) != code
    bounded = replace(kernel, launches=warp_tile_fp32.launches, config=warp_tile_fp32.config)
    assert digest.code_digest(bounded, HEADLINE, H200) != code
    assert digest.code_digest(kernel, HEADLINE, replace(H200, cc=(10, 0))) != code
    assert digest.code_digest(kernel, HEADLINE, replace(H200, name="another one")) == code
    for flags in ({**compiler.FLAGS, "fastmath": True}, {**compiler.FLAGS, "lineinfo": True}):
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "FLAGS", flags)
            assert digest.code_digest(kernel, HEADLINE, H200) != code


def test_launch_bounds_count():
    kernel = warp_tile_fp32.KERNEL
    config = kernel.config(HEADLINE, H200)
    changed = replace(kernel, config=lambda problem, device: replace(config, min_blocks=1))
    assert digest.code_digest(changed, HEADLINE, H200) != digest.code_digest(kernel, HEADLINE, H200)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x = 'a'", 'x = "a"', True),
        ("x = u'a'", "x = 'a'", True),
        ("def f():\n    'doc'\n    return 1", "def f(): return 1", True),
        ("class A:\n    x: int\n    'its x'", "class A:\n    x: int", True),
        ("x = 1", "x = 1.0", False),
        ("x = True", "x = 1", False),
        ("x = None", "x = ...", False),
        ("a + b", "a - b", False),
        ("f(a, b)", "f(b, a)", False),
        ("f(x=None)", "f()", False),
        ("a[1:]", "a[:1]", False),
        ("x = 'a'", "x = 'b'", False),
        ("def f(a, *, b): pass", "def f(a, b): pass", False),
        ("def f(a=1): pass", "def f(a): pass", False),
        ("if a: x", "while a: x", False),
    ],
)
def test_canonical_trees(one, other, same):
    assert (digest.tree_digest(one) == digest.tree_digest(other)) is same


def test_a_digest_is_the_same_under_every_python():
    # By hand: what a newer Python adds to the tree, empty fields like type_params, must leave no trace.
    code = digest.canonical(digest.ast.parse("def f(a): return -a"))
    arguments = "args=arguments(args=[arg(arg='a')])"
    body = "body=[Return(value=UnaryOp(op=USub(), operand=Name(id='a')))]"
    assert code == f"Module(body=[FunctionDef(name='f', {arguments}, {body})])"
