"""Many kernels and runs in one process leave nothing behind in it, and many at once keep their order (issue 3)."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import pathlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import zmq
from lemon_provisioner.key import KernelKey, kernel_key

from lemon_kernel import AbortSignal, HelperContext, KernelRegistry, Owner, hostloop, telemetry
from lemon_kernel.bridge.dispatch import Call, Dispatcher, Limits
from lemon_kernel.session.kernel import CellEnd
from lemon_kernel.session.registry import KernelSettings, Unavailable

from .conftest import Crowd, in_parallel, seeded, size

pytestmark = [pytest.mark.timeout(1700)]


def holdings() -> dict[str, int]:
    """Return what a leak would add to: threads, descriptors, zmq sockets, files, and our own objects."""
    gc.collect()
    ours = Counter(
        f"{type(each).__module__}.{type(each).__qualname__}"
        for each in gc.get_objects()
        if str(type(each).__module__).startswith(("lemon_", "jupyter_client", "zmq"))
        and type(each) is not telemetry.Observation  # the last 1,000 or so are kept on purpose
    )
    sockets = sum(1 for each in gc.get_objects() if isinstance(each, zmq.Socket) and not each.closed)
    files = sum(
        len(names)
        for root in pathlib.Path(os.environ["TMPDIR"]).glob("lemon-private-*")
        for _, _, names in os.walk(root)
    )
    return {
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "zmq sockets": sockets,
        "files": files,
        "tasks": len(asyncio.all_tasks(hostloop.loop())),
        **{f"objects of {name}": number for name, number in ours.items()},
    }


def grown(before: Mapping[str, int], after: Mapping[str, int], slack: int = 0) -> dict[str, tuple[int, int]]:
    return {
        name: (before.get(name, 0), number)
        for name, number in after.items()
        if number > before.get(name, 0) + slack
    }


def test_kernel_starts_and_stops_leak_nothing(storm) -> None:  # type: ignore[no-untyped-def]
    """Start, two cells, an end in one of four ways: after many of them the process holds what it held before."""
    chance = seeded(11)
    count, warm = size(50, 500), 8

    async def one(crowd: Crowd, number: int, ways: list[str]) -> None:
        agent = f"agent {number}"
        result = await crowd.run("x = ls()\ntext('told')", agent=agent)
        assert result.details.get("reason") is None, result.text
        way = ways[number % len(ways)]
        if way == "crash":
            result = await crowd.run("import os\nos._exit(1)", agent=agent)
            assert result.details["reason"] == "kernel_died"
        elif way == "abort":
            abort = AbortSignal()
            call = asyncio.create_task(crowd.run("import time\ntime.sleep(9)", agent=agent, abort=abort))
            await asyncio.sleep(chance.uniform(0, 0.2))
            abort.abort()
            assert (await call).details["reason"] == "cancelled"
        elif way == "reset":
            result = await crowd.run("print('x' in globals())", agent=agent, reset=True)
            assert result.text == "False\n"
        await crowd.leave(agent)

    async def main(crowd: Crowd) -> None:
        ways = ["leave", "reset", "leave", "crash", "leave", "reset", "leave", "abort"]
        for number in range(warm):
            await one(crowd, number, ways)
        before = await settled(crowd)
        works = [functools.partial(one, crowd, warm + number, ways) for number in range(count)]
        await in_parallel(3, works)
        after = await settled(crowd)
        assert grown(before, after, slack=3) == {}

    async def settled(crowd: Crowd) -> dict[str, int]:
        while any(crowd.registry.snapshot()["phases"].values()):  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
        held = holdings()
        for _ in range(60):  # what ends a moment later is no leak
            await asyncio.sleep(0.05)
            now = holdings()
            if not grown(now, held) and not grown(held, now):
                break
            held = now
        return held

    storm("session", main)


def test_per_call_runs_leak_nothing(storm) -> None:  # type: ignore[no-untyped-def]
    """200 runs at once, then 100 more in the same process: all right, and nothing is held afterwards."""
    count = size(200, 2000)

    async def read(params: Mapping[str, Any], context: HelperContext) -> str:
        await asyncio.sleep(0.01)
        return f"content of {params['path']}"

    async def one(crowd: Crowd, number: int) -> None:
        result = await crowd.run(
            f"text(read('{number}'))\nprint('printed', {number})", helpers={"read": read}, timeout_ms=60_000
        )
        assert result.text == (
            f"Script result (text()):\ncontent of {number}\n\n"
            f"Diagnostics (stdout/stderr, not the result):\nprinted {number}\n"
        )
        assert result.details["rpc_calls"] == 1

    async def main(crowd: Crowd) -> None:
        for number in range(20):
            await one(crowd, number)
        before = holdings()
        await in_parallel(200, [functools.partial(one, crowd, number) for number in range(count)])
        await asyncio.sleep(0.2)
        assert grown(before, holdings(), slack=3) == {}

    storm("per_call", main)


LIMITS = Limits(max_rpc_calls=10, max_rpc_result_bytes=10_000, max_text_bytes=10_000, max_parallel_rpc=2)


async def _no_tool(call: Call, context: HelperContext) -> str:
    raise AssertionError("no helper is called here")


async def _run_cell(
    registry: KernelRegistry, key: KernelKey, owner: Owner, script: str, settings: KernelSettings
) -> CellEnd:
    """Run one cell; up to the lease's queue nothing is awaited, so calls queue in the order of their tasks."""
    loop = asyncio.get_running_loop()
    abort = AbortSignal()
    dispatcher = Dispatcher(
        cell="storm", limits=LIMITS, helpers=["read"], invoke=_no_tool, cwd=key.cwd, abort=abort
    )
    try:
        lease = await registry.acquire(key, owner, settings)
        return await lease.execute(
            script,
            dispatcher=dispatcher,
            abort=abort,
            deadline=loop.time() + 60,
            max_output_bytes=10_000,
        )
    finally:
        await dispatcher.close(killed=False)


