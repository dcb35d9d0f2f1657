"""The bridge as a hostile script sees it (behaviour 5), black-box in both modes; cases 149 to 174, 317, 320."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lemon_kernel import HelperContext, ToolResult
from lemon_kernel.bridge.dispatch import Dispatcher, Faults
from lemon_kernel.helpers import wrap_external

from .conftest import Agent, wait_until
from .doubles import Answered, Gate, answered, ask_all, asking, emptied, files, standing_agent


@pytest.fixture(scope="module", params=["per_call", "session"])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    yield from standing_agent(request.param, tmp_path_factory)


@pytest.fixture
def agent(standing: Agent) -> Agent:
    """An agent in each mode, with an empty folder; kernels are shared by the tests of this module."""
    return emptied(standing)


RAW = """
import lemon_tools
raw = lemon_tools._raw
def call(id, tool="ls", params=None, **changes):
    frame = {"type": "call", "id": id, "token": raw.token, "tool": tool, "params": params}
    frame.update(changes)
    return raw({key: value for key, value in frame.items() if value is not ...})
def told(answer):
    return answer["content"] if answer else None
"""
"""What scripts need to send frames past the helpers; ``...`` leaves a field out."""


def counts(result: ToolResult) -> tuple[object, object, object]:
    """Return calls, denied, errors."""
    return tuple(result.details[f"rpc_{name}"] for name in ("calls", "denied", "errors"))  # type: ignore[return-value]


class Sized:
    """``read`` returns as many letters as its path says, and counts its runs."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    async def __call__(self, params: Mapping[str, object], context: HelperContext) -> str:
        size = int(str(params["path"]))
        self.runs.append(size)
        return "x" * size


# budgets


@pytest.mark.case(149)
def test_the_call_cap_is_exact(agent: Agent) -> None:
    """Two calls of four are made, two are refused with the number; a refusal is an error, not a call."""
    result = agent.run(asking(*["ls()"] * 4), config={"max_rpc_calls": 2})

    refusal = Answered(None, "rpc call limit exceeded (max 2 calls per script)", "ls")
    assert [answer.error for answer in answered(result)[:2]] == [None, None]
    assert answered(result)[2:] == [refusal, refusal]
    assert counts(result) == (2, 0, 2)


@pytest.mark.case(151)
def test_the_byte_budget_is_shared_by_all_calls_of_a_run(agent: Agent) -> None:
    """Exact fit is allowed; a later smaller result may still fit; the tools have run all the same."""
    read = Sized()

    result = agent.run(
        asking(*[f'len(read("{size}"))' for size in (60, 60, 40, 1)]),
        config={"max_rpc_result_bytes": 100},
        helpers={"read": read},
    )

    refused = "rpc result byte budget exceeded (result {} bytes, {} bytes remaining of 100)"
    assert answered(result) == [
        Answered(60),
        Answered(None, refused.format(60, 40), "read"),
        Answered(40),
        Answered(None, refused.format(1, 0), "read"),
    ]
    assert (result.details["rpc_bytes"], result.details["rpc_errors"]) == (100, 2)
    assert read.runs == [60, 60, 40, 1]


@pytest.mark.case(152)
def test_a_refused_result_is_not_charged(agent: Agent) -> None:
    """After a result that was too large the whole budget is still there."""
    result = agent.run(
        asking('len(read("150"))', 'len(read("5"))'),
        config={"max_rpc_result_bytes": 100},
        helpers={"read": Sized()},
    )

    assert answered(result) == [
        Answered(
            None, "rpc result byte budget exceeded (result 150 bytes, 100 bytes remaining of 100)", "read"
        ),
        Answered(5),
    ]
    assert result.details["rpc_bytes"] == 5
    assert result.details["rpc_tools"] == ["read"]


# what a raw frame can do


@pytest.mark.case(154)
def test_no_frame_reaches_a_tool_outside_the_allowlist(agent: Agent) -> None:
    """The host refuses what has no helper function, each refusal spending a slot."""
    names = ["bash", "write", "edit", "execute_code"]

    result = agent.run(
        asking(*[f"told(call({n + 50}, {name!r}))" for n, name in enumerate(names)], before=RAW)
    )

    assert answered(result) == [
        Answered(f"tool '{name}' is not available inside execute_code scripts") for name in names
    ]
    assert counts(result) == (4, 0, 4)
    assert result.details["rpc_tools"] == []


@pytest.mark.case(155)
def test_narrowing_the_helpers_takes_the_capability_away(agent: Agent) -> None:
    """A helper that is not enabled cannot be reached past the missing function either."""
    result = agent.run(
        asking('told(call(50, "grep", {"pattern": "x"}))', before=RAW), config={"tools": ["read"]}
    )

    assert answered(result) == [Answered("tool 'grep' is not available inside execute_code scripts")]


