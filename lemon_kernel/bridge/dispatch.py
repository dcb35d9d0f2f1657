"""The bridge without a transport: frames in, helper calls made, answers out, every one of them accounted.

One :class:`Dispatcher` is the authority of one run or cell.  A carrier (a socket pair, a Jupyter comm) hands
it frames in order of arrival and gives it a function that sends answers.  All of it runs on the host loop.

What is hard here is to be exact while tools run side by side, fail, hang, and are killed:

* *Claiming* - authentication, replay, budgets, policy - happens in :meth:`Dispatcher.receive`, which does not
  suspend.  Two frames can therefore never both take the last slot.
* *Dispatch* starts at most ``max_parallel_rpc`` tasks, in order of arrival.  A call that waits for its place
  is an entry in a queue, not a task: it costs nothing to drop, and cannot start behind the back of a run that
  is being ended.
* *Concluding* - the size check, the answer, the charge - is again one step without suspension, taken when the
  tool returns.  One slow call holds back no finished one.
* *Faults*: every step is in the ledger before it is taken (:mod:`.ledger`), so that whatever dies is settled
  by the same function as what does not.  A fault never escapes :meth:`~Dispatcher.receive`.
* *The end*: :meth:`Dispatcher.close` cancels what is in flight, waits 25 ms, and settles the rest.  A coroutine
  can swallow its cancellation and a thread cannot be killed at all; such work is abandoned.  Its outcome finds
  its entry settled and is discarded, and when too much of it has piled up calls fail with ``host busy``.

What can still fail: a tool that blocks the loop blocks everything on it (real helpers work in threads for
that reason), and a tool that was interrupted may have done its work all the same (``accounting_loss``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from lemon_shim.wire import MAX_FRAME_BYTES, TEXT_FRAME_SLACK_BYTES, cut_notify, normalise_text

from ..helpers.base import HelperContext, HelperResult, content_text
from ..scope import AbortSignal
from ..telemetry import fault_name
from .cell import Authority, Limits, Stats
from .frames import HEAD_BYTES, UnreadableFrame, frame_head, is_call_id, is_unicode, parse_frame
from .ledger import (
    INVALID_REQUEST,
    REQUEST_FAILED,
    Answer,
    Disposition,
    Entry,
    Ledger,
    denied_by_policy,
    not_available,
)

__all__ = [
    "Answer",
    "Authorize",
    "Call",
    "Denial",
    "Dispatcher",
    "Faults",
    "Invoke",
    "Limits",
    "PolicyCheck",
    "Stats",
    "allow_all",
]

logger = logging.getLogger(__name__)

AUTHENTICATION_FAILED = "rpc authentication failed"
ALREADY_PROCESSED = "rpc request already processed"
HOST_BUSY = "host busy"

CANCEL_GRACE_S = 0.025
ABANDONED_PER_PARALLEL = 4


@dataclass(frozen=True, slots=True)
class Call:
    """One claimed helper call; `call_id` is its name for logs, `approval_id` the id of any prompt it causes."""

    id: int
    tool: str
    params: dict[str, object]
    call_id: str
    approval_id: str


@dataclass(frozen=True)
class Denial:
    """Why a call may not run; counts as denied, and `message` is what the script's ``ToolError`` says."""

    message: str


Authorize = Callable[[Call], Awaitable[Denial | None]]
"""The approval hook, awaited inside the dispatch task; what it raises is ``approval failed``."""

PolicyCheck = Callable[[str], str | None]
"""Tool name to denial reason, or None; called in the claim step; what it raises is a denial."""

Invoke = Callable[[Call, HelperContext], Awaitable[str | HelperResult]]


def allow_all(tool: str) -> str | None:
    return None


