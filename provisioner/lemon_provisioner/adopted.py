"""A kernel process that another process launched, taken over by its number (``load_provisioner_info``)."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time

from .process import LOST_STATUS, kill_marked

__all__ = ["AdoptedProcess"]

_POLL_S = 0.05
_KILL_WAIT_S = 0.1


class AdoptedProcess:
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
        return self._pidfd is None or self._readable(0)

    async def wait(self) -> int:
        while not self.exited:
            await asyncio.sleep(_POLL_S)
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
        end = time.monotonic() + _KILL_WAIT_S
        while not self._readable(_KILL_WAIT_S) and time.monotonic() < end:
            pass
        if self._run_id:
            kill_marked(self._run_id)
        if not self.exited:
            return None
        os.close(self._pidfd)
        self._pidfd = None
        return LOST_STATUS

    async def escalate(self, grace_s: float = 1.0) -> bool:
        """Stop the group with SIGINT, SIGTERM and SIGKILL, `grace_s` each; return whether it is dead."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            self.signal_group(signum)
            try:
                await asyncio.wait_for(self.wait(), grace_s)
            except TimeoutError:
                continue
            break
        return self.finish() is not None

    def _readable(self, timeout_s: float) -> bool:
        assert self._pidfd is not None
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
