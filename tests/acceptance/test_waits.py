"""Every wait of the host has a bound (``docs/waits.md``): the page is complete, and who stalls a wait is cut.

The tests that stall one wait each stand here or where the thing they stall is tested; the page names them.
"""

from __future__ import annotations

import ast
import asyncio
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import pytest
from lemon_provisioner.environment import child_environment
from lemon_provisioner.process import ChildProcess, new_run_id

from lemon_kernel import (
    AbortSignal,
    ApprovalBroker,
    ExecuteCodeConfig,
    HelperContext,
    Owner,
    SessionScope,
    ToolPolicy,
    ToolUpdate,
    per_call,
    tools,
)
from lemon_kernel.approvals import ApprovalRequest

from .conftest import Agent, wait_until
from .doubles import Gate

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "waits.md"


# the page


def rows() -> list[list[str]]:
    """Return the cells of every row of the page's tables."""
    lines = PAGE.read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in cells if row[0] not in ("wait", "---")]


def waiting_functions() -> Iterator[str]:
    """Yield the name of every function of the host that waits, as the page would have it."""
    for package in (ROOT / "lemon_kernel", ROOT / "provisioner" / "lemon_provisioner"):
        for path in sorted(package.rglob("*.py")):
            yield from _waiting(ast.parse(path.read_text()), [])


def _waiting(node: ast.AST, names: list[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _waiting(child, [*names, child.name])
            continue
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Attribute)
            and _waits(child, child.func)
        ):
            yield ".".join(names)
        yield from _waiting(child, names)


def _waits(call: ast.Call, function: ast.Attribute) -> bool:
    owner, name = ast.unparse(function.value), function.attr
    if owner in ("asyncio", "time", "select"):
        return name in ("wait", "wait_for", "timeout", "timeout_at", "sleep", "wrap_future", "select")
    if name == "poll":
        return bool(call.args)
    return (name == "join" and "thread" in owner) or (name in ("result", "wait") and bool(call.args))


def test_every_row_has_a_bound_and_a_test() -> None:
    """Five cells, none of them empty, and the tests that are named exist."""
    assert len(rows()) > 30
    for row in rows():
        assert len(row) == 5, row
        assert all(row), row
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[4])
        assert named, row
        for path, name in named:
            source = ROOT / path
            assert source.exists(), row
            assert re.search(rf"^(async )?def {name}\(", source.read_text(), re.MULTILINE), row


def test_everything_that_waits_has_a_row() -> None:
    """A new wait in the code fails here until somebody has thought about who can stall it."""
    listed = {name for row in rows() for name in re.findall(r"`([\w.]+)`", row[1])}
    waiting = set(waiting_functions())

    assert len(waiting) > 25
    assert waiting - listed == set()


# stalls that are tested nowhere else


released = threading.Event()
"""What lets stubborn work end, once its test is over."""


async def stubborn() -> None:
    """Wait for ever, whoever cancels it."""
    while not released.is_set():
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            pass


def run_once(agent: Agent, timeout_s: float = 10, **options: object) -> tuple[object, float]:
    """Run a call in a loop whose stubborn leftovers nobody waits for; return what it gave and its seconds."""
    outcome: list[object] = []

    def turn() -> None:
        loop = asyncio.new_event_loop()
        params = options.pop("params", {"script": 'print("ran")'})
        abort, on_update = options.pop("abort", None), options.pop("on_update", None)
        tool = agent.tool(**options)  # type: ignore[arg-type]
        task = loop.create_task(tool.execute(params, abort=abort, on_update=on_update))  # type: ignore[arg-type]
        outcome.append(loop.run_until_complete(task))
        seconds.append(time.monotonic() - started)
        ended.set()
        released.wait()
        for left in asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait({left}))
        loop.close()

    seconds: list[float] = []
    ended = threading.Event()
    released.clear()
    started = time.monotonic()
    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    try:
        assert ended.wait(timeout_s), "the call is stalled"
    finally:
        released.set()
        thread.join(10)
    return outcome[0], seconds[0]


def test_a_configuration_that_never_comes_is_given_up_after_a_second(agent: Agent) -> None:
    """The call goes on, isolated, with the tool's own configuration."""

    async def config() -> ExecuteCodeConfig:
        await stubborn()
        raise AssertionError

    with Owner(config) as owner:
        result, seconds = run_once(agent, scope=SessionScope("session", "agent", owner))

    assert result.text == "ran\n"  # type: ignore[attr-defined]
    assert result.details["persistent"] is False  # type: ignore[attr-defined]
    assert 1 <= seconds < 3


