"""A Jupyter server of a test's own on loopback, in a process of its own as people have it."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

START_S = 60
STOP_S = 15


class JupyterServer:
    """`jupyter_server`, or JupyterLab, in `folder`; a context manager that leaves no process and no file.

    Its folders for configuration, data and runtime files are `home`'s, so that no setting of the person who runs
    the tests reaches it.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        home: pathlib.Path,
        *,
        lab: bool = False,
        arguments: list[str] | None = None,
    ):
        self.folder = folder
        self.home = home
        self.token = secrets.token_hex(16)
        self.log = home / "server.log"
        home.mkdir(exist_ok=True)
        # what a first visit asks about, and what looks for news on the web
        settings = home / "config" / "labconfig" / "page_config.json"
        settings.parent.mkdir(parents=True)
        settings.write_text(
            json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}})
        )
        command = [
            sys.executable,
            "-m",
            "jupyterlab" if lab else "jupyter_server",
            "--no-browser",
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={_free_port()}",
            f"--ServerApp.root_dir={folder}",
            f"--IdentityProvider.token={self.token}",
            *(["--allow-root"] if os.geteuid() == 0 else []),
            *(arguments or []),
        ]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self.url = self._wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    def _environment(self) -> dict[str, str]:
        changes = {"IPYTHONDIR": "ipython"} | {
            f"JUPYTER_{kind}_DIR": kind.lower() for kind in ("CONFIG", "DATA", "RUNTIME")
        }
        for part in changes.values():
            (self.home / part).mkdir(exist_ok=True)
        return os.environ | {name: str(self.home / part) for name, part in changes.items()}

    def _wait_until_it_answers(self) -> str:
        """Return the address.  The file says which port it took: the free one may be gone by then."""
        end = time.monotonic() + START_S
        info = self.home / "runtime" / f"jpserver-{self.process.pid}.json"
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                url = str(json.loads(info.read_text())["url"])
                if httpx.get(f"{url}api/status", headers=self.headers, timeout=5).status_code == 200:
                    return url
            except (OSError, ValueError, httpx.HTTPError):
                pass
            time.sleep(0.05)
        raise AssertionError(f"no answer within {START_S} s\n{self.log.read_text()}")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"token {self.token}"}

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Ask the REST API at ``api/<path>``; return the document it answers with, None for an empty one."""
        answer = httpx.request(method, f"{self.url}api/{path}", headers=self.headers, json=body, timeout=30)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def processes(self) -> list[psutil.Process]:
        """Return what the server started, and what that started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def runtime_files(self) -> list[str]:
        """Return the files that a server that ended should have removed."""
        return sorted(
            name
            for name in os.listdir(self.home / "runtime")
            # the secret and the notary's key are a server's for good
            if name.startswith(("jpserver-", "kernel-"))
        )

    def kill(self) -> None:
        """Kill the server so that it can clean up nothing."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_S)

    def close(self) -> None:
        """Ask the server to end, as a service manager does; it shuts its kernels down."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the server did not end\n{self.log.read_text()}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
