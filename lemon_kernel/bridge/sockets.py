"""The host's zmq sockets to a kernel, on the host loop: no client object, no threads, no queues of parsed messages.

zmq sockets tell of readiness by the *edges* of a descriptor: whoever sends or reads must look for messages that came
meanwhile, or they wait for the next edge.  Hence :meth:`Channel.pump` after each send.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import zmq

__all__ = ["Channel"]

RECONNECT_MS = 5
"""zmq's default waits 100 ms before it looks again whether the kernel has bound its socket."""
MESSAGES_PER_TURN = 200
COPY_BYTES = 1 << 20
"""A larger part of a message is looked at where zmq received it: one copy of it is what memory may grow by (5.8)."""


class Channel:
    """One zmq socket on the running loop."""

    def __init__(
        self,
        kind: int,
        endpoint: str,
        receive: Callable[[list[bytes | memoryview]], None],
        *,
        topics: Sequence[bytes] = (),
        server_key: bytes = b"",
    ) -> None:
        """Connect to `endpoint`; `receive` gets the frames of each message.

        `topics` are what a SUB socket subscribes to.  With `server_key`, the kernel's public key, the connection
        is encrypted (CurveZMQ).
        """
        socket: zmq.Socket[bytes] = _context().socket(kind)
        for topic in topics:
            socket.subscribe(topic)
        if server_key:
            socket.curve_serverkey = server_key
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        socket.linger = 0
        socket.reconnect_ivl = RECONNECT_MS
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(endpoint)
        self._descriptor: int = socket.fileno()
        self._loop.add_reader(self._descriptor, self.pump)
        self._loop.call_soon(self.pump)

    def send(self, frames: Sequence[bytes]) -> None:
        if not self._socket.closed:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
            self.pump_soon()

    def pump_soon(self) -> None:
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Read what is there; after a burst let others have their turn."""
        for _ in range(MESSAGES_PER_TURN):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive([part.bytes if len(part) <= COPY_BYTES else part.buffer for part in parts])
        self._loop.call_soon(self.pump)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)  # before the number can be somebody else's
            self._socket.close()


_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the host's zmq context; a forked child gets its own, the parent's is of no use to it."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = zmq.Context()
    return _contexts[pid]
