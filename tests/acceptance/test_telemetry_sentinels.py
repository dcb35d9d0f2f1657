"""Nothing that is told of runs is content, whatever runs do (behaviour 9.1); and what OpenTelemetry gets of them.

Marks are put into everything that a run has to do with: code, output, files and their paths, tokens, exceptions,
parameters and results of helpers, ids, interpreters, callbacks.  Then every way out is searched for them: spans,
metrics, log records of every logger at every level (``lemon_kernel.config`` is exempt), observed life cycles, events,
``details``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lemon_kernel import (
    ApprovalBroker,
    ExecuteCodeConfig,
    ExecuteCodeError,
    HelperContext,
    HelperError,
    KernelRegistry,
    Owner,
    SessionScope,
    ToolPolicy,
    ToolResult,
    telemetry,
)
from lemon_kernel.bridge.dispatch import Dispatcher, Faults

from ..conftest import SOAK
from .conftest import Agent
from .doubles import Gate, Listener, Person


class Told:
    """Everything that leaves the product while it is open, but for results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("an agent")
        meters = MeterProvider([self._reader])
        # In place of set_tracer_provider() and set_meter_provider(), which a process can call only once.
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
        monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
        monkeypatch.setattr(telemetry, "_instruments", telemetry._Instruments())
        self._listener = Listener()
        self._records: list[logging.LogRecord] = []
        self._handler = logging.Handler()
        self._handler.emit = self._records.append  # type: ignore[method-assign]
        self._root = logging.getLogger()
        self._level = self._root.level
        self._root.addHandler(self._handler)
        self._root.setLevel(logging.DEBUG)
        self._observed = len(telemetry.recent())

    def close(self) -> None:
        self._root.removeHandler(self._handler)
        self._root.setLevel(self._level)
        self._listener.close()

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def records(self) -> list[logging.LogRecord]:
        return [record for record in self._records if record.name != "lemon_kernel.config"]

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """Metric name -> its data points."""
        data = self._reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def everything(self) -> str:
        """Return all of it as one text, to be searched."""
        parts: list[object] = [self.metrics, self._listener._heard]
        parts += [(one.name, dict(one.payload)) for one in telemetry.recent()[self._observed :]]
        for span in self.spans:
            parts += [span.name, span.attributes, span.events, span.links, span.status.description]
        for record in self.records:
            kept = {
                name: value
                for name, value in vars(record).items()
                # where in *our* code, and in which of our processes and threads, a record was made
                if name not in ("pathname", "filename", "process", "thread", "created", "msecs")
            }
            parts += [record.getMessage(), kept]
        return repr(parts)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    told = Told(monkeypatch)
    yield told
    told.close()


MARK = "s3nt1nel" + secrets.token_hex(6)
"""What is searched for; nothing but letters and digits, so that no escaping can hide it."""

CONTENT = f"{MARK} %s %d {{0}} \u202e\n\t{MARK}"
"""The mark in company that a formatting mistake would trip over."""


@pytest.fixture(scope="module", params=["per_call", "session"])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("standing") / f"{MARK} %s"
    folder.mkdir()
    agent = Agent(folder, request.param)
    agent.session_id = f"session {MARK}"
    agent.agent_id = f"agent {MARK}"
    agent.session_key = f"agent:{MARK}:main"
    yield agent
    agent.close()


@pytest.fixture
def agent(standing: Agent) -> Agent:
    (standing.cwd / f"{MARK}.txt").write_text(CONTENT)
    return standing


async def raising_helper(params: Mapping[str, object], context: HelperContext) -> str:
    raise HelperError(CONTENT)


async def faulty_helper(params: Mapping[str, object], context: HelperContext) -> str:
    raise RuntimeError(CONTENT)


async def deadly_helper(params: Mapping[str, object], context: HelperContext) -> str:
    raise SystemExit(CONTENT)


async def wrong_helper(params: Mapping[str, object], context: HelperContext) -> Any:
    return {CONTENT}


async def telling_helper(params: Mapping[str, object], context: HelperContext) -> str:
    return CONTENT


def raising(*arguments: object) -> Any:
    raise RuntimeError(CONTENT)


class Broken(Faults):
    """Every point of the bridge breaks with a telling error."""

    def after_answer(self, call_id: int) -> None:
        raise RuntimeError(CONTENT)

    def settlement(self, call_id: int) -> None:
        raise ValueError(CONTENT)


