"""One launched process and all that descends from it: spawn, watch, signal, kill, confirmed death.

The problem.  A process number is ours only until its process is *reaped*; afterwards the system may give it to a
stranger, and a signal sent to it kills somebody else's work.  A run is over only when its children are, too, and
children outlive their parent, ignore signals, and leave the process group.

What does not work.  ``Popen.poll()``, ``Popen.wait()`` and asyncio's subprocesses reap as a side effect of looking, so
after them the group can no longer be killed safely.  ``preexec_fn`` is not safe with threads and costs the fast
``vfork`` path.  Parent-death signals are bound to the *thread* that spawned.

The solution.  ``Popen`` only spawns.  Death is seen through a *pidfd*, which becomes readable, and through
``waitid(..., WEXITED | WNOWAIT)``, which looks without reaping.  The unreaped leader keeps its number, which is also
its group's, reserved: so the group is killed first, the marked rest is swept (:mod:`lemon_provisioner.sweep`), and
only then is the leader reaped.  Signals and reaping exclude each other by a lock.

What can still fail.  A process in uninterruptible sleep does not die of SIGKILL; :meth:`ChildProcess.finish` then
returns ``None`` and may be called again.  If the embedding program reaps our child (``waitpid(-1)``, or SIGCHLD
ignored), its status is lost: we notice, never signal again, and report :data:`LOST_STATUS` as asyncio does.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from lemon_provisioner.sweep import kill_marked

__all__ = [
    "KILL_WAIT_S",
    "LOST_STATUS",
    "ChildProcess",
    "Process",
    "is_readable",
    "kill_marked",
    "new_run_id",
    "readable",
]

LOST_STATUS = 255
"""Exit status of a child that somebody else reaped, so that nobody knows (asyncio uses the same)."""

KILL_WAIT_S = 0.1
"""How long ``finish()`` waits, blocking, for a leader that it has just killed."""

_POLL_S = 0.02  # only where the system has no pidfd


def new_run_id() -> str:
    """Return a fresh marker for ``LEMON_RUN_ID``: 128 random bits, 32 hex digits."""
    return os.urandom(16).hex()


class Process(ABC):
    """A leader of its own session and group that runs, and what can still be done with it.

    A child of ours (:class:`ChildProcess`), one that a template forked (:mod:`.forked`), or one that another host
    launched (:mod:`.adopted`): they differ in who may reap it and in who knows how it ended.
    """

    pid: int

    @property
    @abstractmethod
    def exited(self) -> bool:
        """Whether the leader is dead.  Looking never reaps."""

    @abstractmethod
    async def wait(self) -> int:
        """Return the leader's exit status once it is dead; may be cancelled."""

    @abstractmethod
    def signal_group(self, signum: int) -> bool:
        """Signal the whole group; return whether there was one that is surely ours."""

    @abstractmethod
    def finish(self) -> int | None:
        """Kill what is left of the run and return the leader's exit status; None if it does not die."""

    async def escalate(self, grace_s: float = 1.0) -> bool:
        """Stop the group with SIGINT, SIGTERM and SIGKILL, ``grace_s`` seconds each; return whether it is dead.

        Ends as soon as the leader does; what is left of the run is then killed and the leader reaped as
        by :meth:`finish`.  ``False`` means that SIGKILL did not end it within ``grace_s`` (behaviour 6.7).
        If the awaiting task is cancelled the rest of the patience is over: SIGKILL at once.
        """
        step_s = asyncio.get_running_loop().time()
        try:
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                self.signal_group(signum)
                step_s += grace_s
                try:
                    async with asyncio.timeout_at(step_s):
                        await self.wait()
                    break
                except TimeoutError:
                    pass
        except asyncio.CancelledError:
            self.finish()
            raise
        return self.finish() is not None


