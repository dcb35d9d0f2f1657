"""Ledger: a fault at any point of a request costs exactly one settlement (behaviour 5.6)."""

from __future__ import annotations

import asyncio

import pytest
from lemon_shim.wire import INTERRUPTED

from lemon_kernel.bridge.cell import Authority, Stats
from lemon_kernel.bridge.dispatch import Answer
from lemon_kernel.bridge.ledger import Disposition, Entry, Ledger

from .bridge_harness import LIMITS, Bridge, Death, FaultPlan

FAILED = "rpc request failed"
NOT_AVAILABLE = "tool 'bash' is not available inside execute_code scripts"

KINDS = [RuntimeError, Death]


def deny_ls(tool: str) -> str | None:
    return "Tool 'ls' is in deny list" if tool == "ls" else None


@pytest.mark.parametrize(
    ("disposition", "answer", "is_denial", "text", "expected"),
    [
        (Disposition.CLAIMED, Answer(7, True, "abc"), False, "abc", Stats(1, bytes=3, tools_used={"read"})),
        (Disposition.CLAIMED, Answer(7, False, "no"), False, "no", Stats(1, errors=1)),
        (Disposition.CLAIMED, Answer(7, False, "no"), True, "no", Stats(1, denied=1)),
        (Disposition.CLAIMED, None, False, INTERRUPTED, Stats(1, errors=1, accounting_loss=True)),
        (Disposition.DENIED, None, False, "tool 'read' denied by policy", Stats(1, denied=1)),
        (Disposition.DENIED, Answer(7, False, "why"), True, "why", Stats(1, denied=1)),
        (Disposition.INVALID, None, False, "invalid rpc request", Stats(1, errors=1)),
        (
            Disposition.UNKNOWN_TOOL,
            None,
            False,
            "tool 'read' is not available inside execute_code scripts",
            Stats(1, errors=1),
        ),
        (Disposition.RESERVED, None, False, FAILED, Stats(1, errors=1)),
    ],
)
@pytest.mark.parametrize("spent", [False, True])
def test_every_row_of_the_table(
    disposition: Disposition,
    answer: Answer | None,
    is_denial: bool,
    text: str,
    expected: Stats,
    spent: bool,
) -> None:
    """Each row settles as the table says, once, whether or not the slot had been spent."""
    authority = Authority(LIMITS)
    ledger = Ledger(authority)
    entry = ledger.reserve(7)
    entry.disposition, entry.tool, entry.answer, entry.is_denial = disposition, "read", answer, is_denial
    entry.size_bytes = 3
    if spent:
        authority.spend_slot(7)
    for _ in range(2):
        ledger.settle(entry)

    assert entry.answer is not None
    assert (entry.answer.id, entry.answer.content) == (7, text)
    assert authority.stats == expected
    assert authority.has_seen(7)
    assert not ledger.holds(entry)
    assert len(ledger) == 0


