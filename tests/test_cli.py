"""Contract: every command does what its help says, by exit status, and tells what is wrong in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpu import NO_TORCH
from processes import run_python

from numba_attn import launch, testing, versions
from numba_attn.bench import problems, torch_backends
from numba_attn.bench.contenders import BASELINES
from numba_attn.bench.problems import NamedProblem
from numba_attn.cli import COMMANDS, check, demo, kernel_file, precompile, screen, targets
from numba_attn.kernels import KERNELS, warp_tile_fp32
from numba_attn.problem import H200
from numba_attn.sim import mutate

ROOT = Path(__file__).resolve().parents[1]
KERNEL_SOURCE = Path(warp_tile_fp32.__file__).read_text()
NO_GPU = pytest.mark.skipif(launch.device_count() > 0, reason="there is a GPU")


@pytest.fixture
def few_cases(monkeypatch):
    """A matrix of two cases, so that a check takes a moment."""
    cases = (testing.Case(1, 1, 3, 5, 4, 4), testing.Case(1, 1, 17, 9, 4, 4, is_causal=True))
    monkeypatch.setattr(testing, "small_cases", lambda: cases)
    return cases


def broken_kernel(folder: Path, old: str, new: str, name: str = "my_kernel.py") -> Path:
    """A user's copy of a kernel with one fault."""
    assert old in KERNEL_SOURCE
    file = folder / name
    file.write_text(KERNEL_SOURCE.replace(old, new))
    return file


# Arguments


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(call, command):
    status, out, err = call(*command.split(), "--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: python -m numba_attn")
    assert command or all(name in out and summary.split(":")[0][:40] in out for name, summary in COMMANDS.items())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: COMMAND"),
        (["cheque"], "invalid choice: 'cheque'"),
        (["info", "--sim"], "unrecognized arguments: --sim"),
        (["check", "naive"], f"neither a kernel ({', '.join(k.name for k in KERNELS)}) nor FILE.py"),
        (["check", "missing.py"], "missing.py is no file"),
        (["check", "--sim", "-k", "nowhere"], "no case has 'nowhere' in its name"),
        (["precompile", "--arch", "hopper"], "'hopper'"),
        (["precompile", "--arch", "sm_70"], "sm_70 is not one of sm_80"),
        (["precompile", "--arch", "sm_90"], "loads sm_90a"),
        (["inspect"], "required: KERNEL"),
        (["inspect", "flash_fp32", "--head-dim", "0"], "--head-dim is 0"),
        (["inspect", "warp_tile_fp32", "--head-dim", "2000"], "cannot serve this: keeps Dv in registers"),
        (["bench", "--problem", "tail"], "'tail' is not like b4_h16"),
        (["bench", "--shape", "1,2,3"], "--shape '1,2,3' is not B,H,Lq,Lk,D"),
        (["bench", "--shape", "1,2,3,4,five"], "is not B,H,Lq,Lk,D"),
        (["bench", "--shape", "1,2,3,4,0"], "of numbers from 1 to 2147483647"),
        (["bench", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["bench", "--kernel", "torch"], "neither a kernel ("),
        (["bench", "--causal"], "--causal needs --problem or --shape"),
        (["bench", "--shape", "1,2,3,4,99999999999999"], "of numbers from 1 to 2147483647"),
        (["bench", "--seconds", "0"], "--seconds is 0"),
        (["bench", "--seconds", "nan"], "--seconds is nan"),
        (["bench", "--seconds", "inf"], "--seconds is inf"),
        (["check", ""], "'' is neither a kernel"),
        (["inspect", "flash_fp32", "--head-dim", "99999999999999"], "from 1 to 2147483647"),
        (["mutate"], "required: KERNEL"),
        (["mutate", "flash_fp32", "--equivalent", "missing.toml"], "--equivalent: missing.toml is no file"),
        (["mutate", "flash_fp32", "--jobs", "0"], "--jobs: 0 is less than 1"),
    ],
)
def test_bad_arguments_get_one_line_and_status_2(call, argv, said):
    status, out, err = call(*argv)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


def test_mutate_names_the_list_that_is_no_toml(call, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("not toml [")
    status, out, err = call("mutate", "flash_fp32", "--equivalent", str(file))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"numba_attn: --equivalent: {file} is no TOML: ")


