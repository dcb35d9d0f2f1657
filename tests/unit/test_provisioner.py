"""LemonProvisioner as Jupyter uses it: real kernels through jupyter_client's managers and nbclient."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.manager import AsyncKernelManager, KernelManager
from lemon_provisioner import LemonProvisioner
from lemon_provisioner import provisioner as provisioner_module
from lemon_provisioner.process import ChildProcess

from ..kernels import alive, wait_until, workspaces


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, files = workspaces(), connection_files()
    yield
    wait_until(lambda: workspaces() == before)
    assert connection_files() == files


def connection_files() -> list[str]:
    folders = (os.environ["JUPYTER_RUNTIME_DIR"], os.environ["TMPDIR"])
    return sorted(name for folder in folders for name in os.listdir(folder) if name.endswith(".json"))


def managed(work: Callable[[AsyncKernelManager], Awaitable[None]]) -> None:
    """Run `work` with a started kernel, and end it whatever happens."""

    async def main() -> None:
        manager = AsyncKernelManager(kernel_name="lemon")
        await manager.start_kernel(cwd=os.environ["HOME"])
        try:
            await work(manager)
        finally:
            if manager.has_kernel:
                await manager.shutdown_kernel(now=True)
            await manager.cleanup_resources()

    asyncio.run(main())


async def ready(manager: AsyncKernelManager) -> Any:
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=30)
    return client


async def execute(client: Any, code: str) -> dict[str, Any]:
    """Run a front-end cell and return its reply's content with the printed text under ``stdout``."""
    reply = await client.execute_interactive(
        code, timeout=30, store_history=True, allow_stdin=False, output_hook=(out := []).append
    )
    printed = "".join(m["content"]["text"] for m in out if m["msg_type"] == "stream")
    results = [m["content"]["data"]["text/plain"] for m in out if m["msg_type"] == "execute_result"]
    return reply["content"] | {"stdout": printed, "results": results}


def test_front_end_launch_is_private_and_ordinary() -> None:
    """Workspace 0700, sockets in it, Jupyter's connection file 0600, a 256-bit key; cells are IPython's."""

    async def work(manager: AsyncKernelManager) -> None:
        provisioner = manager.provisioner
        assert isinstance(provisioner, LemonProvisioner)
        workspace = provisioner.workspace
        assert workspace is not None
        assert stat.S_IMODE(os.lstat(workspace).st_mode) == 0o700
        assert manager.transport == "ipc"
        assert manager.ip == f"{workspace}/k"
        assert stat.S_IMODE(os.stat(manager.connection_file).st_mode) == 0o600
        assert not manager.connection_file.startswith(workspace)
        assert len(bytes.fromhex(manager.session.key.decode())) == 32
        assert provisioner.process is not None
        process = Path("/proc", str(provisioner.process.pid))
        command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        assert manager.session.key not in command + environment
        assert os.getpgid(provisioner.process.pid) == provisioner.process.pid
        for name in os.listdir(workspace):
            assert not os.lstat(os.path.join(workspace, name)).st_mode & 0o077
        client = await ready(manager)
        ran = await execute(
            client, "import os, sys\nprint(os.getcwd() == os.path.expanduser('~'), '' in sys.path)"
        )
        assert ran["stdout"] == "True True\n"
        assert (await execute(client, "%time 1\n1 + 1"))["results"] == ["2"]
        assert (await execute(client, "import asyncio\nawait asyncio.sleep(0)"))["status"] == "ok"
        ran = await execute(client, "print([os.environ.get(n) for n in ('FORCE_COLOR', 'CLICOLOR')])")
        assert ran["stdout"] == "[None, None]\n"
        assert (await execute(client, "get_ipython().history_manager.hist_file"))["results"] == ["':memory:'"]
        client.stop_channels()

    managed(work)


def test_restart_keeps_clients_connected() -> None:
    """A restart keeps workspace, sockets, file and key: a client made before goes on (0.13)."""

    async def work(manager: AsyncKernelManager) -> None:
        client = await ready(manager)
        await execute(client, "kept = 1")
        before = (manager.session.key, manager.connection_file, manager.ip, workspaces())
        pid = manager.provisioner.process.pid
        await manager.restart_kernel(now=True)
        assert (manager.session.key, manager.connection_file, manager.ip, workspaces()) == before
        assert not alive(pid)
        await client.wait_for_ready(timeout=30)
        assert (await execute(client, "'kept' in globals()"))["results"] == ["False"]
        client.stop_channels()

    managed(work)


def test_new_ports_renew_everything() -> None:
    """``newports=True`` gives a new workspace, sockets, connection file content and key (D-29)."""

    async def work(manager: AsyncKernelManager) -> None:
        key, ip, folders = manager.session.key, manager.ip, workspaces()
        await manager.restart_kernel(now=True, newports=True)
        assert manager.session.key != key
        assert manager.ip != ip
        assert len(workspaces()) == len(folders)
        info = json.loads(Path(manager.connection_file).read_text())
        assert (info["key"], info["ip"]) == (manager.session.key.decode(), manager.ip)
        client = await ready(manager)
        assert (await execute(client, "1"))["status"] == "ok"
        client.stop_channels()

    managed(work)


