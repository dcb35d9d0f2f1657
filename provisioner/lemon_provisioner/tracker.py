"""The host's end of the tracker: a small process that cleans up when the host dies (behaviour 6.12).

The problem: a host that is killed cannot kill its kernels and scripts or remove their workspaces.

What does not work: parent-death signals are bound to the *thread* that spawned and kill at random; a ``getppid()``
poller is blind under subreapers and stands still while C code holds the GIL.

The solution, as in ``multiprocessing``: one process per host (``tracker_process.py``) reads a pipe whose write end
only the host has.  The host says what it launches and what has ended; at end of file, which the system delivers
however the host died, the tracker kills and removes what is left.  The write end is close-on-exec and closed in
forked children, or the death would go unseen.  The tracker has a session of its own and blocks the polite signals,
so that a Ctrl-C or a SIGTERM for the host's group leaves it alive.

If the tracker is killed the host notices at its next message (:func:`check` looks without one), starts another and
tells it everything again.  If it hangs, the same after a bounded wait: the old one is killed *before* its pipe
is closed, so that a half-informed tracker never takes the closing for our death.

What can still fail: host and tracker killed at once; then the workspaces stay and ``doctor`` names them.  A C library
that forks without Python's knowledge and without ``exec`` keeps the pipe open.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

__all__ = ["check", "forget", "group", "root", "start", "watch"]

_log = logging.getLogger("lemon_provisioner")

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tracker_process.py")
_FULL_PIPE_WAIT_MS = 100  # a tracker that reads nothing for so long is replaced
_EXIT_WAIT_S = 1.0  # how long a host that ends waits for the tracker to clean up; milliseconds as a rule
_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class _Run:
    workspace: str
    group: int | None = None


class _Tracker:
    """What this process has running, and the process that is told of it."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._runs: dict[str, _Run] = {}
        self._roots: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._closed = False
        self._warned = False

    def start(self) -> None:
        with self._lock:
            if not self._alive():
                self._tell(b"")

    def root(self, root: str) -> None:
        with self._lock:
            if root not in self._roots:
                self._roots.add(root)
                self._tell(_root_line(root))

    def watch(self, run_id: str, workspace: str) -> None:
        with self._lock:
            self._runs[run_id] = _Run(workspace)
            lines = _watch_line(run_id, workspace)
            root = os.path.dirname(workspace)
            if root and root not in self._roots:
                self._roots.add(root)
                lines = _root_line(root) + lines
            self._tell(lines)

    def group(self, run_id: str, pgid: int) -> None:
        with self._lock:
            run = self._runs.setdefault(run_id, _Run(""))
            run.group = pgid
            self._tell(_group_line(run_id, pgid))

    def forget(self, run_id: str) -> None:
        with self._lock:
            if self._runs.pop(run_id, None) is None:
                return
            if self._runs or self._alive():
                self._tell(_forget_line(run_id))

    def check(self) -> None:
        with self._lock:
            if self._runs and not self._alive():
                self._tell(b"")

    def close(self) -> None:
        """End of the host: let the tracker see it, and wait (bounded) until it has cleaned up."""
        with self._lock:
            self._closed = True
            self._close_pipe()
            self._await_exit()

    def hold(self) -> None:
        """Before a fork: no pipe is half made, no message half written, while the child is copied."""
        self._lock.acquire()

    def release(self) -> None:
        """After a fork, in the host."""
        self._lock.release()

    def abandon(self) -> None:
        """In a forked child of the host: close the write end, and know nothing of the parent's runs."""
        self._close_pipe()
        if self._process is not None:
            self._process.returncode = 0  # not our child
        self._reset()

    # -- the process ---------------------------------------------------------------------------------------------

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _tell(self, lines: bytes) -> None:
        """Deliver ``lines``, or everything to a new tracker.  Called with the lock, after the tables have changed."""
        if self._closed:
            return
        try:
            if self._alive() and self._write(lines):
                return
            self._kill()
            self._start()
            if self._write(self._everything()):
                self._warned = False
                return
            self._kill()
            trouble = "it does not read"
        except (OSError, ValueError) as error:
            trouble = type(error).__name__  # never its text, which names files (behaviour 9.1)
        if not self._warned:  # once for each spell of trouble, not for each message
            self._warned = True
            _log.warning("no tracker process (%s): if this host is killed, what it launched stays", trouble)

    def _everything(self) -> bytes:
        lines = [_root_line(root) for root in self._roots]
        for run_id, run in self._runs.items():
            lines.append(_watch_line(run_id, run.workspace))
            if run.group is not None:
                lines.append(_group_line(run_id, run.group))
        return b"".join(lines)

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LEMON_")}
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        # A blocked signal stays blocked over exec: no window, and nothing to import in the tracker.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-E", _PROGRAM, str(os.getpid())],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            self._close_pipe()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(reader)

    def _kill(self) -> None:
        """End a tracker that is dead or does not read.  First the process, then the pipe: see the module's head."""
        if self._process is not None:
            self._process.kill()
            self._await_exit()
        self._close_pipe()

    def _await_exit(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # it outlives us on purpose: no ResourceWarning for that
        self._process = None

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            try:
                os.close(self._pipe)
            except OSError:  # somebody closed it under us
                pass
            self._pipe = -1

    def _write(self, data: bytes) -> bool:
        """Write all of ``data``; ``False`` when the reader is gone or stays away."""
        while data:
            try:
                data = data[os.write(self._pipe, data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._pipe, select.POLLOUT)
                if not poll.poll(_FULL_PIPE_WAIT_MS):
                    return False
            except OSError:  # EPIPE, or somebody closed our descriptor
                return False
        return True


def _watch_line(run_id: str, workspace: str) -> bytes:
    return b"watch %s %s\n" % (run_id.encode(), _hex(workspace))


def _group_line(run_id: str, pgid: int) -> bytes:
    return b"group %s %d\n" % (run_id.encode(), pgid)


def _forget_line(run_id: str) -> bytes:
    return b"forget %s\n" % run_id.encode()


def _root_line(root: str) -> bytes:
    return b"root %s\n" % _hex(root)


def _hex(path: str) -> bytes:
    """A path as one word: it may hold any byte."""
    return os.fsencode(path).hex().encode() or b"-"


_tracker = _Tracker()
os.register_at_fork(before=_tracker.hold, after_in_parent=_tracker.release, after_in_child=_tracker.abandon)
atexit.register(_tracker.close)


def start() -> None:
    """Start the tracker if there is none, before there is anything for it to know."""
    _tracker.start()


def root(folder: str) -> None:
    """Say before the first workspace is made in it where this host's private root is."""
    _tracker.root(folder)


def watch(run_id: str, workspace: str) -> None:
    """Say *before* a launch which run is about to exist and where its workspace is (``""`` for none).

    Starts the tracker if there is none.  Like all of this module thread-safe, quick, and never raising.
    """
    _tracker.watch(run_id, workspace)


def group(run_id: str, pgid: int) -> None:
    """Say which process group the run has, as soon as it is known (until then its marker finds it)."""
    _tracker.group(run_id, pgid)


def forget(run_id: str) -> None:
    """Say that the run is over: its processes are reaped and its workspace is removed."""
    _tracker.forget(run_id)


def check() -> None:
    """Replace a tracker that was killed, without waiting for the next launch; cheap, for whoever ticks anyway."""
    _tracker.check()
