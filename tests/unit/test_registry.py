"""Which kernel a call runs on: keys, owners, forks, cap, reaping, quarantine, closing; against doubles."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Awaitable, Callable

import pytest

from lemon_kernel import hostloop, telemetry
from lemon_kernel.errors import RegistryUnavailableError
from lemon_kernel.scope import AbortSignal, Owner
from lemon_kernel.session.kernel import CellEnd
from lemon_kernel.session.registry import KernelRegistry, KernelSettings, ResetFailed, Unavailable

from .fake_link import OK, Desk, Key, on_host, until
from .test_session_kernel import with_desk

REPL = "coding_agent.python_repl."


def unavailable(reason: str) -> pytest.RaisesExc[Unavailable]:
    return pytest.RaisesExc(Unavailable, check=lambda error: error.reason == reason)


def cap(max_live_kernels: int, idle_ms: int = 1_800_000) -> KernelSettings:
    return KernelSettings(max_live_kernels=max_live_kernels, kernel_idle_timeout_ms=idle_ms)


def inflight(desk: Desk) -> object:
    return desk.registry.snapshot()["inflight_cells"]


def live(desk: Desk) -> int:
    capacity = desk.registry.snapshot()["capacity"]
    assert isinstance(capacity, dict)
    return int(capacity["live"])


# -- keys and owners ------------------------------------------------------------------------------------------


def test_one_kernel_per_key() -> None:
    """Calls with one key share a kernel; another key has its own (cases 237, 240)."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner, "a", key="one")
        assert (await desk.finished(owner, "b", key="one", settings=cap(3))).kernel_reused
        assert not (await desk.finished(owner, "c", key="two")).kernel_reused
        assert len(desk.links) == 2

    with_desk(main)


def test_first_use_by_many_starts_one_kernel() -> None:
    """Many first calls at once start exactly one kernel, and one of them has not reused it (behaviour 6.2)."""

    async def main(desk: Desk) -> None:
        owners = [Owner() for _ in range(5)]
        calls = [desk.begin(owner) for owner in owners]
        link = await desk.link()
        for number in range(1, 6):
            (await link.running(number)).reply.set_result(OK)
        reused = [(await call).kernel_reused for call in calls]
        assert sorted(reused) == [False, True, True, True, True]
        assert desk.start.begun == 1
        assert desk.registry.snapshot()["owners"] == 5

    with_desk(main)


@pytest.mark.case(249)
def test_a_sole_owners_death_ends_the_kernel() -> None:
    """Closed or garbage collected, a dead owner's kernel ends at once, idle or starting."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner)
        owner.close()
        await until(lambda: not desk.phases())
        assert desk.links[0].stops == 1

        collected = Owner()
        await desk.finished(collected)
        del collected
        gc.collect()
        await until(lambda: not desk.phases())

        desk.start.gate.clear()
        starter = Owner()
        call = desk.begin(starter)
        await until(lambda: desk.start.begun == 3)
        starter.close()
        assert (await call).reason == "kernel_discarded"
        await until(lambda: not desk.phases())
        assert desk.start.cancelled == 1

    with_desk(main)


def test_an_owner_may_die_in_any_thread() -> None:
    """The death of an owner in a foreign thread, even a finaliser there, reaches the host loop."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner)
        thread = threading.Thread(target=owner.close)
        thread.start()
        await until(lambda: not desk.phases())
        thread.join()

    with_desk(main)


def test_the_registry_never_keeps_an_owner() -> None:
    """What is kept of an owner is its life: dropping the last reference to the owner is its death."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        lease = await desk.registry.acquire(Key("k"), owner, KernelSettings())  # type: ignore[arg-type]
        life = owner.life
        del owner
        gc.collect()
        assert life.happened
        lease.release()

    with_desk(main)


@pytest.mark.case(256)
def test_a_dead_owner_gets_no_kernel() -> None:
    """An owner that died on the way to the registry is refused before anything starts."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        owner.close()
        with unavailable("missing_session_scope"):
            await desk.call(owner)
        assert desk.start.begun == 0

    with_desk(main)


