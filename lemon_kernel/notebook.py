"""The bridge host for kernels that a front end launched: JupyterLab, jupyter_server, nbclient, papermill, a bare client.

The provisioner calls :func:`serve` once a kernel of the kernelspec ``lemon`` runs, and what that returns when the
kernel ends or is restarted.  A :class:`NotebookHost` then answers the helper calls of its cells, from configuration
alone: nobody has to set anything up for the first ``read()`` in a new notebook.

Why a host of its own, with sockets of its own.  The front end does not know the bridge, and need not: it may be
written in another language, and there may be several of them on one kernel, or none.  A task on the loop of whoever
launched the kernel would starve under a blocking manager, which turns its loop only while a call is in progress
(tried), so this runs on the host loop like everything else (``hostloop.py``).

How it meets the kernel.  It subscribes to iopub first, and opens the comm once something was *heard* there (XPUB
greets each subscriber), so that no frame of the script can be published before somebody listens.  It asks nothing on
shell, which is not read while a cell runs.

Grants.  A session's cell brings its grant along; here the cell asks for one, with an ``open`` frame, at its first
helper call.  There is one grant per request: its name is the msg_id in the message's parent header, and asking twice
gives the same grant, so the budgets are the cell's however often it asks.  Configuration and policy are read anew for
each, on a helper thread, since the folder may be on a slow disk.  The grant ends when the kernel says that the request
is idle.  Nobody can be asked for an approval here, so what needs one is denied; each denial says what to write where.

What can still fail.  A script that knows Jupyter can publish an ``open`` frame with a parent header of its own
invention and so get a fresh budget: budgets protect a person from a runaway loop, not from the code they run
(``docs/security.md``).  A cell that catches KeyboardInterrupt and goes on leaves the call that it interrupted
running until the cell ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import zmq
from lemon_shim.message import Message, Signer, decode
from lemon_shim.wire import FINISHED_CELL

from . import hostloop
from .bridge.comm import CommCarrier
from .bridge.dispatch import Call, Denial, Dispatcher, Limits
from .bridge.sockets import Channel
from .config import ExecuteCodeConfig, PolicyConfig
from .errors import ConfigError
from .helpers.worker import in_thread
from .scope import AbortSignal
from .telemetry import fault_name

if TYPE_CHECKING:
    from .helpers.base import HelperContext, HelperResult

__all__ = ["NotebookHost", "serve"]

log = logging.getLogger(__name__)

REMEMBERED_REQUESTS = 256
"""How many ended requests are remembered: a straggler of one of them gets no grant."""

_cell_numbers = itertools.count(1)


def serve(*, connection_info: Mapping[str, object], cwd: str, pid: int | None = None) -> Callable[[], None]:
    """Answer the helper calls of a kernel that was started in `cwd`; return what ends that.

    The provisioner calls this once the kernel's process `pid` runs, from whatever thread or loop it is on; it
    blocks for nothing.  Without a `pid` the host lives until it is ended, with one also not longer than the
    process.  What is returned may be called from anywhere, any number of times.
    """
    host = NotebookHost(connection_info, cwd, pid)
    loop = hostloop.loop()
    loop.call_soon_threadsafe(host.start)

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all of this
            loop.call_soon_threadsafe(host.stop)

    return stop


class _Cell:
    """One request that has asked for a grant: what it gets, and which ``open`` frames wait to hear of it."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.mark = f'"{request}"'.encode()
        self.asked: list[int] = []
        self.dispatcher: Dispatcher | None = None
        self.helpers: list[str] = []
        self.refusal: str | None = None


