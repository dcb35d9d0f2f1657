"""The registry over real kernels: state, loss, deaths at awkward moments, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from lemon_provisioner.key import KernelKey, kernel_key
from lemon_provisioner.workspace import private_root

from lemon_kernel import hostloop
from lemon_kernel.bridge.dispatch import Call, Dispatcher, Limits
from lemon_kernel.helpers.base import HelperContext
from lemon_kernel.scope import AbortSignal, Owner
from lemon_kernel.session import registry as session_registry
from lemon_kernel.session.kernel import CellEnd
from lemon_kernel.session.link import KernelLink
from lemon_kernel.session.registry import KernelRegistry, KernelSettings, Unavailable

pytestmark = pytest.mark.timeout(180)

LIMITS = Limits(max_rpc_calls=10, max_rpc_result_bytes=10_000, max_text_bytes=10_000, max_parallel_rpc=2)
_cells = itertools.count(1)


class Host:
    """A registry that starts real kernels and remembers them."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.links: list[KernelLink] = []
        self.registry = KernelRegistry(start=self._start)
        self.texts: list[str] = []

    async def _start(
        self, *, interpreter: str, cwd: str, helpers: Sequence[str], deadline: float
    ) -> KernelLink:
        link = await KernelLink.start(interpreter=interpreter, cwd=cwd, helpers=helpers, deadline=deadline)
        self.links.append(link)
        return link

    def key(self, session_id: str = "session", interpreter: str = sys.executable) -> KernelKey:
        return kernel_key(session_id, "agent", str(self.folder), interpreter, ["read"])

    async def run(
        self,
        owner: Owner,
        script: str,
        *,
        key: KernelKey | None = None,
        timeout_s: float = 60,
        abort: AbortSignal | None = None,
    ) -> CellEnd:
        deadline = asyncio.get_running_loop().time() + timeout_s
        own_abort = AbortSignal()
        dispatcher = Dispatcher(
            cell=f"cell-{next(_cells)}",
            limits=LIMITS,
            helpers=["read"],
            invoke=_read,
            cwd=str(self.folder),
            abort=own_abort,
        )
        end = None
        try:
            lease = await self.registry.acquire(key or self.key(), owner, KernelSettings())
            end = await lease.execute(
                textwrap.dedent(script),
                dispatcher=dispatcher,
                abort=AbortSignal() if abort is None else abort,
                deadline=deadline,
                max_output_bytes=10_000,
            )
            return end
        finally:
            own_abort.abort()
            await dispatcher.close(killed=end is None or not end.state_retained)
            self.texts = dispatcher.text_blocks


async def _read(call: Call, context: HelperContext) -> str:
    return f"contents of {call.params['path']}"


def with_host(folder: pathlib.Path, main: Callable[[Host], Awaitable[None]]) -> None:
    """Run `main` on the host loop; afterwards no process and no workspace of its kernels is left."""

    async def run() -> None:
        host = Host(folder)
        try:
            await main(host)
        finally:
            await host.registry.aclose()
        assert not [link.pid for link in host.links if alive(link.pid)]
        assert not workspaces()

    hostloop.run(run(), 170)


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def workspaces() -> list[str]:
    return [name for name in os.listdir(private_root()) if name.startswith("lemon-kernel-")]


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.mark.case(212, 214, 217)
def test_state_persists(tmp_path: pathlib.Path) -> None:
    """Names, and what a cell did before it raised, are there for the next cell; helpers and text() work."""

    async def main(host: Host) -> None:
        owner = Owner()
        first = await host.run(owner, "a = 41; import math; print('one')")
        assert (first.reason, first.output.text, first.kernel_reused) == (None, "one\n", False)
        second = await host.run(owner, "print(a + 1, math.pi > 3); text(read('x'))")
        assert (second.reason, second.output.text, second.kernel_reused) == (None, "42 True\n", True)
        assert host.texts == ["contents of x"]
        raised = await host.run(owner, "v = [1]\nraise ValueError('boom')")
        assert (raised.reason, raised.name, raised.message) == ("exception", "ValueError", "boom")
        assert raised.state_retained
        left = await host.run(owner, "import sys; sys.exit(3)")
        assert (left.reason, left.name, left.message) == ("exception", "SystemExit", "3")
        assert (await host.run(owner, "print(v)")).output.text == "[1]\n"
        assert len(host.links) == 1

    with_host(tmp_path, main)