@pytest.mark.case(250, 327)
def test_a_co_owners_death() -> None:
    """Idle: the sibling keeps the kernel.  A's cell active: discarded, B's queued call hears it.  A's cell
    queued: it leaves, B's active cell goes on.
    """

    async def main(desk: Desk) -> None:
        a, b = Owner(), Owner()
        await desk.finished(a, "a")
        await desk.finished(b, "b")
        a.close()
        await until(lambda: desk.registry.snapshot()["owners"] == 1)
        assert (await desk.finished(b, "b2")).kernel_reused

        a = Owner()
        active = desk.begin(b, "active")
        cell = await desk.links[0].running(4)
        queued = desk.begin(a, "queued")
        await until(lambda: inflight(desk) == 2)
        a.close()
        assert (await queued).reason == "kernel_discarded"
        cell.reply.set_result(OK)
        assert (await active).reason is None

        a = Owner()
        active = desk.begin(a, "active")
        await desk.links[0].running(5)
        queued = desk.begin(b, "queued")
        await until(lambda: inflight(desk) == 2)
        a.close()
        assert (await queued).reason == "kernel_discarded"
        end = await active
        assert (end.reason, end.state_retained) == ("shutting_down", False)
        assert [cell.code for cell in desk.links[0].cells][-1] == "active"

    with_desk(main)


@pytest.mark.case(253)
def test_detach_returns_when_the_kernel_is_gone() -> None:
    """Session reset: the old kernel is gone when `detach` returns, in any thread and loop."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner)
        gone = await asyncio.to_thread(lambda: asyncio.run(desk.registry.detach(owner)))
        assert gone is True
        assert desk.phases() == {}
        assert await desk.registry.detach(owner) is True
        assert not (await desk.finished(owner)).kernel_reused

    with_desk(main)


def test_detach_that_nobody_waits_for_goes_on() -> None:
    """Cancelling the wait (session close waits 100 ms) does not undo the detaching."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        call = desk.begin(owner)
        link = await desk.link()
        link.escalation = asyncio.Event()
        await link.running()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(desk.registry.detach(owner), 0.01)
        assert (await call).reason == "shutting_down"
        assert desk.phases() == {"cancelling": 1}
        link.escalation.set()
        await until(lambda: not desk.phases())

    with_desk(main)


def test_a_lease_of_a_departed_owner_is_worth_nothing() -> None:
    """A call whose owner detached between acquire and submit is refused, and siblings are undisturbed."""

    async def main(desk: Desk) -> None:
        a, b = Owner(), Owner()
        await desk.finished(b)
        lease = await desk.registry.acquire(Key("k"), a, KernelSettings())  # type: ignore[arg-type]
        await desk.registry.detach(a)
        assert (await execute(lease)).reason == "kernel_unavailable"
        assert (await desk.finished(b)).kernel_reused

    with_desk(main)


async def execute(lease: object) -> CellEnd:
    end: CellEnd = await lease.execute(  # type: ignore[attr-defined]
        "late",
        dispatcher=None,
        abort=AbortSignal(),
        deadline=asyncio.get_running_loop().time() + 30,
        max_output_bytes=100,
    )
    return end


@pytest.mark.case(329)
def test_a_kernel_that_dies_between_acquire_and_submit() -> None:
    """The call is answered `kernel_unavailable`: not executed, no fallback; the next one gets a new kernel."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner, "first")
        lease = await desk.registry.acquire(Key("k"), owner, KernelSettings())  # type: ignore[arg-type]
        desk.links[0].die()
        end = await execute(lease)
        assert (end.reason, end.state_retained) == ("kernel_unavailable", False)
        assert [cell.code for cell in desk.links[0].cells] == ["first"]
        assert not (await desk.finished(owner)).kernel_reused

    with_desk(main)


def test_a_lease_on_a_kernel_that_ended_otherwise() -> None:
    """A call that comes after the kernel's end has begun for another cause hears `shutting_down`."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner)
        lease = await desk.registry.acquire(Key("k"), owner, KernelSettings())  # type: ignore[arg-type]
        assert await desk.registry.reset(Key("k"), owner) is True  # type: ignore[arg-type]
        assert (await execute(lease)).reason == "shutting_down"

    with_desk(main)


