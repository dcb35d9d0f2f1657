"""One session kernel: its queue, deadlines, aborts and ends, against a double of the interpreter."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from lemon_kernel import telemetry
from lemon_kernel.scope import AbortSignal, Owner
from lemon_kernel.session import kernel as session_kernel
from lemon_kernel.session.kernel import CellEnd, SessionKernel
from lemon_kernel.session.link import CellReply, ProtocolFault, StartupError
from lemon_kernel.session.registry import KernelSettings
from lemon_kernel.session.states import TRANSITIONS, Cause, Event, Phase, Unavailable

from .fake_link import NO_DISPATCHER, OK, Desk, FakeLink, on_host, until


def with_desk(main: Callable[[Desk], Awaitable[None]], **seams: object) -> None:
    """Run `main` with a registry over doubles, on the host loop; close it; no task may have failed unseen."""

    async def run() -> None:
        unseen: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context))
        desk = Desk(**seams)
        try:
            await main(desk)
        finally:
            for link in desk.links:
                if link.escalation is not None:
                    link.escalation.set()
                if link.deaf is not None:
                    link.deaf.set()
            await desk.registry.aclose()
            del desk
            await asyncio.sleep(0)
            gc.collect()
            loop.set_exception_handler(None)
        assert not unseen

    on_host(run)


# -- every transition of the table, by a real kernel --------------------------------------------------------


class Stage:
    """A kernel that can be brought into any phase and told any event of the table."""

    def __init__(self) -> None:
        self.link = FakeLink()
        self.start_gate = asyncio.Event()
        self.start_error: Exception | None = None
        self.confirmed = True
        self.stop_gate = asyncio.Event()
        self.phases: list[Phase] = [Phase.STARTING]
        self.owner = Owner()
        self.calls: list[asyncio.Task[CellEnd]] = []
        self.kernel = SessionKernel(start=self._start, stopper=self._stop, on_change=self._on_change)
        self.kernel.owners.add(self.owner.life)

    async def _start(self) -> FakeLink:
        await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error
        return self.link

    async def _stop(self, end: Callable[[], Awaitable[bool]]) -> bool:
        await self.stop_gate.wait()
        return await end() and self.confirmed

    def _on_change(self, kernel: SessionKernel, before: Phase, after: Phase) -> None:
        assert self.phases[-1] is before
        self.phases.append(after)

    def submit(self, abort: AbortSignal | None = None) -> asyncio.Task[CellEnd]:
        call = asyncio.create_task(
            self.kernel.execute(
                "pass",
                owner=self.owner.life,
                dispatcher=NO_DISPATCHER,
                abort=AbortSignal() if abort is None else abort,
                deadline=asyncio.get_running_loop().time() + 30,
                max_output_bytes=100,
                max_queued_cells=8,
            )
        )
        self.calls.append(call)
        return call

    async def reach(self, phase: Phase) -> None:
        match phase:
            case Phase.IDLE:
                self.start_gate.set()
            case Phase.RUNNING:
                await self.reach(Phase.IDLE)
                await self.cause(Event.CELL_SENT)
            case Phase.CANCELLING:
                await self.reach(Phase.RUNNING)
                self.kernel.end(Cause.TIMEOUT)
            case Phase.STOPPING:
                await self.reach(Phase.IDLE)
                self.kernel.end(Cause.RESET)
            case Phase.UNREACHABLE:
                await self.reach(Phase.STOPPING)
                await self.cause(Event.UNCONFIRMED)
        await until(lambda: self.kernel.phase is phase)

    async def cause(self, event: Event) -> None:
        match event:
            case Event.STARTED:
                self.start_gate.set()
            case Event.START_FAILED:
                self.start_error = StartupError("no")
                self.start_gate.set()
            case Event.CELL_SENT:
                self.submit()
                await self.link.running()
            case Event.CELL_ENDED:
                (await self.link.running()).reply.set_result(OK)
            case Event.CELL_LOST:
                (await self.link.running()).reply.set_exception(ProtocolFault("fault"))
            case Event.STOP:
                self.kernel.end(Cause.SHUTDOWN)
            case Event.DIED:
                self.link.die()
            case Event.CONFIRMED | Event.UNCONFIRMED:
                self.confirmed = event is Event.CONFIRMED
                self.stop_gate.set()
                if self.kernel.phase is Phase.UNREACHABLE:
                    self.kernel.retry()
                await self.kernel.ended()

    async def close(self) -> None:
        self.start_gate.set()
        self.confirmed = True
        self.stop_gate.set()
        self.kernel.end(Cause.SHUTDOWN)
        await self.kernel.ended()
        self.kernel.retry()
        await self.kernel.ended()
        await asyncio.gather(*self.calls, return_exceptions=True)


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [(before, event, after) for before, row in TRANSITIONS.items() for event, after in row.items()],
)
def test_a_kernel_goes_where_the_table_says(before: Phase, event: Event, after: Phase) -> None:
    """Every transition of the table happens to a real kernel, and every caller has his answer at the end."""

    async def main() -> None:
        stage = Stage()
        await stage.reach(before)
        seen = len(stage.phases)
        await stage.cause(event)
        await until(lambda: len(stage.phases) > seen or after is before)
        assert (stage.phases[seen] if after is not before else stage.kernel.phase) is after
        await stage.close()
        assert stage.kernel.phase is Phase.GONE
        assert all(call.done() for call in stage.calls)

    on_host(main)


# -- answers --------------------------------------------------------------------------------------------------


def test_a_success_keeps_the_state() -> None:
    """A cell that ends well is answered with its output; the second cell of a kernel has reused it."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        call = desk.begin(owner, "one")
        cell = await (await desk.link()).running()
        cell.capture.feed(b"hello\n")
        cell.reply.set_result(OK)
        end = await call
        assert (end.reason, end.output.text, end.kernel_reused, end.state_retained) == (
            None, "hello\n", False, True,
        )  # fmt: skip
        end = await desk.finished(owner, "two")
        assert (end.reason, end.kernel_reused, end.state_retained) == (None, True, True)
        assert [c.number for c in desk.links[0].cells] == [1, 2]

    with_desk(main)


