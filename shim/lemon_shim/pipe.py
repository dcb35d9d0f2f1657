"""The script's end of the socket pair: many threads, one descriptor, no reader thread.

The problem.  Any number of threads call helpers over one stream, each waits for its own answer, the script
may be interrupted at any byte code of the main thread (Ctrl-C, an alarm whose handler raises), and after all
that the next call must work.  A reader thread would cost 7 ms of imports and a hop for every answer.

What does not work.  One lock round "send, then receive" makes ``batch()`` serial.  A lock round each half is
not enough either: an exception between ``n = write(...)`` returning and ``n`` being stored forgets how much
of a frame went out, and from then on both ends disagree where frames begin.

What we do.

- *Leader and followers*.  Whoever waits for an answer and finds nobody reading reads for all: it hands other
  threads their answers and, once it has its own, wakes one of those that still wait to lead.
- *Nothing is in a local variable*.  Results of ``read`` and ``write`` are appended to lists by
  ``list.extend(map(function, ...))``.  That is one step for the interpreter: no signal handler runs between
  the system call and the append, so a frame that was cut short is completed by whoever comes next, and a
  half-read answer is still there for the next leader.  The locks are taken in the same way.
- *No second call inside a call of the same thread*.  A signal handler (or finaliser) that interrupted its own
  thread in here would wait for itself; it gets ToolError.
- *The descriptor is checked before each use*: after ``os.closerange()`` another file may have its number, and
  a frame with the token must not land in it (behaviour 2.4.5).  Device and inode are compared.

What can still fail.  On Python 3.9 a handler may raise between two byte codes of a ``finally`` and leave a lock
taken; other threads then wait for ever, as they do with any lock of that version.  Between the check and the
use of the descriptor another thread may still close it.
"""

from __future__ import annotations

import _thread
import posix
import select  # now: a script that has used up its descriptors could not load it any more
from time import monotonic

from .api import Carrier, ToolError
from .wire import HOST_GONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

LOWEST_DESCRIPTOR = 200
"""Out of the way of scripts that number their own descriptors or close the first few."""

READ_BYTES = 65_536
MAX_READ_BYTES = 1_048_576
ANSWER_HEAD_BYTES = 13  # length, id, ok
FOLLOWER_NAP_S = 1.0
"""How long a follower waits for a hand before it looks for itself; a lost wake-up costs at most this."""


class _Waiter:
    """A thread that waits for the answer to one id; `bell` is a lock used as a binary semaphore."""

    __slots__ = ("answer", "bell")

    def __init__(self) -> None:
        self.answer: tuple[bool, str] | None = None
        self.bell = _thread.allocate_lock()
        self.bell.acquire()

    def ring(self) -> None:
        try:
            self.bell.release()
        except RuntimeError:  # it rang already
            pass


