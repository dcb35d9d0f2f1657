"""The script's end of the bridge in a kernel: frames out on iopub, answers in on the control channel.

Answers cannot come on shell, which is not read while a cell runs.  Nor can they go through ipykernel's handling of
control messages: that takes a lock (held while a helper is evaluated at a breakpoint: a deadlock for good), publishes
busy and idle, flushes ``sys.stdout`` and fires IPython's events, all visible to the running cell.  So the kernel
shows every control message to :meth:`KernelCarrier.take` first, which recognises the bridge's ``comm_msg`` by its comm
id, checks the signature and resolves the waiting thread.  ``comm_open`` is an ordinary comm message.

A call id counts from 1 in every cell, so answers name their cell: a late one from an earlier cell is dropped.
"""

from __future__ import annotations

from _thread import allocate_lock
from time import monotonic
from typing import TYPE_CHECKING

from lemon_shim import api, generations
from lemon_shim.api import Carrier, ToolError
from lemon_shim.message import Signer, decode, encode
from lemon_shim.wire import HOST_GONE, NO_HOST, OPEN_TIMEOUT_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["KernelCarrier"]

_MARK = b'"comm_msg"'


class _Waiter:
    """A thread that waits for one answer: a lock that whoever brings the answer releases."""

    __slots__ = ("answer", "lock")

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.lock.acquire()
        self.answer: dict[str, object] | None = None

    def resolve(self, answer: dict[str, object] | None) -> None:
        self.answer = answer
        if self.lock.locked():
            self.lock.release()


