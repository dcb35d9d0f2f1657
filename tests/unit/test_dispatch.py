"""Dispatcher: the order of decisions, dispatch, budgets, channels, the end of a run (behaviour 5)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest
from lemon_shim.wire import INTERRUPTED, MAX_FRAME_BYTES

from lemon_kernel.bridge import cell, dispatch
from lemon_kernel.bridge.dispatch import Call, Denial, Limits, Stats
from lemon_kernel.helpers.base import HelperContext, HelperResult

from .bridge_harness import LIMITS, Bridge, Death


def limits(**changes: int) -> Limits:
    return Limits(**(vars(LIMITS) | changes))


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await main()

    asyncio.run(whole())


# Calls


def test_a_call_runs_its_tool_and_is_answered_and_charged() -> None:
    """A call that is allowed reaches its tool with id, params and context, and is charged by its size."""

    async def main() -> None:
        seen: list[tuple[Call, HelperContext]] = []

        async def invoke(call: Call, context: HelperContext) -> str:
            seen.append((call, context))
            return "höflich"

        bridge = Bridge(invoke=invoke)
        answer = await bridge.ask("read", {"path": "x"})
        stats = await bridge.dispatcher.close(killed=False)

        assert (answer.ok, answer.content) == (True, "höflich")
        call, context = seen[0]
        assert (call.id, call.tool, call.params) == (answer.id, "read", {"path": "x"})
        assert (context.call_id, context.cwd) == (f"exec_code_rpc_{answer.id}", "/")
        assert stats == Stats(calls=1, bytes=8, tools_used={"read"})

    run(main)


@pytest.mark.case(149)
def test_the_call_cap_is_exact() -> None:
    """Of four calls with room for two, two run, and the rest cost an error but no slot."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_rpc_calls=2))
        answers = [await bridge.ask("ls") for _ in range(4)]
        stats = await bridge.dispatcher.close(killed=False)

        assert [answer.ok for answer in answers] == [True, True, False, False]
        assert answers[3].content == "rpc call limit exceeded (max 2 calls per script)"
        assert (stats.calls, stats.errors) == (2, 2)

    run(main)


@pytest.mark.case(151, 152)
@pytest.mark.parametrize(
    ("sizes", "texts", "charged", "errors"),
    [
        (
            (60, 60, 40, 1),
            {
                1: "rpc result byte budget exceeded (result 60 bytes, 40 bytes remaining of 100)",
                3: "rpc result byte budget exceeded (result 1 bytes, 0 bytes remaining of 100)",
            },
            100,
            2,
        ),
        (
            (150, 5),
            {0: "rpc result byte budget exceeded (result 150 bytes, 100 bytes remaining of 100)"},
            5,
            1,
        ),
    ],
)
def test_the_byte_budget_refuses_what_does_not_fit(
    sizes: tuple[int, ...], texts: dict[int, str], charged: int, errors: int
) -> None:
    """A result that does not fit is refused and not charged; a smaller one may still fit, also exactly."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_rpc_result_bytes=100))
        answers = [await bridge.ask("read", {"size": size}) for size in sizes]
        stats = await bridge.dispatcher.close(killed=False)

        for index, answer in enumerate(answers):
            assert answer.ok is (index not in texts)
            assert answer.content == texts.get(index, "x" * sizes[index])
        assert (stats.bytes, stats.errors, stats.calls) == (charged, errors, len(sizes))

    run(main)


def test_a_refused_result_does_not_count_as_use_of_the_tool() -> None:
    """A result over the byte budget adds no tool to those used, though the tool has run."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_rpc_result_bytes=2))
        await bridge.ask("webfetch")
        stats = await bridge.dispatcher.close(killed=False)

        assert (stats.tools_used, len(bridge.started)) == (set(), 1)

    run(main)


@pytest.mark.case(154, 155)
@pytest.mark.parametrize("tool", ["bash", "write", "edit", "execute_code", "grep", ""])
def test_an_unknown_or_disabled_tool_is_not_available(tool: str) -> None:
    """What is not among the enabled helpers costs its slot and an error."""

    async def main() -> None:
        bridge = Bridge(helpers=("read",))
        answer = await bridge.ask(tool)
        stats = await bridge.dispatcher.close(killed=False)

        assert answer.content == f"tool '{tool}' is not available inside execute_code scripts"
        assert stats == Stats(calls=1, errors=1)

    run(main)


