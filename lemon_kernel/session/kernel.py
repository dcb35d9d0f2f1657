"""One session kernel as the host sees it: its queue, its one active cell, its deadlines and its end.

Problem.  Several callers share one interpreter that runs one cell at a time.  Each caller may time out, abort
or die while it waits or while its cell runs; the interpreter may crash, hang or ignore signals; the registry
may want the kernel gone.  All of it at once.  Every caller is owed exactly one answer, an aborted one within
0.5 s, and no code may ever be sent twice (behaviour 6.6-6.8).

What does not work.  A task per kernel that takes cells from an ``asyncio.Queue``: while it awaits the active
cell or an escalation of three seconds, nobody answers those who wait.  Deadlines inside the kernel: code that
holds the GIL delays them.  ``asyncio.wait_for`` round each step: between two steps nobody is in charge, and
which of two due events wins depends on the order of callbacks.

What we do.  Nothing here waits.  Every decision is a plain function on the host loop that takes the kernel from
one consistent state to the next (:mod:`.states`): a cell is submitted, sent, completed, due, abandoned; the
kernel ends.  Each answer is one future per cell, set once.  Slow things (start, cell, escalation) are tasks
whose completion calls one of these functions.  A caller's fate is decided in one place, :meth:`_decide`, one turn of
the loop after whatever asked for it: so it sees everything that was due in that turn, and the order is always abort,
then deadline, then completion (behaviour 2.5), whatever callback came first.  The escalation goes on in the
background when the caller has his answer already.

What can still fail.  A death that is not confirmed within the bound: the kernel becomes UNREACHABLE, the
registry tries again.  A child that cleared its environment and left its group survives (behaviour 6.7).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .. import telemetry
from ..output import CapturedOutput, OutputCapture
from .link import STARTUP_TIMEOUT_S, CellReply, KernelDied, ProtocolFault, StartupError
from .states import ATTACHABLE, ENDINGS, Cause, Ending, Event, Life, Phase, Unavailable

if TYPE_CHECKING:
    from ..bridge.dispatch import Dispatcher
    from ..result import Reason
    from ..scope import AbortSignal

__all__ = ["CellEnd", "Link", "OwnerLife", "SessionKernel", "Stopper", "soon"]

log = logging.getLogger(__name__)

STARTUP_CLEANUP_S = 4.0
"""What a start that was given up may take on top to release what it had: an escalation and some slack."""

END_BOUND_S = 5.0
"""When a death counts as unconfirmed: INT, TERM and KILL take 1 s each (behaviour 6.7), the rest is slack."""

LAST_OUTPUT_S = 0.2
"""How long the answer to a lost cell waits for the output that is in the pipe; 0.5 s is its bound."""

DEATH_NOTICE_S = 1.0
"""How long after the death of its process a cell may take to report it."""

CLOCK_TICK_S = 1e-6
"""asyncio may call a timer a tick of its clock early; the deadline counts as reached then."""

NO_OUTPUT = CapturedOutput(text="", truncated=False, full_output_path=None)


class Link(Protocol):
    """What this module needs of :class:`.link.KernelLink`; tests have a double of it."""

    @property
    def dead(self) -> asyncio.Event: ...

    def is_dead(self) -> bool: ...

    async def run_cell(
        self, code: str, *, number: int, dispatcher: Dispatcher, capture: OutputCapture
    ) -> CellReply: ...

    async def cancel(self) -> bool: ...

    async def stop(self) -> bool: ...


class OwnerLife(Protocol):
    """What is kept of an owner: its life, by identity; never the owner itself, which may be collected."""

    @property
    def happened(self) -> bool: ...

    def tell(self, callback: Callable[[], None]) -> Callable[[], None]: ...


Stopper = Callable[[Callable[[], Awaitable[bool]]], Awaitable[bool]]
"""Calls the way to end a kernel that it is given and returns whether its death is confirmed; a test seam."""


@dataclass(frozen=True)
class CellEnd:
    """How one call on a session kernel ended; `reason` is None on success (behaviour 2.7).

    `name` and `message` are those of the exception for ``exception``.  `output` is what was captured until the
    call's fate was decided.
    """

    reason: Reason | None
    name: str | None = None
    message: str | None = None
    output: CapturedOutput = NO_OUTPUT
    kernel_reused: bool = False
    state_retained: bool = False


class _Cell:
    """One call's place: queued, then perhaps active, then answered, exactly once."""

    def __init__(
        self,
        script: str,
        owner: OwnerLife,
        dispatcher: Dispatcher,
        abort: AbortSignal,
        deadline: float,
        max_output_bytes: int,
        max_queued_cells: int,
    ) -> None:
        self.script = script
        self.owner = owner
        self.dispatcher = dispatcher
        self.abort = abort
        self.deadline = deadline
        self.max_output_bytes = max_output_bytes
        self.max_queued_cells = max_queued_cells
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[CellEnd] = self.loop.create_future()
        # Once it was sent:
        self.number = 0
        self.sent_at = 0.0
        self.capture: OutputCapture | None = None

    def due(self) -> Cause | None:
        """Return what has ended this call from outside: the abort first, then its deadline."""
        if self.abort.aborted:
            return Cause.ABORTED
        if self.loop.time() + CLOCK_TICK_S >= self.deadline:
            return Cause.TIMEOUT
        return None

    def end(self, end: CellEnd) -> None:
        if not self.answer.done():
            self.answer.set_result(end)

    def leave(self, reason: Reason) -> None:
        """Answer a call that was never sent."""
        self.end(CellEnd(reason))

    def fall_back(self) -> None:
        """Tell a call that was never sent that there will be no kernel for it."""
        if not self.answer.done():
            self.answer.set_exception(Unavailable("startup_failed"))
            self.answer.exception()  # seen: a caller that dies in this very turn leaves no warning behind

    def last_output(self) -> CapturedOutput:
        """Close the capture and return what it has; an answer is owed even if that fails."""
        if self.capture is None:
            return NO_OUTPUT
        try:
            return self.capture.finish()
        except Exception as error:  # an answer is owed whatever happens
            log.error("captured output of a cell is lost: %s", type(error).__name__)
            return NO_OUTPUT

    def elapsed_ms(self) -> int:
        return int((self.loop.time() - self.sent_at) * 1000)


