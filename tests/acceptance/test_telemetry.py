"""What is told about runs: counts and closed words (behaviour 9), black-box; cases 307 to 314."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from lemon_kernel import ExecuteCodeError, KernelRegistry, Owner, ToolPolicy, telemetry
from lemon_kernel.session.kernel import Link
from lemon_kernel.session.link import StartupError

from .conftest import Agent, wait_until
from .doubles import Gate, Listener, Person, files


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.mark.case(307)
def test_a_per_call_run_is_one_event_with_its_counts(per_call: Agent, listener: Listener) -> None:
    """One allowed and one denied call: two calls, one denial, the exit code and a duration."""
    files(per_call.cwd, {"f": "x"})

    per_call.run('read("f")\ntry:\n    ls()\nexcept ToolError:\n    pass', policy=ToolPolicy(deny=["ls"]))

    (stop,) = listener.events("execute_code.stop")
    assert stop.measurements["count"] == 1
    assert stop.measurements["duration_us"] > 0
    assert set(stop.measurements) == {"count", "duration_us"}
    assert stop.metadata == {"rpc_calls": 2, "rpc_denied": 1, "exit_code": 0}
    assert listener.names() == ["execute_code.stop"]


@pytest.mark.case(307)
def test_the_exit_code_of_a_killed_run_is_null(per_call: Agent, listener: Listener) -> None:
    """A run that we killed has none; one that exited has its own."""
    per_call.run("import time\ntime.sleep(30)", timeout_ms=1000)
    per_call.run("raise SystemExit(3)")

    codes = [stop.metadata["exit_code"] for stop in listener.events("execute_code.stop")]
    assert codes == [None, 3]


@pytest.mark.case(308)
def test_a_first_cell_starts_a_session_and_is_one_start_and_one_stop(
    session: Agent, listener: Listener
) -> None:
    """Session start, cell start, cell stop with outcome ok, in that order and nothing of the other family."""
    session.run("x = 1")

    names = [name.removeprefix("python_repl.") for name in listener.names()]
    assert names == ["session.start", "cell.start", "cell.stop"]
    (start,) = listener.events("python_repl.session.start")
    assert start.measurements == {"count": 1, "live_kernels": 1, "capacity": 16}
    (cell,) = listener.events("python_repl.cell.start")
    assert cell.measurements == {"count": 1, "queue_depth": 0, "queue_capacity": 8}
    (stop,) = listener.events("python_repl.cell.stop")
    assert (stop.measurements["count"], stop.metadata) == (1, {"outcome": "ok"})


@pytest.mark.case(309)
def test_outcomes_are_told_apart(session: Agent, listener: Listener) -> None:
    """An exception, a timeout (with its cancel) and a crash each have their words; a cell stops once."""
    session.run("1 / 0")
    session.run("while True: pass", timeout_ms=1000)
    session.run("import os\nos._exit(9)")
    # the end of a kernel is reported when its death is confirmed
    wait_until(lambda: len(listener.events("python_repl.session.crash")) == 2, what="two reports of crashes")

    outcomes = [stop.metadata["outcome"] for stop in listener.events("python_repl.cell.stop")]
    assert outcomes == ["exception", "timeout", "kernel_died"]
    (cancel,) = listener.events("python_repl.cell.cancel")
    assert cancel.metadata == {"cause": "timeout"}
    assert cancel.measurements["duration_ms"] >= 900
    crashes = [crash.metadata["reason"] for crash in listener.events("python_repl.session.crash")]
    assert sorted(map(str, crashes)) == ["cancellation_escalation", "kernel_died"]
    assert listener.events("execute_code.stop") == []


@pytest.mark.case(310)
def test_a_fallback_is_told_with_its_reason(session: Agent, listener: Listener) -> None:
    """A call without a session scope runs isolated: one fallback event, then the per-call one."""
    session.session_id = " "

    session.run("x = 1")

    assert listener.names() == ["python_repl.fallback", "execute_code.stop"]
    (fallback,) = listener.events("python_repl.fallback")
    assert (fallback.measurements, fallback.metadata) == ({"count": 1}, {"reason": "missing_session_scope"})


@pytest.mark.case(310)
def test_a_bad_token_is_told_in_session_mode_only(agent: Agent, listener: Listener) -> None:
    """Each refused frame is one ``bridge.deny`` with reason authentication; per call there is none."""
    result = agent.run(
        "import lemon_tools\n"
        'lemon_tools._raw({"type": "call", "id": 5, "token": "no", "tool": "ls"})\n'
        'lemon_tools._raw(b"junk")\n'
        "ls()"
    )

    assert result.details["rpc_denied"] == 2
    denials = listener.events("python_repl.bridge.deny")
    assert [(denial.measurements, denial.metadata) for denial in denials] == (
        [({"count": 1}, {"reason": "authentication"})] * 2 if agent.mode == "session" else []
    )


@pytest.mark.case(307, 308, 309, 310)
def test_nothing_told_is_content(session: Agent, listener: Listener) -> None:
    """Every measurement is a natural number, every word is from a closed set, whatever the script does."""
    files(session.cwd, {"private.txt": "s3cret"})
    session.run('print(read("private.txt")); notify("s3cret"); text("s3cret")')
    session.run('raise ValueError("s3cret")')
    session.agent_id = ""
    session.run('print("s3cret")')

    told = telemetry.recent()
    assert told
    said = json.dumps([[one.name, dict(one.payload)] for one in told])
    for secret in ("s3cret", "private", str(session.cwd), "session-1", "agent-1", "ValueError"):
        assert secret not in said
    for name in set(listener.names()):
        for heard in listener.events(name):
            assert all(type(value) is int and value >= 0 for value in heard.measurements.values())


@pytest.mark.case(308, 309)
def test_each_event_is_observed_as_a_life_cycle(session: Agent, listener: Listener) -> None:
    """What listeners hear of kernels is also remembered, with the same numbers and no ids."""
    session.run("x = 1")

    seen = telemetry.recent()[-3:]  # only the newest are remembered
    assert {one.name for one in seen} == {"python_repl_lifecycle_observed"}
    assert [one.payload["event"] for one in seen] == ["session_started", "cell_started", "cell_stopped"]
    assert seen[2].payload["outcome"] == "ok"


SNAPSHOT_KEYS = {"capacity", "phases", "inflight_cells", "owners", "forked_owners", "reap"}


@pytest.mark.case(312)
def test_a_snapshot_counts_kernels_in_their_phases(session: Agent) -> None:
    """One kernel idles, one runs: exactly the keys of behaviour 9.3, right numbers, no ids."""
    assert session.registry is not None
    gate = Gate()
    session.run("x = 1")
    session.session_id = "another session"
    run = session.start('read("slow")', helpers={"read": gate})
    gate.wait_for("slow")

    snapshot = session.registry.snapshot()
    gate.release("slow")
    run.result()

    assert snapshot == {
        "capacity": {"live": 2, "max": 16, "available": 14},
        "phases": {
            "starting": 0,
            "idle": 1,
            "running": 1,
            "cancelling": 0,
            "stopping": 0,
            "unreachable": 0,
        },
        "inflight_cells": 1,
        "owners": 1,
        "forked_owners": 0,
        "reap": {"idle_timeout_ms": 1_800_000, "interval_ms": 60_000},
    }
    assert set(snapshot) == SNAPSHOT_KEYS
    later = session.registry.snapshot()
    assert (later["inflight_cells"], later["phases"]) == (
        0,
        {"starting": 0, "idle": 2, "running": 0, "cancelling": 0, "stopping": 0, "unreachable": 0},
    )


@pytest.mark.case(313)
def test_a_closed_registry_has_no_snapshot(session: Agent) -> None:
    """The error is ``registry_unavailable``."""
    assert session.registry is not None
    asyncio.run(session.registry.aclose())

    with pytest.raises(ExecuteCodeError) as raised:
        session.registry.snapshot()

    assert "registry_unavailable" in str(raised.value)


class Broken:
    """A memory that cannot be written."""

    def append(self, item: object) -> None:
        raise RuntimeError("out of order")

    def __iter__(self) -> Iterator[object]:
        return iter(())


@pytest.mark.case(314)
def test_a_recorder_that_fails_harms_no_run(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listener and memory both raise at every event; the run is as ever."""

    def raising(*event: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(telemetry, "_recent", Broken())
    unlisten = telemetry.listen(raising)
    try:
        result = agent.run('print("fine")')
    finally:
        unlisten()

    assert result.text == "fine\n"
    assert "reason" not in result.details


@pytest.mark.case(308)
def test_each_way_to_stop_a_kernel_has_its_word(session: Agent, listener: Listener) -> None:
    """Reset, eviction, idle reap, session reset and the registry's end; a reap is told before its stop."""
    times = [0.0]
    session.registry = KernelRegistry(clock=lambda: times[0])
    session.run("x = 1")
    session.run("x = 1", reset=True)
    session.session_id = "session-2"
    session.run("x = 1", config={"max_live_kernels": 1})
    times[0] += 1801
    asyncio.run(session.registry.reap())
    session.run("x = 1")
    asyncio.run(session.registry.detach(session.owner))
    session.owner = Owner()
    session.run("x = 1")
    asyncio.run(session.registry.aclose())
    wait_until(lambda: len(listener.events("python_repl.session.stop")) == 5, what="five reports")

    stops = listener.events("python_repl.session.stop")
    assert sorted(str(stop.metadata["reason"]) for stop in stops) == [
        "capacity_eviction",
        "owner_detached",
        "reset",
        "shutdown",
        "shutdown",
    ]
    assert all(
        set(stop.measurements) == {"count", "duration_ms", "live_kernels", "capacity"} for stop in stops
    )
    (reap,) = listener.events("python_repl.session.reap")
    assert reap.metadata == {"reason": "idle"}
    assert (reap.measurements["count"], reap.measurements["idle_ms"]) == (1, 1_801_000)
    names = listener.names()
    assert names.index("python_repl.session.reap") < len(names) - 1 - names[::-1].index(
        "python_repl.session.stop"
    )
    assert listener.events("python_repl.session.crash") == []


@pytest.mark.case(309, 310)
def test_a_failed_start_is_a_crash_without_a_life(session: Agent, listener: Listener) -> None:
    """The kernel that did not start lived 0 ms; the fallback and its per-call run follow."""

    async def start(**parts: object) -> Link:
        raise StartupError("no")

    session.registry = KernelRegistry(start=start)

    session.run("x = 1")

    assert listener.names() == ["python_repl.session.crash", "python_repl.fallback", "execute_code.stop"]
    (crash,) = listener.events("python_repl.session.crash")
    assert crash.metadata == {"reason": "startup_failure"}
    assert crash.measurements["duration_ms"] == 0


@pytest.mark.case(307, 309)
def test_the_death_of_a_caller_is_told(agent: Agent, listener: Listener) -> None:
    """A run whose result nobody waits for any more has ended all the same, and how is said in one word."""
    gate = Gate()
    tool = agent.tool(helpers={"read": gate})

    async def main() -> None:
        call = asyncio.create_task(tool.execute({"script": 'read("x")'}))
        while not gate.arrived:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())

    if agent.mode == "per_call":
        wait_until(lambda: bool(listener.events("execute_code.stop")), what="the report of the run")
        (stop,) = listener.events("execute_code.stop")
        assert stop.metadata == {"rpc_calls": 1, "rpc_denied": 0, "exit_code": None}
    else:
        wait_until(lambda: bool(listener.events("python_repl.session.crash")), what="the report of the end")
        (cancel,) = listener.events("python_repl.cell.cancel")
        (stop,) = listener.events("python_repl.cell.stop")
        (crash,) = listener.events("python_repl.session.crash")
        assert (cancel.metadata, stop.metadata, crash.metadata) == (
            {"cause": "caller_exit"},
            {"outcome": "interrupted"},
            {"reason": "cancellation_escalation"},
        )


def test_what_was_refused_before_anything_ran_is_no_event(agent: Agent, listener: Listener) -> None:
    """Disabled, no script, no interpreter, no folder: nothing ran, so nothing has stopped."""
    for params, config in [
        ({"script": "pass"}, {"enabled": False}),
        ({}, {}),
        ({"script": "pass"}, {"python_path": "/nowhere/python3"}),
    ]:
        with pytest.raises(ExecuteCodeError):
            asyncio.run(agent.tool(config=config).execute(params))

    assert listener.names() == []


@pytest.mark.case(130, 132)
def test_each_prompt_is_two_events(agent: Agent, listener: Listener) -> None:
    """One when somebody is asked and one when that has found its end, whichever end it is."""
    ends = [Person("approve_once"), Person("deny"), Person(expiry_ms=20)]

    for person in ends:
        agent.run(
            "try:\n    ls()\nexcept ToolError:\n    pass",
            policy=ToolPolicy(require_approval=["ls"]),
            approvals=person,
        )

    told = [name for name in listener.names() if name.startswith("lemon.approvals")]
    assert told == ["lemon.approvals.requested", "lemon.approvals.resolved"] * 3