def test_an_exception_keeps_the_state() -> None:
    """A cell that raised is answered with name and message, and the kernel takes the next cell."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        call = desk.begin(owner)
        cell = await (await desk.link()).running()
        cell.reply.set_result(CellReply(ok=False, name="ValueError", message="boom"))
        end = await call
        assert (end.reason, end.name, end.message, end.state_retained) == (
            "exception", "ValueError", "boom", True,
        )  # fmt: skip
        assert (await desk.finished(owner)).kernel_reused

    with_desk(main)


@pytest.mark.case(230)
def test_a_crash_discards_the_kernel_and_keeps_the_output() -> None:
    """A dead interpreter is `kernel_died` with the output so far; queued callers hear `kernel_discarded`."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        first = desk.begin(owner, "first")
        link = await desk.link()
        cell = await link.running()
        second = desk.begin(owner, "second")
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 2)
        cell.capture.feed(b"gone\n")
        link.die()
        end = await first
        assert (end.reason, end.output.text, end.state_retained) == ("kernel_died", "gone\n", False)
        assert (await second).reason == "kernel_discarded"
        assert [c.code for c in link.cells] == ["first"]
        assert not (await desk.finished(owner, "third")).kernel_reused
        assert len(desk.links) == 2
        assert (link.stops, link.cancels) == (1, 0)

    with_desk(main)