@pytest.mark.case(224, 226)
def test_a_cell_that_ignores_signals_is_answered_on_time_and_killed(tmp_path: pathlib.Path) -> None:
    """The deadline's answer has the output so far; the process dies in the background; the next call is fresh."""

    async def main(host: Host) -> None:
        owner = Owner()
        await host.run(owner, "x = 1")
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = await host.run(
            owner,
            """
            import signal, time
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_IGN)
            print("deaf", flush=True)
            while True:
                time.sleep(1)
            """,
            timeout_s=1,
        )
        assert loop.time() - began < 3
        assert (end.reason, end.output.text, end.state_retained) == ("timeout", "deaf\n", False)
        assert alive(host.links[0].pid)
        fresh = await host.run(owner, "print('x' in globals())")
        assert (fresh.output.text, fresh.kernel_reused) == ("False\n", False)
        await until(lambda: not alive(host.links[0].pid))

    with_host(tmp_path, main)


@pytest.mark.case(228)
def test_an_abort_is_answered_at_once(tmp_path: pathlib.Path) -> None:
    """An aborted cell's caller hears within half a second (and the machine's delay)."""

    async def main(host: Host) -> None:
        abort = AbortSignal()
        call = asyncio.create_task(host.run(Owner(), "text('here')\nwhile True: pass", abort=abort))
        await until(lambda: bool(host.links) and host.registry.snapshot()["phases"]["running"] == 1)  # type: ignore[index]
        await asyncio.sleep(0.3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        abort.abort()
        end = await call
        assert loop.time() - began < 2
        assert (end.reason, end.state_retained) == ("cancelled", False)

    with_host(tmp_path, main)


@pytest.mark.case(230, 231)
def test_a_crash_is_never_replayed(tmp_path: pathlib.Path) -> None:
    """`os._exit` keeps the output; the code has run once, also after the next call."""

    async def main(host: Host) -> None:
        owner = Owner()
        end = await host.run(
            owner, "open('log', 'a').write('line\\n')\nprint('gone', flush=True)\nimport os; os._exit(9)"
        )
        assert (end.reason, end.output.text, end.state_retained) == ("kernel_died", "gone\n", False)
        assert (await host.run(owner, "print('next')")).output.text == "next\n"
        assert (tmp_path / "log").read_text() == "line\n"

    with_host(tmp_path, main)


@pytest.mark.case(329)
def test_a_kernel_killed_between_acquire_and_submit(tmp_path: pathlib.Path) -> None:
    """SIGKILL in that window: `kernel_unavailable`, not executed; the call after it gets a new kernel."""

    async def main(host: Host) -> None:
        owner = Owner()
        await host.run(owner, "x = 1")
        lease = await host.registry.acquire(host.key(), owner, KernelSettings())
        os.kill(host.links[0].pid, signal.SIGKILL)
        await host.links[0].dead.wait()
        end = await lease.execute(
            "open('ran', 'w')",
            dispatcher=None,  # type: ignore[arg-type]
            abort=AbortSignal(),
            deadline=asyncio.get_running_loop().time() + 30,
            max_output_bytes=100,
        )
        assert (end.reason, end.state_retained) == ("kernel_unavailable", False)
        assert not (await host.run(owner, "y = 1")).kernel_reused
        assert not (tmp_path / "ran").exists()

    with_host(tmp_path, main)


@pytest.mark.case(249, 253)
def test_detach_and_death_of_owners(tmp_path: pathlib.Path) -> None:
    """After `detach` the process is gone; after an owner's death it is gone soon, also during the start."""

    async def main(host: Host) -> None:
        owner = Owner()
        await host.run(owner, "x = 1")
        assert await host.registry.detach(owner)
        assert not alive(host.links[0].pid)
        assert not workspaces()

        call = asyncio.create_task(host.run(owner, "x = 1"))
        await until(lambda: bool(workspaces()))
        owner.close()
        assert (await call).reason == "kernel_discarded"
        await until(lambda: not workspaces())

    with_host(tmp_path, main)


@pytest.mark.case(263, 330)
def test_a_start_that_fails_or_hangs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that exits, or never becomes ready, is `startup_failed`, and nothing of it is left."""
    monkeypatch.setattr(session_registry, "STARTUP_TIMEOUT_S", 1.0)
    interpreters = {"exits": "exit 3", "hangs": "exec sleep 300"}
    for name, command in interpreters.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o700)

    async def main(host: Host) -> None:
        for name in interpreters:
            with pytest.raises(Unavailable) as caught:
                await host.run(Owner(), "x = 1", key=host.key(interpreter=str(tmp_path / name)))
            assert caught.value.reason == "startup_failed"
        await until(lambda: not workspaces())

    with_host(tmp_path, main)


def test_a_closing_registry_ends_starting_and_running_kernels(tmp_path: pathlib.Path) -> None:
    """`aclose` returns when the processes are gone, whatever they were doing."""

    async def main(host: Host) -> None:
        running = asyncio.create_task(host.run(Owner(), "while True: pass", key=host.key("running")))
        await until(lambda: host.registry.snapshot()["phases"]["running"] == 1)  # type: ignore[index]
        starting = asyncio.create_task(host.run(Owner(), "x = 1", key=host.key("starting")))
        await until(lambda: len(workspaces()) == 2)
        await host.registry.aclose()
        assert (await running).reason == "shutting_down"
        assert (await starting).reason == "kernel_discarded"

    with_host(tmp_path, main)


FORGETFUL = """
import asyncio, sys
from lemon_kernel import ExecuteCode, ExecuteCodeConfig, Owner, SessionScope
from lemon_provisioner.workspace import private_root

config = ExecuteCodeConfig(enabled=True, kernel_mode="session", python_path=sys.executable)
owner = Owner()
tool = ExecuteCode(".", config=config, scope=SessionScope("session", "agent", owner))

async def main():
    result = await tool.execute({"script": "import os; print(os.getpid())"})
    print(result.text.strip(), private_root(), flush=True)
    if sys.argv[1] == "idle":
        return
    started = asyncio.Event()
    ignore = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\\nnotify('on')\\n"
    call = tool.execute({"script": ignore + "while True: pass"}, on_update=lambda update: started.set())
    asyncio.create_task(call)
    await started.wait()

asyncio.run(main())
print("end", flush=True)
"""


@pytest.mark.case(328)
@pytest.mark.parametrize("state", ["idle", "deaf"])
def test_a_forgotten_registry(tmp_path: pathlib.Path, state: str) -> None:
    """A program that never calls `aclose` exits cleanly and soon, even while a cell ignores all signals but
    SIGKILL; no kernel and no workspace is left.
    """
    program = subprocess.Popen(
        [sys.executable, "-c", FORGETFUL, state],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with program:
        assert program.stdout is not None
        assert program.stderr is not None
        first = program.stdout.readline()
        assert first, program.stderr.read()
        pid, root = first.split()
        assert program.stdout.readline() == "end\n", program.stderr.read()
        ended = time.monotonic()
        errors = program.stderr.read()
        assert program.wait(20) == 0, errors
        took_s = time.monotonic() - ended
    assert errors == ""
    assert took_s < 4, "3 s, and the interpreter's own exit"
    left_by = time.monotonic() + 4
    while alive(int(pid)) or (os.path.exists(root) and os.listdir(root)):
        assert time.monotonic() < left_by, "3 s after the host's end (behaviour 6.12)"
        time.sleep(0.05)