@pytest.mark.parametrize(("argument", "said"), [("", "SystemExit: "), ("'enough'", "SystemExit: enough")])
def test_a_kernel_file_that_exits(call, tmp_path, argument, said):
    """Broke once: nothing was printed, with status 0, or a traceback."""
    file = tmp_path / "exits.py"
    file.write_text(f"import sys\nsys.exit({argument})\n")
    status, out, err = call("check", "--sim", str(file))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"exits.py:2 cannot be loaded: {said}" in err


HEAD = """
from dataclasses import replace
from numba import cuda
from numba_attn.kernels import block_per_head_fp32 as m
def build(config):
    @cuda.jit
    def bad(Q, K, V, O, lse, scale):
        O[0, 0, 0, 0] = undefined_name(scale)
    return bad
"""


@pytest.mark.parametrize(
    ("what", "inspected", "precompiled"),
    [
        ("supports=lambda problem, device: 1 / 0", "bad fails: ZeroDivisionError: ", "bad fails: ZeroDivisionError: "),
        ("configs=lambda: 1 / 0, config=lambda p, d: 1 / 0", "bad does not compile: Zero", "bad fails: Zero"),
        (
            "launches=lambda p, c: tuple(replace(step, build=build) for step in m.launches(p, c))",
            "bad does not compile: TypingError: ",
            None,
        ),
    ],
    ids=["supports", "configs", "build"],
)
def test_a_kernel_that_fails_is_told_in_one_line(call, tmp_path, monkeypatch, what, inspected, precompiled):
    monkeypatch.setenv("NUMBA_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / f"bad_{len(what)}.py"
    file.write_text(f"{HEAD}KERNEL = replace(m.KERNEL, name='bad', {what})\n")
    for command, said in ((["inspect"], inspected), (["precompile", "--arch", "sm_90a"], precompiled)):
        if said:
            status, out, err = call(*command, str(file))
            assert (status, out) == (1, "")
            assert err.splitlines()[-1].startswith(f"numba_attn: {said}") and "Traceback" not in err


@NO_GPU
def test_precompile_without_a_gpu_asks_for_an_arch(call):
    assert call("precompile")[::2] == (2, "numba_attn: no GPU is found here: --arch (like sm_90a) is needed\n")


def test_as_a_process():
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def run(*argv):
        command = [sys.executable, "-m", "numba_attn", *argv]
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT.parent)

    info, bad = run("info"), run("check", "naive")
    assert (info.returncode, info.stderr) == (0, "")
    assert (bad.returncode, bad.stderr.count("\n"), bad.stdout) == (2, 1, "")


def test_output_that_nobody_reads_any_more():
    _, err = run_python("""
        import os
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        from numba_attn.cli import main
        assert main(["info"]) == 141
    """)
    assert err == ""


# info


