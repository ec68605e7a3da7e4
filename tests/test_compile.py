"""Contract under test: what the compiler makes of every kernel, and how many kernels there are. No GPU is needed.

Machine code is made of every config that fits a Hopper GPU, once a session. PTX takes as long again, and other
architectures too: those gates run on few configs of each kernel, chosen so that every value of every field of its
`Config` occurs in one of them (`covering`); of the other architectures the first two of these.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_attn import testing
from numba_attn.device import mma_tile
from numba_attn.device.rescue_kernel import build_rescue
from numba_attn.device.split_kernel import build_split
from numba_attn.device.weights_kernel import build_weights
from numba_attn.device.wgmma_fragments import GROUP_THREADS
from numba_attn.kernel import OPERANDS, Part, grids
from numba_attn.kernels import (
    KERNELS,
    flash_split_half_sm80,
    flash_split_half_sm90,
    unfused_split_half_sm80,
    unfused_split_half_sm90,
)
from numba_attn.kernels.split_keys_fp32 import MergeConfig
from numba_attn.launch import cache, compiler
from numba_attn.problem import H200, MAX_GRID, PRECISIONS, Device, Problem

A100 = Device("a GPU with 163 KB of shared memory a block", (8, 0), 108, 163 * 1024, 40 * 2**20)
SMALL = Device("a GPU with 99 KB of shared memory a block", (12, 0), 170, 99 * 1024, 96 * 2**20)

# The smallest problem fits any config, and equal configs mean equal machine code.
PROBLEM = Problem(B=1, H=1, Hkv=1, Lq=1, Lk=1, D=1, Dv=1)

MOST_CUBINS, MOST_ADDED_CUBINS = 100, 20
MOST_WORKSPACE_BYTES = 512 * 10**6

REGISTERS_PER_SM, REGISTER_UNIT = 65536, 8
STATIC_SMEM_BYTES = 48 * 1024

# Stores and loads together. Patches that fill 255 registers leave none for what a chunk of keys needs only at its
# ends (lengths, strides, row statistics); more than this many bytes would be accumulators. That none of it is in a key
# loop is gated below.
MOST_SPILL_BYTES = 640
MOST_SPILL_BYTES_OF = {
    "flash_split_half_sm80": 200,
    "flash_split_half_sm90": 32,
    "unfused_split_half_sm80": 160,
    "unfused_split_half_sm90": 0,
}

KEY_LOOP_FMAS = 32
"""A basic block with as many fused multiply-adds as this is the body of a key loop."""

KEY_LOOPS = {
    # The waits for slots cut this loop at every statement of products.
    "flash_split_half_sm90": lambda config: (("HGMMA",), 1),
    "unfused_split_half_sm80": lambda config: (("HMMA",), KEY_LOOP_FMAS),
    "unfused_split_half_sm90": lambda config: (("HGMMA",), 1),
    "flash_split_half_sm80": lambda config: (("HMMA",), KEY_LOOP_FMAS),
    "warp_streaming_fp32": lambda config: (("FFMA", "LDG"), config.batch),
}
"""By kernel, where that is not so: the opcodes that count, and how many. This loop is cut at each batch of loads."""

# Two blocks of 512 threads an SM leave 64 registers a thread: one pointer waits beside 16 shared loads of 16 bytes.
MOST_LOCAL_ACCESSES_IN_KEY_LOOPS = {
    "flash_split_half_sm90": 0,
    "unfused_split_half_sm80": 1,
    "unfused_split_half_sm90": 0,
    "flash_split_half_sm80": 1,
    "split_keys_fp32": 0,
    "flash_fp32": 0,
    "unfused_fp32": 0,
    "warp_tile_fp32": 1,
    "warp_streaming_fp32": 0,
    "block_per_head_fp32": 0,
    "warp_tile_multi_fp32": 0,
    "warp_two_pass_fp32": 1,
}

# Local memory, doubles, flushed denormals, approximate divisions, accesses that do not know their memory, calls.
NEVER_IN_PTX = (
    r"\.local\b",
    r"\.f64\b",
    r"\b(fma|add|sub|mul|max|min)\.[a-z.]*ftz",
    r"\b(div|rcp|sqrt)\.(approx|full)",
    r"\b(ld|st)\.(v[24]\.)?[bf]32\b",
    r"\bcall\b",
)


def flash_fp32_ptx(launch):
    n_bytes = 4 * launch.config.vector
    cache_operator, other = ("cg", "ca") if n_bytes == 16 else ("ca", "cg")
    copy = rf"cp\.async\.{cache_operator}\.shared\.global \[[^]]+\], \[[^]]+\], {n_bytes},"
    present = (copy, r"cp\.async\.wait_group", r"ld\.shared\.v4", r"shfl\.sync\.bfly", r"ex2\.approx\.f32")
    return present, (rf"cp\.async\.{other}\.", r"ex2\.approx\.ftz")


def warp_tile_fp32_ptx(launch):
    return (r"shfl\.sync", r"ld\.shared\.v4", r"ld\.global"), (r"cp\.async", r"begin inline asm")


def warp_streaming_fp32_ptx(launch):
    return (r"shfl\.sync\.bfly", r"ld\.global"), (r"\.shared", r"bar\.", r"cp\.async", r"begin inline asm")


def block_per_head_fp32_ptx(launch):
    # Numba asks for the size of dynamic shared memory in inline assembly.
    foreign = r"begin inline asm\n(?!\s*mov\.u32 %r\d+, %dynamic_smem_size;)"
    return (r"shfl\.sync\.bfly", r"ld\.shared", r"ld\.global", r"bar\.warp\.sync"), (r"cp\.async", foreign)


def split_keys_fp32_ptx(launch):
    absent = (r"cp\.async", r"\b(ld|st)\.shared", r"\bbar\.", r"ex2\.approx\.ftz")
    present = (r"shfl\.sync\.bfly", r"ex2\.approx\.f32")
    if isinstance(launch.config, MergeConfig):
        return (*present, r"shfl\.sync\.idx", r"ld\.global\.f32"), absent
    vectors = (r"ld\.global\.v4\.f32", r"st\.global\.v4\.f32")
    return ((*present, *vectors), absent) if launch.config.vector == 4 else (present, (*absent, *vectors))


def unfused_fp32_ptx(launch):
    return (r"ld\.global\.f32", r"st\.global\.[uf]32"), (r"cp\.async", r"ld\.global\.v")


def around_halves_ptx(launch):
    """Of the launches that kernels of halves share; None for others."""
    if launch.build is build_split:
        loads = r"ld\.global\.v4\.f32" if launch.config.vector == 4 else r"\bld\.(global\.)?[bfu]32"
        counts = (r"max\.NaN\.f32", r"set\.ge\.f16x2\.f16x2", r"bar(rier)?\.red\.\S*or")
        present = (loads, r"cvt\.rn\.f16x2\.f32", r"st\.global\.v4", *counts)
        return present, (r"mma", r"cp\.async", r"\batom\b", r"(div|rem)\.s")
    if launch.build is build_rescue:
        return (r"shfl\.sync\.bfly", r"ld\.global\.f32"), (r"mma", r"cp\.async")
    if launch.build is build_weights:
        return (r"ex2\.approx\.ftz", r"ld\.global\.f32", r"st\.global\.[fu]32"), (r"mma", r"cp\.async", r"\.shared")
    return None


LDMATRIX, LDMATRIX_TRANS = (rf"ldmatrix\.sync\.aligned\.m8n8\.x4{trans}\.shared" for trans in ("", r"\.trans"))
OF_MMA = (r"cp\.async\.cg\.shared\.global \[[^]]+\], \[[^]]+\], 16[,;]", LDMATRIX, r"mma\.sync\.aligned\.m16n8k16")


def flash_split_half_sm80_ptx(launch):
    absent = (r"cp\.async\.ca", r"\batom\b")
    return around_halves_ptx(launch) or ((*OF_MMA, LDMATRIX_TRANS, r"ex2\.approx\.ftz"), absent)


def flash_split_half_sm90_ptx(launch):
    copies = r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes"
    barriers = (r"mbarrier\.try_wait\.parity", r"mbarrier\.arrive\.expect_tx", r"fence\.mbarrier_init")
    registers = (r"setmaxnreg\.dec", r"setmaxnreg\.inc")
    present = (copies, *barriers, *registers, r"wgmma\.mma_async\.sync", r"ex2\.approx\.ftz")
    return around_halves_ptx(launch) or (present, (r"mma\.sync", r"ldmatrix", r"cp\.async\.c[ag]", r"\batom\b"))


def unfused_split_half_sm90_ptx(launch):
    copies = r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes"
    present = (copies, r"mbarrier\.try_wait\.parity", r"setmaxnreg\.dec", r"setmaxnreg\.inc", r"wgmma\.mma_async\.sync")
    return around_halves_ptx(launch) or (present, (r"[^w.g]mma\.sync", r"ldmatrix", r"cp\.async\.c[ag]", r"\batom\b"))


def unfused_split_half_sm80_ptx(launch):
    of_scores, of_outputs = (r"ex2\.approx\.ftz", r"cvt\.rn\.f16x2\.f32"), (LDMATRIX_TRANS,)
    absent, is_scores = (r"cp\.async\.ca", r"\batom\b"), launch.build is unfused_split_half_sm80.build_scores
    present, foreign = (of_scores, of_outputs) if is_scores else (of_outputs, of_scores)
    return around_halves_ptx(launch) or ((*OF_MMA, *present), (*absent, *foreign))


EXPECTED_PTX = {
    "flash_split_half_sm90": flash_split_half_sm90_ptx,
    "unfused_split_half_sm80": unfused_split_half_sm80_ptx,
    "unfused_split_half_sm90": unfused_split_half_sm90_ptx,
    "flash_split_half_sm80": flash_split_half_sm80_ptx,
    "split_keys_fp32": split_keys_fp32_ptx,
    "flash_fp32": flash_fp32_ptx,
    "unfused_fp32": unfused_fp32_ptx,
    "warp_tile_fp32": warp_tile_fp32_ptx,
    "warp_streaming_fp32": warp_streaming_fp32_ptx,
    "block_per_head_fp32": block_per_head_fp32_ptx,
    "warp_tile_multi_fp32": warp_tile_fp32_ptx,
    "warp_two_pass_fp32": warp_tile_fp32_ptx,
}
"""By kernel, of a launch: patterns that its PTX has, and that it has not, besides those of every kernel."""


def fitting(kernel, device: Device) -> list:
    """The configs whose dynamic shared memory fits the device."""
    return [
        config
        for config in kernel.configs()
        if all(launch.smem_bytes <= device.smem_per_block_bytes for launch in grids(kernel.launches(PROBLEM, config)))
    ]


def covering(configs) -> list:
    """A few of the configs in which every value of every field occurs, the one with most new ones first."""

    def values(config):
        return set(dataclasses.asdict(config).items())

    chosen, missing = [], set().union(*map(values, configs))
    while missing:
        chosen.append(max(configs, key=lambda config: len(values(config) & missing)))
        missing -= values(chosen[-1])
    return chosen


def each_config(device: Device, choose=list, most=None):
    """Parameters `kernel` and `config`; the tests of one config share a worker under xdist, and its compilation."""

    def label(kernel, config):
        return "-".join([kernel.name, *(f"{name}={int(value)}" for name, value in dataclasses.asdict(config).items())])

    pairs = [(kernel, config) for kernel in KERNELS for config in choose(fitting(kernel, device))[:most]]
    return pytest.mark.parametrize(
        ("kernel", "config"),
        [pytest.param(*pair, id=label(*pair), marks=pytest.mark.xdist_group(label(*pair))) for pair in pairs],
    )


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path_factory, monkeypatch):
    """The session's own cache directory: what is gated is compiled by the tools that are installed now."""
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path_factory.getbasetemp() / "compiled"))


