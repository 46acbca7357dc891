"""The two terminals: results go to standard output, progress and warnings to standard error."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_WIDTH = 110  # columns of a file or a pipe, which have no width of their own

out = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True)
