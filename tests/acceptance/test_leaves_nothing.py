"""After a run in each mode and a close nothing is left: no process, no descriptor, no thread, no file."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from .conftest import wait_until
from .processes import with_environment

PROGRAM = '''
import asyncio, json, os, re, sys, threading, time
from lemon_kernel import ExecuteCode, ExecuteCodeConfig, KernelRegistry, Owner, SessionScope
from tests.acceptance.processes import children, is_tracker

def one_of_each():
    for mode in ("per_call", "session"):
        async def main():
            registry = KernelRegistry()
            config = ExecuteCodeConfig(enabled=True, kernel_mode=mode, python_path=sys.executable)
            scope = SessionScope("session", "agent", Owner())
            tool = ExecuteCode(sys.argv[1], config=config, registry=registry, scope=scope)
            script = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True); print(ls())"
            result = await tool.execute({"script": script})
            assert "(empty directory)" in result.text, result
            assert result.details["persistent"] == (mode == "session"), result
            await registry.aclose()
        asyncio.run(main())

def descriptors():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield re.sub("[0-9]+", "N", os.readlink("/proc/self/fd/" + name))
        except FileNotFoundError:  # the one that listed them
            pass

def inventory():
    return {
        "descriptors": sorted(descriptors()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(pid for pid in children() if not is_tracker(pid)),
        "trackers": len([pid for pid in children() if is_tracker(pid)]),
        "files": sorted(
            name for folder, folders, files in os.walk(os.environ["TMPDIR"]) for name in (*folders, *files)
            if not name.startswith("lemon-private-")
        ),
    }

def settled():
    """zmq closes the descriptors of closed sockets in a thread of its own, a little later."""
    readings = [inventory()]
    while len(readings) < 4 or any(reading != readings[-1] for reading in readings[-4:]):
        assert len(readings) < 50, readings[-2:]
        time.sleep(0.05)
        readings.append(inventory())
    return readings[-1]

one_of_each()
first = settled()
one_of_each()
print(json.dumps([first, settled()]))
'''


def test_a_run_in_each_mode_leaves_nothing(folder: pathlib.Path) -> None:
    """A program that ran and closed both modes has only its tracker; when it ends, nothing at all is left."""
    tmpdir = tempfile.mkdtemp(prefix="lz-", dir="/tmp")
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder)],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            cwd=pathlib.Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": tmpdir, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        first, second = json.loads(done.stdout)

        assert first == second
        assert first["children"] == []
        assert first["trackers"] == 1
        assert first["files"] == [".lemon-owner"]
        wait_until(lambda: with_environment(f"TMPDIR={tmpdir}") == set(), 3, "the end of every process")
        assert os.listdir(tmpdir) == []
    finally:
        shutil.rmtree(tmpdir, ignore_errors=True)