def test_a_policy_that_never_answers_denies_at_the_calls_limit(agent: Agent) -> None:
    """Nothing fails open: what cannot be asked denies, once the configured limit is over."""

    async def policy() -> ToolPolicy:
        await stubborn()
        raise AssertionError

    result, seconds = run_once(agent, config={"timeout_ms": 300}, policy=policy)

    assert result.details == {"denied": True}  # type: ignore[attr-defined]
    assert "did not answer in time" in result.text  # type: ignore[attr-defined]
    assert seconds < 2


def test_an_abort_ends_the_wait_for_a_policy(agent: Agent) -> None:
    """Long before its limit."""

    async def policy() -> ToolPolicy:
        threading.Timer(0.1, abort.abort).start()
        await stubborn()
        raise AssertionError

    abort = AbortSignal()
    result, seconds = run_once(agent, abort=abort, policy=policy)

    assert (result.text, result.details) == ("Script cancelled.", {})  # type: ignore[attr-defined]
    assert seconds < 2


def test_a_callback_that_never_returns_is_left_behind(agent: Agent) -> None:
    """The result comes a second after the run's end, whatever the callback does with its cancellation."""

    async def on_update(update: ToolUpdate) -> None:
        await stubborn()

    agent.run("pass")
    result, seconds = run_once(agent, params={"script": 'notify("x"); print("ran")'}, on_update=on_update)

    assert result.text == "ran\n"  # type: ignore[attr-defined]
    assert 1 <= seconds < 3


def test_tools_of_a_policy_that_never_answers(folder: pathlib.Path) -> None:
    """There are none, after the configured limit; also where a loop runs in the calling thread."""

    async def policy() -> ToolPolicy:
        await asyncio.sleep(3600)
        raise AssertionError

    config = ExecuteCodeConfig(enabled=True, timeout_ms=200)

    async def main() -> list[object]:
        return list(tools(folder, config=config, policy=policy))

    started = time.monotonic()
    assert tools(folder, config=config, policy=policy) == []
    assert asyncio.run(main()) == []
    assert time.monotonic() - started < 3


def test_a_policy_function_never_runs_on_the_hosts_thread(folder: pathlib.Path) -> None:
    """It is the user's: one that blocks would block every kernel."""
    threads: list[str] = []

    def policy() -> ToolPolicy:
        threads.append(threading.current_thread().name)
        return ToolPolicy()

    async def main() -> None:
        tools(folder, config=ExecuteCodeConfig(), policy=policy)

    assert len(tools(folder, config=ExecuteCodeConfig(), policy=policy)) == 5
    asyncio.run(main())

    assert len(threads) == 2
    assert not any(name.startswith("lemon-host") for name in threads)


def test_a_blocked_caller_loop_does_not_move_the_deadline(agent: Agent) -> None:
    """A helper double that blocks its loop delays its own caller; the run ends when it should, and so do others."""
    agent.run("pass")
    started = threading.Event()

    async def blocking(params: Mapping[str, object], context: HelperContext) -> str:
        started.set()
        time.sleep(2.5)  # noqa: ASYNC251 - that is the stall
        return "late"

    blocked = agent.start('read("x")', helpers={"read": blocking}, timeout_ms=1000)
    assert started.wait(10)
    sibling = Agent(agent.cwd, "per_call")
    other = sibling.run("print(ls() and 1)")
    sibling.close()
    assert other.text == "1\n"
    assert other.details["duration_ms"] < 1500
    result = blocked.result()

    assert result.details["reason"] == "timeout"
    assert result.details["duration_ms"] < 2000


def test_a_helper_that_shrugs_off_its_cancellation_is_abandoned(agent: Agent) -> None:
    """The abort is answered all the same, and what the helper says later changes nothing."""
    agent.run("pass")
    gate = Gate()

    async def helper(params: Mapping[str, object], context: HelperContext) -> str:
        gate.arrived.append("x")
        for _ in range(100):
            try:
                await asyncio.sleep(0.03)
            except asyncio.CancelledError:
                pass
        return "late"

    run = agent.start('read("x")', helpers={"read": helper})
    gate.wait_for("x")
    aborted = time.monotonic()
    run.abort()
    wait_until(lambda: run.abort_signal.aborted)
    result = run.result()

    assert result.details["reason"] == "cancelled"
    assert (result.details["rpc_errors"], result.details["rpc_accounting_loss"]) == (1, True)
    assert result.details["duration_ms"] < 3000
    assert time.monotonic() - aborted < 5  # of which asyncio.run() waits for the helper


