"""Contract under test: arrays of each library are told apart by type, read without a copy, and imported in order."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

import numba_attn
from numba_attn import interop, launch, versions
from numba_attn.interop import device_arrays, numpy_arrays
from numba_attn.problem import Operand, contiguous_strides


def test_import_is_quick_and_leaves_array_libraries_alone():
    code = """
import sys, time
start = time.process_time()
import numba_attn
took = time.process_time() - start
assert "numba" not in sys.modules, "Numba takes most of a second"
import numpy as np
x = np.zeros((4, 8), np.float32)
numba_attn.explain(x, x, x)
assert not {"torch", "cupy", "jax"} & set(sys.modules), "imported an array library"
print(took)
"""
    # Other work on the machine only adds: one quick import in ten shows that it can be.
    took = (float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(10))
    assert any(seconds < 1 for seconds in took)


def test_loading_the_kernels_takes_less_than_loading_numba():
    code = """
import time
start = time.thread_time()
import numba.cuda
numbas = time.thread_time() - start
from numba_attn import KERNELS, attention
print(numbas, time.thread_time() - start - numbas)
"""
    took = (map(float, subprocess.check_output([sys.executable, "-c", code]).split()) for _ in range(10))
    assert any(ours < numbas for numbas, ours in took)


def test_what_is_loaded_at_first_use_stays():
    code = """
import numba_attn
first = numba_attn.attention
assert vars(numba_attn)["attention"] is first is numba_attn.api.attention
assert numba_attn.KERNELS is numba_attn.kernels.KERNELS
try:
    numba_attn.attentions
except AttributeError as error:
    print(error)