@pytest.mark.case(156)
def test_every_bad_token_gets_the_same_refusal(agent: Agent) -> None:
    """Missing, wrong, stale or no string: one text, no slot, no bytes, and the id can be used again."""
    files(agent.cwd, {"f": "x"})
    stale = agent.run("import lemon_tools; print(lemon_tools._raw.token)").text.strip()
    assert len(stale) == 43
    tokens = ["...", "'x' * 43", repr(stale), "None", "42", "{}"]

    result = agent.run(
        asking(
            *[f"told(call(50, 'read', {{'path': 'f'}}, token={token}))" for token in tokens],
            "told(call(50, 'read', {'path': 'f'}))",
            before=RAW,
        )
    )

    assert answered(result) == [Answered("rpc authentication failed")] * 6 + [Answered("1: x")]
    assert counts(result) == (1, 6, 0)
    assert result.details["rpc_bytes"] == len("1: x")


@pytest.mark.case(156)
def test_a_bad_token_is_no_oracle_for_exhausted_budgets(agent: Agent) -> None:
    """With no call left, a bad token still reads the same."""
    result = agent.run(
        asking("told(call(50)) and 1", "told(call(51, token='no'))", before=RAW), config={"max_rpc_calls": 1}
    )

    assert answered(result) == [Answered(1), Answered("rpc authentication failed")]
    assert counts(result) == (1, 1, 0)


@pytest.mark.case(159)
def test_a_replayed_id_is_refused_and_the_tool_runs_once(agent: Agent) -> None:
    """An answered id is remembered; its replay costs no slot."""
    read = Sized()

    result = agent.run(
        asking(*["told(call(7, 'read', {'path': '3'}))"] * 2, before=RAW), helpers={"read": read}
    )

    assert answered(result) == [Answered("xxx"), Answered("rpc request already processed")]
    assert read.runs == [3]
    assert counts(result) == (1, 0, 1)


@pytest.mark.case(159)
def test_the_id_of_a_call_in_flight_is_refused_too(agent: Agent) -> None:
    """A replay is refused while the first call still runs, and does not disturb it."""
    gate = Gate()
    run = agent.start(
        RAW
        + """
import json
frame = {"type": "call", "id": 7, "token": raw.token, "tool": "read", "params": {"path": "slow"}}
send = raw.__globals__["_grant"].carrier.send  # neither waits for an answer
send(json.dumps(frame).encode())
send(json.dumps(frame).encode())
read("end")
""",
        helpers={"read": gate},
    )
    gate.wait_for("slow", "end")
    gate.release("slow")
    gate.wait_for_end("slow")
    gate.release("end")

    result = run.result()

    assert gate.ended == ["slow", "end"]
    assert counts(result) == (2, 0, 1)
    assert "rpc_accounting_loss" not in result.details


@pytest.mark.case(160)
def test_frames_that_are_no_requests_are_dropped_and_counted(agent: Agent) -> None:
    """Not JSON, an array, a string, nothing: denied, no slot, no answer, and the next call works."""
    files(agent.cwd, {"f": "x"})
    bodies = [b"{not json", b"[1, 2]", b'"call"', b""]

    result = agent.run(asking(*[f"raw({body!r})" for body in bodies], 'read("f")', before=RAW))

    assert answered(result) == [Answered(None)] * 4 + [Answered("1: x")]
    assert counts(result) == (1, 4, 0)


@pytest.mark.case(161)
def test_a_call_of_the_wrong_shape_spends_its_slot(agent: Agent) -> None:
    """Tool or params of the wrong type: refused as invalid, four slots and four errors."""
    changes = ["tool=42", "tool=...", "params=[1]", "params='x'"]

    result = agent.run(
        asking(*[f"told(call({n + 50}, **dict({change})))" for n, change in enumerate(changes)], before=RAW)
    )

    assert answered(result) == [Answered("invalid rpc request")] * 4
    assert counts(result) == (4, 0, 4)
    assert result.details["rpc_tools"] == []


@pytest.mark.case(162)
def test_null_params_mean_defaults(agent: Agent) -> None:
    """``params`` null and absent both list the working folder."""
    files(agent.cwd, {"a": ""})

    result = agent.run(asking("told(call(50))", "told(call(51, params=...))", before=RAW))

    assert answered(result) == [Answered(f"Directory: {agent.cwd}\n- a\n1 entries")] * 2


