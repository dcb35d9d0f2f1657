"""The host's lean end of one kernel: start it, run cells one at a time, end it for certain.

Why not a ``KernelClient``.  Its channels deserialise every message into dictionaries with dates, keep queues and
threads, and have no notion of a kernel that died: a helper call takes 1.5 ms through them and 0.5 ms here.  What is
left to do is small: four zmq sockets on the host loop, messages signed and cut by hand
(:mod:`lemon_shim.message`), and the read end of the pipe that is the kernel's standard output.

Ready.  ``wait_for_ready()`` asks on shell and sleeps 200 ms in between.  Here the comm is opened and ``kernel_info``
asked on *control*, and iopub counts as connected once something was *heard* on it (XPUB greets each subscriber): a
helper call published before that would be lost and its cell hang.  One deadline covers all of it.

A cell ends with its reply.  Its output is complete when the host has then read as many bytes as FIONREAD says are in
the pipe (behaviour 7.4): reading until the pipe is empty has no end while a background child prints.

Every wait ends: the process's death is seen through its pidfd and fails whatever waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from lemon_provisioner.staging import with_prelude
from lemon_provisioner.workspace import StagingError
from lemon_shim.kernel import GRANT_METADATA
from lemon_shim.message import Message, Signer, decode, encode

from ..bridge.comm import CommCarrier
from ..bridge.sockets import Channel
from ..output import held_bytes

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager
    from lemon_provisioner.provisioner import LemonProvisioner
    from lemon_provisioner.templates import Templates

    from ..bridge.dispatch import Dispatcher
    from ..output import OutputCapture

__all__ = ["CellReply", "KernelDied", "KernelLink", "ProtocolFault", "StartupError"]

STARTUP_TIMEOUT_S = 10.0
"""How long a kernel may take to become ready, every start-up phase included (seed, fixed constant)."""

MAX_MESSAGE_BYTES = 262_144
"""Of a shell or control message to the host (behaviour 6.11)."""
REPLY_AFTER_IDLE_S = 1.0
READ_BYTES = 65_536
DRAIN_INTERVAL_S = 0.002
"""While little output comes the pipe is read at most this often: a line is not worth a wake-up."""


class StartupError(Exception):
    """No kernel could be started; everything that the attempt had made is released."""


class KernelDied(Exception):
    """The kernel's process ended during a cell."""


class ProtocolFault(Exception):
    """The kernel said something that it must not say (behaviour 6.11); it cannot be trusted with a cell."""


@dataclass(frozen=True)
class CellReply:
    """How a cell ended: `ok`, or the exception's name and message."""

    ok: bool
    name: str | None
    message: str | None


class _Pipe:
    """The read end of the kernel's standard output and error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self.capture: OutputCapture | None = None
        """Gets what is read; without one it is thrown away."""
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._loop.add_reader(descriptor, self._readable)

    def drain(self) -> None:
        """Read exactly as much as is in the pipe now."""
        left = held_bytes(self._descriptor) if self._descriptor >= 0 else 0
        while left > 0:
            chunk = self._read(min(left, READ_BYTES))
            if not chunk:
                return
            left -= len(chunk)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            if self._rest is not None:
                self._rest.cancel()
            os.close(self._descriptor)
            self._descriptor = -1

    def _readable(self) -> None:
        chunk = self._read(READ_BYTES)
        if chunk is None:
            return
        if not chunk:  # every writer is gone
            self._loop.remove_reader(self._descriptor)
        elif len(chunk) < READ_BYTES // 2:
            self._loop.remove_reader(self._descriptor)
            self._rest = self._loop.call_later(DRAIN_INTERVAL_S, self._watch)

    def _watch(self) -> None:
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._readable)

    def _read(self, size: int) -> bytes | None:
        try:
            chunk = os.read(self._descriptor, size)
        except BlockingIOError:
            return None
        if self.capture is not None and chunk:
            self.capture.feed(chunk)
        return chunk


class _Cell:
    """The request that is in the kernel."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        self.mark = f'"{message_id}"'.encode()
        self.reply: asyncio.Future[CellReply] = asyncio.get_running_loop().create_future()
        self.idle_timer: asyncio.TimerHandle | None = None

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