@functools.cache
def machine_code(kernel, config, arch: str) -> list:
    """(launch, binary) of each launch of a config."""
    workspace = kernel.workspace(PROBLEM, config)
    return [(launch, compiler.binary(launch, workspace, arch)) for launch in grids(kernel.launches(PROBLEM, config))]


def check_resources(device: Device, kernel, launch, binary) -> None:
    assert binary.spill_bytes <= MOST_SPILL_BYTES_OF.get(kernel.name, MOST_SPILL_BYTES)
    allocated = -(-binary.registers // REGISTER_UNIT) * REGISTER_UNIT
    assert allocated * launch.threads * launch.min_blocks <= REGISTERS_PER_SM
    assert binary.static_smem_bytes <= STATIC_SMEM_BYTES
    smem_bytes = launch.smem_bytes + binary.static_smem_bytes
    assert smem_bytes <= device.smem_per_block_bytes


@each_config(H200)
def test_resources(kernel, config):
    for launch, binary in machine_code(kernel, config, H200.arch):
        check_resources(H200, kernel, launch, binary)


@pytest.mark.parametrize("device", [A100, SMALL], ids=lambda device: device.arch)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_other_architectures(kernel, device):
    if reason := kernel.supports(PROBLEM, device):
        pytest.skip(f"{kernel.name}: {reason}")
    configs = covering(fitting(kernel, device))[:2]
    assert configs
    for config in configs:
        for launch, binary in machine_code(kernel, config, device.arch):
            check_resources(device, kernel, launch, binary)


@functools.cache
def nvdisasm() -> str | None:
    """The disassembler of the CUDA toolkit, from the path or from a wheel."""
    spec = importlib.util.find_spec("nvidia")
    folders = map(Path, spec.submodule_search_locations if spec else ())
    wheels = (str(path) for folder in folders for path in folder.glob("c*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(wheels, None)


needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm (nvidia-cuda-nvdisasm) is not installed")

SASS_LABEL = re.compile(r"\s*\.L_\w+:")
SASS_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)")
ENDS_A_BLOCK = ("BRA", "BRX", "CALL", "EXIT", "RET")


def basic_blocks(cubin: Path) -> list[list[str]]:
    """Opcodes of the machine code, block by block."""
    text = subprocess.run([nvdisasm(), "-c", cubin], check=True, capture_output=True, text=True).stdout
    blocks = [[]]
    for line in text.splitlines():
        if SASS_LABEL.match(line):
            blocks.append([])
        elif found := SASS_INSTRUCTION.match(line):
            blocks[-1].append(found[1])
            if found[1].split(".")[0] in ENDS_A_BLOCK:
                blocks.append([])
    return blocks


def is_local(opcode: str) -> bool:
    return opcode.split(".")[0] in ("LDL", "STL")


def is_double(opcode: str) -> bool:
    return re.match(r"D(ADD|FMA|MUL|MNMX|SETP)\b", opcode) is not None or ".F64" in opcode


@needs_nvdisasm
@each_config(H200)
def test_key_loops_keep_to_registers(kernel, config, tmp_path):
    file, all_blocks = tmp_path / "kernel.cubin", []
    for _, binary in machine_code(kernel, config, H200.arch):
        file.write_bytes(binary.cubin)
        blocks = basic_blocks(file)
        all_blocks += blocks
        assert not [opcode for block in blocks for opcode in block if is_double(opcode)]
        assert any(map(is_local, sum(blocks, []))) == (binary.stack_bytes > 0), "spills that the disassembly lacks"
    opcodes, least = KEY_LOOPS.get(kernel.name, lambda config: (("FFMA",), KEY_LOOP_FMAS))(config)
    key_loops = [block for block in all_blocks if sum(opcode.startswith(opcodes) for opcode in block) >= least]
    if kernel.uses_matmul:
        key_loops = all_blocks  # the products are the library's
    assert key_loops
    most = MOST_LOCAL_ACCESSES_IN_KEY_LOOPS[kernel.name]
    assert max(sum(map(is_local, block)) for block in key_loops) <= most
    if opcodes == ("HGMMA",):
        # Descriptors come from uniform registers, not from every lane.
        assert not [opcode for opcode in sum(key_loops, []) if opcode.startswith("R2UR")]


def test_every_kernel_is_listed():
    assert set(EXPECTED_PTX) == set(MOST_LOCAL_ACCESSES_IN_KEY_LOOPS) == {kernel.name for kernel in KERNELS}


@each_config(H200, covering)
def test_ptx(kernel, config):
    workspace = kernel.workspace(PROBLEM, config)
    has_fma = False
    for launch in grids(kernel.launches(PROBLEM, config)):
        present, absent = EXPECTED_PTX[kernel.name](launch)
        ptx = compiler.ptx(launch, workspace, H200.arch)
        has_fma |= "fma.rn.f32" in ptx
        for pattern in present:
            assert re.search(pattern, ptx), f"no {pattern}"
        for pattern in (*NEVER_IN_PTX, *absent):
            found = re.search(f".*{pattern}.*", ptx)
            assert found is None, found[0]
    assert has_fma


def products_of(module, config) -> list[int]:
    """Of each launch between split and rescue, but those that split beside it, the number of products in its PTX."""
    _, *launches, _ = (launch for launch in module.launches(PROBLEM, config) if not launch.is_beside)
    workspace = module.workspace(PROBLEM, config)
    texts = [compiler.ptx(launch, workspace, H200.arch) for launch in launches]
    return [len(re.findall(r"\b(?:wg)?mma\.(?:mma_a)?sync", text)) for text in texts]


@pytest.mark.parametrize("config", list(flash_split_half_sm80.configs()), ids=str)
def test_products_of_halves(config):
    rows, steps = config.q_rows // 16, -(-config.d_bucket // 16)
    of_s = config.products * steps * rows * (config.k_rows // 8)
    of_o = min(config.products, 3) * (config.k_rows // 16) * rows * 2 * steps
    assert products_of(flash_split_half_sm80, config) == [of_s + of_o]


def test_one_half_takes_a_third_of_the_products_and_half_of_the_memory():
    # Of more columns than a short sum has: there operands are read twice for three products.
    tiles = next(tiles for tiles in flash_split_half_sm80.ONE_PRODUCT if tiles.d_bucket > mma_tile.SHORT)
    texts, image_bytes = [], []
    for config in (tiles, dataclasses.replace(tiles, products=3)):
        workspace = flash_split_half_sm80.workspace(PROBLEM, config)
        split, flash, _ = flash_split_half_sm80.launches(PROBLEM, config)
        texts.append([compiler.ptx(launch, workspace, H200.arch) for launch in (split, flash)])
        image_bytes.append([4 * space.shape[1] for name, space in workspace.items() if name.endswith("_image")])
        image_bytes[-1].append(config.smem_bytes)

    factors = {(0, "st.global.v4"): 2, (1, "mma.sync"): 3, (1, "ldmatrix.sync"): 2, (1, "cp.async.cg"): 2}
    for (launch, instruction), factor in factors.items():
        one, three = (text[launch].count(instruction) for text in texts)
        assert three == factor * one > 0, instruction
    assert image_bytes[1] == [2 * n for n in image_bytes[0]]


@pytest.mark.parametrize("config", list(unfused_split_half_sm80.configs()), ids=str)
def test_products_of_halves_unfused(config):
    per_slab = 3 * (32 // 16) * (64 // 16) * (64 // 8)
    assert products_of(unfused_split_half_sm80, config) == [per_slab, 0, per_slab]


@pytest.mark.parametrize("config", list(unfused_split_half_sm90.configs()), ids=str)
def test_products_of_warpgroups_unfused(config):
    per_tile = (3 if config.halves == 2 else 1) * (64 // 16) * 2
    assert products_of(unfused_split_half_sm90, config) == [per_tile, 0, per_tile]


@pytest.mark.parametrize("config", list(flash_split_half_sm90.configs()), ids=str)
def test_products_of_warpgroups(config):
    of_s = config.products * -(-config.d_bucket // 16)
    of_o = min(config.products, 3) * (64 // 16) * -(-config.d_bucket // config.o_columns)
    assert products_of(flash_split_half_sm90, config) == [of_s + of_o]


@needs_nvdisasm
@pytest.mark.parametrize("config", list(flash_split_half_sm90.configs()), ids=str)
def test_machine_code_of_warpgroups(config, tmp_path):
    """Registers change hands, and products are in flight together: the compiler waits once a statement, not more."""
    _, (launch, binary), _ = machine_code(flash_split_half_sm90.KERNEL, config, H200.arch)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.cubin)
    opcodes = sum(basic_blocks(file), [])
    parts = [min(config.part, config.d_bucket - start) for start in range(0, config.d_bucket, config.part)]
    of_s = sum(-(-columns // (64 * config.s_chains)) for columns in parts)
    of_o = sum(-(-columns // config.o_columns) for columns in parts)
    waits = [opcode for opcode in opcodes if opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == of_s + of_o
    assert sum(opcode.startswith("USETMAXREG") for opcode in opcodes) == 2
    few, many = config.registers
    # More than the block starts with would be waited for, for ever.
    assert (few + config.groups * many) * GROUP_THREADS <= binary.registers * launch.threads


def cubins_of_the_matrix(kernels, precision: str) -> set:
    """What decides the machine code of the launches that `testing.cases` need."""
    problems = [case.problem for case in testing.cases() if case.precision == precision]
    return {
        (launch.build, launch.config, launch.threads, launch.min_blocks)
        for kernel in kernels
        for problem in problems
        if kernel.supports(problem, H200) is None
        for launch in grids(kernel.launches(problem, kernel.config(problem, H200)))
    }


ADDED = ("unfused_split_half_sm80", "flash_split_half_sm90", "unfused_split_half_sm90")
"""Kernels from the tenth rung on: the bound of all together is that of the nine before."""


def test_cubins_of_the_matrix():
    assert len(cubins_of_the_matrix([k for k in KERNELS if k.name not in ADDED], "fp32")) <= MOST_CUBINS


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ADDED)
def test_cubins_that_a_kernel_adds(name, precision):
    others = cubins_of_the_matrix([k for k in KERNELS if k.name != name], precision)
    own = cubins_of_the_matrix([k for k in KERNELS if k.name == name], precision)
    assert len(own - others) <= MOST_ADDED_CUBINS


lengths = st.sampled_from([1, 2, 17, 63, 64, 65, 512, 4096, 2**20, 2**31 - 1]) | st.integers(1, 5000)
problems = st.builds(
    lambda H, **sizes: Problem(H=H, Hkv=H, **sizes),
    B=st.integers(1, 300),
    H=st.integers(1, 300),
    Lq=lengths,
    Lk=lengths,
    D=lengths,
    Dv=lengths,
    is_causal=st.booleans(),
    vector=st.sampled_from([1, 2, 4]),
)


@pytest.mark.parametrize("device", [H200, A100, SMALL], ids=lambda device: device.arch)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@given(problem=problems)
def test_config_is_a_listed_one_that_fits(kernel, device, problem):
    if kernel.supports(problem, device) is not None:
        return
    config = kernel.config(problem, device)
    assert config in set(kernel.configs())
    workspace = kernel.workspace(problem, config)
    assert sum(4 * math.prod(space.shape) for space in workspace.values()) <= MOST_WORKSPACE_BYTES
    for launch in grids(kernel.launches(problem, config)):
        assert launch.smem_bytes <= device.smem_per_block_bytes
        assert 1 <= launch.grid <= MAX_GRID
        assert launch.threads % 32 == 0 and 32 <= launch.threads <= 1024
        names = {arg.name if isinstance(arg, Part) else arg for arg in launch.args if not isinstance(arg, int)}
        assert names <= {*OPERANDS, "scale", *workspace}


def test_blocks_of_wide_heads_fit_an_sm_together():
    devices = (H200, A100, SMALL)
    chosen = [unfused_split_half_sm80.config(PROBLEM, device) for device in devices]
    assert [(config.slots, config.blocks) for config in chosen] == [(3, 2), (2, 2), (3, 1)]
    assert len(unfused_split_half_sm80.TILES) == len(chosen), "tiles of no GPU"
    for config, device in zip(chosen, devices, strict=True):
        # Each block takes 1 KB besides its own, and one block can have all of an SM but that.
        assert config.blocks * (config.smem_bytes + 1024) <= device.smem_per_block_bytes + 1024


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_configs_are_distinct(kernel):
    configs = list(kernel.configs())
    assert len(set(configs)) == len(configs)
