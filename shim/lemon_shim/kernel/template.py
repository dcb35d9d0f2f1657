"""The template: a quiet process that has imported what a kernel needs, and forks kernels from itself.

The problem.  Three quarters of a kernel's start are imports, the same each time, and each kernel keeps its own copy
of what they leave in memory.

What does not work.  Forking the host: it has threads, sockets and secrets.  ``multiprocessing``'s fork server: its
children are threads of nobody we could signal, wait for or find again, and it knows no other interpreter.

What we do.  The host starts this program once for an interpreter and environment (``lemon_provisioner.templates``),
with one end of a private socket pair; there is no name in the file system that anybody else could connect to.  The
template imports, freezes the collector, says hello, and then only waits: it has one thread, no zmq context and no
event loop, which is what makes ``fork`` safe.  Messages are packets:

========================  =====================================================================================
template -> host          ``ready`` and JSON ``[[folder, mtime in ns or null], ...]``: what ``sys.path`` held
host -> template          ``fork`` with three descriptors: the kernel's own connection, its output, its request
========================  =====================================================================================

On the kernel's own connection, of which template and kernel each hold an end until the kernel runs:

========================  =====================================================================================
template -> host          ``forked <pid>`` with a pidfd, or ``refused <reason>``; later ``status <exit status>``
kernel -> host            ``set up``, or ``failed``; it has taken the request's environment and place by then
host -> kernel            ``go``; end of file means that the host has started another kernel instead
host -> template          end of file: kill the kernel if it lives, and reap it
========================  =====================================================================================

The template is the kernels' parent.  It looks at their death without reaping (``WNOWAIT``) until the host shuts its end:
so their number, which is also their group's, stays theirs as long as the host may signal it.

A forked kernel must be found by its run's marker like any other (behaviour 6.7), but the system shows the
environment that the *program* was started with: :func:`_mark` writes the kernel's ``LEMON_RUN_ID`` over the template's,
in the memory the system reads.  Children that it forks without exec inherit that memory; children that it executes
get the marker through ``os.environ``.

What a script can still see: the rest of ``/proc/self/environ`` and the command line are the template's, so is the
parent, and all kernels of one template share the seed of string hashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time

__all__ = ["serve"]

SETUP_FAILED_STATUS = 98
MAX_PACKET_BYTES = 65_536
DESCRIPTORS_IN_REQUEST = 3

_IMPORTED_LATE = (
    "faulthandler",
    "tornado.platform.asyncio",
    "IPython.utils.wildcard",
    "IPython.core.oinspect",
    "IPython.core.completerlib",
    "unicodedata",
)
"""What ipykernel and IPython import only while they set a kernel up; it costs as much as the rest of that."""

_RUN_ID = "LEMON_RUN_ID"


def serve(control: int) -> int:
    """Fork kernels until the host hangs up; return only in a forked kernel, its umask, ready to be set up.

    `control` is the number of our end of the socket pair.
    """
    # not the staged folder, the first: the interpreter may write its bytecode there
    folders = [[folder, _mtime_ns(folder)] for folder in sys.path[1:]]
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    marker = _marker()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=control) as host:
        os.set_inheritable(control, False)
        host.send(b"ready " + json.dumps(folders).encode())
        request = _Template(host, marker).wait()
    return _take_place(request, marker)


class _Kernel:
    """A forked kernel as its parent sees it."""

    def __init__(self, pid: int, pidfd: int, connection: socket.socket) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.connection = connection
        self.dead = False
        self.unwanted = False  # the host has shut its end: reap it once it is dead

    def close(self) -> None:
        os.close(self.pidfd)
        self.connection.close()


class _Request:
    """What a forked kernel has got from the host."""

    def __init__(self, connection: socket.socket, output: int, content: int) -> None:
        self.connection = connection
        self.output = output
        self.content = content

    def close(self) -> None:
        self.connection.close()
        os.close(self.output)
        os.close(self.content)


class _Template:
    def __init__(self, host: socket.socket, marker: int) -> None:
        self._host = host
        self._marker = marker
        self._poll = select.poll()
        self._poll.register(host, select.POLLIN)
        self._listening = True
        self._by_pidfd: dict[int, _Kernel] = {}
        self._by_connection: dict[int, _Kernel] = {}

    def wait(self) -> _Request:
        """Return in a forked kernel; exit when the host has hung up and the last kernel is reaped."""
        while self._listening or self._by_connection:
            for descriptor, _ in self._poll.poll():
                if self._listening and descriptor == self._host.fileno():
                    request = self._receive()
                    if request is not None:
                        return request
                elif descriptor in self._by_pidfd:
                    self._died(self._by_pidfd[descriptor])
                elif descriptor in self._by_connection:
                    self._hung_up(self._by_connection[descriptor])
        os._exit(0)

    def _receive(self) -> _Request | None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                self._host, MAX_PACKET_BYTES, DESCRIPTORS_IN_REQUEST, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self._poll.unregister(self._host)
            self._listening = False
            return None
        if packet != b"fork" or len(descriptors) != DESCRIPTORS_IN_REQUEST:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        connection, output, content = descriptors
        request = _Request(socket.socket(fileno=connection), output, content)
        if self._fork(request):
            return request
        return None

    def _fork(self, request: _Request) -> bool:
        """Fork a kernel for `request`; return whether this is the kernel."""
        refusal = self._refusal()
        pid = pidfd = -1
        if not refusal:
            try:
                pid = os.fork()
            except OSError:
                refusal = "fork_error"
        if pid == 0:
            self._forget_everything()
            return True
        try:
            if pid > 0:
                pidfd = os.pidfd_open(pid)
                socket.send_fds(request.connection, [b"forked %d" % pid], [pidfd])
            else:
                request.connection.send(b"refused " + refusal.encode())
        except OSError:  # the host does not want it any more, or no descriptor is left
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pid = -1
            if pidfd >= 0:
                os.close(pidfd)
        os.close(request.output)
        os.close(request.content)
        if pid < 0:
            request.connection.close()
            return False
        kernel = _Kernel(pid, pidfd, request.connection)
        self._by_pidfd[pidfd] = self._by_connection[kernel.connection.fileno()] = kernel
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(kernel.connection, select.POLLRDHUP)
        return False

    def _refusal(self) -> str:
        """Return why no fork is safe here, ``""`` when it is."""
        if len(os.listdir("/proc/self/task")) != 1:
            return "threads"
        return "" if self._marker else "environment"

    def _forget_everything(self) -> None:
        """In a kernel: let go of what is the template's."""
        self._host.close()
        for kernel in self._by_connection.values():
            kernel.close()

    def _died(self, kernel: _Kernel) -> None:
        self._poll.unregister(kernel.pidfd)
        del self._by_pidfd[kernel.pidfd]
        kernel.dead = True
        if kernel.unwanted:
            self._reap(kernel)
            return
        end = os.waitid(os.P_PID, kernel.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        try:
            kernel.connection.send(b"status %d" % status)
        except OSError:
            pass

    def _hung_up(self, kernel: _Kernel) -> None:
        if kernel.unwanted:
            return
        self._poll.unregister(kernel.connection)
        kernel.unwanted = True
        if kernel.dead:
            self._reap(kernel)
            return
        for kill in (os.killpg, os.kill):
            try:
                kill(kernel.pid, signal.SIGKILL)
            except OSError:
                pass

    def _reap(self, kernel: _Kernel) -> None:
        os.waitpid(kernel.pid, 0)
        del self._by_connection[kernel.connection.fileno()]
        kernel.close()


# In a forked kernel


def _take_place(request: _Request, marker: int) -> int:
    """Become the process that was asked for and wait until the host wants it to run; return its umask."""
    try:
        os.setsid()
        content = json.loads(os.pread(request.content, os.fstat(request.content).st_size, 0))
        _mark(marker, content["env"][_RUN_ID])
        os.dup2(request.output, 1)
        os.dup2(request.output, 2)
        os.chdir(content["cwd"])
        _replace_environment(content["env"])
        _replace_names(content["argv"])
        _renew_secrets()
        answer = b"set up"
    except BaseException:
        answer = b"failed"
    try:
        request.connection.send(answer)
        wanted = request.connection.recv(MAX_PACKET_BYTES) == b"go"
    except OSError:
        wanted = False
    if answer == b"failed" or not wanted:
        os._exit(SETUP_FAILED_STATUS)
    request.close()
    package = sys.modules[__package__]
    del sys.modules[__name__], package.template  # no other kernel has this module
    return int(content["umask"], 8)


def _replace_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # type: ignore[attr-defined]  # it may have been asked under another TMPDIR


def _replace_names(argv: list[str]) -> None:
    """Let the process look as if it had been started with `argv`: interpreter, options, staged folder, arguments."""
    folder = next(index for index, word in enumerate(argv) if index and not word.startswith("-"))
    sys.orig_argv[:] = argv
    sys.argv[:] = [argv[folder], *argv[folder + 1 :]]
    ours, theirs = sys.path[0] + os.sep, argv[folder] + os.sep
    sys.path[0] = argv[folder]
    for module in [sys.modules["__main__"], *sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.startswith(ours):
            continue
        module.__file__ = theirs + file.removeprefix(ours)
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.origin:
            spec.origin = module.__file__
        if hasattr(module, "__path__"):
            module.__path__[:] = [os.path.dirname(module.__file__)]


def _renew_secrets() -> None:
    """Let no two kernels draw the same numbers.  ``random`` does so by itself after each fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


# The marker


def _marker() -> int:
    """Return the address of the value of LEMON_RUN_ID in the memory that ``/proc/self/environ`` shows, else 0."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address = getenv(_RUN_ID.encode())
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[47]), int(fields[48])
    except (OSError, ValueError, IndexError):
        return 0
    return address if address and start < address < end else 0


def _mark(address: int, run_id: str) -> None:
    """Write `run_id` over the template's; raise ValueError if the system does not show it then."""
    if len(run_id) != len(ctypes.string_at(address)):
        raise ValueError("a marker of another length")
    ctypes.memmove(address, run_id.encode("ascii"), len(run_id))
    with open("/proc/self/environ", "rb") as file:
        if f"{_RUN_ID}={run_id}".encode() not in file.read().split(b"\0"):
            raise ValueError("the system shows another environment")


def _mtime_ns(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None
