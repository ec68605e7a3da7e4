"""Contract under test: the cache's keys and entries, the argument buffer, what is said of a binary; and on a GPU what
a launch may ask for: clusters, much shared memory, any thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import re
import sys
import textwrap
import threading
from dataclasses import replace
from enum import Enum

import numpy as np
import pytest
from numba import cuda, int32
from processes import finish, run_python

from numba_attn.device.smem import shared_memory, shared_tile, tile_bytes
from numba_attn.kernel import Launch, Workspace
from numba_attn.launch import Plan, cache, compiler
from numba_attn.problem import View
from numba_attn.tensor import ArgumentBuffer

ARCH = "sm_90a"

# Keys


def test_keys_are_the_same_in_every_process():
    # Names come in sets, whose order depends on the seed.
    code = """
    from numba_attn.kernel import grids
    from numba_attn.kernels import KERNELS
    from numba_attn.launch import cache
    from numba_attn.problem import Problem
    problem = Problem(1, 1, 1, 1, 1, 1, 1)
    steps = [step for k in KERNELS for step in grids(k.launches(problem, next(iter(k.configs()))))]
    # Kernels share launches.
    for build, config in dict.fromkeys((step.build, step.config) for step in steps):
        print(cache.key(build(config), {"arch": "sm_90a"}))
    """
    processes = [run_python(code, wait=False, PYTHONHASHSEED=seed) for seed in ("0", "1", "2")]
    outputs = [finish(process)[0] for process in processes]
    assert len(outputs[0].split()) == len(set(outputs[0].split())) > 1
    assert set(outputs) == {outputs[0]}


SOURCES = {
    "edited_kernel": """
        from numba import cuda, float32
        from numba_attn.launch import cache
        import edited_attributes as attributes
        from edited_constants import FACTOR
        from edited_verbs import twice

        def build(config):
            @cuda.jit
            def kernel(O):
                O[0] = twice(float32(config)) + FACTOR + attributes.OFFSET + attributes.edited_verbs.half(2)
                O[1] = attributes.Mode.FAST
            return kernel
        """,
    "edited_verbs": """
        import edited_lowering
        from numba import float32
        from numba_attn.device.verb import verb
        from edited_instruction import largest
        from edited_table import TABLE

        WIDTH = TABLE[1]

        @verb
        def half(x):
            return x * float32(0.5)

        @verb
        def twice(x):
            y = min(x, float32(WIDTH))
            return largest(y, x)
        """,
    "edited_instruction": """
        from numba.cuda import types
        from numba.cuda.extending import intrinsic

        @intrinsic
        def largest(typingctx, a, b):
            def codegen(context, builder, signature, args):
                return builder.fadd(*args)
            return types.float32(types.float32, types.float32), codegen
        """,
    "edited_constants": "FACTOR = 3\n",
    "edited_table": "TABLE = (1, 2)\n",
    "edited_attributes": """
        from enum import IntEnum
        import edited_verbs

        class Mode(IntEnum):
            FAST = 7

        OFFSET = 100
        """,
    # What registers the lowering of a type is imported and not named.
    "edited_lowering": """
        def lower(builder):
            return builder.fmul(1)

        REGISTERED = 1
        """,
}


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Function that writes the modules above, one text replaced in one of them, and gives the key of the kernel."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget():
        for name in SOURCES:
            sys.modules.pop(name, None)

    def write(module=None, old="", new=""):
        for name, text in SOURCES.items():
            text = textwrap.dedent(text)
            assert name != module or old in text
            file = tmp_path / f"{name}.py"
            file.write_text(text.replace(old, new) if name == module else text)
            os.utime(file, (1_000_000_000, 1_000_000_000))

    def key(module=None, old="", new="", *, config=1, facts=None):
        forget()
        write(module, old, new)
        kernel = importlib.import_module("edited_kernel").build(config)
        return cache.key(kernel, facts or {"arch": ARCH, "flags": {"fastmath": False}})

    key.write = write
    yield key
    forget()


EDITS = [
    ("edited_kernel", "+ FACTOR", "- FACTOR"),
    ("edited_verbs", "min(", "max("),
    ("edited_verbs", "float32(WIDTH)", "float32(4)"),
    ("edited_verbs", "TABLE[1]", "TABLE[0]"),
    ("edited_instruction", "fadd", "fsub"),
    ("edited_constants", "3", "4"),
    ("edited_table", "2", "5"),
    ("edited_attributes", "100", "200"),
    ("edited_attributes", "7", "8"),
    ("edited_verbs", "0.5", "0.25"),
    ("edited_lowering", "fmul", "fadd"),
    ("edited_lowering", "REGISTERED = 1", "REGISTERED = 2"),
]


@pytest.mark.parametrize(("module", "old", "new"), EDITS)
def test_any_edit_changes_the_key(edited, module, old, new):
    assert edited(module, old, new) != edited()


# All but a value that nothing reached has a name for.
@pytest.mark.parametrize(("module", "old", "new"), EDITS[:-1])
def test_an_edit_after_the_import(edited, module, old, new):
    # The process compiles what it imported: its machine code must not go under the key of the text there is now.
    edited()
    kernel = sys.modules["edited_kernel"].build(1)
    edited.write(module, old, new)
    stale = cache.key(kernel, {"arch": ARCH, "flags": {"fastmath": False}})
    assert stale != edited(module, old, new)


def test_closures_and_facts_change_the_key(edited):
    keys = {
        edited(),
        edited(config=2),
        edited(config=1.0),
        edited(config=True),
        edited(facts={"arch": "sm_90", "flags": {"fastmath": False}}),
        edited(facts={"arch": ARCH, "flags": {"fastmath": True}}),
    }
    assert len(keys) == 6


def test_unchanged_text_keeps_the_key(edited, tmp_path):
    key = edited()
    for file in tmp_path.glob("*.py"):
        os.utime(file, (1_700_000_000, 1_700_000_000))
    assert cache.key(sys.modules["edited_kernel"].build(1), {"arch": ARCH, "flags": {"fastmath": False}}) == key
    assert edited() == key


def test_a_module_that_was_edited_after_the_import(tmp_path):
    # Its old value went under the new text's key, and every later process got it.
    (tmp_path / "helping.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "calling.py").write_text(
        "import helping\nfrom numba import cuda\ndef build(config):\n"
        "    @cuda.jit\n    def kernel(x):\n        x[0] = helping.FACTOR\n    return kernel\n"
    )
    code = f"""
    import sys
    from pathlib import Path
    sys.path.insert(0, {str(tmp_path)!r})
    import calling, helping
    from numba_attn.kernel import Launch, Workspace
    from numba_attn.launch import compiler
    Path(helping.__file__).write_text("FACTOR = 3.0\\n")
    launch = Launch(calling.build, 0, ("x",), grid=1, threads=32)
    compiler.binary(launch, {{"x": Workspace((1,))}}, "sm_90a")
    """
    environment = {"NUMBA_ATTN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    found = []
    for _ in range(3):
        run_python(code, **environment)
        found.append(len(list((tmp_path / "cache").iterdir())))
    assert found == [1, 2, 2]


def test_nothing_is_kept_where_the_source_cannot_be_seen(folder, compilations, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    head = "from numba import cuda\ndef build(config):\n"
    text = head + "    @cuda.jit\n    def f(x):\n        x[0] = config\n    return f\n"
    file, scope = tmp_path / "gone.py", {}
    file.write_text(text)
    gone = importlib.import_module("gone")
    file.unlink()
    exec(text, scope)
    for build in (gone.build, scope["build"]):
        compiler.binary(Launch(build, 1, ("x",), grid=1, threads=32), X, ARCH)
        assert cache.key(build(1), {}) is None
    del sys.modules["gone"]
    assert len(compilations) == 2 and not folder.exists()


class Colour(Enum):
    RED = 1
    BLUE = 2


def build_constant(config):
    @cuda.jit
    def constant(O):
        O[0] = config

    return constant


_table = np.arange(2000.0, dtype=np.float32)
_other_table = np.where(_table == 1000, -1, _table).astype(np.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(1, 2, id="int"),
        pytest.param(1.0, -1.0, id="float"),
        pytest.param(0.0, -0.0, id="sign of zero"),
        pytest.param((1, (2, 3)), (1, (2, 4)), id="tuple"),
        pytest.param(np.float32(1), np.float64(1), id="scalar type"),
        pytest.param(np.arange(3), np.arange(3.0), id="array type"),
        pytest.param(Colour.RED, Colour.BLUE, id="enum"),
        pytest.param(_table, _other_table, id="one element of a long array"),
    ],
)
def test_closure_values(one, other):
    assert cache.key(build_constant(one), {}) != cache.key(build_constant(other), {})
    assert cache.key(build_constant(one), {}) == cache.key(build_constant(one), {})


def test_kernels_without_a_file():
    # As in a notebook, or after `python -c`: there is no module text, so the code itself has to count.
    code = """
    from numba import cuda
    from numba_attn.device.verb import verb
    from numba_attn.launch import cache
    def kernel_of(text):
        scope = {"cuda": cuda, "verb": verb, "__name__": "__main__"}
        exec(text, scope)
        return scope["kernel"]
    verb_text = "@verb\\ndef f(x):\\n return x {} 1\\n"
    kernel_text = "@cuda.jit\\ndef kernel(O):\\n O[0] = {}\\n"
    texts = [kernel_text.format(value) for value in ("1", "2", "min(1, 2)", "max(1, 2)")]
    texts += [verb_text.format(sign) + kernel_text.format("f(1)") for sign in "+-"]
    print(len({cache.key(kernel_of(text), {}) for text in texts}) == len(texts))
    """
    assert run_python(code)[0].strip() == "True"


# Entries


def tiny_launch(value=1, **options) -> Launch:
    return Launch(build_constant, value, ("x",), grid=1, threads=32, **options)


X = {"x": Workspace((1,))}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache's directory, not there yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(folder))
    return folder


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows by one with each compilation."""
    done, compile_now = [], cuda.compile

    def counted(*args, **kwargs):
        done.append(args)
        return compile_now(*args, **kwargs)

    monkeypatch.setattr(cuda, "compile", counted)
    return done