def test_a_cell_that_ended_before_the_kernel_died_is_a_success() -> None:
    """A reply that is in when the process's death is noticed counts; the kernel is gone all the same."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        call = desk.begin(owner)
        link = await desk.link()
        (await link.running()).reply.set_result(OK)
        link.dead.set()
        assert (await call).reason is None
        assert not (await desk.finished(owner)).kernel_reused

    with_desk(main)


@pytest.mark.parametrize(
    ("error", "reason"), [(ProtocolFault("x"), "protocol_fault"), (OSError("x"), "internal_error")]
)
def test_a_fault_discards_the_kernel(error: Exception, reason: str) -> None:
    """A protocol fault, and a fault of ours, end the kernel by the escalation and are named."""

    async def main(desk: Desk) -> None:
        call = desk.begin(Owner())
        link = await desk.link()
        (await link.running()).reply.set_exception(error)
        end = await call
        assert (end.reason, end.state_retained) == (reason, False)
        await until(lambda: not any(desk.phases().values()))
        assert link.cancels == 1

    with_desk(main)


def test_output_that_cannot_be_collected_still_leaves_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is owed even if the capture fails."""

    async def main(desk: Desk) -> None:
        call = desk.begin(Owner())
        cell = await (await desk.link()).running()
        monkeypatch.setattr(cell.capture, "finish", lambda: 1 / 0)
        cell.reply.set_result(OK)
        end = await call
        assert (end.reason, end.output.text) == (None, "")

    with_desk(main)


# -- deadlines, aborts, dead callers --------------------------------------------------------------------------


def test_the_deadline_answers_while_the_escalation_goes_on() -> None:
    """An active cell past its deadline: the caller hears at once, the kernel is cancelling, a new one starts."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        call = desk.begin(owner, "slow", timeout_s=0.05)
        link = await desk.link()
        link.escalation = asyncio.Event()
        cell = await link.running()
        cell.capture.feed(b"so far\n")
        end = await asyncio.wait_for(call, 0.5)
        assert (end.reason, end.output.text, end.state_retained, end.kernel_reused) == (
            "timeout", "so far\n", False, False,
        )  # fmt: skip
        assert cell.cancelled
        assert desk.phases() == {"cancelling": 1}
        assert not (await desk.finished(owner, "next")).kernel_reused
        link.escalation.set()
        await until(lambda: desk.phases() == {"idle": 1})

    with_desk(main)


@pytest.mark.case(228)
def test_an_abort_answers_within_half_a_second_even_if_the_link_is_slow() -> None:
    """The answer to an abort does not wait for a link that is slow to let go; late output is dropped."""

    async def main(desk: Desk) -> None:
        loop = asyncio.get_running_loop()
        abort = AbortSignal()
        call = desk.begin(Owner(), abort=abort)
        link = await desk.link()
        link.deaf = asyncio.Event()
        link.escalation = asyncio.Event()
        cell = await link.running()
        cell.capture.feed(b"early\n")
        began = loop.time()
        abort.abort()
        end = await call
        assert loop.time() - began < 0.5
        assert (end.reason, end.output.text, end.state_retained) == ("cancelled", "early\n", False)

    with_desk(main)


def test_an_abort_from_another_thread_wakes_the_host() -> None:
    """`AbortSignal.abort()` may be called in any thread."""

    async def main(desk: Desk) -> None:
        abort = AbortSignal()
        call = desk.begin(Owner(), abort=abort)
        await (await desk.link()).running()
        await asyncio.to_thread(abort.abort)
        assert (await asyncio.wait_for(call, 5)).reason == "cancelled"

    with_desk(main)


@pytest.mark.case(229)
@pytest.mark.parametrize("order", ["abort first", "deadline first"])
def test_abort_beats_deadline(order: str) -> None:
    """When both are due in one loop turn the abort wins, whatever callback comes first."""

    async def main(desk: Desk) -> None:
        loop = asyncio.get_running_loop()
        abort = AbortSignal()
        call = desk.begin(Owner(), abort=abort, timeout_s=0.05)
        await (await desk.link()).running()
        loop.call_later(0.03 if order == "abort first" else 0.06, abort.abort)
        _block(loop, 0.08)
        assert (await call).reason == "cancelled"

    with_desk(main)


def _block(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    end = loop.time() + seconds
    while loop.time() < end:
        pass


def _in_turns(turns: int, callback: Callable[[], object]) -> None:
    """Call `callback` at the end of the loop's turn after `turns` others."""
    loop = asyncio.get_running_loop()
    if turns == 0:
        callback()
    else:
        loop.call_soon(_in_turns, turns - 1, callback)


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("way", ["abort", "deadline"])
def test_abort_and_deadline_beat_a_completed_cell(way: str, turns: int) -> None:
    """Once its reply is in, a cell is still lost until its fate is decided: it is late then, or not wanted.

    Whatever turn of the loop it is, the answer and the kernel's fate agree (behaviour 2.5).
    """

    async def main(desk: Desk) -> None:
        loop = asyncio.get_running_loop()
        abort = AbortSignal()
        call = desk.begin(Owner(), abort=abort, timeout_s=0.1 if way == "deadline" else 30)
        link = await desk.link()
        cell = await link.running()
        cell.reply.set_result(OK)
        _in_turns(turns, abort.abort if way == "abort" else lambda: _block(loop, 0.15))
        end = await call
        if turns < 3:  # the reply wakes the task, which reports, which asks for the decision
            assert end.reason == ("cancelled" if way == "abort" else "timeout")
        assert end.state_retained == (end.reason is None)
        assert link.cancels == (0 if end.state_retained else 1)

    with_desk(main)


