"""How a command ends early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from numba_attn import versions
from numba_attn.cli.screen import one_line


class CommandError(Exception):
    """What the user is told in one line, and the exit status: 2 for arguments that make no sense."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


def require_toolkit() -> None:
    """Stop where compiler, linker and driver do not work together."""
    from numba_attn import launch

    if problem := versions.problem(launch.driver_version()):
        raise CommandError(problem)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Whatever a kernel under work raises here, in one line."""
    try:
        yield
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(f"{what}: {type(error).__name__}: {one_line(error)}") from error