def test_where_the_cache_is(monkeypatch, tmp_path, folder):
    assert cache.directory() == folder
    assert cache.usage() == (0, 0)
    made = compiler.binary(tiny_launch(), X, ARCH)
    (entry,) = folder.iterdir()
    assert cache.usage() == (1, entry.stat().st_size)
    assert entry.stat().st_size > len(made.cubin)
    assert folder.stat().st_mode & 0o077 == 0, "others may write what this user runs"
    monkeypatch.delenv(cache.ENVIRONMENT_VARIABLE)
    if sys.platform != "win32":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.directory() == tmp_path / "numba_attn"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache.directory() == tmp_path / ".cache" / "numba_attn"


def test_the_directory_is_absolute_and_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("~/mine", "mine"):
        monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, given)
        assert cache.directory() == tmp_path / "mine"


def test_a_directory_that_cannot_be_written(monkeypatch, tmp_path):
    folder = tmp_path / "new" / "newer"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(folder))
    assert cache.problem() is None and not folder.exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"cannot write the cache in {folder}: no permission to write in {tmp_path} " in cache.problem()


@pytest.mark.skipif(os.name == "nt", reason="Windows finds a home directory elsewhere")
def test_no_home_directory(tmp_path):
    # Killed every call: an answer of RuntimeError to where the cache is.
    code = """
    import os, sys
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_ATTN_CACHE_DIR"):
        os.environ.pop(name, None)
    import pwd
    def nobody(uid):
        raise KeyError(uid)
    pwd.getpwuid = nobody
    from numba_attn.launch import cache
    from numba_attn.cli import main
    for given in ("", "~nosuchuser/c"):
        os.environ["NUMBA_ATTN_CACHE_DIR"] = given
        print(cache.problem())
        assert cache.read("entry") is None
        assert main(["precompile", "flash_fp32", "--arch", "sm_90a"]) == 1
        assert main(["info"]) == 0
        cache.write("entry", {}, b"")
    """
    out, err = run_python(code)
    assert "cannot write the cache: there is no home directory ($NUMBA_ATTN_CACHE_DIR moves it)\n" in out
    assert "cannot write the cache: there is no home directory for ~nosuchuser/c ($" in out
    assert err.count("Warning:") == 1 and "Traceback" not in err
    assert err.count("numba_attn: cannot write the cache: there is no home directory") == 2