class NotebookHost:
    """Serves one kernel from its launch to its end; every method runs on the host loop."""

    def __init__(self, connection_info: Mapping[str, object], cwd: str, pid: int | None = None) -> None:
        """See :func:`serve`; `connection_info` is what a connection file holds, with a key of bytes or text."""
        self._info = connection_info
        self._cwd = cwd
        self._signer = Signer(
            _bytes(connection_info.get("key")),
            os.urandom(16).hex(),
            str(connection_info.get("signature_scheme", "hmac-sha256")).removeprefix("hmac-"),
        )
        self._comm = CommCarrier(self._send, self._opened)
        self._is_heard = False
        self._iopub: Channel | None = None
        self._control: Channel | None = None
        self._cell: _Cell | None = None
        self._parent = b"{}"
        self._finished: deque[str] = deque(maxlen=REMEMBERED_REQUESTS)
        self._tasks: set[asyncio.Task[object]] = set()
        self._process = -1
        if pid is not None:
            with contextlib.suppress(OSError):
                self._process = os.pidfd_open(pid)

    # Life

    def start(self) -> None:
        """Connect; called once, as a callback of the loop."""
        self._loop = asyncio.get_running_loop()
        _live_hosts().add(self)
        self._iopub = self._connect(zmq.SUB, "iopub", self._on_iopub)
        self._control = self._connect(zmq.DEALER, "control", lambda frames: None)
        if self._process >= 0:
            self._loop.add_reader(self._process, self.stop)

    def stop(self) -> None:
        """End what is in flight and let go of everything; idempotent."""
        _live_hosts().discard(self)
        self._end_cell(killed=True)
        for channel in (self._iopub, self._control):
            if channel is not None:
                channel.close()
        self._iopub = self._control = None
        process, self._process = self._process, -1
        if process >= 0:
            self._loop.remove_reader(process)
            os.close(process)

    async def settled(self) -> None:
        """Return when the calls of ended cells have ended too."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _connect(self, kind: int, name: str, receive: Callable[[list[bytes | memoryview]], None]) -> Channel:
        info = self._info
        separator = "-" if info.get("transport") == "ipc" else ":"
        endpoint = f"{info['transport']}://{info['ip']}{separator}{info[name + '_port']}"
        # "kernel." is for busy and idle; the rest of their topic is a name that we do not know
        topics = (self._comm.topic, b"kernel.") if kind == zmq.SUB else ()
        server_key = _bytes(info.get("curve_publickey"))
        return Channel(kind, endpoint, receive, topics=topics, server_key=server_key)

    def _in_background(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Messages

    def _send(self, kind: str, content: bytes) -> None:
        if self._control is not None:
            self._control.send(self._signer.frames(kind, content))

    def _on_iopub(self, frames: list[bytes | memoryview]) -> None:
        if not self._is_heard:
            self._is_heard = True
            self._comm.open()
        topic = bytes(frames[0])
        if topic == self._comm.topic:
            message = self._signer.open(frames)
            if message is not None and b'"comm_msg"' in message.header:
                self._parent = message.parent
                self._comm.receive(message.content)
        elif topic.endswith(b".status") and self._cell is not None:
            message = self._signer.open(frames)
            if message is not None and self._is_end_of(self._cell, message):
                self._end_cell(killed=False)

    @staticmethod
    def _is_end_of(cell: _Cell, message: Message) -> bool:
        return b'"idle"' in message.content and cell.mark in message.parent

    # Grants

    def _opened(self, number: int, claimed: str) -> None:
        """Take an ``open`` frame.  What it claims to come from does not count, its message's parent does."""
        request = _message_id(self._parent)
        if not request or request in self._finished:
            self._comm.refuse(number, FINISHED_CELL)
            return
        cell = self._cell
        if cell is None or cell.request != request:
            self._end_cell(killed=False)
            cell = self._cell = _Cell(request)
            self._in_background(self._loop.create_task(self._decide(cell)))
        cell.asked.append(number)
        self._answer(cell)

    async def _decide(self, cell: _Cell) -> None:
        """Work out what `cell` gets, and tell it."""
        try:
            config, policy = await in_thread(_settings, self._cwd)
        except ConfigError as error:
            cell.refusal = f"the configuration cannot be read: {error}"
        except Exception as error:
            log.error("no grant for a notebook's cell (%s)", fault_name(error))
            cell.refusal = f"the configuration cannot be read: {type(error).__name__}"
        else:
            if self._cell is not cell:
                return
            if config.disabled_by is not None:
                cell.refusal = f"execute_code is disabled by {config.disabled_by}"
            else:
                cell.helpers = list(config.tools)
                cell.dispatcher = self._dispatcher(config, _Gate(policy))
                self._comm.attach(cell.dispatcher)
        self._answer(cell)

    def _answer(self, cell: _Cell) -> None:
        """Answer the ``open`` frames of `cell` if it is decided what it gets."""
        if cell.dispatcher is None and cell.refusal is None:
            return
        asked, cell.asked = cell.asked, []
        for number in asked:
            if cell.dispatcher is not None:
                self._comm.grant(number, cell.dispatcher, cell.helpers)
            else:
                self._comm.refuse(number, cell.refusal or "")

    def _dispatcher(self, config: ExecuteCodeConfig, gate: _Gate) -> Dispatcher:
        return Dispatcher(
            cell=f"notebook-{next(_cell_numbers)}",
            limits=Limits(
                max_rpc_calls=config.max_rpc_calls,
                max_rpc_result_bytes=config.max_rpc_result_bytes,
                max_text_bytes=config.max_text_bytes,
                max_parallel_rpc=config.max_parallel_rpc,
            ),
            helpers=config.tools,
            invoke=_invoke,
            cwd=self._cwd,
            policy=gate.denial,
            authorize=gate.authorize,
            abort=AbortSignal(),
        )

    def _end_cell(self, *, killed: bool) -> None:
        """Revoke the grant; what is in flight is cancelled."""
        cell, self._cell = self._cell, None
        if cell is None:
            return
        self._finished.append(cell.request)
        self._comm.detach()
        if cell.dispatcher is not None:
            cell.dispatcher.end_calls()
            self._in_background(self._loop.create_task(cell.dispatcher.close(killed=killed)))


