"""LemonProvisioner: what Jupyter calls to launch, watch and end a ``lemon`` kernel.

The problem.  Stock provisioning leaks: children that ignore SIGTERM survive a polite shutdown, nbclient never kills the
group of a kernel that crashed, ports are chosen by one process and bound later by another, and the session key, the
connection file and the whole environment of a server are wherever they happen to be.

What we do.  Each kernel id has a private workspace (0700) with its IPC sockets, the staged script side and, for a
session launch, the connection file (0600); the folder is the lock, and there is no port to race for.  The process is a
:class:`~lemon_provisioner.process.ChildProcess`: a group of its own, looked at without reaping, killed as a group and
by its marker before the leader is reaped.  ``cleanup`` always kills, because after a crash it is all that a client
calls, and may be called any number of times.  If a launch fails nobody calls it, so a failed launch releases itself.

A restart keeps workspace, sockets, connection file and key, or every connected client would be cut off;
``newports=True`` renews all four.  Where the path to a socket would exceed 107 bytes the kernel listens on TCP on
the loopback interface, encrypted with CurveZMQ.

What can still fail.  A process in uninterruptible sleep outlives SIGKILL; :attr:`LemonProvisioner.confirmed_dead`
says so.  The ports of the TCP fallback can be taken between choice and bind; then the start fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from jupyter_client.connect import KernelConnectionInfo, port_names
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from lemon_shim.kernel import IPYKERNEL_REQUIREMENT, NO_IPYKERNEL_STATUS, SESSION_FLAG
from traitlets import Unicode
from traitlets.utils.importstring import import_item

from . import tracker
from .environment import child_environment
from .kernel_files import SHIM_FOLDER, stage_shim, write_connection
from .process import ChildProcess, Process, new_run_id
from .templates import Launch, Templates
from .workspace import KERNEL_PREFIX, create_workspace, remove_tree

__all__ = ["LemonProvisioner", "SessionLaunch"]

MAX_SOCKET_PATH_BYTES = 107
"""Of ``sun_path`` on Linux, less its NUL."""
SHUTDOWN_WAIT_S = 2.0
"""Makes jupyter_client's polite shutdown SIGINT at 0 s, SIGTERM at 1 s, SIGKILL at 2 s (jupyter-facts 0.9)."""
CONFIRM_S = 1.0
KEY_BYTES = 32

_MODULE = "lemon_shim.kernel"
_log = logging.getLogger("lemon_provisioner")
_config_log = logging.getLogger("lemon_kernel.config")


@dataclass(frozen=True)
class SessionLaunch:
    """A launch by our own registry: `output` becomes the kernel's standard output and error (behaviour 6.5)."""

    output: int
    templates: Templates | None = None
    """Where a warm start may be had; None for a start from scratch, always."""


