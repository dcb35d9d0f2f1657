"""One dispatcher with doubles round it: gates for tools, a list for a carrier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Literal

from lemon_kernel.bridge.dispatch import (
    Answer,
    Authorize,
    Call,
    Dispatcher,
    Faults,
    Limits,
    PolicyCheck,
    allow_all,
)
from lemon_kernel.helpers.base import HelperContext, HelperResult
from lemon_kernel.scope import AbortSignal

LIMITS = Limits(max_rpc_calls=100, max_rpc_result_bytes=5_242_880, max_text_bytes=65_536, max_parallel_rpc=4)
HELPERS = ("read", "grep", "find", "ls", "webfetch")

Point = Literal[
    "before_spend",
    "after_spend",
    "after_claim",
    "mid_dispatch",
    "after_answer",
    "accounting",
    "settlement",
]


class Death(BaseException):
    """What kills a pass, as opposed to an exception that it contains."""


class FaultPlan(Faults):
    """Breaks at the armed point, once."""

    def __init__(self) -> None:
        self.armed: dict[str, BaseException] = {}
        self.reached: list[str] = []

    def _reach(self, point: str) -> None:
        self.reached.append(point)
        fault = self.armed.pop(point, None)
        if fault is not None:
            raise fault

    def before_spend(self, call_id: int) -> None:
        self._reach("before_spend")

    def after_spend(self, call_id: int) -> None:
        self._reach("after_spend")

    def after_claim(self, call_id: int) -> None:
        self._reach("after_claim")

    def mid_dispatch(self, call_id: int) -> None:
        self._reach("mid_dispatch")

    def after_answer(self, call_id: int) -> None:
        self._reach("after_answer")

    def accounting(self, call_id: int) -> None:
        self._reach("accounting")

    def settlement(self, call_id: int) -> None:
        self._reach("settlement")


class Bridge:
    """A dispatcher, the answers it gave, and the gates of the calls that wait for the test.

    ``read`` returns ``params["size"]`` bytes (default: 3), ``grep`` waits for its gate and then does what the
    gate's future says, ``find`` raises ValueError with ``params["message"]``, ``ls`` and ``webfetch`` return
    their own name.
    """

    def __init__(
        self,
        *,
        limits: Limits = LIMITS,
        helpers: tuple[str, ...] = HELPERS,
        policy: PolicyCheck = allow_all,
        authorize: Authorize | None = None,
        on_notify: Callable[[str], None] | None = None,
        release_approval: Callable[[str], object] | None = None,
        faults: Faults | None = None,
        invoke: Callable[[Call, HelperContext], object] | None = None,
    ) -> None:
        self.abort = AbortSignal()
        self.answers: list[Answer] = []
        self.gates: dict[int, asyncio.Future[str | HelperResult]] = {}
        self.started: list[int] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.contexts: list[HelperContext] = []
        self.auth_denied = 0
        self._arrival = asyncio.Event()
        self._next_id = 0
        self.dispatcher = Dispatcher(
            cell="1",
            limits=limits,
            helpers=helpers,
            invoke=invoke or self.invoke,  # type: ignore[arg-type]
            cwd="/",
            policy=policy,
            authorize=authorize,
            on_notify=on_notify,
            on_auth_denied=self._count_denied,
            abort=self.abort,
            faults=faults,
            release_approval=release_approval,
        )
        self.dispatcher.connect(self._take)

    @property
    def token(self) -> str:
        return self.dispatcher.token

    def _take(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._arrival.set()

    def _count_denied(self) -> None:
        self.auth_denied += 1

    async def invoke(self, call: Call, context: HelperContext) -> str | HelperResult:
        self.started.append(call.id)
        self.contexts.append(context)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if call.tool == "read":
                size = call.params.get("size", 3)
                assert isinstance(size, int)
                return "x" * size
            if call.tool == "grep":
                gate = self.gates[call.id] = asyncio.get_running_loop().create_future()
                return await gate
            if call.tool == "find":
                raise ValueError(call.params.get("message", "find failed"))
            return call.tool
        finally:
            self.in_flight -= 1

    def send(self, frame: dict[str, object] | bytes) -> None:
        self.dispatcher.receive(frame if isinstance(frame, bytes) else json.dumps(frame).encode())

    def call(self, tool: object = "read", params: object = None, **changes: object) -> int:
        """Send a call with the next id; `changes` replace or, with Ellipsis, remove fields."""
        self._next_id += 1
        frame: dict[str, object] = {
            "type": "call",
            "cell": "1",
            "id": self._next_id,
            "token": self.token,
            "tool": tool,
            "params": params if params is not None else {},
        }
        frame |= changes
        self.send({key: value for key, value in frame.items() if value is not ...})
        return self._next_id

    def text(self, number: object, text: object, **changes: object) -> int:
        self._next_id += 1
        frame: dict[str, object] = {"type": "text", "cell": "1", "id": self._next_id, "n": number}
        self.send(frame | {"token": self.token, "text": text} | changes)
        return self._next_id

    def notify(self, message: object, **changes: object) -> int:
        self._next_id += 1
        frame: dict[str, object] = {"type": "notify", "cell": "1", "id": self._next_id, "token": self.token}
        self.send(frame | {"msg": message} | changes)
        return self._next_id

    def answers_to(self, call_id: int) -> list[Answer]:
        return [answer for answer in self.answers if answer.id == call_id]

    async def answer(self, call_id: int) -> Answer:
        """Wait for the first answer to `call_id`."""
        while not (found := self.answers_to(call_id)):
            self._arrival.clear()
            await self._arrival.wait()
        return found[0]

    async def settle(self) -> None:
        """Let everything run that can."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def ask(self, tool: object = "read", params: object = None, **changes: object) -> Answer:
        call_id = self.call(tool, params, **changes)
        sent_id = changes.get("id", call_id)
        assert isinstance(sent_id, int)
        return await self.answer(sent_id)
