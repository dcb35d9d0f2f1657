"""The host's end of the bridge to a kernel: a Jupyter comm that carries frames to and from a dispatcher.

The host opens the comm (a front end closes comms of targets it does not know, if the kernel opened them).  Frames of
the script come on iopub as ``comm_msg``; grants and answers go out on *control*, because shell is not read while
a cell runs.  One comm lives as long as its kernel; each cell has a dispatcher of its own, attached for its time.  What
comes while none is attached is dropped: nobody waits for it (behaviour 5.5); a notebook host refuses it.

The kernel puts a frame into its message as it is, behind a head that both ends know, so that it can be cut out
without parsing; anything else that a script sends on the comm is parsed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from lemon_shim.message import decode, encode
from lemon_shim.wire import COMM_TARGET, FINISHED_CELL

from .frames import HEAD_BYTES

if TYPE_CHECKING:
    from .dispatch import Answer, Dispatcher

__all__ = ["CommCarrier"]

Send = Callable[[str, bytes], None]
"""Sends a message of the given type with the given content (JSON) on the kernel's control channel."""

OnOpen = Callable[[int, str], None]
"""Told of an ``open`` frame: its id, and the msg_id of the ``execute_request`` it names."""


class CommCarrier:
    """One comm.  `on_open` is for notebook hosts; a session host has none and leaves ``open`` frames unanswered."""

    def __init__(self, send: Send, on_open: OnOpen | None = None) -> None:
        self.comm_id = secrets.token_hex(16)
        self.topic = f"comm-{self.comm_id}".encode()
        """What the kernel's messages on this comm are published under."""
        self._send = send
        self._on_open = on_open
        self._head = f'{{"comm_id":"{self.comm_id}","data":'.encode()
        self._dispatcher: Dispatcher | None = None

    def open(self) -> None:
        """Open the comm; the kernel handles control messages in order, so it is open before a later reply."""
        content = {"comm_id": self.comm_id, "target_name": COMM_TARGET, "data": {}}
        self._send("comm_open", encode(content))

    def attach(self, dispatcher: Dispatcher) -> None:
        """Give the kernel's frames to `dispatcher` and its answers to the kernel, until :meth:`detach`."""
        cell = encode(dispatcher.cell)

        def answer(answer: Answer) -> None:
            self._answer(answer, cell)

        dispatcher.connect(answer)
        self._dispatcher = dispatcher

    def detach(self) -> None:
        """Drop frames from now on.  Answers of the dispatcher that was attached still go out; nobody may wait."""
        self._dispatcher = None

    def receive(self, content: bytes | memoryview) -> None:
        """Take the content of a ``comm_msg`` of this comm's topic; never raises.

        One that holds an oversized frame is not copied, but for the start in which the dispatcher looks for
        what to answer (behaviour 5.8).
        """
        if self._dispatcher is not None and len(content) > self._dispatcher.max_frame_bytes + len(self._head):
            start = len(self._head) if content[: len(self._head)] == self._head else 0
            head = bytes(content[start : start + HEAD_BYTES])
            self._dispatcher.receive_oversized(head, len(content) - start)
            return
        content = bytes(content)
        if content.startswith(self._head) and content.endswith(b"}"):
            frame = content[len(self._head) : -1]
        else:
            try:
                message = decode(content)
                if message.get("comm_id") != self.comm_id:
                    return
                frame = encode(message.get("data"))
            except ValueError:
                return
        if self._on_open is not None and frame.startswith(b'{"type":"open"'):
            self._opened(frame, self._on_open)
        elif self._dispatcher is not None:
            self._dispatcher.receive(frame)
        elif self._on_open is not None:
            self._refuse_stray(frame)

    def grant(self, number: int, dispatcher: Dispatcher, helpers: list[str]) -> None:
        """Answer the ``open`` frame `number` with the authority of `dispatcher`."""
        self._send_data(
            {
                "type": "grant",
                "id": number,
                "cell": dispatcher.cell,
                "token": dispatcher.token,
                "limits": {"max_text_bytes": dispatcher.limits.max_text_bytes},
                "helpers": helpers,
            }
        )

    def refuse(self, number: int, message: str) -> None:
        """Answer the ``open`` frame `number` with the reason why there is no grant."""
        self._send_data({"type": "answer", "id": number, "ok": False, "content": message})

    def _refuse_stray(self, frame: bytes) -> None:
        """Answer a frame that has no grant.  A notebook's cell has no deadline: it would wait for ever."""
        try:
            data = decode(frame)
        except ValueError:
            return
        if isinstance(data.get("id"), int):
            answer = {"type": "answer", "id": data["id"], "cell": data.get("cell"), "ok": False}
            self._send_data(answer | {"content": FINISHED_CELL})

    def _opened(self, frame: bytes, on_open: OnOpen) -> None:
        try:
            data = decode(frame)
        except ValueError:
            return
        number, request = data.get("id"), data.get("request")
        if isinstance(number, int) and isinstance(request, str):
            on_open(number, request)

    def _answer(self, answer: Answer, cell: bytes) -> None:
        data = (
            b'{"type":"answer","cell":%b,"id":%d,"ok":%b,"content":'
            % (cell, answer.id, b"true" if answer.ok else b"false")
            + encode(answer.content)
            + b"}"
        )
        self._send("comm_msg", self._head + data + b"}")

    def _send_data(self, data: dict[str, object]) -> None:
        self._send("comm_msg", self._head + encode(data) + b"}")
