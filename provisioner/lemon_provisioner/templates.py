"""Templates: quiet processes with a kernel's imports done, from which session kernels are forked.

The problem.  A kernel started from scratch spends a quarter of a second on imports and keeps 30 MB of them for
itself.  A fork of a process that has them already is ready in a tenth of the time and shares their pages.

What does not work.  One template for everybody: some of what a Python process is it learns only when it starts.  So
a template is good for one *origin* (:class:`Origin`): interpreter, the environment variables that are read at the start,
what a process inherits from its parent besides (limits, user, ignored signals, control group ...), and the state of the
folders on ``sys.path``.  If anything of it has changed since the template was started, the kernel starts from scratch and
a new template is made.

Nor does it work to make the first kernel wait for a template, or to let the two compete: a template is made in the
background once the first cold kernel has had its time (:data:`WARM_DELAY_S`), or by :meth:`Templates.warm`.  No
``nice``: forked kernels would inherit it and could not shed it.

The other end is ``lemon_shim/kernel/template.py``, which describes the packets.  Whatever goes wrong here (see
``ColdStartReason``) is an ordinary cold start for the caller; a template that gave cause for it is retired: it forks no
more, and ends when the last of its kernels has ended.  A template is a process like a kernel: own group, own marker, own
workspace, known to the tracker; it ends with the registry, or after half an hour without use.

What can still fail.  What a ``sitecustomize`` makes of the folder, the time or an unlisted variable at the start is the
template's.  A changed module in a folder below a ``sys.path`` entry is noticed only when the template is renewed.

All of this is for one loop, the host's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lemon_shim.kernel import TEMPLATE_FLAG

from . import ColdStartReason, tracker
from .environment import RUN_ID_VARIABLE, child_environment
from .forked import MAX_PACKET_BYTES, ForkedProcess
from .kernel_files import stage_shim
from .key import environment_prefix
from .process import ChildProcess, new_run_id, readable
from .workspace import KERNEL_PREFIX, create_workspace, remove_tree

__all__ = ["Launch", "Origin", "Templates"]

ANSWER_TIMEOUT_S = 0.5
START_TIMEOUT_S = 10.0
WARM_DELAY_S = 1.0
MAX_AGE_S = 3600.0
MAX_FORKS = 500
IDLE_TIMEOUT_S = 1800.0
MAX_TEMPLATES = 4
"""Of different interpreters, per registry; the one that was not used for longest goes."""

SUPPORTED = sys.platform == "linux" and hasattr(os, "fork") and hasattr(os, "pidfd_open")

_READ_AT_START = ("PYTHON", "LC_", "LD_", "MALLOC_")
_ALSO_READ_AT_START = frozenset(
    {"LANG", "LANGUAGE", "TZ", "HOME", "GLIBC_TUNABLES", "OPENSSL_CONF", "__PYVENV_LAUNCHER__"}
)
_INHERITED_STATUS = (
    "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
    "Seccomp", "Cpus_allowed", "Mems_allowed",
)  # fmt: skip
_LIMITS = tuple(getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_"))
_REFUSALS: tuple[ColdStartReason, ...] = ("threads", "environment", "fork_error")

_log = logging.getLogger("lemon_provisioner")


@dataclass(frozen=True)
class Launch:
    """A kernel to be started: the command line that would start it from scratch, and what goes with it."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    run_id: str
    output: int

    @property
    def interpreter(self) -> str:
        return self.argv[0]


@dataclass(frozen=True)
class Origin:
    """What a process is from its start on; two processes of one origin are alike as far as a script can see."""

    interpreter: str
    files: tuple[object, ...]
    variables: tuple[tuple[str, str], ...]
    cwd: str
    """Only where ``PYTHONPATH`` has entries that are relative to it, else empty."""
    inherited: tuple[object, ...]

    @classmethod
    def of(cls, launch: Launch) -> Origin:
        """Return the origin that a process has which the calling thread starts now for `launch`."""
        paths = launch.env.get("PYTHONPATH", "")
        is_relative = any(not os.path.isabs(entry) for entry in paths.split(os.pathsep)) if paths else False
        prefix = environment_prefix(launch.interpreter)
        return cls(
            launch.interpreter,
            (prefix, *(_mtime_ns(path) for path in (launch.interpreter, os.path.join(prefix, "pyvenv.cfg")))),
            tuple(
                sorted(
                    (name, value)
                    for name, value in launch.env.items()
                    if name.startswith(_READ_AT_START) or name in _ALSO_READ_AT_START
                )
            ),
            launch.cwd if is_relative else "",
            _inherited(),
        )


