"""The command line. Everything heavy is imported inside `main`, where an interrupt is caught."""

from __future__ import annotations

import sys

from fedcontext.version import __version__


def main() -> None:
    """Run the program. It exits with 0 on success, 2 on an error, 130 when interrupted and 143 when terminated."""
    if sys.argv[1:] == ["--version"]:
        print(f"fedcontext {__version__}")
        return
    try:
        from fedcontext.cli.app import run_app

        run_app()
    except KeyboardInterrupt:
        sys.exit(130)
