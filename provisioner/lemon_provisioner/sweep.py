"""Find and kill every process that carries a run's marker in its environment (behaviour 6.7).

The problem: a run's children can leave its process group with ``setsid()`` or a double fork, and are then
nobody's descendants.  ``psutil`` and the process tree do not see them any more.

The solution: each run's environment holds ``LEMON_RUN_ID=<128 random bits>``, children inherit it, and the system
shows it in ``/proc/<pid>/environ``.  A number in ``/proc`` may belong to somebody else by the time it is
signalled, so a process is first pinned with a *pidfd*, then checked, then signalled through that descriptor: if
the number changed hands in between, the descriptor names the dead process and the signal goes nowhere.

A process can fork between our look and our kill, so passes repeat until one finds nobody, for at most
:data:`SWEEP_LIMIT_S`.  A victim's whole group is killed with it, because one ``killpg`` is atomic against
``fork`` where a hundred single kills are not.  That hits no stranger: the leader of a run has a session of its
own, groups never cross sessions, and so every member of a marked process's group descends from the run.

The cheap path: looking at every process costs about 15 microseconds each.  ``/proc/loadavg`` ends with the newest
process number given out, and a run's descendants are born after its leader, so after most runs there is nothing to
look at.  Numbers wrap around at ``pid_max``; the shortcut is taken only while the run is too young for that.

What can still fail: a storm of processes that each take a session of their own and fork on faster than we look
outruns us until the next sweep.  A child that cleared (or overwrote) its environment *and* left the group is out of reach, as is
one that changed its user.  Without ``/proc`` (macOS) nothing is found.

This module is also loaded by the tracker process, which has no ``site`` and imports almost nothing: standard
library only, and little of it.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the tracker's start: see above
    from collections.abc import Iterable

__all__ = ["SWEEP_LIMIT_S", "kill_marked"]

SWEEP_LIMIT_S = 1.0
"""A sweep gives up after so long; a storm that outforks it that long is left to the next sweep."""

_PASS_WAIT_MS = 200
_HELD_DESCRIPTORS = 256
"""Of so many victims of a pass the death is awaited; of the others it is certain."""

_VAIN_PASSES = 20  # on a busy machine somebody is always being born; then so many looks are enough
_EXHAUSTED_WAIT_S = 0.01
_DIRECT_LOOKS = 64  # up to so many numbers are tried one by one before /proc is listed instead
_FORKS_PER_S = 50_000  # more than any machine forks; bounds how soon process numbers can wrap around
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)
_ENVIRON_CHUNK_BYTES = 1 << 16


def kill_marked(run_id: str, newer_than_pid: int | None = None, age_s: float | None = None) -> int:
    """Kill every process of this user that carries ``run_id``, until none is found; return how many there were.

    ``newer_than_pid`` is the run's leader and ``age_s`` how long ago it was born: with both, processes older than
    the leader are not looked at if numbers cannot have wrapped around since.  Returns after the victims' deaths
    (they may still be zombies of their parents), or after :data:`SWEEP_LIMIT_S`.  Never raises ``OSError``.
    """
    if sys.platform != "linux" or not _proc_is_ours():
        return 0
    mark = b"LEMON_RUN_ID=" + os.fsencode(run_id)
    if newer_than_pid is not None and (age_s is None or age_s * _FORKS_PER_S >= _pid_max()):
        newer_than_pid = None  # numbers may have wrapped around since
    deadline = time.monotonic() + SWEEP_LIMIT_S
    seen: set[int] = set()
    vain_passes = 0
    while True:
        dying: list[int] = []
        found = False
        try:
            newest = _newest()
            for pid in _candidates(newer_than_pid, newest):
                if not _is_marked(pid, mark):
                    continue
                descriptor = _kill_pinned(pid, mark)
                if descriptor is None:
                    continue
                found = True
                seen.add(pid)
                if len(dying) < _HELD_DESCRIPTORS:
                    dying.append(descriptor)
                else:
                    os.close(descriptor)
        except OSError:  # this process has no descriptor left to look with: no answer is not "nobody"
            found = True
            time.sleep(_EXHAUSTED_WAIT_S)
        try:
            _await_deaths(dying, deadline)
        finally:
            for descriptor in dying:
                os.close(descriptor)
        if time.monotonic() >= deadline:
            return len(seen)
        if not found:
            # Nobody found is an answer only if nobody was born meanwhile: who forks and exits is never where we look.
            vain_passes += 1
            if vain_passes >= _VAIN_PASSES or newest in (-1, newer_than_pid, _newest()):
                return len(seen)


def _proc_is_ours() -> bool:
    """Say whether ``/proc`` is mounted and numbers processes as our system calls do (not another PID namespace's)."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _pid_max() -> int:
    try:
        return int(_read("/proc/sys/kernel/pid_max") or 0)
    except OSError:
        return 0


def _newest() -> int:
    """Return the process number given out last, ``-1`` when the system does not say."""
    try:
        fields = (_read("/proc/loadavg") or b"").split()
    except OSError:
        return -1
    return int(fields[-1]) if fields else -1


def _candidates(newer_than_pid: int | None, newest: int) -> Iterable[int]:
    """The process numbers worth a look: those given out after ``newer_than_pid``, else all but our own."""
    own = os.getpid()
    floor = -1
    if newer_than_pid is not None and newest >= newer_than_pid:  # else numbers wrapped around after all
        if newest - newer_than_pid <= _DIRECT_LOOKS:
            return [pid for pid in range(newer_than_pid + 1, newest + 1) if pid != own]
        floor = newer_than_pid
    try:
        names = os.listdir("/proc")
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return []
    return [pid for name in names if name.isdecimal() and (pid := int(name)) > floor and pid != own]


def _is_marked(pid: int, mark: bytes) -> bool:
    environ = _read(f"/proc/{pid}/environ")
    if not environ or mark not in environ:
        return False
    return mark in environ.split(b"\0")


def _kill_pinned(pid: int, mark: bytes) -> int | None:
    """Pin process ``pid``, check that it is (still) marked, kill it and its group; return the pidfd, else ``None``."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return None  # gone, or a thread's number
    try:
        if _is_marked(pid, mark):
            group = os.getpgid(pid)
            signal.pidfd_send_signal(descriptor, 0)  # still the process we pinned: so `group` was its group
            if group > 1 and group != os.getpgrp():
                os.killpg(group, signal.SIGKILL)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return descriptor
    except ProcessLookupError:
        pass
    except PermissionError:  # it changed its user: out of reach
        pass
    os.close(descriptor)
    return None


def _await_deaths(descriptors: Iterable[int], deadline: float) -> None:
    """Wait until the processes behind these pidfds are dead, for one pass's patience at most."""
    poll = select.poll()
    alive = set(descriptors)
    for descriptor in alive:
        poll.register(descriptor, select.POLLIN)
    end = min(deadline, time.monotonic() + _PASS_WAIT_MS / 1000)
    while alive:
        left_ms = (end - time.monotonic()) * 1000
        if left_ms <= 0:
            return
        for descriptor, _ in poll.poll(left_ms):
            poll.unregister(descriptor)
            alive.discard(descriptor)


def _read(path: str) -> bytes | None:
    """Return the whole of a ``/proc`` file, or ``None`` when it cannot be read.

    Raises ``OSError`` only when no descriptor is left.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return None
    try:
        content = b""
        while chunk := os.read(descriptor, _ENVIRON_CHUNK_BYTES):
            content += chunk
        return content
    except OSError:  # ESRCH: it died while we looked
        return None
    finally:
        os.close(descriptor)
