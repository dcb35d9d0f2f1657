"""Agent cells: plain Python, compiled and executed in the kernel's globals, with nothing of IPython's around.

No magics, no top-level await, no display hook, no In and Out, no history: what runs here is what ``python3`` would
run (behaviour 6.10, D-9).  A cell may change anything in its process, and the kernel must still be able to say how
it ended; so whatever is used between the last line of a cell and its reply is bound when this module is imported,
and a fixed list of interpreter state is put back afterwards.  Everything else that a cell changed stays.
"""

from __future__ import annotations

import asyncio
import ctypes
import linecache
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from lemon_shim.kernel.interrupts import arm, disarm
from lemon_shim.wire import MAX_TRACEBACK_BYTES, cut_encoded, normalise_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from lemon_shim.kernel.streams import CellStreams

__all__ = ["CellRunner", "Outcome"]

MAX_NAME_BYTES = 4 * 1024
MAX_MESSAGE_BYTES = 48 * 1024

_chdir = os.chdir
_exit = os._exit
_getpid = os.getpid
_compile = compile
_exec = exec
_set_signal = signal.signal
_SIGTERM = signal.SIGTERM
_fflush = ctypes.CDLL(None).fflush
_set_event_loop = asyncio.set_event_loop
_new_event_loop = asyncio.new_event_loop
_TracebackException = traceback.TracebackException
_linecache = linecache.cache

_OURS = tuple(
    os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep
    for name in ("lemon_shim", "IPython", "ipykernel")
    if (module := sys.modules.get(name)) is not None
)
"""Folders whose frames are left out of a traceback."""


class Outcome:
    """How a cell ended: `name` is None after success, else the exception's; `message` may be None."""

    __slots__ = ("message", "name")

    def __init__(self, name: str | None = None, message: str | None = None) -> None:
        self.name = name
        self.message = message


class CellRunner:
    """Runs agent cells, one at a time, in the main thread and outside any event loop."""

    def __init__(self, namespace: dict[str, object], streams: CellStreams) -> None:
        self._namespace = namespace
        self._streams = streams
        self._cwd = os.getcwd()
        self._pid = os.getpid()
        self._sources: dict[str, tuple[int, None, list[str], str]] = {}
        self._displayhook = sys.displayhook
        self._excepthook = sys.excepthook
        self._sigterm = signal.getsignal(signal.SIGTERM)
        self._loop: asyncio.AbstractEventLoop | None = None
        """What ``get_event_loop()`` gives in cells: one loop for the kernel's life, made when first needed."""

    def run(self, code: str, number: int, kernel_loop: asyncio.AbstractEventLoop) -> Outcome:
        """Run `code` as cell `number`; when this returns, its output is on the descriptors.  Never raises."""
        outcome = self._prepare()
        if outcome is None:
            error = self._execute(code, f"<cell {number}>")
            if _getpid() != self._pid:
                self._leave(error)
            outcome = self._report(error) if error is not None else Outcome()
        self._restore(kernel_loop)
        return outcome

    def _prepare(self) -> Outcome | None:
        try:
            _chdir(self._cwd)
        except OSError as error:
            message = f"cell cwd is no longer accessible: {self._cwd} ({error.strerror})"
            self._streams.write_error(message + "\n")
            return Outcome(type(error).__name__, message)
        if self._loop is None or self._loop.is_closed():
            self._loop = _new_event_loop()
        _set_event_loop(self._loop)
        return None

    def _execute(self, code: str, filename: str) -> BaseException | None:
        """Return what the code raised.  Interrupts can strike only in here; see ``interrupts.py``."""
        self._sources[filename] = _linecache[filename] = (
            len(code),
            None,  # no modification time: checkcache() leaves the entry alone
            (code + "\n").splitlines(keepends=True),
            filename,
        )
        error: BaseException | None = None
        try:
            try:
                arm()
                _exec(_compile(code, filename, "exec", dont_inherit=True), self._namespace)
            finally:
                disarm()
        except BaseException as raised:
            error = raised
        disarm()
        return error

    def _leave(self, error: BaseException | None) -> NoReturn:
        """End a child that the cell forked and that ran to the end of the code: one kernel is enough."""
        status = 0
        if isinstance(error, SystemExit):
            code = error.code
            status = code if isinstance(code, int) else 0 if code is None else 1
        elif error is not None:
            self._report(error)
            status = 1
        self._flush()
        _exit(status & 0xFF)

    def _report(self, error: BaseException) -> Outcome:
        """Write the traceback as the cell's last output and return the name and message of `error`."""
        if isinstance(error, SystemExit):
            message = None if error.code is None else cut_encoded(_text(error.code), MAX_MESSAGE_BYTES)
            return Outcome("SystemExit", message)
        self._flush()
        _linecache.update(self._sources)
        self._streams.write_error(cut_encoded(_traceback(error), MAX_TRACEBACK_BYTES))
        name = getattr(type(error), "__name__", None)
        return Outcome(
            cut_encoded(normalise_text(name), MAX_NAME_BYTES), cut_encoded(_text(error), MAX_MESSAGE_BYTES)
        )

    def _flush(self) -> None:
        self._streams.flush()
        try:
            _fflush(None)  # what C libraries printed would surface in a later cell
        except BaseException:  # noqa: S110
            pass

    def _restore(self, kernel_loop: asyncio.AbstractEventLoop) -> None:
        """Put back what behaviour 6.10 lists."""
        self._flush()
        self._streams.restore()
        sys.displayhook = self._displayhook
        sys.excepthook = self._excepthook
        disarm()
        for step in (self._restore_sigterm, self._restore_cwd, lambda: _set_event_loop(kernel_loop)):
            _quietly(step)

    def _restore_sigterm(self) -> None:
        if self._sigterm is not None:
            _set_signal(_SIGTERM, self._sigterm)

    def _restore_cwd(self) -> None:
        _chdir(self._cwd)


def _quietly(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException:  # noqa: S110
        pass


def _text(value: object) -> str:
    """Return ``str(value)``, whatever its ``__str__`` does."""
    try:
        return normalise_text(str(value))
    except BaseException:
        return f"<unprintable {type(value).__name__} object>"


def _traceback(error: BaseException) -> str:
    """Return the traceback of `error` and its causes without frames of ours, of IPython or of ipykernel."""
    try:
        report = _TracebackException(type(error), error, error.__traceback__, compact=True)
        pending: list[traceback.TracebackException | None] = [report]
        seen: set[int] = set()
        while pending:
            part = pending.pop()
            if part is None or id(part) in seen:
                continue
            seen.add(id(part))
            part.stack[:] = [frame for frame in part.stack if not frame.filename.startswith(_OURS)]
            pending += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
        return normalise_text("".join(report.format()))
    except BaseException:
        return f"{type(error).__name__}: {_text(error)}\n"
