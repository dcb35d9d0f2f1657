"""One script in one fresh process: staged, started, served, ended, and nothing of it left (behaviour 2.4).

The run ends with its interpreter, not with the end of its output: a child that holds the pipe open keeps nothing
alive.  So the end is a sequence, each step bounded: take the frames the script left in the socket, read as much
output as the pipe holds at that moment, kill the group and every marked process, remove the workspace.

What must not go wrong is the way out.  A timeout, an abort, a fault of ours and the death of the caller (this
coroutine is cancelled) all pass through the one ``finally`` of :func:`run_script`, which does not await, so that
nothing can cancel it half way.  What it cannot confirm dead (a process in uninterruptible sleep) stays
with the tracker, which ends it with the host (6.12).
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lemon_provisioner import staging, tracker, workspace
from lemon_provisioner.environment import child_environment
from lemon_provisioner.process import ChildProcess, new_run_id

from .bridge.dispatch import Dispatcher
from .bridge.pipe import PipeCarrier
from .errors import InterpreterError, WorkspaceError
from .output import CapturedOutput, OutputCapture, held_bytes
from .scope import AbortSignal

__all__ = ["RunEnd", "run_script"]

log = logging.getLogger(__name__)

Cut = Literal["timeout", "cancelled"]

PIPE_BYTES = 1024 * 1024
READ_BYTES = 256 * 1024
CONFIRM_S = 1.0
"""How long a killed interpreter may take to die before the run is answered without it."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: by itself with `exit_code`, or cut short by us, and then it has none (D-25)."""

    exit_code: int | None
    cut: Cut | None
    output: CapturedOutput


async def run_script(
    script: str,
    *,
    interpreter: str,
    magic: str | None,
    cwd: str,
    deadline: float,
    helpers: Sequence[str],
    dispatcher: Dispatcher,
    abort: AbortSignal,
    max_output_bytes: int,
) -> RunEnd:
    """Run `script` in a fresh `interpreter` and return once everything of it is gone.

    `magic` is the interpreter's own magic number in hex digits, where known; `deadline` is loop time.  The
    dispatcher is connected and drained here and closed by the caller.  Raises WorkspaceError or
    InterpreterError when nothing was started.
    """
    run_id = new_run_id()
    folder = _stage(script, helpers, magic)
    output = _Output(OutputCapture(max_output_bytes))
    carrier: PipeCarrier | None = None
    child: ChildProcess | None = None
    completed = False
    try:
        tracker.watch(run_id, folder)
        try:
            output.open()
            ours, theirs = socket.socketpair()
            with theirs:
                carrier = PipeCarrier(ours, dispatcher, helpers)
                carrier.start()
                child = ChildProcess.spawn(
                    [interpreter, _entry(folder, magic), str(theirs.fileno())],
                    env=child_environment(run_id),
                    cwd=cwd,
                    run_id=run_id,
                    output=output.write_end,
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            raise InterpreterError(f"execute_code could not start {interpreter}: {error}") from error
        carrier.has_ended = _is_dead(child)
        tracker.group(run_id, child.pid)
        output.start()
        cut = await _end_of(child, deadline, abort)
        if cut is not None:
            await _kill(child)
        carrier.drain()
        captured = output.finish()
        exit_code = None if cut is not None else _as_shells_say(await child.wait())
        completed = True
        return RunEnd(exit_code, cut, captured)
    finally:
        # No await from here on: a second cancellation must not leave a process or a folder.
        gone = child is None or child.finish() is not None
        if carrier is not None:
            carrier.close()
        output.close(keep=completed)
        workspace.remove_tree(folder)
        if gone:
            tracker.forget(run_id)
        else:
            log.warning("a script did not die of SIGKILL; it is left to the tracker")


def _stage(script: str, helpers: Sequence[str], magic: str | None) -> str:
    """Make the run's workspace, with the script and the script-side module in it, and return it."""
    folder = None
    try:
        folder = workspace.create_workspace(workspace.EXEC_PREFIX)
        workspace.write_private(folder, staging.SCRIPT_NAME, staging.staged_script(script, helpers))
        if _reads_pyc(magic):
            workspace.write_private(folder, staging.PYC_NAME, staging.shim_pyc())
        else:
            workspace.write_private(folder, staging.SOURCE_NAME, staging.shim_source().encode())
    except BaseException as error:
        if folder is not None:
            workspace.remove_tree(folder)
        if isinstance(error, (workspace.StagingError, OSError)):
            raise WorkspaceError(f"execute_code could not create its private workspace: {error}") from error
        raise
    return folder


def _entry(folder: str, magic: str | None) -> str:
    return os.path.join(folder, staging.PYC_NAME if _reads_pyc(magic) else staging.SOURCE_NAME)


def _reads_pyc(magic: str | None) -> bool:
    return magic == importlib.util.MAGIC_NUMBER.hex()


async def _end_of(child: ChildProcess, deadline: float, abort: AbortSignal) -> Cut | None:
    """Wait for what comes first; of what is due at the same time abort beats deadline beats completion."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    exited = loop.create_task(child.wait())
    exited.add_done_callback(lambda _: woken.set())
    timer = loop.call_at(deadline, woken.set)
    forget_abort = abort.on_abort(lambda: loop.call_soon_threadsafe(woken.set))
    try:
        await woken.wait()
    finally:
        forget_abort()
        timer.cancel()
        exited.cancel()
    if abort.aborted:
        return "cancelled"
    return "timeout" if loop.time() >= deadline else None


def _as_shells_say(code: int) -> int:
    """Return an exit status for people: 128 + n for a death by signal n (behaviour 2.7)."""
    return code if code >= 0 else 128 - code


def _is_dead(child: ChildProcess) -> Callable[[], bool]:
    return lambda: child.exited


async def _kill(child: ChildProcess) -> None:
    """Kill the group at once and wait until its leader is dead, so that its last frames and bytes are there."""
    child.signal_group(signal.SIGKILL)
    try:
        await asyncio.wait_for(child.wait(), CONFIRM_S)
    except TimeoutError:
        pass


class _Output:
    """The pipe that is the script's stdout and stderr, read as it fills into a capture (behaviour 7.4)."""

    def __init__(self, capture: OutputCapture) -> None:
        self._capture = capture
        self._loop = asyncio.get_running_loop()
        self._read_end = -1
        self.write_end = -1

    def open(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        try:  # fewer wake-ups for chatty scripts; refused to users who have many pipes
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass

    def start(self) -> None:
        """The script has its end: give up ours of it, and read."""
        os.close(self.write_end)
        self.write_end = -1
        self._loop.add_reader(self._read_end, self._on_readable)

    def finish(self) -> CapturedOutput:
        """Read what the pipe holds now, asked once, and return all that was captured."""
        left = held_bytes(self._read_end)
        while left > 0 and (size := self._read(min(left, READ_BYTES))):
            left -= size
        return self._capture.finish()

    def close(self, *, keep: bool) -> None:
        """Release the pipe, and without `keep` the spill file as well; idempotent."""
        for descriptor in (self._read_end, self.write_end):
            if descriptor >= 0:
                self._loop.remove_reader(descriptor)
                os.close(descriptor)
        self._read_end = self.write_end = -1
        if not keep and (spill := self._capture.finish().full_output_path) is not None:
            workspace.finish_spill(spill, keep=False)

    def _on_readable(self) -> None:
        if not self._read(READ_BYTES):  # nobody holds the other end any more
            self._loop.remove_reader(self._read_end)

    def _read(self, size: int) -> int:
        try:
            data = os.read(self._read_end, size)
        except BlockingIOError:
            return -1
        self._capture.feed(data)
        return len(data)
