"""A limit on the time that a block of code may take, from any thread, and however the code spends it."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager


class TimeLimit(BaseException):
    """Raised inside a kernel that does not end: no `except Exception` on the way stops it."""


@contextmanager
def time_limit(seconds: float):
    """Raise `TimeLimit` in this thread, wherever it is, after `seconds`."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    done = False

    def interrupt():
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimit))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            done = True
        timer.cancel()