@pytest.mark.case(156)
@pytest.mark.parametrize("exhausted", [False, True])
def test_bad_tokens_are_all_refused_alike(exhausted: bool) -> None:
    """Every kind of wrong token gets one text, costs no slot and remembers no id, with slots left or not."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_rpc_calls=1))
        stale = Bridge().token
        if exhausted:
            await bridge.ask("ls")
        bad: list[object] = [..., "wrong", "w" * 43, stale, None, 42, {}, "ü" * 43, "\ud800" * 43]
        answers = [await bridge.ask("ls", token=token, id=77 + index) for index, token in enumerate(bad)]
        bridge.call("ls", id=77)
        await bridge.settle()
        stats = await bridge.dispatcher.close(killed=False)

        assert {answer.content for answer in answers} == {"rpc authentication failed"}
        assert (stats.denied, bridge.auth_denied) == (len(bad), len(bad))
        assert bridge.answers_to(77)[1].ok is not exhausted
        assert stats.calls == 1

    run(main)


@pytest.mark.case(159)
def test_a_replayed_id_is_refused() -> None:
    """An id that was answered, is in flight, or was refused for want of a slot is not taken again."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_rpc_calls=2))
        await bridge.ask("ls", id=7)
        bridge.call("ls", id=7)
        bridge.call("grep", id=8)
        bridge.call("grep", id=8)
        bridge.call("ls", id=9)
        bridge.call("ls", id=9)
        await bridge.settle()

        assert [answer.content for answer in bridge.answers_to(7)] == ["ls", "rpc request already processed"]
        assert [answer.content for answer in bridge.answers_to(8)] == ["rpc request already processed"]
        assert [answer.content for answer in bridge.answers_to(9)] == [
            "rpc call limit exceeded (max 2 calls per script)",
            "rpc request already processed",
        ]
        assert bridge.started == [7, 8]
        bridge.gates[8].set_result("done")
        await bridge.settle()
        stats = await bridge.dispatcher.close(killed=False)

        assert (stats.calls, stats.errors, stats.accounting_loss) == (2, 4, False)

    run(main)


@pytest.mark.case(160)
@pytest.mark.parametrize(
    "frame",
    [
        b"not JSON",
        b"[1]",
        b'"call"',
        b"",
        b"\xff\xfe",
        b"null",
        b"{}",
        b'{"type": 1}',
        b'{"type": "call"}',
        b'{"type": "call", "id": true}',
        b'{"type": "call", "id": 1.0}',
        b'{"type": "call", "id": 0}',
        b'{"type": "call", "id": -1}',
        b'{"type": "call", "id": 9007199254740993}',
        b'{"type": "call", "id": "1"}',
        b'{"type": "open", "id": 1, "request": "x"}',
        b'{"type": "dance", "id": 1}',
        '{"type": "call", "id": 1'.encode("utf-16"),
        b'{"type": "call" "id": 1}',
    ],
)
def test_a_malformed_frame_is_denied_without_an_answer(frame: bytes) -> None:
    """What is no frame at all counts as denied, spends nothing, and the bridge goes on."""

    async def main() -> None:
        bridge = Bridge()
        bridge.send(frame)
        unanswered = [answer for answer in bridge.answers if answer.content != "rpc authentication failed"]
        assert (bridge.answers, unanswered, bridge.auth_denied) == ([], [], 1)
        assert (await bridge.ask("ls")).ok
        stats = await bridge.dispatcher.close(killed=False)

        assert stats == Stats(calls=1, denied=1, bytes=2, tools_used={"ls"})

    run(main)


@pytest.mark.case(161)
@pytest.mark.parametrize(
    "changes",
    [
        {"tool": 42},
        {"tool": ...},
        {"params": [1]},
        {"params": "x"},
        {"params": {"path": "a\ud800b"}},
        {"params": {"\udfff": 1}},
        {"tool": "\ud800"},
    ],
)
def test_a_malformed_call_costs_its_slot(changes: dict[str, object]) -> None:
    """A call without a string tool or an object of params, or with a surrogate in it, is an invalid request."""

    async def main() -> None:
        bridge = Bridge()
        answer = await bridge.ask(**changes)
        stats = await bridge.dispatcher.close(killed=False)

        assert (answer.ok, answer.content) == (False, "invalid rpc request")
        assert stats == Stats(calls=1, errors=1)

    run(main)


@pytest.mark.case(162)
@pytest.mark.parametrize("params", [..., None])
def test_absent_params_are_no_params(params: object) -> None:
    """Params that are missing or null reach the tool as an empty object."""

    async def main() -> None:
        seen: list[dict[str, object]] = []

        async def invoke(call: Call, context: HelperContext) -> str:
            seen.append(call.params)
            return ""

        bridge = Bridge(invoke=invoke)
        assert (await bridge.ask(params=params) if params is ... else await bridge.ask(params=None)).ok
        assert seen == [{}]
        await bridge.dispatcher.close(killed=False)

    run(main)