def test_interrupt_is_answered() -> None:
    """An interrupted front-end cell is answered, under a storm as well, and the kernel goes on."""

    async def work(manager: AsyncKernelManager) -> None:
        client = await ready(manager)
        running = asyncio.ensure_future(execute(client, "import time\ntime.sleep(30)"))
        await asyncio.sleep(0.3)
        await manager.interrupt_kernel()
        assert (await running)["ename"] == "KeyboardInterrupt"

        for _ in range(5):
            running = asyncio.ensure_future(execute(client, "import asyncio\nawait asyncio.sleep(600)"))
            await asyncio.sleep(0.2)
            await manager.interrupt_kernel()
            assert (await running)["ename"] == "CancelledError"

        async def storm() -> None:
            while True:
                await manager.interrupt_kernel()
                await asyncio.sleep(0.001)

        storming = asyncio.ensure_future(storm())
        for _ in range(40):
            assert (await execute(client, "sum(range(1000))"))["status"] in ("ok", "error")
        storming.cancel()
        assert (await execute(client, "'alive'"))["results"] == ["'alive'"]
        client.stop_channels()

    managed(work)


def test_polite_shutdown_kills_children() -> None:
    """Children that ignore SIGINT and SIGTERM are gone after a polite shutdown."""
    child = 0

    async def work(manager: AsyncKernelManager) -> None:
        nonlocal child
        client = await ready(manager)
        ran = await execute(
            client,
            "import subprocess\n"
            "print(subprocess.Popen(['sh', '-c', 'trap \"\" INT TERM; while :; do sleep 60; done'],\n"
            "    start_new_session=True).pid)",
        )
        child = int(ran["stdout"])
        client.stop_channels()
        started = time.monotonic()
        await manager.shutdown_kernel()
        assert time.monotonic() - started < 6

    managed(work)
    assert child
    wait_until(lambda: not alive(child))


def test_cleanup_after_a_crash_kills_the_group() -> None:
    """After a crash only ``cleanup`` is called (nbclient): it kills what is left, any number of times."""

    async def work(manager: AsyncKernelManager) -> None:
        client = await ready(manager)
        ran = await execute(client, "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)")
        child = int(ran["stdout"])
        client.execute("import os; os._exit(7)")
        await manager.provisioner.process.wait()
        client.stop_channels()
        await manager.cleanup_resources()
        wait_until(lambda: not alive(child))
        await manager.cleanup_resources()
        await manager.provisioner.cleanup()
        assert manager.provisioner.exit_status == 7
        assert not await manager.is_alive()

    managed(work)


def test_dead_kernel_is_noticed_by_poll() -> None:
    """``poll`` gives the exit status of a killed kernel, and its children are dead then."""

    async def work(manager: AsyncKernelManager) -> None:
        assert await manager.is_alive()
        process = manager.provisioner.process
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert await manager.provisioner.poll() == -signal.SIGKILL
        assert not await manager.is_alive()

    managed(work)


@pytest.mark.parametrize("phase", ["pre_launch", "launch_kernel"])
def test_failed_launch_releases_itself(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """If a launch fails nobody calls ``cleanup``: workspace, key and connection file are gone all the same."""

    def fail(*arguments: object, **options: object) -> object:
        raise OSError("no")

    if phase == "pre_launch":
        monkeypatch.setattr(provisioner_module, "child_environment", fail)
    else:
        monkeypatch.setattr(ChildProcess, "spawn", fail)

    async def main() -> None:
        manager = AsyncKernelManager(kernel_name="lemon")
        with pytest.raises(OSError, match="no"):
            await manager.start_kernel()
        assert not manager.has_kernel
        await manager.cleanup_resources()

    asyncio.run(main())


def test_long_path_falls_back_to_encrypted_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a socket's path would have more than 107 bytes: loopback TCP with CurveZMQ."""
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))

    async def work(manager: AsyncKernelManager) -> None:
        assert (manager.transport, manager.ip) == ("tcp", "127.0.0.1")
        assert manager.curve_publickey is not None
        client = await ready(manager)
        assert (await execute(client, "6 * 7"))["results"] == ["42"]
        client.stop_channels()
        plain = manager.client(curve_publickey=None, curve_secretkey=None)
        plain.start_channels()
        plain.shell_channel.socket.sndtimeo = 500  # once the handshake has failed there is nowhere to send to

        async def ask() -> None:
            plain.kernel_info()
            await plain.get_shell_msg(timeout=0.5)

        with pytest.raises((queue.Empty, TimeoutError, zmq.Again)):
            await ask()
        plain.stop_channels()

    managed(work)