def test_a_dead_idle_kernel_is_replaced_in_the_same_call() -> None:
    """Acquire does not attach to a kernel whose process is dead: it starts a new generation (behaviour 6.4)."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner)
        desk.links[0].dead.set()
        lease = await desk.registry.acquire(Key("k"), owner, cap(1))  # type: ignore[arg-type]
        assert desk.phases() == {"starting": 1, "stopping": 1}
        lease.release()

    with_desk(main)


# -- reset ----------------------------------------------------------------------------------------------------


@pytest.mark.case(243, 244)
def test_reset_of_a_sole_owner() -> None:
    """Reset without a kernel is nothing; with one it ends that kernel and waits for its death."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        key = Key("k")
        assert await desk.registry.reset(key, owner) is False  # type: ignore[arg-type]
        await desk.finished(owner)
        assert await desk.registry.reset(key, owner) is True  # type: ignore[arg-type]
        assert desk.links[0].stops == 1
        assert desk.phases() == {}
        assert not (await desk.finished(owner)).kernel_reused

    with_desk(main)


def test_reset_ends_the_owners_other_calls() -> None:
    """A reset while the owner's own cell runs discards it, and its queued calls."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        active = desk.begin(owner, "active")
        await (await desk.link()).running()
        queued = desk.begin(owner, "queued")
        await until(lambda: inflight(desk) == 2)
        assert await desk.registry.reset(Key("k"), owner) is True  # type: ignore[arg-type]
        assert (await active).reason == "shutting_down"
        assert (await queued).reason == "kernel_discarded"

    with_desk(main)


@pytest.mark.case(247, 326)
def test_reset_of_a_co_owner_forks_him() -> None:
    """The requester gets a kernel of his own, sticky until he detaches; the sibling's cells go on."""

    async def main(desk: Desk) -> None:
        a, b = Owner(), Owner()
        await desk.finished(a)
        await desk.finished(b)
        active = desk.begin(a, "active")
        cell = await desk.links[0].running(3)
        queued = desk.begin(b, "queued of b")
        await until(lambda: inflight(desk) == 2)
        assert await desk.registry.reset(Key("k"), b) is True  # type: ignore[arg-type]
        assert (await queued).reason == "kernel_discarded"
        assert not (await desk.finished(b, "fork")).kernel_reused
        assert desk.registry.snapshot()["forked_owners"] == 1
        cell.reply.set_result(OK)
        assert (await active).reason is None
        assert (await desk.finished(b, "same fork")).kernel_reused
        assert [cell.code for cell in desk.links[1].cells] == ["fork", "same fork"]

        assert await desk.registry.reset(Key("k"), b) is True  # type: ignore[arg-type]
        assert not (await desk.finished(b, "third")).kernel_reused
        assert desk.phases() == {"idle": 2}

        await desk.registry.detach(b)
        assert desk.phases() == {"idle": 1}
        assert desk.registry.snapshot()["forked_owners"] == 0
        assert (await desk.finished(b, "back on the shared one")).kernel_reused

    with_desk(main)


def test_reset_by_a_newcomer_forks_him_too() -> None:
    """A co-owner's first call may be a reset: he never attaches to the shared kernel (case 326)."""

    async def main(desk: Desk) -> None:
        a, b = Owner(), Owner()
        await desk.finished(a)
        assert await desk.registry.reset(Key("k"), b) is True  # type: ignore[arg-type]
        assert not (await desk.finished(b)).kernel_reused
        assert (await desk.finished(a)).kernel_reused

    with_desk(main)


def test_reset_while_the_requesters_own_cell_is_active() -> None:
    """Then the shared kernel is unsafe: it is discarded, siblings' queued calls hear it (behaviour 6.3)."""

    async def main(desk: Desk) -> None:
        a, b = Owner(), Owner()
        await desk.finished(a)
        active = desk.begin(b, "active")
        await desk.links[0].running(2)
        queued = desk.begin(a, "queued")
        await until(lambda: inflight(desk) == 2)
        assert await desk.registry.reset(Key("k"), b) is True  # type: ignore[arg-type]
        assert (await active).reason == "shutting_down"
        assert (await queued).reason == "kernel_discarded"
        assert desk.links[0].cancels == 1
        assert desk.phases() == {}

    with_desk(main)


def test_a_fork_dies_with_its_owner() -> None:
    """A forked owner's death ends the fork and forgets it."""

    async def main(desk: Desk) -> None:
        a, b = Owner(), Owner()
        await desk.finished(a)
        await desk.registry.reset(Key("k"), b)  # type: ignore[arg-type]
        await desk.finished(b)
        b.close()
        await until(lambda: desk.phases() == {"idle": 1})
        assert desk.registry.snapshot()["forked_owners"] == 0

        c = Owner()
        await desk.registry.reset(Key("k"), c)  # type: ignore[arg-type]
        assert desk.registry.snapshot()["forked_owners"] == 1
        c.close()
        await until(lambda: desk.registry.snapshot()["forked_owners"] == 0)

    with_desk(main)