class SessionKernel:
    """A kernel from the decision to start it until its confirmed death; for the host loop only.

    `start` starts the interpreter, `stopper` carries out its end, `on_change` hears every change of phase, in
    the middle of the change: the registry forgets a kernel before any of its callers is answered.

    `owners`, `leases`, `last_use` and `idle_timeout_ms` are the registry's and kept here, beside what they
    qualify.
    """

    def __init__(
        self,
        *,
        start: Callable[[], Awaitable[Link]],
        stopper: Stopper,
        on_change: Callable[[SessionKernel, Phase, Phase], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._start = start
        self._stopper = stopper
        self._life = Life(lambda before, after: on_change(self, before, after))
        self._link: Link | None = None
        self._queue: deque[_Cell] = deque()
        self._active: _Cell | None = None
        self._cells_sent = 0
        self.cause: Cause | None = None
        """Why it ends; None while it is attachable."""
        self.stop_error: Exception | None = None
        """What the last attempt to end it raised: a fault, other than a death that was not confirmed."""
        self._ready_at: float | None = None

        self.owners: set[OwnerLife] = set()
        self.leases = 0
        self.last_use = 0.0
        self.idle_timeout_ms = 0
        self.generation: int | None = None

        self._running: asyncio.Task[CellReply] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[bool] | None = None
        self._launching = self._loop.create_task(self._launch())

    @property
    def phase(self) -> Phase:
        return self._life.phase

    @property
    def attachable(self) -> bool:
        return self._life.phase in ATTACHABLE

    @property
    def evictable(self) -> bool:
        """Idle, nothing queued, and no call holds it (behaviour 6.4)."""
        return self._life.phase is Phase.IDLE and not self._queue and self.leases == 0

    def lived_ms(self) -> int:
        """Return the milliseconds since it was ready; 0 for one that never was."""
        return 0 if self._ready_at is None else int((self._loop.time() - self._ready_at) * 1000)

    # -- start ----------------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        try:
            async with asyncio.timeout(STARTUP_TIMEOUT_S + STARTUP_CLEANUP_S):
                link = await self._start()
        except (StartupError, TimeoutError):
            self.end(Cause.STARTUP_FAILURE)
            return
        except Exception as error:  # whatever it is, no kernel started
            log.error("kernel start failed: %s", type(error).__name__)
            self.end(Cause.STARTUP_FAILURE)
            return
        self._link = link
        if self._life.phase is not Phase.STARTING:
            return  # discarded while starting, and too late to stop the start: `_release` ends the link
        self._ready_at = self._loop.time()
        self._life.tell(Event.STARTED)
        self._watching = self._loop.create_task(self._watch(link))
        self._advance()

    async def _watch(self, link: Link) -> None:
        """Notice the process's death between cells; during one the cell itself reports how it ended."""
        await link.dead.wait()
        if self._active is not None:
            await asyncio.wait({self._active.answer}, timeout=DEATH_NOTICE_S)
        self.end(Cause.KERNEL_DIED)

    def notice_death(self) -> None:
        """End an idle kernel whose process is dead, before anybody relies on it (behaviour 6.4)."""
        if self._life.phase is Phase.IDLE and self._link is not None and self._link.is_dead():
            self.end(Cause.KERNEL_DIED)

    # -- calls ----------------------------------------------------------------------------------------------

    async def execute(
        self,
        script: str,
        *,
        owner: OwnerLife,
        dispatcher: Dispatcher,
        abort: AbortSignal,
        deadline: float,
        max_output_bytes: int,
        max_queued_cells: int,
    ) -> CellEnd:
        """Give `script` one place in the queue and return how it ended.

        `deadline` is a time of the host loop and includes the wait for the start and in the queue.  Raises
        :class:`Unavailable` when the kernel failed to start.  Being cancelled counts as the caller's death.
        """
        cell = _Cell(script, owner, dispatcher, abort, deadline, max_output_bytes, max_queued_cells)
        timer = self._loop.call_at(deadline, self._loop.call_soon, self._decide, cell)
        unsubscribe = abort.on_abort(lambda: soon(self._loop, lambda: self._decide(cell)))
        try:
            self._submit(cell)
            return await cell.answer
        except asyncio.CancelledError:
            self._abandon(cell)
            raise
        finally:
            timer.cancel()
            unsubscribe()

    def _submit(self, cell: _Cell) -> None:
        self.notice_death()
        due = cell.due()
        if due is not None:
            cell.leave(ENDINGS[due].active)
        elif self.cause is Cause.STARTUP_FAILURE:
            raise Unavailable("startup_failed")
        elif self.cause is not None:
            cell.leave(ENDINGS[self.cause].late)
        elif cell.owner not in self.owners:
            cell.leave("kernel_unavailable")
        elif len(self._queue) >= self._places(cell.max_queued_cells):
            cell.end(CellEnd("queue_full", kernel_reused=self._cells_sent > 0, state_retained=True))
        else:
            self._queue.append(cell)
            self._advance()

    def _places(self, max_queued_cells: int) -> int:
        """How long the queue may be: the capacity counts *behind* the active cell (behaviour 6.6).

        Where no cell is active yet (the kernel is starting) the first in the queue has that place, so what a
        caller meets does not depend on whether the start is over.
        """
        return max_queued_cells + (1 if self._active is None else 0)

    def _advance(self) -> None:
        """Send the first cell of the queue that is still wanted, if the kernel is free."""
        self.notice_death()
        while self._life.phase is Phase.IDLE and self._queue:
            cell = self._queue.popleft()
            due = cell.due()
            if due is None:
                self._send(cell)
            else:
                cell.leave(ENDINGS[due].active)

    def _send(self, cell: _Cell) -> None:
        assert self._link is not None
        self._life.tell(Event.CELL_SENT)
        self._cells_sent += 1
        self._active = cell
        cell.number = self._cells_sent
        cell.sent_at = self._loop.time()
        cell.capture = OutputCapture(cell.max_output_bytes)
        telemetry.emit(
            "coding_agent.python_repl.cell.start",
            {"count": 1, "queue_depth": len(self._queue), "queue_capacity": cell.max_queued_cells},
            {},
        )
        self._running = self._loop.create_task(
            self._link.run_cell(
                cell.script, number=cell.number, dispatcher=cell.dispatcher, capture=cell.capture
            )
        )
        self._running.add_done_callback(lambda task: self._reported(cell, task))

    def _reported(self, cell: _Cell, task: asyncio.Task[CellReply]) -> None:
        if not task.cancelled():
            task.exception()  # seen, also where nobody asks any more
        self._loop.call_soon(self._decide, cell)

    def _decide(self, cell: _Cell) -> None:
        """Look at a cell that may have met its fate: its abort first, then its deadline, then its reply.

        A queued cell leaves and disturbs nobody, an active one takes the kernel with it (behaviour 6.6, 6.7).
        """
        due = cell.due()
        if cell in self._queue:
            if due is not None:
                self._queue.remove(cell)
                cell.leave(ENDINGS[due].active)
        elif cell is self._active and self._running is not None:
            if due is not None:
                self.end(due)
            elif self._running.done():
                self._complete(cell, self._running)

    def _complete(self, cell: _Cell, task: asyncio.Task[CellReply]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.end(_cause_of(error))
            return
        reply = task.result()
        self._active = None
        self._life.tell(Event.CELL_ENDED)
        end = CellEnd(
            None if reply.ok else "exception",
            reply.name,
            reply.message,
            cell.last_output(),
            kernel_reused=cell.number > 1,
            state_retained=True,
        )
        self._answer(cell, end, "ok" if reply.ok else "exception")
        self._advance()

    def _abandon(self, cell: _Cell) -> None:
        """Its caller is dead: as if aborted, but nobody hears the answer."""
        if cell is self._active:
            self.end(Cause.CALLER_EXIT)
        elif cell in self._queue:
            self._queue.remove(cell)

    def depart(self, owner: OwnerLife, cause: Cause) -> None:
        """Remove an owner and its queued cells; without owners, or with its cell active, the kernel ends.

        Siblings' cells go on otherwise (behaviour 6.2).
        """
        self.owners.discard(owner)
        if not self.owners or (self._active is not None and self._active.owner is owner):
            self.end(cause)
            return
        for cell in [cell for cell in self._queue if cell.owner is owner]:
            self._queue.remove(cell)
            cell.leave("kernel_discarded")

    # -- end ------------------------------------------------------------------------------------------------

    def end(self, cause: Cause) -> None:
        """Begin the kernel's end and answer everybody; the first cause stays, later ones change nothing."""
        if not self.attachable:
            return
        self.cause = cause
        ending = ENDINGS[cause]
        active, self._active = self._active, None
        queued = list(self._queue)
        self._queue.clear()
        self._life.tell(ending.event)
        for cell in queued:
            due = cell.due()
            if due is not None:
                cell.leave(ENDINGS[due].active)
            elif cause is Cause.STARTUP_FAILURE:
                cell.fall_back()
            else:
                cell.leave("kernel_discarded")
        if active is not None:
            self._lose(active, ending)
        if self._life.phase is not Phase.GONE:
            self._ending = self._loop.create_task(self._wind_down())

    def _lose(self, cell: _Cell, ending: Ending) -> None:
        """Answer the active cell: at once, or when the output that is in the pipe has been read."""
        if ending.cancel is not None:
            telemetry.emit(
                "coding_agent.python_repl.cell.cancel",
                {"count": 1, "duration_ms": cell.elapsed_ms()},
                {"cause": ending.cancel},
            )
        assert self._running is not None
        if self._running.done():
            self._answer_lost(cell, ending)
        else:
            self._running.cancel()
            self._answering = self._loop.create_task(self._answer_soon(cell, ending, self._running))

    async def _answer_soon(self, cell: _Cell, ending: Ending, running: asyncio.Task[CellReply]) -> None:
        await asyncio.wait({running}, timeout=LAST_OUTPUT_S)
        self._answer_lost(cell, ending)

    def _answer_lost(self, cell: _Cell, ending: Ending) -> None:
        # On timeout and abort the flag is false, whatever really happened (behaviour 2.7).
        reused = cell.number > 1 and ending.active not in ("timeout", "cancelled")
        self._answer(
            cell, CellEnd(ending.active, output=cell.last_output(), kernel_reused=reused), ending.outcome
        )

    def _answer(self, cell: _Cell, end: CellEnd, outcome: str) -> None:
        cell.end(end)
        telemetry.emit(
            "coding_agent.python_repl.cell.stop",
            {"count": 1, "duration_ms": cell.elapsed_ms()},
            {"outcome": outcome},
        )

    async def _wind_down(self) -> bool:
        """End the interpreter and return whether its death is confirmed; bounded, never raises."""
        if self._watching is not None:
            self._watching.cancel()
        confirmed = False
        self.stop_error = None
        try:
            async with asyncio.timeout(END_BOUND_S):
                confirmed = await self._release()
        except TimeoutError:
            log.warning("a kernel's death was not confirmed within %s s", END_BOUND_S)
        except Exception as error:  # whatever it is, the death is not confirmed
            log.error("ending a kernel failed: %s", type(error).__name__)
            self.stop_error = error
        self._life.tell(Event.CONFIRMED if confirmed else Event.UNCONFIRMED)
        return confirmed

    async def _release(self) -> bool:
        if not self._launching.done():
            self._launching.cancel()
            await asyncio.wait({self._launching})
        if self._link is None:
            return True  # a start that ends without a link has released everything
        if self._life.phase is Phase.STOPPING:
            return await self._stopper(self._link.stop)
        return await self._stopper(self._link.cancel)

    def retry(self) -> None:
        """Try again to end an UNREACHABLE kernel."""
        if self._life.phase is Phase.UNREACHABLE and (self._ending is None or self._ending.done()):
            self._ending = self._loop.create_task(self._wind_down())

    async def ended(self) -> bool:
        """Wait, bounded, for an end that has begun, and return whether it is confirmed."""
        if self._ending is not None:
            return await asyncio.shield(self._ending)
        return self._life.phase is Phase.GONE


def _cause_of(error: BaseException) -> Cause:
    """Return what it means for the kernel that a cell ended with `error` instead of a reply."""
    if isinstance(error, KernelDied):
        return Cause.KERNEL_DIED
    if isinstance(error, ProtocolFault):
        return Cause.PROTOCOL_FAULT
    log.error("a cell ended by a fault of ours: %s", type(error).__name__)
    return Cause.INTERNAL_ERROR


def soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call `callback` on the host loop, from any thread; a loop that is closed has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        pass
