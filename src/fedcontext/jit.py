"""Numba compilation: cached on disk once per machine, with one line on standard error while it happens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import numba
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning, so that divergence is detected.
_REORDERED = {"reassoc", "contract", "arcp", "nsz"}
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": _REORDERED}
_njit: Any = numba.njit
# For functions that only compiled functions call: compiled as part of these.
inner: Callable[[Function], Function] = _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)


def compiled(function: Function, *, exact: bool = False) -> Function:
    """Return the function compiled at its first call, and cached on disk where a cache folder is writable.

    ``exact``: its arithmetic is done in the order written, so that NumPy gives the same bits. It may call `inner`
    functions, but no other compiled one: what is inlined would then depend on the state of the cache, and results could
    differ in the last bit from process to process.
    """
    options = {**_OPTIONS, "fastmath": False} if exact else _OPTIONS
    try:
        cached: Function = _njit(cache=True, **options)(function)
        return cached
    except RuntimeError:  # Numba finds no folder that it may write to
        _Announcement.frequency = "in each process (set NUMBA_CACHE_DIR to a writable folder to cache it)"
        uncached: Function = _njit(**options)(function)
        return uncached


def announced(what: str) -> AbstractContextManager[None]:
    """Return a context that prints one line when anything is compiled in it; loading from the cache prints nothing."""
    install: Callable[..., AbstractContextManager[None]] = event.install_listener
    return install("numba:compile", _Announcement(what))


class _Announcement(event.Listener):
    printed: ClassVar[set[str]] = set()
    frequency: ClassVar[str] = "once"

    def __init__(self, what: str) -> None:
        self.what = what

    def on_start(self, event: Any) -> None:
        if self.what not in self.printed:
            logging.getLogger("fedcontext").warning("compiling %s for this machine, %s ...", self.what, self.frequency)
            self.printed.add(self.what)

    def on_end(self, event: Any) -> None:
        pass
