"""The life of a session kernel as a table, and who hears what when it ends.

Everything that decides in which phase a kernel is lives here; nothing here does any I/O or knows a clock.
:mod:`.kernel` tells the events, :mod:`.registry` looks at the phases.

Why a table.  A kernel's end has many causes (deadline, abort, death, reset, eviction, a closing registry), and
any of them can come while any other is still being dealt with.  Pairs of booleans (``started``, ``stopping``)
cannot say what the second of two such events means; the table must, for every pair, or the event is a bug of
ours and :class:`ImpossibleEvent` names it.  There is no other error path.

Rules of the table:

1.  A kernel is *attachable* in the first three phases; it counts as live, and as soon as it leaves them it is
    out of the registry's table: the next call gets another one.  No way leads back (behaviour 6.7).
2.  Only a RUNNING kernel is CANCELLED: what has run code is interrupted step by step (INT, TERM, KILL).  What
    runs no code, or is dead already, is STOPPED: there is nobody to warn.
3.  The first cause decides.  A kernel that is ending is told of no second one, so only the outcome of its end
    can follow; whoever comes later finds it not attachable.
4.  GONE means *confirmed* gone.  A kernel whose death was not confirmed in time is UNREACHABLE: in quarantine,
    shown as such, and tried again at each reap tick until it is confirmed (behaviour 6.4).

One dimension is not in the phase: *why* the kernel ends.  The first cause stays (:class:`Cause`), and
:data:`ENDINGS` says what each cause means for the active cell, for those who come later and for the telemetry.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import telemetry
from ..result import FallbackReason, Reason

__all__ = [
    "ATTACHABLE",
    "ENDINGS",
    "FALLBACKS",
    "TRANSITIONS",
    "Cause",
    "Ending",
    "Event",
    "ImpossibleEvent",
    "Life",
    "Phase",
    "Unavailable",
]


class Phase(enum.Enum):
    """Where a kernel is in its life; the values are the keys of the snapshot (behaviour 9.3)."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    CANCELLING = "cancelling"
    STOPPING = "stopping"
    UNREACHABLE = "unreachable"
    GONE = "gone"


class Event(enum.Enum):
    """What can happen to a kernel."""

    STARTED = "started"
    """The interpreter answered the ready handshake."""
    START_FAILED = "start_failed"
    """It could not be staged, spawned or made ready in time, and what there was of it is released."""
    CELL_SENT = "cell_sent"
    """A cell was handed to the interpreter; from here its code is never sent again."""
    CELL_ENDED = "cell_ended"
    """The reply came, in time, and its output is complete."""
    CELL_LOST = "cell_lost"
    """Deadline, abort, the caller's death or a protocol fault: the namespace is unsafe."""
    STOP = "stop"
    """Reset, detach, eviction, idle reap or the registry's end."""
    DIED = "died"
    """The process is dead, whoever killed it."""
    CONFIRMED = "confirmed"
    """Its end is complete: process group and descendants dead, workspace removed."""
    UNCONFIRMED = "unconfirmed"
    """Its death could not be confirmed within the bound."""


TRANSITIONS: Mapping[Phase, Mapping[Event, Phase]] = {
    Phase.STARTING: {
        Event.STARTED: Phase.IDLE,
        Event.START_FAILED: Phase.GONE,
        Event.STOP: Phase.STOPPING,
    },
    Phase.IDLE: {
        Event.CELL_SENT: Phase.RUNNING,
        Event.STOP: Phase.STOPPING,
        Event.DIED: Phase.STOPPING,
    },
    Phase.RUNNING: {
        Event.CELL_ENDED: Phase.IDLE,
        Event.CELL_LOST: Phase.CANCELLING,
        Event.STOP: Phase.CANCELLING,
        Event.DIED: Phase.STOPPING,
    },
    Phase.CANCELLING: {
        Event.CONFIRMED: Phase.GONE,
        Event.UNCONFIRMED: Phase.UNREACHABLE,
    },
    Phase.STOPPING: {
        Event.CONFIRMED: Phase.GONE,
        Event.UNCONFIRMED: Phase.UNREACHABLE,
    },
    Phase.UNREACHABLE: {
        Event.CONFIRMED: Phase.GONE,
        Event.UNCONFIRMED: Phase.UNREACHABLE,
    },
    Phase.GONE: {},
}

ATTACHABLE = frozenset({Phase.STARTING, Phase.IDLE, Phase.RUNNING})
"""Phases in which a kernel takes calls, counts as live, and is found under its key (behaviour 6.4)."""


class ImpossibleEvent(Exception):
    """The table has no such transition: a fault of ours, never of a script or a caller."""


