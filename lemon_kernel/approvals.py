"""Asking a person before a tool runs, so that exactly one of all that can end a prompt does end it.

A prompt is ended by a decision, a cancellation, its expiry, or the death of whoever waits for it, from any
thread, and they race.  Whoever takes the pending record out of its dictionary has won; taking is one step
under a lock, and whatever a decision installs is installed in that step.  A loser does nothing at all, so a
prompt that was cancelled or has expired can never install policy, whoever resolves it later (behaviour 4.3).

The waiter is subscribed before the request is published: a decision that comes from within the request
function itself is not missed.

A cancelled id stays cancelled, also one that was never seen.  Without that, work that shrugs off its
cancellation could register a prompt after its run was over.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, get_args

from . import telemetry
from .bridge.dispatch import Authorize, Call, Denial
from .policy import PolicySource, current_policy

if TYPE_CHECKING:
    from .hostloop import CallerLoop

__all__ = [
    "ApprovalBroker",
    "ApprovalOutcome",
    "ApprovalRequest",
    "Decision",
    "Done",
    "NotPending",
    "Resolution",
    "RunIdentity",
    "Scope",
    "action_hash",
    "authorizer",
    "new_approval_id",
]

logger = logging.getLogger(__name__)

Decision = Literal["approve_once", "approve_session", "approve_agent", "approve_global", "deny"]
Scope = Literal["global", "agent", "session"]
"""How far a stored approval reaches; in the order in which they are consulted."""

_SCOPE_OF: Mapping[str | None, Scope] = {
    "approve_session": "session",
    "approve_agent": "agent",
    "approve_global": "global",
}

ANY: Final = "any"
MAX_CANCELLED_IDS = 4096
"""How many cancelled ids are remembered; work that outlives so many later calls has its prompt cancelled
when it ends itself."""


class Resolution(Enum):
    """What became of an attempt to end a prompt."""

    DONE = "done"
    NOT_PENDING = "not pending"


Done: Final = Resolution.DONE
"""The attempt ended the prompt."""
NotPending: Final = Resolution.NOT_PENDING
"""Somebody else had ended it, or there is no such prompt; nothing happened."""


class ApprovalOutcome(Enum):
    """What the waiter is told; the value is how a denial reads."""

    APPROVED = "approved"
    DENIED = "denied"
    TIMED_OUT = "timed out"
    FAILED = "failed"


@dataclass(frozen=True)
class RunIdentity:
    """On whose behalf a tool is called; every part may be unknown."""

    run_id: str | None = None
    session_id: str | None = None
    session_key: str | None = None
    agent_id: str | None = None

    def key(self, scope: Scope) -> str | None:
        """Return the key under which approvals of `scope` are stored; None where there is none to store under.

        The agent id defaults from a session key ``agent:<id>:...``, else it is ``default``; an approval for
        a session without a session key holds for its session id.
        """
        match scope:
            case "global":
                return ""
            case "agent":
                if self.agent_id:
                    return self.agent_id
                kind, _, rest = (self.session_key or "").partition(":")
                agent, colon, _ = rest.partition(":")
                return agent if kind == "agent" and colon and agent else "default"
            case "session":
                return self.session_key or self.session_id


@dataclass(frozen=True)
class ApprovalRequest:
    """A prompt: who wants to do what.  `action` is a copy of the params, times are Unix milliseconds."""

    id: str
    run_id: str | None
    session_id: str | None
    session_key: str | None
    agent_id: str
    tool: str
    action: Mapping[str, object]
    rationale: str
    requested_at_ms: int
    expires_at_ms: int | None


@dataclass(slots=True, eq=False)
class _Pending:
    request: ApprovalRequest
    identity: RunIdentity
    action: str
    wake: Callable[[], None]
    decision: Decision | None = None
    outcome: ApprovalOutcome | None = None


OnRequest = Callable[[ApprovalRequest], object]
"""Told of each prompt; sync or async.  What it raises, or an exception it returns, is a failed approval."""


def action_hash(params: Mapping[str, object]) -> str:
    """Return the first 16 hex digits of SHA-256 over the canonical JSON of `params` (behaviour 4.3).

    Raises what :func:`json.dumps` raises for values that are not JSON.
    """
    canonical = json.dumps(params, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def new_approval_id() -> str:
    return f"approval-{secrets.token_hex(16)}"


class ApprovalBroker:
    """Where prompts are pending and approvals are stored; every method is thread-safe.

    `on_request` is told of each prompt; whoever decides calls :meth:`resolve`, from inside it or from
    anywhere, at any time.  Without it prompts wait in :meth:`pending` to be found.  `expiry_ms` ends a prompt
    that nobody decided; by default it waits as long as its run lives.
    """

    def __init__(self, on_request: OnRequest | None = None, expiry_ms: int | None = None) -> None:
        self.on_request = on_request
        self.expiry_ms = expiry_ms
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._cancelled: dict[str, None] = {}
        self._stored: dict[tuple[Scope, str, str, str], bool] = {}
        self._publications: set[asyncio.Task[BaseException | None]] = set()

    def pending(self) -> list[ApprovalRequest]:
        """Return the prompts that nobody has ended, oldest first."""
        with self._lock:
            return [pending.request for pending in self._pending.values()]

    def resolve(self, approval_id: str, decision: Decision) -> Resolution:
        """Decide a prompt; return `Done`, or `NotPending` when it had ended and nothing happened.

        Raises ValueError for a decision that does not exist; the prompt then still waits.
        """
        if decision not in get_args(Decision):
            raise ValueError(f"decision {decision!r} is none of {', '.join(get_args(Decision))}")
        outcome = ApprovalOutcome.DENIED if decision == "deny" else ApprovalOutcome.APPROVED
        return self._end(approval_id, outcome, decision)

    def cancel(self, approval_id: str) -> Resolution:
        """Give a prompt up: its waiter is told it was denied, and the id can never be asked about again."""
        with self._lock:
            self._cancelled[approval_id] = None
            if len(self._cancelled) > MAX_CANCELLED_IDS:
                del self._cancelled[next(iter(self._cancelled))]
        resolution = self._end(approval_id, ApprovalOutcome.DENIED)
        if resolution is Done:
            logger.info("approval_cancelled %s", approval_id)
        return resolution

    def store(
        self,
        scope: Scope,
        key: str | None,
        tool: str,
        params: Mapping[str, object] | Literal["any"],
        approved: bool = True,
    ) -> None:
        """Store an approval of `tool` with exactly these `params`, or with any.

        `key` is the agent id or the session key and is not looked at for ``"global"``.  Only ``approved=True``
        counts; storing False takes an approval back.
        """
        if scope not in get_args(Scope):
            raise ValueError(f"scope {scope!r} is none of {', '.join(get_args(Scope))}")
        if scope != "global" and not key:
            raise ValueError(f"an approval of scope {scope!r} needs a key")
        action = ANY if isinstance(params, str) else action_hash(params)
        with self._lock:
            self._stored[scope, "" if scope == "global" else str(key), tool, action] = approved is True

    def approved_by(self, identity: RunIdentity, tool: str, params: Mapping[str, object]) -> Scope | None:
        """Return the first scope - global, agent, session - that has approved this already, or None."""
        with self._lock:
            if not self._stored:
                return None
        action = action_hash(params)
        with self._lock:
            for scope in get_args(Scope):
                key = identity.key(scope)
                if key is not None and (
                    self._stored.get((scope, key, tool, action)) or self._stored.get((scope, key, tool, ANY))
                ):
                    found: Scope = scope
                    return found
        return None

    async def request(
        self,
        identity: RunIdentity,
        tool: str,
        params: Mapping[str, object],
        approval_id: str,
        caller: CallerLoop | None = None,
    ) -> ApprovalOutcome:
        """Ask whether `tool` may run with `params`, unless it has been approved already, and wait.

        `caller` is the loop on which the request function is called; by default the running one.  Whatever
        ends this wait ends the prompt.  Raises only for params that are not JSON and for an id in use.
        """
        if self.approved_by(identity, tool, params) is not None:
            return ApprovalOutcome.APPROVED
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        pending = _Pending(
            self._describe(identity, tool, params, approval_id),
            identity,
            action_hash(params),
            lambda: _wake(loop, woken),
        )
        with self._lock:
            if approval_id in self._cancelled:
                return ApprovalOutcome.DENIED
            if approval_id in self._pending:
                raise ValueError(f"approval id {approval_id} is in use")
            self._pending[approval_id] = pending
        logger.info("approval_requested %s", approval_id)
        telemetry.emit("lemon.approvals.requested", {"count": 1})
        publication = loop.create_task(self._publish(pending.request, caller))
        self._publications.add(publication)
        publication.add_done_callback(self._publications.discard)
        outcome: ApprovalOutcome | None = None
        try:
            outcome = await self._wait(pending, woken, publication)
            return outcome
        finally:
            if outcome is None and self._take(approval_id) is not None:
                logger.info("approval_cancelled %s", approval_id)
            if pending.decision is None:  # a request function that decided may finish what it does
                publication.cancel()

    async def _wait(
        self,
        pending: _Pending,
        woken: asyncio.Future[None],
        publication: asyncio.Task[BaseException | None],
    ) -> ApprovalOutcome:
        loop, approval_id = asyncio.get_running_loop(), pending.request.id
        deadline = None if self.expiry_ms is None else loop.time() + self.expiry_ms / 1000
        waiting: set[asyncio.Future[None] | asyncio.Task[BaseException | None]] = {woken, publication}
        while True:
            left = None if deadline is None else max(0.0, deadline - loop.time())
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if pending.outcome is not None:
                return pending.outcome
            if publication in done:
                waiting = {woken}
                failed = publication.cancelled() or publication.result() is not None
                if failed and self._take(approval_id) is not None:
                    return ApprovalOutcome.FAILED
            elif not done and self._take(approval_id) is not None:
                return ApprovalOutcome.TIMED_OUT
            # the take was lost: somebody else's outcome is there, or is there on the next turn

    async def _publish(self, request: ApprovalRequest, caller: CallerLoop | None) -> BaseException | None:
        """Tell the request function, and return what went wrong."""
        on_request = self.on_request
        if on_request is None:
            return None

        async def tell() -> object:
            try:
                answer = on_request(request)
                return await answer if inspect.isawaitable(answer) else answer
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # whatever it is, it must not end a loop
                return error

        try:
            answer = await (tell() if caller is None else caller.call(tell))
        except Exception as error:  # the caller's loop is gone
            answer = error
        if isinstance(answer, BaseException):
            logger.error("the approval request function failed (%s)", telemetry.fault_name(answer))
            return answer
        return None

    def _describe(
        self, identity: RunIdentity, tool: str, params: Mapping[str, object], approval_id: str
    ) -> ApprovalRequest:
        now_ms = time.time_ns() // 1_000_000
        return ApprovalRequest(
            id=approval_id,
            run_id=identity.run_id,
            session_id=identity.session_id,
            session_key=identity.session_key,
            agent_id=identity.key("agent") or "default",
            tool=tool,
            action=copy.deepcopy(dict(params)),  # what was asked about is what runs, whatever is done to this
            rationale=f"Tool execution: {tool}",
            requested_at_ms=now_ms,
            expires_at_ms=None if self.expiry_ms is None else now_ms + self.expiry_ms,
        )

    def _take(self, approval_id: str) -> _Pending | None:
        """Take a prompt out, once; whoever gets it decides what becomes of it."""
        with self._lock:
            pending = self._pending.pop(approval_id, None)
        if pending is not None:
            telemetry.emit("lemon.approvals.resolved", {"count": 1})
        return pending

    def _end(
        self, approval_id: str, outcome: ApprovalOutcome, decision: Decision | None = None
    ) -> Resolution:
        with self._lock:
            pending = self._pending.pop(approval_id, None)
            if pending is None:
                return NotPending
            pending.outcome, pending.decision = outcome, decision
            self._install(pending)
        pending.wake()
        telemetry.emit("lemon.approvals.resolved", {"count": 1})
        return Done

    def _install(self, pending: _Pending) -> None:
        """Store what a decision approves beyond this once; the caller holds the lock."""
        scope = _SCOPE_OF.get(pending.decision)
        key = pending.identity.key(scope) if scope is not None else None
        if scope is not None and key is not None:
            self._stored[scope, key, pending.request.tool, pending.action] = True


def authorizer(
    policy: PolicySource | None,
    broker: ApprovalBroker | None,
    identity: RunIdentity,
    caller: CallerLoop | None = None,
) -> Authorize:
    """Return the hook that a call passes between its claim and its tool (behaviour 4.2, 4.3).

    It applies the policy that holds at that moment and asks `broker` where that wants approval.  Whatever goes
    wrong on the way denies the call (D-8).
    """

    async def authorize(call: Call) -> Denial | None:
        try:
            now = await current_policy(policy)
            reason = now.denial_reason(call.tool)
            if reason is not None:
                return Denial(reason)
            if not now.requires_approval(call.tool):
                return None
            outcome = ApprovalOutcome.FAILED
            if broker is not None:
                outcome = await broker.request(identity, call.tool, call.params, call.approval_id, caller)
        except Exception as error:
            logger.error("an approval could not be asked for (%s)", telemetry.fault_name(error))
            outcome = ApprovalOutcome.FAILED
        if outcome is ApprovalOutcome.APPROVED:
            return None
        return Denial(f"approval {outcome.value} for '{call.tool}'")

    return authorize


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    try:
        loop.call_soon_threadsafe(wake)
    except RuntimeError:  # the loop is closed, and with it the waiter is gone
        pass
