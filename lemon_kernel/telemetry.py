"""Counts, durations and closed categories of what the product does; never content, never who or where.

:func:`emit` is the one way out.  It knows every event (:data:`CATALOGUE`, behaviour 9.1), turns bad numbers into
0 and unknown words into the event's own word for "unknown", and drops whatever the catalogue does not name:
nothing that a caller passes by mistake can get out.  What passes goes to three places, each of which may fail
without a run noticing (behaviour 9.2): the listeners of this process (:func:`listen`), a bounded memory of life
cycles (:func:`recent`), and OpenTelemetry.

**What OpenTelemetry costs.**  The API alone takes about 60 ms to import, more than a whole per-call run, and in
most processes nobody listens.  Importing it lazily at the first run only moves the bill.  Looking for
``opentelemetry.sdk`` in ``sys.modules`` would miss every provider that is not the SDK.  But no provider can be
installed without importing ``opentelemetry.trace`` (or ``.metrics``) first, except through the variables
``OTEL_PYTHON_TRACER_PROVIDER`` and ``OTEL_PYTHON_METER_PROVIDER``, which the API itself reads.  So: as long as neither the
module nor its variable is there, the answer to "does anybody listen?" is a dictionary look-up, and it is the
true answer.  Once the API is loaded, the proxy provider it starts with still means that nobody listens.

What can still happen: a program that installs its provider in the middle of a run gets spans from the next
run on.

Spans (one per run in both modes, a child per helper call) carry the same closed categories.  Exceptions are
never recorded on them, for their messages are content.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self, cast, get_args

from lemon_provisioner import ColdStartReason
from lemon_shim.wire import HELPERS

from ._version import __version__
from .result import FallbackReason, Reason

if TYPE_CHECKING:
    from opentelemetry import metrics, trace

__all__ = [
    "CATALOGUE",
    "Event",
    "EventSpec",
    "Observation",
    "Words",
    "emit",
    "fault_name",
    "listen",
    "recent",
    "record",
    "run_span",
]

log = logging.getLogger("lemon_kernel.telemetry")


def fault_name(error: BaseException) -> str:
    """Return what a log record may say of an error: its type, and the line of our own code it came through.

    Its message, its traceback and what they were caused by are content (behaviour 9.1), so no record carries
    an ``exc_info``; the innermost frame of a module of ours says where to look.
    """
    place = ""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__")
        if isinstance(module, str) and module.startswith(("lemon_kernel.", "lemon_provisioner.")):
            place = f" at {module}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}{place}"


# --- the catalogue -----------------------------------------------------------------------------------------

Event = Literal[
    "coding_agent.execute_code.stop",
    "coding_agent.python_repl.session.start",
    "coding_agent.python_repl.session.stop",
    "coding_agent.python_repl.session.crash",
    "coding_agent.python_repl.session.reap",
    "coding_agent.python_repl.cell.start",
    "coding_agent.python_repl.cell.stop",
    "coding_agent.python_repl.cell.cancel",
    "coding_agent.python_repl.fallback",
    "coding_agent.python_repl.bridge.deny",
    "coding_agent.python_repl.template.fallback",
    "lemon.approvals.requested",
    "lemon.approvals.resolved",
]

StopReason = Literal["shutdown", "reset", "owner_detached", "capacity_eviction"]
CrashReason = Literal[
    "startup_failure", "kernel_died", "protocol_fault", "cancellation_escalation", "unknown"
]
ReapReason = Literal["idle", "unreachable"]
CellOutcome = Literal["ok", "exception", "timeout", "kernel_died", "protocol_fault", "interrupted", "unknown"]
CancelCause = Literal["timeout", "caller_exit", "shutdown", "unknown"]
DenyReason = Literal["authentication"]
RunMode = Literal["per_call", "session"]
RunOutcome = Literal["ok", Reason, "refused", "unknown"]
FallbackWord = Literal[FallbackReason, "unknown"]


class Words(NamedTuple):
    """A closed set of metadata words and the one that stands for whatever is not in it."""

    allowed: tuple[str, ...]
    otherwise: str

    def admit(self, value: object) -> str:
        return value if isinstance(value, str) and value in self.allowed else self.otherwise


class Count:
    """A non-negative integer; whatever is not becomes 0 (or None, where that is a value)."""

    def __init__(self, *, optional: bool = False) -> None:
        self.optional = optional

    def admit(self, value: object) -> int | None:
        if value is None and self.optional:
            return None
        return value if type(value) is int and value >= 0 else 0


def _words(literal: object, otherwise: str) -> Words:
    return Words(get_args(literal), otherwise)


class EventSpec(NamedTuple):
    """One event: what it measures, what it says, and its name among the observed life cycles, if any."""

    measurements: tuple[str, ...]
    metadata: Mapping[str, Words | Count]
    lifecycle: str | None
    meaning: str


_LIVE = ("live_kernels", "capacity")

CATALOGUE: Mapping[Event, EventSpec] = {
    "coding_agent.execute_code.stop": EventSpec(
        ("count", "duration_us"),
        {"rpc_calls": Count(), "rpc_denied": Count(), "exit_code": Count(optional=True)},
        None,
        "A per-call run has ended, fallback runs included.",
    ),
    "coding_agent.python_repl.session.start": EventSpec(
        ("count", *_LIVE), {}, "session_started", "A kernel has become ready."
    ),
    "coding_agent.python_repl.session.stop": EventSpec(
        ("count", "duration_ms", *_LIVE),
        {"reason": _words(StopReason, "shutdown")},
        "session_stopped",
        "A kernel was stopped on purpose.",
    ),
    "coding_agent.python_repl.session.crash": EventSpec(
        ("count", "duration_ms", *_LIVE),
        {"reason": _words(CrashReason, "unknown")},
        "session_crashed",
        "A kernel was lost, or did not start (then duration_ms is 0).",
    ),
    "coding_agent.python_repl.session.reap": EventSpec(
        ("count", "idle_ms", *_LIVE),
        {"reason": _words(ReapReason, "unreachable")},
        "session_reaped",
        "An idle kernel is about to be stopped; its session.stop follows.",
    ),
    "coding_agent.python_repl.cell.start": EventSpec(
        ("count", "queue_depth", "queue_capacity"), {}, "cell_started", "A cell begins to run."
    ),
    "coding_agent.python_repl.cell.stop": EventSpec(
        ("count", "duration_ms"),
        {"outcome": _words(CellOutcome, "unknown")},
        "cell_stopped",
        "A cell has ended; once per cell.",
    ),
    "coding_agent.python_repl.cell.cancel": EventSpec(
        ("count", "duration_ms"),
        {"cause": _words(CancelCause, "unknown")},
        "cell_cancelled",
        "A running cell is being stopped; at most once per cell.",
    ),
    "coding_agent.python_repl.fallback": EventSpec(
        ("count",),
        {"reason": _words(FallbackWord, "unknown")},
        "fallback",
        "A session-mode call runs isolated instead.",
    ),
    "coding_agent.python_repl.bridge.deny": EventSpec(
        ("count",),
        {"reason": _words(DenyReason, "authentication")},
        "bridge_denied",
        "A helper request without the cell's token was refused (session mode only).",
    ),
    "coding_agent.python_repl.template.fallback": EventSpec(
        ("count",),
        {"reason": _words(ColdStartReason, "unknown")},
        "template_fallback",
        "A kernel was started from scratch where a template might have been forked.",
    ),
    "lemon.approvals.requested": EventSpec(("count",), {}, None, "A person is being asked."),
    "lemon.approvals.resolved": EventSpec(("count",), {}, None, "A question to a person has found its end."),
}

SPANS = {
    "lemon.execute_code": {
        "lemon.mode": _words(RunMode, "per_call"),
        "lemon.outcome": _words(RunOutcome, "unknown"),
    },
    "lemon.helper": {"lemon.tool": Words((*HELPERS, "unknown"), "unknown")},
}
"""Span -> attribute -> its words.  `lemon.outcome` is the result's reason, ``ok`` when there is none."""

