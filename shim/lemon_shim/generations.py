"""Which cell a thread belongs to, so that what a finished cell left behind cannot act for a later one.

A kernel runs one cell at a time, but threads outlive the cell that started them, and they would look exactly like
the running one: they share its globals, its streams and its bridge.  ``get_parent()`` of ipykernel does not help;
in a plain thread it answers with the message handled last, that is, the running cell's.

So each cell is a *generation*, and a thread's is decided by, in this order:

1. a context variable, set at the start of each cell: tasks and ``asyncio.to_thread`` copy the context, so a call
   that the running cell makes on a pool thread born long ago counts as the running cell's;
2. the tag that the thread got when it was *constructed*: the generation of the thread that constructed it, so the
   descendants of a stale thread stay stale for ever;
3. the open cell: the main thread, and threads that C code started.

A ``ThreadPoolExecutor`` that an agent keeps in a global has old threads and copies no context: it is refused in the
next cell, as the seed says.  This is hygiene, not a sandbox; a script can reach every name in here.
"""

from __future__ import annotations

import functools
import threading
from _thread import get_ident
from contextvars import ContextVar

from .api import ToolError
from .wire import FINISHED_CELL

__all__ = ["begin", "check", "end", "install", "is_stale"]

_TAG = "_lemon_generation"

_generation: ContextVar[int] = ContextVar("lemon_generation", default=0)
_threads: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
"""Threads by ident.  ``current_thread()`` would construct an object for a foreign thread, while it is constructed."""

_latest = 0  # of the newest cell, open or finished
_open = 0  # of the running cell; 0 between cells


def begin() -> None:
    """Start a cell in this thread and context."""
    global _latest, _open
    _latest += 1
    _open = _latest
    _generation.set(_open)


def end() -> None:
    """End the running cell: from now on its threads are stale."""
    global _open
    _open = 0


def _own() -> int:
    """Return the generation of the calling thread; 0 where nothing ties it to a cell."""
    tagged = _generation.get()
    if tagged:
        return tagged
    thread = _threads.get(get_ident())
    return getattr(thread, _TAG, 0)


def is_stale() -> bool:
    """Return whether the calling thread belongs to a cell that has ended."""
    own = _own()
    return own != 0 and own != _open


def check() -> None:
    """Raise ToolError when the calling thread belongs to a finished cell (behaviour 5.7)."""
    own = _own()
    if own != 0 and own != _open and (_open or not _is_main()):
        raise ToolError(FINISHED_CELL)


def _is_main() -> bool:
    # The main thread's context keeps the last cell's number; between cells it is nobody's straggler.
    return get_ident() == _MAIN


_MAIN = threading.main_thread().ident


def install() -> None:
    """Tag every thread that is constructed from now on.  Call once, in the main thread."""
    original = threading.Thread.__init__

    @functools.wraps(original)
    def tagging(self: threading.Thread, *args: object, **kwargs: object) -> None:
        setattr(self, _TAG, _own() or _open)
        original(self, *args, **kwargs)  # type: ignore[arg-type]

    threading.Thread.__init__ = tagging  # type: ignore[method-assign]
