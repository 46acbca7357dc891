"""The command line in the tests' own process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from fedcontext.cli import main


def call(*arguments: object, cwd: str | Path = ".", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has loaded all modules: faster than in one of its own."""
    command, stdout, stderr = ["fedcontext", *map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, {"NO_COLOR": "1", **environment}),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            code = main()
        except SystemExit as exit_:
            code = exit_.code
    return subprocess.CompletedProcess(command, code or 0, stdout.getvalue(), stderr.getvalue())
