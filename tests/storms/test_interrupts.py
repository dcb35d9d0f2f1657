"""SIGINT and alarms at random moments lose no reply, no frame and no state (design 6, recipes 1.4)."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import threading
import time

import pytest

from .conftest import Crowd, seeded, size

pytestmark = [pytest.mark.timeout(1700)]


def test_interrupts_from_outside_lose_no_reply(storm) -> None:  # type: ignore[no-untyped-def]
    """A thread sends SIGINT to the kernel all the time: every cell is answered, as done or as interrupted."""
    chance = seeded(99)
    cells = size(400, 12_000)
    bodies = [
        "pass",
        "print('out')",
        "text('told')",
        "ls()",
        "sum(range(20_000))",
        "import time; time.sleep(0.002)",
    ]

    async def main(crowd: Crowd) -> None:
        first = await crowd.run("import os\nprint(os.getpid())\nx = 'kept'")
        kernel, over, sent = int(first.text), threading.Event(), 0

        def pester() -> None:
            nonlocal sent
            while not over.wait(chance.uniform(0.0005, 0.01)):
                os.kill(kernel, signal.SIGINT)
                sent += 1

        thread = threading.Thread(target=pester)
        thread.start()
        interrupted = 0
        try:
            for number in range(cells):
                result = await crowd.run(chance.choice(bodies), timeout_ms=20_000)
                reason = result.details.get("reason")
                if reason is not None:
                    interrupted += 1
                    assert reason == "exception", (number, result.text)
                    assert "KeyboardInterrupt" in result.text
                assert result.details["state_retained"] is True
                assert result.details["kernel_reused"] is True
        finally:
            over.set()
            thread.join()
        print(f"{sent} interrupts, {interrupted} of {cells} cells interrupted")
        assert interrupted > 0
        last = await crowd.run("print(os.getpid(), x, ls()[:9])")
        assert last.text == f"{kernel} kept Directory\n"

    storm("session", main)


ALARMS = """
import random, signal, time
class Late(Exception):
    pass
def late(*_):
    raise Late
chance = random.Random({seed})
signal.signal(signal.SIGALRM, late)
late_ones, blocks = 0, 0
for number in range({rounds}):
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00001, 0.003))
        try:
            for _ in range(3):
                read(str(number))
                text("block %d" % number)
                notify("on the way")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Late:
        late_ones += 1
    content = read("after %d" % number)
    assert content == "after %d" % number, content
signal.signal(signal.SIGALRM, signal.SIG_DFL)
print(late_ones)
"""


@pytest.mark.parametrize("mode", ["session", "per_call"])
def test_alarms_that_raise_within_helper_calls(mode: str, storm) -> None:  # type: ignore[no-untyped-def]
    """Whatever call an exception cuts short, the next one gets its own answer, and the budgets are right."""
    rounds = size(300, 10_000)

    async def read(params: dict[str, object], context: object) -> str:
        return str(params["path"])

    async def main(crowd: Crowd) -> None:
        result = await crowd.run(
            ALARMS.format(seed=1234, rounds=rounds),
            helpers={"read": read},
            max_rpc_calls=10 * rounds,
            max_text_bytes=10_000_000,
            timeout_ms=600_000,
        )
        assert "reason" not in result.details, result.text[-2000:]
        late = int(result.text.splitlines()[-1])
        assert late > rounds // 10
        assert rounds <= int(str(result.details["rpc_calls"])) <= 4 * rounds
        assert result.details["rpc_denied"] == 0
        after = await crowd.run("print(read('next'))", helpers={"read": read})
        assert after.text == "next\n"

    storm(mode, main)


def test_a_cell_interrupted_by_its_own_group(storm, tmp_path: pathlib.Path) -> None:  # type: ignore[no-untyped-def]
    """SIGINT to the group from inside, at random moments: KeyboardInterrupt in the cell, and the kernel lives."""
    chance = seeded(17)
    cells = size(60, 1000)

    async def main(crowd: Crowd) -> None:
        await crowd.run("import os, signal, threading, time\nx = 1")
        for number in range(cells):
            delay_s = chance.uniform(0, 0.004)
            result = await crowd.run(
                f"threading.Timer({delay_s}, os.killpg, (0, signal.SIGINT)).start()\n"
                f"end = time.monotonic() + {chance.choice([0.0, 0.002, 0.02])}\n"
                "while time.monotonic() < end:\n    print(x)",
                timeout_ms=20_000,
            )
            assert result.details.get("reason") in (None, "exception"), (number, result.text)
            assert result.details["state_retained"] is True
        await asyncio.sleep(0.02)  # the last timer
        started = time.monotonic()
        assert (await crowd.run("print(x)")).text == "1\n"
        assert time.monotonic() - started < 5

    storm("session", main)