class Life:
    """The interpreter of the table: one kernel's phase, changed by events and by nothing else.

    `on_change` is called with the phase before and the phase after, whenever they differ.
    """

    def __init__(self, on_change: Callable[[Phase, Phase], None]) -> None:
        self._on_change = on_change
        self.phase = Phase.STARTING

    def tell(self, event: Event) -> Phase:
        """Take note of `event` and return the phase that follows; raises :class:`ImpossibleEvent`."""
        before = self.phase
        try:
            after = TRANSITIONS[before][event]
        except KeyError:
            raise ImpossibleEvent(f"{event.value} cannot happen to a kernel that is {before.value}") from None
        self.phase = after
        if after is not before:
            self._on_change(before, after)
        return after


class Cause(enum.Enum):
    """Why a kernel ends; the first cause stays."""

    TIMEOUT = "timeout"
    ABORTED = "aborted"
    CALLER_EXIT = "caller_exit"
    KERNEL_DIED = "kernel_died"
    PROTOCOL_FAULT = "protocol_fault"
    INTERNAL_ERROR = "internal_error"
    STARTUP_FAILURE = "startup_failure"
    SHUTDOWN = "shutdown"
    RESET = "reset"
    OWNER_DETACHED = "owner_detached"
    CAPACITY_EVICTION = "capacity_eviction"
    IDLE = "idle"


_STOP: telemetry.Event = "coding_agent.python_repl.session.stop"
_CRASH: telemetry.Event = "coding_agent.python_repl.session.crash"


@dataclass(frozen=True)
class Ending:
    """What a cause means for everybody concerned; queued callers hear ``kernel_discarded`` in any case.

    `event` is what the table is told.  `active` is the reason the active cell is answered with, `late` the one
    for a call that holds a lease and comes after (behaviour 6.7, 6.8).  `report` and `category` are the
    telemetry event of the kernel and its reason; `outcome` is that of the active cell, `cancel` the cause in
    its ``cell.cancel`` event, None where nothing was cancelled (behaviour 9.1).
    """

    event: Event
    report: telemetry.Event
    category: str
    active: Reason = "shutting_down"
    late: Reason = "shutting_down"
    outcome: str = "interrupted"
    cancel: str | None = None


def _lost(active: Reason, category: str, outcome: str, cancel: str | None) -> Ending:
    return Ending(Event.CELL_LOST, _CRASH, category, active=active, outcome=outcome, cancel=cancel)


def _stopped(category: str, cancel: str) -> Ending:
    return Ending(Event.STOP, _STOP, category, cancel=cancel)


ENDINGS: Mapping[Cause, Ending] = {
    # the cell was lost, and with it the kernel
    Cause.TIMEOUT: _lost("timeout", "cancellation_escalation", "timeout", "timeout"),
    Cause.ABORTED: _lost("cancelled", "cancellation_escalation", "interrupted", "caller_exit"),
    Cause.CALLER_EXIT: _lost("cancelled", "cancellation_escalation", "interrupted", "caller_exit"),
    Cause.PROTOCOL_FAULT: _lost("protocol_fault", "protocol_fault", "protocol_fault", None),
    Cause.INTERNAL_ERROR: _lost("internal_error", "unknown", "unknown", None),
    # the kernel went, and with it the cell
    Cause.KERNEL_DIED: Ending(
        Event.DIED,
        _CRASH,
        "kernel_died",
        active="kernel_died",
        late="kernel_unavailable",
        outcome="kernel_died",
    ),
    # no cell was ever active; the queued and the late fall back instead (seed, "Pre-start fallback only")
    Cause.STARTUP_FAILURE: Ending(Event.START_FAILED, _CRASH, "startup_failure"),
    # somebody wanted it gone; eviction and idle reap take kernels without a cell only
    Cause.SHUTDOWN: _stopped("shutdown", "shutdown"),
    Cause.RESET: _stopped("reset", "shutdown"),
    Cause.OWNER_DETACHED: _stopped("owner_detached", "caller_exit"),
    Cause.CAPACITY_EVICTION: _stopped("capacity_eviction", "shutdown"),
    Cause.IDLE: _stopped("shutdown", "shutdown"),
}

FALLBACKS: Mapping[FallbackReason, str] = {
    "missing_session_scope": "no stable session identity: session id, agent id or living owner is missing",
    "registry_unavailable": "the kernel registry is closed",
    "capacity_exhausted": "max_live_kernels reached and no idle kernel is evictable",
    "startup_failed": "the kernel failed to start",
    "stop_failed": "a requested reset could not confirm that the old kernel stopped",
}
"""Why a session-mode call may run isolated, and what it means; each can occur only before code started (seed)."""


class Unavailable(Exception):
    """No kernel for this call, and none of its code has run: it may fall back to an isolated run."""

    def __init__(self, reason: FallbackReason) -> None:
        super().__init__(FALLBACKS[reason])
        self.reason: FallbackReason = reason