def test_info(call, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_ATTN_CACHE_DIR", str(tmp_path))
    (tmp_path / "entry.cubin").write_bytes(bytes(3_000_000))
    status, out, err = call("info")
    assert (status, err) == (0, "")
    for name in (*versions.PACKAGES, *versions.TOOLKIT, *(kernel.summary for kernel in KERNELS)):
        assert name in out
    assert f"{tmp_path} (1 entries, 3.0 MB" in out
    assert out.endswith("problems\n  none found\n")


def test_info_does_not_import_torch():
    out, _ = run_python("""
        import sys
        from numba_attn.cli import main
        main(["info"])
        print([name for name in ("torch", "cupy") if name in sys.modules])
    """)
    assert out.endswith("[]\n")


WRONG_SET = """
    from importlib import metadata
    real = metadata.version

    def version(name):
        if name != {package!r}:
            return real(name)
        found = {found!r}
        if not found:
            raise metadata.PackageNotFoundError(name)
        return found

    metadata.version = version
    from numba_attn.cli import main
    print("status", main(["info"]))
    print("status", main(["demo"]))
"""


@pytest.mark.parametrize(
    ("package", "found", "said"),
    [("numpy", "2.5.1", "does not work with numpy 2.5.1"), ("numba-cuda", None, "numba-cuda is not installed")],
)
def test_a_wrong_set_of_packages_is_told_in_one_line(package, found, said):
    out, err = run_python(WRONG_SET.format(package=package, found=found))
    assert "status 0" in out
    assert "status 1" in out
    assert said in out.partition("problems\n")[2]
    assert said in err
    assert err.count("\n") == 1


def test_info_where_nothing_can_be_imported():
    out, _ = run_python("""
        import sys
        sys.modules["numba"] = sys.modules["numba.cuda"] = None
        from importlib import metadata
        real = metadata.version
        metadata.version = lambda name: "2.5.0" if name == "numpy" else real(name)
        from numba_attn.cli import main
        print("status", main(["info"]))
    """)
    assert "does not work with numpy 2.5.0" in out
    assert out.endswith("status 0\n")


@pytest.mark.parametrize("value", ["1", "0"])
def test_numbas_own_simulator_is_told_to_be_unset(value):
    out, err = run_python(
        """
        from numba_attn.cli import main
        print("status", main(["info"]))
        print("status", main(["check", "-k", "nowhere", "--sim"]))
        """,
        NUMBA_ENABLE_CUDASIM=value,
    )
    told = "NUMBA_ENABLE_CUDASIM is set: unset it, because numba_attn.sim is the simulator"
    assert (told in out.partition("problems\n")[2], told in err) == (value == "1",) * 2
    assert "status 0" in out
    assert err.count("\n") == 1


# check


def test_check_all_kernels(call, few_cases):
    status, out, _ = call("check", "--sim")
    assert status == 0
    assert out == "in the simulator\n" + "".join(f"{k.name}: 2 cases, 2 passed, 0 failed\n" for k in KERNELS)


@NO_GPU
def test_check_says_why_it_simulates(call, few_cases):
    assert "no GPU is found" in call("check", "flash_fp32")[1]


def test_check_only_some_cases(call, few_cases):
    status, out, _ = call("check", "warp_tile_fp32", "--sim", "-k", "causal")
    assert (status, out.splitlines()[-1]) == (0, "warp_tile_fp32: 1 cases, 1 passed, 0 failed")


def test_check_at_another_precision(call, few_cases):
    for kernel in ("flash_split_half_sm80", "warp_tile_fp32"):
        status, out, _ = call("check", kernel, "--sim", "--precision", "tf32", "-k", "tf32")
        assert status == 0 and f"{kernel}: 2 cases, 2 passed" in out


def test_check_leaves_out_what_multiplies_with_torch(call, few_cases, monkeypatch):
    monkeypatch.setattr(launch, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "device_facts", lambda index: H200)
    monkeypatch.setattr(testing, "cases", lambda: few_cases)
    monkeypatch.setattr(check, "require_toolkit", lambda: None)
    monkeypatch.setattr(check, "lost_gpu", lambda: None)
    monkeypatch.setattr(check, "run_on_gpu", check.simulate)
    monkeypatch.setattr(torch_backends, "cuda_torch", lambda: (None, "torch is not installed"))
    status, out, _ = call("check")
    why = "it multiplies with torch or CuPy, and torch is not installed"
    assert status == 0
    assert f"unfused_fp32: left out: {why}\n" in out
    assert out.splitlines()[-1].endswith("2 cases, 2 passed, 0 failed")
    status, out, err = call("check", "unfused_fp32")
    assert (status, err) == (1, f"numba_attn: unfused_fp32 cannot be checked: {why}\n")


def test_check_leaves_out_what_runs_on_other_gpus(call, few_cases, monkeypatch):
    monkeypatch.setattr(launch, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "device_facts", lambda index: replace(H200, name="a GPU", cc=(8, 0)))
    monkeypatch.setattr(testing, "cases", lambda: few_cases)
    monkeypatch.setattr(check, "require_toolkit", lambda: None)
    monkeypatch.setattr(check, "lost_gpu", lambda: None)
    monkeypatch.setattr(check, "run_on_gpu", check.simulate)
    why = "multiplies halves by wgmma, of compute capability 9.0 alone: a GPU has (8, 0)"
    status, out, _ = call("check")
    assert status == 0
    assert f"flash_split_half_sm90: left out: {why}\n" in out
    status, out, err = call("check", "flash_split_half_sm90")
    assert (status, err) == (1, f"numba_attn: flash_split_half_sm90 cannot be checked: {why}\n")


def test_check_a_dropped_bounds_test(call, few_cases, tmp_path):
    file = broken_kernel(tmp_path, "min(uint32(row), last_row)", "row")
    status, out, _ = call("check", file, "--sim")
    assert status == 1
    first, second = (line for line in out.splitlines() if line.startswith("FAIL"))
    assert first.startswith(f"FAIL warp_tile_fp32 {few_cases[0]}: index out of range: tensor gQ[3, 0]")
    assert "my_kernel.py:" in first
    assert str(few_cases[1]) in second
    assert out.splitlines()[-1] == "warp_tile_fp32: 2 cases, 0 passed, 2 failed"


def test_check_a_wrong_result(call, few_cases, tmp_path):
    file = broken_kernel(
        tmp_path, "O[b, h, row, lane + WARP * i] = acc[i] * inverse", "O[b, h, row, lane] = acc[i] * 2"
    )
    status, out, _ = call("check", file, "--sim")
    assert status == 1
    assert "float64 gives" in out
    assert out.splitlines()[1].startswith(f"FAIL warp_tile_fp32 {few_cases[0]}: o[0, 0, 2, 3] = ")
    assert "error" in out
    assert "budget" in out


def test_check_a_kernel_that_raises(call, few_cases, tmp_path):
    file = broken_kernel(tmp_path, "m, l = NEG_INF, ZERO", "m, l = NEG_INF, ZEROS")
    status, out, _ = call("check", file, "--sim")
    assert status == 1
    assert "ZEROS" in out


def test_check_a_kernel_that_does_not_end(call, few_cases, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "SIMULATED_CASE_S", 0.3)
    file = broken_kernel(tmp_path, "m, l = NEG_INF, ZERO", "while True:\n            m, l = NEG_INF, ZERO")
    status, out, _ = call("check", file, "--sim")
    assert status == 1
    assert out.splitlines()[1:3] == [
        f"FAIL warp_tile_fp32 {case}: not done after 0.3 s in the simulator" for case in few_cases
    ]


def test_check_counts_failures_that_are_the_same(call, few_cases, monkeypatch):
    monkeypatch.setattr(testing, "small_cases", lambda: few_cases * 3)

    def evaluate(kernel, case):
        raise AssertionError("the same" if case == few_cases[0] or kernel is KERNELS[0] else "another")

    monkeypatch.setattr(check, "simulate", evaluate)
    status, out, _ = call("check", "--sim")
    lines = out.splitlines()
    assert status == 1
    first, *others = (kernel.name for kernel in KERNELS)
    assert sum(line.startswith(f"FAIL {first} {few_cases[0]}: the same") for line in lines) == 2
    assert f"FAIL {first} in 3 more cases: the same" in lines
    for name in others:
        assert sum(line.startswith(f"FAIL {name} ") for line in lines) == 6
    assert lines[-len(KERNELS)] == f"{first}: 6 cases, 0 passed, 6 failed"


def test_check_a_kernel_that_serves_nothing(call, few_cases, tmp_path):
    file = broken_kernel(tmp_path, "    if problem.Dv > DV_BUCKETS[-1]:", '    return "not today"\n    if False:')
    status, out, _ = call("check", file, "--sim")
    assert (status, out.splitlines()[-1]) == (
        1,
        "warp_tile_fp32: 2 cases, 0 passed, 0 failed, 2 refused by its `supports`",
    )


# A kernel's file


def test_a_file_with_another_name_for_its_kernel(call, few_cases, tmp_path):
    file = broken_kernel(tmp_path, "KERNEL = Kernel(", "MINE = Kernel(")
    assert call("check", f"{file}:MINE", "--sim", "-k", "causal")[0] == 0
    assert call("check", file, "--sim")[::2] == (2, f"numba_attn: {file} has no Kernel called KERNEL\n")


@pytest.mark.parametrize("text", ["def (", "import nowhere_to_be_found", "\n\n1 / 0"])
def test_a_file_that_cannot_be_loaded(call, tmp_path, text):
    file = tmp_path / "no_kernel.py"
    file.write_text(text)
    status, out, err = call("check", file, "--sim")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "no_kernel.py" in err
    assert "cannot be loaded" in err
    assert "0" not in text or "no_kernel.py:3 cannot be loaded: ZeroDivisionError: division by zero" in err


def test_a_file_imports_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_kernel.py").write_text("WARPS = 4\n")
    own = "from numba_attn.device.math import cdiv"
    file = broken_kernel(tmp_path, own, f"{own}\nfrom neighbour_of_kernel import WARPS")
    assert kernel_file.find(str(file))[0].name == "warp_tile_fp32"


def test_a_file_in_a_package_has_relative_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "package_of_kernel" / "kernels"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package.parent / "math.py").write_text("def cdiv(a, b):\n    return -(-a // b)\n")
    file = broken_kernel(package, "from numba_attn.device.math import cdiv", "from ..math import cdiv")
    assert kernel_file.find(str(file))[0].launches.__module__ == "package_of_kernel.kernels.my_kernel"


