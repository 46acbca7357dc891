"""Where the program starts: outside the package, so that an interrupt while the package loads is one like any other."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program; interrupted at any moment from here on it ends with 130, and without a traceback."""
    try:
        from fedcontext.cli import main as program

        program()
    except KeyboardInterrupt:
        sys.exit(130)