# --- emitting ----------------------------------------------------------------------------------------------

Measurements = Mapping[str, int]
Metadata = Mapping[str, str | int | None]
Listener = Callable[[str, Measurements, Metadata], None]

_listeners: tuple[Listener, ...] = ()
_listeners_lock = threading.Lock()


def emit(
    event: Event, measurements: Mapping[str, object], metadata: Mapping[str, object] | None = None
) -> None:
    """Tell whoever listens that `event` happened; never raises, and an unknown event is nothing.

    A measurement that is not given is 0, ``count`` excepted, which is 1.
    """
    spec = CATALOGUE.get(event)
    if spec is None:
        log.debug("an event that the catalogue does not know was dropped")
        return
    number = Count()
    measured = {
        name: cast(int, number.admit(measurements.get(name, 1 if name == "count" else 0)))
        for name in spec.measurements
    }
    said = {name: kind.admit((metadata or {}).get(name)) for name, kind in spec.metadata.items()}
    for listener in _listeners:
        with _harmless:
            listener(event, measured, said)
    if spec.lifecycle is not None:
        record(LIFECYCLE, {"event": spec.lifecycle, **measured, **said})
    if _loaded("opentelemetry.metrics", "OTEL_PYTHON_METER_PROVIDER"):
        with _harmless:
            _measure(event, measured, said)