@pytest.mark.parametrize(
    "value",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 40_000 + "1" + "}" * 40_000,
        "1" * 5000,
        "-" + "9" * 200_000,
    ],
    ids=["arrays", "objects", "digits", "many digits"],
)
def test_values_that_cannot_be_held_are_refused_with_an_answer(value: str) -> None:
    """Params too deep or too long for this host are answered: a thread of the script is waiting."""

    async def main() -> None:
        bridge = Bridge()
        head = json.dumps({"type": "call", "id": 5, "token": bridge.token, "tool": "ls"})
        bridge.send((head[:-1] + ', "params": {"x": ' + value + "}}").encode())
        assert [(a.id, a.content) for a in bridge.answers] == [(5, "invalid rpc request")]
        assert (await bridge.ask("ls")).ok
        stats = await bridge.dispatcher.close(killed=False)

        assert (stats.calls, stats.errors, stats.denied, stats.accounting_loss) == (1, 1, 0, False)

    run(main)


def test_strange_but_readable_json_reaches_the_tool() -> None:
    """NaN, duplicate keys, and escaped pairs of surrogates are read as Python reads them."""

    async def main() -> None:
        seen: list[dict[str, object]] = []

        async def invoke(call: Call, context: HelperContext) -> str:
            seen.append(call.params)
            return ""

        bridge = Bridge(invoke=invoke)
        head = json.dumps({"type": "call", "id": 5, "token": bridge.token, "tool": "ls"})[:-1]
        bridge.send((head + ', "params": {"a": NaN, "b": 1, "b": 2, "c": "\\ud83d\\ude00"}}').encode())
        assert (await bridge.answer(5)).ok
        assert seen[0]["a"] != seen[0]["a"]
        assert (seen[0]["b"], seen[0]["c"]) == (2, "\N{GRINNING FACE}")
        await bridge.dispatcher.close(killed=False)

    run(main)


@pytest.mark.case(173)
def test_an_oversized_call_is_never_dispatched() -> None:
    """A call over 256 KiB is an error and answered if its id is in its head; it costs no slot."""

    async def main() -> None:
        bridge = Bridge()
        bridge.call("read", {"path": "x" * MAX_FRAME_BYTES}, id=11)
        bridge.dispatcher.receive_oversized(b'{"type": "call", "id": 12, "token": "', 64 << 20)
        bridge.dispatcher.receive_oversized(b'{"params": {"path": "' + b"x" * 5000 + b'"id": 13', 64 << 20)
        bridge.dispatcher.receive_oversized(b'{"type": "notify", "id": 14, ', 64 << 20)
        bridge.dispatcher.receive_oversized(b'{"type": "text", "id": 15, ', 64 << 20)
        bridge.dispatcher.receive_oversized(b"\xff\x00", 64 << 20)
        await bridge.settle()
        stats = await bridge.dispatcher.close(killed=False)

        assert [(a.id, a.ok, a.content) for a in bridge.answers] == [
            (id, False, "invalid rpc request") for id in (11, 12, 15)
        ]
        assert stats == Stats(errors=4)
        assert bridge.started == []

    run(main)


