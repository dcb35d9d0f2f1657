"""The host's end of a session kernel, against real kernels."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lemon_shim.message import Signer, decode, encode

from lemon_kernel.session import link as link_module
from lemon_kernel.session.link import KernelDied, KernelLink, ProtocolFault, StartupError

from ..kernels import LIMITS, Kernel, alive, descriptors, wait_until, workspaces


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        yield kernel


def test_cell_calls_a_helper_and_returns_a_block(kernel: Kernel) -> None:
    """One cell: output, one helper call, one text block and one notification arrive, and state stays."""
    ran = kernel.cell("value = read('a path')\nprint('printed', value)\ntext('a block')\nnotify('a note')")

    assert ran.ok
    assert ran.output == "printed a path\n"
    assert ran.blocks == ["a block"]
    assert ran.notes == ["a note"]
    assert (ran.stats.calls, ran.stats.errors, ran.stats.denied) == (1, 0, 0)
    assert kernel.cell("print(value)").output == "a path\n"


def test_exception_names_its_line(kernel: Kernel) -> None:
    """An exception is reported with the submitted line + 1, its source and nothing of ours (D-7, D-14)."""
    ran = kernel.cell("def f():\n    return 1 / 0\nf()")

    assert ran.reply is not None
    assert (ran.reply.ok, ran.reply.name, ran.reply.message) == (
        False,
        "ZeroDivisionError",
        "division by zero",
    )
    name = f"<cell {kernel.number}>"
    assert ran.output.startswith("Traceback (most recent call last):\n")
    assert f'  File "{name}", line 4, in <module>\n    f()\n' in ran.output
    assert f'  File "{name}", line 3, in f\n    return 1 / 0\n' in ran.output
    assert "lemon" not in ran.output


def test_output_is_complete_and_ends_with_the_cell(kernel: Kernel) -> None:
    """What a cell and its children print is in its output and in no other, however much it is (7.4)."""
    code = (
        "import os, subprocess, sys\n"
        "print('first')\n"
        "subprocess.run(['sh', '-c', 'echo child'])\n"
        "print('x' * 200_000)\n"
        "os.write(1, b'raw\\n')\n"
        "print('last', end='')"
    )
    ran = kernel.cell(code)

    assert ran.output == "first\nchild\n" + "x" * 200_000 + "\nraw\nlast"
    assert kernel.cell("pass").output == ""


def test_chatty_background_child_cannot_prolong_a_cell(kernel: Kernel) -> None:
    """A child that prints for ever delays neither the end of its cell nor that of later ones."""
    code = (
        "import subprocess\n"
        "child = subprocess.Popen(['sh', '-c', 'while :; do echo noise; done'])\n"
        "print('done')"
    )
    started = time.monotonic()
    ran = kernel.cell(code)
    again = kernel.cell("child.kill(); child.wait(); print('quiet')")

    assert ran.ok
    assert again.ok
    assert time.monotonic() - started < 10
    assert kernel.cell("print('alone')").output == "alone\n"


def test_batch_and_threads_use_the_bridge(kernel: Kernel) -> None:
    """``batch()`` returns in order, and sixteen threads at once get their own answers."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "print(batch([('read', {'path': str(i)}) for i in range(40)]) == [str(i) for i in range(40)])\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    print(list(pool.map(read, map(str, range(300)))) == [str(i) for i in range(300)])"
    )
    ran = kernel.cell(code)

    assert ran.output == "True\nTrue\n"
    assert ran.stats.calls == 340


def test_death_is_noticed_and_keeps_what_was_acknowledged() -> None:
    """``os._exit`` fails the cell at once; its output and acknowledged blocks are there."""
    with Kernel() as kernel:
        started = time.monotonic()
        ran = kernel.cell("import os\ntext('kept')\nprint('before', flush=True)\nos._exit(3)")

        assert isinstance(ran.error, KernelDied)
        assert time.monotonic() - started < 5
        assert ran.blocks == ["kept"]
        assert ran.output == "before\n"
        assert kernel.link.dead.is_set()
        assert isinstance(kernel.cell("print(1)").error, KernelDied)


def test_cancel_ends_a_cell_that_ignores_everything() -> None:
    """A cell that swallows SIGINT and SIGTERM is dead after the escalation, with its children and workspace."""
    code = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "notify(child.pid)\n"
        "while True:\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        pass"
    )
    before = workspaces()
    with Kernel() as kernel:
        pid = kernel.link.pid

        async def main() -> tuple[bool, float, list[str]]:
            running = asyncio.ensure_future(kernel.cell_async(code, timeout_s=3))
            ran = await running
            started = time.monotonic()
            confirmed = await kernel.link.cancel()
            return confirmed, time.monotonic() - started, ran.notes

        confirmed, took_s, notes = kernel.run(main())

        assert confirmed
        assert took_s < 6
        assert not alive(pid)
        assert not alive(int(notes[0]))
        assert workspaces() == before