class _Refused(Exception):
    """The template cannot serve this launch."""

    def __init__(self, reason: ColdStartReason) -> None:
        super().__init__(reason)
        self.reason: ColdStartReason = reason


class _Template:
    """One template process; made by :meth:`start`, ended by :meth:`retire` or :meth:`end`."""

    def __init__(self, origin: Origin, now: float) -> None:
        self.origin = origin
        self.started = self.last_use = now
        self.forks = 0
        self.kernels: set[ForkedProcess] = set()
        self.retired = False
        self._run_id = new_run_id()
        self._workspace = ""
        self._process: ChildProcess | None = None
        self._control: socket.socket | None = None
        self._folders: list[tuple[str, int | None]] = []

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, launch: Launch) -> None:
        """Start the process and wait for its hello.  Raises OSError, StagingError, TimeoutError or ValueError."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._spawn(launch)
                assert self._control is not None
                await readable(self._control.fileno())
            kind, _, folders = self._control.recv(MAX_PACKET_BYTES).partition(b" ")
            if kind != b"ready":
                raise ValueError("the template did not say that it is ready")
            self._folders = [(str(folder), mtime_ns) for folder, mtime_ns in json.loads(folders)]
        except BaseException:
            self.end()
            raise

    def _spawn(self, launch: Launch) -> None:
        self._workspace = create_workspace(KERNEL_PREFIX)
        folder = stage_shim(self._workspace)
        tracker.watch(self._run_id, self._workspace)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._control.setblocking(False)
            command = [launch.interpreter, "-P", folder, TEMPLATE_FLAG, str(theirs.fileno())]
            silence = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._process = ChildProcess.spawn(
                    command,
                    env=child_environment(self._run_id, launch.env),
                    cwd=self.origin.cwd or "/",
                    run_id=self._run_id,
                    output=silence,
                    pass_fds=[theirs.fileno()],
                )
            finally:
                os.close(silence)
        tracker.group(self._run_id, self._process.pid)

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._process.exited

    def check(self, origin: Origin, now: float) -> None:
        """Raise :class:`_Refused` if this template is not what `origin` needs."""
        if origin != self.origin or any(_mtime_ns(folder) != mtime for folder, mtime in self._folders):
            raise _Refused("environment")
        if now - self.started > MAX_AGE_S or self.forks >= MAX_FORKS:
            raise _Refused("age")
        if not self.alive:
            raise _Refused("no_answer")

    async def fork(self, launch: Launch, now: float) -> ForkedProcess:
        """Return a kernel that runs; raise :class:`_Refused`, and then there is none and will be none."""
        self.forks += 1
        self.last_use = now
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process: ForkedProcess | None = None
        try:
            connection.setblocking(False)
            with theirs, os.fdopen(os.memfd_create("request"), "wb") as content:
                content.write(_request(launch))
                content.flush()
                assert self._control is not None
                try:
                    socket.send_fds(
                        self._control, [b"fork"], [theirs.fileno(), launch.output, content.fileno()]
                    )
                except OSError:
                    raise _Refused("no_answer") from None
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    pid, pidfd = await _answer(connection)
            except TimeoutError:
                raise _Refused("no_answer") from None
            process = ForkedProcess(pid, pidfd, connection, launch.run_id, self._kernel_ended)
            tracker.group(launch.run_id, pid)
            self.kernels.add(process)
            try:
                connection.send(b"go")
            except OSError:
                raise _Refused("fork_error") from None
            return process
        except BaseException:
            if process is not None:
                process.finish()
            connection.close()  # the kernel that may yet come of it ends itself
            raise

    def retire(self) -> None:
        """Fork no more; end once the last kernel has ended, for it is this process that knows how it ended."""
        self.retired = True
        self._hang_up()
        if not self.kernels:
            self.end()

    def _hang_up(self) -> None:
        """Let the template see end of file, also where a forked child of this process has our end as well."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()

    def end(self) -> None:
        """End the process and remove what it had.  Kernels that it forked go on."""
        self.retired = True
        self._hang_up()
        if self._process is not None and self._process.finish() is None:
            _log.warning("a template process does not die of SIGKILL")
            return
        if self._workspace:
            remove_tree(self._workspace)
        tracker.forget(self._run_id)

    def _kernel_ended(self, process: ForkedProcess) -> None:
        self.kernels.discard(process)
        if self.retired and not self.kernels:
            self.end()


