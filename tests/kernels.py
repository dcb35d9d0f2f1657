"""A real session kernel for tests, driven from plain functions, and what its processes leave behind."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from lemon_provisioner.templates import Templates

from lemon_kernel.bridge.dispatch import Call, Dispatcher, Limits, Stats
from lemon_kernel.helpers.base import HelperContext, HelperResult
from lemon_kernel.output import OutputCapture
from lemon_kernel.scope import AbortSignal
from lemon_kernel.session.link import CellReply, KernelLink

T = TypeVar("T")
LIMITS = Limits(max_rpc_calls=10_000, max_rpc_result_bytes=1 << 24, max_text_bytes=65_536, max_parallel_rpc=4)


async def echo(call: Call, context: HelperContext) -> str | HelperResult:
    """Answer a helper call with its parameter ``path``."""
    return str(call.params.get("path"))


@dataclass
class Ran:
    """What one cell came to."""

    reply: CellReply | None
    error: BaseException | None
    output: str
    blocks: list[str]
    stats: Stats
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.reply is not None and self.reply.ok


class Kernel:
    """A kernel of its own and the loop it lives on; a context manager."""

    def __init__(
        self,
        *,
        cwd: str | None = None,
        helpers: Sequence[str] = ("read",),
        interpreter: str = sys.executable,
        invoke: Callable[[Call, HelperContext], Awaitable[str | HelperResult]] = echo,
        templates: Templates | None = None,
        runner: asyncio.Runner | None = None,
    ) -> None:
        """Start it; `templates` live on the loop of `runner`, which is the caller's to close."""
        self.runner = runner or asyncio.Runner()
        self._owns_runner = runner is None
        self._templates = templates
        self.cwd = cwd or tempfile.gettempdir()
        self.helpers = tuple(helpers)
        self.invoke = invoke
        self.number = 0
        self.interpreter = interpreter
        self.link: KernelLink = self.run(self._start())

    async def _start(self) -> KernelLink:
        deadline = asyncio.get_running_loop().time() + 30
        return await KernelLink.start(
            interpreter=self.interpreter,
            cwd=self.cwd,
            helpers=self.helpers,
            deadline=deadline,
            templates=self._templates,
        )

    def run(self, awaitable: Awaitable[T]) -> T:
        async def main() -> T:
            return await awaitable

        return self.runner.run(main())

    def cell(self, code: str, *, limits: Limits = LIMITS, timeout_s: float = 30) -> Ran:
        return self.run(self.cell_async(code, limits=limits, timeout_s=timeout_s))

    async def cell_async(self, code: str, *, limits: Limits = LIMITS, timeout_s: float = 30) -> Ran:
        self.number += 1
        notes: list[str] = []
        dispatcher = Dispatcher(
            cell=f"cell-{self.number}",
            limits=limits,
            helpers=self.helpers,
            invoke=self.invoke,
            cwd=self.cwd,
            abort=AbortSignal(),
            on_notify=notes.append,
        )
        capture = OutputCapture(1 << 24)
        reply: CellReply | None = None
        error: BaseException | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.link.run_cell(
                    code, number=self.number, dispatcher=dispatcher, capture=capture
                )
        except Exception as raised:
            error = raised
        stats = await dispatcher.close(killed=reply is None)
        return Ran(reply, error, capture.finish().text, dispatcher.text_blocks, stats, notes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            assert self.run(self.link.cancel())
        finally:
            if self._owns_runner:
                self.runner.close()


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def wait_until(claim: Callable[[], bool], timeout_s: float = 10) -> None:
    """Wait for `claim`; for what happens in another process and tells nobody."""
    end = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def workspaces() -> list[str]:
    """The kernel workspaces that exist under this test run's TMPDIR."""
    found = []
    for folder, names, _ in os.walk(tempfile.gettempdir()):
        found += [os.path.join(folder, name) for name in names if name.startswith("lemon-kernel-")]
    return found