class _Gate:
    """The configured policy, with denials that say what to change where (behaviour 4.3)."""

    def __init__(self, table: PolicyConfig) -> None:
        self._table = table
        self._policy = table.policy()

    def denial(self, tool: str) -> str | None:
        """Return why `tool` may not be called, or None."""
        reason = self._policy.denial_reason(tool)
        if reason is None:
            return None
        return reason + self._hint(tool)

    async def authorize(self, call: Call) -> Denial | None:
        """Deny what a person would have to be asked about: nobody can be asked here."""
        if not self._policy.requires_approval(call.tool):
            return None
        return Denial(f"approval failed for '{call.tool}'" + self._hint(call.tool))

    def _hint(self, tool: str) -> str:
        key, source = self._table.decided_by(tool)
        if source.kind == "environment":
            return f"; to allow it, change {source.rpartition(' ')[2]} in the environment of Jupyter"
        return f"; to allow it, change {key} in {source}"


async def _invoke(call: Call, context: HelperContext) -> str | HelperResult:
    from .helpers import HELPERS

    return await HELPERS[call.tool](call.params, context)


def _settings(cwd: str) -> tuple[ExecuteCodeConfig, PolicyConfig]:
    return ExecuteCodeConfig.load(cwd), PolicyConfig.load(cwd)


def _message_id(header: bytes) -> str:
    try:
        return str(decode(header).get("msg_id") or "")
    except ValueError:
        return ""


def _bytes(value: object) -> bytes:
    """Return a key as bytes; what gives connection information has it as either."""
    return value.encode("ascii") if isinstance(value, str) else value if isinstance(value, bytes) else b""


_hosts: dict[int, set[NotebookHost]] = {}


def _live_hosts() -> set[NotebookHost]:
    """Return the hosts of this process; a forked child has none of its parent's."""
    pid = os.getpid()
    if pid not in _hosts:
        _hosts.clear()
        _hosts[pid] = set()
        hostloop.at_exit(_stop_all)
    return _hosts[pid]


async def _stop_all() -> None:
    hosts = list(_live_hosts())
    for host in hosts:
        host.stop()
    for host in hosts:
        await host.settled()
