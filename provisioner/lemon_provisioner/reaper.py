"""What finished and dead hosts left in private roots: old spill files, and roots without an owner (behaviour 8).

Spill files outlive their runs for at least 24 h so that somebody can read them, and then nobody is there
whose job it is to remove them.  A thread with a timer would be one more thing to stop; so the look-ups of the
private root do it, at most once per 24 h window, and each window looks at no more than 1000 directory entries:
first those of the current root, then, with what remains, those of one stale root.  Names that were not reached
come first in the next window.

Only expired regular files of our own name that nobody holds open are removed, by descriptor and without
following links.  A stale root is removed only when nothing but its marker is left; whatever else is in one
stays for a person to judge (:func:`stale_roots`, shown by ``lemon-kernel doctor``).
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import stat
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from .workspace import (
    MARKER_NAME,
    ROOT_PREFIX,
    SPILL_PREFIX,
    current_root,
    is_private,
    is_private_folder,
    remove_bare_root,
    temporary_folder,
)

__all__ = ["BATCH_ENTRIES", "SPILL_LIFE_S", "WINDOW_S", "StaleRoot", "look_up", "run", "stale_roots"]

WINDOW_S = 24 * 3600.0
SPILL_LIFE_S = 24 * 3600.0
BATCH_ENTRIES = 1000
"""Directory entries per window, whatever they are; our own marker is none."""

_ROOT_NAME = re.compile(re.escape(ROOT_PREFIX) + r"[A-Za-z0-9_-]{10}")
_MARKER = re.compile(r"([^\n]+)\n([1-9][0-9]{0,9})\n")
_MAX_MARKER_BYTES = 512


@dataclass(frozen=True)
class StaleRoot:
    """A private root whose owner is dead: what is in it, and the command that removes it."""

    path: str
    pid: int
    names: tuple[str, ...]

    @property
    def mend(self) -> str:
        return f"rm -r -- {shlex.quote(self.path)}"


@dataclass
class _State:
    """What one process remembers between windows."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    window_start: float | None = None
    names_left: dict[str, list[str]] = field(default_factory=dict)
    stale: deque[str] | None = None
    """Stale roots still to be looked at; None before they have been discovered."""


_state = _State()


def _forget_after_fork() -> None:
    global _state
    _state = _State()


os.register_at_fork(after_in_child=_forget_after_fork)


def run(now: float | None = None) -> None:
    """Look up the current root as if it were `now` (seconds since the epoch, default the clock's)."""
    look_up(current_root(), now)


def look_up(root: str, now: float | None = None) -> None:
    """Do one batch if the 24 h window of the last one is over.  Never raises OSError.

    Called by :func:`workspace.private_root` for each look-up; the first of a process opens the first window.
    """
    if now is None:
        now = time.time()
    state = _state
    start = state.window_start
    if start is not None and now - start < WINDOW_S:
        return
    with state.lock:
        if state.window_start != start:  # another thread was faster
            return
        state.window_start = now
        if state.stale is None:
            state.stale = _discover(root)
        budget = BATCH_ENTRIES - _reap(state, root, now, BATCH_ENTRIES)
        if state.stale and budget > 0:
            _reap_stale(state, state.stale, now, budget)


def _reap_stale(state: _State, queue: deque[str], now: float, budget: int) -> None:
    """Give one stale root its turn; it keeps its place, goes to the end, or leaves the queue."""
    root = queue.popleft()
    if _owner_is_dead(root) is not None:
        _reap(state, root, now, budget)
        if remove_bare_root(root):
            state.names_left.pop(root, None)
            return
    if state.names_left.get(root):
        queue.appendleft(root)
    elif _has_spills(root):  # not expired yet, or the pid in its marker has been given away again
        queue.append(root)


def _reap(state: _State, root: str, now: float, budget: int) -> int:
    """Look at up to `budget` entries of `root`; return how many it were."""
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        state.names_left.pop(root, None)
        return 0
    try:
        present = dict.fromkeys(os.listdir(folder))
        present.pop(MARKER_NAME, None)
        # Names left over from the last window first, then those that are new.
        order = dict.fromkeys(name for name in state.names_left.get(root, ()) if name in present)
        order.update(present)
        names = list(order)
        for name in names[:budget]:
            if name.startswith(SPILL_PREFIX):
                _remove_if_expired(folder, name, now)
        state.names_left[root] = names[budget:]
        return min(len(names), budget)
    except OSError:
        return 0
    finally:
        os.close(folder)


def _remove_if_expired(folder: int, name: str, now: float) -> None:
    """Remove one spill file if it is older than 24 h and no capture holds it open."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or now - status.st_mtime <= SPILL_LIFE_S:
            return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder)
        try:
            # A live capture holds this lock; a dead one's was taken back by the kernel.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == status.st_ino:
                os.unlink(name, dir_fd=folder)
        finally:
            os.close(descriptor)
    except OSError:
        pass


# Stale roots


def _discover(root: str) -> deque[str]:
    """Remove the bare stale roots beside `root`; return those that hold something."""
    left: deque[str] = deque()
    for path in _roots_in(os.path.dirname(root)):
        if path != root and _owner_is_dead(path) is not None and not remove_bare_root(path):
            left.append(path)
    return left


def stale_roots(parent: str | None = None) -> list[StaleRoot]:
    """List the stale roots in `parent` (default: TMPDIR) with what is in them, for ``doctor``."""
    found = []
    for path in _roots_in(os.path.abspath(parent or temporary_folder())):
        pid = _owner_is_dead(path)
        if pid is None:
            continue
        try:
            names = tuple(sorted(name for name in os.listdir(path) if name != MARKER_NAME))
        except OSError:
            continue
        found.append(StaleRoot(path, pid, names))
    return found


def _roots_in(parent: str) -> list[str]:
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    return [f"{parent}/{name}" for name in sorted(names) if _ROOT_NAME.fullmatch(name)]


def _owner_is_dead(root: str) -> int | None:
    """Return the pid in the root's marker if `root` is a valid one and that process is dead, else None.

    Whatever cannot be told (a marker that is missing or malformed, another host's name, a process of
    another user) counts as alive.
    """
    if not is_private_folder(root):
        return None
    try:
        marker = os.open(f"{root}/{MARKER_NAME}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not is_private(os.fstat(marker), folder=False):
                return None
            text = os.read(marker, _MAX_MARKER_BYTES).decode("utf-8", "replace")
        finally:
            os.close(marker)
    except OSError:
        return None
    match = _MARKER.fullmatch(text)
    if match is None or match[1] != os.uname().nodename:
        return None
    pid = int(match[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return pid
    except (OSError, OverflowError):
        return None
    return None


def _has_spills(root: str) -> bool:
    try:
        return any(name.startswith(SPILL_PREFIX) for name in os.listdir(root))
    except OSError:
        return False
