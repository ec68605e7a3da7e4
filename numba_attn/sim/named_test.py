"""Does a test of the repository fail under a mutant? A copy of the package and of its tests, one file changed, answers.

For mutants that the problems of `mutate` do not show, such as those in the last digits of a result.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COPIED = ("numba_attn", "tests", "pyproject.toml")
LIMIT_S = 300.0
PASSED, FAILED = 0, 1  # pytest's exit codes; others say that no test ran


class NamedTests:
    """Tests, by pytest's names for them, relative to the repository.

    Raises:
        ValueError: one of them does not pass as it is, so that its failure under a mutant says nothing.
    """

    def __init__(self, names: Iterable[str]):
        for name in sorted(names):
            code, output = _run(name)
            if code != PASSED:
                raise ValueError(f"{name} must pass before a mutant is tried: exit code {code}\n{output}")

    def fails(self, name: str, file: Path, source: str) -> bool:
        """Whether the test fails where a file of the package has another source."""
        return _run(name, file, source)[0] == FAILED


def _run(name: str, file: Path | None = None, source: str = "") -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        for part in COPIED:
            copy = shutil.copytree if (REPOSITORY / part).is_dir() else shutil.copy
            copy(REPOSITORY / part, Path(folder, part))
        if file is not None:
            Path(folder, file.resolve().relative_to(REPOSITORY)).write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", name]
        # The copy comes first, before any path to the repository itself.
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return FAILED, f"not done after {LIMIT_S:.0f} s"
        return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
