"""Standard streams of agent cells: line-buffered text on the process's own descriptors.

In a session kernel descriptors 1 and 2 are one pipe that the host holds the read end of (behaviour 7.4).  ipykernel's
``OutStream`` fails what that buys: order with child processes, nothing lost at ``os._exit``, one boundary.  So agent
cells write to the descriptors directly; a front-end cell on the same kernel gets stock streams for its time.

A script can do anything to its streams: replace, close, detach or redirect them.  After each cell fresh ones stand
where they belong.  What threads of a finished cell write is dropped; what its child processes write cannot be told
apart on one pipe.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
from _thread import get_ident

from lemon_shim import generations
from lemon_shim.script import NoInput

__all__ = ["CellStreams"]

_SAFE_FD = 200  # out of reach of scripts that close a handful of descriptors
_dup2 = os.dup2
_fstat = os.fstat
_ident = get_ident
_MAIN = get_ident()
_stale = generations.is_stale
_write = io.TextIOWrapper.write


class _CellStream(io.TextIOWrapper):
    """A text stream on descriptor 1 or 2 that drops what threads of finished cells write."""

    def write(self, text: str, /) -> int:
        if _ident() != _MAIN and _stale():
            return len(text)
        return _write(self, text)


def _open(descriptor: int) -> _CellStream:
    raw = io.FileIO(descriptor, "w", closefd=False)
    stream = _CellStream(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True
    )
    stream.mode = "w"  # type: ignore[misc]
    return stream


class CellStreams:
    """The streams of one session kernel, kept in order between cells.  Create it in the main thread."""

    def __init__(self) -> None:
        self._pipe = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _SAFE_FD)
        null = os.open(os.devnull, os.O_WRONLY)
        self._null = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _SAFE_FD)
        os.close(null)
        status = os.fstat(self._pipe)
        self._identity = (status.st_dev, status.st_ino)
        self.stdout = _open(1)
        self.stderr = _open(2)
        self.stdin = NoInput()
        sys.__stdout__ = self.stdout  # type: ignore[misc]
        sys.__stderr__ = self.stderr  # type: ignore[misc]
        sys.__stdin__ = self.stdin  # type: ignore[misc,assignment]

    def install(self) -> None:
        """Make these the interpreter's standard streams."""
        sys.stdout, sys.stderr, sys.stdin = self.stdout, self.stderr, self.stdin

    def flush(self) -> None:
        """Write out what the cell left in buffers: its own streams' if it replaced ours, then ours."""
        for stream in (sys.stdout, sys.stderr, self.stdout, self.stderr):
            try:
                stream.flush()
            except BaseException:  # noqa: S110
                pass

    def write_error(self, text: str) -> None:
        """Write `text` to descriptor 2, after everything the streams hold."""
        try:
            self.stderr.write(text)
            self.stderr.flush()
        except (OSError, ValueError):
            data = text.encode("utf-8", "backslashreplace")
            try:
                while data:
                    data = data[os.write(self._pipe, data) :]
            except OSError:
                pass

    def restore(self) -> None:
        """Undo what the cell did to descriptors 1 and 2 and to the streams on them."""
        for descriptor in (1, 2):
            try:
                status = _fstat(descriptor)
                intact = (status.st_dev, status.st_ino) == self._identity
            except OSError:
                intact = False
            if not intact:
                _dup2(self._null, descriptor)
                self.flush()  # what could not be written there must not surface in a later cell
                _dup2(self._pipe, descriptor)
        if not _usable(self.stdout, 1):
            self.stdout = _open(1)
        if not _usable(self.stderr, 2):
            self.stderr = _open(2)
        if self.stdin.closed:  # ``exit()`` closes it
            self.stdin = NoInput()
        self.install()


def _usable(stream: _CellStream, descriptor: int) -> bool:
    try:
        return not stream.closed and stream.fileno() == descriptor and stream.line_buffering
    except ValueError:  # detached
        return False