def test_info_is_json_and_finds_the_kernel_again() -> None:
    """What ``get_provisioner_info`` says survives JSON, and another provisioner can stop the kernel with it."""

    async def work(manager: AsyncKernelManager) -> None:
        info = json.loads(json.dumps(await manager.provisioner.get_provisioner_info()))
        other = LemonProvisioner(kernel_id="other", kernel_spec=manager.kernel_spec)
        await other.load_provisioner_info(info)
        assert other.has_process
        assert other.connection_info["key"] == manager.session.key
        assert await other.poll() is None
        pid = info["pid"]
        await other.cleanup()
        assert not alive(pid)
        assert await manager.provisioner.poll() == -signal.SIGKILL
        again = LemonProvisioner(kernel_id="again", kernel_spec=manager.kernel_spec)
        await again.load_provisioner_info(info | {"started": 1})
        assert not again.has_process

    managed(work)


def test_blocking_manager_works() -> None:
    """The synchronous manager (nbclient's way through ``run_sync``) launches and ends a kernel."""
    manager = KernelManager(kernel_name="lemon")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=30)
    reply = client.execute_interactive("1 + 1", timeout=30, output_hook=lambda message: None)
    client.stop_channels()
    manager.shutdown_kernel()

    assert reply["content"]["status"] == "ok"
    assert not manager.is_alive()


def test_configured_interpreter_is_launched(tmp_path: Path) -> None:
    """The trait ``interpreter`` replaces the kernelspec's Python; the staged script side is used there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    async def main() -> None:
        manager = AsyncKernelManager(kernel_name="lemon")
        manager.config.LemonProvisioner.interpreter = str(python)
        await manager.start_kernel()
        try:
            client = await ready(manager)
            ran = await execute(client, "import lemon_tools, lemon_shim\nprint(lemon_shim.__file__)")
            assert ran["stdout"].startswith(manager.provisioner.workspace + "/shim/lemon_shim/")
            client.stop_channels()
        finally:
            await manager.shutdown_kernel(now=True)

    asyncio.run(main())
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[0] == "-P"
    assert arguments[1].endswith("/shim")


def test_package_is_light() -> None:
    """Whoever needs only workspaces and processes imports no Jupyter and no zmq."""
    code = (
        "import sys, lemon_provisioner.workspace, lemon_provisioner.process, lemon_provisioner.key\n"
        "print({'zmq', 'traitlets', 'jupyter_client'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_debugger_is_offered_and_loaded_late() -> None:
    """The kernel says that it can debug, imports debugpy at the first debug request, and debugs."""

    async def work(manager: AsyncKernelManager) -> None:
        client = await ready(manager)
        loaded = "import sys; 'debugpy' in sys.modules"
        assert (await execute(client, loaded))["results"] == ["False"]
        info = await client.kernel_info(reply=True, timeout=30)
        assert "debugger" in info["content"]["supported_features"]
        request = {"type": "request", "seq": 1, "command": "initialize", "arguments": {"adapterID": ""}}
        message = client.session.msg("debug_request", request)
        client.control_channel.send(message)
        reply = await client.get_control_msg(timeout=30)
        assert reply["content"].get("success"), reply["content"]
        assert (await execute(client, loaded))["results"] == ["True"]
        client.stop_channels()

    managed(work)


def test_helper_without_host_says_so() -> None:
    """In a kernel that has no helper host a call raises ToolError within the time allowed (6.13)."""

    async def work(manager: AsyncKernelManager) -> None:
        client = await ready(manager)
        ran = await execute(client, "read('x')")
        assert ran["ename"] == "ToolError"
        assert "no helper host" in ran["evalue"]
        client.stop_channels()

    managed_without_host(work)


def managed_without_host(work: Callable[[AsyncKernelManager], Awaitable[None]]) -> None:
    async def main() -> None:
        manager = AsyncKernelManager(kernel_name="lemon")
        manager.config.LemonProvisioner.notebook_host = ""
        await manager.start_kernel()
        try:
            await work(manager)
        finally:
            await manager.shutdown_kernel(now=True)

    asyncio.run(main())


def test_nbclient_runs_a_notebook_and_leaves_nothing() -> None:
    """A notebook runs headless through nbclient; a cell that kills the kernel leaves nothing either."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [nbformat.v4.new_code_cell("print('hello')"), nbformat.v4.new_code_cell("1 + 1")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, kernel_name="lemon", timeout=30).execute()

    assert notebook.cells[0].outputs[0].text == "hello\n"
    assert notebook.cells[1].outputs[0]["data"]["text/plain"] == "2"

    cells = [
        nbformat.v4.new_code_cell("import os, subprocess; subprocess.Popen(['sleep', '601']); os._exit(1)")
    ]
    dead = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="lemon", timeout=30)
    with pytest.raises(nbclient.exceptions.DeadKernelError):
        dead.execute()
