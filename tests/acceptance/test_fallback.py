"""When a session call runs isolated instead, and when it must not (cases section 10, F, and its rows of 14)."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from lemon_kernel import KernelRegistry, Owner, SessionScope

from .conftest import Agent, Pending, private_roots, process_is_gone, wait_until
from .gates import Gate
from .kernels import (
    FRESH,
    IS_X_THERE,
    ISOLATED,
    LOST,
    SUCCESS,
    environment,
    executable,
    flags,
    live,
    notice,
    occupied,
    phases,
    pid_of,
    queued,
    registry_of,
    running,
    twin,
)

pytestmark = pytest.mark.timeout(60)

ONCE = "open('log', 'a').write('ran\\n')\nprint('ran')"
"""A script that leaves a line for each time it runs."""


def times_run(agent: Agent) -> int:
    log = agent.cwd / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


class Stopper:
    """Ends kernels as the registry would, unless told to fail."""

    def __init__(self) -> None:
        self.confirms = True
        self.raises: Exception | None = None

    async def __call__(self, end: Callable[[], Awaitable[bool]]) -> bool:
        if self.raises is not None:
            raise self.raises
        return self.confirms and await end()


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Pending, float]]:
    """A run whose interpreter never answers, begun before the other tests: it takes its 15 s meanwhile."""
    agent = Agent(tmp_path_factory.mktemp("hanging"), "session")
    python = executable(agent.cwd / "python", "sleep 300 &\necho $(date +%s.%N) $$ $! >> starts\nwait")
    began = time.time()
    run = agent.start(ONCE, config={"python_path": python, "timeout_ms": 15_000})
    yield agent, run, began
    agent.close()


@pytest.fixture(autouse=True)
def _begin_early(hanging: object) -> None:
    """Begin it with the first test of the file."""


def scopes(owner: Owner) -> dict[str, SessionScope | None]:
    absent: Any = None
    return {
        "no scope": None,
        "no session id": SessionScope(absent, "agent-1", owner),
        "no agent id": SessionScope("session-1", absent, owner),
        "no owner": SessionScope("session-1", "agent-1", None),
        "empty session id": SessionScope("", "agent-1", owner),
        "blank session id": SessionScope(" \t", "agent-1", owner),
        "blank agent id": SessionScope("session-1", "\n", owner),
    }


@pytest.mark.case(257)
@pytest.mark.reason("missing_session_scope")
@pytest.mark.parametrize("missing", list(scopes(Owner())))
def test_a_missing_scope(session: Agent, missing: str) -> None:
    """Without a stable identity the run is isolated, and the first line of its result says so."""
    result = session.run("print('runs')", scope=scopes(session.owner)[missing])

    assert result.text == notice("missing_session_scope") + "runs\n"
    assert flags(result) == {**ISOLATED, "fallback_reason": "missing_session_scope"}
    assert result.details["exit_code"] == 0
    assert live(session) == 0


@pytest.mark.case(257)
def test_a_fallback_keeps_the_shape_of_a_per_call_result(session: Agent) -> None:
    """After the notice comes the per-call result byte for byte, here with blocks and an exit code."""
    result = session.run("text('block')\nprint('out')\nraise SystemExit(3)", scope=None)

    assert result.text == notice("missing_session_scope") + (
        "Script exited with code 3\n\n"
        "Script result (text()):\nblock\n\n"
        "Diagnostics (stdout/stderr, not the result):\nout\n"
    )
    assert flags(result) == {**ISOLATED, "fallback_reason": "missing_session_scope", "reason": "exit"}
    assert result.details["exit_code"] == 3


@pytest.mark.case(258)
@pytest.mark.reason("registry_unavailable")
@pytest.mark.parametrize("reset", [False, True])
def test_a_closed_registry(session: Agent, reset: bool) -> None:
    """A registry that is closed means an isolated run, with or without a reset; nothing was reset."""
    session.run("x = 1")
    asyncio.run(registry_of(session).aclose())
    result = session.run(IS_X_THERE, reset=reset)

    assert result.text == notice("registry_unavailable") + "False\n"
    assert flags(result) == {**ISOLATED, "fallback_reason": "registry_unavailable"}


@pytest.mark.case(259, 261)
@pytest.mark.reason("capacity_exhausted")
def test_busy_kernels_are_never_evicted(session: Agent) -> None:
    """With the cap reached by a kernel that works, with a queue behind, a new key runs isolated beside it."""
    gate = Gate()
    active = occupied(session, gate)
    waiting = queued(session, "print('queued')")
    other = twin(session)
    other.session_id = "session-2"
    result = other.run(ONCE, config={"max_live_kernels": 1})
    assert result.text == notice("capacity_exhausted") + "ran\n"
    assert flags(result) == {**ISOLATED, "fallback_reason": "capacity_exhausted"}
    assert times_run(session) == 1

    gate.call("busy").release()
    assert (active.result().text, flags(active.result())) == ("done\n", FRESH)
    assert (waiting.result().text, flags(waiting.result())) == ("queued\n", SUCCESS)
    other.owner.close()


@pytest.mark.case(260)
def test_the_least_recently_used_idle_kernel_is_evicted(session: Agent) -> None:
    """At the cap a new key takes the place of the kernel that has been idle longest."""
    pids = {}
    for name in ("A", "B"):
        session.session_id = name
        session.run(f"x = {name!r}")
        pids[name] = pid_of(session)
    session.session_id = "C"
    result = session.run(IS_X_THERE, config={"max_live_kernels": 2})

    assert (result.text, flags(result)) == ("False\n", FRESH)
    wait_until(lambda: process_is_gone(pids["A"]), what="the death of A")
    assert not process_is_gone(pids["B"])
    assert live(session) == 2
    session.session_id = "B"
    kept = session.run("print(x)", config={"max_live_kernels": 2})
    assert (kept.text, flags(kept)) == ("B\n", SUCCESS)


@pytest.mark.case(262)
@pytest.mark.reason("capacity_exhausted")
def test_a_lowered_cap_evicts_nothing(session: Agent) -> None:
    """Above the caller's cap a new key runs isolated; it gets its kernel once there are fewer."""
    for name in ("A", "B", "C"):
        session.session_id = name
        session.run("x = 1")
    session.session_id = "D"
    lowered = session.run("print('runs')", config={"max_live_kernels": 1})
    assert lowered.text == notice("capacity_exhausted") + "runs\n"
    assert flags(lowered) == {**ISOLATED, "fallback_reason": "capacity_exhausted"}
    assert (live(session), phases(session)) == (3, {"idle": 3})

    assert asyncio.run(registry_of(session).detach(session.owner))
    assert flags(session.run("pass", config={"max_live_kernels": 1})) == FRESH