def test_a_request_function_that_never_returns_is_no_answer(agent: Agent) -> None:
    """The run times out, its prompt goes, and the decision that comes by another way still counts meanwhile."""
    agent.run("pass")
    asked: list[ApprovalRequest] = []

    async def on_request(request: ApprovalRequest) -> None:
        asked.append(request)
        await stubborn()

    broker = ApprovalBroker(on_request)
    result, seconds = run_once(
        agent,
        params={"script": 'ls()\nread("x")', "timeout_ms": 1000},
        policy=ToolPolicy(require_approval=["read"]),
        approvals=broker,
    )

    assert result.details["reason"] == "timeout"  # type: ignore[attr-defined]
    assert broker.pending() == []
    assert len(asked) == 1
    assert seconds < 4


def test_an_interpreter_that_never_answers_is_killed_at_the_deadline(
    agent: Agent, folder: pathlib.Path
) -> None:
    """It is asked who it is within the run's own time, and nothing of it stays."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho $$ > "{folder}/pid"\nexec sleep 300\n')
    python.chmod(0o700)

    result, seconds = run_once(
        agent, config={"python_path": str(python)}, params={"script": "pass", "timeout_ms": 1000}
    )

    assert result.details["reason"] == "timeout"  # type: ignore[attr-defined]
    assert seconds < 4
    pid = int((folder / "pid").read_text())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="the end of the program")


def test_a_script_that_does_not_die_is_left_behind_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL does not end uninterruptible sleep; the wait for the death ends all the same."""

    class Undying:
        def signal_group(self, signum: int) -> bool:
            return True

        async def wait(self) -> int:
            await asyncio.sleep(3600)
            return 0

    monkeypatch.setattr(per_call, "CONFIRM_S", 0.1)
    started = time.monotonic()

    asyncio.run(per_call._kill(Undying()))  # type: ignore[arg-type]

    assert 0.1 <= time.monotonic() - started < 1


def test_a_leader_that_does_not_die_blocks_for_a_tenth_of_a_second() -> None:
    """The wait that blocks is short: a leader that lives on is given up after 0.1 s."""
    run_id = new_run_id()
    child = ChildProcess.spawn(
        ["sleep", "60"], env=child_environment(run_id), cwd="/", run_id=run_id, output=subprocess.DEVNULL
    )
    try:
        started = time.monotonic()
        child._wait_blocking(0.1)
        seconds = time.monotonic() - started
    finally:
        child.finish()

    assert 0.1 <= seconds < 0.5


EXITING = """
import sys, threading, time
from lemon_kernel import ExecuteCode, ExecuteCodeConfig, Owner, SessionScope, hostloop
owner = Owner()
config = ExecuteCodeConfig(enabled=True, kernel_mode="session", python_path=sys.executable)
tool = ExecuteCode(sys.argv[1], config=config, scope=SessionScope("session", "agent", owner))
tool.run_sync({"script": "pass"})
def run(script):
    try:
        tool.run_sync({"script": script})
    except BaseException:
        pass
if sys.argv[2] == "deaf cell":
    script = "import signal, threading\\nfor number in signal.SIGINT, signal.SIGTERM:\\n    signal.signal(number, signal.SIG_IGN)\\n"
    threading.Thread(target=run, args=(script + "open('up', 'w').close()\\nwhile True: pass",), daemon=True).start()
    import os
    while not os.path.exists(sys.argv[1] + "/up"):
        time.sleep(0.01)
elif sys.argv[2] == "blocked loop":
    blocked = threading.Event()
    hostloop.loop().call_soon_threadsafe(lambda: (blocked.set(), time.sleep(60)))
    blocked.wait()
print(time.time(), flush=True)
"""


@pytest.mark.parametrize("stall", ["nothing", "deaf cell", "blocked loop"])
def test_nothing_holds_the_exit_for_more_than_three_seconds(folder: pathlib.Path, stall: str) -> None:
    """Neither a cell that ignores its signals nor a host loop that is stuck; and no kernel is left."""
    done = subprocess.run(
        [sys.executable, "-c", EXITING, str(folder), stall],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )

    seconds = time.time() - float(done.stdout)
    assert done.stderr == ""
    assert seconds < 3.5  # half a second for the interpreter's own end on a busy machine