def test_an_entry_of_another_pass_is_not_held() -> None:
    """An entry is held by identity: an equal id does not make it this ledger's."""
    ledger = Ledger(Authority(LIMITS))
    ledger.reserve(7)
    assert not ledger.holds(Entry(7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("point", "tool", "text", "expected"),
    [
        ("before_spend", "read", FAILED, Stats(1, errors=1)),
        ("after_spend", "read", FAILED, Stats(1, errors=1)),
        ("after_claim", "read", INTERRUPTED, Stats(1, errors=1)),
        ("mid_dispatch", "read", None, Stats(1, errors=1)),
        ("after_answer", "read", "xxx", Stats(1, bytes=3, tools_used={"read"})),
        ("accounting", "read", "xxx", Stats(1, bytes=3, tools_used={"read"})),
        ("after_answer", "find", "find failed", Stats(1, errors=1)),
        ("accounting", "bash", NOT_AVAILABLE, Stats(1, errors=1)),
        ("after_answer", 42, "invalid rpc request", Stats(1, errors=1)),
        ("accounting", "ls", "Tool 'ls' is in deny list", Stats(1, denied=1)),
    ],
)
@pytest.mark.case(172)
def test_a_fault_costs_its_call_exactly_once(
    kind: type[BaseException], point: str, tool: object, text: str | None, expected: Stats
) -> None:
    """Wherever a pass breaks, its call is answered once and counted once, the loss is stamped, service goes on."""

    async def main() -> None:
        faults = FaultPlan()
        bridge = Bridge(faults=faults, policy=deny_ls)
        before = await bridge.ask("webfetch")
        faults.armed[point] = kind("fault")
        broken = bridge.call(tool)
        await bridge.settle()
        assert not faults.armed
        replay = bridge.call(tool, id=broken)
        after = await bridge.ask("webfetch")
        stats = await bridge.dispatcher.close(killed=False)

        # a crash of the dispatch task is its own answer, its death is an interruption
        expected_text = text if text is not None else (FAILED if kind is RuntimeError else INTERRUPTED)
        answers = bridge.answers_to(broken)
        assert [a.content for a in answers] == [expected_text, "rpc request already processed"]
        assert before.ok
        assert after.ok
        assert replay == broken + 1
        assert stats == Stats(
            calls=expected.calls + 2,
            denied=expected.denied,
            errors=expected.errors + 1,
            bytes=expected.bytes + 16,
            tools_used=expected.tools_used | {"webfetch"},
            accounting_loss=True,
        )

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_during_settlement_settles_all_the_same(kind: type[BaseException]) -> None:
    """Recovery survives its own fault: nothing is lost and nothing is counted twice."""

    async def main() -> None:
        faults = FaultPlan()
        bridge = Bridge(faults=faults)
        faults.armed = {"after_claim": kind(), "settlement": kind()}
        answer = await bridge.ask()
        stats = await bridge.dispatcher.close(killed=False)

        assert answer.content == INTERRUPTED
        assert stats == Stats(calls=1, errors=1, accounting_loss=True)
        assert len(bridge.answers) == 1

    asyncio.run(main())


def test_the_remaining_budget_is_exact_after_faults() -> None:
    """No fault gives a script a free call, and none costs it one it did not make."""

    async def main() -> None:
        faults = FaultPlan()
        bridge = Bridge(faults=faults, limits=type(LIMITS)(5, 1000, 1000, 4))
        for point in ("before_spend", "after_spend", "after_claim"):
            faults.armed[point] = Death()
            bridge.call()
        answers = [await bridge.ask() for _ in range(3)]
        stats = await bridge.dispatcher.close(killed=False)

        assert [answer.ok for answer in answers] == [True, True, False]
        assert (stats.calls, stats.errors, len(bridge.started)) == (5, 4, 2)

    asyncio.run(main())


def test_a_fault_of_a_queued_call_is_its_own() -> None:
    """What breaks while a place is filled again is charged to the call that got it, not to the one that left."""

    async def main() -> None:
        faults = FaultPlan()
        bridge = Bridge(faults=faults, limits=type(LIMITS)(5, 1000, 1000, 1))
        first, second = bridge.call("grep"), bridge.call("read")
        await bridge.settle()
        bridge.gates[first].set_result("fine")
        await bridge.settle()
        faults.armed["mid_dispatch"] = RuntimeError()
        third = await bridge.ask("read")
        stats = await bridge.dispatcher.close(killed=False)

        assert [(a.id, a.content) for a in bridge.answers[:2]] == [(first, "fine"), (second, "xxx")]
        assert third.content == FAILED
        assert (stats.calls, stats.errors, stats.bytes) == (3, 1, 7)

    asyncio.run(main())


def test_a_normal_run_reaches_every_point_but_settlement() -> None:
    """The seam fires in the order of the steps, and costs nothing when nothing breaks."""

    async def main() -> None:
        faults = FaultPlan()
        bridge = Bridge(faults=faults)
        await bridge.ask()
        await bridge.dispatcher.close(killed=False)
        assert faults.reached == [
            "before_spend",
            "after_spend",
            "after_claim",
            "mid_dispatch",
            "after_answer",
            "accounting",
        ]

    asyncio.run(main())
