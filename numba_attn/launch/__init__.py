"""From a kernel's Python function to machine code on a device: the only package that knows compiler and driver."""

from numba_attn.launch.driver import (
    DriverError,
    device_count,
    device_facts,
    driver_version,
    elapsed_ms,
    free_bytes,
    synchronize,
)
from numba_attn.launch.plan import Plan, prepare

__all__ = [
    "DriverError",
    "Plan",
    "device_count",
    "device_facts",
    "driver_version",
    "elapsed_ms",
    "free_bytes",
    "prepare",
    "synchronize",
]