"""
    told = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert told == "module 'numba_attn' has no attribute 'attentions'\n"


def test_modules_for_checking_are_there_when_asked_for():
    code = "import sys, numba_attn; assert 'numba_attn.reference' not in sys.modules; numba_attn.reference.attention"
    subprocess.check_call([sys.executable, "-c", code])


def test_dir_lists_what_users_need():
    code = "import numba_attn; print(*dir(numba_attn))"
    names = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    modules = ["reference", "sim", "testing"]
    assert names == sorted([*numba_attn.__all__, *modules, "__version__"])
    assert all(hasattr(numba_attn, name) for name in names)


class Exporter:
    """A DLPack producer."""

    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        raise AssertionError("an array that is not on a GPU must not be exported")


class OtherExporter(Exporter):
    pass


OtherExporter.__module__ = "elsewhere.arrays"


class Described:
    """A producer by interface."""

    def __init__(self, **description):
        self.__cuda_array_interface__ = {"version": 3, "typestr": "<f4", "data": (0, False), **description}

    __cuda_array_interface__ = None


def test_libraries_by_type():
    assert interop.library_of_type(np.ndarray) is numpy_arrays
    assert interop.library_of_type(Exporter) is device_arrays
    assert interop.library_of_type(Described) is device_arrays
    for kind in (list, float, type(None), str):
        assert interop.library_of_type(kind) is None


def test_tensor_subclasses_are_torchs():
    torch = pytest.importorskip("torch")
    for kind in (torch.Tensor, torch.nn.Parameter):
        assert interop.library_of_type(kind).__name__ == "numba_attn.interop.torch_arrays"


@pytest.mark.parametrize(
    ("arrays", "name"),
    [
        ((np.zeros(1), [1], np.zeros(1)), "key"),
        ((np.zeros(1), np.zeros(1), None), "value"),
        ((1.0, np.zeros(1), np.zeros(1)), "query"),
        ((np.zeros(1), np.zeros(1), Exporter((2, 0))), "value"),
        ((Exporter((2, 0)), OtherExporter((2, 0)), Exporter((2, 0))), "key"),
    ],
)
def test_mixed_libraries_are_refused_by_name(arrays, name):
    with pytest.raises(TypeError, match=f"^{name} is a"):
        interop.library_of(("query", "key", "value"), arrays)


@pytest.mark.parametrize("device", [(1, 0), (10, 0)])
def test_exporters_off_the_gpu_are_refused_by_name(device):
    q = Exporter(device)
    with pytest.raises(ValueError, match=r"^q is not on a GPU: .*numba_attn\.sim\.attention"):
        numba_attn.attention(q, q, q)


NO_GPU = pytest.mark.skipif(launch.device_count() > 0, reason="there is a GPU")


@NO_GPU
@pytest.mark.parametrize("shape", [(2, 4), (0, 4)])
def test_exports_without_a_gpu_are_told_as_numpy_arrays_are(shape):
    with pytest.raises(RuntimeError) as of_numpy:
        numba_attn.attention(*[np.zeros(shape, np.float32)] * 3)
    producers = [Described(shape=shape, data=(4096, False))] + [Exporter((2, 0))] * (0 not in shape)
    for array in producers:
        with pytest.raises(RuntimeError) as caught:
            numba_attn.attention(array, array, array)
        assert str(caught.value) == str(of_numpy.value)
        assert "numba_attn.sim.attention" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (None, "NoneType"),
        ({}, "no shape"),
        ({"typestr": "nonsense"}, "'nonsense'"),
        ({"typestr": None}, "typestr"),
        ({"mask": np.zeros(1)}, "mask"),
        ({"shape": None}, "shape"),
        ({"shape": (2.0, 4)}, "shape"),
        ({"strides": 4}, "strides"),
        ({"data": None}, "data"),
    ],
    ids=str,
)
def test_malformed_interfaces_are_refused_by_name(change, word):
    array = Described(shape=(2, 4))
    whole = array.__cuda_array_interface__
    array.__cuda_array_interface__ = {**whole, **change} if change else change
    with pytest.raises(TypeError, match=f"^k has no usable __cuda_array_interface__: .*{word}") as caught:
        device_arrays.adopt(array, "k", None)
    assert "\n" not in str(caught.value)


def test_dlpack_without_a_device_is_refused_by_name():
    class Half:
        def __dlpack__(self, **kwargs):
            raise AssertionError

    with pytest.raises(TypeError, match="^q has no usable __dlpack__: it has no __dlpack_device__"):
        numba_attn.attention(Half(), Half(), Half())
    with pytest.raises(TypeError, match="^q has no usable __dlpack_device__"):
        device_arrays.adopt(Exporter(None), "q", None)


@pytest.mark.parametrize("which", range(3))
def test_masked_arrays_are_refused_by_name(which):
    arrays = [np.zeros((2, 4), np.float32)] * 3
    arrays[which] = np.ma.masked_array(arrays[which])
    with pytest.raises(TypeError, match=f"^{'qkv'[which]} is a masked array"):
        numba_attn.attention(*arrays)
    with pytest.raises(TypeError, match="^out is a masked array"):
        numba_attn.attention(*[np.zeros((2, 4), np.float32)] * 3, out=np.ma.zeros((2, 4), np.float32))


def test_numpy_out_that_overlaps_itself():
    out = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (2, 4), (0, 4))
    with pytest.raises(ValueError, match="^out has strides .*its elements share memory"):
        numba_attn.attention(*[np.zeros((2, 4), np.float32)] * 3, out=out)


def test_empty_exports_have_no_device():
    adopted = device_arrays.adopt(Described(shape=(2, 0, 8)), "q", None)
    assert adopted.device is None and adopted.shape == (2, 0, 8) and adopted.dtype == "float32"


def test_interface_gets_a_legal_stream():
    for stream, legal in ((None, None), (0, 1), (2, 2), (1234, 1234)):
        source = device_arrays._Interface({"shape": (1,), "stream": stream, "version": 2})
        assert source.__cuda_array_interface__["stream"] == legal
        assert source.__cuda_array_interface__["version"] == 3


@pytest.mark.parametrize("stream", ["main", 1.5, object()], ids=["text", "number", "object"])
def test_streams_of_other_kinds_are_refused(stream):
    with pytest.raises(TypeError, match="^stream is a"):
        device_arrays.stream_handle(0, stream)


def test_stream_handles():
    class Stream:
        def __cuda_stream__(self):
            return 0, 77

    assert device_arrays.stream_handle(0, None) == 0
    assert device_arrays.stream_handle(0, 5) == 5
    assert device_arrays.stream_handle(0, Stream()) == 77


def block(shape, strides=None, pointer=4096) -> Operand:
    return Operand("x", shape, contiguous_strides(shape) if strides is None else strides, "float32", 0, pointer)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        (block((4, 8)), block((4, 8)), True),
        (block((4, 8)), block((4, 8), pointer=4096 + 128), False),
        (block((4, 8)), block((4, 8), pointer=4096 + 124), True),
        (block((4, 8), (16, 1)), block((4, 8), (16, 1), pointer=4096 + 32), False),
        (block((4, 8), (16, 1)), block((4, 9), (16, 1), pointer=4096 + 32 - 4), True),
        (block((4, 8), (2, 8)), block((4, 8), (2, 8), pointer=4100), False),
        (block((4, 8), (0, 0)), block((1, 1)), True),
        (block((0, 8)), block((4, 8)), False),
    ],
)
def test_overlap_is_of_elements_not_of_ranges(a, b, shared):
    assert interop.overlap(a, b) == shared == interop.overlap(b, a)


def test_numpy_facts_are_those_of_the_copy():
    array = np.zeros((4, 6, 8), np.float32)[::-1, ::2].transpose(1, 0, 2)
    assert numpy_arrays.operand(array, "q") == Operand("q", (3, 4, 8), (32, 8, 1), "float32")


def install(monkeypatch, **found):
    def version(package):
        return found.get(package.replace("-", "_"))

    monkeypatch.setattr(versions, "version", version)


def test_versions_that_work_together():
    assert versions.package_problem() is None
    assert versions.report()["numpy"] == np.__version__


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"numpy": "2.5.2", "numba": "0.68.1", "numba_cuda": "0.30.4"}, ["numpy 2.5.2", "numba-cuda 0.30.4"]),
        ({"numpy": "2.4.6", "numba": "0.68.1"}, ["numba-cuda is not installed", "0.68.1"]),
    ],
)
def test_versions_that_do_not(monkeypatch, found, words):
    install(monkeypatch, **found)
    line = versions.problem()
    assert all(word in line for word in words) and "\n" not in line


def test_driver_older_than_the_toolkit(monkeypatch):
    monkeypatch.setattr(versions, "_toolkit", lambda: (13, []))
    assert versions.problem((13, 0)) is None and versions.problem(None) is None
    assert "CUDA 12.8" in versions.problem((12, 8)) and "CUDA 13" in versions.problem((12, 8))
    monkeypatch.setattr(versions, "_toolkit", lambda: (None, ["nvvm"]))
    assert versions.problem((13, 0)).startswith("nvvm not found")


def test_a_wrong_set_is_told_on_first_use():
    code = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "2.5.2" if name == "numpy" else real(name)
import numba_attn
try:
    numba_attn.attention
except ImportError as error:
    print(error)
"""
    told = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "numpy 2.5.2" in told and told.count("\n") == 1


@pytest.mark.parametrize("attribute", ["__cuda_array_interface__", "__dlpack__"])
def test_an_array_that_exports_itself_by_its_own_attribute(attribute):
    """Refused once as no array: only its type was asked."""
    array = types.SimpleNamespace(**{attribute: {}})
    assert interop.library_of(("q",), (array,)).__name__ == interop.EXPORTERS
    with pytest.raises(TypeError, match="^q is a type: "):
        interop.library_of(("q",), (types.SimpleNamespace,))
