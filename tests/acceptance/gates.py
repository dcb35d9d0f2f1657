"""Helper doubles that hold calls until a test lets them go."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from lemon_kernel import HelperContext, HelperError

from .conftest import wait_until


@dataclass
class Held:
    """One call that has arrived at the gate."""

    params: Mapping[str, object]
    context: HelperContext
    outcome: concurrent.futures.Future[str] = field(default_factory=concurrent.futures.Future)

    def release(self, content: str = "") -> None:
        self.outcome.set_result(content)

    def fail(self, message: str) -> None:
        self.outcome.set_exception(HelperError(message))


class Gate:
    """A helper that answers nothing until told to; safe to be told from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held: list[Held] = []
        """Every call so far, in order of arrival."""
        self.in_flight = 0
        self.most_in_flight = 0

    async def __call__(self, params: Mapping[str, object], context: HelperContext) -> str:
        call = Held(params, context)
        with self._lock:
            self.held.append(call)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await asyncio.wrap_future(call.outcome)
        finally:
            with self._lock:
                self.in_flight -= 1

    def wait_for(self, count: int) -> list[Held]:
        """Wait until `count` calls have arrived, and return all that have."""
        wait_until(lambda: len(self.held) >= count, 20, f"arrival of {count} calls")
        return self.held[:]

    def call(self, path: str) -> Held:
        """Wait for the call whose ``path`` parameter is `path`."""
        wait_until(lambda: any(call.params.get("path") == path for call in self.held), 20, path)
        return next(call for call in self.held if call.params.get("path") == path)