class Faults:
    """Where tests let the bridge break (design 3): a method that raises breaks it at that point.

    An ``Exception`` is a fault that the pass contains, any other ``BaseException`` is its death.
    """

    def before_spend(self, call_id: int) -> None:
        """``reserved`` is in the ledger, the slot is not spent."""

    def after_spend(self, call_id: int) -> None:
        """The slot is spent, nothing is decided."""

    def after_claim(self, call_id: int) -> None:
        """``claimed`` is in the ledger, nothing is dispatched."""

    def mid_dispatch(self, call_id: int) -> None:
        """The tool has run (or was denied), its outcome is not collected; inside the dispatch task."""

    def after_answer(self, call_id: int) -> None:
        """The answer is recorded and sent."""

    def accounting(self, call_id: int) -> None:
        """The outcome is about to be counted."""

    def settlement(self, call_id: int) -> None:
        """A recovery is about to settle this entry."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    ok: bool
    content: str
    is_denial: bool = False


_abandoned: set[asyncio.Task[None]] = set()
"""Dispatch tasks of ended runs that have not ended (behaviour 5.5), of the whole process."""


class Dispatcher:
    """The authority of one run or cell; every method is called on the host loop.

    `on_notify` gets each forwarded message, cut to 4096 bytes and without any prefix; `on_auth_denied` is told
    of each frame that failed authentication; `release_approval` is told, possibly twice, of each approval id
    whose dispatch task has ended.  None of them can harm the run by raising.  `abort` ends the run's tools
    when it is set; the signal the tools see is the run's own and is also set by :meth:`close`.
    """

    def __init__(
        self,
        *,
        cell: str,
        limits: Limits,
        helpers: Sequence[str],
        invoke: Invoke,
        cwd: str,
        abort: AbortSignal,
        policy: PolicyCheck = allow_all,
        authorize: Authorize | None = None,
        on_notify: Callable[[str], None] | None = None,
        on_auth_denied: Callable[[], None] | None = None,
        faults: Faults | None = None,
        release_approval: Callable[[str], object] | None = None,
    ) -> None:
        self.cell = cell
        self.open = True
        """Whether the grant is valid; a closed dispatcher ignores every frame."""
        self.limits = limits
        self._authority = Authority(limits)
        self._ledger = Ledger(self._authority)
        self._helpers = frozenset(helpers)
        self._invoke = invoke
        self._cwd = cwd
        self._policy = policy
        self._authorize = authorize
        self._on_notify = on_notify
        self._on_auth_denied = on_auth_denied
        self._faults = faults or Faults()
        self._release_approval = release_approval
        self._send: Callable[[Answer], None] | None = None
        self._accepts_calls = True
        self._waiting: deque[tuple[Entry, dict[str, object]]] = deque()
        self._tasks: dict[asyncio.Task[None], Call] = {}
        self._running = 0
        self._approval_prefix = f"approval-{secrets.token_hex(8)}-"
        self._closed: asyncio.Future[None] | None = None
        self._abort = AbortSignal()
        self._forget_abort = abort.on_abort(self._abort.abort)

    @property
    def token(self) -> str:
        """The run's 256-bit secret; it goes into the grant and nowhere else."""
        return self._authority.token

    @property
    def text_blocks(self) -> list[str]:
        """The run's result so far: the blocks in ascending number (behaviour 5.7)."""
        return self._authority.text_blocks

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame worth reading; a carrier discards what is larger (:meth:`receive_oversized`)."""
        return max(MAX_FRAME_BYTES, self._max_text_frame_bytes)

    @property
    def _max_text_frame_bytes(self) -> int:
        return self.limits.max_text_bytes + TEXT_FRAME_SLACK_BYTES

    def connect(self, send: Callable[[Answer], None]) -> None:
        """Set the carrier's sender, which must neither block nor raise."""
        self._send = send

    def receive(self, frame: bytes) -> None:
        """Take one frame, in order of arrival; never raises, never blocks."""
        if not self.open:
            return
        try:
            self._receive(frame)
        except BaseException as fault:
            self._contain(fault)

    def receive_oversized(self, head: bytes, size: int) -> None:
        """Take note of a frame of `size` bytes that was discarded but for its `head` (behaviour 5.8)."""
        if not self.open:
            return
        try:
            kind, frame_id = frame_head(head)
            self._refuse_unread(kind, frame_id)
        except BaseException as fault:
            self._contain(fault)

    def end_calls(self) -> None:
        """The script has ended: from now on take only its last text and notify frames (behaviour 5.5).

        For a carrier that reads, before :meth:`close`, what its transport still holds.
        """
        self._accepts_calls = False

    async def close(self, *, killed: bool) -> Stats:
        """Revoke the grant, end what is in flight, and return the final stats; idempotent.

        `killed` says that the run did not end by itself.  Calls in flight are cancelled and get 25 ms, then
        they are abandoned and answered ``rpc dispatch interrupted``; that any were in flight stamps
        ``accounting_loss`` however the run ended (behaviour 5.5, 5.6, A-27).
        """
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return self._authority.stats
        self._closed = asyncio.get_running_loop().create_future()
        self.open = False
        self._forget_abort()
        in_flight = len(self._ledger) > 0
        try:
            if in_flight:
                self._authority.stats.accounting_loss = True
            if in_flight or killed:
                self._abort.abort()
            self._waiting.clear()
            if self._tasks:
                await self._end_tasks()
        finally:
            for task, call in self._tasks.items():
                _abandon(task)
                self._release(call)
            for entry in self._ledger.entries():
                self._settle(entry)
            self._closed.set_result(None)
        return self._authority.stats

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)

    # Frames

    def _receive(self, frame: bytes) -> None:
        if len(frame) > self.max_frame_bytes:
            self._refuse_unread(*frame_head(frame[:HEAD_BYTES]))
            return
        try:
            message = parse_frame(frame)
        except UnreadableFrame:
            self._refuse_unread(*frame_head(frame[:HEAD_BYTES]))
            return
        kind = message["type"] if message is not None else None
        if message is None:
            self._deny_frame()
        elif kind == "call":
            self._call(message, frame)
        elif kind == "text":
            self._text(message, frame)
        elif kind == "notify":
            self._notify(message, frame)
        else:
            self._deny_frame()

    def _refuse_unread(self, kind: str | None, frame_id: int | None) -> None:
        if kind == "notify" or (kind != "text" and not self._accepts_calls):
            return
        if kind != "text":
            self._authority.stats.errors += 1
        self._answer(frame_id, False, INVALID_REQUEST)

    def _deny_frame(self, message: dict[str, object] | None = None) -> None:
        """Refuse a frame that nothing vouches for (behaviour 5.1, steps 1 and 2).

        `message` is given where it has an id to answer.  A frame that names another cell gets no answer: it was on
        its way when its cell ended (an interrupted ``text()``, a leftover thread), and a call of *this* cell, whose
        ids count from 1 as well, would take the refusal for its own.
        """
        self._authority.stats.denied += 1
        if message is not None and message.get("cell", self.cell) == self.cell:
            self._answer(message.get("id"), False, AUTHENTICATION_FAILED)
        if self._on_auth_denied is not None:
            try:
                self._on_auth_denied()
            except Exception as error:
                logger.error("the listener for refused frames raised (%s)", fault_name(error))

    def _text(self, message: dict[str, object], frame: bytes) -> None:
        frame_id = message.get("id")
        if not self._authority.admits(message.get("token")):
            self._deny_frame(message)
            return
        number, text = message.get("n"), message.get("text")
        if (
            not is_call_id(number)
            or not isinstance(text, str)
            or len(frame) > self._max_text_frame_bytes
            or not is_unicode(frame, text)
        ):
            refusal: str | None = INVALID_REQUEST
        else:
            refusal = self._authority.take_text(number, text)
        self._answer(frame_id, refusal is None, refusal or "")

    def _notify(self, message: dict[str, object], frame: bytes) -> None:
        if not self._authority.admits(message.get("token")):
            return
        text = message.get("msg")
        if (
            isinstance(text, str)
            and len(frame) <= MAX_FRAME_BYTES
            and self._on_notify is not None
            and self._authority.take_notify()
        ):
            try:
                self._on_notify(cut_notify(normalise_text(text)))
            except Exception as error:
                logger.debug("the listener for notify() raised (%s)", fault_name(error))
        self._answer(message.get("id"), True, "")

    def _call(self, message: dict[str, object], frame: bytes) -> None:
        if not self._accepts_calls:
            return
        call_id, authority = message.get("id"), self._authority
        if not is_call_id(call_id):
            self._deny_frame()
        elif len(frame) > MAX_FRAME_BYTES:
            self._refuse_unread("call", call_id)
        elif not authority.admits(message.get("token")):
            self._deny_frame(message)
        elif authority.has_seen(call_id):
            authority.stats.errors += 1
            self._answer(call_id, False, ALREADY_PROCESSED)
        elif not authority.has_slot:
            authority.stats.errors += 1
            authority.refuse_slot(call_id)
            limit = self.limits.max_rpc_calls
            self._answer(call_id, False, f"rpc call limit exceeded (max {limit} calls per script)")
        else:
            entry = self._ledger.reserve(call_id)
            try:
                self._claim(entry, message, frame)
            except BaseException as fault:
                self._recover(entry, fault)

    def _claim(self, entry: Entry, message: dict[str, object], frame: bytes) -> None:
        """Spend the slot and decide what becomes of the call (behaviour 5.1, steps 5 to 9)."""
        self._faults.before_spend(entry.id)
        self._authority.spend_slot(entry.id)
        self._faults.after_spend(entry.id)
        tool, params = message.get("tool"), message.get("params")
        if params is None:
            params = {}
        if not isinstance(tool, str) or not isinstance(params, dict) or not is_unicode(frame, message):
            entry.disposition = Disposition.INVALID
            self._conclude(entry, _Outcome(False, INVALID_REQUEST))
            return
        entry.tool = tool
        if tool not in self._helpers:
            entry.disposition = Disposition.UNKNOWN_TOOL
            self._conclude(entry, _Outcome(False, not_available(tool)))
            return
        reason = self._policy_reason(tool)
        if reason is not None:
            entry.disposition = Disposition.DENIED
            self._conclude(entry, _Outcome(False, reason, is_denial=True))
            return
        entry.disposition = Disposition.CLAIMED
        self._faults.after_claim(entry.id)
        self._waiting.append((entry, params))
        self._start_waiting()

    def _policy_reason(self, tool: str) -> str | None:
        try:
            reason = self._policy(tool)
        except Exception as error:
            logger.error("the policy raised (%s); the call is denied", fault_name(error))
            return denied_by_policy(tool)
        return reason if reason is None else str(reason) or denied_by_policy(tool)

    # Dispatch

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self.limits.max_parallel_rpc and not self._abort.aborted:
            entry, params = self._waiting.popleft()
            try:
                self._start(entry, params)
            except BaseException as fault:  # this entry's fault, not that of the one that made room
                self._recover(entry, fault)

    def _start(self, entry: Entry, params: dict[str, object]) -> None:
        if len(_abandoned) >= ABANDONED_PER_PARALLEL * self.limits.max_parallel_rpc:
            self._conclude(entry, _Outcome(False, HOST_BUSY))
            return
        name, approval_id = f"exec_code_rpc_{entry.id}", f"{self._approval_prefix}{entry.id}"
        call = Call(entry.id, entry.tool, params, name, approval_id)
        task = asyncio.get_running_loop().create_task(self._dispatch(entry, call))
        self._running += 1
        self._tasks[task] = call
        task.add_done_callback(self._task_ended)

    async def _dispatch(self, entry: Entry, call: Call) -> None:
        try:
            outcome = await self._outcome(call)
            self._faults.mid_dispatch(entry.id)
            self._conclude(entry, outcome)
        except asyncio.CancelledError as death:
            if self.open:  # not by close(), which settles what it cancels
                self._recover(entry, death)
            raise
        except Exception as fault:
            if entry.answer is None:
                entry.answer = Answer(entry.id, False, REQUEST_FAILED)
            self._recover(entry, fault)
        except BaseException as fault:  # must not reach the loop: SystemExit would end it
            self._recover(entry, fault)
        finally:
            self._release(call)
            self._running -= 1
            self._start_waiting()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        call = self._tasks.pop(task)
        self._release(call)  # a prompt registered since the task's own release
        if not task.cancelled():
            task.exception()

    async def _outcome(self, call: Call) -> _Outcome:
        """Ask for approval if need be, run the tool, and return what came of it."""
        if self._authorize is not None:
            denial = await self._denial(call, self._authorize)
            if denial is not None:
                return _Outcome(False, denial.message, is_denial=True)
        try:
            result = await self._invoke(call, HelperContext(self._abort, self._cwd, call.call_id))
            if not isinstance(result, str | HelperResult):
                _wrong_result(call.tool, result)
            failed = isinstance(result, HelperResult) and result.is_error
            return _Outcome(not failed, normalise_text(content_text(result)))
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            return _Outcome(False, REQUEST_FAILED)
        except Exception as error:
            return _Outcome(False, _message(error))
        except BaseException as error:
            logger.error("helper %s tried to end its host (%s)", call.tool, fault_name(error))
            return _Outcome(False, REQUEST_FAILED)

    async def _denial(self, call: Call, authorize: Authorize) -> Denial | None:
        try:
            denial = await authorize(call)
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
        except BaseException as error:
            logger.error("approval of %s failed (%s)", call.tool, fault_name(error))
        else:
            if denial is None or isinstance(denial, Denial):
                return denial
        return Denial(f"approval failed for '{call.tool}'")

    # Outcomes

    def _conclude(self, entry: Entry, outcome: _Outcome) -> None:
        """Answer a call and charge it (behaviour 5.3); an entry settled already keeps its fate."""
        if not self._ledger.holds(entry):
            return
        ok, content = outcome.ok, outcome.content
        if ok:
            size, remaining = _utf8_bytes(content), self._authority.remaining_bytes
            if size > remaining:
                ok = False
                content = (
                    f"rpc result byte budget exceeded (result {size} bytes, "
                    f"{remaining} bytes remaining of {self.limits.max_rpc_result_bytes})"
                )
            entry.size_bytes = size
        entry.is_denial = outcome.is_denial
        entry.answer = Answer(entry.id, ok, content)
        self._deliver(entry)
        self._faults.after_answer(entry.id)
        self._faults.accounting(entry.id)
        self._ledger.settle(entry)

    def _deliver(self, entry: Entry) -> None:
        if entry.answer is not None and not entry.is_sent:
            entry.is_sent = True
            if self._send is not None:
                self._send(entry.answer)

    def _answer(self, frame_id: object, ok: bool, content: str) -> None:
        """Answer a frame that has no ledger entry, if it has an id that can be answered."""
        if is_call_id(frame_id) and self._send is not None:
            self._send(Answer(frame_id, ok, content))

    def _recover(self, entry: Entry, fault: BaseException) -> None:
        """Settle the entry of a pass that died or raised; what it cost is now a lower bound."""
        self._contain(fault)
        self._settle(entry)

    def _contain(self, fault: BaseException) -> None:
        self._authority.stats.accounting_loss = True
        logger.error("a helper request failed inside the bridge (%s)", fault_name(fault))

    def _settle(self, entry: Entry) -> None:
        try:
            self._faults.settlement(entry.id)
        except BaseException as fault:
            self._contain(fault)
        self._ledger.complete(entry)
        try:
            self._deliver(entry)
        except BaseException as fault:
            self._contain(fault)
        self._ledger.settle(entry)

    def _release(self, call: Call) -> None:
        if self._authorize is None or self._release_approval is None:
            return
        try:
            self._release_approval(call.approval_id)
        except Exception as error:
            logger.error("releasing an approval failed (%s)", fault_name(error))


def _abandon(task: asyncio.Task[None]) -> None:
    if not task.done():
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)


def _is_being_cancelled() -> bool:
    """Return whether somebody cancelled this task, as opposed to a tool that raised CancelledError itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _wrong_result(tool: str, result: object) -> NoReturn:
    raise TypeError(f"helper '{tool}' returned {type(result).__name__}, not text")


def _message(error: Exception) -> str:
    try:
        return normalise_text(error) or type(error).__name__
    except Exception:  # a __str__ that raises
        return type(error).__name__


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