def test_a_large_text_cap_admits_large_text_but_not_large_calls() -> None:
    """The frame cap of text follows max_text_bytes, that of calls does not."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_text_bytes=1_000_000))
        assert bridge.dispatcher.max_frame_bytes == 1_000_256
        text = bridge.text(1, "x" * 500_000)
        call = bridge.call("read", {"path": "x" * 500_000})
        assert (await bridge.answer(text)).ok
        assert (await bridge.answer(call)).content == "invalid rpc request"
        stats = await bridge.dispatcher.close(killed=False)
        assert (stats.calls, stats.errors) == (0, 1)

    run(main)


@pytest.mark.case(123)
@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        ("Tool 'grep' is in deny list", "Tool 'grep' is in deny list"),
        ("", "tool 'grep' denied by policy"),
        (RuntimeError("boom"), "tool 'grep' denied by policy"),
    ],
)
def test_a_policy_denial_costs_a_slot_and_counts_as_denied(verdict: object, text: str) -> None:
    """The policy's reason is the answer; a policy that raises denies too."""

    async def main() -> None:
        def policy(tool: str) -> str | None:
            if isinstance(verdict, Exception):
                raise verdict
            return str(verdict)

        bridge = Bridge(policy=policy)
        answer = await bridge.ask("grep")
        stats = await bridge.dispatcher.close(killed=False)

        assert (answer.ok, answer.content) == (False, text)
        assert stats == Stats(calls=1, denied=1)
        assert bridge.started == []

    run(main)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (ValueError("no such thing"), "no such thing"),
        (ValueError(), "ValueError"),
        (ValueError("a\udc80b"), "a\ufffdb"),
        (Unprintable(), "Unprintable"),
        (HelperResult([{"type": "text", "text": "sorry"}], is_error=True), "sorry"),
        (None, "helper 'read' returned NoneType, not text"),
        (HelperResult([None]), "'NoneType' object has no attribute 'get'"),  # type: ignore[list-item]
        (SystemExit(3), "rpc request failed"),
        (KeyboardInterrupt(), "rpc request failed"),
        (asyncio.CancelledError(), "rpc request failed"),
        (Death(), "rpc request failed"),
    ],
)
def test_a_tool_that_fails_costs_an_error_and_the_bridge_lives(outcome: object, text: str) -> None:
    """Whatever a tool raises or returns, its call is answered, and nothing is unknown about its cost."""

    async def main() -> None:
        async def invoke(call: Call, context: HelperContext) -> object:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        bridge = Bridge(invoke=invoke)
        answer = await bridge.ask("read")
        stats = await bridge.dispatcher.close(killed=False)

        assert (answer.ok, answer.content) == (False, text)
        assert stats == Stats(calls=1, errors=1)

    run(main)


def test_content_is_joined_and_made_encodable() -> None:
    """Blocks are joined with a newline, other content is named, surrogates are replaced before counting."""

    async def main() -> None:
        blocks = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "\ud800"}]

        async def invoke(call: Call, context: HelperContext) -> HelperResult:
            return HelperResult(blocks)

        bridge = Bridge(invoke=invoke)
        answer = await bridge.ask("read")
        stats = await bridge.dispatcher.close(killed=False)

        assert answer.content == "a\n[non-text content omitted]\n\ufffd"
        assert stats.bytes == len(answer.content.encode())

    run(main)


# Dispatch


@pytest.mark.case(204)
def test_no_more_than_the_limit_runs_at_once_in_order_of_arrival() -> None:
    """With room for two, five gated calls start in order, two at a time, and all complete."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_parallel_rpc=2))
        ids = [bridge.call("grep") for _ in range(5)]
        await bridge.settle()
        assert bridge.started == ids[:2]
        for call_id in ids:
            bridge.gates[call_id].set_result(str(call_id))
            await bridge.settle()
        stats = await bridge.dispatcher.close(killed=False)

        assert bridge.started == ids
        assert bridge.max_in_flight == 2
        assert [(a.id, a.content) for a in bridge.answers] == [(i, str(i)) for i in ids]
        assert (stats.calls, stats.errors) == (5, 0)

    run(main)


@pytest.mark.case(174)
def test_a_slow_call_holds_back_no_finished_one() -> None:
    """Each call is answered and charged when its own tool returns."""

    async def main() -> None:
        bridge = Bridge()
        ids = [bridge.call("grep") for _ in range(3)]
        await bridge.settle()
        for call_id in reversed(ids):
            bridge.gates[call_id].set_result(str(call_id))
            assert (await bridge.answer(call_id)).content == str(call_id)
        await bridge.dispatcher.close(killed=False)

        assert [answer.id for answer in bridge.answers] == ids[::-1]

    run(main)


@pytest.mark.case(211)
def test_one_at_a_time_serialises() -> None:
    """With room for one, the second call starts only after the first has ended."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_parallel_rpc=1))
        first, second = bridge.call("grep"), bridge.call("grep")
        await bridge.settle()
        assert bridge.started == [first]
        bridge.gates[first].set_result("")
        await bridge.settle()
        assert bridge.started == [first, second]
        bridge.gates[second].set_result("")
        await bridge.settle()
        assert (await bridge.dispatcher.close(killed=False)).errors == 0

    run(main)


