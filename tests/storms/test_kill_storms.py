"""Aborts, and SIGKILL to kernels and to hosts, at random moments (issue 3)."""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

import pytest

from lemon_kernel import AbortSignal, telemetry

from .conftest import DEATH_S, Crowd, is_gone, marked, seeded, size, until, wait_until, workspaces

pytestmark = [pytest.mark.timeout(1700)]

ABORT_ANSWER_S = 0.5

CELLS = {
    "sleeps": "time.sleep(15)",
    "computes": "end = time.monotonic() + 15\nwhile time.monotonic() < end: sum(range(1000))",
    "prints": "end = time.monotonic() + 15\nwhile time.monotonic() < end: print('x' * 100)",
    "calls": "end = time.monotonic() + 15\nwhile time.monotonic() < end: ls()",
    "tells": "end = time.monotonic() + 15\nfor n in range(10**6):\n    text(str(n)) if n < 500 else time.sleep(1)",
    "swallows": (
        "end = time.monotonic() + 15\nwhile time.monotonic() < end:\n"
        "    try: time.sleep(1)\n    except BaseException: pass"
    ),
    "is deaf": (
        "import signal\nfor each in (2, 15): signal.signal(each, signal.SIG_IGN)\n"
        "end = time.monotonic() + 15\nwhile time.monotonic() < end: time.sleep(0.1)"
    ),
    "is in C": "import ctypes\nctypes.PyDLL(None).sleep(15)",
    "waits for a child": "import subprocess\nsubprocess.run(['sleep', '15'])",
    "is short": "time.sleep({short})",
}

PIDS = """
import os, time
with open({path!r}, "w") as file:
    file.write(str(os.getpid()))
    file.flush()
    if {family}:
        for leaves in (False, True):
            child = os.fork()
            if child == 0:
                if leaves:
                    os.setsid()
                time.sleep(20)
                os._exit(0)
            file.write(" " + str(child))
"""
"""Writes the process ids of the cell and, if wanted, of a child in its group and one in a session of its own."""


def pids_in(path: pathlib.Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split()]
    except FileNotFoundError:
        return []


def cell(chance: random.Random, path: pathlib.Path) -> str:
    kind = chance.choice(sorted(CELLS))
    body = CELLS[kind].format(short=round(chance.uniform(0, 0.3), 3))
    return PIDS.format(path=str(path), family=chance.random() < 0.3) + body


@pytest.mark.parametrize("mode", ["session", "per_call"])
def test_abort_storm(mode: str, storm, tmp_path: pathlib.Path) -> None:  # type: ignore[no-untyped-def]
    """Each call is answered once, within 0.5 s of its abort; a started cell's state is lost; its processes go."""
    chance = seeded(20261130)
    count = size(50, 500)
    stops: Counter[str] = Counter()
    forget = telemetry.listen(
        lambda event, *_: stops.update([event]) if event.endswith("cell.stop") else None
    )
    slowest_s = 0.0
    started = 0
    plans = [(f"agent {n % 4}", chance.choice([0.0, 0.02, 0.1, 0.4]), chance.random()) for n in range(count)]

    async def main(crowd: Crowd) -> None:
        deaths: list[asyncio.Task[None]] = []

        async def one(number: int, agent: str, most_s: float, part: float) -> None:
            nonlocal slowest_s, started
            path = tmp_path / f"pids-{number}"
            script = cell(chance, path)
            abort = AbortSignal()
            call = asyncio.create_task(crowd.run(script, agent=agent, abort=abort))
            if part < 0.8:  # else at any moment from the very start of the call on, the kernel's included
                while not path.exists() and not call.done():
                    await asyncio.sleep(0.005)
            await asyncio.sleep(most_s * part)
            finished = call.done()
            aborted_at = time.monotonic()
            abort.abort()
            result = await asyncio.wait_for(call, 10)
            slowest_s = max(slowest_s, time.monotonic() - aborted_at)
            reason = result.details.get("reason")
            if finished:
                assert reason is None, result.text
            else:
                assert reason in (None, "cancelled"), (script, result.text)
            assert result.details["state_retained"] is (mode == "session" and reason is None)
            if path.exists():
                started += 1
            if reason == "cancelled":
                deaths.append(asyncio.create_task(dead(path, script, aborted_at)))

        async def dead(path: pathlib.Path, script: str, aborted_at: float) -> None:
            left_s = aborted_at + DEATH_S - time.monotonic()
            await until(lambda: all(map(is_gone, pids_in(path))), left_s, f"the death of\n{script}\n")

        async def worker(mine: int) -> None:
            for number, plan in enumerate(plans):
                if number % 4 == mine:
                    await one(number, *plan)

        async with asyncio.TaskGroup() as group:
            for mine in range(4):
                group.create_task(worker(mine))
        await asyncio.gather(*deaths)

    try:
        storm(mode, main)
    finally:
        forget()
    assert started > count // 2
    assert slowest_s < ABORT_ANSWER_S
    if mode == "session":
        assert stops.total() >= started  # one that was sent and killed before it wrote its file has one, too
        assert stops.total() <= count