def test_compiled_once(folder, compilations):
    made = compiler.binary(tiny_launch(), X, ARCH)
    assert compiler.binary(tiny_launch(), X, ARCH) == made
    assert len(compilations) == 1
    for other in (tiny_launch(2), tiny_launch(min_blocks=2), replace(tiny_launch(), threads=64)):
        compiler.binary(other, X, ARCH)
    compiler.binary(tiny_launch(), X, "sm_80")
    compiler.binary(tiny_launch(), {"x": Workspace((1,), "int32")}, ARCH)
    assert len(compilations) == len(list(folder.iterdir())) == 6
    # What the machine code does not depend on.
    compiler.binary(replace(tiny_launch(), grid=7, smem_bytes=64, cluster=2), X, ARCH)
    assert len(compilations) == 6


def flip(at: int):
    """Damage: one bit of the byte `at` flipped."""
    return lambda entry: (
        entry[:at] + bytes([entry[at] ^ 1]) + entry[at + 1 :] if at >= 0 else flip(len(entry) + at)(entry)
    )


def in_report(change, *, with_its_digest=False):
    """Damage: the report changed, and still JSON; the digest that of the entry before or of this one."""

    def damage(entry: bytes) -> bytes:
        digest, report, cubin = entry.split(b"\n", 2)
        content = json.dumps(change(json.loads(report))).encode() + b"\n" + cubin
        if with_its_digest:
            digest = hashlib.sha256(content).hexdigest().encode()
        return digest + b"\n" + content

    return damage


