"""Random and mutated frames to both carriers: no exception in the host, no valid request unanswered (issue 5)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pathlib
import random
import socket
from collections.abc import Callable

import pytest

from lemon_kernel import AbortSignal, HelperContext
from lemon_kernel.bridge.comm import CommCarrier
from lemon_kernel.bridge.dispatch import Call, Dispatcher, Limits
from lemon_kernel.bridge.pipe import PipeCarrier

from .conftest import Crowd, seeded, size

pytestmark = [pytest.mark.timeout(1700)]

GROWTH_KIB = 16 << 10
FIRST_VALID = 777_777_000_000
"""Ids of valid calls are such as no mutation hits upon: a refused frame is answered under the id it bears."""
LIMITS = Limits(max_rpc_calls=10**6, max_rpc_result_bytes=10**9, max_text_bytes=65_536, max_parallel_rpc=4)

ATOMS = [
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**200, 1.5, 1e308, float("inf"), float("nan"),
    "", "x", "read", "call", "text", "notify", "open", "grant", "answer", "\x00", "\ud800", "é" * 50, "a" * 5000,
    [], [[]], {}, {"a": {}}, [None] * 100,
]  # fmt: skip
KEYS = ["type", "id", "token", "tool", "params", "n", "text", "msg", "cell", "request", "", "x" * 300]


def frame(chance: random.Random, token: str, number: int) -> bytes:
    """Return one frame that is no valid request: random bytes, random JSON, or a valid frame mutated."""
    way = chance.randrange(8)
    if way == 0:
        return chance.randbytes(chance.choice([0, 1, 3, 20, 500, 70_000]))
    if way == 1:
        return json.dumps(chance.choice(ATOMS)).encode("utf-8", "surrogatepass")
    if way == 2:
        return b"[" * chance.choice([10, 2_000, 100_000])
    if way == 3:
        data = {chance.choice(KEYS): chance.choice(ATOMS) for _ in range(chance.randrange(6))}
        return json.dumps(data, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    valid: dict[str, object] = chance.choice(
        [
            {
                "type": "call",
                "id": number,
                "cell": "c",
                "token": token,
                "tool": "read",
                "params": {"path": "f"},
            },
            {"type": "text", "id": number, "cell": "c", "token": token, "n": number, "text": "t"},
            {"type": "notify", "id": number, "cell": "c", "token": token, "msg": "m"},
        ]
    )
    if way == 4:  # one field is something else, and the token no longer opens anything
        valid[chance.choice(KEYS)] = chance.choice(ATOMS)
        valid["token"] = chance.choice([*ATOMS, token[:-1], token + "=", token.lower()])
        return json.dumps(valid).encode("utf-8", "surrogatepass")
    if way == 5:  # an oversized one
        valid[chance.choice(["msg", "text", "params"])] = "x" * chance.choice([65_536, 262_144, 300_000])
        valid["token"] = "wrong"
        return json.dumps(valid).encode()
    data = bytearray(json.dumps({**valid, "token": "wrong"}).encode())
    if way == 6:
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)
    cut = chance.randrange(len(data))
    return bytes(data[:cut] + data[chance.randrange(cut, len(data)) :])


def rss_kib() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


async def _read(call: Call, context: HelperContext) -> str:
    await asyncio.sleep(0)
    return "content"


def dispatcher() -> Dispatcher:
    return Dispatcher(
        cell="c", limits=LIMITS, helpers=["read"], invoke=_read, cwd="/", abort=AbortSignal(),
        on_notify=lambda message: None,
    )  # fmt: skip


def valid_call(token: str, number: int) -> bytes:
    data = {
        "type": "call",
        "id": number,
        "cell": "c",
        "token": token,
        "tool": "read",
        "params": {"path": "f"},
    }
    return json.dumps(data).encode()


def assert_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """No record of the host says that something broke."""
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not loud, [record.getMessage() for record in loud]


def check_fuzz(
    caplog: pytest.LogCaptureFixture,
    count: int,
    seed: int,
    attach: Callable[[Dispatcher], tuple[Callable[[list[bytes]], None], Callable[[], None]]],
    answers: list[tuple[int, bool]],
) -> None:
    """Send `count` bad frames and, among them, valid calls; each call has one answer, and the host is quiet."""
    chance = seeded(seed)

    async def main() -> None:
        broken: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: broken.append(context))
        bridge = dispatcher()
        send, close = attach(bridge)
        expected, start_kib = [], 0
        for number in range(count):
            if number == count // 10:
                start_kib = rss_kib()
            burst = [frame(chance, bridge.token, 10**9 + number)]
            if chance.random() < 0.1:
                expected.append(FIRST_VALID + number)
                burst.append(valid_call(bridge.token, FIRST_VALID + number))
            send(burst)
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        deadline = asyncio.get_running_loop().time() + 10
        while not {number for number, _ in answers} >= set(expected):
            assert asyncio.get_running_loop().time() < deadline, "a valid request is unanswered"
            await asyncio.sleep(0.01)
        wanted = set(expected)
        mine = [(number, ok) for number, ok in answers if number in wanted]
        stats = await bridge.close(killed=False)
        close()
        assert sorted(mine) == [(number, True) for number in expected]
        assert stats.calls == len(expected)
        assert stats.accounting_loss is False
        assert not broken
        assert rss_kib() - start_kib < GROWTH_KIB

    with caplog.at_level(logging.INFO):
        asyncio.run(main(), debug=False)
    assert_quiet(caplog)


def test_frames_to_the_comm_carrier(caplog: pytest.LogCaptureFixture) -> None:
    """Contents of ``comm_msg`` of every kind, whole messages that are mutated included."""
    answers: list[tuple[int, bool]] = []
    chance = random.Random(4)

    def attach(bridge: Dispatcher) -> tuple[Callable[[list[bytes]], None], Callable[[], None]]:
        def sent(kind: str, content: bytes) -> None:
            data = json.loads(content)["data"]
            answers.append((data["id"], data["ok"]))

        carrier = CommCarrier(sent)
        carrier.attach(bridge)
        head = b'{"comm_id":"%s","data":' % carrier.comm_id.encode()

        def send(frames: list[bytes]) -> None:
            for each in frames:
                carrier.receive(head + each + b"}")
            for junk in (b"", b"}", head, head + b"}", frames[0], frames[0][::-1], chance.randbytes(30)):
                carrier.receive(junk)

        return send, carrier.detach

    check_fuzz(caplog, size(2000, 100_000), 1, attach, answers)


def test_frames_to_the_pipe_carrier(caplog: pytest.LogCaptureFixture) -> None:
    """Records of every kind, cut at random places on their way; a peer that reads now and then."""
    answers: list[tuple[int, bool]] = []
    chance = random.Random(5)

    def attach(bridge: Dispatcher) -> tuple[Callable[[list[bytes]], None], Callable[[], None]]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        carrier = PipeCarrier(ours, bridge, ["read"])
        carrier.start()
        loop = asyncio.get_running_loop()
        outgoing, incoming = bytearray(), bytearray()

        def push() -> None:
            try:
                while outgoing:
                    del outgoing[: theirs.send(outgoing[: chance.choice([1, 3, 5, 100, 65_536])])]
            except BlockingIOError:
                return
            loop.remove_writer(theirs)

        def pull() -> None:
            incoming.extend(theirs.recv(65_536))
            while len(incoming) >= 13:
                end = 4 + int.from_bytes(incoming[:4], "big")
                if len(incoming) < end:
                    return
                answers.append((int.from_bytes(incoming[4:12], "big"), incoming[12] == 1))
                del incoming[:end]

        def send(frames: list[bytes]) -> None:
            for each in frames:
                outgoing.extend(len(each).to_bytes(4, "big") + each)
            loop.add_writer(theirs, push)
            if len(outgoing) > 1 << 20:  # let the host catch up
                os.set_blocking(theirs.fileno(), True)
                while outgoing:
                    carrier._on_readable()
                    os.set_blocking(theirs.fileno(), False)
                    push()

        def close() -> None:
            loop.remove_reader(theirs)
            loop.remove_writer(theirs)
            carrier.close()
            theirs.close()

        loop.add_reader(theirs, pull)
        return send, close

    check_fuzz(caplog, size(2000, 100_000), 2, attach, answers)


SCRIPT = """
import json, random, lemon_tools
{source}
chance, token = random.Random({seed}), lemon_tools._raw.token
carrier = lemon_tools._raw.__globals__["_grant"].carrier
answered = 0
for number in range({count}):
    carrier.send(frame(chance, token, 10**9 + number))
    if number % 20 == 0:
        assert read(str(number)) == str(number)
        answered += 1
    if number % 100 == 0:
        text("block %d" % number)