def test_kernel_kill_storm(storm, tmp_path: pathlib.Path) -> None:  # type: ignore[no-untyped-def]
    """SIGKILL to a kernel at any moment: an honest answer at once, no replay, and the next call works."""
    chance = seeded(7)
    count = size(10, 100)

    async def main(crowd: Crowd) -> None:
        for number in range(count):
            first = await crowd.run("import os\nprint(os.getpid())")
            assert "reason" not in first.details, first.text
            kernel = int(first.text)
            path, runs = tmp_path / f"pids-{number}", tmp_path / f"runs-{number}"
            script = f"open({str(runs)!r}, 'a').write('run ')\n" + cell(chance, path)
            at_once = chance.random() < 0.5
            call = asyncio.create_task(crowd.run(script))
            if not at_once:
                while not path.exists() and not call.done():
                    await asyncio.sleep(0.002)
            await asyncio.sleep(chance.uniform(0, 0.03))
            killed_at = time.monotonic()
            os.kill(kernel, signal.SIGKILL)
            done, _ = await asyncio.wait({call}, timeout=1)
            result = await asyncio.wait_for(call, 20)
            if path.exists() and pids_in(path)[:1] == [kernel]:
                assert done, f"{script}\nanswered {time.monotonic() - killed_at:.1f} s after the kill"
            reason = result.details.get("reason")
            assert reason in (None, "kernel_died", "kernel_unavailable"), (script, result.text)
            assert "fallback_reason" not in result.details
            if reason is not None:
                assert result.details["state_retained"] is False
            assert not runs.exists() or runs.read_text() in ("", "run ")
            old = [pid for pid in pids_in(path) if reason is not None]
            await until(lambda old=old: all(map(is_gone, old)), DEATH_S, f"the death of\n{script}\n")
            fresh = await crowd.run("print('fresh')")
            assert (fresh.text, fresh.details.get("reason")) == ("fresh\n", None)

    storm("session", main)


HOST = """
import asyncio, os, sys
from lemon_kernel import *
CHILDREN = '''
import os, time
print("alive", flush=True)
for leaves in range(3):
    if os.fork() == 0:
        if leaves:
            os.setsid()
        if leaves == 2 and os.fork():
            os._exit(0)
        time.sleep(30)
        os._exit(0)
open({path!r}, "w").close()
'''
async def main():
    folder = sys.argv[1]
    registry = KernelRegistry()
    async def run(mode, name, script):
        config = ExecuteCodeConfig(enabled=True, kernel_mode=mode, python_path=sys.executable)
        tool = ExecuteCode(folder, config=config, registry=registry, scope=SessionScope(name, "a", owner))
        await tool.execute({"script": CHILDREN.format(path=folder + "/" + name) + script, "timeout_ms": 30000})
    owner = Owner()
    await asyncio.gather(
        run("session", "idle", ""),
        run("session", "busy", "time.sleep(30)"),
        run("session", "deaf", "import signal\\nfor n in (2, 15): signal.signal(n, 1)\\ntime.sleep(30)"),
        run("session", "blocked", "import ctypes\\nctypes.PyDLL(None).sleep(30)"),
        run("per_call", "script", "time.sleep(30)"),
        run("per_call", "loop", "while time.monotonic() < 1e9: time.sleep(0.1)"),
    )
asyncio.run(main())
"""


HOST_RUNS = {"idle", "busy", "deaf", "blocked", "script", "loop"}


def test_host_kill_storm(tmp_path: pathlib.Path) -> None:
    """SIGKILL to the host: 3 s later no kernel, no script, no child of one, and no workspace (6.12)."""
    chance = seeded(3)
    for number in range(size(2, 20)):
        # Short, for the sockets' sake; removed by us at the end.
        tmpdir = pathlib.Path(tempfile.mkdtemp(prefix="lkh-", dir="/tmp"))
        folder = tmp_path / f"work-{number}"
        folder.mkdir()
        host = subprocess.Popen(
            [sys.executable, "-c", HOST, str(folder)], env={**os.environ, "TMPDIR": str(tmpdir)}
        )
        try:
            if number % 2 == 0:
                wait_until(lambda f=folder: set(os.listdir(f)) >= HOST_RUNS, 30, "every child")
            else:
                time.sleep(chance.uniform(0.2, 2.5))  # while kernels start
            assert host.poll() is None
            alive = marked(str(tmpdir))
            host.kill()
            host.wait()
            killed_at = time.monotonic()
            if number % 2 == 0:
                assert len(alive) >= 6 * 4 - 1
            wait_until(lambda t=tmpdir: not marked(str(t)), 3, f"the death of {len(alive)} processes")
            wait_until(
                lambda t=tmpdir: not workspaces(t), killed_at + 3 - time.monotonic(), "an empty TMPDIR"
            )
        finally:
            host.kill()
            host.wait()
            for pid in marked(str(tmpdir)):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda t=tmpdir: not list(t.glob("lemon-private-*")), 2, "the removal of the private root")
        tmpdir.rmdir()
