"""Storms: many random things at random moments, small by default and in full size with ``make soak``.

Each storm draws from ``random.Random(seed)`` with a fixed seed that a failure shows, so that it can be run again.
Sizes are given as ``size(default, soak)``.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from lemon_kernel import (
    AbortSignal,
    ExecuteCode,
    ExecuteCodeConfig,
    KernelRegistry,
    Owner,
    SessionScope,
    ToolResult,
)

from ..conftest import SOAK

T = TypeVar("T")

DEATH_S = 4.0
"""How long after an abort everything of a cell may take to be gone: the graces of behaviour 6.7 and some slack."""


def size(default: int, soak: int) -> int:
    return soak if SOAK else default


class Crowd:
    """Agents side by side on one loop and, in session mode, one registry."""

    def __init__(self, folder: pathlib.Path, mode: str) -> None:
        self.folder = folder
        self.mode = mode
        self.registry = KernelRegistry()
        self.owners: dict[str, Owner] = {}

    async def run(
        self,
        script: str,
        *,
        agent: str = "agent",
        abort: AbortSignal | None = None,
        timeout_ms: int = 60_000,
        reset: bool = False,
        helpers: dict[str, Any] | None = None,
        **config: Any,
    ) -> ToolResult:
        """Run `script` as the agent named `agent`; on a kernel of its own in session mode."""
        owner = self.owners.setdefault(agent, Owner())
        tool = ExecuteCode(
            self.folder,
            # a script that calls until it is cut short must not come to the end of its budget on a quick machine
            config=ExecuteCodeConfig(
                **{"enabled": True, "kernel_mode": self.mode, "python_path": sys.executable}
                | {"max_rpc_calls": 1_000_000, "max_rpc_result_bytes": 2**31 - 1}
                | config
            ),
            registry=self.registry,
            scope=SessionScope(agent, "agent", owner),
            helpers=helpers or {},
        )
        params = {"script": script, "timeout_ms": timeout_ms, "reset": reset}
        return await tool.execute(params, abort=abort or AbortSignal())

    async def leave(self, agent: str) -> None:
        """End the agent's session, and with it its kernel."""
        await self.registry.detach(self.owners.pop(agent))

    async def close(self) -> None:
        for owner in self.owners.values():
            owner.close()
        await self.registry.aclose()


@pytest.fixture
def storm(
    tmp_path: pathlib.Path,
) -> Iterator[Callable[[str, Callable[[Crowd], Coroutine[Any, Any, T]]], T]]:
    """Run a coroutine with a :class:`Crowd` of the given mode; afterwards nothing of it is left."""
    folder = tmp_path / "work"
    folder.mkdir()

    def run(mode: str, main: Callable[[Crowd], Coroutine[Any, Any, T]]) -> T:
        async def whole() -> T:
            crowd = Crowd(folder, mode)
            try:
                return await main(crowd)
            finally:
                await crowd.close()

        before = marked()
        result = asyncio.run(whole())
        wait_until(lambda: marked() <= before, DEATH_S, "the death of everything that was launched")
        return result

    yield run
    assert not workspaces(pathlib.Path(os.environ["TMPDIR"]))


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        time.sleep(0.02)


async def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Return whether no live process has `pid`; a zombie is not alive."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def marked(tmpdir: str | None = None) -> set[int]:
    """Return the live processes that carry a run's marker and have `tmpdir`, by default ours, as TMPDIR."""
    mine = b"TMPDIR=" + os.fsencode(tmpdir or os.environ["TMPDIR"])
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                environ = pathlib.Path("/proc", name, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mine in environ and any(entry.startswith(b"LEMON_RUN_ID=") for entry in environ):
                found.add(int(name))
    return {pid for pid in found if not is_gone(pid)}


def workspaces(tmpdir: pathlib.Path) -> list[str]:
    return sorted(
        entry.name
        for root in tmpdir.glob("lemon-private-*")
        for entry in root.iterdir()
        if entry.name.startswith(("lemon-exec-code-", "lemon-kernel-"))
    )


def seeded(seed: int) -> random.Random:
    """Return the storm's random numbers and show the seed if the test fails (pytest shows what is printed)."""
    print(f"seed {seed}")
    return random.Random(seed)


async def in_parallel(count: int, works: list[Callable[[], Awaitable[None]]]) -> None:
    """Do all `works`, at most `count` at the same time; the first failure is raised at once."""
    places = asyncio.Semaphore(count)

    async def one(work: Callable[[], Awaitable[None]]) -> None:
        async with places:
            await work()

    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(one(work))
