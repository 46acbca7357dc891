"""Rich consoles: results go to standard output, progress and warnings to standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any

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


def show_warning(message: Warning | str, *place: Any, **rest: Any) -> None:
    """Print a Python warning in one line, without its place in the code: `warnings.showwarning` of the command line."""
    if logging.getLogger("fedcontext").isEnabledFor(logging.WARNING):
        warn(f"warning: {' '.join(str(message).split())}")