@pytest.mark.parametrize("turns", range(5))
def test_a_late_queued_cell_is_never_sent(turns: int) -> None:
    """A queued cell whose deadline passes in the very turn in which its turn comes is not sent."""

    async def main(desk: Desk) -> None:
        loop, owner = asyncio.get_running_loop(), Owner()
        first = desk.begin(owner, "first")
        link = await desk.link()
        cell = await link.running()
        second = desk.begin(owner, "second", timeout_s=0.1)
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 2)
        cell.reply.set_result(OK)
        _in_turns(turns, lambda: _block(loop, 0.15))
        assert (await first).reason is None
        assert (await second).reason == "timeout"
        if turns < 3:
            assert [c.code for c in link.cells] == ["first"]
            assert desk.phases() == {"idle": 1}

    with_desk(main)


def test_a_call_that_is_aborted_or_late_already_is_never_sent() -> None:
    """Abort or deadline before the submission: answered, not sent, kernel undisturbed."""

    async def main(desk: Desk) -> None:
        owner, abort = Owner(), AbortSignal()
        await desk.finished(owner, "first")
        abort.abort()
        assert (await desk.call(owner, "no", abort=abort)).reason == "cancelled"
        assert (await desk.call(owner, "no", timeout_s=-1)).reason == "timeout"
        assert (await desk.finished(owner, "last")).kernel_reused
        assert [c.code for c in desk.links[0].cells] == ["first", "last"]

    with_desk(main)


@pytest.mark.case(332)
def test_the_active_caller_dies() -> None:
    """Cancelling the awaiting task discards the kernel; queued callers hear `kernel_discarded`."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        first = desk.begin(owner, "first")
        link = await desk.link()
        await link.running()
        second = desk.begin(owner, "second")
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 2)
        first.cancel()
        assert (await second).reason == "kernel_discarded"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not (await desk.finished(owner, "third")).kernel_reused
        assert link.cancels == 1
        assert desk.registry.snapshot()["inflight_cells"] == 0

    with_desk(main)


@pytest.mark.case(273, 274, 331)
@pytest.mark.parametrize("way", ["abort", "deadline", "death"])
def test_a_queued_caller_just_leaves(way: str) -> None:
    """A queued call that is aborted, late or dead leaves; its code is never sent, the active cell goes on."""

    async def main(desk: Desk) -> None:
        owner, abort = Owner(), AbortSignal()
        first = desk.begin(owner, "first")
        link = await desk.link()
        cell = await link.running()
        second = desk.begin(owner, "second", abort=abort, timeout_s=0.05 if way == "deadline" else 30)
        third = desk.begin(owner, "third")
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 3)
        if way == "abort":
            abort.abort()
        elif way == "death":
            second.cancel()
        if way == "death":
            with pytest.raises(asyncio.CancelledError):
                await second
        else:
            end = await second
            assert (end.reason, end.state_retained, end.kernel_reused) == (
                "cancelled" if way == "abort" else "timeout", False, False,
            )  # fmt: skip
        assert desk.phases() == {"running": 1}
        cell.reply.set_result(OK)
        assert (await first).reason is None
        (await link.running(2)).reply.set_result(OK)
        assert (await third).reason is None
        assert [c.code for c in link.cells] == ["first", "third"]

    with_desk(main)


def test_a_queued_caller_who_left_in_the_turn_of_the_kernels_end() -> None:
    """His own abort comes first, then what happened to the kernel."""

    async def main(desk: Desk) -> None:
        owner, abort = Owner(), AbortSignal()
        first = desk.begin(owner)
        await (await desk.link()).running()
        second = desk.begin(owner, abort=abort)
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 2)
        abort.abort()
        await desk.registry.detach(owner)
        assert (await first).reason == "shutting_down"
        assert (await second).reason == "cancelled"

    with_desk(main)


# -- the queue ------------------------------------------------------------------------------------------------


@pytest.mark.case(270)
def test_fifo() -> None:
    """Queued calls run in the order of submission, one at a time."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        names = ["sleeper", "a", "b", "c"]
        calls = [desk.begin(owner, name) for name in names]
        link = await desk.link()
        for number in range(1, 5):
            cell = await link.running(number)
            assert len(link.cells) == number
            cell.reply.set_result(OK)
        assert [(await call).reason for call in calls] == [None] * 4
        assert [c.code for c in link.cells] == names

    with_desk(main)