@pytest.mark.case(265)
def test_reset_that_cannot_confirm_the_death() -> None:
    """`stop_failed`, the kernel quarantined and tried again at each tick; a new one is not held up."""
    answers = [False, False, True]

    async def stopper(end: Callable[[], Awaitable[bool]]) -> bool:
        return answers.pop(0) if answers else await end()

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner)
        with unavailable("stop_failed"):
            await desk.registry.reset(Key("k"), owner)  # type: ignore[arg-type]
        assert desk.phases() == {"unreachable": 1}
        assert live(desk) == 0
        assert not (await desk.finished(owner)).kernel_reused
        await desk.registry.reap()
        assert desk.phases() == {"unreachable": 1, "idle": 1}
        await desk.registry.reap()
        assert desk.phases() == {"idle": 1}

    with_desk(main, stopper=stopper)


@pytest.mark.case(266)
def test_reset_that_fails_otherwise() -> None:
    """A fault while stopping is no unconfirmed death: `ResetFailed`, nothing may run; it is quarantined too."""
    broken = True

    async def stopper(end: Callable[[], Awaitable[bool]]) -> bool:
        if broken:
            raise OSError("no")
        return await end()

    async def main(desk: Desk) -> None:
        nonlocal broken
        owner = Owner()
        await desk.finished(owner)
        with pytest.raises(ResetFailed):
            await desk.registry.reset(Key("k"), owner)  # type: ignore[arg-type]
        assert desk.phases() == {"unreachable": 1}
        broken = False

    with_desk(main, stopper=stopper)


# -- capacity -------------------------------------------------------------------------------------------------


@pytest.mark.case(260)
def test_the_least_recently_used_idle_kernel_makes_room() -> None:
    """At the cap the kernel whose last use is longest ago ends; the new one starts in the same call."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner, key="a", settings=cap(2))
        await desk.finished(owner, key="b", settings=cap(2))
        await desk.finished(owner, key="a", settings=cap(2))
        await desk.finished(owner, key="c", settings=cap(2))
        await until(lambda: desk.phases() == {"idle": 2})
        assert [link.stops for link in desk.links] == [0, 1, 0]
        assert (await desk.finished(owner, key="a", settings=cap(2))).kernel_reused

    with_desk(main)


@pytest.mark.case(259, 261)
@pytest.mark.parametrize("phase", ["starting", "running", "queued", "leased"])
def test_busy_kernels_are_never_evicted(phase: str) -> None:
    """Starting, running, queued and leased kernels keep their place; the newcomer is `capacity_exhausted`."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        calls: list[asyncio.Task[CellEnd]] = []
        if phase == "leased":
            await desk.finished(owner)
            lease = await desk.registry.acquire(Key("k"), owner, cap(1))  # type: ignore[arg-type]
        else:
            if phase == "starting":
                desk.start.gate.clear()
            calls = [desk.begin(owner) for _ in range(2 if phase == "queued" else 1)]
            await until(lambda: inflight(desk) == len(calls))
            if phase != "starting":
                await (await desk.link()).running()
        with unavailable("capacity_exhausted"):
            await desk.call(owner, key="new", settings=cap(1))
        if phase == "leased":
            lease.release()
            lease.release()
        desk.start.gate.set()
        link = await desk.link()
        for number in range(1, len(calls) + 1):
            (await link.running(number)).reply.set_result(OK)
        assert [(await call).reason for call in calls] == [None] * len(calls)
        assert inflight(desk) == 0
        assert (await desk.finished(owner, key="new", settings=cap(1))).reason is None

    with_desk(main)


@pytest.mark.case(262)
def test_a_lowered_cap_evicts_nothing() -> None:
    """With more live kernels than the caller's cap the call falls back; once below, it works."""

    async def main(desk: Desk) -> None:
        owners = [Owner() for _ in range(3)]
        for number, owner in enumerate(owners):
            await desk.finished(owner, key=str(number))
        with unavailable("capacity_exhausted"):
            await desk.call(Owner(), key="new", settings=cap(1))
        assert desk.phases() == {"idle": 3}
        for owner in owners:
            await desk.registry.detach(owner)
        assert (await desk.finished(owners[0], key="new", settings=cap(1))).reason is None

    with_desk(main)


