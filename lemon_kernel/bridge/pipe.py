"""The host's end of a per-call script's socket pair: records in, answers out, on the host loop.

The script may do anything with its end: close it, write garbage, announce a frame of 4 GiB, never read an
answer.  None of that costs the host more than one frame and a bounded backlog:

- a frame over the cap is discarded as it arrives, but for its first 4 KiB, in which the dispatcher may find
  the id to answer (behaviour 5.8);
- the socket does not block; answers that find it full wait in a buffer.  What a run may read is bounded by its
  byte budget, so a backlog beyond that and some slack means that nobody reads: answers are then given up, and
  the script's next call says that the host is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from ..output import held_bytes
from .dispatch import Answer, Dispatcher
from .frames import HEAD_BYTES

__all__ = ["PipeCarrier"]

READ_BYTES = 65_536
LENGTH_BYTES = 4
BACKLOG_SLACK_BYTES = 4 * 1024 * 1024


class PipeCarrier:
    """Moves frames between one script and its dispatcher; owns `sock`, the host's end of the pair.

    :meth:`start` before the script is launched, :meth:`drain` once it has ended, :meth:`close` on every path.
    """

    def __init__(self, sock: socket.socket, dispatcher: Dispatcher, helpers: Sequence[str]) -> None:
        self._sock = sock
        self._dispatcher = dispatcher
        self._helpers = tuple(helpers)
        self._loop = asyncio.get_running_loop()
        self._reader = _Reader(dispatcher)
        self._backlog = bytearray()
        self._max_backlog_bytes = dispatcher.limits.max_rpc_result_bytes + BACKLOG_SLACK_BYTES
        self._is_open = True
        self._takes_answers = True
        self.has_ended: Callable[[], bool] = lambda: False
        """Whether the script is over, asked at each read.  The loop may hear of a frame that a child of the
        script wrote after its death sooner than of the death; such a call must not run (behaviour 5.5)."""
        sock.setblocking(False)

    def start(self) -> None:
        """Put the grant into the pair, where the script finds it, and serve frames from now on."""
        dispatcher = self._dispatcher
        grant = (
            dispatcher.cell,
            dispatcher.token,
            str(dispatcher.limits.max_text_bytes),
            " ".join(self._helpers),
        )
        self._write(_record(0, True, "\n".join(grant)))
        dispatcher.connect(self._send)
        self._loop.add_reader(self._sock, self._on_readable)

    def drain(self) -> None:
        """Take the text and notify frames that the script left in the pair when it ended.

        As much as is there now, asked once: a child of the script that still writes prolongs nothing.
        """
        self._dispatcher.end_calls()
        if not self._is_open:
            return
        try:
            left = held_bytes(self._sock.fileno())
        except OSError:
            return
        while left > 0 and (size := self._read(min(left, READ_BYTES))):
            left -= size

    def close(self) -> None:
        """Release the socket; idempotent.  The script's calls fail from now on."""
        if self._is_open:
            self._is_open = self._takes_answers = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._backlog.clear()
        self._sock.close()

    # Script to host

    def _on_readable(self) -> None:
        if not self._read(READ_BYTES):
            self.close()

    def _read(self, size: int) -> int:
        """Read at most `size` bytes and pass on what is complete; return 0 at the end of the stream."""
        try:
            data = self._sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError:
            return 0
        if data and self.has_ended():  # asked after the read: what came before the end is served
            self._dispatcher.end_calls()
        self._reader.feed(data)
        return len(data)

    # Host to script

    def _send(self, answer: Answer) -> None:
        self._write(_record(answer.id, answer.ok, answer.content))

    def _write(self, record: bytes) -> None:
        if not self._takes_answers:
            return
        if not self._backlog:
            record = record[self._push(record) :]
            if not record or not self._takes_answers:
                return
            self._loop.add_writer(self._sock, self._on_writable)
        self._backlog += record
        if len(self._backlog) > self._max_backlog_bytes:
            self._backlog.clear()
            self._give_up_answers()

    def _on_writable(self) -> None:
        with memoryview(self._backlog) as view:
            sent = self._push(view)
        del self._backlog[:sent]
        if not self._takes_answers:
            self._backlog.clear()
        elif not self._backlog:
            self._loop.remove_writer(self._sock)

    def _push(self, data: bytes | memoryview) -> int:
        """Send what the socket takes now."""
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # closed at the other end; what came from there before is still to be read
            self._give_up_answers()
            return 0

    def _give_up_answers(self) -> None:
        self._takes_answers = False
        self._loop.remove_writer(self._sock)
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass


class _Reader:
    """Cuts the stream into frames, and hands each to the dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._cap_bytes = dispatcher.max_frame_bytes
        self._buffer = bytearray()
        self._size: int | None = None  # of the frame at hand, once its length is known
        self._discarded_bytes = 0

    def feed(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while True:
            if self._size is None:
                if len(buffer) - start < LENGTH_BYTES:
                    break
                self._size = int.from_bytes(buffer[start : start + LENGTH_BYTES], "big")
                start += LENGTH_BYTES
            if self._size > self._cap_bytes:
                del buffer[:start]
                start = self._discard(self._size)
                if start < 0:
                    return
            else:
                end = start + self._size
                if len(buffer) < end:
                    break
                frame = bytes(buffer[start:end])
                start = end
                self._size = None
                self._dispatcher.receive(frame)
        del buffer[:start]

    def _discard(self, size: int) -> int:
        """Drop what has come of an oversized frame but for its head; return where it ends, -1 if later.

        The buffer begins with the frame.
        """
        buffer = self._buffer
        left = size - self._discarded_bytes
        if len(buffer) < left:
            drop = max(len(buffer) - HEAD_BYTES, 0)
            del buffer[HEAD_BYTES:]
            self._discarded_bytes += drop
            return -1
        self._size = None
        self._discarded_bytes = 0
        self._dispatcher.receive_oversized(bytes(buffer[:HEAD_BYTES]), size)
        return left


def _record(answer_id: int, ok: bool, content: str) -> bytes:
    """Return an answer as the script reads it without a parser (lemon_shim.wire)."""
    body = content.encode("utf-8", "replace")
    return (9 + len(body)).to_bytes(4, "big") + answer_id.to_bytes(8, "big") + bytes((ok,)) + body
