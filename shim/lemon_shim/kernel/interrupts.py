"""When a SIGINT may interrupt: while a cell's code runs, and never else.

The problem.  ``signal(SIGINT, default_int_handler)`` raises KeyboardInterrupt between any two bytecodes of the main
thread.  ipykernel installs it round the whole handling of a request, the sending of the reply included: of 1,349
requests that met a SIGINT at a random moment 442 never got a reply.

What does not work.  ``SIG_IGN`` outside cells is inherited by children started between cells.  A handler of our own
that asks a flag would do, but ``asyncio.run`` installs its cancelling handler only where it finds exactly
``default_int_handler``.

The solution.  Outside, a Python handler that does nothing.  Inside, ``default_int_handler``, taken away again by
:func:`disarm`, which tries until it has succeeded: an interrupt that strikes while it tries is caught and dropped.
Callers nest twice, so that one which strikes just before the attempt is caught too.
"""

from __future__ import annotations

from signal import SIGINT, default_int_handler, signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["arm", "disarm", "ignore"]

_INTERRUPTING = default_int_handler


def ignore(number: int, frame: FrameType | None) -> None:
    """Handle a SIGINT outside of cells: do nothing."""


def arm() -> None:
    """Let SIGINT raise KeyboardInterrupt in the main thread."""
    signal(SIGINT, _INTERRUPTING)


def disarm(_signal=signal, _number=SIGINT, _handler=ignore) -> None:  # type: ignore[no-untyped-def]
    """Let SIGINT do nothing; returns only once that is so."""
    while True:
        try:
            _signal(_number, _handler)
            return
        except KeyboardInterrupt:
            continue
