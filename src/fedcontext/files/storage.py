"""Output files: written whole or not at all, only in place of regular files, and by one process at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedcontext.errors import FileError

LOG = logging.getLogger("fedcontext")
KINDS = {"a symbolic link": stat.S_ISLNK, "a directory": stat.S_ISDIR, "a character device": stat.S_ISCHR}
KINDS |= {"a block device": stat.S_ISBLK, "a named pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK}


def check_target(path: Path) -> None:
    """Raise an error if ``path`` is anything but a regular file or free: an output never replaces a link or a device.

    >>> check_target(Path("/dev/null"))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FileError: /dev/null: an output must be a regular file, and this is a character device: use another path
    """  # noqa: W505
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot_be_written(path, error) from None
    if not stat.S_ISREG(mode):
        kind = next((name for name, test in KINDS.items() if test(mode)), "something else")
        raise FileError(f"{path}: an output must be a regular file, and this is {kind}: use another path")


def check_writable(path: Path) -> None:
    """Raise an error if ``path`` is no place for an output, or a file cannot be made in its nearest existing directory.

    >>> check_writable(Path("/proc/model.npz"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedcontext.errors.FileError: /proc/model.npz: cannot be written (...)...
    """
    check_target(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    check_folder(folder)
    with naming(path), tempfile.TemporaryFile(dir=folder):
        pass


def check_folder(path: Path) -> None:
    """Raise an error if ``path``, or the nearest existing path above it, is not a directory.

    >>> check_folder(Path("/dev/null"))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FileError: /dev/null: must be a directory for output files, and is not
    """
    with naming(path):
        nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not nearest.is_dir():
            raise FileError(f"{nearest}: must be a directory for output files, and is not")


def make_folder(path: Path) -> None:
    """Make a directory and its parents, unless they exist."""
    check_folder(path)
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise an `OSError` of the block, such as that of a full disk, as an error that names ``path``."""
    try:
        yield
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def _cannot_be_written(path: Path, error: OSError) -> FileError:
    return FileError(f"{path}: cannot be written ({error.strerror or error})")


@contextmanager
def replacing(path: Path, keep: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces ``path`` if the block ends without an error.

    It is on disk when it replaces ``path``, and ``path`` is on disk when this returns. Whenever the process is killed,
    ``path`` is the old file or the new one; `clean` removes the temporary file that it may leave. With ``keep``, the
    old file stays under that name; between the two renames there is no file ``path``.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "table.csv"
    >>> with replacing(path) as temporary:
    ...     _ = temporary.write_text("a,b")
    >>> path.read_text(), [file.name for file in path.parent.iterdir()]
    ('a,b', ['table.csv'])
    """
    check_target(path)
    make_folder(path.parent)
    temporary = _temporary(path)
    try:
        with naming(path):
            clean(path)
            yield temporary
            sync(temporary)
            if keep is not None and path.exists():
                os.replace(path, keep)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def clean(*paths: Path) -> None:
    """Remove the temporary files that killed writers of ``paths`` left behind."""
    for path in paths:
        with naming(path):
            _temporary(path).unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, so that nobody ever reads half of it."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))


def sync(path: Path) -> None:
    """Return once the file or directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def lock(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold ``path`` for one run; an error names the process that still holds it after ``patience`` seconds.

    The lock is on the file ``<path>.lock``, which has the process id and is removed afterwards. The operating system
    releases it when the process ends, in whatever way.

    >>> import tempfile
    >>> with lock(Path(tempfile.mkdtemp()) / "run.jsonl"):
    ...     pass
    """
    make_folder(path.parent)
    lock_path = path.with_name(f"{path.name}.lock")
    handle = _open_locked(path, lock_path, time.monotonic() + patience)
    try:
        with naming(lock_path):
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            lock_path.unlink()  # while it is held: see `_open_locked`
        os.close(handle)


def _open_locked(path: Path, lock_path: Path, until: float) -> int:
    """Return the open and locked file; one that its last holder has just removed is opened anew."""
    while True:
        check_target(lock_path)
        with naming(lock_path):
            handle = os.open(lock_path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        if not _acquire(handle, path):
            holder = os.read(handle, 20).decode(errors="replace") or "unknown"
            os.close(handle)
            if time.monotonic() < until and holder != str(os.getpid()):
                time.sleep(0.1)
                continue
            raise FileError(
                f"{path}: process {holder} is already running on this file: wait until it ends, or write elsewhere "
                f"(if no such process exists, delete {lock_path})"
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(lock_path)):
                return handle
        os.close(handle)


def _acquire(handle: int, path: Path) -> bool:
    try:
        import fcntl
    except ImportError:  # not POSIX: a process id in the file is the lock
        return os.fstat(handle).st_size == 0
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        LOG.warning(
            "%s: this file system has no locks (%s): make sure that no other run writes here", path, error.strerror
        )
    return True