@pytest.mark.case(271)
@pytest.mark.parametrize("starting", [False, True])
def test_queue_full(starting: bool) -> None:
    """Beyond one active and `max_queued` waiting calls the next is refused at once, the kernel undisturbed.

    While the kernel starts the first in the queue has the active place already.
    """

    async def main(desk: Desk) -> None:
        owner, settings = Owner(), KernelSettings(max_queued_cells_per_kernel=1)
        if starting:
            desk.start.gate.clear()
        calls = [desk.begin(owner, str(n), settings=settings) for n in range(2)]
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 2)
        if not starting:
            await (await desk.link()).running()
        end = await desk.call(owner, "third", settings=settings)
        assert (end.reason, end.state_retained) == ("queue_full", True)
        desk.start.gate.set()
        link = await desk.link()
        for number in (1, 2):
            (await link.running(number)).reply.set_result(OK)
        assert [(await call).reason for call in calls] == [None, None]
        assert [c.code for c in link.cells] == ["0", "1"]

    with_desk(main)


def test_the_bound_is_the_current_calls() -> None:
    """A call with a larger bound gets a place where one with a smaller bound does not (A-18)."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        small, large = (KernelSettings(max_queued_cells_per_kernel=n) for n in (1, 2))
        calls = [desk.begin(owner, "x", settings=small) for _ in range(2)]
        await (await desk.link()).running()
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 2)
        assert (await desk.call(owner, "x", settings=small)).reason == "queue_full"
        calls.append(desk.begin(owner, "x", settings=large))
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 3)
        for number in (1, 2, 3):
            (await desk.links[0].running(number)).reply.set_result(OK)
        assert [(await call).reason for call in calls] == [None] * 3

    with_desk(main)


# -- start ----------------------------------------------------------------------------------------------------


@pytest.mark.case(263)
def test_a_failed_start_makes_everybody_fall_back() -> None:
    """All who wait for a kernel that does not start get `startup_failed`; the next call tries again."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        desk.start.fails = True
        desk.start.gate.clear()
        calls = [desk.begin(owner) for _ in range(3)]
        await until(lambda: desk.registry.snapshot()["inflight_cells"] == 3)
        desk.start.gate.set()
        for call in calls:
            with pytest.raises(Unavailable) as caught:
                await call
            assert caught.value.reason == "startup_failed"
        assert desk.start.begun == 1
        assert desk.phases() == {}
        desk.start.fails = False
        assert (await desk.finished(owner)).reason is None

    with_desk(main)


def test_a_start_that_fails_by_a_fault_is_a_failed_start() -> None:
    """Whatever a start raises, its callers fall back."""

    async def main(desk: Desk) -> None:
        with pytest.raises(Unavailable) as caught:
            await desk.call(Owner())
        assert caught.value.reason == "startup_failed"

    async def broken(**_: object) -> FakeLink:
        raise OSError("out of descriptors")

    with_desk(main, start=broken)


