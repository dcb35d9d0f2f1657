"""Telemetry: closed words and numbers only, no cost without a listener, no effect on a run."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping

import pytest

from lemon_kernel import telemetry
from lemon_kernel.result import FallbackReason, Reason

REPL = "coding_agent.python_repl."

Heard = tuple[str, Mapping[str, int], Mapping[str, "str | int | None"]]


@pytest.fixture
def heard() -> Iterator[list[Heard]]:
    """What a listener hears during the test."""
    events: list[Heard] = []
    stop = telemetry.listen(lambda *event: events.append(event))
    yield events
    stop()


@pytest.mark.parametrize("event", telemetry.CATALOGUE)
def test_every_event_passes_only_what_the_catalogue_names(event: telemetry.Event, heard: list[Heard]) -> None:
    """Whatever a caller adds, an event carries its own measurements and metadata and nothing else."""
    spec = telemetry.CATALOGUE[event]
    secret = "s3cret /home/me"
    telemetry.emit(
        event,
        dict.fromkeys((*spec.measurements, "extra"), 3),
        dict.fromkeys((*spec.metadata, "token", "cwd"), secret),
    )

    ((name, measured, said),) = heard
    assert name == event
    assert measured == dict.fromkeys(spec.measurements, 3)
    assert set(said) == set(spec.metadata)
    assert secret not in repr(heard)
    for key, kind in spec.metadata.items():
        if isinstance(kind, telemetry.Words):
            assert said[key] == kind.otherwise


@pytest.mark.parametrize(
    ("event", "key", "expected"),
    [
        ("session.stop", "reason", "shutdown"),
        ("session.crash", "reason", "unknown"),
        ("session.reap", "reason", "unreachable"),
        ("cell.stop", "outcome", "unknown"),
        ("cell.cancel", "cause", "unknown"),
        ("fallback", "reason", "unknown"),
        ("bridge.deny", "reason", "authentication"),
        ("template.fallback", "reason", "unknown"),
    ],
)
@pytest.mark.parametrize("value", ["nonsense", None, 3, ["ok"]])
def test_unknown_words_are_mapped(
    event: str, key: str, expected: str, value: object, heard: list[Heard]
) -> None:
    """A word outside the closed set becomes the event's own word for it (behaviour 9.1)."""
    telemetry.emit(f"{REPL}{event}", {}, {key: value})  # type: ignore[arg-type]

    assert heard[0][2] == {key: expected}


@pytest.mark.parametrize("bad", [-1, 2.5, True, "7", None, [], float("nan")])
def test_bad_measurements_become_zero(bad: object, heard: list[Heard]) -> None:
    """Measurements are non-negative integers; one that is missing is 0, and a missing count is 1."""
    telemetry.emit("coding_agent.python_repl.cell.stop", {"duration_ms": bad}, {"outcome": "ok"})

    assert heard[0][1] == {"count": 1, "duration_ms": 0}


def test_exit_code_may_be_null(heard: list[Heard]) -> None:
    """A run that we killed has no exit status, and says so."""
    telemetry.emit("coding_agent.execute_code.stop", {"duration_us": 9}, {"rpc_calls": 2, "exit_code": None})

    assert heard[0][2] == {"rpc_calls": 2, "rpc_denied": 0, "exit_code": None}


def test_an_unknown_event_is_nothing(heard: list[Heard]) -> None:
    """An event that the catalogue does not know goes nowhere."""
    telemetry.emit("coding_agent.script", {"count": 1}, {"script": "print(1)"})  # type: ignore[arg-type]

    assert heard == []


def test_the_closed_sets_are_those_of_the_results() -> None:
    """Fallback reasons and run outcomes are the literals that results use."""
    from typing import get_args

    fallback = telemetry.CATALOGUE["coding_agent.python_repl.fallback"].metadata["reason"]
    outcome = telemetry.SPANS["lemon.execute_code"]["lemon.outcome"]

    assert isinstance(fallback, telemetry.Words)
    assert set(fallback.allowed) == {*get_args(FallbackReason), "unknown"}
    assert set(outcome.allowed) == {*get_args(Reason), "ok", "refused", "unknown"}


@pytest.mark.case(314)
def test_a_failing_recorder_is_harmless(heard: list[Heard], caplog: pytest.LogCaptureFixture) -> None:
    """A listener that raises keeps nothing from the others, and only its type is logged."""

    def fail(*event: object) -> None:
        raise ValueError("s3cret")

    stop = telemetry.listen(fail)
    try:
        telemetry.emit("coding_agent.python_repl.cell.start", {"queue_depth": 1})
    finally:
        stop()
    stop()

    assert len(heard) == 1
    assert telemetry.recent()[-1].payload["event"] == "cell_started"
    assert "ValueError" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("event", "lifecycle"),
    [(event, spec.lifecycle) for event, spec in telemetry.CATALOGUE.items()],
)
def test_life_cycles_are_remembered(event: telemetry.Event, lifecycle: str | None) -> None:
    """Each python_repl event leaves one observation with its measurements and metadata; others leave none."""
    telemetry.record("marker", {})
    telemetry.emit(event, {"duration_ms": 4}, {"reason": "reset"})

    last = telemetry.recent()[-1]
    if not event.startswith(REPL):
        assert lifecycle is None
        assert last.name == "marker"
        return
    assert last.name == "python_repl_lifecycle_observed"
    assert last.payload["event"] == lifecycle
    spec = telemetry.CATALOGUE[event]
    assert set(last.payload) == {"event", *spec.measurements, *spec.metadata}