@pytest.mark.case(263)
@pytest.mark.reason("startup_failed")
def test_an_interpreter_that_exits_at_once(session: Agent) -> None:
    """No kernel starts; the isolated run is tried with the same interpreter and says how it ended."""
    python = executable(session.cwd / "python", "echo start >> starts\nexit 3")
    result = session.run(ONCE, config={"python_path": python})

    assert result.text == notice("startup_failed") + "Script exited with code 3"
    assert flags(result) == {**ISOLATED, "fallback_reason": "startup_failed", "reason": "exit"}
    assert (session.cwd / "starts").read_text() == "start\n" * 2
    assert live(session) == 0


@pytest.mark.case(263)
@pytest.mark.reason("startup_failed")
def test_an_interpreter_without_ipykernel(session: Agent, tmp_path: pathlib.Path) -> None:
    """It can start no kernel, but run the script isolated; so do the calls that queued for the start."""
    python = environment(tmp_path / "bare", with_ipykernel=False)
    runs = [session.start(ONCE, config={"python_path": python}) for _ in range(3)]

    for run in runs:
        assert run.result().text == notice("startup_failed") + "ran\n"
        assert flags(run.result()) == {**ISOLATED, "fallback_reason": "startup_failed"}
    assert times_run(session) == 3
    assert (live(session), phases(session)) == (0, {})


@pytest.fixture
def stopper(session: Agent) -> Iterator[Stopper]:
    """The session's registry ends kernels by way of this, and ends all of them at the end."""
    asyncio.run(registry_of(session).aclose())
    stopper = Stopper()
    session.registry = KernelRegistry(stopper=stopper)
    yield stopper
    stopper.confirms, stopper.raises = True, None


@pytest.mark.case(265)
@pytest.mark.reason("stop_failed")
def test_a_reset_that_cannot_confirm_the_stop(session: Agent, stopper: Stopper) -> None:
    """The script runs isolated, once; the old kernel is quarantined until its stop succeeds."""
    pid = pid_of(session)
    stopper.confirms = False
    result = session.run(ONCE, reset=True)

    assert result.text == notice("stop_failed") + "ran\n"
    assert flags(result) == {**ISOLATED, "fallback_reason": "stop_failed"}
    assert times_run(session) == 1
    assert (live(session), phases(session)) == (0, {"unreachable": 1})
    assert not process_is_gone(pid)

    stopper.confirms = True
    asyncio.run(registry_of(session).reap())
    assert phases(session) == {}
    assert process_is_gone(pid)


