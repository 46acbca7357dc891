"""Short rounds for a federation on one machine, by what a long test does not need of Flower.

- Client apps are forked from a process that has imported Flower: the imports take 1.5 s of CPU for each message.
  The process that Flower starts waits for the forked one; when it is killed, the forked one exits too.
- SuperNodes and server apps ask for messages every 0.5 s in place of 3 s, SuperExecs for tasks every 0.3 s.
- Nodes send heartbeats for an interval of 10 s in place of 30 s, so that a killed one is given up after 20 s.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INTERVALS = """import time
import flwr.common.constant
flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL = 10
sleep = time.sleep
time.sleep = lambda seconds: sleep(0.5 if seconds == 3 else seconds)
"""
# Stands in for a program of Flower. It exits with 0 even if the app failed: Flower learns of failures from messages.
LAUNCHER = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as request:
    request.connect("{socket}")
    request.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode() + b"\\n")
    request.recv(1)  # until the forked process ends, which ends with this one if it is killed
"""


def prepare(local: Any, programs: Sequence[str] = ("flwr-clientapp",)) -> Path:
    """Make the processes that a `Federation` starts from now on fast; return a file that exists once they can start.

    ``programs`` are forked: "flwr-clientapp", "flwr-serverapp" or both.
    """
    folder, requests = local.at / "fast", local.at / "requests"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(INTERVALS)
    for program in programs:
        (folder / program).write_text(LAUNCHER.format(python=sys.executable, socket=requests))
        (folder / program).chmod(stat.S_IRWXU)
    local.env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.3"
    local.env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    local.env["PATH"] = f"{folder}{os.pathsep}{local.env['PATH']}"
    local.start("forked", "python", __file__, str(requests))
    return requests


def fork_apps(path: str) -> None:
    """Start an app for each request that comes in at the socket ``path``."""
    from flwr.superlink.cli import flwr_serverapp
    from flwr.supernode.cli import flwr_clientapp

    import fedcontext.flower  # noqa: F401

    apps = {"flwr-clientapp": flwr_clientapp, "flwr-serverapp": flwr_serverapp}
    with socket.socket(socket.AF_UNIX) as requests:
        requests.bind(path)
        requests.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        gc.freeze()  # or each app would write to, and so copy, the pages that it shares with this process
        while True:
            with requests.accept()[0] as request:
                arguments = json.loads(request.makefile().readline())
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    requests.close()
                    threading.Thread(target=end_with, args=(request,), daemon=True).start()
                    sys.argv = arguments
                    sys.exit(apps[arguments[0]]())


def end_with(request: socket.socket) -> None:
    """End this process when the one that asked for it has ended."""
    request.recv(1)
    os._exit(1)


if __name__ == "__main__":
    fork_apps(sys.argv[1])
