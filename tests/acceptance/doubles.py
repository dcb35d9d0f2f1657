"""What the black-box tests put in the place of tools, people and listeners, and how they ask a script."""

from __future__ import annotations

import asyncio
import json
import pathlib
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from lemon_kernel import ApprovalBroker, HelperContext, ToolResult, telemetry
from lemon_kernel.approvals import ApprovalRequest, Decision

from .conftest import Agent, wait_until


def standing_agent(mode: str, factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent for many tests: a kernel that lives on saves a start per test."""
    # names of one length: paths are part of what helpers answer, and so of the bytes that are compared
    folder = factory.mktemp(f"standing-{secrets.token_hex(4)}", numbered=False) / "work"
    folder.mkdir()
    agent = Agent(folder, mode)
    yield agent
    agent.close()


def emptied(agent: Agent) -> Agent:
    """Give a standing agent an empty folder again."""
    for entry in agent.cwd.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    agent.session_key = None
    return agent


def files(folder: pathlib.Path, contents: Mapping[str, str | bytes]) -> None:
    """Write files below `folder`, with the folders they stand in."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@dataclass(frozen=True)
class Answered:
    """What one expression gave in a script: its value, or the ``ToolError`` it raised."""

    value: Any = None
    error: str | None = None
    tool: str | None = None


def asking(*expressions: str, before: str = "") -> str:
    """Return a script that evaluates `expressions` one by one and prints what each gave, as JSON."""
    return (
        f"{before}\nimport json as _json, lemon_tools\n_answers = []\n"
        f"for _expression in {list(expressions)!r}:\n"
        "    try:\n"
        "        _answers.append([eval(_expression), None, None])\n"
        "    except ToolError as _error:\n"
        "        _answers.append([None, str(_error), _error.tool])\n"
        "print(_json.dumps(_answers))\n"
    )


def answered(result: ToolResult) -> list[Answered]:
    """Return the answers that a script of :func:`asking` printed as the last line of its output."""
    last = [line for line in result.text.splitlines() if line.startswith("[[")][-1]
    return [Answered(*one) for one in json.loads(last)]


def ask_all(agent: Agent, *expressions: str, before: str = "", **options: Any) -> list[Answered]:
    """Run a script of :func:`asking`, with room for large answers, and return what it says."""
    options["config"] = {"max_output_bytes": 1_000_000, **options.get("config", {})}
    return answered(agent.run(asking(*expressions, before=before), **options))


def ask(agent: Agent, expression: str, **options: Any) -> Answered:
    return ask_all(agent, expression, **options)[0]


class Gate:
    """A tool that waits, per call, until the test releases it, and then returns or raises what it is told.

    A call is known by its ``path`` parameter.  Everything here is used by the run's loop and by the test.
    """

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.signals: list[HelperContext] = []
        self._outcomes: dict[str, str | Exception] = {}

    async def __call__(self, params: Mapping[str, object], context: HelperContext) -> str:
        name = str(params.get("path"))
        self.signals.append(context)
        self.arrived.append(name)
        try:
            while name not in self._outcomes:
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        self.ended.append(name)
        outcome = self._outcomes[name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def release(self, name: str, outcome: str | Exception = "released") -> None:
        self._outcomes[name] = outcome

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: set(names) <= set(self.arrived), what=f"the arrival of {names}")

    def wait_for_end(self, name: str) -> None:
        wait_until(lambda: name in self.ended, what=f"the end of {name}")


class Person(ApprovalBroker):
    """Somebody who is asked for approvals, remembers each prompt, and answers at once if told how."""

    def __init__(self, decision: Decision | None = None, expiry_ms: int | None = None) -> None:
        super().__init__(self._asked, expiry_ms)
        self.decision = decision
        self.prompts: list[ApprovalRequest] = []

    def _asked(self, request: ApprovalRequest) -> None:
        self.prompts.append(request)
        if self.decision is not None:
            self.resolve(request.id, self.decision)

    def next_prompt(self, count: int = 1) -> ApprovalRequest:
        """Wait until there have been `count` prompts and return the last of them."""
        wait_until(lambda: len(self.prompts) >= count, what=f"prompt {count}")
        return self.prompts[count - 1]

    def wait_for_none(self, timeout_s: float = 5) -> None:
        wait_until(lambda: not self.pending(), timeout_s, "an empty list of prompts")


@dataclass(frozen=True)
class Heard:
    event: str
    measurements: Mapping[str, int]
    metadata: Mapping[str, object]


class Listener:
    """Collects telemetry events while it is open."""

    def __init__(self) -> None:
        self._heard: list[Heard] = []
        self._lock = threading.Lock()
        self.close: Callable[[], None] = telemetry.listen(self._take)

    def _take(self, event: str, measurements: Mapping[str, int], metadata: Mapping[str, object]) -> None:
        with self._lock:
            self._heard.append(Heard(event, dict(measurements), dict(metadata)))

    def events(self, name: str) -> list[Heard]:
        """Return what was heard of ``coding_agent.<name>``."""
        with self._lock:
            return [heard for heard in self._heard if heard.event == f"coding_agent.{name}"]

    def names(self) -> list[str]:
        with self._lock:
            return [heard.event.removeprefix("coding_agent.") for heard in self._heard]
