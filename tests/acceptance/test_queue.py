"""The queue of one kernel, and when idle kernels go (cases section 10, Q and reaping, and 331)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from lemon_kernel import KernelRegistry

from .conftest import Agent, process_is_gone, wait_until
from .gates import Gate
from .kernels import (
    FRESH,
    IS_X_THERE,
    LOST,
    SUCCESS,
    flags,
    inflight,
    live,
    occupied,
    phases,
    pid_of,
    queued,
    registry_of,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def standing_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(tmp_path_factory.mktemp("standing"), "session")
    yield agent
    agent.close()


@pytest.fixture
def standing(standing_agent: Agent) -> Agent:
    """An agent whose kernel has run before and lives on; `ran` in its namespace lists what ran in a test."""
    standing_agent.run("ran = []")
    return standing_agent


def what_ran(agent: Agent) -> str:
    result = agent.run("print(*ran)")
    assert flags(result) == SUCCESS
    return result.text.strip()


@pytest.mark.case(270)
def test_cells_run_in_the_order_of_submission(standing: Agent) -> None:
    """Three calls behind an active one run one at a time, first come first served."""
    gate = Gate()
    active = occupied(standing, gate)
    waiting = [
        queued(standing, f"import time; ran.append('begin {n}'); time.sleep(0.05); ran.append('end {n}')")
        for n in range(3)
    ]
    assert phases(standing) == {"running": 1}
    assert inflight(standing) == 4
    gate.call("busy").release("")
    assert flags(active.result()) == SUCCESS
    for run in waiting:
        assert flags(run.result())["persistent"] is True, run.result().text

    assert what_ran(standing) == " ".join(f"begin {n} end {n}" for n in range(3))


@pytest.mark.case(271)
@pytest.mark.reason("queue_full")
def test_a_full_queue(standing: Agent) -> None:
    """Who finds no place is told at once; the state is there, nothing was run elsewhere, nobody is disturbed."""
    gate, config = Gate(), {"max_queued_cells_per_kernel": 1}
    active = occupied(standing, gate, config=config)
    waiting = queued(standing, "ran.append('second')", config=config)
    began = time.monotonic()
    third = standing.run("open('third', 'w'); ran.append('third')", config=config)

    assert time.monotonic() - began < 2
    assert third.text == "execute_code session failed: queue_full"
    assert flags(third) == {**SUCCESS, "reason": "queue_full"}
    assert not active.done
    gate.call("busy").release()
    assert flags(active.result()) == flags(waiting.result()) == SUCCESS
    assert what_ran(standing) == "second"
    assert not (standing.cwd / "third").exists()


@pytest.mark.case(273)
@pytest.mark.reason("cancelled")
def test_a_queued_call_is_aborted(standing: Agent) -> None:
    """It leaves at once and unrun, and the active cell goes on."""
    gate = Gate()
    active = occupied(standing, gate)
    waiting = queued(standing, "ran.append('second')")
    waiting.abort()
    result = waiting.result(2)

    assert result.text == "Script cancelled."
    assert flags(result) == {**LOST, "reason": "cancelled"}
    assert not active.done
    gate.call("busy").release()
    assert (active.result().text, flags(active.result())) == ("done\n", SUCCESS)
    assert what_ran(standing) == ""


@pytest.mark.case(274)
def test_a_queued_caller_dies(standing: Agent) -> None:
    """Cancelling its task takes its place from the queue, and the active cell goes on."""
    gate = Gate()
    active = occupied(standing, gate)

    async def main() -> None:
        call = asyncio.create_task(standing.tool().execute({"script": "ran.append('second')"}))
        async with asyncio.timeout(10):
            while inflight(standing) != 2:
                await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    wait_until(lambda: inflight(standing) == 1, what="the departure")
    assert not active.done
    gate.call("busy").release()
    assert (active.result().text, flags(active.result())) == ("done\n", SUCCESS)
    assert what_ran(standing) == ""


@pytest.mark.case(331)
@pytest.mark.reason("timeout")
def test_a_queued_calls_deadline(standing: Agent) -> None:
    """The time in the queue counts; it leaves unrun, and the active cell goes on."""
    gate = Gate()
    active = occupied(standing, gate)
    began = time.monotonic()
    result = standing.run("ran.append('second')", timeout_ms=1000)

    assert 1 <= time.monotonic() - began < 2.5
    assert result.text == "Script timed out after 1000ms."
    assert flags(result) == {**LOST, "reason": "timeout"}
    assert not active.done
    gate.call("busy").release()
    assert (active.result().text, flags(active.result())) == ("done\n", SUCCESS)
    assert what_ran(standing) == ""


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(session: Agent) -> Clock:
    """The clock by which the session's registry tells how long a kernel has been idle."""
    asyncio.run(registry_of(session).aclose())
    clock = Clock()
    session.registry = KernelRegistry(clock=clock)
    return clock


def reap(agent: Agent) -> None:
    asyncio.run(registry_of(agent).reap())


@pytest.mark.case(277)
def test_idle_kernels_are_reaped_and_running_ones_are_not(session: Agent, clock: Clock) -> None:
    """Past its idle time a kernel goes at the next tick, unless it has work; the next call starts fresh."""
    config = {"kernel_idle_timeout_ms": 2000}
    session.run("x = 1", config=config)
    pid = pid_of(session)
    gate = Gate()
    session.session_id = "session-2"
    active = occupied(session, gate, config=config)
    session.session_id = "session-1"
    session.run("pass", config=config)

    clock.now_s += 1.9
    reap(session)
    assert live(session) == 2
    clock.now_s += 0.2
    reap(session)
    assert phases(session) == {"running": 1}
    assert process_is_gone(pid)

    fresh = session.run(IS_X_THERE, config=config)
    assert (fresh.text, flags(fresh)) == ("False\n", FRESH)
    clock.now_s += 1.0
    gate.call("busy").release()
    assert (active.result().text, flags(active.result())) == ("done\n", FRESH)
    clock.now_s += 1.5
    reap(session)
    assert phases(session) == {"idle": 1}, "the one that was released later"


@pytest.mark.case(278)
def test_the_latest_setting_of_each_kernel_counts(session: Agent, clock: Clock) -> None:
    """Of two kernels only the one whose latest call asked for the shorter time is reaped."""
    for name, times_ms in {"short": (60_000, 1000), "long": (1000, 60_000)}.items():
        session.session_id = name
        for time_ms in times_ms:
            session.run(f"x = {name!r}", config={"kernel_idle_timeout_ms": time_ms})
    clock.now_s += 2
    reap(session)

    assert live(session) == 1
    kept = session.run("print(x)")
    assert (kept.text, flags(kept)) == ("long\n", SUCCESS)