def test_dead_kernels_make_room_without_an_eviction() -> None:
    """Entries whose process is dead are dropped before anybody is evicted (behaviour 6.4)."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner, key="a", settings=cap(2))
        await desk.finished(owner, key="b", settings=cap(2))
        desk.links[1].dead.set()
        lease = await desk.registry.acquire(Key("c"), owner, cap(2))  # type: ignore[arg-type]
        assert desk.phases() == {"starting": 1, "idle": 1, "stopping": 1}
        lease.release()
        assert (await desk.finished(owner, key="a")).kernel_reused

    with_desk(main)


def test_kernels_that_are_ending_do_not_count() -> None:
    """A cancelling kernel gives its place free at once (A-25): the same key starts again under a cap of one."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        call = desk.begin(owner, timeout_s=0.03, settings=cap(1))
        link = await desk.link()
        link.escalation = asyncio.Event()
        assert (await call).reason == "timeout"
        assert (await desk.finished(owner, settings=cap(1))).reason is None
        assert desk.phases() == {"idle": 1, "cancelling": 1}

    with_desk(main)


def test_a_dropped_lease_releases_itself() -> None:
    """A call that is cut short between acquire and submit does not hold the kernel for ever."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        lease = await desk.registry.acquire(Key("k"), owner, KernelSettings())  # type: ignore[arg-type]
        assert inflight(desk) == 1
        del lease
        gc.collect()
        await until(lambda: inflight(desk) == 0)

    with_desk(main)


# -- reaping --------------------------------------------------------------------------------------------------


@pytest.mark.case(277, 278)
def test_idle_kernels_are_reaped_by_their_latest_setting() -> None:
    """A tick ends the kernels that have been idle for as long as their latest acquire allowed, others not."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner, key="short", settings=cap(9, idle_ms=60_000))
        await desk.finished(owner, key="long", settings=cap(9, idle_ms=60_000))
        await desk.finished(owner, key="long", settings=cap(9, idle_ms=600_000))
        busy = desk.begin(owner, key="busy", settings=cap(9, idle_ms=1))
        cell = await (await desk.link(3)).running()
        desk.clock.now_s += 59
        await desk.registry.reap()
        assert desk.phases() == {"idle": 2, "running": 1}
        desk.clock.now_s += 2
        desk.ticks.release()
        await until(lambda: desk.phases() == {"idle": 1, "running": 1})
        assert [link.stops for link in desk.links] == [1, 0, 0]
        cell.reply.set_result(OK)
        assert (await busy).reason is None
        assert not (await desk.finished(owner, key="short")).kernel_reused

    with_desk(main)