class Templates:
    """The templates of one registry.  `on_fallback` is told of each cold start that might have been warm.

    `clock` gives seconds (a seam for tests).
    """

    def __init__(
        self,
        *,
        on_fallback: Callable[[ColdStartReason], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_fallback = on_fallback
        self._clock = clock
        self._templates: dict[str, _Template] = {}
        self._retired: set[_Template] = set()
        self._starting: dict[str, asyncio.Task[bool]] = {}
        self._refusals: dict[str, tuple[ColdStartReason, float]] = {}
        """Interpreters that cannot have a template, why, and since when; tried again after :data:`MAX_AGE_S`."""
        self._delays: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def pids(self) -> list[int]:
        """Return the process ids of the templates that fork kernels now."""
        return [template.pid for template in self._templates.values()]

    async def fork(self, launch: Launch) -> ForkedProcess | None:
        """Return a forked kernel, or None: then start it from scratch; a template may be made meanwhile.

        Raises nothing of its own.  When it is cancelled there is no kernel.
        """
        try:
            return await self._fork(launch)
        except _Refused as refused:
            self._count(refused.reason)
        except Exception as error:  # a fault in here must not cost the kernel
            _log.warning("a template could not be used: %s", type(error).__name__)
            self._count("unknown")
        self._drop(launch.interpreter)
        self._warm_later(launch)
        return None

    async def warm(self, launch: Launch) -> bool:
        """Have a template for kernels like `launch`, and return whether there is one.  Waits for it."""
        if self._closed or not SUPPORTED:
            return False
        interpreter = launch.interpreter
        if self._known_refusal(interpreter) is not None:
            return False
        template = self._templates.get(interpreter)
        if template is not None:
            try:
                template.check(Origin.of(launch), self._clock())
            except _Refused:
                self._drop(interpreter)
            else:
                return True
        starting = self._starting.get(interpreter)
        if starting is None:
            starting = asyncio.get_running_loop().create_task(self._start(launch))
            self._starting[interpreter] = starting
        await asyncio.wait({starting})  # goes on for others if our caller leaves
        return not starting.cancelled() and starting.result()

    def reap(self) -> None:
        """End templates that were not used for half an hour.  Called with the registry's tick."""
        now = self._clock()
        for interpreter, template in list(self._templates.items()):
            if not template.alive or now - template.last_use >= IDLE_TIMEOUT_S:
                self._drop(interpreter)

    async def aclose(self) -> None:
        """End everything, idempotent.  Kernels that still live are not touched."""
        self._closed = True
        for delay in self._delays.values():
            delay.cancel()
        self._delays.clear()
        tasks = list(self._starting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for template in [*self._templates.values(), *self._retired]:
            template.end()
        self._templates.clear()
        self._retired.clear()

    async def _fork(self, launch: Launch) -> ForkedProcess | None:
        if not SUPPORTED:
            raise _Refused("unsupported")
        if not os.path.isdir(launch.cwd):
            return None  # which will say so
        interpreter = launch.interpreter
        known = self._known_refusal(interpreter)
        if known is not None:
            raise _Refused(known)
        template = self._templates.get(interpreter)
        if template is None:
            if self._templates and interpreter not in self._starting:
                raise _Refused("environment")  # there are templates, but of other interpreters
            self._warm_later(launch)
            return None
        template.check(Origin.of(launch), self._clock())
        try:
            return await template.fork(launch, self._clock())
        except _Refused as refused:
            if refused.reason == "threads":
                self._refusals[interpreter] = ("threads", self._clock())
            raise

    def _known_refusal(self, interpreter: str) -> ColdStartReason | None:
        reason, since = self._refusals.get(interpreter, (None, 0.0))
        if reason is not None and self._clock() - since > MAX_AGE_S:
            del self._refusals[interpreter]
            return None
        return reason

    def _count(self, reason: ColdStartReason) -> None:
        if self._on_fallback is not None:
            self._on_fallback(reason)

    def _drop(self, interpreter: str) -> None:
        template = self._templates.pop(interpreter, None)
        if template is not None:
            template.retire()
            self._retired = {one for one in self._retired if one.kernels}
            if template.kernels:
                self._retired.add(template)

    def _warm_later(self, launch: Launch) -> None:
        interpreter = launch.interpreter
        if self._closed or interpreter in self._delays or interpreter in self._starting:
            return
        if not SUPPORTED or self._known_refusal(interpreter) is not None:
            return
        loop = asyncio.get_running_loop()

        def begin() -> None:
            del self._delays[interpreter]
            if interpreter not in self._starting and interpreter not in self._templates:
                self._starting[interpreter] = loop.create_task(self._start(launch))

        self._delays[interpreter] = loop.call_later(WARM_DELAY_S, begin)

    async def _start(self, launch: Launch) -> bool:
        interpreter = launch.interpreter
        try:
            template = _Template(Origin.of(launch), self._clock())
            try:
                await template.start(launch)
            except Exception as error:  # no room, no time, no interpreter: all of it is a cold start
                _log.info("no template: %s", type(error).__name__)
                self._refusals[interpreter] = ("unknown", self._clock())
                return False
            if len(self._templates) >= MAX_TEMPLATES:
                self._drop(min(self._templates, key=lambda name: self._templates[name].last_use))
            self._templates[interpreter] = template
            return True
        finally:
            self._starting.pop(interpreter, None)


async def _answer(connection: socket.socket) -> tuple[int, int]:
    """Return number and pidfd of the kernel once it is set up; raise :class:`_Refused`."""
    pid = pidfd = -1
    is_set_up = False
    try:
        while pidfd < 0 or not is_set_up:
            try:
                packet, descriptors, _, _ = socket.recv_fds(
                    connection, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await readable(connection.fileno())
                continue
            except OSError:
                packet, descriptors = b"", []
            kind, _, rest = packet.partition(b" ")
            if kind == b"forked" and descriptors:
                pid, pidfd = int(rest), descriptors[0]
            elif packet == b"set up":
                is_set_up = True
            elif kind == b"refused":
                said = rest.decode("ascii", "replace")
                raise _Refused(next((reason for reason in _REFUSALS if reason == said), "unknown"))
            else:  # failed, or died; the template's death is no answer
                raise _Refused("fork_error" if packet else "no_answer")
    except BaseException:
        if pidfd >= 0:
            os.close(pidfd)
        raise
    return pid, pidfd


def _request(launch: Launch) -> bytes:
    content = {
        "argv": list(launch.argv),
        "env": {**launch.env, RUN_ID_VARIABLE: launch.run_id},
        "cwd": launch.cwd,
        "umask": _status_lines().get("Umask", "0022"),
    }
    return json.dumps(content).encode("ascii")


def _status_lines() -> dict[str, str]:
    with open("/proc/thread-self/status", encoding="ascii", errors="replace") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def _inherited() -> tuple[object, ...]:
    """Return what a child of the calling thread inherits and cannot, or should not, change afterwards."""
    status = _status_lines()
    try:
        with open("/proc/thread-self/cgroup", encoding="utf-8", errors="replace") as file:
            cgroup = file.read()
    except OSError:
        cgroup = ""
    return (
        tuple(status.get(name, "") for name in _INHERITED_STATUS),
        tuple(resource.getrlimit(number) for number in _LIMITS),
        os.getpriority(os.PRIO_PROCESS, 0),
        cgroup,
    )


def _mtime_ns(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
