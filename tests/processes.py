"""Fresh Python processes for tests that need one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numba_attn


def run_python(code: str, *, wait=True, **environment):
    """A fresh interpreter; its output, or the process if it is not waited for."""
    root = str(Path(numba_attn.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return finish(process) if wait else process


def finish(process) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err