print(answered)
"""


@pytest.mark.parametrize("mode", ["session", "per_call"])
def test_a_script_that_sends_rubbish(mode: str, storm, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    """The same frames from a real script: its valid calls are answered, its blocks stand, the host is quiet."""
    import inspect

    count = size(2000, 100_000)
    source = "\n".join(
        [
            f"KEYS = {KEYS!r}",
            "inf, nan = float('inf'), float('nan')",
            f"ATOMS = {ATOMS!r}",
            inspect.getsource(frame),
        ]
    )
    source = "from __future__ import annotations\n", source
    script = source[0] + SCRIPT.format(source=source[1], seed=seeded(8).randrange(10**6), count=count)

    async def read(params: dict[str, object], context: object) -> str:
        return str(params["path"])

    async def main(crowd: Crowd) -> None:
        await crowd.run("print('warm')")
        before_kib = rss_kib()
        result = await crowd.run(
            script, helpers={"read": read}, max_rpc_calls=10**6, timeout_ms=1_000_000, max_text_bytes=10**7,
        )  # fmt: skip
        assert "reason" not in result.details, result.text[-2000:]
        assert result.text.endswith(f"{-(-count // 20)}\n")
        assert [line for line in result.text.splitlines() if line.startswith("block ")] == [
            f"block {number}" for number in range(0, count, 100)
        ]
        assert result.details["rpc_calls"] == -(-count // 20)
        assert int(str(result.details["rpc_denied"])) > count // 4
        assert rss_kib() - before_kib < GROWTH_KIB
        after = await crowd.run("print(read('next'))", helpers={"read": read})
        assert after.text == "next\n"

    with caplog.at_level(logging.INFO):
        storm(mode, main)
    assert_quiet(caplog)