def without_a_field(report: dict) -> dict:
    return {k: v for k, v in report.items() if k != "registers"}


def with_a_field(report: dict) -> dict:
    return {**report, "from_another_version": 1}


def with_another_name(report: dict) -> dict:
    return {**report, "entry": "another_name"}


DAMAGES = {
    "empty": lambda entry: b"",
    "header cut": lambda entry: entry[:20],
    "cubin cut": lambda entry: entry[:-1],
    "cubin gone": lambda entry: entry.partition(b"\n")[0] + b"\n",
    "bit of the cubin": flip(-100),
    "last bit": flip(-1),
    "first bit": flip(0),
    "longer": lambda entry: entry + b"\0",
    "no JSON": lambda entry: b"{\n" + entry,
    "JSON of something else": lambda entry: b"[1, 2]\n" + entry,
    "no report": in_report(lambda report: {}),
    "report without a field": in_report(without_a_field, with_its_digest=True),
    "report of another version": in_report(with_a_field, with_its_digest=True),
    "report of another kind": in_report(lambda report: [1], with_its_digest=True),
    "another name in the report": in_report(with_another_name),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_broken_entry_is_rebuilt(folder, compilations, damage):
    made = compiler.binary(tiny_launch(), X, ARCH)
    (entry,) = folder.iterdir()
    good = entry.read_bytes()
    entry.write_bytes(damage(good))
    assert entry.read_bytes() != good
    rebuilt = compiler.binary(tiny_launch(), X, ARCH)
    assert len(compilations) == 2
    # The mangled name counts the functions that the process has compiled.
    assert replace(rebuilt, entry="", cubin=b"") == replace(made, entry="", cubin=b"")
    assert compiler.binary(tiny_launch(), X, ARCH) == rebuilt
    assert len(compilations) == 2


def test_entry_that_is_no_file(folder, monkeypatch):
    monkeypatch.setattr(cache, "_warned", True)
    made = compiler.binary(tiny_launch(), X, ARCH)
    (entry,) = folder.iterdir()
    entry.unlink()
    entry.mkdir()
    assert compiler.binary(tiny_launch(), X, ARCH).registers == made.registers


COMPILE_TWO = """
from numba import cuda
from numba_attn.kernel import Launch, Workspace
from numba_attn.launch import compiler
def build(value):
    @cuda.jit
    def constant(x):
        x[0] = value
    return constant
for value in (1, 2):
    launch = Launch(build, value, ("x",), grid=1, threads=32)
    print(compiler.binary(launch, {"x": Workspace((1,))}, "sm_90a").registers)
"""


@pytest.mark.parametrize("below", ["", "cache"])
def test_unwritable_directory_warns_once(tmp_path, below):
    # Not by permissions: they do not hold for root.
    blocked = tmp_path / "file"
    blocked.write_text("a file where the directory should be")
    out, err = run_python(COMPILE_TWO, NUMBA_ATTN_CACHE_DIR=str(blocked / below))
    assert len(out.split()) == 2
    assert err.count("Warning:") == 1
    assert str(blocked) in err


def test_processes_that_start_cold(tmp_path):
    folder = tmp_path / "cache"
    code = """
    from numba_attn.kernels import warp_tile_fp32
    from numba_attn.launch import compiler
    from numba_attn.problem import Problem
    config = next(config for config in warp_tile_fp32.configs() if config.dv_bucket == 32)
    (launch,) = warp_tile_fp32.launches(Problem(1, 1, 1, 1, 1, 1, 1), config)
    print(compiler.binary(launch, {}, "sm_90a").registers)
    """
    processes = [run_python(code, wait=False, NUMBA_ATTN_CACHE_DIR=str(folder)) for _ in range(4)]
    results = [finish(process) for process in processes]
    assert len({out for out, _ in results}) == 1
    assert not any(err for _, err in results)
    (entry,) = folder.iterdir()
    assert entry.suffix == ".cubin"
    assert cache_read(folder, entry.stem) is not None


def cache_read(folder, key: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.ENVIRONMENT_VARIABLE, str(folder))
        return cache.read(key)


def test_an_entry_is_there_whole_or_not_at_all(folder):
    contents = [bytes([i]) * 200_000 for i in range(2)]
    seen, stop = set(), threading.Event()

    def look():
        while not stop.is_set():
            found = cache.read("entry")
            seen.add(None if found is None else found[1])

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(50):
        for content in contents:
            cache.write("entry", {}, content)
    stop.set()
    reader.join()
    assert seen <= {None, *contents} and seen != {None}
    found = [path.name for path in folder.iterdir()]
    assert found == ["entry.cubin"]


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_warned", True)
    monkeypatch.setattr(os, "replace", full)
    cache.write("entry", {}, b"cubin")
    assert list(folder.iterdir()) == []


# Binaries and arguments


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_in_the_middle_of_a_compilation():
    run_python(
        """
        import gc, os, threading
        from numba_attn.launch import compiler
        inside, done = threading.Event(), threading.Event()
        def compile():
            with compiler._compilation():
                inside.set()
                done.wait()
        thread = threading.Thread(target=compile)
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() and compiler._compiling.acquire(timeout=5) else 1)
        status = os.waitpid(child, 0)[1]
        done.set()
        thread.join()
        assert status == 0 and gc.isenabled()
        """
    )


def test_report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.ENVIRONMENT_VARIABLE, os.devnull + "/cache")
        patch.setattr(cache, "_warned", True)
        made = compiler.binary(tiny_launch(), X, ARCH)
    assert set(made.report) == {"entry", "registers", "spill_bytes", "stack_bytes", "static_smem_bytes"}
    assert compiler.Binary(cubin=made.cubin, **json.loads(json.dumps(made.report))) == made
    assert made.cubin.startswith(b"\x7fELF")
    assert made.entry.encode() + b"\0" in made.cubin
    assert "constant" in made.entry
    assert 0 < made.registers < 32
    assert (made.spill_bytes, made.stack_bytes, made.static_smem_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_75", (7, 5)),
        ("sm_80", (8, 0)),
        ("sm_90", (9, 0)),
        ("sm_90a", (9, 0, "a")),
        ("sm_100f", (10, 0, "f")),
        ("sm_120", (12, 0)),
        ("sm_121a", (12, 1, "a")),
    ],
)
def test_compute_capability(arch, expected):
    assert compiler.compute_capability(arch) == expected