def test_the_recorder_is_bounded_and_discreet() -> None:
    """Telling keys are dropped, strings cut at 4096 bytes, objects left out, old observations forgotten."""
    telemetry.record(
        "seen", {"Token": "t", "stdout": "x", "prompt": "p", "note": "ä" * 3000, "n": 1, "o": object()}
    )

    payload = telemetry.recent()[-1].payload
    assert set(payload) == {"note", "n"}
    assert len(str(payload["note"]).encode()) == 4096

    for number in range(telemetry.MAX_RECENT + 10):
        telemetry.record("seen", {"n": number})
    assert len(telemetry.recent()) == telemetry.MAX_RECENT


# --- OpenTelemetry: in processes of their own, for a provider can be installed once ----------------------


def in_fresh_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nobody_pays_without_a_provider() -> None:
    """Events and spans import nothing of OpenTelemetry while nobody else has."""
    out = in_fresh_python(
        """
        import sys
        from lemon_kernel import telemetry
        telemetry.emit("coding_agent.python_repl.cell.start", {"count": 1})
        with telemetry.run_span("per_call") as run, run.helper("read") as call:
            call.outcome(None)
            run.outcome("timeout")
        print([name for name in sys.modules if name.startswith("opentelemetry")])
        import opentelemetry.trace
        print(telemetry.run_span("session") is telemetry.NO_SPAN)
        """
    )

    assert out.splitlines() == ["[]", "True"]


def test_spans_and_metrics_with_an_sdk() -> None:
    """With an SDK a run is a span under the caller's, a helper call its child, and events are metrics."""
    out = in_fresh_python(
        """
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from lemon_kernel import telemetry

        exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        metrics.set_meter_provider(MeterProvider([reader]))

        with trace.get_tracer("agent").start_as_current_span("turn"):
            with telemetry.run_span("session") as run:
                with run.helper("read") as call:
                    call.outcome("error")
                with run.helper("/etc/passwd") as call:
                    call.outcome(None)
                run.outcome("kernel_died")
        try:
            with telemetry.run_span("per_call"):
                raise ValueError("s3cret")
        except ValueError:
            pass
        spans = exporter.get_finished_spans()
        names = {span.context.span_id: span.name for span in spans}
        for span in spans:
            parent = names.get(span.parent.span_id) if span.parent else None
            print(span.name, parent, span.status.status_code.name, dict(span.attributes), len(span.events))
        telemetry.emit("coding_agent.execute_code.stop", {"duration_us": 15}, {"rpc_calls": 3, "exit_code": 0})
        telemetry.emit("coding_agent.python_repl.cell.stop", {"duration_ms": 4}, {"outcome": "ok"})
        for resource in reader.get_metrics_data().resource_metrics:
            for scope in resource.scope_metrics:
                for metric in sorted(scope.metrics, key=lambda metric: metric.name):
                    (point,) = metric.data.data_points
                    print(metric.name, metric.unit, dict(point.attributes), getattr(point, "sum", None) or point.value)
        """
    )

    assert out.splitlines() == [
        "lemon.helper lemon.execute_code ERROR {'lemon.tool': 'read'} 0",
        "lemon.helper lemon.execute_code OK {'lemon.tool': 'unknown'} 0",
        "lemon.execute_code turn ERROR {'lemon.mode': 'session', 'lemon.outcome': 'kernel_died'} 0",
        "turn None UNSET {} 0",
        "lemon.execute_code None ERROR {'lemon.mode': 'per_call', 'lemon.outcome': 'unknown'} 0",
        "coding_agent.execute_code.stop  {} 1",
        "coding_agent.execute_code.stop.duration_us us {} 15",
        "coding_agent.python_repl.cell.stop  {'outcome': 'ok'} 1",
        "coding_agent.python_repl.cell.stop.duration_ms ms {'outcome': 'ok'} 4",
    ]


def test_a_failing_provider_is_harmless() -> None:
    """A tracer or meter that raises changes nothing for the run."""
    out = in_fresh_python(
        """
        from opentelemetry import metrics, trace
        from lemon_kernel import telemetry

        class Broken(trace.TracerProvider):
            def get_tracer(self, *args, **kwargs):
                raise RuntimeError("s3cret")

        class BrokenMeters(metrics.MeterProvider):
            def get_meter(self, *args, **kwargs):
                raise RuntimeError("s3cret")

        trace.set_tracer_provider(Broken())
        metrics.set_meter_provider(BrokenMeters())
        telemetry.emit("coding_agent.python_repl.cell.start", {"count": 1})
        print(telemetry.run_span("per_call") is telemetry.NO_SPAN)
        """
    )

    assert out == "True\n"