QUIET = "try:\n    {}\nexcept ToolError as error:\n    print(error)\n"
TOKEN = "\nimport lemon_tools, os\nprint('TOKEN', lemon_tools._raw.token, 'PID', os.getpid(), os.getcwd())\n"


def succeeding(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(
        f"import os\nos.environ['{MARK}'] = '{MARK}'\nprint({CONTENT!r})\ntext({CONTENT!r})\n"
        f"notify({CONTENT!r})\nread('{MARK}.txt'); grep('{MARK}'); find('*{MARK}*'); ls(); webfetch('{MARK}')"
        + TOKEN,
        helpers={"webfetch": telling_helper},
        on_update=raising,
        run_id=MARK,
    )


def raising_script(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(
        f"class {MARK}(Exception): pass\ntry:\n    1 / 0\nexcept Exception as error:\n"
        f"    raise {MARK}({CONTENT!r}) from error"
    )


def exiting(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(f"raise SystemExit({CONTENT!r})")


def misspelt(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(f"{MARK} = = 1")


def failing_helpers(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    calls = ["read('x')", "grep('x')", "find('x')", "ls()", f"webfetch('ftp://{MARK}/')"]
    return agent.run(
        "".join(QUIET.format(call) for call in calls),
        helpers={"read": raising_helper, "grep": faulty_helper, "find": deadly_helper, "ls": wrong_helper},
    )


def failing_tools(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    calls = [f"read('{MARK}/no')", f"grep('({MARK}')", f"find('x', path='{MARK}')", f"ls('../{MARK}')"]
    return agent.run("".join(QUIET.format(call) for call in calls))


def unreadable_policy(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    asked: list[int] = []

    def policy() -> ToolPolicy:
        asked.append(1)
        return ToolPolicy() if len(asked) == 1 else raising()

    return agent.run(QUIET.format("ls()"), policy=policy)


def denying_policy(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(QUIET.format("ls()"), policy=ToolPolicy(deny=["ls"], profile="read_only"))


def denied_call(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    policy = ToolPolicy(require_approval=["execute_code"])
    return agent.run(f"print({CONTENT!r})", policy=policy, approvals=Person("deny"), run_id=MARK)


def prompts(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(
        QUIET.format(f"read('{MARK}')") * 2,
        policy=ToolPolicy(require_approval=["read"]),
        approvals=Person("approve_session"),
    )


def failing_prompts(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(
        QUIET.format(f"read('{MARK}')"),
        policy=ToolPolicy(require_approval=["read"]),
        approvals=ApprovalBroker(raising),
    )


def frames(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(
        "import lemon_tools\nraw = lemon_tools._raw\n"
        f"raw(b'{MARK}', timeout_s=0.1)\n"
        f"raw({{'type': '{MARK}'}}, timeout_s=0.1)\n"
        f"raw({{'type': 'call', 'id': 50, 'token': '{MARK}', 'tool': '{MARK}'}})\n"
        f"raw({{'type': 'call', 'id': 51, 'token': raw.token, 'tool': '{MARK}'}})\n"
        f"raw({{'type': 'call', 'id': 52, 'token': raw.token, 'tool': ['{MARK}']}})\n"
        f"raw({{'type': 'call', 'id': 53, 'token': raw.token, 'tool': 'ls', 'x': '{MARK}' * 40000}})\n"
        f"raw({{'type': 'text', 'id': 54, 'n': 0, 'token': raw.token, 'text': '{MARK}'}})\n" + TOKEN
    )


def broken_bridge(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    with monkeypatch.context() as patch:
        from functools import partial

        patch.setattr("lemon_kernel.run.Dispatcher", partial(Dispatcher, faults=Broken()))
        return agent.run(QUIET.format(f"read('{MARK}')") * 2)


def flooding(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(f"print('{MARK}' * 100_000)")


def unknown_parameters(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    tool = agent.tool()
    return tool.run_sync({"script": "pass", MARK: MARK})


def failing_owner(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    async def config() -> ExecuteCodeConfig:
        return raising()

    with Owner(config) as owner:
        return agent.run("pass", scope=SessionScope(agent.session_id, agent.agent_id, owner))


def failing_recorder(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    unlisten = telemetry.listen(raising)
    try:
        return agent.run("pass")
    finally:
        unlisten()


def without_scope(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(f"print('{MARK}')", scope=None)


def resetting(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(f"print('{MARK}')", reset=True)


def crashing(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(f"import os\nprint('{MARK}', flush=True)\nos.kill(os.getpid(), 9)")


def timing_out(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    return agent.run(f"read('{MARK}')", helpers={"read": Gate()}, timeout_ms=1000)


def aborting(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    gate = Gate()
    run = agent.start(f"print('{MARK}', flush=True)\nread('{MARK}')", helpers={"read": gate})
    gate.wait_for(MARK)
    run.abort()
    return run.result()


def strange_interpreter(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    python = agent.cwd / f"python {MARK}"
    python.write_text(f"#!/bin/sh\necho {MARK}\necho {MARK} >&2\nexit 9\n")
    python.chmod(0o700)
    return agent.run("pass", config={"python_path": str(python)})


def closed_registry(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    registry = KernelRegistry()
    asyncio.run(registry.aclose())
    return agent.run("pass", registry=registry)


def failing_stop(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> ToolResult:
    async def stopper(stop: Callable[[], Any]) -> bool:
        await stop()
        return raising()

    registry = KernelRegistry(stopper=stopper)
    try:
        agent.run("pass", registry=registry)
        return agent.run("pass", reset=True, registry=registry)
    finally:
        asyncio.run(registry.aclose())


QUICK = [
    succeeding,
    raising_script,
    exiting,
    misspelt,
    failing_helpers,
    failing_tools,
    unreadable_policy,
    denying_policy,
    denied_call,
    prompts,
    failing_prompts,
    frames,
    broken_bridge,
    flooding,
    unknown_parameters,
    failing_owner,
    failing_recorder,
    without_scope,
]
SLOW = [resetting, crashing, timing_out, aborting, strange_interpreter, closed_registry, failing_stop]


def check(told: Told, agent: Agent, result: ToolResult) -> None:
    """Fail if anything that was told, or the details, has a mark, a token, a path or a process id."""
    details = {name: value for name, value in result.details.items() if name != "full_output_path"}
    everything = told.everything() + repr(details)
    for name in (MARK, os.environ["TMPDIR"], os.environ["HOME"]):
        assert name not in everything, everything
    found = re.search(r"TOKEN (\S+) PID (\d+)", result.text)
    if found is not None:
        assert len(found[1]) == 43
        assert found[1] not in everything
        assert not re.search(rf"\b{found[2]}\b", everything)
    for record in told.records:
        assert not record.exc_info, record.getMessage()
        assert record.stack_info is None


@pytest.mark.parametrize("way", [*QUICK, *SLOW])
def test_no_way_of_a_run_tells_content(
    agent: Agent, told: Told, monkeypatch: pytest.MonkeyPatch, way: Callable[..., ToolResult]
) -> None:
    """Each way to run, to fail and to be ended leaves counts and closed words, and says something at all."""
    result = way(agent, monkeypatch)

    check(told, agent, result)
    assert told.spans or result.details == {"denied": True}


@pytest.mark.timeout(1800 if SOAK else 120)
def test_no_sequence_of_runs_tells_content(standing: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one run leaves behind is not told by a later one; the text round the mark is arbitrary."""
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

    @settings(max_examples=200 if SOAK else 10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(ways=st.lists(st.sampled_from(QUICK), min_size=1, max_size=3), before=texts, after=texts)
    def run(ways: list[Callable[..., ToolResult]], before: str, after: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.CONTENT", before + MARK + after)
            (standing.cwd / f"{MARK}.txt").write_text(before + MARK + after)
            told = Told(patch)
            try:
                for way in ways:
                    check(told, standing, way(standing, patch))
            finally:
                told.close()

    run()


def test_a_run_is_a_span_and_each_helper_call_its_child(agent: Agent, told: Told) -> None:
    """One span under the caller's own, with mode and outcome; one child per call that reached its tool."""
    tool = agent.tool(helpers={"find": raising_helper})

    async def turn() -> None:
        with told.tracer.start_as_current_span("turn"):
            await tool.execute({"script": "read('x') if 0 else ls()\nls()\n" + QUIET.format("find('x')")})
            await tool.execute({"script": "1 / 0"})

    asyncio.run(turn())

    by_id = {span.context.span_id: span for span in told.spans if span.context is not None}
    shown = [
        (
            span.name,
            dict(span.attributes or {}),
            span.status.status_code.name,
            by_id[span.parent.span_id].name if span.parent is not None else None,
        )
        for span in told.spans
    ]
    run = {"lemon.mode": agent.mode}
    failure = "exit" if agent.mode == "per_call" else "exception"
    assert shown == [
        ("lemon.helper", {"lemon.tool": "ls"}, "OK", "lemon.execute_code"),
        ("lemon.helper", {"lemon.tool": "ls"}, "OK", "lemon.execute_code"),
        ("lemon.helper", {"lemon.tool": "find"}, "ERROR", "lemon.execute_code"),
        ("lemon.execute_code", {**run, "lemon.outcome": "ok"}, "OK", "turn"),
        ("lemon.execute_code", {**run, "lemon.outcome": failure}, "ERROR", "turn"),
        ("turn", {}, "UNSET", None),
    ]


def test_a_refused_and_a_cancelled_run_are_spans_too(per_call: Agent, told: Told) -> None:
    """What ends with an exception instead of a result says so in one word, and never which exception."""
    missing = per_call.tool()
    per_call.cwd.rmdir()
    with pytest.raises(ExecuteCodeError):
        asyncio.run(missing.execute({"script": "pass"}))
    per_call.cwd.mkdir()
    gate = Gate()
    tool = per_call.tool(helpers={"read": gate})

    async def main() -> None:
        call = asyncio.create_task(tool.execute({"script": "read('x')"}))
        while not gate.arrived:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())

    runs = [span for span in told.spans if span.name == "lemon.execute_code"]
    assert [(span.attributes or {})["lemon.outcome"] for span in runs] == ["refused", "cancelled"]
    assert all(not span.events and span.status.description is None for span in runs)


def test_events_are_counters_and_histograms_under_their_names(agent: Agent, told: Told) -> None:
    """One counter per event and one histogram per duration; their attributes are words of the catalogue."""
    agent.run("ls()")
    agent.run(
        QUIET.format("ls()"), policy=ToolPolicy(require_approval=["ls"]), approvals=Person("approve_once")
    )

    expected = {"lemon.approvals.requested": 1, "lemon.approvals.resolved": 1}
    if agent.mode == "per_call":
        expected |= {"coding_agent.execute_code.stop": 2}
    else:
        expected |= {f"coding_agent.python_repl.cell.{event}": 2 for event in ("start", "stop")}
    counters = {name: points for name, points in told.metrics.items() if hasattr(points[0], "value")}
    values = {name: sum(point.value for point in points) for name, points in counters.items()}
    values.pop("coding_agent.python_repl.session.start", None)  # whether this is the module's first test
    values.pop("coding_agent.python_repl.template.fallback", None)
    assert values == expected
    duration = (
        "execute_code.stop.duration_us" if agent.mode == "per_call" else "python_repl.cell.stop.duration_ms"
    )
    (histogram,) = told.metrics[f"coding_agent.{duration}"]
    assert histogram.count == 2
    for name, points in told.metrics.items():
        event = next(event for event in telemetry.CATALOGUE if name.startswith(event))
        for point in points:
            for attribute, word in point.attributes.items():
                kind = telemetry.CATALOGUE[event].metadata[attribute]
                assert isinstance(kind, telemetry.Words)
                assert word in kind.allowed


def test_a_span_costs_little_beside_a_run(per_call: Agent) -> None:
    """Without a provider all the telemetry of a run takes less than a fiftieth of the run's own time."""
    tool = per_call.tool()
    tool.run_sync({"script": "pass"})
    started = time.perf_counter()
    for _ in range(5):
        tool.run_sync({"script": "pass"})
    run_s = (time.perf_counter() - started) / 5

    started = time.perf_counter()
    for _ in range(200):
        with telemetry.run_span("per_call") as span:
            with span.helper("read"):
                pass
            span.outcome(None)
        telemetry.emit("coding_agent.execute_code.stop", {"duration_us": 1}, {"rpc_calls": 0, "exit_code": 0})
    telemetry_s = (time.perf_counter() - started) / 200

    assert telemetry_s < run_s / 50


def test_the_log_of_a_quiet_run_is_quiet(agent: Agent, told: Told) -> None:
    """A run in which nothing goes wrong says nothing above the level of debugging."""
    agent.run("print(ls())")

    assert [record.getMessage() for record in told.records if record.levelno > logging.DEBUG] == []