@pytest.mark.parametrize(
    ("verdict", "text", "stats"),
    [
        (None, "ls", Stats(calls=1, bytes=2, tools_used={"ls"})),
        (Denial("approval denied for 'ls'"), "approval denied for 'ls'", Stats(calls=1, denied=1)),
        (RuntimeError("boom"), "approval failed for 'ls'", Stats(calls=1, denied=1)),
        (SystemExit(), "approval failed for 'ls'", Stats(calls=1, denied=1)),
        (asyncio.CancelledError(), "approval failed for 'ls'", Stats(calls=1, denied=1)),
        ("yes", "approval failed for 'ls'", Stats(calls=1, denied=1)),
    ],
)
def test_the_approval_hook_decides(verdict: object, text: str, stats: Stats) -> None:
    """Only None lets the tool run; a hook that raises or talks nonsense denies; the id is released."""

    async def main() -> None:
        asked: list[Call] = []
        released: list[str] = []

        async def authorize(call: Call) -> Denial | None:
            asked.append(call)
            if isinstance(verdict, BaseException):
                raise verdict
            return verdict  # type: ignore[return-value]

        bridge = Bridge(authorize=authorize, release_approval=released.append)
        answer = await bridge.ask("ls")
        await bridge.settle()
        assert await bridge.dispatcher.close(killed=False) == stats

        assert answer.content == text
        assert set(released) == {asked[0].approval_id}

    run(main)


def test_approval_ids_are_unique_across_runs() -> None:
    """Two runs never share an approval id, though both count their calls from 1."""

    async def main() -> None:
        ids: list[str] = []

        async def authorize(call: Call) -> None:
            ids.append(call.approval_id)

        for _ in range(2):
            bridge = Bridge(authorize=authorize)
            for _ in range(3):
                await bridge.ask("ls")
            await bridge.dispatcher.close(killed=False)
        assert len(set(ids)) == 6

    run(main)


# Channels


@pytest.mark.case(182, 183, 184, 318)
def test_text_is_charged_by_its_json_and_refused_over_budget() -> None:
    """A block that fits exactly is kept, one that does not is refused without cost, a smaller one then fits."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_text_bytes=64))
        first = await bridge.answer(bridge.text(1, "0123456789"))
        second = await bridge.answer(bridge.text(2, "X" * 40))
        third = await bridge.answer(bridge.text(2, "ok"))
        exact = await bridge.answer(bridge.text(3, ""))
        stats = await bridge.dispatcher.close(killed=False)

        assert (first.ok, third.ok) == (True, True)
        assert second.content == (
            "text() byte budget exceeded (30 bytes accumulated, 60 more requested, cap 64)"
        )
        assert exact.content == (
            "text() byte budget exceeded (52 bytes accumulated, 20 more requested, cap 64)"
        )
        assert bridge.dispatcher.text_blocks == ["0123456789", "ok"]
        assert stats == Stats()

    run(main)


@pytest.mark.case(186)
@pytest.mark.parametrize("text", ["\0" * 11_000, "ü" * 11_000, "x" * 65_600])
def test_text_whose_escaped_size_is_too_big_is_refused(text: str) -> None:
    """The charge is that of the escaped block, whatever the frame looked like on the way."""

    async def main() -> None:
        bridge = Bridge()
        frame = {"type": "text", "id": 1, "n": 1, "token": bridge.token, "text": text}
        bridge.send(json.dumps(frame, ensure_ascii=False).encode())
        assert not (await bridge.answer(1)).ok
        assert bridge.dispatcher.text_blocks == []
        await bridge.dispatcher.close(killed=False)

    run(main)


@pytest.mark.case(188, 319)
@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "x"), ("1", "x"), (True, "x"), (0, "x"), (1.0, "x"), (1, 42), (1, None), (1, "a\ud800b")],
)
def test_a_malformed_text_frame_is_refused_without_harm(number: object, text: object) -> None:
    """A block without a number, a string, or valid Unicode is answered and costs nothing."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_text_bytes=21))
        assert not (await bridge.answer(bridge.text(number, text))).ok
        assert (await bridge.answer(bridge.text(1, "y"))).ok
        assert bridge.dispatcher.text_blocks == ["y"]
        assert await bridge.dispatcher.close(killed=False) == Stats()

    run(main)


def test_blocks_stand_in_ascending_number() -> None:
    """The number orders the blocks; two with one number stay in order of arrival."""

    async def main() -> None:
        bridge = Bridge()
        for number, text in ((10, "c"), (2, "b"), (1, "a"), (2, "b2"), (11, "\N{GRINNING FACE}")):
            bridge.text(number, text)
        assert bridge.dispatcher.text_blocks == ["a", "b", "b2", "c", "\N{GRINNING FACE}"]
        await bridge.dispatcher.close(killed=False)

    run(main)