class _Harmless:
    """What fails in here is logged by its type and forgotten: telemetry never affects a run."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        log.warning("telemetry: a recorder failed (%s)", kind.__name__)
        return True


_harmless = _Harmless()


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener(event, measurements, metadata)`` for each event; return what ends that.

    It is called in the emitting thread and must be quick; what it raises is logged by type and forgotten.
    """
    global _listeners
    with _listeners_lock:
        _listeners = (*_listeners, listener)

    def unlisten() -> None:
        global _listeners
        with _listeners_lock:
            _listeners = tuple(other for other in _listeners if other is not listener)

    return unlisten


# --- life cycles kept in memory (behaviour 9.2) ------------------------------------------------------------

LIFECYCLE = "python_repl_lifecycle_observed"
MAX_RECENT = 1000
MAX_STRING_BYTES = 4096
DROPPED_KEYS = frozenset({"token", "stdout", "stderr", "secret", "password", "prompt", "response"})

Value = str | int | float | bool | None


class Observation(NamedTuple):
    """Something that was observed: its name and a payload without content."""

    name: str
    payload: Mapping[str, Value]


_recent: deque[Observation] = deque(maxlen=MAX_RECENT)


def record(name: str, payload: Mapping[str, object]) -> None:
    """Remember an observation, best effort: telling keys are dropped, strings cut, other values left out."""
    with _harmless:
        kept = {key: _cut(value) for key, value in payload.items() if key.lower() not in DROPPED_KEYS}
        plain = {
            key: value for key, value in kept.items() if value is None or isinstance(value, (str, int, float))
        }
        _recent.append(Observation(name, types.MappingProxyType(plain)))


def recent() -> list[Observation]:
    """Return the last observations of this process, oldest first, at most `MAX_RECENT`."""
    return list(_recent)


def _cut(value: object) -> object:
    if not isinstance(value, str) or len(value) * 4 <= MAX_STRING_BYTES:
        return value
    return value.encode("utf-8", "replace")[:MAX_STRING_BYTES].decode("utf-8", "ignore")


# --- OpenTelemetry -----------------------------------------------------------------------------------------


def _loaded(module: str, variable: str) -> bool:
    """Whether a provider may have been installed; see the essay above."""
    return module in sys.modules or variable in os.environ


