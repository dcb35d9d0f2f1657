"""A kernel under a stock blocking manager and client, as a script of a person would have it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from traitlets.config import Config

from lemon_kernel import notebook

TIMEOUT_S = 15


@dataclass
class Ran:
    """What one request came to, in the order in which it came."""

    reply: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> str:
        return str(self.reply["status"])

    @property
    def error(self) -> str:
        """The exception as ``Name: message``, empty for a cell that did well."""
        return f"{self.reply['ename']}: {self.reply['evalue']}" if self.status == "error" else ""

    @property
    def stdout(self) -> str:
        return "".join(m["content"]["text"] for m in self.of("stream") if m["content"]["name"] == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(m["content"]["text"] for m in self.of("stream") if m["content"]["name"] == "stderr")

    @property
    def result(self) -> str:
        """The plain text of what the cell's last expression showed."""
        return "".join(m["content"]["data"]["text/plain"] for m in self.of("execute_result"))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["header"]["msg_type"] == kind]

    def data(self, kind: str) -> list[dict[str, Any]]:
        """The MIME bundles of the messages of a kind."""
        return [m["content"]["data"] for m in self.of(kind)]


class Client:
    """A blocking client, and what it hears."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self.client = client
        client.start_channels()
        client.wait_for_ready(timeout=TIMEOUT_S)

    def run(self, code: str, **options: Any) -> Ran:
        return self.finish(self.send(code, **options))

    def ok(self, code: str, **options: Any) -> Ran:
        """Run a cell that must not fail."""
        ran = self.run(code, **options)
        assert ran.status == "ok", ran.error
        return ran

    def send(self, code: str, **options: Any) -> str:
        return str(self.client.execute(code, **({"allow_stdin": False} | options)))

    def finish(self, message_id: str) -> Ran:
        """Return what became of a request: its reply, and what was published until its ``idle``."""
        end = time.monotonic() + TIMEOUT_S
        messages = []
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != message_id:
                continue
            messages.append(message)
            if message["header"]["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        while True:
            reply = self.client.get_shell_msg(timeout=max(0.1, end - time.monotonic()))
            if reply["parent_header"].get("msg_id") == message_id:
                return Ran(reply["content"], messages)

    def ask(self, message_id: str) -> dict[str, Any]:
        """Return the content of the reply to any other request."""
        return self.finish(message_id).reply

    def close(self) -> None:
        self.client.stop_channels()


class FrontEnd(Client):
    """A kernel of its own and one client; a context manager that leaves nothing behind."""

    def __init__(
        self,
        cwd: str | os.PathLike[str],
        *,
        kernel_name: str = "lemon",
        config: Config | None = None,
        manager: type[KernelManager] = KernelManager,
        env: dict[str, str] | None = None,
    ) -> None:
        self.manager = manager(kernel_name=kernel_name, config=config or Config())
        options: dict[str, Any] = {} if env is None else {"env": env}
        self.manager.start_kernel(cwd=os.fspath(cwd), **options)
        try:
            super().__init__(self.manager.client())
        except BaseException:
            self.manager.shutdown_kernel(now=True)
            raise

    @property
    def process(self) -> int:
        """The kernel's pid."""
        provisioner: Any = self.manager.provisioner
        return int(provisioner.process.pid)

    def another(self) -> Client:
        """A second client of the same kernel, connected as a console with ``--existing`` is."""
        client = BlockingKernelClient(connection_file=self.manager.connection_file)
        client.load_connection_file()
        return Client(client)

    def restart(self, *, now: bool = False) -> None:
        self.manager.restart_kernel(now=now)
        self.client.wait_for_ready(timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.manager.shutdown_kernel(now=True)


def live_hosts() -> int:
    """How many notebook hosts this process has."""
    return len(notebook._live_hosts())