def test_stop_of_an_idle_kernel_is_quick_and_leaves_nothing() -> None:
    """``stop()`` confirms the death and removes the workspace; a second one says the same."""
    before = workspaces()
    kernel = Kernel()
    pid = kernel.link.pid
    (workspace,) = set(workspaces()) - set(before)

    assert stat.S_IMODE(os.lstat(workspace).st_mode) == 0o700
    assert stat.S_IMODE(os.lstat(os.path.join(workspace, "connection.json")).st_mode) == 0o600
    started = time.monotonic()
    assert kernel.run(kernel.link.stop())
    assert time.monotonic() - started < 2
    assert kernel.run(kernel.link.stop())
    assert not alive(pid)
    assert workspaces() == before
    kernel.runner.close()


def test_many_starts_leak_nothing() -> None:
    """Starting and ending kernels leaves no descriptor, task or workspace behind."""
    before = workspaces()
    with Kernel() as kernel:
        assert kernel.cell("print(1)").ok

        async def main(rounds: int) -> None:
            for _ in range(rounds):
                link = await KernelLink.start(
                    interpreter=sys.executable,
                    cwd=kernel.cwd,
                    helpers=["read"],
                    deadline=asyncio.get_running_loop().time() + 30,
                )
                assert await link.stop()
                assert len(asyncio.all_tasks()) == 1 + 1  # this one and the outer kernel's watcher

        kernel.run(main(1))
        once = descriptors()
        kernel.run(main(4))
        wait_until(lambda: descriptors() <= once)  # zmq's threads close sockets a moment later
        assert len(workspaces()) == len(before) + 1


def test_interpreter_without_ipykernel_is_named_with_the_mend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where ipykernel is missing the start fails quickly, and one warning says what to install."""
    before = workspaces()
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")

    async def main() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        for _ in range(2):
            with pytest.raises(StartupError):
                await KernelLink.start(
                    interpreter=python, cwd=str(tmp_path), helpers=[], deadline=loop.time() + 30
                )
        return loop.time() - started

    with caplog.at_level(logging.WARNING, "lemon_kernel.config"):
        assert asyncio.run(main()) < 8

    warnings = [record.getMessage() for record in caplog.records if record.name == "lemon_kernel.config"]
    assert len(warnings) == 1
    assert python in warnings[0]
    assert f"{python} -m pip install 'ipykernel>=7.4,<8'" in warnings[0]
    assert workspaces() == before


def test_start_that_is_cut_releases_everything() -> None:
    """A deadline or a cancelled caller during the start leaves neither process nor workspace."""
    before, folders = descriptors(), workspaces()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(StartupError):
            await KernelLink.start(
                interpreter=sys.executable, cwd="/", helpers=[], deadline=loop.time() + 0.05
            )
        task = loop.create_task(
            KernelLink.start(interpreter=sys.executable, cwd="/", helpers=[], deadline=loop.time() + 30)
        )
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: workspaces() == folders)
    assert descriptors() <= before + 4  # zmq's own, once per process


@pytest.mark.parametrize("content", [b'{"status": "odd"}', b"[]", b'{"status": "error"}'])
def test_malformed_reply_is_a_protocol_fault(kernel: Kernel, content: bytes) -> None:
    """A reply to our request that is no execute_reply ends the cell with ProtocolFault (6.11)."""
    kind = "kernel_info_reply" if content == b"[]" else "execute_reply"

    async def main() -> object:
        running = asyncio.ensure_future(kernel.cell_async("import time; time.sleep(0.2)"))
        await asyncio.sleep(0.05)
        link = kernel.link
        assert link._cell is not None
        parent = encode({"msg_id": link._cell.message_id})
        link._on_shell(link._signer.frames(kind, content, parent))
        return (await running).error

    assert isinstance(kernel.run(main()), ProtocolFault)


def test_unsigned_messages_are_dropped_and_counted(kernel: Kernel) -> None:
    """A message with a wrong signature changes nothing but the count (6.11)."""
    link = kernel.link
    refused = link._signer.refused

    async def main() -> bool:
        running = asyncio.ensure_future(kernel.cell_async("import time; time.sleep(0.1)"))
        await asyncio.sleep(0.02)
        assert link._cell is not None
        forged = Signer(b"another key", "x").frames(
            "execute_reply",
            b'{"status":"error","ename":"E"}',
            encode({"msg_id": link._cell.message_id}),
        )
        link._on_shell(forged)
        link._on_iopub(forged)
        link._on_shell([b"nonsense"])
        return (await running).ok

    assert kernel.run(main())
    assert link._signer.refused == refused + 3


def test_idle_without_reply_is_a_protocol_fault(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own idle and no reply within the time allowed end the cell (6.11)."""
    monkeypatch.setattr(link_module, "REPLY_AFTER_IDLE_S", 0.05)
    with Kernel() as mute:

        async def main() -> object:
            assert mute.link._shell is not None
            mute.link._shell._receive = lambda frames: None
            return (await mute.cell_async("pass", timeout_s=5)).error

        assert isinstance(mute.run(main()), ProtocolFault)


