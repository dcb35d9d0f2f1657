"""The host's record of every call slot that is being spent, from which its exact cost can be rebuilt.

The problem: the host's work on a request - a *pass* - may die after it spent a slot or ran a tool, but before
it counted what that cost.  Counting early is no way out (a refusal would be counted before it is known), and
counting late loses what the pass had already done, so that a fault could be used to buy free calls.

So a pass writes down each step in an entry here *before* it takes it: ``reserved`` before the slot is spent,
the disposition before anything is answered or dispatched, the answer before it goes out.  Counting is one step
at the very end, :meth:`Ledger.settle`, and it reads nothing but the entry.  A pass that died is settled by
the same function as one that did not; what it had not yet written down gets the conservative reading of the
table in behaviour 5.6.  An entry leaves the ledger as it is settled, so nothing is settled twice, and the
ledger holds only what is in flight: its size does not grow with the length of the run.

What can still be unknown is whether a tool whose outcome was never collected did its work: that is
``accounting_loss``, and such a result is untrusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lemon_shim.wire import INTERRUPTED

from .cell import Authority

__all__ = ["INVALID_REQUEST", "REQUEST_FAILED", "Answer", "Disposition", "Entry", "Ledger", "not_available"]

INVALID_REQUEST = "invalid rpc request"
REQUEST_FAILED = "rpc request failed"


def not_available(tool: str) -> str:
    return f"tool '{tool}' is not available inside execute_code scripts"


def denied_by_policy(tool: str) -> str:
    return f"tool '{tool}' denied by policy"


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back to the script under the id of its frame."""

    id: int
    ok: bool
    content: str


class Disposition(Enum):
    """How far the claiming step came with a request (behaviour 5.6)."""

    RESERVED = "reserved"
    INVALID = "invalid"
    UNKNOWN_TOOL = "unknown_tool"
    DENIED = "denied"
    CLAIMED = "claimed"


@dataclass(slots=True, eq=False)
class Entry:
    """One spent slot: what was decided, what was answered.  `is_denial` says which counter an error goes to."""

    id: int
    disposition: Disposition = Disposition.RESERVED
    tool: str = ""
    answer: Answer | None = None
    is_sent: bool = False
    is_denial: bool = False
    size_bytes: int = 0


class Ledger:
    """The entries whose cost has not been counted yet."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def reserve(self, call_id: int) -> Entry:
        entry = self._entries[call_id] = Entry(call_id)
        return entry

    def holds(self, entry: Entry) -> bool:
        """Return whether `entry` is still to be settled."""
        return self._entries.get(entry.id) is entry

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def complete(self, entry: Entry) -> None:
        """Give an entry without an answer the one that the table of behaviour 5.6 has for it."""
        if entry.answer is not None:
            return
        match entry.disposition:
            case Disposition.RESERVED:
                text = REQUEST_FAILED
            case Disposition.INVALID:
                text = INVALID_REQUEST
            case Disposition.UNKNOWN_TOOL:
                text = not_available(entry.tool)
            case Disposition.DENIED:
                text = denied_by_policy(entry.tool)
                entry.is_denial = True
            case Disposition.CLAIMED:
                text = INTERRUPTED
                self._authority.stats.accounting_loss = True
        entry.answer = Answer(entry.id, False, text)

    def settle(self, entry: Entry) -> None:
        """Count what `entry` cost, exactly once."""
        if self._entries.pop(entry.id, None) is None:
            return
        self.complete(entry)
        self._authority.spend_slot(entry.id)
        stats = self._authority.stats
        if entry.answer is not None and entry.answer.ok:
            stats.bytes += entry.size_bytes
            stats.tools_used.add(entry.tool)
        elif entry.is_denial:
            stats.denied += 1
        else:
            stats.errors += 1
