"""Faults that the storms found, each as a plain test."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from lemon_kernel import AbortSignal, HelperContext
from lemon_kernel.bridge.comm import CommCarrier
from lemon_kernel.bridge.dispatch import Answer, Call, Dispatcher, Limits

LIMITS = Limits(max_rpc_calls=10, max_rpc_result_bytes=1000, max_text_bytes=1000, max_parallel_rpc=2)


async def _read(call: Call, context: HelperContext) -> str:
    return "content"


def dispatcher(cell: str) -> Dispatcher:
    return Dispatcher(cell=cell, limits=LIMITS, helpers=["read"], invoke=_read, cwd="/", abort=AbortSignal())


@pytest.mark.parametrize("kind", ["call", "text"])
def test_a_late_frame_of_a_finished_cell_answers_no_call_of_this_one(kind: str) -> None:
    """Ids count from 1 in each cell, so a refusal of the old cell's id 1 would be taken for the new one's answer.

    The interrupt storm met it: a cell interrupted in ``text()``, and the next cell's ``text()`` raised
    ``rpc authentication failed``.
    """

    async def main() -> None:
        answers: list[Answer] = []
        bridge = dispatcher("cell-2")
        bridge.connect(answers.append)
        late = {
            "type": kind,
            "cell": "cell-1",
            "id": 1,
            "token": "of cell-1",
            "n": 1,
            "text": "x",
            "tool": "read",
        }
        bridge.receive(json.dumps(late).encode())
        assert answers == []
        bridge.receive(json.dumps({**late, "cell": "cell-2"}).encode())
        assert [(answer.id, answer.content) for answer in answers] == [(1, "rpc authentication failed")]
        stats = await bridge.close(killed=False)
        assert (stats.calls, stats.denied) == (0, 2)

    asyncio.run(main())


@pytest.mark.parametrize("opening", [b"[", b'{"comm_id":'])
def test_a_comm_message_nested_without_an_end_is_dropped(opening: bytes) -> None:
    """``json`` raises RecursionError, not ValueError, for it; the fuzz met that."""

    async def main() -> None:
        carrier = CommCarrier(lambda kind, content: None, on_open=lambda number, request: None)
        bridge = dispatcher("cell")
        carrier.attach(bridge)
        deep = opening * 30_000
        carrier.receive(deep)
        carrier.receive(b'{"comm_id":"%s","data":' % carrier.comm_id.encode() + deep)
        carrier.receive(b'{"comm_id":"%s","data":{"type":"open"' % carrier.comm_id.encode() + deep + b"}")
        await bridge.close(killed=False)

    asyncio.run(main())


MAKES_WORKSPACES_AND_DIES = """
import os, signal
from lemon_provisioner import workspace
for prefix in (workspace.EXEC_PREFIX, workspace.KERNEL_PREFIX):
    workspace.write_private(workspace.create_workspace(prefix), "script.py", b"x")
print(workspace.private_root(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_workspace_that_the_tracker_was_not_told_of_goes_with_its_host(tmp_path: pathlib.Path) -> None:
    """A host killed between making a workspace and telling of it; the storm of host kills met that."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            MAKES_WORKSPACES_AND_DIES,
        ],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    root = pathlib.Path(done.stdout.strip())
    assert root.parent == tmp_path, done.stderr
    deadline = time.monotonic() + 3
    while root.exists():
        assert time.monotonic() < deadline, list(root.iterdir())
        time.sleep(0.01)