class LemonProvisioner(KernelProvisionerBase):
    """Provisions kernels of the ``lemon`` kernelspec, and session kernels of ``execute_code``."""

    interpreter = Unicode(
        "",
        config=True,
        help="Python that runs the kernel; it needs ipykernel. Empty: the one the kernelspec names.",
    )
    notebook_host = Unicode(
        "lemon_kernel.notebook.serve",
        config=True,
        help="Dotted name of the function that answers helper calls of front-end kernels: it takes "
        "connection_info, cwd and pid as keywords and returns what stops it. Empty: none.",
    )

    session: SessionLaunch | None = None
    """Set by our own registry before the launch; None for a front end's launch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.workspace: str | None = None
        self.process: Process | None = None
        self.exit_status: int | None = None
        """Of the process that ended last (jupyter_client forgets it)."""
        self.confirmed_dead = True
        """False while a process that we launched may still be alive although it was killed."""
        self.run_id = ""
        self.cwd = ""
        self._stop_host: Callable[[], None] | None = None

    # What Jupyter asks while it launches

    @property
    def has_process(self) -> bool:
        return self.process is not None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Prepare workspace, sockets, key and command line.  Called before every launch, restarts included."""
        try:
            return await self._prepare(kwargs)
        except BaseException:
            self._release_files()
            raise

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the process.  Raises OSError when the program cannot be started; everything is released then.

        A session kernel is forked from a template where there is one that fits.
        """
        self.cwd = os.path.abspath(kwargs.get("cwd") or os.getcwd())
        try:
            if not await self._fork(cmd, kwargs):
                self._spawn(cmd, kwargs)
        except BaseException:
            tracker.forget(self.run_id)
            self._release_files()
            raise
        return self.connection_info

    async def post_launch(self, **kwargs: Any) -> None:
        """Let a host answer the helper calls of a front end's kernel.  Called when the process runs."""
        if self.session is not None or not self.notebook_host:
            return
        try:
            serve = import_item(self.notebook_host)
        except ImportError as error:
            self.log.warning("no helper host for this kernel (%s)", type(error).__name__)
            return
        pid = self.process.pid if self.process is not None else None
        self._stop_host = serve(connection_info=dict(self.connection_info), cwd=self.cwd, pid=pid)

    # What Jupyter asks of a process

    async def poll(self) -> int | None:
        """Return None while the kernel lives, else its exit status; a dead one's children are killed at once."""
        if self.process is None:
            return self.exit_status if self.exit_status is not None else 0
        if not self.process.exited:
            return None
        return self._settle()

    async def wait(self) -> int | None:
        """Wait for the process to end, kill what it left behind, and return its exit status."""
        if self.process is None:
            return self.exit_status
        await self.process.wait()
        status = self._settle()
        self.process = None
        return status

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel's process group."""
        if self.process is not None:
            self.process.signal_group(signum)

    async def kill(self, restart: bool = False) -> None:
        """Send SIGKILL to the group.  jupyter_client waits for the death itself."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Send SIGTERM to the group."""
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Kill what is left and, unless a restart follows, release everything.  Idempotent; may come unasked."""
        self._stop_notebook_host()
        await self._end_process()
        if not restart:
            self._release_files()

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        return SHUTDOWN_WAIT_S

    def resolve_path(self, path: str) -> str | None:
        """Return `path` as the kernel would find it from its folder, or None if it is not there."""
        found = os.path.normpath(os.path.join(self.cwd or os.getcwd(), os.path.expanduser(path)))
        return found if os.path.exists(found) else None

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what another provisioner needs to find this kernel again; plain JSON values."""
        return {
            "kernel_id": self.kernel_id,
            "connection_info": {
                name: value.decode("ascii") if isinstance(value, bytes) else value
                for name, value in self.connection_info.items()
            },
            "pid": self.process.pid if self.process is not None else None,
            "started": _start_time(self.process.pid) if self.process is not None else None,
            "run_id": self.run_id,
            "workspace": self.workspace,
            "cwd": self.cwd,
        }

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take over a kernel from what :meth:`get_provisioner_info` said; it can then be polled and stopped."""
        info: Any = dict(provisioner_info["connection_info"])
        for name in ("key", "curve_publickey", "curve_secretkey"):
            if isinstance(info.get(name), str):
                info[name] = info[name].encode("ascii")
        self.kernel_id = provisioner_info["kernel_id"]
        self.connection_info = info
        self.run_id = provisioner_info.get("run_id") or ""
        self.workspace = provisioner_info.get("workspace")
        self.cwd = provisioner_info.get("cwd") or ""
        pid, started = provisioner_info.get("pid"), provisioner_info.get("started")
        if pid is not None and started is not None and _start_time(pid) == started:
            from .adopted import AdoptedProcess

            self.process = AdoptedProcess(pid, self.run_id)

    # Preparation

    async def _prepare(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        manager = self.parent
        session_name = (kwargs.get("env") or os.environ).get("JPY_SESSION_NAME", "")
        if manager is not None:
            self._prepare_connection(session_name)
            command = manager.format_kernel_cmd(extra_arguments=kwargs.pop("extra_arguments", []))
        else:
            command = self.kernel_spec.argv + kwargs.pop("extra_arguments", [])
        kwargs.pop("transport_encryption", None)
        assert self.workspace is not None
        ended, self.run_id = self.run_id, new_run_id()
        tracker.watch(self.run_id, self.workspace)
        if ended:
            tracker.forget(ended)
        kwargs = await super().pre_launch(cmd=self._command(command), **kwargs)
        kwargs["env"] = child_environment(self.run_id, kwargs["env"])
        if session_name and self.session is None:
            kwargs["env"]["JPY_SESSION_NAME"] = session_name
        return kwargs

    def _prepare_connection(self, session_name: str) -> None:
        """Decide where the kernel listens and write that down, once per kernel id."""
        manager = self.parent
        if self.workspace is not None and manager.shell_port and os.path.exists(manager.connection_file):
            return  # a restart
        self._release_files()
        self.workspace = create_workspace(KERNEL_PREFIX)
        stage_shim(self.workspace)
        manager.session.key = secrets.token_hex(KEY_BYTES).encode()
        manager.cache_ports = False
        self._choose_transport()
        if self.session is not None:
            info = manager.get_connection_info() | {"kernel_name": manager.kernel_name}
            manager.connection_file = write_connection(self.workspace, info)
            manager._connection_file_written = True
        else:
            manager.write_connection_file(jupyter_session=session_name)
        manager._random_port_names = list(port_names)  # so that newports=True forgets them
        self.connection_info = manager.get_connection_info()

    def _choose_transport(self) -> None:
        manager = self.parent
        path = os.path.join(self.workspace or "", "k")
        manager.curve_publickey = manager.curve_secretkey = None
        if len(os.fsencode(path)) + len("-5") <= MAX_SOCKET_PATH_BYTES:
            manager.transport, manager.ip = "ipc", path
            ports = list(range(1, 6))
        else:
            manager.transport, manager.ip = "tcp", "127.0.0.1"
            manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()
            ports = _free_ports(5)
        for name, port in zip(port_names, ports, strict=True):
            setattr(manager, name, port)

    def _command(self, command: list[str]) -> list[str]:
        """Return `command` with the staged folder in place of the installed module, under ``-P``."""
        command = list(command)
        if self.interpreter:
            command[0] = self.interpreter
        assert self.workspace is not None
        for index in range(len(command) - 1):
            if command[index : index + 2] == ["-m", _MODULE]:
                command[index : index + 2] = [os.path.join(self.workspace, SHIM_FOLDER)]
                if "-P" not in command[1:index]:
                    command.insert(1, "-P")
                if self.session is not None:
                    command.append(SESSION_FLAG)
                break
        return command

    async def _fork(self, command: list[str], kwargs: dict[str, Any]) -> bool:
        if self.session is None or self.session.templates is None:
            return False
        launch = Launch(command, kwargs["env"], self.cwd, self.run_id, self.session.output)
        process = await self.session.templates.fork(launch)
        if process is None:
            return False
        self._started(process)
        return True

    def _spawn(self, command: list[str], kwargs: dict[str, Any]) -> None:
        output, opened = self._output(kwargs)
        try:
            process = ChildProcess.spawn(
                command, env=kwargs["env"], cwd=self.cwd, run_id=self.run_id, output=output
            )
        finally:
            if opened:
                os.close(output)
        tracker.group(self.run_id, process.pid)
        self._started(process)

    def _started(self, process: Process) -> None:
        self.process = process
        self.exit_status = None
        self.confirmed_dead = False

    def _output(self, kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Return the descriptor for the kernel's own output, and whether we opened it.

        A front end's kernel captures its streams itself; what reaches the descriptor is for the server's log.  A
        pipe that nobody drains would stop the kernel (jupyter-facts 2.8), so one that is asked for is not made.
        """
        if self.session is not None:
            return self.session.output, False
        wanted = kwargs.get("stderr")
        try:
            if wanted is None:
                return os.dup(2), True
            descriptor = wanted if isinstance(wanted, int) else wanted.fileno()
            if descriptor >= 0:
                return descriptor, False
        except (OSError, ValueError, AttributeError):
            pass
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), True

    # The end

    async def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if not process.exited:
            process.signal_group(signal.SIGKILL)
            try:
                await asyncio.wait_for(process.wait(), CONFIRM_S)
            except TimeoutError:
                pass
        status = process.finish()
        if status is None:
            self.process = process  # may be tried again
            _log.warning("a kernel process does not die of SIGKILL")
        else:
            self._ended(status)

    def _settle(self) -> int | None:
        assert self.process is not None
        status = self.process.finish()
        if status is not None:
            self._ended(status)
        return status

    def _ended(self, status: int) -> None:
        if self.confirmed_dead:
            return
        self.confirmed_dead = True
        self.exit_status = status
        tracker.forget(self.run_id)  # its group's number may soon be a stranger's
        if self.workspace is not None:
            tracker.watch(self.run_id, self.workspace)
        if status == NO_IPYKERNEL_STATUS:
            _warn_of_ipykernel(self.interpreter or sys.executable)

    def _release_files(self) -> None:
        """Remove the workspace and with it sockets, key and staged files; leave nothing of a failed launch."""
        manager = self.parent
        if manager is not None and self.workspace is not None:
            manager.cleanup_connection_file()
        if self.process is None:
            workspace, self.workspace = self.workspace, None
            if workspace is not None:
                remove_tree(workspace)
            if self.run_id:
                tracker.forget(self.run_id)

    def _stop_notebook_host(self) -> None:
        stop, self._stop_host = self._stop_host, None
        if stop is not None:
            try:
                stop()
            except Exception as error:
                _log.error("the helper host did not stop (%s)", type(error).__name__)


_warned: set[str] = set()


def _warn_of_ipykernel(interpreter: str) -> None:
    """Say once per interpreter why no kernel starts there, and how to mend it."""
    if interpreter not in _warned:
        _warned.add(interpreter)
        _config_log.warning(
            "session kernels cannot start with %s: it has no %s; install it with: %s -m pip install '%s'",
            interpreter,
            IPYKERNEL_REQUIREMENT,
            interpreter,
            IPYKERNEL_REQUIREMENT,
        )


def _free_ports(count: int) -> list[int]:
    """Return TCP ports of the loopback interface that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot: with the number, its identity."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