def test_sixteen_kernels_with_four_callers_each(tmp_path: pathlib.Path) -> None:
    """No deadlock, first come first served on each kernel, and never more than 16 live."""
    kernels, callers, rounds = 16, 4, size(3, 25)
    settings = KernelSettings(max_live_kernels=kernels, max_queued_cells_per_kernel=callers * rounds)

    async def main() -> None:
        registry, owners = KernelRegistry(), [Owner() for _ in range(callers)]
        keys = [
            kernel_key(f"session {n}", "agent", str(tmp_path), sys.executable, ["read"])
            for n in range(kernels)
        ]
        most_live = 0

        async def watch() -> None:
            nonlocal most_live
            while True:
                live = registry.snapshot()["capacity"]["live"]  # type: ignore[index]
                most_live = max(most_live, live)
                await asyncio.sleep(0.002)

        watcher = asyncio.create_task(watch())
        try:
            for first in range(0, kernels, 4):  # not all at once: a start has 10 s, and the machine is small
                await asyncio.gather(
                    *(
                        _run_cell(registry, key, owners[0], "order = []", settings)
                        for key in keys[first : first + 4]
                    )
                )
            extra = kernel_key("one too many", "agent", str(tmp_path), sys.executable, ["read"])
            calls = [
                asyncio.create_task(
                    _run_cell(
                        registry,
                        key,
                        owners[caller],
                        f"order.append(({turn}, {caller}))\nprint(order)",
                        settings,
                    )
                )
                for turn in range(rounds)
                for caller in range(callers)
                for key in keys
            ]
            await asyncio.sleep(0)
            with pytest.raises(Unavailable) as refused:
                await _run_cell(registry, extra, owners[0], "pass", settings)
            assert refused.value.reason == "capacity_exhausted"
            ends = await asyncio.wait_for(asyncio.gather(*calls), 240)
            expected: list[tuple[int, int]] = []
            for turn in range(rounds):
                for caller in range(callers):
                    expected.append((turn, caller))
                    for end in ends[:kernels]:
                        assert (end.reason, end.output.text) == (None, f"{expected}\n")
                    del ends[:kernels]
            assert most_live == kernels
        finally:
            watcher.cancel()
            await registry.aclose()

    hostloop.run(main(), 300)


def test_more_agents_than_kernels(storm) -> None:  # type: ignore[no-untyped-def]
    """12 agents share 3 kernels: the cap holds, whoever finds none is told and runs alone, nobody waits for ever."""
    chance = seeded(5)
    turns = size(40, 600)

    async def main(crowd: Crowd) -> None:
        most_live = 0
        reasons: Counter[object] = Counter()

        async def one(agent: str, pause_s: float) -> None:
            nonlocal most_live
            result = await crowd.run(
                f"import time\ntime.sleep({pause_s})\nprint('ran')", agent=agent, max_live_kernels=3
            )
            fallback = result.details.get("fallback_reason")
            reasons[fallback] += 1
            assert result.details.get("reason") is None, result.text
            assert result.text.endswith("ran\n")
            assert fallback in (None, "capacity_exhausted")
            assert (fallback is None) is result.details["persistent"]
            most_live = max(most_live, crowd.registry.snapshot()["capacity"]["live"])  # type: ignore[index]

        works = [
            functools.partial(one, f"agent {chance.randrange(12)}", chance.choice([0, 0, 0.05]))
            for _ in range(turns)
        ]
        started = time.monotonic()
        await in_parallel(6, works)
        print(f"{turns} calls in {time.monotonic() - started:.1f} s: {dict(reasons)}")
        assert most_live <= 3
        assert reasons[None] > 0

    storm("session", main)