@pytest.mark.case(191)
def test_text_and_notify_cost_no_slot_and_no_memory_of_ids() -> None:
    """Channel frames may use any id, again and again, also one that a call then uses."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_rpc_calls=1))
        for number in range(1, 6):
            bridge.text(number, "x", id=7)
            bridge.notify("x", id=7)
        assert [answer.ok for answer in bridge.answers_to(7)] == [True] * 10
        bridge.answers.clear()
        assert (await bridge.ask("ls", id=7)).ok
        stats = await bridge.dispatcher.close(killed=False)
        assert (stats.calls, stats.errors) == (1, 0)

    run(main)


def test_text_with_a_bad_token_is_denied() -> None:
    """A text frame is authenticated like a call."""

    async def main() -> None:
        bridge = Bridge()
        answer = await bridge.answer(bridge.text(1, "x", token="no"))
        assert answer.content == "rpc authentication failed"
        assert bridge.dispatcher.text_blocks == []
        assert (await bridge.dispatcher.close(killed=False)).denied == bridge.auth_denied == 1

    run(main)


@pytest.mark.case(194, 197, 198)
def test_notify_forwards_sixty_four_messages_in_order() -> None:
    """Messages arrive in order, cut to 4096 bytes on a character boundary; from the 65th on they are dropped."""

    async def main() -> None:
        forwarded: list[str] = []
        bridge = Bridge(on_notify=forwarded.append)
        bridge.notify("€" * 2000)
        for index in range(69):
            bridge.notify(str(index))
        stats = await bridge.dispatcher.close(killed=False)

        assert forwarded == ["€" * 1365, *map(str, range(63))]
        assert [(answer.ok, answer.content) for answer in bridge.answers] == [(True, "")] * 70
        assert stats == Stats(notify_forwarded=64)

    run(main)


@pytest.mark.case(200)
def test_malformed_notifies_are_consumed_and_do_not_use_the_cap() -> None:
    """Junk and bad tokens are dropped, are not denials, and leave all 64 places."""

    async def main() -> None:
        forwarded: list[str] = []
        bridge = Bridge(on_notify=forwarded.append)
        for _ in range(70):
            bridge.notify(42)
            bridge.notify(None)
            bridge.notify("x" * MAX_FRAME_BYTES)
            bridge.notify("forged", token="no")
        bridge.notify("good")
        stats = await bridge.dispatcher.close(killed=False)

        assert forwarded == ["good"]
        assert (stats.denied, bridge.auth_denied) == (0, 0)

    run(main)


@pytest.mark.case(196, 201)
@pytest.mark.parametrize("listening", [False, True])
def test_a_missing_or_raising_listener_harms_nothing(listening: bool) -> None:
    """Without a listener, and with one that raises, notify is acknowledged and the run goes on."""

    async def main() -> None:
        def listen(message: str) -> None:
            raise RuntimeError(message)

        bridge = Bridge(on_notify=listen if listening else None)
        assert (await bridge.answer(bridge.notify("x"))).ok
        assert (await bridge.ask("ls")).ok
        stats = await bridge.dispatcher.close(killed=False)
        assert (stats.errors, stats.accounting_loss) == (0, False)

    run(main)


# The end of a run


@pytest.mark.case(165, 167)
@pytest.mark.parametrize("killed", [False, True])
def test_ending_a_run_interrupts_what_is_in_flight(killed: bool) -> None:
    """A call in flight sees the abort, is answered as interrupted, and stamps the loss; queued ones never start."""

    async def main() -> None:
        ended: list[bool] = []

        async def invoke(call: Call, context: HelperContext) -> str:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(context.abort.aborted)
            return ""

        bridge = Bridge(limits=limits(max_parallel_rpc=1), invoke=invoke)
        ids = [bridge.call("read") for _ in range(3)]
        await bridge.settle()
        started = time.monotonic()
        stats = await bridge.dispatcher.close(killed=killed)

        assert time.monotonic() - started < 5
        assert ended == [True]
        assert [(a.id, a.content) for a in bridge.answers] == [(i, INTERRUPTED) for i in ids]
        assert stats == Stats(calls=3, errors=3, accounting_loss=True)
        assert not bridge.abort.aborted

    run(main)


@pytest.mark.case(169)
def test_a_kill_with_nothing_in_flight_keeps_the_accounting() -> None:
    """Work that was answered before the kill is counted, and nothing is unknown."""

    async def main() -> None:
        bridge = Bridge()
        await bridge.ask("webfetch")
        stats = await bridge.dispatcher.close(killed=True)
        assert stats == Stats(calls=1, bytes=8, tools_used={"webfetch"})

    run(main)


def test_the_callers_abort_reaches_the_tools_and_holds_back_queued_calls() -> None:
    """The run's signal follows the caller's; what waits for a place does not start any more."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_parallel_rpc=1))
        first, second = bridge.call("grep"), bridge.call("grep")
        await bridge.settle()
        bridge.abort.abort()
        assert bridge.contexts[0].abort.aborted
        bridge.gates[first].set_result("late")
        await bridge.settle()
        stats = await bridge.dispatcher.close(killed=True)

        assert bridge.started == [first]
        assert [(a.id, a.content) for a in bridge.answers] == [(first, "late"), (second, INTERRUPTED)]
        assert (stats.calls, stats.errors, stats.accounting_loss) == (2, 1, True)

    run(main)


