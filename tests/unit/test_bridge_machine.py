"""Random frames, faults and ends against a reference model small enough to be read in one sitting.

The model knows the papers (behaviour 5.1 to 5.7), not the code: it runs one event at a time to its end, keeps
its queue in a list, and counts where the papers say a thing counts.  ``make soak`` runs 2,000 examples
(``LEMON_TEST_SOAK=1``).
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lemon_shim.wire import INTERRUPTED

from lemon_kernel.bridge.dispatch import Answer, Limits, Stats

from ..conftest import SOAK
from .bridge_harness import HELPERS, Bridge, Death, FaultPlan

POINTS = ("before_spend", "after_spend", "after_claim", "mid_dispatch", "after_answer", "accounting")
FAILED = "rpc request failed"
ALREADY = "rpc request already processed"
INVALID = "invalid rpc request"
UNAUTHENTICATED = "rpc authentication failed"
DENIED = "Tool 'ls' is in deny list"
UNICODE = st.characters(exclude_categories=["Cs"])


def deny_ls(tool: str) -> str | None:
    return DENIED if tool == "ls" else None


@dataclass
class Model:
    """What must come out: stats, answers in order, blocks, and who runs."""

    limits: Limits
    stats: Stats = field(default_factory=Stats)
    answers: list[Answer] = field(default_factory=list)
    blocks: list[tuple[int, str]] = field(default_factory=list)
    forwarded: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    queue: list[tuple[int, str, int]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    faults: dict[str, BaseException] = field(default_factory=dict)
    charged: int = 0

    def breaks(self, *points: str) -> BaseException | None:
        """Return the fault armed at the first of `points` that has one; it fires once and stamps the loss."""
        for point in points:
            if point in self.faults:
                self.stats.accounting_loss = True
                return self.faults.pop(point)
        return None

    def answer(self, call_id: int, ok: bool, content: str) -> None:
        self.answers.append(Answer(call_id, ok, content))

    def fail(self, call_id: int, content: str, *, denied: bool = False) -> None:
        self.answer(call_id, False, content)
        if denied:
            self.stats.denied += 1
        else:
            self.stats.errors += 1

    def conclude(self, call_id: int, content: str, *, denied: bool = False) -> None:
        self.fail(call_id, content, denied=denied)
        self.breaks("after_answer", "accounting")

    def call(self, call_id: int, tool: object, size: int) -> None:
        if call_id in self.seen:
            self.fail(call_id, ALREADY)
            return
        self.seen.add(call_id)
        if self.stats.calls >= self.limits.max_rpc_calls:
            limit = self.limits.max_rpc_calls
            self.fail(call_id, f"rpc call limit exceeded (max {limit} calls per script)")
            return
        self.stats.calls += 1
        if self.breaks("before_spend", "after_spend"):
            self.fail(call_id, FAILED)
        elif not isinstance(tool, str):
            self.conclude(call_id, INVALID)
        elif tool not in HELPERS:
            self.conclude(call_id, f"tool '{tool}' is not available inside execute_code scripts")
        elif tool == "ls":
            self.conclude(call_id, DENIED, denied=True)
        elif self.breaks("after_claim"):
            self.fail(call_id, INTERRUPTED)
        else:
            self.queue.append((call_id, tool, size))
            self.pump()

    def pump(self) -> None:
        while self.queue and len(self.running) < self.limits.max_parallel_rpc:
            call_id, tool, size = self.queue.pop(0)
            if tool == "grep":
                self.running.append(call_id)
            elif tool == "find":
                self.finish(call_id, tool, None)
            else:
                self.finish(call_id, tool, size)

    def finish(self, call_id: int, tool: str, size: int | None) -> None:
        """The tool of a claimed call has returned `size` bytes, or failed."""
        remaining = self.limits.max_rpc_result_bytes - self.stats.bytes
        fault = self.breaks("mid_dispatch")
        if fault is not None:
            self.fail(call_id, FAILED if isinstance(fault, Exception) else INTERRUPTED)
        elif size is None:
            self.conclude(call_id, "find failed" if tool == "find" else "gate failed")
        elif size > remaining:
            text = f"(result {size} bytes, {remaining} bytes remaining of {self.limits.max_rpc_result_bytes})"
            self.conclude(call_id, f"rpc result byte budget exceeded {text}")
        else:
            self.answer(call_id, True, "x" * size)
            self.stats.bytes += size
            self.stats.tools_used.add(tool)
            self.breaks("after_answer", "accounting")

    def release(self, call_id: int, size: int | None) -> None:
        self.running.remove(call_id)
        self.finish(call_id, "grep", size)
        self.pump()

    def text(self, frame_id: int, number: int, text: str) -> None:
        cost, cap = len(json.dumps({"n": number, "text": text})), self.limits.max_text_bytes
        if self.charged + cost <= cap:
            self.charged += cost
            self.blocks.append((number, text))
            self.answer(frame_id, True, "")
        else:
            told = f"({self.charged} bytes accumulated, {cost} more requested, cap {cap})"
            self.answer(frame_id, False, f"text() byte budget exceeded {told}")

    def notify(self, frame_id: int, message: str) -> None:
        if len(self.forwarded) < 64:
            self.forwarded.append(message)
            self.stats.notify_forwarded += 1
        self.answer(frame_id, True, "")

    def end(self) -> None:
        for call_id in [*self.running, *(queued[0] for queued in self.queue)]:
            self.stats.accounting_loss = True
            self.fail(call_id, INTERRUPTED)


class BridgeMachine(RuleBasedStateMachine):
    """Drives a real dispatcher on its own loop and the model beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        logging.disable()  # hundreds of faults on purpose
        self.next_id = 0
        self.open = False

    @initialize(
        calls=st.integers(1, 12),
        result_bytes=st.sampled_from([10, 50, 10_000]),
        text_bytes=st.sampled_from([30, 100, 5000]),
        parallel=st.integers(1, 3),
    )
    def start(self, calls: int, result_bytes: int, text_bytes: int, parallel: int) -> None:
        limits = Limits(calls, result_bytes, text_bytes, parallel)
        self.faults = FaultPlan()
        self.model = Model(limits)
        self.forwarded: list[str] = []
        self.bridge = Bridge(
            limits=limits, policy=deny_ls, on_notify=self.forwarded.append, faults=self.faults
        )
        self.open = True

    def settle(self) -> None:
        self.loop.run_until_complete(self.bridge.settle())

    def act(self, frame: dict[str, object] | bytes) -> None:
        async def send() -> None:
            self.bridge.send(frame)

        self.loop.run_until_complete(send())
        self.settle()

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def call_frame(self, call_id: int, tool: object, size: int) -> dict[str, object]:
        params = {"size": size} if tool == "read" else None
        frame = {"type": "call", "id": call_id, "token": self.bridge.token, "tool": tool}
        return frame | {"params": params}

    @rule(
        tool=st.sampled_from(["read", "read", "grep", "grep", "find", "ls", "bash", 42, None]),
        size=st.integers(0, 30),
        replay=st.integers(0, 20),
    )
    def call(self, tool: object, size: int, replay: int) -> None:
        call_id = replay if 1 <= replay <= self.next_id else self.new_id()
        if self.open:
            self.model.call(call_id, tool, size)
        self.act(self.call_frame(call_id, tool, size))

    @precondition(lambda self: self.open and self.model.running)
    @rule(data=st.data(), size=st.none() | st.integers(0, 30))
    def release(self, data: st.DataObject, size: int | None) -> None:
        call_id = data.draw(st.sampled_from(self.model.running))
        gate = self.bridge.gates[call_id]
        self.model.release(call_id, size)
        if size is None:
            gate.set_exception(RuntimeError("gate failed"))
        else:
            gate.set_result("x" * size)
        self.settle()

    @rule(kind=st.sampled_from(["call", "text"]), token=st.sampled_from(["", "no", None, 42, {}, "x" * 43]))
    def forge(self, kind: str, token: object) -> None:
        frame_id = self.new_id()
        if self.open:
            self.model.fail(frame_id, UNAUTHENTICATED, denied=True)
        self.act({"type": kind, "id": frame_id, "token": token, "tool": "read", "n": 1, "text": "forged"})

    @rule(frame=st.binary(max_size=40) | st.sampled_from([b"{}", b"[]", b'{"type": "call"}']))
    def junk(self, frame: bytes) -> None:
        if self.open:
            self.model.stats.denied += 1
        self.act(frame)

    @rule(size=st.sampled_from([262_145, 400_000]))
    def oversized(self, size: int) -> None:
        frame_id = self.new_id()
        frame = self.call_frame(frame_id, "read", 1)
        if self.open:
            self.model.fail(frame_id, INVALID)
        self.act(frame | {"params": {"path": "x" * size}})

    @rule(number=st.integers(1, 200), text=st.text(UNICODE, max_size=30))
    def text(self, number: int, text: str) -> None:
        frame_id = self.new_id()
        if self.open:
            self.model.text(frame_id, number, text)
        frame = {"type": "text", "id": frame_id, "n": number, "token": self.bridge.token, "text": text}
        self.act(frame)

    @rule(message=st.text(UNICODE, max_size=30), times=st.integers(1, 30))
    def notify(self, message: str, times: int) -> None:
        for _ in range(times):
            frame_id = self.new_id()
            if self.open:
                self.model.notify(frame_id, message)
            self.act({"type": "notify", "id": frame_id, "token": self.bridge.token, "msg": message})

    @precondition(lambda self: self.open)
    @rule(point=st.sampled_from(POINTS), deadly=st.booleans(), settlement=st.booleans())
    def arm(self, point: str, deadly: bool, settlement: bool) -> None:
        fault = Death() if deadly else RuntimeError("fault")
        self.faults.armed = {point: fault}
        self.model.faults = {point: fault}
        if settlement:  # must make no difference
            self.faults.armed["settlement"] = RuntimeError("fault")

    @precondition(lambda self: self.open)
    @rule(killed=st.booleans())
    def end(self, killed: bool) -> None:
        self.close(killed)

    def close(self, killed: bool) -> None:
        self.faults.armed.clear()
        self.model.end()
        self.loop.run_until_complete(self.bridge.dispatcher.close(killed=killed))
        self.open = False
        self.check()

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "bridge"):
            return
        stats = self.loop.run_until_complete(self.read_stats())
        assert stats == self.model.stats
        assert self.by_id(self.bridge.answers) == self.by_id(self.model.answers)
        assert self.bridge.dispatcher.text_blocks == [
            text for _, text in sorted(self.model.blocks, key=lambda block: block[0])
        ]
        assert self.forwarded == self.model.forwarded
        assert self.bridge.max_in_flight <= self.model.limits.max_parallel_rpc
        if self.open:
            assert set(self.bridge.gates) >= set(self.model.running)
            assert self.bridge.in_flight == len(self.model.running)
            in_ledger = len(self.bridge.dispatcher._ledger)
            assert in_ledger == len(self.model.running) + len(self.model.queue)

    async def read_stats(self) -> Stats:
        """Return the stats so far; a run that is going on has them inside."""
        return self.bridge.dispatcher._authority.stats

    @staticmethod
    def by_id(answers: list[Answer]) -> dict[int, list[Answer]]:
        """Group by id: between ids the order is that of completion, within one it is fixed."""
        grouped: dict[int, list[Answer]] = {}
        for answer in answers:
            grouped.setdefault(answer.id, []).append(answer)
        return grouped

    def teardown(self) -> None:
        try:
            if self.open:
                self.close(killed=True)
                self.act(self.call_frame(self.new_id(), "read", 1))
                self.check()
        finally:
            self.loop.close()
            logging.disable(logging.NOTSET)


TestBridgeMachine = pytest.mark.timeout(3600 if SOAK else 300)(BridgeMachine.TestCase)
TestBridgeMachine.settings = settings(
    max_examples=2000 if SOAK else 100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
