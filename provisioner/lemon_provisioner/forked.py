"""A kernel that a template forked: our process to signal and to end, but not our child to wait for.

The problem.  A process number is safe to signal only until its process is reaped, and whoever forks a kernel is the
one who reaps it: the template, not we.

What we do.  The template keeps a dead kernel unreaped and tells its status; it reaps when we shut our end of the
kernel's connection, which :meth:`ForkedProcess.finish` does last: group, sweep, reap, as for a child of our own
(:mod:`lemon_provisioner.process`).  Death itself is seen through a pidfd that came with the fork, so neither a
stopped nor a dead template delays it.

If the template is dead its kernels go on; only their exit status is lost (:data:`~.process.LOST_STATUS`).  As long as
such a kernel lives its number is its own.  Once it is dead the system has reaped it and its group is no longer
signalled; the sweep finds what carries the marker.

What can still fail.  A child that stayed in the group and cleared its environment outlives a kernel that died
*after* its template.  A template that dies and a kernel that dies within the microseconds between our look and our
``killpg``, whose number is then given out again, would let that signal hit a stranger.

All of this is for one loop, the host's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable

from .process import KILL_WAIT_S, LOST_STATUS, Process, is_readable, kill_marked, readable

__all__ = ["MAX_PACKET_BYTES", "ForkedProcess"]

MAX_PACKET_BYTES = 65_536
_STATUS_WAIT_S = 0.1  # how long a template may take to say how its kernel ended
_REAP_WAIT_S = 0.05


class ForkedProcess(Process):
    """A forked leader of its own session and group, and everything marked with its run id.

    Takes over `pidfd` and `connection`; `on_end` is called once, when it is confirmed dead.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        connection: socket.socket,
        run_id: str,
        on_end: Callable[[ForkedProcess], object],
    ) -> None:
        self.pid = pid
        self.run_id = run_id
        self._pidfd = pidfd
        self._connection = connection
        self._on_end = on_end
        self._born_s = time.monotonic()
        self._code: int | None = None
        self._orphaned = False  # its template is dead: whoever adopted it has reaped it when it is dead
        self._finished = False
        self._owner_pid = os.getpid()

    def __repr__(self) -> str:
        return f"<ForkedProcess pid={self.pid} code={self._code}>"

    def __del__(self) -> None:
        if not self._finished:
            os.close(self._pidfd)
            self._connection.close()

    @property
    def exited(self) -> bool:
        """Whether the kernel is dead."""
        return self._finished or is_readable(self._pidfd, 0)

    async def wait(self) -> int:
        """Return the exit status once the kernel is dead; any number of waiters, may be cancelled."""
        if not self._finished:
            await readable(self._pidfd)
        if self._look() is None and not self._orphaned and not self._finished:
            try:
                async with asyncio.timeout(_STATUS_WAIT_S):
                    await readable(self._connection.fileno())
            except TimeoutError:
                pass
        code = self._look()
        return LOST_STATUS if code is None else code

    def signal_group(self, signum: int) -> bool:
        """Signal the whole group; return whether there was one that is surely ours."""
        if self._finished or os.getpid() != self._owner_pid:
            return False
        self._look()
        if self._orphaned and self.exited:
            return False
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def finish(self) -> int | None:
        """Kill what is left of the run, then let the template reap the leader; return its exit status.

        Returns None if the leader does not die; call again later.  Blocks as
        :meth:`.process.ChildProcess.finish` does.
        """
        if self._finished or os.getpid() != self._owner_pid:
            return self._code
        self.signal_group(signal.SIGKILL)
        dead = is_readable(self._pidfd, KILL_WAIT_S)
        kill_marked(self.run_id, self.pid, time.monotonic() - self._born_s)
        if not dead and not self.exited:
            return None
        if self._look() is None and not self._orphaned:
            is_readable(self._connection.fileno(), _STATUS_WAIT_S)
            self._look()
        if self._code is None:
            self._code = LOST_STATUS
        self._finished = True
        try:
            self._connection.shutdown(socket.SHUT_WR)
            is_readable(self._connection.fileno(), _REAP_WAIT_S)  # it has been reaped
        except OSError:
            pass
        self._connection.close()
        os.close(self._pidfd)
        self._on_end(self)
        return self._code

    def _look(self) -> int | None:
        """Return the exit status if the template has told it; note whether the template is dead."""
        while self._code is None and not self._orphaned and not self._finished:
            try:
                packet = self._connection.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            kind, _, status = packet.partition(b" ")
            if kind == b"status":
                self._code = int(status)
            elif not packet:
                self._orphaned = True
        return self._code
