"""Approvals on a command line: a person at the terminal is asked, and nobody else decides for them.

Problem.  A prompt may end without an answer: its run times out, is aborted, or the person types Ctrl-C.  What
is typed while no prompt is shown, or at a prompt that has just gone, must never answer the next one.

What does not work.  ``input()`` in a thread: it cannot be interrupted, so a prompt that has ended would still
take the next line that is typed.  ``input()`` on the loop: the caller's loop stands still, and with it the
result of a run that has timed out meanwhile.

What we do.  The terminal is a file descriptor on the caller's loop.  One prompt is shown at a time, what was
typed before it is thrown away, and a prompt that ends takes its reader along.

What can still fail.  Nothing tells a prompt that was approved by hand from one approved by a program that
types: whoever holds the terminal is the person.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..approvals import ApprovalBroker, ApprovalOutcome, ApprovalRequest, Decision, RunIdentity
from ..config import PolicyConfig
from ..hostloop import CallerLoop
from ..policy import ToolPolicy

__all__ = ["NobodyToAsk", "Terminal", "WatchedPolicy", "at_terminal", "hint"]

MAX_SHOWN_PARAMS = 200
"""How many characters of the parameters' JSON a prompt shows."""

MAX_ANSWER_BYTES = 4096

_DECISIONS: Mapping[str, Decision] = {
    "y": "approve_once",
    "yes": "approve_once",
    "a": "approve_session",
}


class Terminal(ApprovalBroker):
    """Asks the person at the terminal `descriptor`: ``y`` once, ``a`` this session, anything else denies.

    ``a`` approves the same tool with the same parameters until the command ends.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(self._ask)
        self._descriptor = descriptor
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def _ask(self, request: ApprovalRequest) -> None:
        async with self._my_turn():
            if all(request.id != pending.id for pending in self.pending()):
                return  # it ended while others were asked
            answer = await self._answer_to(_question(request))
        self.resolve(request.id, _DECISIONS.get(answer.strip().lower(), "deny"))

    def _my_turn(self) -> asyncio.Lock:
        """Return the lock of the running loop: each file of a command has a loop of its own."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = (loop, asyncio.Lock())
        return self._turn[1]

    async def _answer_to(self, question: str) -> str:
        """Show `question` and return the line that is typed; empty at end of file."""
        loop = asyncio.get_running_loop()
        typed: asyncio.Future[bytes] = loop.create_future()

        def read() -> None:
            if not typed.done():
                try:
                    typed.set_result(os.read(self._descriptor, MAX_ANSWER_BYTES))
                except OSError:  # the terminal has gone, and the person with it
                    typed.set_result(b"")

        termios.tcflush(self._descriptor, termios.TCIFLUSH)
        _show(question)
        loop.add_reader(self._descriptor, read)
        try:
            line = await typed
        except asyncio.CancelledError:
            _show("\n")
            raise
        finally:
            loop.remove_reader(self._descriptor)
        if not line.endswith(b"\n"):
            _show("\n")
        return line.decode("utf-8", "replace")


class NobodyToAsk(ApprovalBroker):
    """Fails every approval, for want of a terminal, and remembers which tools it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    async def request(
        self,
        identity: RunIdentity,
        tool: str,
        params: Mapping[str, object],
        approval_id: str,
        caller: CallerLoop | None = None,
    ) -> ApprovalOutcome:
        """Say at once that nobody can be asked (behaviour 4.3)."""
        self.asked.add(tool)
        return ApprovalOutcome.FAILED


class WatchedPolicy(ToolPolicy):
    """The configured policy, which remembers which tools it has denied."""

    def __init__(self, table: PolicyConfig) -> None:
        super().__init__(**table.values())
        self.unreadable_reason = table.policy().unreadable_reason
        self.denied: set[str] = set()

    def denial_reason(self, tool: str) -> str | None:
        """Return why `tool` may not be called, or None."""
        reason = super().denial_reason(tool)
        if reason is not None:
            self.denied.add(tool)
        return reason


@contextmanager
def at_terminal() -> Iterator[ApprovalBroker]:
    """Give who is asked: the person at the terminal, or nobody where there is none.

    There is a person when standard error, where prompts go, is a terminal, and answers can be read: from
    standard input or, where that is a script, from the controlling terminal, by a foreground process (any
    other would be stopped by reading).
    """
    descriptor, opened = _terminal()
    try:
        yield NobodyToAsk() if descriptor is None else Terminal(descriptor)
    finally:
        if opened and descriptor is not None:
            os.close(descriptor)


def _terminal() -> tuple[int | None, bool]:
    """Return a terminal to read from and whether it was opened here; None where there is no person."""
    if not sys.stderr.isatty():
        return None, False
    opened = not (sys.stdin is not None and sys.stdin.isatty())
    try:
        if opened:
            descriptor = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        else:
            descriptor = sys.stdin.fileno()
    except OSError:
        return None, False
    try:
        foreground = os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # a terminal that is not our controlling one stops nobody
        foreground = True
    if foreground:
        return descriptor, opened
    if opened:
        os.close(descriptor)
    return None, False


def hint(tool: str, table: PolicyConfig) -> str:
    """Return what a person changes to allow `tool` (behaviour 4.3)."""
    key, source = table.decided_by(tool)
    if source.kind in ("environment", "command line"):
        return f"to allow it, change {source}"
    if source.kind == "default":
        return f"to allow it, set {key}"
    return f"to allow it, change {key} in {source}"


def _question(request: ApprovalRequest) -> str:
    # ASCII JSON: nothing in it can drive the terminal or break the line.
    params = json.dumps(dict(request.action))
    if len(params) > MAX_SHOWN_PARAMS:
        params = params[: MAX_SHOWN_PARAMS - 3] + "..."
    return f"Allow {request.tool} {params} ({request.rationale})? y once, a this session, N: "


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
