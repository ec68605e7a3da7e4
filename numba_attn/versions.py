"""Which versions are installed, and whether they work together.

Cheap enough for import: package metadata is read, and nothing is loaded unless `problem` is asked about the toolkit.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata

PACKAGES = ("numba-attn", "numpy", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "torch", "cupy")
TOOLKIT = ("nvvm", "nvJitLink")
SIMULATOR_VARIABLE = "NUMBA_ENABLE_CUDASIM"


def version(package: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_problem() -> str | None:
    """One line that names the Python packages that do not work together, or None."""
    if os.environ.get(SIMULATOR_VARIABLE, "0") not in ("", "0"):
        return f"{SIMULATOR_VARIABLE} is set: unset it, because numba_attn.sim is the simulator of these kernels"
    numpy, numba, numba_cuda = version("numpy"), version("numba"), version("numba-cuda")
    if numba_cuda is None:
        return f"numba-cuda is not installed (numba is {numba}): pip install 'numba-cuda[cu13]>=0.30,<0.31'"
    if _release(numba_cuda) < (0, 31) and numpy is not None and _release(numpy) >= (2, 5):
        return f"numba-cuda {numba_cuda} does not work with numpy {numpy}: pip install 'numpy<2.5'"
    return None


def toolkit_problem(driver: tuple[int, int] | None = None) -> str | None:
    """One line that names what is wrong with the CUDA toolkit or the driver, or None.

    Args:
        driver: newest CUDA version that the driver serves, as (major, minor); None without one.
    """
    found, missing = _toolkit()
    if missing:
        return (
            f"{' and '.join(missing)} not found (numba-cuda {version('numba-cuda')}, "
            f"cuda-bindings {version('cuda-bindings')}): pip install 'numba-cuda[cu13]' or 'numba-cuda[cu12]'"
        )
    # Machine code runs on any driver of the same major version, also on one older than the toolkit.
    if driver is not None and found is not None and driver[0] < found:
        return (
            f"the driver serves CUDA {driver[0]}.{driver[1]} and the toolkit installed is CUDA {found}: "
            f"update the driver, or pip install 'numba-cuda[cu{driver[0]}]'"
        )
    return None


def problem(driver: tuple[int, int] | None = None) -> str | None:
    """One line that names the versions of a wrong set, or None if everything fits together."""
    return package_problem() or toolkit_problem(driver)


def report() -> dict[str, str]:
    """Version of Python and of every package involved; 'not installed' where there is none."""
    cupy = next((name for name in ("cupy", "cupy-cuda13x", "cupy-cuda12x") if version(name)), "cupy")
    names = [cupy if name == "cupy" else name for name in PACKAGES]
    return {"python": platform.python_version()} | {name: version(name) or "not installed" for name in names}


def toolkit_report() -> dict[str, str]:
    """Version and path of the compiler and the linker, or 'not found'."""
    missing = _toolkit()[1]
    found = dict.fromkeys(TOOLKIT, "not found")
    if "cuda-bindings" not in missing:
        from cuda.bindings import nvjitlink, nvvm
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for name, version_of in zip(TOOLKIT, (nvvm.version, nvjitlink.version), strict=True):
            if name not in missing:
                number = ".".join(map(str, version_of()))
                found[name] = f"{number} ({load_nvidia_dynamic_lib(name).abs_path})"
    return found


def _toolkit() -> tuple[int | None, list[str]]:
    """Major CUDA version of the linker that is found, and the libraries that are not."""
    try:
        from cuda.bindings import nvjitlink
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return None, ["cuda-bindings"]
    missing = []
    for name in TOOLKIT:
        try:
            load_nvidia_dynamic_lib(name)
        except DynamicLibNotFoundError:
            missing.append(name)
    return (None if "nvJitLink" in missing else int(nvjitlink.version()[0])), missing


def _release(text: str) -> tuple[int, int]:
    """Major and minor number of a version."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
