"""Flags of a library that hold for the whole process: changed for the length of one call and put back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Without it one thread could put back what another has just turned off.
_lock = threading.Lock()


def _renew_lock() -> None:
    """A fork copies the lock in whatever state another thread has it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def turned_off(found: Callable[[], Any], write: Callable[[Any], object], off: Any) -> Iterator[None]:
    """The flag is `off` meanwhile. `found` gives the value to put back, None if there is nothing to turn off."""
    with _lock:
        value = found()
        if value is not None:
            write(off)
        try:
            yield
        finally:
            if value is not None:
                write(value)