def test_stale_reply_is_ignored(kernel: Kernel) -> None:
    """A reply to another request is nobody's."""

    async def main() -> bool:
        running = asyncio.ensure_future(kernel.cell_async("import time; time.sleep(0.1)"))
        await asyncio.sleep(0.02)
        link = kernel.link
        link._on_shell(link._signer.frames("execute_reply", b"[]", encode({"msg_id": "older"})))
        return (await running).ok

    assert kernel.run(main())


def test_frames_of_ended_cells_do_nothing(kernel: Kernel) -> None:
    """A call with an old token is refused, costs the new cell no slot, and says nothing else."""
    kernel.cell("from lemon_tools import _raw\nold = _raw.token")
    ran = kernel.cell("print(_raw({'type': 'call', 'id': 7, 'token': old, 'tool': 'read', 'params': {}}))")

    assert "'ok': False, 'content': 'rpc authentication failed'" in ran.output
    assert (ran.stats.calls, ran.stats.denied) == (0, 1)


def test_oversized_frames_harm_nothing(kernel: Kernel) -> None:
    """A frame beyond the cap is refused; the bridge goes on (5.8)."""
    ran = kernel.cell(
        "from lemon_tools import _raw\n"
        "print(_raw({'type': 'call', 'id': 1, 'token': _raw.token, 'tool': 'read',\n"
        "            'params': {'path': 'x' * 2_000_000}})['content'])\n"
        "print(read('after'))",
        limits=LIMITS,
    )

    assert ran.output == "invalid rpc request\nafter\n"


def test_ordinary_client_may_share_a_session_kernel() -> None:
    """A front end that knows the connection file gets stock cells, before and after agent cells."""
    from jupyter_client.asynchronous.client import AsyncKernelClient

    with Kernel() as kernel:

        async def stock(client: AsyncKernelClient, code: str) -> list[tuple[str, str]]:
            seen: list[tuple[str, str]] = []

            def hook(message: dict[str, Any]) -> None:
                content = message["content"]
                if message["msg_type"] in ("stream", "execute_result"):
                    shown = content.get("text") or content["data"]["text/plain"]
                    seen.append((message["msg_type"], shown))

            reply = await client.execute_interactive(code, timeout=30, output_hook=hook)
            assert reply["content"]["status"] == "ok", reply
            return seen

        async def main() -> None:
            manager = kernel.link._manager
            assert manager is not None
            client = AsyncKernelClient(connection_file=manager.connection_file)
            client.load_connection_file()
            client.start_channels()
            await client.wait_for_ready(timeout=30)
            for round_ in range(3):
                assert (await kernel.cell_async(f"x = {round_}; print(read('agent'))")).output == "agent\n"
                assert await stock(client, "print('front'); x") == [
                    ("stream", "front\n"),
                    ("execute_result", str(round_)),
                ]
                assert await stock(client, "get_ipython().__class__.__name__; _") == [
                    ("execute_result", str(round_))
                ]
                assert await stock(client, "import asyncio; await asyncio.sleep(0, 'awaited')") == [
                    ("execute_result", "'awaited'")
                ]
            client.stop_channels()

        kernel.run(main())


def test_signer_refuses_what_is_not_signed() -> None:
    """The hand-made messages are Jupyter's: what one signer made another opens, and nothing else."""
    ours, theirs = Signer(b"k" * 100, "s"), Signer(b"other", "s")
    frames = [b"route", *ours.frames("status", b"{}", b'{"msg_id":"1"}')]

    message = ours.open(frames)
    assert message is not None
    assert (message.route, message.parent, message.content) == ([b"route"], b'{"msg_id":"1"}', b"{}")
    assert decode(message.header)["msg_type"] == "status"
    assert theirs.open(frames) is None
    assert ours.open(frames[:4]) is None
    assert (ours.refused, theirs.refused) == (1, 1)
