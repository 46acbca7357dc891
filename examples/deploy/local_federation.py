"""A secured federation on this machine in one command: keys, certificates, SuperLink, SuperNodes, rounds, teardown.

    python examples/deploy/local_federation.py --nodes 3 --rounds 3

All files are in one directory (temporary unless --at is given), and all processes are stopped at the end. A real
deployment uses the same commands on several machines: see docs/deployment.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

APP = Path(__file__).parents[1] / "flower-app"
BIN = Path(sys.executable).parent


class Federation:
    """A SuperLink with TLS and node authentication and its SuperNodes, all on 127.0.0.1."""

    def __init__(self, at: Path) -> None:
        self.at = at.resolve()
        self.port = free_port()
        self.superlink: subprocess.Popen | None = None
        self.supernodes: dict[int, subprocess.Popen] = {}
        self._processes: list[subprocess.Popen] = []
        home = self.at / "home"
        home.mkdir(parents=True, exist_ok=True)
        self.env = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        make_certificates(self.at)
        (home / "config.toml").write_text(
            f'[superlink.local]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{self.at / "ca.crt"}"\n'
        )

    def start_superlink(self) -> None:
        """Start the SuperLink; on an existing database it recognises its nodes."""
        self.superlink = self.start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"),
            *("--enable-supernode-auth", "--database", "superlink.db", "--disable-runtime-dependency-installation"),
        )
        wait_until(lambda: listens(self.port), "the SuperLink listens", alive=self.superlink)

    def make_key(self, name: str) -> Path:
        """Create a key pair and return the private key's file; the public key is in the file with suffix .pub."""
        key = ec.generate_private_key(ec.SECP384R1())
        private = self.at / name
        write_private(private, key, serialization.PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (self.at / f"{name}.pub").write_bytes(public + b" " + name.encode() + b"\n")
        return private

    def register(self, key: Path) -> None:
        """Register a node's public key."""
        self.flwr("supernode", "register", f"{key}.pub", "local")

    def start_supernode(self, partition: int, partitions: int, key: Path) -> subprocess.Popen:
        """Start the SuperNode of device ``partition``."""
        node = self.start(
            f"supernode-{key.name}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", "ca.crt"),
            *("--host", "127.0.0.1", "--port", str(free_port()), "--auth-supernode-private-key", str(key)),
            *("--node-config", f"partition-id={partition} num-partitions={partitions}"),
        )
        self.supernodes[partition] = node
        return node

    def start_run(self, **config: object) -> subprocess.Popen:
        """Start the example app with these settings; the process ends with the run."""
        settings = " ".join(f"{name.replace('_', '-')}={toml(value)}" for name, value in config.items())
        return self.start("run", "flwr", "run", str(APP), "local", "--stream", "-c", settings)

    def flwr(self, *arguments: str) -> str:
        """Run a `flwr` command and return its output."""
        done = subprocess.run(
            [BIN / "flwr", *arguments], cwd=self.at, env=self.env, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def log(self, name: str) -> str:
        """Return the log of a process."""
        return (self.at / f"{name}.log").read_text(errors="replace")

    def stop(self, process: subprocess.Popen, signum: int = signal.SIGTERM) -> None:
        """Stop a process and its children, and wait until all have exited."""
        for each in (signum, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        wait_until(lambda: not group_alive(process.pid), f"process group {process.pid} has exited", 10)

    def stop_all(self) -> None:
        """Stop all processes; those that cannot be stopped are reported after the others were."""
        errors = []
        for process in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                self.stop(process)
            except (OSError, RuntimeError) as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("some processes could not be stopped", errors)

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen:
        """Start a program in its own process group, with its output in a log file."""
        with (self.at / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [BIN / program, *arguments],
                cwd=self.at,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


@contextlib.contextmanager
def running(local: Federation, nodes: int) -> Iterator[Federation]:
    """Start a federation with ``nodes`` registered SuperNodes, yield it, and stop it on exit."""
    try:
        local.start_superlink()
        for k in range(nodes):
            key = local.make_key(f"node{k}")
            local.register(key)
            local.start_supernode(k, nodes, key)
        yield local
    finally:
        local.stop_all()


def make_certificates(at: Path) -> None:
    """Write a certificate authority and a server certificate for localhost, valid for one day."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedcontext local authority")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    root = certificate(issuer, issuer, authority, authority, x509.BasicConstraints(ca=True, path_length=0))
    own = certificate(subject, issuer, server, authority, x509.BasicConstraints(ca=False, path_length=None), names)
    (at / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (at / "server.pem").write_bytes(own.public_bytes(serialization.Encoding.PEM))
    write_private(at / "server.key", server, serialization.PrivateFormat.PKCS8)


def certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(signer, hashes.SHA256())


def write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """Write a private key that only its owner can read."""
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)


def toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def group_alive(group: int) -> bool:
    """Return whether any process of the group is running; zombies are not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def wait_until(
    condition: Callable[[], object], what: str, seconds: float = 60, alive: subprocess.Popen | None = None
) -> None:
    """Return when ``condition()`` is true; raise after ``seconds``, or when the process ``alive`` exits."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or (alive is not None and alive.poll() is not None):
            raise RuntimeError(f"timed out after {seconds:g} s, or the process exited, before {what}")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at", type=Path, help="directory for keys, logs and records; temporary by default")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        at = args.at or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        local = stack.enter_context(running(Federation(at), args.nodes))
        print(f"SuperLink on port {local.port}, {args.nodes} SuperNodes; logs in {local.at}")
        run = local.start_run(
            num_server_rounds=args.rounds,
            min_nodes=args.nodes,
            fraction_train=1.0,
            learning_rate=0.05,
            records=local.at / "run.jsonl",
            checkpoint=local.at / "run.safetensors",
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(600)
        show(local, args.rounds)


def show(local: Federation, rounds: int) -> None:
    """Print the completed rounds; exit with the log of the run if some are missing."""
    import fedcontext as fc

    try:
        records = fc.read_run(local.at / "run.jsonl")[1]
    except (OSError, fc.FedcontextError):  # no round was completed
        records = []
    for record in records:
        weights = ", ".join(f"{k}: {w:.3f}" for k, w in zip(record.devices, record.weights, strict=True))
        loss, accuracy = ("unknown" if x is None else f"{x:.4f}" for x in (record.loss, record.accuracy))
        print(f"round {record.number}: loss {loss}, accuracy {accuracy}, weights {{{weights}}}")
    if len(records) < rounds:
        sys.exit(f"{local.log('run')}\n{len(records)} of {rounds} rounds were completed: see the log above")


if __name__ == "__main__":
    main()