def _silent_log() -> logging.Logger:
    """Return the log of a kernel manager of ours: it says paths and raw errors, and nobody hears it (behaviour 9.1)."""
    log = logging.getLogger("lemon_kernel.session.jupyter")
    log.propagate = False
    log.setLevel(logging.CRITICAL + 1)
    return log


class KernelLink:
    """One live kernel.  Made by :meth:`start`, ended by :meth:`stop` or :meth:`cancel`; all on one loop."""

    dead: asyncio.Event
    """Set once the kernel's process has ended, however that came."""
    pid: int

    def __init__(self, helpers: Sequence[str]) -> None:
        """Use :meth:`start`."""
        self.dead = asyncio.Event()
        self.pid = 0
        self._helpers = list(helpers)
        self._loop = asyncio.get_running_loop()
        self._provisioner: LemonProvisioner | None = None
        self._manager: AsyncKernelManager | None = None
        self._shell: Channel | None = None
        self._control: Channel | None = None
        self._iopub: Channel | None = None
        self._pipe: _Pipe | None = None
        self._signer = Signer(b"", "")
        self._comm = CommCarrier(self._send_control)
        self._cell: _Cell | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[bool] | None = None
        self._info_id = ""
        self._heard: asyncio.Future[object] = self._loop.create_future()
        self._informed: asyncio.Future[object] = self._loop.create_future()

    @classmethod
    async def start(
        cls,
        *,
        interpreter: str,
        cwd: str,
        helpers: Sequence[str],
        deadline: float,
        templates: Templates | None = None,
    ) -> KernelLink:
        """Start a kernel, forked from one of `templates` where that can be, and return once it can run cells.

        `deadline` is the caller's, in loop time; a kernel has at most 10 s all the same.  Raises
        :class:`StartupError`, and has then released everything, also when it is cancelled.
        """
        link = cls(helpers)
        loop = asyncio.get_running_loop()
        limit = min(deadline, loop.time() + STARTUP_TIMEOUT_S)
        try:
            async with asyncio.timeout_at(limit):
                await link._launch(interpreter, cwd, templates)
                await link._become_ready()
        except BaseException as error:
            await asyncio.shield(link._end(escalate=False))
            if isinstance(
                error, (OSError, StagingError, KernelDied, ProtocolFault, TimeoutError, zmq.ZMQError)
            ):
                raise StartupError(
                    f"the kernel did not start: {str(error) or type(error).__name__}"
                ) from error
            raise
        return link

    async def run_cell(
        self, code: str, *, number: int, dispatcher: Dispatcher, capture: OutputCapture
    ) -> CellReply:
        """Run `code`, as submitted, as cell `number`; its output is complete in `capture` on return.

        Raises :class:`KernelDied` or :class:`ProtocolFault`; the output until then is in `capture`.  If the
        awaiting task is cancelled the cell is lost: the kernel must be ended with :meth:`cancel`.
        """
        if self.dead.is_set() or self._shell is None or self._pipe is None:
            raise KernelDied
        assert self._cell is None, "one cell at a time"
        self._pipe.drain()  # what came between cells belongs to none
        self._pipe.capture = capture
        cell = self._cell = _Cell(self._signer.new_id())
        self._comm.attach(dispatcher)
        try:
            self._shell.send(self._request(cell, with_prelude(code, self._helpers), number, dispatcher))
            return await cell.reply
        finally:
            if cell.idle_timer is not None:
                cell.idle_timer.cancel()
            self._cell = None
            if self._iopub is not None:
                self._iopub.pump()  # notifications that are here already are forwarded (behaviour 5.5)
            self._comm.detach()
            self.drain()
            if self._pipe is not None:
                self._pipe.capture = None

    def drain(self) -> None:
        """Read into the running cell's capture what its output pipe holds now (behaviour 7.4)."""
        if self._pipe is not None:
            self._pipe.drain()

    def is_dead(self) -> bool:
        """Ask the system whether the process has ended; `dead` is set some turns of the loop later."""
        process = self._provisioner.process if self._provisioner is not None else None
        return self.dead.is_set() or (process is not None and process.exited)

    async def cancel(self) -> bool:
        """End a kernel whose cell is lost: SIGINT, SIGTERM, SIGKILL, 1 s each; return whether it is dead.

        On return its processes are gone and its workspace is removed, unless False.  May be called again, also
        by several tasks; cancelling a caller does not stop the work.
        """
        return await self._end_once(escalate=True)

    async def stop(self) -> bool:
        """End an idle kernel at once; return whether it is dead, as :meth:`cancel` does."""
        return await self._end_once(escalate=False)

    # Start

    async def _launch(self, interpreter: str, cwd: str, templates: Templates | None) -> None:
        # Imported here: a host that runs only per-call scripts needs no Jupyter (design 3).
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager
        from lemon_provisioner.provisioner import LemonProvisioner, SessionLaunch

        reader, writer = os.pipe()
        self._pipe = _Pipe(reader)
        try:
            spec = KernelSpec(
                argv=[interpreter, "-P", "-m", "lemon_shim.kernel", "-f", "{connection_file}"],
                display_name="execute_code session",
                language="python",
                interrupt_mode="signal",
            )
            manager = AsyncKernelManager(kernel_name="lemon", autorestart=False, log=_silent_log())
            manager._kernel_spec = spec
            manager._connect_control_socket = _none  # type: ignore[method-assign]  # this link has its own
            provisioner = LemonProvisioner(
                kernel_id=secrets.token_hex(16), kernel_spec=spec, parent=manager, interpreter=interpreter
            )
            provisioner.session = SessionLaunch(writer, templates)
            manager.kernel_id, manager.provisioner = provisioner.kernel_id, provisioner
            self._manager, self._provisioner = manager, provisioner
            await manager.start_kernel(cwd=cwd)
        finally:
            os.close(writer)
        assert provisioner.process is not None
        self.pid = provisioner.process.pid
        self._watcher = self._loop.create_task(self._watch())

    async def _become_ready(self) -> None:
        manager = self._manager
        assert manager is not None
        self._signer = Signer(manager.session.key, secrets.token_hex(16))
        self._iopub = self._connect(zmq.SUB, "iopub", self._on_iopub)
        self._control = self._connect(zmq.DEALER, "control", self._on_control)
        self._shell = self._connect(zmq.DEALER, "shell", self._on_shell)
        self._comm.open()
        self._info_id = self._signer.new_id()
        self._control.send(self._signer.frames("kernel_info_request", b"{}", message_id=self._info_id))
        informed, heard = await self._or_death(asyncio.gather(self._informed, self._heard))
        if informed != heard:
            raise ProtocolFault("another kernel answered")

    def _connect(self, kind: int, name: str, receive: Callable[[list[bytes | memoryview]], None]) -> Channel:
        manager = self._manager
        assert manager is not None
        topics = (self._comm.topic, b"kernel.") if kind == zmq.SUB else ()
        return Channel(
            kind, manager._make_url(name), receive, topics=topics, server_key=manager.curve_publickey or b""
        )

    async def _or_death(self, ready: asyncio.Future[tuple[object, object]]) -> tuple[object, object]:
        """Return the result of `ready`; raise KernelDied if the process ends first."""
        death = self._loop.create_task(self.dead.wait())
        first: set[asyncio.Future[object]] = {ready, death}  # type: ignore[arg-type]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise KernelDied("its process ended")
            return ready.result()
        finally:
            death.cancel()
            ready.cancel()

    # Messages

    def _request(self, cell: _Cell, code: str, number: int, dispatcher: Dispatcher) -> list[bytes]:
        content = {
            "code": code,
            "silent": False,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        grant = {
            "cell": dispatcher.cell,
            "token": dispatcher.token,
            "number": number,
            "max_text_bytes": dispatcher.limits.max_text_bytes,
            "helpers": self._helpers,
        }
        return self._signer.frames(
            "execute_request",
            encode(content),
            metadata=encode({GRANT_METADATA: grant}),
            message_id=cell.message_id,
        )

    def _send_control(self, kind: str, content: bytes) -> None:
        if self._control is not None:
            self._control.send(self._signer.frames(kind, content))

    def _on_shell(self, frames: list[bytes | memoryview]) -> None:
        cell = self._cell
        message = self._signer.open(frames)
        if message is None or cell is None:
            return
        if sum(map(len, frames)) > MAX_MESSAGE_BYTES:
            self._fault("a shell message is too large")
        elif cell.mark in message.parent:
            try:
                cell_reply = _reply(message)
            except (ValueError, KeyError, TypeError):
                self._fault("the reply to a cell is no execute_reply")
            else:
                if not cell.reply.done():
                    cell.reply.set_result(cell_reply)

    def _on_control(self, frames: list[bytes | memoryview]) -> None:
        message = self._signer.open(frames)
        if message is None:
            return
        if sum(map(len, frames)) > MAX_MESSAGE_BYTES:
            self._fault("a control message is too large")
        elif not self._informed.done() and self._info_id.encode() in message.parent:
            self._informed.set_result(_session_of(message))

    def _on_iopub(self, frames: list[bytes | memoryview]) -> None:
        message = self._signer.open(frames)
        if message is None:
            return
        topic = message.route[0] if message.route else b""
        if topic == self._comm.topic:
            if not self._heard.done():
                self._heard.set_result(_session_of(message))
            if b'"comm_msg"' in message.header:
                self._comm.receive(message.content)
        elif topic.endswith(b".status") and b'"idle"' in bytes(message.content):
            cell = self._cell
            if cell is not None and cell.idle_timer is None and cell.mark in message.parent:
                cell.idle_timer = self._loop.call_later(
                    REPLY_AFTER_IDLE_S, self._fault, "the kernel is idle and has not replied"
                )

    def _fault(self, message: str) -> None:
        if self._cell is not None:
            self._cell.fail(ProtocolFault(message))

    # End

    async def _watch(self) -> None:
        """Note the death of the process and fail whatever waits for it."""
        provisioner = self._provisioner
        assert provisioner is not None
        assert provisioner.process is not None
        await provisioner.process.wait()
        for channel in (self._iopub, self._shell, self._control):
            if channel is not None:
                channel.pump()  # what it said before it died counts
        self.dead.set()
        if self._cell is not None:
            self._cell.fail(KernelDied("its process ended"))

    async def _end_once(self, *, escalate: bool) -> bool:
        if self._ending is None or (self._ending.done() and not _succeeded(self._ending)):
            self._ending = self._loop.create_task(self._end(escalate=escalate))
        return await asyncio.shield(self._ending)

    async def _end(self, *, escalate: bool) -> bool:
        """End the process, then release everything that belongs to it."""
        provisioner, manager = self._provisioner, self._manager
        if provisioner is not None and manager is not None:
            process = provisioner.process
            if process is not None and escalate:
                await process.escalate()
            await manager.cleanup_resources()
            if not provisioner.confirmed_dead:
                return False
        self.dead.set()
        if self._cell is not None:
            self._cell.fail(KernelDied("it was ended"))
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        for channel in (self._shell, self._control, self._iopub):
            if channel is not None:
                channel.close()
        if self._pipe is not None:
            self._pipe.close()
        return True


def _none() -> None:
    """Do nothing."""


def _succeeded(task: asyncio.Task[bool]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result()


def _session_of(message: Message) -> object:
    try:
        return decode(message.header).get("session")
    except ValueError:
        return None


def _reply(message: Message) -> CellReply:
    if decode(message.header)["msg_type"] != "execute_reply":
        raise ValueError("not an execute_reply")
    content = decode(message.content)
    if content["status"] == "ok":
        return CellReply(True, None, None)
    name, text = content["ename"], content.get("evalue")
    if (
        content["status"] != "error"
        or not isinstance(name, str)
        or not (text is None or isinstance(text, str))
    ):
        raise ValueError("malformed reply")
    return CellReply(False, name, text)