@pytest.mark.parametrize("arch", ["", "90", "sm_9", "sm90", "compute_90", "sm_90b", "sm_90a ", "SM_90", "sm_90aa"])
def test_compute_capability_of_something_else(arch):
    with pytest.raises(ValueError, match=re.escape(f"not {arch!r}")):
        compiler.compute_capability(arch)


class Tensor4(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("shape", ctypes.c_int32 * 4), ("strides", ctypes.c_int64 * 4)]


class Tensor3(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("shape", ctypes.c_int32 * 3), ("strides", ctypes.c_int64 * 3)]


class Arguments(ctypes.Structure):
    _fields_ = [("Q", Tensor4), ("lse", Tensor3), ("scale", ctypes.c_float), ("O", Tensor4), ("last", ctypes.c_float)]


LAYOUTS = {
    "Q": View((2, 3, 5, 2**31 - 1), (2**40, -7, 0, 1)),
    "lse": View((2, 3, 5), (15, 5, 1)),
    "O": View((2, 3, 5, 7), (105, 35, 7, 1)),
}


def test_argument_buffer():
    buffer = ArgumentBuffer([LAYOUTS["Q"], LAYOUTS["lse"], None, LAYOUTS["O"], None])
    by_hand = Arguments(
        Tensor4(0, LAYOUTS["Q"].shape, LAYOUTS["Q"].strides),
        Tensor3(0, LAYOUTS["lse"].shape, LAYOUTS["lse"].strides),
        0.0,
        Tensor4(0, LAYOUTS["O"].shape, LAYOUTS["O"].strides),
        0.0,
    )
    assert buffer.positions == [getattr(Arguments, name).offset for name, _ in Arguments._fields_]
    # The structure is padded at its end, the buffer is not.
    size = Arguments.last.offset + ctypes.sizeof(ctypes.c_float)
    assert len(buffer.template) == size
    assert buffer.template == bytes(by_hand)[:size]


