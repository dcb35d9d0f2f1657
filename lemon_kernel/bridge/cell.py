"""The authority of one run: its token, its budgets, its replay memory and its result channels.

Nothing here knows frames, tools or transports, and nothing here can suspend: each method is one indivisible
step on the host loop, which is what keeps the budgets exact (behaviour 5.1, "strictly serially").
"""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import dataclass, field

from lemon_shim.wire import MAX_FORWARDED_NOTIFIES, text_charge_bytes, text_over_budget

__all__ = ["Authority", "Limits", "Stats"]

MAX_REMEMBERED_REFUSALS = 65_536
"""How many ids refused for want of a call slot are remembered.

Once the slots are spent no call can run any more, so forgetting such an id costs one wrong word in a refusal;
remembering all of them would let a script fill the host's memory.
"""


@dataclass(frozen=True)
class Limits:
    """The budgets of one run (behaviour 1.1)."""

    max_rpc_calls: int
    max_rpc_result_bytes: int
    max_text_bytes: int
    max_parallel_rpc: int


@dataclass
class Stats:
    """What a run's helper calls cost (behaviour 5.4); with `accounting_loss` the figures are lower bounds."""

    calls: int = 0
    denied: int = 0
    errors: int = 0
    bytes: int = 0
    tools_used: set[str] = field(default_factory=set)
    accounting_loss: bool = False
    notify_forwarded: int = 0


class Authority:
    """Token, budgets, replay memory and channel counters of one run."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.stats = Stats()
        self.token = secrets.token_urlsafe(32)
        self._token_bytes = self.token.encode()
        self._seen: set[int] = set()
        self._refusals = 0
        self._text_bytes = 0
        self._blocks: list[tuple[int, str]] = []

    def admits(self, token: object) -> bool:
        """Return whether `token` is this run's, in constant time for strings of the right length."""
        return (
            type(token) is str
            and len(token) == len(self.token)
            and hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token_bytes)
        )

    def has_seen(self, call_id: int) -> bool:
        """Return whether `call_id` is in flight, answered or recovered (behaviour 5.1, step 3)."""
        return call_id in self._seen

    @property
    def has_slot(self) -> bool:
        return self.stats.calls < self.limits.max_rpc_calls

    def refuse_slot(self, call_id: int) -> None:
        """Remember an id that was refused for want of a slot (behaviour 5.1, step 4)."""
        if self._refusals < MAX_REMEMBERED_REFUSALS:
            self._refusals += 1
            self._seen.add(call_id)

    def spend_slot(self, call_id: int) -> None:
        """Spend the slot of `call_id`, once however often it is called.

        The replay memory is the de-duplication key (behaviour 5.6): recovery spends again what a pass that
        died may or may not have spent.
        """
        if call_id not in self._seen:
            self._seen.add(call_id)
            self.stats.calls += 1

    @property
    def remaining_bytes(self) -> int:
        return self.limits.max_rpc_result_bytes - self.stats.bytes

    def take_text(self, number: int, text: str) -> str | None:
        """Keep block `number`, or return why not; a refused block costs nothing (behaviour 5.7)."""
        more = text_charge_bytes(number, len(json.dumps(text)))
        cap = self.limits.max_text_bytes
        if self._text_bytes + more > cap:
            return text_over_budget(self._text_bytes, more, cap)
        self._text_bytes += more
        self._blocks.append((number, text))
        return None

    @property
    def text_blocks(self) -> list[str]:
        """The blocks in ascending number; those a script gave one number stay in order of arrival."""
        return [text for _, text in sorted(self._blocks, key=lambda block: block[0])]

    def take_notify(self) -> bool:
        """Return whether one more notify may be forwarded, and count it (behaviour 5.7)."""
        if self.stats.notify_forwarded >= MAX_FORWARDED_NOTIFIES:
            return False
        self.stats.notify_forwarded += 1
        return True