def test_a_file_of_ours_is_the_module_that_is_registered():
    assert kernel_file.find(warp_tile_fp32.__file__)[0] is warp_tile_fp32.KERNEL


def test_a_file_called_like_a_module_of_pythons_still_counts_for_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = broken_kernel(tmp_path, '"""One warp', '"""A warp', name="statistics.py")
    kernel, _, _ = kernel_file.find(str(file))
    function = kernel.launches(precompile.PROBLEM, next(iter(kernel.configs())))[0].build
    before = launch.cache.key(function, {})
    file.write_text(file.read_text() + "# edited\n")
    assert launch.cache.key(function, {}) != before


def test_bench_of_a_kernel_of_ones_own(call, fake_gpu, tmp_path):
    file = broken_kernel(tmp_path, "m, l = NEG_INF, ZERO", "l, m = ZERO, NEG_INF")
    kernels = ("--kernel", file, "--kernel", "warp_tile_fp32", "--kernel", "warp_tile_fp32")
    status, out, _ = call("bench", "--seconds", "0.01", "--problem", "b2_h2_q5_k7_d4", *kernels)
    assert status == 0
    rows = [line.split("  ")[0] for line in out.splitlines() if line.startswith("warp_tile")]
    assert rows == ["warp_tile_fp32 (given)", "warp_tile_fp32"]


