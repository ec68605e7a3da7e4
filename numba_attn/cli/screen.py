"""What commands show: tables, and progress that leaves standard output alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

BAR_WIDTH = 24
PLAIN_LINES = 10  # where no terminal shows a bar, about so many lines show the progress


class Progress:
    """A bar on standard error: `with Progress() as progress: progress.show(done, total, "what is done now")`."""

    def __init__(self):
        self._bar = sys.stderr.isatty()
        self._started = time.monotonic()
        self._shown = -1

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._clear()

    def show(self, done: float, total: int, text: str) -> None:
        """How many pieces of work are done, whole or in part, and what comes now."""
        left = time_left(time.monotonic() - self._started, done, total)
        if self._bar:
            filled = int(BAR_WIDTH * done / max(total, 1))
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            self._clear(f"[{bar}] {int(done)}/{total} {text:.60}{left}")
        elif (tenth := int(PLAIN_LINES * done / max(total, 1))) != self._shown:
            self._shown = tenth
            print(f"{int(done)}/{total} {text}{left}", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """A line on standard output, above the bar."""
        self._clear()
        print(line, flush=True)

    def _clear(self, text: str = "") -> None:
        if self._bar:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def time_left(elapsed_s: float, done: float, total: float) -> str:
    """What remains at the pace so far, as `, 1:05 left`; nothing as long as nobody can tell, and for a second."""
    left_s = elapsed_s * (total - done) / done if done > 0 else 0
    return f", {int(left_s) // 60}:{int(left_s) % 60:02} left" if left_s >= 1 else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need: the first to the left, the others to the right, but the last if it is a text."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    last_is_text = any(" " in row[-1] for row in rows)

    def cell(line: list[str], column: int) -> str:
        left = column == 0 or (column == len(header) - 1 and last_is_text)
        return line[column].ljust(widths[column]) if left else line[column].rjust(widths[column])

    return "\n".join("  ".join(cell(line, column) for column in range(len(header))).rstrip() for line in lines)


def one_line(error: BaseException | str, width: int = 400) -> str:
    """A message without its line breaks, and not endless."""
    text = " ".join(str(error).split())
    return text if len(text) <= width else text[: width - 4] + " ..."


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
