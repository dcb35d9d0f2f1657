"""A double of the host's end of a kernel: cells end when the test says so, deaths are confirmed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from lemon_kernel import hostloop
from lemon_kernel.bridge.dispatch import Dispatcher
from lemon_kernel.output import OutputCapture
from lemon_kernel.scope import AbortSignal, Owner
from lemon_kernel.session.kernel import CellEnd
from lemon_kernel.session.link import CellReply, KernelDied, StartupError
from lemon_kernel.session.registry import KernelRegistry, KernelSettings

NO_DISPATCHER: Dispatcher = None  # type: ignore[assignment]  # the double has no bridge
OK = CellReply(ok=True, name=None, message=None)


@dataclass
class FakeCell:
    """One cell in the double's interpreter."""

    code: str
    number: int
    capture: OutputCapture
    reply: asyncio.Future[CellReply]
    cancelled: bool = False


@dataclass
class FakeLink:
    """What `KernelLink` offers, by hand."""

    dead: asyncio.Event = field(default_factory=asyncio.Event)
    cells: list[FakeCell] = field(default_factory=list)
    cancels: int = 0
    stops: int = 0
    deaf: asyncio.Event | None = None
    """Where set, a cancelled cell ends only after this event (a link that is slow to let go)."""
    escalation: asyncio.Event | None = None
    """Where set, `cancel` is over only after this event."""

    def is_dead(self) -> bool:
        return self.dead.is_set()

    async def run_cell(
        self, code: str, *, number: int, dispatcher: Dispatcher, capture: OutputCapture
    ) -> CellReply:
        assert all(cell.reply.done() for cell in self.cells), "two cells at once"
        cell = FakeCell(code, number, capture, asyncio.get_running_loop().create_future())
        self.cells.append(cell)
        try:
            return await cell.reply
        except asyncio.CancelledError:
            cell.cancelled = True
            if self.deaf is not None:
                await self.deaf.wait()
            raise

    async def running(self, number: int = 1) -> FakeCell:
        """Wait until `number` cells have been sent and return the last."""
        await until(lambda: len(self.cells) >= number)
        return self.cells[number - 1]

    def die(self) -> None:
        self.dead.set()
        for cell in self.cells:
            if not cell.reply.done():
                cell.reply.set_exception(KernelDied("died"))

    async def cancel(self) -> bool:
        self.cancels += 1
        if self.escalation is not None:
            await self.escalation.wait()
        self.dead.set()
        return True

    async def stop(self) -> bool:
        self.stops += 1
        self.dead.set()
        return True


class FakeStart:
    """Starts doubles; `gate` holds starts back, `fails` makes them fail."""

    def __init__(self) -> None:
        self.links: list[FakeLink] = []
        self.begun = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = False

    async def __call__(
        self, *, interpreter: str, cwd: str, helpers: Sequence[str], deadline: float
    ) -> FakeLink:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise StartupError("no")
        link = FakeLink()
        self.links.append(link)
        return link


@dataclass(frozen=True)
class Key:
    """As much of a kernel key as the registry looks at."""

    digest: str
    interpreter: str = "/usr/bin/python3"
    cwd: str = "/"
    helpers: tuple[str, ...] = ()


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.000_001  # no two uses at the same time
        return self.now_s


class Desk:
    """A registry over doubles, and short words for calling it."""

    def __init__(self, **seams: object) -> None:
        self.start = FakeStart()
        self.clock = Clock()
        self.ticks = asyncio.Semaphore(0)
        seams = {"clock": self.clock, "sleep": self._sleep, "start": self.start, **seams}
        self.registry = KernelRegistry(**seams)  # type: ignore[arg-type]

    async def _sleep(self, _seconds: float) -> None:
        await self.ticks.acquire()

    @property
    def links(self) -> list[FakeLink]:
        return self.start.links

    async def call(
        self,
        owner: Owner,
        script: str = "pass",
        *,
        key: str = "k",
        abort: AbortSignal | None = None,
        timeout_s: float = 30.0,
        settings: KernelSettings | None = None,
        reset: bool = False,
    ) -> CellEnd:
        """One call of the tool, as far as the registry sees it."""
        if reset:
            await self.registry.reset(Key(key), owner)  # type: ignore[arg-type]
        settings = KernelSettings() if settings is None else settings
        deadline = asyncio.get_running_loop().time() + timeout_s
        lease = await self.registry.acquire(Key(key), owner, settings)  # type: ignore[arg-type]
        return await lease.execute(
            script,
            dispatcher=NO_DISPATCHER,
            abort=AbortSignal() if abort is None else abort,
            deadline=deadline,
            max_output_bytes=1000,
        )

    def begin(self, owner: Owner, script: str = "pass", **how: object) -> asyncio.Task[CellEnd]:
        return asyncio.create_task(self.call(owner, script, **how))  # type: ignore[arg-type]

    async def link(self, number: int = 1) -> FakeLink:
        """Wait until that many kernels have been started and return the last."""
        await until(lambda: len(self.links) >= number)
        return self.links[number - 1]

    async def finished(self, owner: Owner, script: str = "pass", **how: object) -> CellEnd:
        """A call whose cell succeeds at once."""
        task = self.begin(owner, script, **how)
        await until(
            lambda: (
                task.done()
                or any(c.code == script and not c.reply.done() for li in self.links for c in li.cells)
            )
        )
        for link in self.links:
            for cell in link.cells:
                if cell.code == script and not cell.reply.done():
                    cell.reply.set_result(OK)
        return await task

    def phases(self) -> dict[str, int]:
        phases = self.registry.snapshot()["phases"]
        assert isinstance(phases, dict)
        return {phase: count for phase, count in phases.items() if count}


async def until(condition: object, timeout_s: float = 5.0) -> None:
    """Let the loop turn until `condition()` holds."""
    assert callable(condition)
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    turns = 0
    while not condition():
        assert loop.time() < end, "it did not happen"
        turns += 1
        await asyncio.sleep(0 if turns < 100 else 0.002)


def on_host(main: object) -> None:
    """Run an async test on the host loop, where the registry lives."""
    assert callable(main)
    hostloop.run(main(), 50)