def _memory_kib(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise AssertionError(field)


@pytest.mark.case(173)
def test_a_frame_of_64_mib_is_never_dispatched_and_not_kept(agent: Agent) -> None:
    """The host refuses it, its memory grows by no more than behaviour 5.8 allows, and the run ends well."""
    read = Sized()
    script = (
        RAW
        + """
head = ('{"type":"call","id":50,"token":"' + raw.token + '","tool":"read","params":{"path":"').encode()
print(told(raw(head + b"9" * (64 << 20) + b'"}}', timeout_s=30)))
print(read("3"))
"""
    )
    agent.run('print("warm")')
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before_kib = _memory_kib("VmRSS")

    result = agent.run(script, helpers={"read": read}, timeout_ms=60_000)

    peak_kib, after_kib = _memory_kib("VmHWM") - before_kib, _memory_kib("VmRSS") - before_kib
    assert result.text == "invalid rpc request\nxxx\n"
    assert read.runs == [3]
    assert counts(result) == (1, 0, 1)
    allowed_kib = (10 if agent.mode == "per_call" else 64 + 10) << 10
    assert peak_kib < allowed_kib, (peak_kib >> 10, after_kib >> 10)
    assert after_kib < 10 << 10, (peak_kib >> 10, after_kib >> 10)


# the end of a run


@pytest.mark.case(165, 167)
def test_an_abort_interrupts_the_call_in_flight(agent: Agent) -> None:
    """The tool sees the signal and is cancelled; the call is counted, as lost, and the result is untrusted."""
    gate = Gate()
    run = agent.start('print("before", flush=True)\nread("slow")', helpers={"read": gate})
    gate.wait_for("slow")

    started = time.monotonic()
    run.abort()
    result = run.result()

    assert time.monotonic() - started < 4
    assert result.details["reason"] == "cancelled"
    assert counts(result) == (1, 0, 1)
    assert (result.details["rpc_accounting_loss"], result.trust) == (True, "untrusted")
    assert result.text == wrap_external("Script cancelled.\n\nbefore\n")
    assert gate.signals[0].abort.aborted
    assert (gate.cancelled, gate.ended) == (["slow"], [])


@pytest.mark.case(167)
def test_the_abort_signal_reaches_the_tool(agent: Agent) -> None:
    """A tool that only looks at its signal sees it set while it runs."""
    seen: list[str] = []

    async def read(params: Mapping[str, object], context: HelperContext) -> str:
        context.abort.on_abort(lambda: seen.append(context.call_id))
        return await gate(params, context)

    gate = Gate()
    run = agent.start('read("slow")', helpers={"read": read})
    gate.wait_for("slow")
    assert seen == []

    run.abort()
    run.result()

    wait_until(lambda: seen == ["exec_code_rpc_1"], what="the signal")


@pytest.mark.case(169)
def test_what_was_done_before_an_abort_stays_accounted(agent: Agent) -> None:
    """A call that had been answered is no loss: the figures are exact and the result is trusted."""
    files(agent.cwd, {"f": "x"})
    run = agent.start(
        'read("f"); open("ready", "w").close()\nimport time\ntime.sleep(30)',
    )
    wait_until((agent.cwd / "ready").exists, what="the read")

    run.abort()
    result = run.result()

    assert result.details["reason"] == "cancelled"
    assert counts(result) == (1, 0, 0)
    assert (result.details["rpc_tools"], result.details["rpc_bytes"]) == (["read"], len("1: x"))
    assert "rpc_accounting_loss" not in result.details
    assert (result.trust, result.text) == ("trusted", "Script cancelled.")


@pytest.mark.case(170)
def test_an_aborted_run_that_fetched_is_untrusted(agent: Agent) -> None:
    """What came from the web before the abort may be in the output."""

    async def webfetch(params: Mapping[str, object], context: HelperContext) -> str:
        return "from outside"

    run = agent.start(
        'print(webfetch("http://example.org/"), flush=True)\nopen("ready", "w").close()\n'
        "import time\ntime.sleep(30)",
        helpers={"webfetch": webfetch},
    )
    wait_until((agent.cwd / "ready").exists, what="the fetch")

    run.abort()
    result = run.result()

    assert result.details["rpc_tools"] == ["webfetch"]
    assert (result.trust, result.text) == (
        "untrusted",
        wrap_external("Script cancelled.\n\nfrom outside\n"),
    )


class FaultAfterAnswer(Faults):
    """Breaks the bridge once, after the answer to the first call has gone out."""

    def __init__(self) -> None:
        self.armed = True

    def after_answer(self, call_id: int) -> None:
        if self.armed:
            self.armed = False
            raise RuntimeError("a fault of ours")


@pytest.mark.case(172)
def test_a_fault_of_the_bridge_costs_no_call_and_no_service(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier call stays counted with bytes and tool, the next works, the loss is declared."""
    files(agent.cwd, {"f": "x", "g": "yy"})
    faults = FaultAfterAnswer()
    monkeypatch.setattr("lemon_kernel.run.Dispatcher", functools.partial(Dispatcher, faults=faults))

    result = agent.run('print(read("f"))\nprint(read("g"))', config={"max_rpc_calls": 2})

    assert not faults.armed
    assert result.text == wrap_external("1: x\n1: yy\n")
    assert result.trust == "untrusted"
    assert counts(result) == (2, 0, 0)
    assert result.details["rpc_bytes"] == len("1: x1: yy")
    assert result.details["rpc_tools"] == ["read"]
    assert result.details["rpc_accounting_loss"] is True


@pytest.mark.case(317)
def test_a_request_after_the_cell_has_ended_runs_nothing(session: Agent) -> None:
    """A thread that outlives its cell sends a call with the cell's own token: dropped, uncounted, unanswered."""
    read = Sized()
    script = (
        RAW
        + """
import threading, time, pathlib
def posthumous(carrier=raw.__globals__["_grant"].carrier, token=raw.token):
    frame = '{"type":"call","id":50,"token":"%s","tool":"read","params":{"path":"3"}}' % token
    time.sleep(0.05)
    try:
        answer = carrier.exchange(50, frame.encode(), 0.2)
    except Exception as error:
        answer = error
    pathlib.Path("sent").write_text(repr(answer))
threading.Thread(target=posthumous).start()
"""
    )

    first = session.run(script, helpers={"read": read})
    wait_until(lambda: (session.cwd / "sent").exists(), what="the posthumous request")
    second = session.run('print(read("5"))', helpers={"read": read})

    assert (session.cwd / "sent").read_text() == "None"
    assert read.runs == [5]
    assert counts(first) == (0, 0, 0)
    assert counts(second) == (1, 0, 0)
    assert second.text == "xxxxx\n"
    assert second.details["kernel_reused"] is True


@pytest.mark.case(317)
def test_a_request_of_a_child_after_the_script_has_ended_runs_nothing(per_call: Agent) -> None:
    """A forked child that writes to the inherited socket once its parent is dead is not served."""
    read = Sized()
    script = (
        RAW
        + """
import os, time, signal
carrier = raw.__globals__["_grant"].carrier
frame = ('{"type":"call","id":50,"token":"%s","tool":"read","params":{"path":"3"}}' % raw.token).encode()
parent = os.getpid()
if os.fork() == 0:
    os.setsid()
    while os.getppid() == parent:
        pass
    os.write(carrier._descriptor, len(frame).to_bytes(4, "big") + frame)
    os._exit(0)
print("parent ends", flush=True)
os._exit(0)
"""
    )

    result = per_call.run(script, helpers={"read": read})

    assert result.text == "parent ends\n"
    assert read.runs == []
    assert counts(result) == (0, 0, 0)
    assert "rpc_accounting_loss" not in result.details


# many at once


@pytest.mark.case(174)
def test_results_of_a_batch_stand_in_the_order_of_its_calls(agent: Agent) -> None:
    """Three calls end in reverse order; each value is at its own position."""
    gate = Gate()
    run = agent.start(asking('batch([("read", {"path": p}) for p in "abc"])'), helpers={"read": gate})
    gate.wait_for("a", "b", "c")
    for name in "cba":
        gate.release(name, f"value {name}")
        gate.wait_for_end(name)

    assert answered(run.result()) == [Answered(["value a", "value b", "value c"])]


@pytest.mark.case(320)
def test_a_batch_raises_its_first_failure_after_all_its_calls_have_ended(agent: Agent) -> None:
    """First in order of the calls, not of time; no call is cut short by another's failure."""
    gate = Gate()
    run = agent.start(asking('batch([("read", {"path": p}) for p in "1234"])'), helpers={"read": gate})
    gate.wait_for("1", "2", "3", "4")
    outcomes: list[tuple[str, Any]] = [
        ("3", ValueError("failure 3")),
        ("4", "ok"),
        ("2", ValueError("failure 2")),
        ("1", "ok"),
    ]
    for name, outcome in outcomes:
        assert not run.done
        gate.release(name, outcome)
        gate.wait_for_end(name)

    result = run.result()

    assert answered(result) == [Answered(None, "failure 2", "read")]
    assert counts(result) == (4, 0, 2)


@pytest.mark.case(151, 204)
def test_an_error_text_costs_no_bytes(agent: Agent) -> None:
    """A tool that fails with a long text leaves the byte budget alone."""

    async def ls(params: Mapping[str, object], context: HelperContext) -> str:
        raise ValueError("e" * 1000)

    answers = ask_all(
        agent,
        "ls()",
        'len(read("100"))',
        config={"max_rpc_result_bytes": 100},
        helpers={"ls": ls, "read": Sized()},
    )

    assert answers == [Answered(None, "e" * 1000, "ls"), Answered(100)]