@pytest.mark.case(317)
def test_nothing_is_taken_after_the_end() -> None:
    """A frame that arrives after the end is not executed, not counted and not answered."""

    async def main() -> None:
        bridge = Bridge()
        stats = await bridge.dispatcher.close(killed=False)
        bridge.call("ls")
        bridge.call("ls", token="no")
        bridge.text(1, "x")
        bridge.notify("x")
        bridge.send(b"junk")
        bridge.dispatcher.receive_oversized(b'{"type": "call", "id": 12}', 1 << 20)
        await bridge.settle()

        assert await bridge.dispatcher.close(killed=True) == stats == Stats()
        assert (bridge.answers, bridge.started, bridge.dispatcher.text_blocks) == ([], [], [])

    run(main)


@pytest.mark.case(195, 317)
def test_the_last_drain_takes_channels_but_no_calls() -> None:
    """Once the script has ended its last text and notify frames still count, its calls do not."""

    async def main() -> None:
        forwarded: list[str] = []
        bridge = Bridge(on_notify=forwarded.append)
        bridge.dispatcher.end_calls()
        bridge.call("ls")
        bridge.call("ls", token="no")
        bridge.dispatcher.receive_oversized(b'{"type": "call", "id": 12}', 1 << 20)
        bridge.text(1, "result")
        bridge.notify("last")
        await bridge.settle()
        stats = await bridge.dispatcher.close(killed=False)

        assert (bridge.dispatcher.text_blocks, forwarded, bridge.started) == (["result"], ["last"], [])
        assert stats == Stats(notify_forwarded=1)

    run(main)


def test_an_outcome_within_the_grace_is_kept() -> None:
    """A tool that ends its work in its 25 ms is answered with what it says, and the loss is stamped all the same."""

    async def main() -> None:
        async def invoke(call: Call, context: HelperContext) -> str:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                return "just in time"
            return ""

        bridge = Bridge(invoke=invoke)
        call_id = bridge.call("webfetch")
        await bridge.settle()
        stats = await bridge.dispatcher.close(killed=True)

        assert (await bridge.answer(call_id)).content == "just in time"
        assert stats == Stats(calls=1, bytes=12, tools_used={"webfetch"}, accounting_loss=True)

    run(main)


def test_work_that_shrugs_off_its_cancellation_is_abandoned_and_bounded() -> None:
    """Its outcome is discarded, and with 4 x max_parallel_rpc of such work calls fail with "host busy"."""

    async def main() -> None:
        release = asyncio.Event()

        async def invoke(call: Call, context: HelperContext) -> str:
            if call.tool == "ls":
                return "ls"
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    pass
            return "too late"

        for _ in range(4):
            bridge = Bridge(limits=limits(max_parallel_rpc=1), invoke=invoke)
            call_id = bridge.call("read")
            await bridge.settle()
            started = time.monotonic()
            stats = await bridge.dispatcher.close(killed=True)
            assert 0.02 < time.monotonic() - started < 5
            assert stats == Stats(calls=1, errors=1, accounting_loss=True)
            assert [a.content for a in bridge.answers_to(call_id)] == [INTERRUPTED]

        busy = Bridge(limits=limits(max_parallel_rpc=1), invoke=invoke)
        assert (await busy.ask("ls")).content == "host busy"
        roomy = Bridge(limits=limits(max_parallel_rpc=2), invoke=invoke)
        assert (await roomy.ask("ls")).ok
        release.set()
        await bridge.settle()
        assert (await busy.ask("ls")).ok
        assert await busy.dispatcher.close(killed=False) == Stats(
            calls=2, errors=1, bytes=2, tools_used={"ls"}
        )
        await roomy.dispatcher.close(killed=False)
        assert [a.content for a in bridge.answers_to(call_id)] == [INTERRUPTED]
        assert stats == Stats(calls=1, errors=1, accounting_loss=True)
        assert dispatch._abandoned == set()

    run(main)


