"""LemonKernel: ipykernel's kernel with agent cells, a bridge to the host's tools, and interrupts that lose no reply.

Agent cells.  The host puts a cell's grant into the metadata of its ``execute_request``; a kernel that the host
launched (a *session launch*) runs such a request as plain Python (``cells.py``), everything else as ipykernel does.
The cell runs in the main thread *outside* the kernel's loop, so that ``asyncio.run()`` works in it without touching
private state: :meth:`LemonKernel.shell_main` keeps the request, stops the loop, and :meth:`LemonKernel.serve`, which
started it, runs the cell, sends the reply and starts the loop again.  Front-end cells' background tasks survive.

Its messages are made by hand (``message.py``): a trivial cell is 1.5 ms instead of the 5 ms it costs to go through
``Session``, a forced sleep of 0.5 ms and four round trips through the iopub thread to flush ``sys.stdout``.

Session kernels read shell in the main thread: no shell channel thread and no subshells, which only front ends use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import types
import warnings
from typing import TYPE_CHECKING, Any

import zmq
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell
from traitlets import Bool, Type
from traitlets.config import Config

from lemon_shim import api, generations
from lemon_shim.kernel import GRANT_METADATA
from lemon_shim.kernel.bridge import KernelCarrier
from lemon_shim.kernel.bridge import install as install_bridge
from lemon_shim.kernel.cells import CellRunner
from lemon_shim.kernel.debugger import LazyDebugger, stand_in
from lemon_shim.kernel.interrupts import arm, disarm
from lemon_shim.message import Message, Signer, decode, encode
from lemon_shim.wire import CHANNELS, COMM_TARGET, HELPERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from lemon_shim.kernel.streams import CellStreams

__all__ = ["LemonKernel", "LemonShell", "NoShellChannelThread"]

_GRANT_MARK = b'"' + GRANT_METADATA.encode() + b'"'
_MODULE_NAMES = frozenset(vars(types.ModuleType("__main__"))) | {"__builtins__"}
_API_FILE = api.read.__code__.co_filename
_FORK_WARNING = r".*multi-threaded, use of (fork|forkpty)\(\) may lead to deadlocks.*"


class LemonShell(ZMQInteractiveShell):
    """ipykernel's shell, less variables that would colour every child's output, and less our frames in tracebacks."""

    def _find_my_config(self, cfg: Config) -> Config:
        if self.parent is not None and self.parent.session_launch:
            return Config()  # see LemonKernelApp
        return super()._find_my_config(cfg)  # type: ignore[no-any-return]

    def init_environment(self) -> None:
        if self.parent is not None and self.parent.session_launch:
            return
        kept = {name: os.environ.get(name) for name in ("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR")}
        super().init_environment()
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _get_exc_info(self, exc_tuple: Any = None) -> tuple[Any, Any, TracebackType | None]:
        """Let a traceback end at the call of a helper, in the person's own code; what is below says nothing more.

        It is also what took a third of a second to show.
        """
        kind, value, trace = super()._get_exc_info(exc_tuple)
        if isinstance(value, (api.ToolError, KeyboardInterrupt)):
            step = trace
            while step is not None and step.tb_next is not None:
                if step.tb_next.tb_frame.f_code.co_filename == _API_FILE:
                    step.tb_next = None
                step = step.tb_next
        return kind, value, trace


class NoShellChannelThread:
    """Stands for the thread that session kernels do not have: false, but asked who its parent is."""

    def __init__(self) -> None:
        self.parent_thread = threading.current_thread()

    def __bool__(self) -> bool:
        return False


class _AgentRequest:
    """An agent cell on its way from the loop to :meth:`LemonKernel.serve`."""

    __slots__ = ("done", "message")

    def __init__(self, message: Message, done: asyncio.Future[None]) -> None:
        self.message = message
        self.done = done


class LemonKernel(IPythonKernel):
    """The kernel of both launches; see the module for what differs from ipykernel's."""

    shell_class = Type(LemonShell)
    debugger_class = Type(LazyDebugger)
    session_launch = Bool(False, help="Whether our own host launched this kernel (behaviour 6.5).")

    implementation = "lemon"

    def __init__(self, **arguments: Any) -> None:
        stand_in()
        app = arguments.get("parent")
        self._streams: CellStreams | None = getattr(app, "cell_streams", None)
        super().__init__(session_launch=self._streams is not None, **arguments)
        generations.install()
        warnings.filterwarnings("ignore", message=_FORK_WARNING, category=DeprecationWarning)
        self._signer = Signer(
            self.session.key, self.session.session, self.session.signature_scheme.removeprefix("hmac-")
        )
        self._iopub_soon = self.iopub_thread.io_loop.asyncio_loop.call_soon_threadsafe
        self._iopub_send = self.iopub_thread.socket.send_multipart
        self._carrier = KernelCarrier(
            self._signer,
            self._publish,
            self._parent_header_json,
            None if self.session_launch else self._show,
        )
        install_bridge(self._carrier, front_end=not self.session_launch)
        sys.modules["lemon_tools"] = api
        self._tools = api.__dict__
        self._whole_tools = dict(self._tools)
        self.comm_manager.register_target(COMM_TARGET, self._comm_opened)
        self.control_handlers["comm_open"] = self.comm_manager.comm_open
        self._pending: _AgentRequest | None = None
        self._finished = False
        self._stock_streams: tuple[Any, Any] | None = None
        self._agent_names: dict[str, object] | None = None
        if self._streams is not None:
            self._status_topic = self._topic("status")
            self.shell.user_ns["__doc__"] = None  # IPython's speaks of IPython; a script has none of its own
            self._runner = CellRunner(self.shell.user_ns, self._streams)
        else:
            self._offer_helpers()

    # The loop, and what runs between its turns

    def serve(self) -> None:
        """Run the kernel in the calling (main) thread until it is shut down."""
        loop = self.io_loop
        while True:
            interrupted = False
            try:
                loop.start()
            except BaseException:  # an alarm or interrupt of a cell, raised where the loop could see it
                interrupted = True
            request, self._pending = self._pending, None
            if request is not None:
                self._run_agent_cell(request)
            elif not interrupted or self._finished:
                return

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        self._finished = True
        return await _settled(super().do_shutdown(restart))  # type: ignore[no-any-return]

    # Control: bridge answers first

    def dispatch_control(self, msg: list[zmq.Frame]) -> Any:
        """Take a bridge answer, or return ipykernel's coroutine for everything else (called by the stream)."""
        if self._carrier.take(msg):
            return None
        return super().dispatch_control(msg)

    def _comm_opened(self, comm: Any, message: Any) -> None:
        self._comm = comm  # a comm that is collected closes itself
        self._carrier.comm_opened(comm.comm_id)

    def _publish(self, frames: list[bytes]) -> None:
        """Send `frames` on iopub, from any thread.

        Not by ipykernel's ``send_multipart``: that gives every thread a zmq socket of its own and takes it back up
        to 10 s after the thread's end, and a context has 1023 of them.
        """
        try:
            self._iopub_soon(self._iopub_send, frames)
        except RuntimeError:  # the loop is closed: the kernel ends, and nobody listens
            pass

    @property
    def _supports_kernel_subshells(self) -> bool:
        return bool(self.shell_channel_thread)

    # Agent cells

    async def shell_main(self, subshell_id: str | None, msg: list[zmq.Frame]) -> None:
        if self._streams is None:
            await super().shell_main(subshell_id, msg)
            return
        message = self._agent_message(msg)
        if message is None:
            await super().shell_main(subshell_id, msg)
            return
        async with self._main_asyncio_lock:
            done = asyncio.get_running_loop().create_future()
            self._pending = _AgentRequest(message, done)
            asyncio.get_running_loop().stop()
            await done

    def _agent_message(self, frames: list[zmq.Frame]) -> Message | None:
        if len(frames) < 6 or _GRANT_MARK not in frames[-2].bytes:
            return None
        return self._signer.open([frame.bytes for frame in frames])

    def _run_agent_cell(self, request: _AgentRequest) -> None:
        """Run one agent cell and send its reply; nothing the cell does can keep the reply from being sent."""
        message = request.message
        loop = self.io_loop.asyncio_loop  # type: ignore[attr-defined]
        self._status(b'{"execution_state":"busy"}', message)
        number = 0
        try:
            grant = decode(message.metadata)[GRANT_METADATA]
            number = int(grant["number"])  # type: ignore[index]
            code = str(decode(message.content)["code"])
            self._enter_agent_cell()
            generations.begin()
            self._carrier.begin_cell(
                grant["cell"],  # type: ignore[index]
                grant["token"],  # type: ignore[index]
                grant["max_text_bytes"],  # type: ignore[index]
                grant["helpers"],  # type: ignore[index]
                message.header,
            )
        except (KeyError, TypeError, ValueError) as error:
            reply = _error_reply(number, type(error).__name__, "malformed agent cell")
        else:
            sys.modules["lemon_tools"] = api
            outcome = self._runner.run(code, number, loop)
            if outcome.name is None:
                reply = {"status": "ok", "execution_count": number, "user_expressions": {}, "payload": []}
            else:
                reply = _error_reply(number, outcome.name, outcome.message)
        # What a script assigned to lemon_tools.read is not the next one's.
        self._tools.update(self._whole_tools)
        self._carrier.end_cell()
        generations.end()
        frames = self._signer.frames("execute_reply", encode(reply), message.header)
        stream = self.shell_stream
        stream.send_multipart([*message.route, *frames])
        stream.flush(zmq.POLLOUT)
        self._status(b'{"execution_state":"idle"}', message)
        request.done.set_result(None)

    def _status(self, content: bytes, message: Message) -> None:
        self._publish([self._status_topic, *self._signer.frames("status", content, message.header)])

    # Front-end cells

    async def do_execute(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Run an ordinary cell as ipykernel does, with an interrupt window of its own (see ``interrupts.py``)."""
        if threading.current_thread() is not threading.main_thread():
            # a subshell: it takes no signals, and the main shell's cell keeps its threads and its grant
            return await super().do_execute(*arguments, **options)  # type: ignore[no-any-return]
        self._enter_front_end_cell()
        generations.begin()
        try:
            try:
                try:
                    arm()
                    return await super().do_execute(*arguments, **options)  # type: ignore[no-any-return]
                finally:
                    disarm()
            except (KeyboardInterrupt, UnboundLocalError):
                # The second is how one ends that meets IPython's run_cell between its lines: a return in a finally
                # swallows the interrupt, and what it returns was never set.  A cell's own does not come this far.
                disarm()
                return _error_reply(self.execution_count - 1, "KeyboardInterrupt", "") | {"traceback": []}
        finally:
            self._carrier.end_cell()
            generations.end()

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Iterator[None]:
        """Let SIGINT cancel the coroutine of an async cell, at once.

        ipykernel's handler schedules that without waking the loop, so it came when something else woke it: 5 s later
        in an ``await asyncio.sleep(6)``.
        """
        loop = asyncio.get_running_loop()
        before = signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(future.cancel))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def pre_handler_hook(self) -> None:
        """Leave SIGINT alone: only :meth:`do_execute` lets it interrupt."""

    def post_handler_hook(self) -> None:
        """Leave SIGINT alone, and end the grant of a request that was no cell: a widget's callback calls helpers."""
        if not self.session_launch:
            self._carrier.end_request(self._parent_header_json)

    def do_history(self, hist_access_type: str, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Answer a history request; a range names the session that was asked for (IPython calls its own 0)."""
        reply: dict[str, Any] = super().do_history(hist_access_type, *arguments, **options)
        session = options.get("session") or 0
        if hist_access_type == "range" and session > 0:
            reply["history"] = [(session, *entry[1:]) for entry in reply["history"]]
        return reply

    def _parent_header_json(self) -> bytes:
        return self.session.pack(self.get_parent("shell").get("header", {}))  # type: ignore[no-any-return]

    def _offer_helpers(self) -> None:
        names = {name: getattr(api, name) for name in (*HELPERS, *CHANNELS, "ToolError")}
        self.shell.user_ns.update(names)
        self.shell.user_ns_hidden.update(names)

    def _show(self, frame: bytes) -> None:
        """Show an acknowledged ``text`` or ``notify`` of a front-end cell in the notebook (design 7)."""
        if frame.startswith(b'{"type":"text"'):
            data = decode(frame)
            block = {"n": data["n"], "text": data["text"]}
            self._display({"text/plain": data["text"], "application/vnd.lemon.text+json": block})
        elif frame.startswith(b'{"type":"notify"'):
            status = "notify-" + str(self.get_parent("shell").get("header", {}).get("msg_id", ""))
            update = getattr(self, "_status_line", "") == status
            self._status_line = status
            self._display({"text/plain": "notify: " + str(decode(frame)["msg"])}, status, update=update)

    def _display(
        self, data: dict[str, object], display_id: str | None = None, *, update: bool = False
    ) -> None:
        transient = {"display_id": display_id} if display_id else None
        self.shell.display_pub.publish(data, transient=transient, update=update)

    # Switching between the two kinds of cell on a session kernel

    def _enter_agent_cell(self) -> None:
        """Give the cell its streams and take IPython's names out of its globals."""
        assert self._streams is not None
        self._streams.install()
        if self._agent_names is None:
            namespace, hidden = self.shell.user_ns, self.shell.user_ns_hidden
            self._agent_names = {
                name: namespace.pop(name)
                for name in [*hidden, "_", "__", "___", "__builtin__"]
                if name in namespace and name not in _MODULE_NAMES
            }

    def _enter_front_end_cell(self) -> None:
        if self._streams is None:
            return
        if self._stock_streams is None:
            from ipykernel.iostream import OutStream

            self._stock_streams = (
                OutStream(self.session, self.iopub_thread, "stdout", watchfd=False),
                OutStream(self.session, self.iopub_thread, "stderr", watchfd=False),
            )
        sys.stdout, sys.stderr = self._stock_streams
        for stream in self._stock_streams:
            stream.set_parent(self.get_parent("shell"))
        if self._agent_names is not None:
            names, self._agent_names = self._agent_names, None
            for name, value in names.items():
                self.shell.user_ns.setdefault(name, value)


async def _settled(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) or isinstance(value, asyncio.Future) else value


def _error_reply(number: int, name: str, message: str | None) -> dict[str, object]:
    return {
        "status": "error",
        "execution_count": number,
        "ename": name,
        "evalue": message,
        "traceback": [],
        "user_expressions": {},
        "payload": [],
    }