class PipeCarrier(Carrier):
    """Sends frames over the inherited socket and waits for answers."""

    def __init__(self, descriptor: int) -> None:
        """Take over `descriptor`: close-on-exec, out of the way, non-blocking."""
        self._descriptor = move_descriptor(descriptor)
        posix.set_blocking(self._descriptor, False)
        status = posix.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)
        self._gone = False
        self._inside: set[int] = set()  # threads that are in exchange() or send()
        self._waiters: dict[int, list[_Waiter]] = {}
        self._sending = _thread.allocate_lock()
        self._leading = _thread.allocate_lock()
        self._record: list[bytes | int] = [b""]  # the frame being sent, then how much each write took
        self._chunks: list[bytes] = []  # what was read and not yet handed out

    def exchange(self, call_id: int, frame: bytes, timeout_s: float | None) -> tuple[bool, str] | None:
        """See :meth:`Carrier.exchange`.  Among waiters for one id the latest gets the first answer."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        me = self._enter()
        waiter = _Waiter()
        try:
            self._inside.add(me)
            self._waiters.setdefault(call_id, []).append(waiter)
            if self._send(frame, deadline):
                self._await(waiter, deadline)
            return waiter.answer
        finally:
            self._inside.discard(me)
            self._forget(call_id, waiter)
            if self._waiters and not self._leading.locked():
                self._promote()

    def send(self, frame: bytes) -> None:
        me = self._enter()
        try:
            self._inside.add(me)
            self._send(frame, None)
        finally:
            self._inside.discard(me)

    def receive_grant(self) -> str:
        """Wait for the host's first record, which answers nothing and bears the id 0; return its content."""
        waiter = _Waiter()
        self._waiters[0] = [waiter]
        try:  # it was there before this process
            self._chunks.append(posix.read(self._descriptor, READ_BYTES))
        except BlockingIOError:
            pass
        self._await(waiter, None)
        self._forget(0, waiter)
        assert waiter.answer is not None
        return waiter.answer[1]

    # Turns

    def _enter(self) -> int:
        me = _thread.get_ident()
        if me in self._inside:
            raise ToolError("helpers cannot be called by a signal handler that interrupted another call")
        return me

    def _forget(self, call_id: int, waiter: _Waiter) -> None:
        waiters = self._waiters.get(call_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiters.pop(call_id, None)

    def _promote(self) -> None:
        """Wake a thread that still waits, to lead."""
        for waiters in list(self._waiters.values()):
            for waiter in list(waiters):
                if waiter.answer is None:
                    waiter.ring()
                    return

    def _await(self, waiter: _Waiter, deadline: float | None) -> None:
        """Return once `waiter` has its answer or `deadline` is over."""
        while waiter.answer is None:
            left_s = None if deadline is None else deadline - monotonic()
            if left_s is not None and left_s <= 0:
                return
            held: list[bool] = []
            try:
                held.extend(map(self._leading.acquire, (False,)))
                if held[0]:
                    self._lead(waiter, deadline)
            finally:
                if True in held:
                    self._leading.release()
            if not held[0] and waiter.answer is None:
                waiter.bell.acquire(True, FOLLOWER_NAP_S if left_s is None else min(left_s, FOLLOWER_NAP_S))

    # Bytes.  These run with the lock of their direction held.

    def _lead(self, mine: _Waiter, deadline: float | None) -> None:
        """Read for all threads until `mine` has its answer."""
        while mine.answer is None:
            self._check()
            if not self._hand_out():
                if not _wait_for(self._descriptor, False, deadline):
                    return
                missing = ANSWER_HEAD_BYTES if not self._chunks else self._missing_bytes()
                size = min(max(missing, READ_BYTES), MAX_READ_BYTES)
                try:
                    self._chunks.extend(map(posix.read, (self._descriptor,), (size,)))
                except BlockingIOError:
                    continue
                except OSError:
                    self._fail()
                if self._chunks and not self._chunks[-1]:  # end of file
                    self._fail()

    def _missing_bytes(self) -> int:
        return max(_record_bytes(self._chunks) - sum(map(len, self._chunks)), 0)

    def _hand_out(self) -> bool:
        """Give the first complete answer in the buffer to its waiter; return False if there is none."""
        have = sum(map(len, self._chunks))
        size = _record_bytes(self._chunks)
        if have < size:
            return False
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        call_id = int.from_bytes(data[4:12], "big")
        waiters = self._waiters.get(call_id)
        if waiters:
            waiter = waiters[-1]
            waiter.answer = (data[12] == 1, data[ANSWER_HEAD_BYTES:size].decode("utf-8", "replace"))
            self._forget(call_id, waiter)
            waiter.ring()
        # Only now: an interrupt before this line delivers the answer again, to nobody.
        self._chunks = [data[size:]] if have > size else []
        return True

    def _send(self, frame: bytes, deadline: float | None) -> bool:
        """Send one record, after what an interrupted call left of its own; False once `deadline` is over."""
        held: list[bool] = []
        left_s = -1.0 if deadline is None else max(deadline - monotonic(), 0.0)
        try:
            held.extend(map(self._sending.acquire, (True,), (left_s,)))
            if not held[0] or not self._flush(deadline):
                return False
            self._record = [len(frame).to_bytes(4, "big") + frame]
            return self._flush(deadline)
        finally:
            if True in held:
                self._sending.release()

    def _flush(self, deadline: float | None) -> bool:
        while True:
            data = self._record[0]
            assert isinstance(data, bytes)
            sent = sum(self._record[1:])  # type: ignore[arg-type]
            if sent >= len(data):
                return True
            self._check()
            rest = memoryview(data)[sent:] if sent else data
            try:
                self._record.extend(map(posix.write, (self._descriptor,), (rest,)))
            except BlockingIOError:
                if not _wait_for(self._descriptor, True, deadline):
                    return False
            except OSError:
                self._fail()

    def _check(self) -> None:
        """Make sure that the descriptor still is the socket that was inherited."""
        if self._gone:
            self._fail()
        try:
            status = posix.fstat(self._descriptor)
        except OSError:
            self._fail()
        if (status.st_dev, status.st_ino) != self._identity:
            self._fail()

    def _fail(self) -> NoReturn:
        self._gone = True
        self._promote()  # each waiter wakes the next when it leaves
        raise ToolError(HOST_GONE)


def _record_bytes(chunks: list[bytes]) -> int:
    """Return the size of the record that `chunks` begin with, its own length included."""
    if not chunks:
        return ANSWER_HEAD_BYTES
    head = chunks[0] if len(chunks[0]) >= 4 else b"".join(chunks)
    return 4 + int.from_bytes(head[:4], "big") if len(head) >= 4 else ANSWER_HEAD_BYTES


def _wait_for(descriptor: int, writable: bool, deadline: float | None) -> bool:
    """Wait until `descriptor` can be read, or written; False once `deadline` is over."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if writable else select.POLLIN)
    left_ms = None if deadline is None else max((deadline - monotonic()) * 1000, 0)
    try:
        return bool(poll.poll(left_ms))
    except OSError as error:  # poll() takes no descriptor at all where RLIMIT_NOFILE is 0
        raise ToolError("cannot wait for the host: " + str(error)) from None


def move_descriptor(descriptor: int) -> int:
    """Return a close-on-exec duplicate above LOWEST_DESCRIPTOR and close `descriptor`.

    Where the limit of open files does not allow such a number the descriptor stays, marked close-on-exec.
    """
    try:
        moved = LOWEST_DESCRIPTOR
        while _is_open(moved):
            moved += 1
        posix.dup2(descriptor, moved, False)
    except OSError:
        posix.set_inheritable(descriptor, False)
        return descriptor
    posix.close(descriptor)
    return moved


def _is_open(descriptor: int) -> bool:
    """Return whether the number is taken; nothing else opens descriptors while a script is being set up."""
    try:
        posix.fstat(descriptor)
    except OSError:
        return False
    return True
