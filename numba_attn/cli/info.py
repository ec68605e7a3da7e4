"""The command `info`: what is installed, what is there, and what is wrong with it."""

from __future__ import annotations

from numba_attn import versions
from numba_attn.cli.screen import megabytes, one_line

DESCRIPTION = """Show versions, driver, devices, cache and kernels, and what is wrong with them. Exit status 0 with and
without a GPU, and also where packages do not work together."""


def add_arguments(parser) -> None:
    pass


def run(args) -> int:
    _section("versions", versions.report())
    _section("toolkit", versions.toolkit_report())
    problems = [versions.package_problem()]
    try:
        driver, cache_problem = _machine()
        problems.append(cache_problem)
        _kernels()
        problems[0] = problems[0] or versions.toolkit_problem(driver)
    except Exception as error:  # a wrong set of packages fails in its own ways
        problems[0] = problems[0] or f"{type(error).__name__}: {one_line(error)}"
    print("\nproblems")
    for problem in filter(None, problems) if any(problems) else ["none found"]:
        print(f"  {problem}")
    return 0


def _machine() -> tuple[tuple[int, int] | None, str | None]:
    """Show driver, devices and cache; the CUDA version that the driver serves, and what is wrong with the cache."""
    from numba_attn import launch
    from numba_attn.launch import cache

    driver = launch.driver_version()
    print(f"\ndriver\n  {f'serves CUDA {driver[0]}.{driver[1]}' if driver else 'none'}")
    devices = {str(index): _facts(launch.device_facts(index)) for index in range(launch.device_count())}
    _section("devices", devices or {"none": "numba_attn.sim.attention runs the kernels on a CPU"})
    found, facts = _cache()
    print(f"\ncache\n  {found} ({facts}; ${cache.ENVIRONMENT_VARIABLE} moves it)")
    return driver, cache.problem()


def _cache() -> tuple[str, str]:
    """The directory, and what is in it; or why there is none."""
    from numba_attn.launch import cache

    try:
        entries, size = cache.usage()
        return str(cache.directory()), f"{entries} entries, {megabytes(size)}"
    except OSError as error:
        return "none", str(error)


def _facts(device) -> str:
    major, minor = device.cc
    shared = f"{device.smem_per_block_bytes // 1024} KB of shared memory a block"
    return (
        f"{device.name}, compute capability {major}.{minor} ({device.arch}), {device.sm_count} SMs, {shared}, "
        f"{device.l2_bytes // 2**20} MB of L2"
    )


def _kernels() -> None:
    from numba_attn.kernels import KERNELS

    _section("kernels", {kernel.name: kernel.summary for kernel in KERNELS})


def _section(title: str, facts: dict[str, str]) -> None:
    width = max(map(len, facts))
    print(f"\n{title}" if title != "versions" else title)
    for name, fact in facts.items():
        print(f"  {name:<{width}}  {fact}")
