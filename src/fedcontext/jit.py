"""How functions are compiled: once for each machine, kept on disk, with a word while it happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numba
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning, so that they can be reported.
_njit: Any = numba.njit
_HOW = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
# For functions that only compiled ones call: they are kept inside these, and need no door from Python.
inner: Callable[[Function], Function] = _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_HOW)


def compiled(function: Function) -> Function:
    """Return a function compiled when it is first called, and kept on disk for later processes where that can be."""
    try:
        kept: Function = _njit(cache=True, **_HOW)(function)
        return kept
    except RuntimeError:  # Numba finds no folder that it may write to
        _Word.how_often = "in each process (set NUMBA_CACHE_DIR to a folder where it can be kept)"
        forgotten: Function = _njit(**_HOW)(function)
        return forgotten


class _Word(event.Listener):
    """Says on standard error, once, that something is being compiled."""

    said: ClassVar[set[str]] = set()
    how_often: ClassVar[str] = "once"

    def __init__(self, what: str) -> None:
        self.what = what

    def on_start(self, event: Any) -> None:
        if self.what not in self.said:
            logging.getLogger("fedcontext").warning("compiling %s for this machine, %s ...", self.what, self.how_often)
            self.said.add(self.what)

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Tell the user if anything is compiled in this block; what comes from the disk cache is loaded in silence."""
    with _alone(), event.install_listener("numba:compile", _Word(what)):
        yield


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process compile at a time; the others then load what it kept.

    A function compiled beside callees that came from the cache is not inlined as one compiled with them, and may differ
    in the last bit: processes that compile at the same time would not agree.
    """
    try:
        import fcntl

        file = (Path(__file__).parent / "__pycache__" / "compiling.lock").open("w")
    except (ImportError, OSError):  # no such locks here, or nowhere to keep them
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
