"""A real jupyter_server on loopback: kernels over REST and websockets, and what is left of them (issue 6)."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import websocket

from ..kernels import alive, wait_until, workspaces

TIMEOUT_S = 20


class Server:
    """A server in a process of its own, with the test as its only user; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jupyter_server",
                "--ServerApp.ip=127.0.0.1",
                "--ServerApp.port=0",
                "--ServerApp.open_browser=False",
                "--ServerApp.allow_root=True",
                f"--IdentityProvider.token={self.token}",
                f"--ServerApp.root_dir={folder}",
                "--KernelRestarter.time_to_dead=0.2",
                "--KernelRestarter.random_ports_until_alive=False",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.info = runtime / f"jpserver-{self.process.pid}.json"
        wait_until(self._listens, TIMEOUT_S)

    def _listens(self) -> bool:
        try:
            self.url = str(json.loads(self.info.read_text())["url"])
            self.rest("GET", "api/status")
        except (OSError, ValueError):
            assert self.process.poll() is None, "the server ended"
            return False
        return True

    def rest(self, method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def kernel(self, path: str = "") -> str:
        """Start a kernel in a folder below the server's and return its id."""
        return str(self.rest("POST", "api/kernels", {"name": "lemon", "path": path})["id"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(TIMEOUT_S)


class Socket:
    """One websocket of one kernel, as a front end has it; a context manager."""

    def __init__(self, server: Server, kernel: str) -> None:
        self.session = uuid.uuid4().hex
        self.socket = websocket.create_connection(
            f"ws{server.url.removeprefix('http')}api/kernels/{kernel}/channels?session_id={self.session}",
            header=[f"Authorization: token {server.token}"],
            timeout=TIMEOUT_S,
        )

    def send(self, kind: str, content: dict[str, object], channel: str = "shell") -> str:
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": kind,
            "username": "test",
            "session": self.session,
            "date": "2026-01-01T00:00:00Z",
            "version": "5.4",
        }
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        self.socket.send(json.dumps(message | {"channel": channel, "buffers": []}))
        return header["msg_id"]

    def execute(self, code: str) -> str:
        return self.send(
            "execute_request",
            {
                "code": code,
                "silent": False,
                "store_history": True,
                "allow_stdin": False,
                "stop_on_error": True,
            },
        )

    def messages(self, message_id: str) -> list[dict[str, Any]]:
        """Return everything about a request, until it has been answered and is idle."""
        found: list[dict[str, Any]] = []
        while True:
            message = json.loads(self.socket.recv())
            if message["parent_header"].get("msg_id") != message_id:
                continue
            found.append(message)
            kinds = {m["msg_type"] for m in found}
            idle = any(m["content"].get("execution_state") == "idle" for m in found)
            if idle and any(kind.endswith("_reply") for kind in kinds):
                return found

    def run(self, code: str) -> str:
        """Run a cell and return what it printed, showed or raised, as text."""
        return shown(self.messages(self.execute(code)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()


def shown(messages: list[dict[str, Any]]) -> str:
    parts = []
    for message in messages:
        content = message["content"]
        if message["msg_type"] == "stream":
            parts.append(content["text"])
        elif message["msg_type"] in ("display_data", "execute_result"):
            parts.append(content["data"]["text/plain"])
        elif message["msg_type"] == "error":
            parts.append(f"{content['ename']}: {content['evalue']}")
    return "".join(parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    (made / "a.txt").write_text("first\nsecond\n")
    (made / "sub").mkdir()
    (made / "sub" / "b.txt").write_text("below\n")
    config = made / "looping" / ".lemon" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[runtime.tools.execute_code]\nmax_rpc_calls = 1000000\n")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    before = workspaces()
    with Server(folder) as server:
        yield server
    wait_until(lambda: workspaces() == before)
    assert not server.info.exists()


def test_kernelspec_is_offered(server: Server) -> None:
    """The server lists the kernel with its name and what it can do."""
    spec = server.rest("GET", "api/kernelspecs")["kernelspecs"]["lemon"]["spec"]

    assert spec["display_name"] == "Lemon (agent kernel)"
    assert spec["interrupt_mode"] == "signal"
    assert spec["metadata"]["debugger"] is True
    assert spec["metadata"]["kernel_provisioner"]["config"] == {}


def test_helpers_in_the_notebooks_folder(server: Server) -> None:
    """The first helper call in a fresh kernel works, in the folder of its notebook."""
    kernel = server.kernel("sub/book.ipynb")
    with Socket(server, kernel) as socket:
        assert "below" in socket.run("text(read('b.txt'))")
        assert "b.txt" in socket.run("print(ls())")
    server.rest("DELETE", f"api/kernels/{kernel}")


def test_interrupt(server: Server) -> None:
    """An interrupt over REST ends a cell that calls helpers within 1 s, and the next call works."""
    kernel = server.kernel("looping")
    with Socket(server, kernel) as socket:
        message_id = socket.execute("while True: ls()")
        while json.loads(socket.socket.recv())["msg_type"] != "execute_input":
            pass
        time.sleep(0.2)
        started = time.monotonic()
        server.rest("POST", f"api/kernels/{kernel}/interrupt")
        said = shown(socket.messages(message_id))

        assert "KeyboardInterrupt" in said
        assert time.monotonic() - started < 1
        assert "first" in socket.run("text(read('../a.txt'))")
    server.rest("DELETE", f"api/kernels/{kernel}")


def test_restart_and_death(server: Server) -> None:
    """After a restart over REST, and after a death that the server notices, helpers work again."""
    kernel = server.kernel()
    with Socket(server, kernel) as socket:
        pid = int(socket.run("import os; print(os.getpid())"))
        server.rest("POST", f"api/kernels/{kernel}/restart")
    with Socket(server, kernel) as socket:
        assert not alive(pid)
        pid = int(socket.run("import os; print(os.getpid())"))
        assert "first" in socket.run("text(read('a.txt'))")
        os.kill(pid, signal.SIGKILL)
        while json.loads(socket.socket.recv())["content"].get("execution_state") != "restarting":
            pass
    with Socket(server, kernel) as socket:
        assert "first" in socket.run("text(read('a.txt'))")
    server.rest("DELETE", f"api/kernels/{kernel}")


def test_two_websockets_and_reconnection(server: Server) -> None:
    """Two front ends on one kernel see each other's cells; one that comes back goes on."""
    kernel = server.kernel()
    with Socket(server, kernel) as first, Socket(server, kernel) as second:
        message_id = first.execute("kept = read('a.txt'); text(kept)")
        assert "first" in shown(first.messages(message_id))
        heard: list[dict[str, Any]] = []
        while not any(m["content"].get("execution_state") == "idle" for m in heard):
            message = json.loads(second.socket.recv())
            if message["parent_header"].get("msg_id") == message_id:
                heard.append(message)
        assert "first" in shown(heard)
        assert "first" in second.run("text(read('a.txt'))")
    with Socket(server, kernel) as again:
        assert "first" in again.run("print(kept)")
        assert "first" in again.run("text(read('a.txt'))")
    server.rest("DELETE", f"api/kernels/{kernel}")


def test_deleted_kernel_is_gone(server: Server) -> None:
    """DELETE ends the kernel and the children it left, and removes its workspace and connection file."""
    before = workspaces()
    kernel = server.kernel()
    with Socket(server, kernel) as socket:
        said = socket.run("import subprocess, os\nprint(os.getpid(), subprocess.Popen(['sleep', '600']).pid)")
    pids = [int(word) for word in said.split()]
    server.rest("DELETE", f"api/kernels/{kernel}")

    assert len(pids) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids), 3)
    wait_until(lambda: workspaces() == before)
    assert [n for n in os.listdir(os.environ["JUPYTER_RUNTIME_DIR"]) if kernel in n] == []
    with pytest.raises(urllib.error.HTTPError):
        server.rest("GET", f"api/kernels/{kernel}")


def test_server_killed(folder: Path) -> None:
    """3 s after a server was killed there is no kernel, no child of one and no workspace."""
    before = workspaces()
    with Server(folder) as server:
        pids = []
        for _ in range(2):
            with Socket(server, server.kernel()) as socket:
                said = socket.run(
                    "import subprocess, os\nread('a.txt')\n"
                    "print(os.getpid(), subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
                )
                pids += [int(word) for word in said.split()]
        server.process.kill()
        killed = time.monotonic()
        server.process.wait()

        assert len(pids) == 4
        wait_until(lambda: not any(alive(pid) for pid in pids) and workspaces() == before, 3)
        assert time.monotonic() - killed < 3
        server.info.unlink(missing_ok=True)
