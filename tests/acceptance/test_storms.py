"""Properties that hold however many runs there are, and however much one prints."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import subprocess
import sys

import pytest

from lemon_kernel import AbortSignal, ToolResult

from .conftest import Agent, private_roots, wait_until
from .processes import children, is_tracker, with_environment

RUNS = 200
AT_ONCE = 20


def descriptors() -> set[str]:
    """Return what this process's descriptors point to, with their numbers."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # the one that listed them
            pass
    return found


def left_behind() -> dict[str, object]:
    """Return everything that runs could leave: descriptors, children, marked processes, files."""
    return {
        "descriptors": descriptors(),
        "children": {pid for pid in children() if not is_tracker(pid)},
        "processes": {
            pid for pid in with_environment(f"TMPDIR={os.environ['TMPDIR']}") if not is_tracker(pid)
        },
        "files": {path for root in private_roots() for path in root.iterdir()},
    }


STORM = {
    "prints": "print('fine')",
    "calls": "print(batch([('read', {'path': 'data.txt'})] * 4) and 'fine')",
    "raises": "text('fine')\n1/0",
    "leaves children": (
        "import subprocess\nsubprocess.Popen(['sleep', '60'])\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\nprint('fine')"
    ),
    "is aborted": "import time\nprint('fine')\nnotify('now')\ntime.sleep(60)",
}


@pytest.mark.timeout(120)
def test_a_storm_of_runs_leaves_nothing(per_call: Agent) -> None:
    """200 runs, 20 at a time, leave no process, no descriptor and no file; the tracker is the design's own."""
    (per_call.cwd / "data.txt").write_text("content")
    per_call.run("print('warm')")
    before = left_behind()
    kinds = [list(STORM)[number % len(STORM)] for number in range(RUNS)]

    async def one(kind: str, places: asyncio.Semaphore) -> ToolResult:
        async with places:
            abort = AbortSignal()
            return await per_call.tool().execute(
                {"script": STORM[kind]}, abort=abort, on_update=lambda _: abort.abort()
            )

    async def storm() -> list[ToolResult]:
        places = asyncio.Semaphore(AT_ONCE)
        return await asyncio.gather(*(one(kind, places) for kind in kinds))

    results = asyncio.run(storm())

    for kind, result in zip(kinds, results, strict=True):
        reason = {"raises": "exit", "is aborted": "cancelled"}.get(kind)
        assert result.details.get("reason") == reason, (kind, result)
        assert "fine" in result.text
    wait_until(lambda: left_behind() == before, 2, f"{before} after the storm, not {left_behind()}")


FLOOD = """
import asyncio, hashlib, json, os, sys
from lemon_kernel import ExecuteCode, ExecuteCodeConfig, KernelRegistry, Owner, SessionScope

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

async def main():
    registry = KernelRegistry()
    config = ExecuteCodeConfig(
        enabled=True, kernel_mode=sys.argv[1], python_path=sys.executable, max_output_bytes=1000
    )
    tool = ExecuteCode(sys.argv[2], config=config, registry=registry, scope=SessionScope("s", "a", Owner()))
    await tool.execute({"script": "print('x' * 100000)"})
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    result = await tool.execute({"script": "for n in range(500000): print(f'{n:099}')"})
    peak = memory("VmHWM")
    await registry.aclose()
    with open(result.details["full_output_path"], "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    print(json.dumps({"growth_bytes": peak - before, "text": result.text, "sha256": digest,
                      "path": result.details["full_output_path"]}))

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["per_call", "session"])
def test_a_flood_of_output_costs_little(mode: str, folder: pathlib.Path) -> None:
    """50 MB printed cost the host at most 20 MB of memory; the text is cut 40/60, the spill file is whole."""
    import hashlib

    done = subprocess.run(
        [sys.executable, "-c", FLOOD, mode, str(folder)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)

    lines = [f"{n:099}\n" for n in range(500_000)]
    start, end = "".join(lines[:4]), "".join(lines[-6:])
    assert answer["text"] == (
        f"{start}\n... [{50_000_000 - 1000} bytes truncated] ...\n{end}"
        f"\n[Full output saved to: {answer['path']}]"
    )
    assert answer["sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert answer["growth_bytes"] <= 20_000_000
