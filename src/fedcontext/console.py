"""Rich consoles: results go to standard output, progress and warnings to standard error."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_WIDTH = 110  # columns where standard output is not a terminal

out = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True)


def print_line(text: str, console: Console = out, style: str | None = None) -> None:
    """Print text as it is: Rich neither wraps it nor interprets brackets in it."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print_line(text, err, "yellow")
