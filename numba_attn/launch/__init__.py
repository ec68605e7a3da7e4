"""From a kernel's Python function to machine code on a device: the only package that knows compiler and driver."""

from numba_attn.launch.driver import device_count, device_facts, driver_version
from numba_attn.launch.plan import Plan, prepare

__all__ = ["Plan", "device_count", "device_facts", "driver_version", "prepare"]
