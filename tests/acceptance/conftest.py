"""An agent at work: what the acceptance tests drive, black-box, in both modes."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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


class Pending:
    """A run going on in a thread of its own, with an event loop of its own."""

    def __init__(self, work: Callable[[], ToolResult], abort: AbortSignal) -> None:
        self.abort_signal = abort
        self._result: ToolResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], ToolResult]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error

    def abort(self) -> None:
        self.abort_signal.abort()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout_s: float = 30) -> ToolResult:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the run has not ended after {timeout_s} s"
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Agent:
    """One agent session: a folder, a mode, and (in session mode) an owner and a registry.

    Keyword arguments of :meth:`run` that are configuration keys are set for that run; ``helpers``,
    ``policy``, ``approvals`` go to the tool; ``timeout_ms`` is the call's own unless given as
    ``config={"timeout_ms": ...}``.
    """

    def __init__(self, cwd: pathlib.Path, mode: str) -> None:
        self.cwd = cwd
        self.mode = mode
        self.owner = Owner()
        self.registry = KernelRegistry() if mode == "session" else None
        self.session_id = "session-1"
        self.agent_id = "agent-1"
        self.session_key: str | None = None

    def scope(self) -> SessionScope:
        return SessionScope(self.session_id, self.agent_id, self.owner, self.session_key)

    def config(self, **values: Any) -> ExecuteCodeConfig:
        return ExecuteCodeConfig(
            **{"enabled": True, "kernel_mode": self.mode, "python_path": sys.executable, **values}
        )

    def tool(self, *, config: Mapping[str, Any] | None = None, **parts: Any) -> ExecuteCode:
        parts.setdefault("registry", self.registry)
        parts.setdefault("scope", self.scope())
        return ExecuteCode(self.cwd, config=self.config(**(config or {})), **parts)

    def run(self, script: str, **options: Any) -> ToolResult:
        """Run one script and return its result."""
        return self._work(script, AbortSignal(), options)()

    def start(self, script: str, **options: Any) -> Pending:
        """Start one script in a thread and return at once."""
        abort = AbortSignal()
        return Pending(self._work(script, abort, options), abort)

    def _work(self, script: str, abort: AbortSignal, options: dict[str, Any]) -> Callable[[], ToolResult]:
        params: dict[str, object] = {"script": script}
        for name in ("timeout_ms", "reset"):
            if name in options:
                params[name] = options.pop(name)
        on_update = options.pop("on_update", None)
        run_id = options.pop("run_id", None)
        tool = options.pop("tool", None) or self.tool(**options)
        return lambda: asyncio.run(tool.execute(params, abort=abort, on_update=on_update, run_id=run_id))

    def close(self) -> None:
        self.owner.close()
        if self.registry is not None:
            asyncio.run(self.registry.aclose())


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The agent's working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture(params=["per_call", "session"])
def agent(request: pytest.FixtureRequest, folder: pathlib.Path) -> Iterator[Agent]:
    """An agent in each of the two modes: a case without a mode is a case of both."""
    agent = Agent(folder, request.param)
    yield agent
    agent.close()


@pytest.fixture
def per_call(folder: pathlib.Path) -> Iterator[Agent]:
    agent = Agent(folder, "per_call")
    yield agent
    agent.close()


@pytest.fixture
def session(folder: pathlib.Path) -> Iterator[Agent]:
    agent = Agent(folder, "session")
    yield agent
    agent.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0, what: str = "the condition") -> None:
    """Wait for something that another process does; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.005)


def process_is_gone(pid: int) -> bool:
    """Return whether no live process has `pid` (a zombie that nobody has reaped yet counts as gone)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def read_pid(path: pathlib.Path) -> int:
    """Wait for a script to write its process id to `path` and return it."""
    wait_until(lambda: path.exists() and path.read_text().strip().isdigit(), what=str(path))
    return int(path.read_text())


def private_roots() -> list[pathlib.Path]:
    return sorted(pathlib.Path(os.environ["TMPDIR"]).glob("lemon-private-*"))