def test_a_start_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start's bound is kept by the host, even if the link does not keep its own."""
    monkeypatch.setattr(session_kernel, "STARTUP_TIMEOUT_S", 0.02)
    monkeypatch.setattr(session_kernel, "STARTUP_CLEANUP_S", 0.02)

    async def main(desk: Desk) -> None:
        desk.start.gate.clear()
        with pytest.raises(Unavailable) as caught:
            await desk.call(Owner())
        assert caught.value.reason == "startup_failed"
        assert desk.start.cancelled == 1

    with_desk(main)


@pytest.mark.parametrize("way", ["abort", "deadline", "death"])
def test_leaving_during_the_start(way: str) -> None:
    """A caller who leaves while the kernel starts is answered at once; the start goes on for the others."""

    async def main(desk: Desk) -> None:
        owner, abort = Owner(), AbortSignal()
        desk.start.gate.clear()
        call = desk.begin(owner, "first", abort=abort, timeout_s=0.05 if way == "deadline" else 30)
        await until(lambda: desk.start.begun == 1)
        if way == "abort":
            abort.abort()
        elif way == "death":
            call.cancel()
        if way == "death":
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            assert (await call).reason == ("cancelled" if way == "abort" else "timeout")
        assert desk.phases() == {"starting": 1}
        desk.start.gate.set()
        assert not (await desk.finished(owner, "second")).kernel_reused
        assert desk.start.begun == 1

    with_desk(main)


def test_a_start_that_cannot_be_stopped_is_ended_when_it_is_over() -> None:
    """A link that comes out of a start although that was cancelled is ended before its kernel counts as gone."""

    async def main(desk: Desk) -> None:
        owner = Owner()
        call = desk.begin(owner)
        await begun.wait()
        owner.close()
        assert (await call).reason == "kernel_discarded"
        assert desk.phases() == {"stopping": 1}
        over.set()
        await until(lambda: not desk.phases())
        assert link.stops == 1

    async def stubborn(**_: object) -> FakeLink:
        begun.set()
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                pass
        return link

    begun, over, link = asyncio.Event(), asyncio.Event(), FakeLink()
    with_desk(main, start=stubborn)


# -- an end that does not go well -----------------------------------------------------------------------------


def test_a_death_that_takes_too_long_is_unconfirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a death is bounded; the kernel is quarantined then, and tried again at the next tick."""
    monkeypatch.setattr(session_kernel, "END_BOUND_S", 0.05)
    let_go = asyncio.Event()

    async def stopper(end: Callable[[], Awaitable[bool]]) -> bool:
        await let_go.wait()
        return await end()

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner)
        assert await desk.registry.detach(owner) is False
        assert desk.phases() == {"unreachable": 1}
        let_go.set()
        await desk.registry.reap()
        assert desk.phases() == {}

    with_desk(main, stopper=stopper)


# -- telemetry ------------------------------------------------------------------------------------------------


@pytest.mark.case(308, 309)
def test_events() -> None:
    """A session reports its kernel and its cells by closed words (behaviour 9.1)."""
    seen: list[tuple[str, dict[str, object]]] = []

    async def main(desk: Desk) -> None:
        owner = Owner()
        await desk.finished(owner, "ok")
        call = desk.begin(owner, "raises")
        link = await desk.link()
        (await link.running(2)).reply.set_result(CellReply(ok=False, name="E", message=""))
        await call
        await desk.call(owner, "slow", timeout_s=0.03)
        await until(lambda: not desk.phases())

    unlisten = telemetry.listen(
        lambda event, measured, said: seen.append(
            (event.removeprefix("coding_agent.python_repl."), dict(said))
        )
    )
    try:
        with_desk(main)
    finally:
        unlisten()

    assert [event for event in seen if not event[0].startswith("session")] == [
        ("cell.start", {}),
        ("cell.stop", {"outcome": "ok"}),
        ("cell.start", {}),
        ("cell.stop", {"outcome": "exception"}),
        ("cell.start", {}),
        ("cell.cancel", {"cause": "timeout"}),
        ("cell.stop", {"outcome": "timeout"}),
    ]
    assert [event for event in seen if event[0].startswith("session")] == [
        ("session.start", {}),
        ("session.crash", {"reason": "cancellation_escalation"}),
    ]