class KernelCarrier(Carrier):
    """Carries frames between the calling thread and the host that opened the comm.

    `publish` sends frames on iopub from any thread; `parent` returns the header of the request that the calling
    thread works for, as JSON; `shown` is told of each acknowledged ``text`` or ``notify`` frame of a front-end cell.
    """

    def __init__(
        self,
        signer: Signer,
        publish: Callable[[list[bytes]], None],
        parent: Callable[[], bytes],
        shown: Callable[[bytes], None] | None = None,
    ) -> None:
        self._signer = signer
        self._publish = publish
        self._parent = parent
        self._shown = shown
        self._comm_id = ""
        self._topic = b""
        self._head = b""
        self._cell = ""
        self._parent_header = b"{}"
        self._waiting: dict[int, _Waiter] = {}
        self._opened = allocate_lock()  # held until a host has opened the comm
        self._opened.acquire()
        self._asking = allocate_lock()
        self._next_open_id = 0

    # The comm

    def comm_opened(self, comm_id: str) -> None:
        """A host has opened the comm; the newest one counts, and what waits for an earlier one is told."""
        if self._comm_id:
            self.end_cell()
        self._topic = b"comm-" + comm_id.encode("ascii")
        self._head = b'{"comm_id":' + encode(comm_id) + b',"data":'
        self._comm_id = comm_id
        if self._opened.locked():
            self._opened.release()

    def take(self, frames: Sequence[object]) -> bool:
        """Take a control message if it is the bridge's; called first, in the control thread, for each message.

        `frames` are zmq frames.  Returns False for everything that stock dispatch should see.
        """
        if len(frames) < 6 or not self._comm_id:
            return False
        try:
            parts = [bytes(frame) for frame in frames]  # type: ignore[call-overload]
        except TypeError:
            return False
        if not any(_MARK in part for part in parts[1:5]):
            return False
        message = self._signer.open(parts)
        if message is None:
            return False  # stock dispatch reports it
        try:
            content = decode(message.content)
        except ValueError:
            return False
        if content.get("comm_id") != self._comm_id:
            return False
        data = content.get("data")
        if isinstance(data, dict):
            self._resolve(data)
        return True

    def _resolve(self, data: dict[str, object]) -> None:
        number = data.get("id")
        if not isinstance(number, int) or data.get("type") not in ("answer", "grant"):
            return
        if number > 0 and data.get("cell") != self._cell:
            return
        waiter = self._waiting.pop(number, None)
        if waiter is not None:
            waiter.resolve(data)

    # Cells

    def begin_cell(
        self, cell: str, token: str, max_text_bytes: int, helpers: Sequence[str], parent_header: bytes
    ) -> None:
        """Open the grant of a cell whose request has `parent_header`."""
        self._cell = cell
        self._parent_header = parent_header
        api.open_grant(self, cell, token, max_text_bytes, helpers)

    def end_cell(self) -> None:
        """Close the grant; whoever still waits for an answer gets ToolError."""
        api.close_grant()
        self._cell = ""
        self._parent_header = b"{}"
        while self._waiting:
            try:
                _, waiter = self._waiting.popitem()
            except KeyError:
                break
            waiter.resolve(None)

    def end_request(self, parent: Callable[[], bytes]) -> None:
        """Close the grant if it was opened for the request with the header `parent`; that one has been handled."""
        if self._cell and self._parent_header == parent():
            self.end_cell()

    def request_grant(self) -> None:
        """Ask the notebook host for this cell's grant (behaviour 6.13); raise ToolError if nobody gives one."""
        deadline_s = monotonic() + OPEN_TIMEOUT_MS / 1000
        held: list[bool] = []
        try:
            # In one step, so that an interrupt cannot leave the lock taken for all later cells (``pipe.py``).
            held.extend(map(self._asking.acquire, (True,), (OPEN_TIMEOUT_MS / 1000,)))
            if not held[0]:
                raise ToolError(NO_HOST)
            if self._cell and api.is_open():
                return  # another thread of this cell was first
            if not self._comm_id:
                if not self._opened.acquire(timeout=max(0.0, deadline_s - monotonic())):
                    raise ToolError(NO_HOST)
                self._opened.release()
            parent = self._parent()
            request = decode(parent).get("msg_id", "")
            self._next_open_id -= 1  # below the ids of calls, which count up from 1
            number = self._next_open_id
            frame = encode({"type": "open", "id": number, "request": request})
            self._parent_header = parent
            answer = self._ask(number, frame, max(0.1, deadline_s - monotonic()))
            if answer is None:
                raise ToolError(NO_HOST)
            if answer.get("type") != "grant":
                raise ToolError(str(answer.get("content", NO_HOST)))
            limits, helpers = answer.get("limits"), answer.get("helpers")
            if not isinstance(limits, dict) or not isinstance(helpers, list):
                raise ToolError(NO_HOST)
            self.begin_cell(
                str(answer["cell"]), str(answer["token"]), int(limits["max_text_bytes"]), helpers, parent
            )
        finally:
            if True in held:
                self._asking.release()

    # Carrier

    def exchange(self, call_id: int, frame: bytes, timeout_s: float | None) -> tuple[bool, str] | None:
        answer = self._ask(call_id, frame, timeout_s)
        if answer is None:
            return None
        ok = answer.get("ok") is True
        if ok and self._shown is not None:
            self._shown(frame)
        return ok, str(answer.get("content", ""))

    def send(self, frame: bytes) -> None:
        content = self._head + frame + b"}"
        self._publish([self._topic, *self._signer.frames("comm_msg", content, self._parent_header)])

    def _ask(self, number: int, frame: bytes, timeout_s: float | None) -> dict[str, object] | None:
        """Send `frame` and return the answer with `number`; None once `timeout_s` is over."""
        waiter = _Waiter()
        self._waiting[number] = waiter
        try:
            self.send(frame)
            if not waiter.lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
                return None
        finally:
            self._waiting.pop(number, None)
        if waiter.answer is None:
            raise ToolError(HOST_GONE)
        return waiter.answer


def install(carrier: KernelCarrier, *, front_end: bool) -> None:
    """Make the helpers of this process use `carrier`, each cell with threads of its own."""
    api.claim_process()
    api.check_generation = generations.check
    if front_end:
        api.request_grant = carrier.request_grant
