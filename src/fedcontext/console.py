"""Rich consoles: results go to standard output, progress and warnings to standard error."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_WIDTH = 110  # columns where standard output is not a terminal

out = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True)