def test_a_leased_kernel_is_not_reaped() -> None:
    """Between acquire and submit a kernel is idle and somebody's all the same."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        lease = await desk.registry.acquire(Key("k"), owner, cap(9, idle_ms=1))  # type: ignore[arg-type]
        await until(lambda: desk.phases() == {"idle": 1})
        desk.clock.now_s += 100
        await desk.registry.reap()
        assert desk.phases() == {"idle": 1}
        lease.release()
        await desk.registry.reap()
        assert desk.phases() == {"idle": 1}, "the release counts as a use"
        desk.clock.now_s += 100
        await desk.registry.reap()
        assert desk.phases() == {}

    with_desk(main)


def test_reap_and_stop_events() -> None:
    """A reap is followed by its stop; what was quarantined and got rid of as well (behaviour 9.1)."""
    seen: list[tuple[str, object]] = []
    answers = [False, True]

    async def stopper(end: Callable[[], Awaitable[bool]]) -> bool:
        return answers.pop() if answers else await end()

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner, settings=cap(9, idle_ms=1))
        desk.clock.now_s += 1
        await desk.registry.reap()
        assert (await desk.call(owner, timeout_s=0.03)).reason == "timeout"
        await until(lambda: desk.phases() == {"unreachable": 1})
        await desk.registry.reap()

    unlisten = telemetry.listen(
        lambda event, measured, said: seen.append((event.removeprefix(REPL), said.get("reason")))
    )
    try:
        with_desk(main, stopper=stopper)
    finally:
        unlisten()

    assert [event for event in seen if event[0].startswith("session")] == [
        ("session.start", None),
        ("session.reap", "idle"),
        ("session.stop", "shutdown"),
        ("session.start", None),
        ("session.crash", "cancellation_escalation"),
        ("session.reap", "unreachable"),
        ("session.stop", "shutdown"),
    ]


# -- closing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["starting", "idle", "running", "cancelling", "unreachable"])
def test_close_in_each_phase(phase: str) -> None:
    """Whatever its kernels are doing, a closing registry ends them and answers everybody."""
    confirmed = phase != "unreachable"

    async def stopper(end: Callable[[], Awaitable[bool]]) -> bool:
        return await end() and confirmed

    async def main(desk: Desk) -> None:
        nonlocal confirmed
        owner = Owner()
        calls: list[asyncio.Task[CellEnd]] = []
        match phase:
            case "starting":
                desk.start.gate.clear()
                calls = [desk.begin(owner)]
                await until(lambda: desk.start.begun == 1)
            case "running":
                calls = [desk.begin(owner), desk.begin(owner)]
                await (await desk.link()).running()
            case "cancelling":
                call = desk.begin(owner, timeout_s=0.03)
                link = await desk.link()
                link.escalation = asyncio.Event()
                await call
                asyncio.get_running_loop().call_later(0.02, link.escalation.set)
            case _:
                await desk.finished(owner)
        if phase == "unreachable":
            await desk.registry.detach(owner)
        await until(lambda: desk.phases().get(phase) == 1)
        confirmed = True
        await desk.registry.aclose()
        assert [(await call).reason for call in calls] == {
            "starting": ["kernel_discarded"],
            "running": ["shutting_down", "kernel_discarded"],
        }.get(phase, [])
        assert not desk.registry._leaving
        assert not desk.registry._kernels
        for link in desk.links:
            assert link.dead.is_set()

    with_desk(main, stopper=stopper)


@pytest.mark.case(258, 313)
def test_a_closed_registry_refuses() -> None:
    """After `aclose`, twice, calls are `registry_unavailable` and everything else is an error that says so."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner)
        await asyncio.gather(desk.registry.aclose(), desk.registry.aclose())
        assert desk.registry.closed
        with unavailable("registry_unavailable"):
            await desk.call(owner)
        with unavailable("registry_unavailable"):
            await desk.registry.reset(Key("k"), owner)  # type: ignore[arg-type]
        with pytest.raises(RegistryUnavailableError, match="registry_unavailable"):
            desk.registry.snapshot()
        with pytest.raises(RegistryUnavailableError):
            await desk.registry.detach(owner)
        with pytest.raises(RegistryUnavailableError):
            await desk.registry.reap()
        owner.close()

    with_desk(main)


def test_a_registry_is_an_async_context_manager_in_any_loop() -> None:
    """`async with KernelRegistry()` needs no arguments and works in a loop of the caller's."""

    async def main() -> KernelRegistry:
        async with KernelRegistry() as registry:
            assert not registry.closed
            await registry.reap()
        return registry

    assert asyncio.run(main()).closed


def test_a_registry_is_a_plain_context_manager_too() -> None:
    """`with KernelRegistry()` serves callers of `run_sync()`, who have no loop."""
    with KernelRegistry() as registry:
        assert not registry.closed
        registry.snapshot()

    assert registry.closed


def test_the_default_registry() -> None:
    """One per process; when it was closed, a new and empty one."""
    first = KernelRegistry.default()
    assert KernelRegistry.default() is first
    asyncio.run(first.aclose())
    second = KernelRegistry.default()
    assert second is not first
    asyncio.run(second.aclose())


# -- snapshot -------------------------------------------------------------------------------------------------