# precompile and inspect


@pytest.fixture
def one_config(tmp_path):
    """A kernel file with one small config and one that is too large for any GPU."""
    heading = "def configs():\n"
    two = "    yield _config(32, False)\n    yield _config(64, True)\n    return\n"
    file = broken_kernel(tmp_path, heading, heading + two)
    text = file.read_text().replace(
        "config.threads, min_blocks", "config.threads, 0 if config.dv_bucket == 32 else 1 << 20, min_blocks"
    )
    file.write_text(text)
    return file


def test_precompile(call, one_config, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    status, out, err = call("precompile", "--arch", "sm_90a", one_config)
    assert status == 0
    header, row, left_out, summary = out.splitlines()
    assert header.split() == list(precompile.HEADER)
    name, arch, registers, spills, _, smem, *config = row.split()
    assert (name, arch, spills) == ("warp_tile_fp32", "sm_90a", "0")
    assert 32 <= int(registers) <= 255
    assert 4096 <= int(smem) <= 48 * 1024
    assert "dv_bucket=32" in config
    assert "is_causal" not in config
    assert left_out.startswith("sm_90a: 1 configs are left out: they need 1048576 bytes of shared memory")
    assert summary == f"1 configs are in {tmp_path / 'cache'}"
    assert err.startswith("0/2 warp_tile_fp32 sm_90a")
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == 1


def test_precompile_leaves_out_what_runs_on_other_gpus(call, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    status, out, _ = call("precompile", "--arch", "sm_80", "flash_split_half_sm90")
    why = "multiplies halves by wgmma, of compute capability 9.0 alone: GPU of sm_80 has (8, 0)"
    left_out, summary = out.splitlines()
    assert (status, left_out) == (0, f"sm_80: flash_split_half_sm90 is left out: {why}")
    assert summary.startswith("0 configs are in")


def test_precompile_of_what_does_not_compile(call, tmp_path, monkeypatch, one_config):
    monkeypatch.setenv("NUMBA_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    one_config.write_text(one_config.read_text().replace("m, l = NEG_INF, ZERO", "m, l = NEG_INF, ZEROS"))
    status, out, _ = call("precompile", "--arch", "sm_90a", one_config)
    assert status == 1
    assert "ZEROS" in out
    assert "0 configs are in" in out
    assert "1 failed" in out


def test_precompile_into_a_directory_that_cannot_be_written(call, tmp_path, monkeypatch, one_config):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_ATTN_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(launch.compiler, "binary", None)  # nothing may be compiled first
    folder = tmp_path / "file"
    line = f"cannot write the cache in {folder}: {folder} is no directory ($NUMBA_ATTN_CACHE_DIR moves it)\n"
    assert call("precompile", "--arch", "sm_90a", one_config) == (1, "", f"numba_attn: {line}")
    status, out, err = call("info")
    assert (status, err) == (0, "")
    assert out.endswith(f"problems\n  {line}")


def test_precompile_counts_what_the_cache_did_not_take(call, tmp_path, monkeypatch):
    """Broke once: only the first write that failed was told, the others counted as kept."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("NUMBA_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(precompile, "configs", lambda kernel, found=precompile.configs: list(found(kernel))[:3])
    monkeypatch.setattr(os, "replace", full)
    status, out, err = call("precompile", "--arch", "sm_90a", "warp_streaming_fp32")
    assert status == 1 and "Warning" not in err
    assert out.count("FAIL warp_streaming_fp32 sm_90a") == out.count("No space left on device") == 3
    assert out.endswith(f"0 configs are in {tmp_path / 'cache'}, 3 failed\n")


def test_shared_memory_of_archs():
    assert targets.device_of("sm_90a") == H200.__class__(
        "GPU of sm_90a", (9, 0), H200.sm_count, H200.smem_per_block_bytes, H200.l2_bytes
    )
    assert targets.device_of("sm_80").smem_per_block_bytes == 163 * 1024
    assert targets.device_of("sm_120a").smem_per_block_bytes == 99 * 1024


def test_every_config_has_launches():
    for kernel in KERNELS:
        pieces = list(precompile.configs(kernel))
        assert {config for _, config, _, _ in pieces} == set(kernel.configs())


def test_inspect(call, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_ATTN_CACHE_DIR", str(tmp_path))
    status, out, _ = call("inspect", "warp_tile_fp32", "--head-dim", "32", "--causal")
    assert status == 0
    assert out.splitlines()[1].split()[:2] == ["warp_tile_fp32", "sm_90a"]
    status, out, _ = call("inspect", "warp_tile_fp32", "--head-dim", "32", "--ptx", "--arch", "sm_80")
    assert status == 0
    assert ".target sm_80" in out
    assert ".entry" in out


# mutate


def test_mutate(call, monkeypatch):
    toy = ROOT / "tests" / "sim" / "toy_kernel.py"
    kept = mutate.mutants(toy)[:3]
    report = mutate.Report("toy", tuple(mutate.Row("toy.py", m, "error", "race", 0.1) for m in kept), ())
    survived = mutate.Row("toy.py", kept[0], "survived", "", 0.1)

    def run(path, progress, name, equivalent, without, jobs):
        assert (Path(path), name, equivalent) == (toy, "KERNEL", None)
        assert jobs == (2 if report.stale else os.cpu_count())
        assert without == ([(Path(warp_tile_fp32.__file__), "KERNEL"), (toy, "KERNEL")] if report.stale else [])
        for number, row in enumerate(report.rows, 1):
            progress(number, len(report.rows), row)
        return report

    monkeypatch.setattr(mutate, "run", run)
    status, out, err = call("mutate", toy)
    assert (status, out.splitlines()) == (0, ["outcome  mutants", "error          3"])
    assert err.splitlines()[-1] == f"3/3 toy.py:{kept[2].line} {kept[2].description}"
    report = mutate.Report("toy", (*report.rows, survived), ("gone: drop",))
    status, out, _ = call("mutate", toy, "--jobs", "2", "--without", "warp_tile_fp32", "--without", toy)
    assert status == 1
    assert out.startswith(f"SURVIVED toy.py:{kept[0].line} {kept[0].description}\n")
    assert out.endswith("STALE gone: drop\n")


def test_mutate_without_what_is_no_kernel(call):
    status, _, err = call("mutate", "flash_fp32", "--without", "flash_fp23")
    assert status == 2 and "'flash_fp23' is neither a kernel" in err


def test_mutate_for_real(call, monkeypatch):
    monkeypatch.setattr(mutate.run, "__defaults__", (mutate.CASES[:1], None))
    monkeypatch.setattr(mutate, "mutants", lambda path, every=mutate.mutants: every(path)[:4])
    status, out, _ = call("mutate", ROOT / "tests" / "sim" / "toy_kernel.py", "--jobs", "1")
    assert status in (0, 1)
    assert out.startswith(("outcome", "SURVIVED"))


# demo


@NO_GPU
def test_demo_without_a_gpu(call):
    status, out, _ = call("demo")
    assert status == 0
    assert "this is the simulator" in out
    assert [line.split()[0] for line in out.splitlines()[-len(KERNELS) :]] == [kernel.name for kernel in KERNELS]


@NO_GPU
def test_demo_with_a_wrong_kernel(call, tmp_path, monkeypatch):
    file = broken_kernel(tmp_path, "s = s * scale if", "s = s * scale * scale if")
    monkeypatch.setattr(demo, "KERNELS", (warp_tile_fp32.KERNEL, kernel_file.find(str(file))[0]))
    monkeypatch.setattr(demo, "SIMULATED", testing.Case(1, 1, 3, 5, 4, 4))
    status, out, _ = call("demo")
    assert status == 1
    right, wrong, why = out.splitlines()[-3:]
    assert "wrong" not in right
    assert wrong.split()[1] == "wrong"
    assert why.startswith("WRONG warp_tile_fp32: o[0, 0, ")


@pytest.fixture
def small_headline(monkeypatch):
    """A headline problem that takes a moment."""
    known = NamedProblem(problems.make_problem(2, 2, 5, 7, 4, 4), "small", inputs="uniform", every_kernel=True)
    monkeypatch.setattr(demo, "HEADLINE", known)
    monkeypatch.setattr(demo, "BUDGET_S", 0.01)
    return known


def test_demo_measures(call, fake_gpu, small_headline):
    status, out, _ = call("demo")
    assert status == 0
    assert f"TF32 off; {NO_TORCH}" in out
    _, _, rest = out.partition("\n\n")
    header, *rows = rest.splitlines()
    assert header.split()[:3] == ["kernel", "ms", "TFLOP/s"]
    assert [row.split()[:2] for row in rows[: len(KERNELS)]] == [[kernel.name, "0.500"] for kernel in KERNELS]
    assert [row.split()[:2] for row in rows[len(KERNELS) :]] == [
        *([name, "refused"] for name in BASELINES),
        *(["REFUSED", f"{name}:"] for name in BASELINES),
    ]


def test_demo_shows_torch(call, fake_gpu_with_torch, small_headline):
    fake_gpu_with_torch.ms["torch"] = 0.25
    status, out, _ = call("demo")
    assert status == 0
    assert "every element against torch's float64" in out
    version = fake_gpu_with_torch.torch.__version__.partition("+")[0]
    rows = [line for line in out.splitlines() if line.startswith("torch_math")]
    assert rows[0].startswith(f"torch_math (torch {version}, math)")
    assert rows[0].split()[-3] == "1.00"
    ours = next(line for line in out.splitlines() if line.startswith(KERNELS[0].name))
    assert ours.split()[1:] == ["0.500", "0.0", ours.split()[3], "2.00", "10.0", "10.0"]


@pytest.mark.parametrize("command", [("demo",), ("bench", "--problem", "b2_h2_q5_k7_d4", "--seconds", "0.01")])
def test_nothing_that_is_wrong_is_timed(call, fake_gpu, small_headline, command):
    def damage(name, o, lse):
        o += name == KERNELS[0].name

    fake_gpu.damage = damage
    status, out, _ = call(*command)
    assert status == 1
    (row,) = [line for line in out.splitlines() if line.startswith(KERNELS[0].name)]
    assert row.split() == [KERNELS[0].name, "wrong"]
    why = f"WRONG {KERNELS[0].name}: of the heads [(0, 0), (1, 1)], 5 rows from 0 to 4: o[0, "
    assert why in out


def test_demo_takes_a_smaller_batch_where_memory_is_short():
    headline = demo.HEADLINE
    whole = 7 * 4 * 32 * 32 * 512 * 1024
    assert demo.fitting(headline, whole) == headline
    assert demo.fitting(headline, whole - 1).problem.B == 16
    smallest = demo.fitting(headline, 0)
    assert (smallest.problem.B, smallest.name, smallest.inputs) == (1, "b1_h32_q512_k512_d1024", "uniform")


def test_demo_where_nothing_fits(call, fake_gpu, small_headline, monkeypatch):
    monkeypatch.setattr(launch, "free_bytes", lambda index: 1)
    status, _, err = call("demo")
    assert status == 1
    assert err.splitlines()[-1].startswith("numba_attn: b1_h2_q5_k7_d4 needs ")


def test_tf32_flags_are_off_and_restored():
    torch = pytest.importorskip("torch")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch_backends.tf32(torch, on=False):
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32 == before[1]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[0]


def test_torch_tells_its_backend():
    torch = pytest.importorskip("torch")
    q = torch.rand(1, 1, 4, 8)
    assert torch_backends.backend_of(torch, "torch_default", q, q, q, is_causal=False) in ("math", "flash_attention")
    assert torch_backends.backend_of(torch, "torch_math", q, q, q, is_causal=False) == "math"
    assert torch_backends.backend_of(SimpleNamespace(), "torch_default", q, q, q, is_causal=False) == "unknown"


# The GPU parts


@pytest.mark.gpu
def test_demo_on_a_gpu(call, monkeypatch):
    known = NamedProblem(problems.make_problem(2, 3, 65, 130, 72, 72), "small", inputs="uniform")
    monkeypatch.setattr(demo, "HEADLINE", known)
    status, out, _ = call("demo")
    assert status == 0
    assert "torch_default (torch " in out
    assert [kernel.name for kernel in KERNELS if f"\n{kernel.name} " not in out] == []


@pytest.mark.gpu
@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_check_on_a_gpu(call, monkeypatch, layout):
    cases = (testing.Case(2, 3, 17, 33, 12, 12, layout=layout, is_causal=True),)
    monkeypatch.setattr(testing, "cases", lambda: cases)
    assert call("check")[0] == 0


@pytest.mark.gpu
def test_check_on_a_gpu_sees_stray_writes(call, monkeypatch, tmp_path):
    monkeypatch.setattr(testing, "cases", lambda: (testing.Case(1, 1, 3, 5, 4, 4),))
    file = broken_kernel(tmp_path, "        if row < Lq:\n", "        if row < Lq + 1:\n")
    status, out, _ = call("check", file)
    assert status == 1
    assert "elements outside the output were written" in out


# The screen


def test_table():
    assert screen.table(("a", "bb"), [("x", "1"), ("long", "2")]) == "a     bb\nx      1\nlong   2"
    assert screen.table(("a", "text"), [("x", "left it is")]) == "a  text\nx  left it is"


def test_time_left():
    assert screen.time_left(10, 0, 5) == ""
    assert screen.time_left(10, 1, 5) == ", 0:40 left"
    assert screen.time_left(65, 0.5, 1) == ", 1:05 left"
    assert screen.time_left(100, 99.5, 100) == screen.time_left(100, 100, 100) == ""


def test_progress_without_a_terminal_is_a_few_lines_with_the_time_left(monkeypatch, capsys):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(screen.time, "monotonic", lambda: next(now))
    with screen.Progress() as progress:
        for tenth in range(0, 31):
            progress.show(tenth / 10, 3, "measuring")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert (lines[0], lines[-1]) == ("0/3 measuring", "3/3 measuring")
    assert lines[5] == "1/3 measuring, 2:40 left"


def test_progress_bar_is_cleared_for_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with screen.Progress() as progress:
        progress.show(1, 2, "one")
        progress.say("a line")
    out, err = capsys.readouterr()
    assert out == "a line\n"
    assert f"[{'#' * 12}{'.' * 12}] 1/2 one" in err
    assert err.endswith("\r\x1b[K")
