"""A kernel process that another process launched, taken over by its number (``load_provisioner_info``)."""

from __future__ import annotations

import os
import signal

from .process import KILL_WAIT_S, LOST_STATUS, Process, is_readable, kill_marked, readable

__all__ = ["AdoptedProcess"]


class AdoptedProcess(Process):
    """Watched by a pidfd; it is not our child, so its exit status stays unknown and nothing is reaped.

    The caller has checked that `pid` still is the process it means.
    """

    def __init__(self, pid: int, run_id: str) -> None:
        self.pid = pid
        self._run_id = run_id
        self._pidfd: int | None = os.pidfd_open(pid)

    def __del__(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)

    @property
    def exited(self) -> bool:
        return self._pidfd is None or is_readable(self._pidfd, 0)

    async def wait(self) -> int:
        if self._pidfd is not None:
            await readable(self._pidfd)
        return LOST_STATUS

    def signal_group(self, signum: int) -> bool:
        if self.exited:
            return False
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def finish(self) -> int | None:
        """Kill the group and everything that carries the run's marker; None if the leader does not die."""
        if self._pidfd is None:
            return LOST_STATUS
        self.signal_group(signal.SIGKILL)
        is_readable(self._pidfd, KILL_WAIT_S)
        if self._run_id:
            kill_marked(self._run_id)
        if not self.exited:
            return None
        os.close(self._pidfd)
        self._pidfd = None
        return LOST_STATUS