@pytest.mark.case(312)
def test_snapshot() -> None:
    """Exactly the keys of behaviour 9.3, counts only; callable from any thread."""

    async def main(desk: Desk) -> None:
        a, b = Owner(), Owner()
        await desk.finished(a, key="idle")
        running = desk.begin(a, key="running")
        await (await desk.link(2)).running()
        queued = desk.begin(b, key="running")
        desk.start.gate.clear()
        starting = desk.begin(b, key="starting")
        lost = desk.begin(a, key="idle", timeout_s=0.03)
        desk.links[0].escalation = asyncio.Event()
        await lost
        snapshot = await asyncio.to_thread(desk.registry.snapshot)
        assert snapshot == {
            "capacity": {"live": 2, "max": 16, "available": 14},
            "phases": {
                "starting": 1, "idle": 0, "running": 1, "cancelling": 1, "stopping": 0, "unreachable": 0,
            },
            "inflight_cells": 3,
            "owners": 2,
            "forked_owners": 0,
            "reap": {"idle_timeout_ms": 1_800_000, "interval_ms": 60_000},
        }  # fmt: skip
        await desk.registry.aclose()
        await asyncio.gather(running, queued, starting)

    with_desk(main)


def test_generations_count_successful_starts_only() -> None:
    """Generations increase registry-wide, and a failed start uses none up (behaviour 6.4)."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner, key="a")
        desk.start.fails = True
        with unavailable("startup_failed"):
            await desk.call(owner, key="b")
        desk.start.fails = False
        await desk.finished(owner, key="b")
        assert [kernel.generation for kernel in desk.registry._kernels.values()] == [1, 2]

    with_desk(main)


def test_a_forked_child_begins_empty() -> None:
    """A child of `os.fork` has none of its parent's kernels, and its exit leaves them alone."""

    async def main(desk: Desk) -> None:
        await desk.finished(owner := Owner())
        assert in_a_fork(lambda: not desk.registry._kernels)
        assert (await desk.finished(owner)).kernel_reused

    with_desk(main)


def in_a_fork(question: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if question() else 1)
    return os.waitpid(child, 0)[1] == 0


# -- storm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_storm(seed: int) -> None:
    """Random calls, resets, aborts, deaths and reaps at once: every call has one answer, the cap holds, one
    cell at a time (the double checks), no code is sent twice, and nothing is left.
    """
    dice = random.Random(seed)
    ends: list[object] = []

    async def interpreter(desk: Desk) -> None:
        """Lets cells end, kernels die and links be slow."""
        while True:
            await asyncio.sleep(0.001)
            for link in desk.links:
                for cell in link.cells:
                    if cell.reply.done() or dice.random() > 0.3:
                        continue
                    if dice.random() < 0.06:
                        link.die()
                    else:
                        cell.reply.set_result(OK)

    async def actor(desk: Desk, number: int) -> None:
        owner = Owner()
        for turn in range(12):
            abort = AbortSignal()
            task = desk.begin(
                owner,
                f"{number}.{turn}",
                key=dice.choice("abc"),
                abort=abort,
                timeout_s=dice.choice([30.0, 30.0, 0.003]),
                settings=KernelSettings(max_live_kernels=4, max_queued_cells_per_kernel=2),
                reset=dice.random() < 0.1,
            )
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            match dice.randrange(12):
                case 0:
                    abort.abort()
                case 1:
                    task.cancel()
                case 2:
                    owner.close()
                    owner = Owner()
                case 3:
                    await desk.registry.detach(owner)
                case 4:
                    desk.clock.now_s += 10_000
                    await desk.registry.reap()
            ends.extend(await asyncio.gather(task, return_exceptions=True))
            assert len([link for link in desk.links if not link.dead.is_set()]) <= 24
            assert live(desk) <= 4

    async def main(desk: Desk) -> None:
        background = asyncio.create_task(interpreter(desk))
        await asyncio.wait_for(asyncio.gather(*(actor(desk, number) for number in range(8))), 40)
        background.cancel()
        assert len(ends) == 96
        reasons = {getattr(end, "reason", type(end).__name__) for end in ends}
        assert None in reasons
        assert not reasons & {"internal_error", "ImpossibleEvent", "AssertionError"}, reasons
        assert inflight(desk) == 0
        sent = [cell.code for link in desk.links for cell in link.cells]
        assert len(sent) == len(set(sent)), "no code is ever sent twice"
        await desk.registry.aclose()
        assert not desk.registry._leaving
        assert all(link.dead.is_set() for link in desk.links)

    with_desk(main)


def test_tests_leave_the_host_loop_clean() -> None:
    """After all this no task is left on the host loop but the one that looks."""
    left: set[object] = set()

    async def main() -> None:
        await asyncio.sleep(0)
        left.update(task.get_coro() for task in asyncio.all_tasks() if task is not asyncio.current_task())

    assert not hostloop.running_here()
    on_host(main)
    assert not left