class ChildProcess(Process):
    """A spawned leader of its own session and group, and everything marked with its run id.

    The owner calls :meth:`finish` or :meth:`escalate` once it is done, on every path; both are idempotent.
    """

    def __init__(self, popen: subprocess.Popen[bytes], run_id: str) -> None:
        """Use :meth:`spawn`."""
        self.pid: int = popen.pid
        self.run_id = run_id
        self._popen = popen
        self._born_s = time.monotonic()
        self._code: int | None = None  # known as soon as somebody looked after the death
        self._reaped = False
        self._finished = False
        self._owner_pid = os.getpid()  # a forked child of the host has this object, too, but no such child
        self._lock = threading.RLock()
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        state = "reaped" if self._reaped else "unreaped"
        return f"<ChildProcess pid={self.pid} {state} code={self._code}>"

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        run_id: str,
        output: int,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Start ``argv`` in a session and group of its own and return once it has been executed.

        Standard input is the null device, standard output and error are the descriptor ``output``, and of the
        other descriptors only ``pass_fds`` are inherited.  Raises ``OSError`` when the program cannot be
        started; then there is no process.
        """
        popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=cwd,
            close_fds=True,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        try:
            return cls(popen, run_id)
        except OSError:  # no descriptor left for the pidfd
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            raise

    @property
    def exited(self) -> bool:
        """Whether the leader is dead.  Looking never reaps."""
        return self._look() is not None

    async def wait(self) -> int:
        """Return the leader's exit status once it is dead (``-n`` for signal ``n``, as ``Popen`` says it).

        Does not reap, may be awaited by many and from several loops at once, and can be cancelled.
        """
        while (code := self._look()) is None:
            if self._pidfd < 0:
                await asyncio.sleep(_POLL_S)
            else:
                await self._readable()
        return code

    def signal_group(self, signum: int) -> bool:
        """Signal the whole group; return whether there was one to signal.

        ``False`` once the leader is reaped, by us or by somebody else: the number may be a stranger's.
        """
        with self._lock:
            if os.getpid() != self._owner_pid:
                return False
            self._look()
            if self._reaped:
                return False
            try:
                os.killpg(self.pid, signum)
            except (ProcessLookupError, PermissionError):
                return False
            return True

    def finish(self) -> int | None:
        """Kill what is left of the run, then reap the leader; return its exit status.

        The order is the point: group, sweep, reap (behaviour 6.7).  Blocks for about 0.1 ms when the leader has
        exited alone; up to 0.1 s for a leader that must first be killed, and up to a second for a storm
        of children.  Returns ``None``, and has reaped nothing, if the leader does not die; call again later.
        """
        with self._lock:
            if self._finished or os.getpid() != self._owner_pid:
                return self._code
            self.signal_group(signal.SIGKILL)
            self._wait_blocking(KILL_WAIT_S)
            kill_marked(self.run_id, self.pid, time.monotonic() - self._born_s)
            if self._look() is None:
                return None
            if not self._reaped:
                self._reap()
            self._finished = True
            return self._code

    # -- looking and reaping -------------------------------------------------------------------------------------

    def _look(self) -> int | None:
        """Return the exit status if the leader is dead, without reaping it."""
        with self._lock:
            if self._code is not None:
                return self._code
            kind, number = (os.P_PIDFD, self._pidfd) if self._pidfd >= 0 else (os.P_PID, self.pid)
            try:
                status = os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._code = LOST_STATUS
                self._forget()
            else:
                if status is not None:
                    killed = status.si_code != os.CLD_EXITED
                    self._code = -status.si_status if killed else status.si_status
            return self._code

    def _reap(self) -> None:
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:  # somebody else did, after our look
            pass
        self._forget()

    def _forget(self) -> None:
        """The number is no longer ours: close the pidfd, and tell ``Popen`` that there is nothing left to reap."""
        self._reaped = True
        self._popen.returncode = self._code
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    async def _readable(self) -> None:
        with self._lock:
            if self._pidfd < 0:
                return
            duplicate = os.dup(self._pidfd)
        await _until_readable(duplicate)

    def _wait_blocking(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self._look() is None and (left_s := end - time.monotonic()) > 0:
            if self._pidfd < 0:
                time.sleep(min(left_s, _POLL_S))
            else:
                is_readable(self._pidfd, left_s)


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Return whether ``descriptor`` can be read, or can be within ``timeout_s``; blocks for so long."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


async def readable(descriptor: int) -> None:
    """Wait until ``descriptor`` can be read; any number of waiters, also on several loops."""
    await _until_readable(os.dup(descriptor))


async def _until_readable(duplicate: int) -> None:
    """Wait for a duplicate, and close it.  Each waiter has one: a loop takes one callback for each descriptor."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        loop.remove_reader(duplicate)
        if not ready.done():
            ready.set_result(None)

    try:
        loop.add_reader(duplicate, wake)
        await ready
    finally:
        loop.remove_reader(duplicate)
        os.close(duplicate)