def build_reader(config):
    @cuda.jit
    def reader(Q, lse, scale, O):
        O[0, 0, 0, 0] = Q[0, 0, 0, 1] + lse[0, 0, 1] * scale

    return reader


def test_argument_buffer_is_what_a_kernel_reads():
    launch = Launch(build_reader, None, ("Q", "lse", "scale", "O"), grid=1, threads=32)
    ptx = compiler.ptx(launch, {}, ARCH)
    offset, parameters = 0, []
    for kind, bits in re.findall(r"\.param \.([a-z])(\d+) \w+_param_\d+", ptx):
        n_bytes = int(bits) // 8
        offset = -(-offset // n_bytes) * n_bytes
        parameters.append((offset, n_bytes, kind))
        offset += n_bytes
    buffer = ArgumentBuffer([LAYOUTS["Q"], LAYOUTS["lse"], None, LAYOUTS["O"]])
    firsts = [parameters[i] for i in (0, 9, 16, 17)]
    assert [first[0] for first in firsts] == buffer.positions
    assert firsts[2][1:] == (4, "f")
    assert [n_bytes for _, n_bytes, _ in parameters[:9]] == [8, 4, 4, 4, 4, 8, 8, 8, 8]
    assert offset == len(buffer.template)


# Launches

N_THREADS, ELEMENTS = 128, 1000
ROWS, COLUMNS = 250, 64  # 64000 bytes


def build_copy(config):
    @cuda.jit
    def copy(Q, O):
        i = cuda.blockIdx.x * N_THREADS + cuda.threadIdx.x
        if i < O.shape[3]:
            O[0, 0, 0, i] = Q[0, 0, 0, i]

    return copy


def build_copy_through_shared(config):
    TILE = shared_tile(0, (ROWS, COLUMNS))

    @cuda.jit
    def copy_through_shared(Q, O):
        # Through the last rows of the tile, in reverse order, so that the barrier counts.
        tile = TILE(shared_memory())
        t = int32(cuda.threadIdx.x)
        i = int32(cuda.blockIdx.x) * N_THREADS + t
        if i < O.shape[3]:
            tile[ROWS - 1 - t // COLUMNS, t % COLUMNS] = Q[0, 0, 0, i]
        cuda.syncthreads()
        t = N_THREADS - 1 - t
        i = int32(cuda.blockIdx.x) * N_THREADS + t
        if i < O.shape[3]:
            O[0, 0, 0, i] = tile[ROWS - 1 - t // COLUMNS, t % COLUMNS]

    return copy_through_shared


def copy_launch(**options) -> Launch:
    return Launch(build_copy, None, ("Q", "O"), grid=8, threads=N_THREADS, **options)


SHARED = replace(copy_launch(smem_bytes=tile_bytes((ROWS, COLUMNS))), build=build_copy_through_shared)
LAUNCHES = {
    "plain": copy_launch(),
    "cluster": copy_launch(cluster=2),
    "shared memory": SHARED,
    "cluster and shared memory": replace(SHARED, cluster=2),
}


@pytest.mark.parametrize("launch", [copy_launch(), SHARED], ids=["plain", "shared memory"])
def test_the_copies_of_this_file_in_the_simulator(launch):
    from numba_attn import sim

    source = np.arange(ELEMENTS, dtype=np.float32).reshape(1, 1, 1, -1)
    target = np.full_like(source, np.nan)
    sim.launch(launch.build(None), launch.grid, launch.threads, (source, target), launch.smem_bytes)
    np.testing.assert_array_equal(target, source)


class Copy:
    """A launch that copies a row of numbers on GPU 0."""

    def __init__(self, launch: Launch):
        import torch

        self.source = torch.arange(ELEMENTS, dtype=torch.float32, device="cuda")
        self.target = torch.full_like(self.source, torch.nan)
        torch.cuda.synchronize()
        layout = View.contiguous((1, 1, 1, ELEMENTS))
        self.plan = Plan((launch,), {}, 0, {"Q": layout, "O": layout})

    def run(self) -> None:
        self.plan.run(0, [self.source.data_ptr(), 0, 0, self.target.data_ptr(), 0], 0.0)

    def check(self) -> None:
        assert self.target.equal(self.source)


@pytest.mark.gpu
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_launch(launch):
    assert SHARED.smem_bytes > 48 * 1024
    copy = Copy(launch)
    copy.run()
    copy.check()
    copy.target.zero_()
    copy.run()
    copy.check()


@pytest.mark.gpu
@pytest.mark.usefixtures("folder")
def test_less_shared_memory_after_more():
    # What a kernel may have on a device is never lowered: both launches stay valid.
    more, less = Copy(replace(SHARED, smem_bytes=SHARED.smem_bytes + 4096)), Copy(SHARED)
    for copy in (less, more, less):
        copy.target.zero_()
        copy.run()
        copy.check()


def current_context():
    from cuda.bindings import driver

    status, context = driver.cuCtxGetCurrent()
    assert status == driver.CUresult.CUDA_SUCCESS
    return int(context)


@pytest.mark.gpu
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_launch_in_another_thread(launch):
    copy = Copy(launch)
    contexts, errors = [], []

    def work():
        try:
            contexts.append(current_context())
            copy.run()
            contexts.append(current_context())
        except BaseException as error:
            errors.append(error)

    before = current_context()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert contexts == [0, 0], "a new thread has no current device, and keeps it so"
    assert current_context() == before
    copy.check()


@pytest.mark.gpu
@pytest.mark.usefixtures("folder")
def test_the_current_device_stays():
    copy = Copy(copy_launch())
    before = current_context()
    assert before
    copy.run()
    assert current_context() == before


@pytest.mark.gpu
@pytest.mark.usefixtures("folder")
def test_threads_launching_one_plan():
    # Each thread has a buffer of its own: the others' pointers never get into it.
    import torch

    copy = Copy(copy_launch())
    targets = [torch.zeros_like(copy.source) for _ in range(8)]
    sources = [copy.source + 1000 * i for i in range(8)]
    torch.cuda.synchronize()
    barrier = threading.Barrier(8)

    def work(i):
        barrier.wait()
        for _ in range(200):
            copy.plan.run(0, [sources[i].data_ptr(), 0, 0, targets[i].data_ptr(), 0], 0.0)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert all(target.equal(source) for target, source in zip(targets, sources, strict=True))
