"""Short rounds for a federation on one machine, by what a long test does not need of Flower.

- Client apps are forked from a process that has imported Flower: the imports take 1.5 s of CPU for each message.
- SuperNodes and server apps ask for messages every 0.5 s in place of 3 s, SuperExecs for tasks every 0.3 s.
- Nodes send heartbeats for an interval of 10 s in place of 30 s, so that a killed one is given up after 20 s.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any

INTERVALS = """import time
import flwr.common.constant
flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL = 10
sleep = time.sleep
time.sleep = lambda seconds: sleep(0.5 if seconds == 3 else seconds)
"""
CLIENT_APP = """#!{python} -IS
import json, socket, sys
with socket.socket(socket.AF_UNIX) as requests:
    requests.connect("{socket}")
    requests.sendall(json.dumps(sys.argv[1:]).encode())
"""


def short_intervals(folder: Path) -> dict[str, str]:
    """Return the environment in which Flower's processes wait less; a file that they read is written into ``folder``."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(INTERVALS)
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return {"PYTHONPATH": paths, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3"}


def prepare(local: Any) -> Path:
    """Make the processes that a `Federation` starts from now on fast; return a file that exists once they can start."""
    folder, requests = local.at / "fast", local.at / "requests"
    local.env |= short_intervals(folder)
    local.env["PATH"] = f"{folder}{os.pathsep}{local.env['PATH']}"
    (folder / "flwr-clientapp").write_text(CLIENT_APP.format(python=sys.executable, socket=requests))
    (folder / "flwr-clientapp").chmod(stat.S_IRWXU)
    local.start("client-apps", "python", __file__, str(requests))
    return requests


def fork_client_apps(path: str) -> None:
    """Start a client app for each request that comes in at the socket ``path``."""
    from flwr.supernode.cli import flwr_clientapp

    import fedcontext.flower  # noqa: F401

    with socket.socket(socket.AF_UNIX) as requests:
        requests.bind(path)
        requests.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        while True:
            with requests.accept()[0] as request:
                arguments = json.loads(request.makefile().read())
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                sys.argv = ["flwr-clientapp", *arguments]
                sys.exit(flwr_clientapp())


if __name__ == "__main__":
    fork_client_apps(sys.argv[1])
