"""What the session tests share: cells that wait, agents side by side, and counts of the registry."""

from __future__ import annotations

import pathlib
import sys
import venv
from typing import Any

from lemon_kernel import HelperContext, KernelRegistry, ToolResult

from .conftest import Agent, Pending, wait_until
from .gates import Gate

WAITS = "read('busy')\nprint('done')"
"""A cell that runs until the gate behind its `read` lets it go."""

LOOPS = "import time\nwhile True:\n    time.sleep(0.01)"
"""A cell that an interrupt ends."""

IS_X_THERE = "print('x' in globals())"


async def contents(params: Any, context: HelperContext) -> str:
    """A `read` that knows every file."""
    return f"contents of {params['path']}"


def registry_of(agent: Agent) -> KernelRegistry:
    assert agent.registry is not None
    return agent.registry


def twin(agent: Agent) -> Agent:
    """Another agent session in the same scope and registry, with an owner of its own."""
    other = Agent(agent.cwd, "session")
    other.registry = agent.registry
    other.session_id, other.agent_id = agent.session_id, agent.agent_id
    return other


def occupied(agent: Agent, gate: Gate, **options: Any) -> Pending:
    """Return a run whose cell is active and waits at `gate`."""
    before = len(gate.held)
    run = agent.start(WAITS, helpers={"read": gate}, **options)
    gate.wait_for(before + 1)
    return run


def running(agent: Agent, script: str = LOOPS, **options: Any) -> Pending:
    """Return a run whose cell has begun and has no helper call under way: losing it loses no accounting."""
    notes: list[str] = []
    run = agent.start(
        f"notify('begun')\n{script}", on_update=lambda update: notes.append(update.text), **options
    )
    wait_until(lambda: notes == ["notify: begun"], 10, "the cell's beginning")
    return run


def queued(agent: Agent, script: str, **options: Any) -> Pending:
    """Return a run that has its place behind the active cell."""
    before = inflight(agent)
    run = agent.start(script, **options)
    wait_until(lambda: inflight(agent) == before + 1, 10, "a place in the queue")
    return run


def inflight(agent: Agent) -> int:
    count = registry_of(agent).snapshot()["inflight_cells"]
    assert isinstance(count, int)
    return count


def live(agent: Agent) -> int:
    capacity = registry_of(agent).snapshot()["capacity"]
    assert isinstance(capacity, dict)
    return int(capacity["live"])


def phases(agent: Agent) -> dict[str, int]:
    """Return how many kernels are in which phase, phases without one left out."""
    counts = registry_of(agent).snapshot()["phases"]
    assert isinstance(counts, dict)
    return {phase: count for phase, count in counts.items() if count}


def pid_of(agent: Agent) -> int:
    """Run a cell that says which process it is."""
    result = agent.run("import os; print(os.getpid())")
    assert result.details["persistent"] is True, result.text
    return int(result.text)


def flags(result: ToolResult) -> dict[str, object]:
    """Return the four session flags, and the reasons where there are some."""
    names = ("persistent", "kernel_reused", "reset_performed", "state_retained", "reason", "fallback_reason")
    return {name: result.details[name] for name in names if name in result.details}


SUCCESS = {"persistent": True, "kernel_reused": True, "reset_performed": False, "state_retained": True}
FRESH = {**SUCCESS, "kernel_reused": False}
EXCEPTION = {**SUCCESS, "reason": "exception"}
LOST = {"persistent": True, "kernel_reused": False, "reset_performed": False, "state_retained": False}
"""With a ``reason``: a call that left no state behind, or cannot promise any."""
ISOLATED = {**LOST, "persistent": False}
"""With a ``fallback_reason``: a run of its own instead of a cell."""


def notice(fallback_reason: str) -> str:
    return f"Note: this run was isolated ({fallback_reason}); its state will not persist.\n\n"


def environment(folder: pathlib.Path, *, with_ipykernel: bool) -> str:
    """Make a virtual environment over this Python, with our own packages in reach or bare; return its python."""
    venv.create(folder, symlinks=True)
    if with_ipykernel:
        [packages] = folder.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "ours.pth").write_text("\n".join(ours))
    return str(folder / "bin" / "python")


def executable(path: pathlib.Path, script: str) -> str:
    """Write a shell script that plays an interpreter."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)