@pytest.mark.case(266)
@pytest.mark.reason("reset_failed")
def test_a_reset_that_fails_otherwise(session: Agent, stopper: Stopper) -> None:
    """A fault in the reset is an error result, and the script runs neither on a kernel nor isolated."""
    session.run("x = 1")
    stopper.raises = OSError("secret")
    result = session.run(ONCE, reset=True)

    assert result.text == "execute_code session failed: reset_failed"
    assert flags(result) == {**ISOLATED, "reason": "reset_failed"}
    assert times_run(session) == 0


@pytest.mark.case(267)
@pytest.mark.reason("capacity_exhausted")
def test_a_fallback_keeps_what_the_reset_did(session: Agent) -> None:
    """The old kernel was discarded, then there was no room for the new one: both are told."""
    session.run("x = 1")
    other = twin(session)
    other.session_id = "session-2"
    busy = running(other)
    result = session.run(IS_X_THERE, reset=True, config={"max_live_kernels": 1})

    assert result.text == notice("capacity_exhausted") + "False\n"
    assert flags(result) == {
        **ISOLATED,
        "reset_performed": True,
        "fallback_reason": "capacity_exhausted",
    }
    assert not busy.done
    busy.abort()
    assert busy.result().details["reason"] == "cancelled"
    other.owner.close()


@pytest.mark.case(268)
@pytest.mark.reason("kernel_died")
def test_no_fallback_after_the_start(session: Agent) -> None:
    """Code that was handed to a kernel is run nowhere else, however the kernel ended; nor is what queued."""
    active = running(session, f"{ONCE}\nread('busy')", helpers={"read": (gate := Gate())})
    gate.wait_for(1)
    waiting = queued(session, ONCE)
    gate.held[0].release()
    assert "fallback_reason" not in active.result().details
    assert (waiting.result().text, times_run(session)) == ("ran\n", 2)

    crash = session.run(f"{ONCE}\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert crash.text == "execute_code session failed: kernel_died\n\nran\n"
    assert flags(crash) == {**LOST, "kernel_reused": True, "reason": "kernel_died"}
    assert times_run(session) == 3


@pytest.mark.case(269)
@pytest.mark.reason("invalid_session_key")
def test_a_removed_cwd(session: Agent) -> None:
    """There is no key for a folder that does not exist: an error result, no fallback, nothing has run."""
    session.cwd.rmdir()
    result = session.run(ONCE)

    assert result.text == "execute_code session failed: invalid_session_key"
    assert flags(result) == {**ISOLATED, "reason": "invalid_session_key"}
    assert times_run(session) == 0


class _Window(KernelRegistry):
    """Lets a test do something between a call's acquire and its submission."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def acquire(self, *args: Any, **options: Any) -> Any:
        lease = await super().acquire(*args, **options)
        if self.meanwhile is not None:
            await self.meanwhile()
        return lease


@pytest.mark.case(329)
@pytest.mark.reason("kernel_unavailable")
def test_a_kernel_that_dies_between_acquire_and_submission(session: Agent) -> None:
    """The call gets an error result: it was not executed, there or isolated, and the next one starts fresh."""
    asyncio.run(registry_of(session).aclose())
    session.registry = registry = _Window()
    pid = pid_of(session)

    async def die() -> None:
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while registry.snapshot()["phases"]["idle"]:  # type: ignore[index]
                await asyncio.sleep(0.005)

    registry.meanwhile = die
    result = session.run(ONCE)
    registry.meanwhile = None

    assert result.text == "execute_code session failed: kernel_unavailable"
    assert flags(result) == {**LOST, "reason": "kernel_unavailable"}
    assert flags(session.run("pass")) == FRESH
    assert times_run(session) == 0


@pytest.mark.case(330)
@pytest.mark.reason("startup_failed")
def test_a_start_that_hangs(hanging: tuple[Agent, Pending, float]) -> None:
    """The start is given up after 10 s, the isolated run has the rest of the time, and nothing is left."""
    agent, run, began = hanging
    result = run.result(30)

    assert result.text == notice("startup_failed") + "Script timed out after 15000ms."
    assert flags(result) == {**ISOLATED, "fallback_reason": "startup_failed", "reason": "timeout"}
    duration_ms = result.details["duration_ms"]
    assert isinstance(duration_ms, int)
    assert 14_900 < duration_ms < 17_000
    starts = [line.split() for line in (agent.cwd / "starts").read_text().splitlines()]
    assert len(starts) == 2
    assert 9.9 < float(starts[1][0]) - began < 11.5
    pids = [int(pid) for start in starts for pid in start[1:]]
    wait_until(lambda: all(map(process_is_gone, pids)), what="the death of both shells and their children")
    assert (live(agent), phases(agent)) == (0, {})
    assert [path for root in private_roots() for path in root.glob("lemon-kernel-*")] == []
