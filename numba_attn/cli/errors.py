"""How a command ends early."""

from __future__ import annotations

from numba_attn import versions


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