def test_closing_twice_at_once_settles_once() -> None:
    """A second close waits for the first and returns the same stats."""

    async def main() -> None:
        bridge = Bridge()
        bridge.call("grep")
        await bridge.settle()
        first, second = await asyncio.gather(
            bridge.dispatcher.close(killed=True), bridge.dispatcher.close(killed=False)
        )
        assert first is second
        assert first == Stats(calls=1, errors=1, accounting_loss=True)

    run(main)


def test_a_close_that_is_cancelled_has_settled() -> None:
    """Whoever dies while closing leaves nothing unanswered."""

    async def main() -> None:
        async def invoke(call: Call, context: HelperContext) -> str:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0.1)
            return ""

        bridge = Bridge(invoke=invoke)
        call_id = bridge.call("read")
        await bridge.settle()
        closing = asyncio.ensure_future(bridge.dispatcher.close(killed=True))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert (await bridge.answer(call_id)).content == INTERRUPTED
        assert (await bridge.dispatcher.close(killed=True)).errors == 1

    run(main)


def test_a_dispatch_task_cancelled_by_others_is_settled() -> None:
    """A task that somebody else cancels - a loop that is being stopped - is answered as interrupted."""

    async def main() -> None:
        bridge = Bridge()
        before = asyncio.all_tasks()
        call_id = bridge.call("grep")
        await bridge.settle()
        (task,) = asyncio.all_tasks() - before
        task.cancel()
        assert (await bridge.answer(call_id)).content == INTERRUPTED
        assert (await bridge.ask("ls")).ok
        stats = await bridge.dispatcher.close(killed=False)
        assert (stats.calls, stats.errors, stats.accounting_loss) == (2, 1, True)

    run(main)


def test_a_carrier_that_raises_cannot_hurt_the_dispatcher() -> None:
    """A sender that raises is a fault of ours: contained, counted once, and the loss is stamped."""

    async def main() -> None:
        bridge = Bridge()

        def broken(answer: object) -> None:
            raise OSError("gone")

        bridge.dispatcher.connect(broken)
        bridge.call("ls")
        bridge.call("bash")
        bridge.call("ls", token="no")
        await bridge.settle()
        stats = await bridge.dispatcher.close(killed=False)
        assert stats == Stats(calls=2, errors=1, denied=1, bytes=2, tools_used={"ls"}, accounting_loss=True)

    run(main)


# Scale


def test_a_flood_of_junk_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forged frames, nor replays, nor calls over the limit leave anything behind that grows."""

    async def main() -> None:
        monkeypatch.setattr(cell, "MAX_REMEMBERED_REFUSALS", 100)
        bridge = Bridge(limits=limits(max_rpc_calls=1))
        await bridge.ask("ls")
        frames = [
            json.dumps(frame).encode()
            for frame in (
                {"type": "call", "id": 5, "token": "no", "tool": "x" * 1000},
                {"type": "call", "id": 1, "token": bridge.token},
                {"type": "text", "id": 1, "n": 1, "token": bridge.token, "text": "x" * 65_600},
                {"type": "notify", "id": 1, "token": bridge.token, "msg": "x"},
                {"nonsense": ["x"] * 1000},
            )
        ]

        def flood(first: int) -> None:
            for number in range(first, first + 300):
                for frame in frames:
                    bridge.send(frame)
                bridge.call("ls", id=number)
            bridge.answers.clear()

        flood(10)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            flood(10_000)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 20_000
        assert (await bridge.dispatcher.close(killed=False)).calls == 1

    run(main)


def test_a_long_run_does_not_slow_down() -> None:
    """The last calls of a long run cost what the first ones did: nothing per call is linear in the calls."""

    async def main() -> None:
        bridge = Bridge(limits=limits(max_rpc_calls=1_000_000, max_rpc_result_bytes=10**9))
        bridge.dispatcher.connect(bridge.answers.append)

        async def burst(count: int) -> float:
            fastest = sys.float_info.max
            for _ in range(5):
                started = time.process_time()
                for _ in range(count // 5):
                    bridge.call("read")
                    while not bridge.answers:
                        await asyncio.sleep(0)
                    bridge.answers.clear()
                fastest = min(fastest, time.process_time() - started)
                bridge.started.clear()
                bridge.contexts.clear()
            return fastest

        first = await burst(1000)
        await burst(6_000)
        last = await burst(1000)
        stats = await bridge.dispatcher.close(killed=False)
        assert stats.calls == 8_000
        assert last < first * 4  # what is linear would be slower by far more

    run(main)