class _Instruments:
    """The counters and histograms of this process, made when they are first needed."""

    def __init__(self) -> None:
        self._meter: metrics.Meter | None = None
        self._counters: dict[str, metrics.Counter] = {}
        self._histograms: dict[str, metrics.Histogram] = {}

    def measure(self, event: str, measured: Measurements, attributes: Mapping[str, str]) -> None:
        if self._meter is None:
            from opentelemetry import metrics

            self._meter = metrics.get_meter("lemon_kernel", __version__)
        counter = self._counters.get(event)
        if counter is None:
            counter = self._counters[event] = self._meter.create_counter(event)
        counter.add(measured["count"], attributes)
        for name, value in measured.items():
            unit = name.rpartition("_")[2]
            if unit not in ("ms", "us"):
                continue
            full_name = f"{event}.{name}"
            histogram = self._histograms.get(full_name)
            if histogram is None:
                histogram = self._histograms[full_name] = self._meter.create_histogram(full_name, unit=unit)
            histogram.record(value, attributes)


_instruments = _Instruments()


def _measure(event: str, measured: Measurements, said: Metadata) -> None:
    # Only words: a number (calls, exit status) would make one time series per value.
    _instruments.measure(
        event, measured, {name: word for name, word in said.items() if isinstance(word, str)}
    )


class Span(Protocol):
    """What is known of a run, or of a helper call, while it lasts; a context manager that ends it."""

    def helper(self, tool: str) -> Span:
        """Return the span of a helper call inside this run: ``with run.helper("read") as call: ...``"""

    def outcome(self, outcome: str | None) -> None:
        """Say how it ended: a result's ``reason``, None for success; ``"error"`` for a failed helper."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class _NoSpan:
    """A span that nobody looks at."""

    __slots__ = ()

    def helper(self, tool: str) -> Span:
        return self

    def outcome(self, outcome: str | None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


NO_SPAN: Span = _NoSpan()


class _LiveSpan:
    """A span that OpenTelemetry records; helper calls name their parent, for they run in other contexts."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, *, is_run: bool) -> None:
        self._tracer = tracer
        self._span = span
        self._is_run = is_run

    def helper(self, tool: str) -> Span:
        with _harmless:
            from opentelemetry import trace

            attributes = {"lemon.tool": SPANS["lemon.helper"]["lemon.tool"].admit(tool)}
            parent = trace.set_span_in_context(self._span)
            child = self._tracer.start_span("lemon.helper", parent, attributes=attributes)
            return _LiveSpan(self._tracer, child, is_run=False)
        return NO_SPAN

    def outcome(self, outcome: str | None) -> None:
        with _harmless:
            from opentelemetry.trace import StatusCode

            if self._is_run:
                word = SPANS["lemon.execute_code"]["lemon.outcome"].admit(outcome or "ok")
                self._span.set_attribute("lemon.outcome", word)
            self._span.set_status(StatusCode.OK if outcome is None else StatusCode.ERROR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with _harmless:
            if exc_info[0] is not None:
                self.outcome(_ending(exc_info[0]))
            self._span.end()


def _ending(kind: object) -> RunOutcome:
    """Return the outcome of a run that ended with an exception instead of a result."""
    from asyncio import CancelledError

    from .errors import ExecuteCodeError

    if isinstance(kind, type) and issubclass(kind, ExecuteCodeError):
        return "refused"
    return "cancelled" if isinstance(kind, type) and issubclass(kind, CancelledError) else "unknown"


def run_span(mode: RunMode) -> Span:
    """Return the span of a run, a child of the caller's current span: call it on the caller's side.

    ``with telemetry.run_span(mode) as run: ...; run.outcome(reason)``
    """
    if not _loaded("opentelemetry.trace", "OTEL_PYTHON_TRACER_PROVIDER"):
        return NO_SPAN
    with _harmless:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            return NO_SPAN
        tracer = provider.get_tracer("lemon_kernel", __version__)
        attributes = {"lemon.mode": SPANS["lemon.execute_code"]["lemon.mode"].admit(mode)}
        return _LiveSpan(tracer, tracer.start_span("lemon.execute_code", attributes=attributes), is_run=True)
    return NO_SPAN
