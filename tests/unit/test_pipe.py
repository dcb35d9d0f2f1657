"""Both ends of the socket pair: the script's many threads and interrupts, the host's untrusted peer."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import pytest
from lemon_shim import pipe as script_side
from lemon_shim.api import ToolError
from lemon_shim.wire import HOST_GONE

from lemon_kernel.bridge.dispatch import Answer
from lemon_kernel.bridge.pipe import BACKLOG_SLACK_BYTES, PipeCarrier


def record(call_id: int, content: str, ok: bool = True) -> bytes:
    body = content.encode()
    return (9 + len(body)).to_bytes(4, "big") + call_id.to_bytes(8, "big") + bytes((ok,)) + body


class Pair:
    """A script-side carrier and the plain socket at its other end."""

    def __init__(self) -> None:
        self.host, theirs = socket.socketpair()
        self.host.settimeout(10)
        self.carrier = script_side.PipeCarrier(theirs.detach())

    def frame(self) -> bytes:
        """Read one frame as the host would."""
        size = int.from_bytes(self.exactly(4), "big")
        return self.exactly(size)

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.host.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def serve(self, answer: Callable[[bytes], bytes]) -> Callable[[], None]:
        """Answer each frame, never blocked by a script that does not read; return what ends it."""
        answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

        def read() -> None:
            try:
                while True:
                    answers.put(answer(self.frame()))
            except (EOFError, OSError):
                answers.put(None)

        def write() -> None:
            while (data := answers.get()) is not None:
                self.host.sendall(data)

        threads = [threading.Thread(target=target, daemon=True) for target in (read, write)]
        for thread in threads:
            thread.start()

        def end() -> None:
            self.host.shutdown(socket.SHUT_RD)
            for thread in threads:
                thread.join(10)

        return end

    def close(self) -> None:
        self.host.close()
        try:
            os.close(self.carrier._descriptor)
        except OSError:
            pass


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


# The script's end


def test_descriptor_is_out_of_the_way(pair: Pair) -> None:
    """The socket is above 200 and children do not inherit it."""
    assert pair.carrier._descriptor >= 200
    assert not os.get_inheritable(pair.carrier._descriptor)


def test_exchange(pair: Pair) -> None:
    """A call gets the answer with its id, whatever comes before and in whatever pieces."""
    answer = record(9, "of nobody") + record(3, "é" * 200_000, ok=False)

    def in_pieces() -> None:
        pair.frame()
        for start in range(0, len(answer), 70_001):
            pair.host.sendall(answer[start : start + 70_001])

    thread = threading.Thread(target=in_pieces)
    thread.start()
    assert pair.carrier.exchange(3, b"{}", None) == (False, "é" * 200_000)
    thread.join()
    assert pair.carrier._waiters == {}
    assert pair.carrier._inside == set()


def test_timeout_and_late_answer(pair: Pair) -> None:
    """Without an answer in time the result is None; the late answer is nobody's, the next one arrives."""
    assert pair.carrier.exchange(1, b"a", 0.01) is None
    pair.host.sendall(record(1, "late") + record(2, "mine"))
    assert pair.carrier.exchange(2, b"b", 1) == (True, "mine")
    assert (pair.frame(), pair.frame()) == (b"a", b"b")


def test_threads_share_one_stream(pair: Pair) -> None:
    """Each of sixteen threads gets its own answers, though the host answers in batches and backwards."""
    waiting: list[int] = []

    def answer(frame: bytes) -> bytes:
        waiting.append(int(frame))
        if len(waiting) < 16:
            return b""
        answers = b"".join(record(call_id, str(call_id)) for call_id in reversed(waiting))
        waiting.clear()
        return answers

    wrong = []

    def call(first: int) -> None:
        for call_id in range(first, first + 50):
            if pair.carrier.exchange(call_id, b"%d" % call_id, None) != (True, str(call_id)):
                wrong.append(call_id)

    end = pair.serve(answer)
    threads = [threading.Thread(target=call, args=(n * 1000,)) for n in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)
    end()


def test_leader_hands_over(pair: Pair) -> None:
    """When the reading thread has its answer another that waits reads on, at once."""
    got: dict[int, float] = {}

    def call(call_id: int) -> None:
        pair.carrier.exchange(call_id, b"x", None)
        got[call_id] = time.monotonic()

    threads = [threading.Thread(target=call, args=(call_id,)) for call_id in (1, 2, 3)]
    for thread in threads:
        thread.start()
        pair.frame()
    for call_id in (1, 2, 3):
        sent = time.monotonic()
        pair.host.sendall(record(call_id, ""))
        threads[call_id - 1].join(5)
        assert got[call_id] - sent < script_side.FOLLOWER_NAP_S / 2


def test_latest_waiter_first(pair: Pair) -> None:
    """Of two waiters for one id (a replay, raw) the later gets the first answer: its refusal."""
    first: list[object] = []
    thread = threading.Thread(target=lambda: first.append(pair.carrier.exchange(7, b"1", None)))
    thread.start()
    pair.frame()
    pair.host.sendall(record(7, "already processed", ok=False) + record(7, "done"))
    assert pair.carrier.exchange(7, b"2", 5) in [(False, "already processed"), (True, "done")]
    thread.join(5)
    assert first


def test_host_gone(pair: Pair) -> None:
    """When the host goes, all who wait get ToolError at once, and so does every later call."""
    said: list[str] = []

    def call(call_id: int) -> None:
        try:
            pair.carrier.exchange(call_id, b"x", None)
        except ToolError as error:
            said.append(str(error))

    threads = [threading.Thread(target=call, args=(call_id,)) for call_id in range(1, 5)]
    for thread in threads:
        thread.start()
        pair.frame()
    pair.host.close()
    for thread in threads:
        thread.join(5)
    assert said == [HOST_GONE] * 4
    with pytest.raises(ToolError, match=HOST_GONE):
        pair.carrier.exchange(9, b"x", None)


def test_descriptor_taken_over(pair: Pair, tmp_path: os.PathLike[str]) -> None:
    """After the script closed the socket and a file has its number, no frame lands in the file."""
    number = pair.carrier._descriptor
    with open(os.path.join(tmp_path, "file"), "wb+") as file:
        os.dup2(file.fileno(), number)
        with pytest.raises(ToolError, match=HOST_GONE):
            pair.carrier.exchange(1, b"secret", None)
        assert os.fstat(number).st_size == 0
    os.close(number)
    with pytest.raises(ToolError, match=HOST_GONE):
        pair.carrier.send(b"secret")


class Interrupted(Exception):
    pass


@contextmanager
def handler_of_usr1(handler: Callable[[], None]) -> Iterator[None]:
    """Not SIGALRM: that is how a test that hangs is noticed."""
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt_after(delay_s: float) -> threading.Timer:
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    return timer


def raise_interrupted() -> None:
    raise Interrupted


def test_interrupted_wait(pair: Pair) -> None:
    """A handler that raises out of a call leaves the next call in order; the old answer goes nowhere."""
    with handler_of_usr1(raise_interrupted):
        timer = interrupt_after(0.02)
        with pytest.raises(Interrupted):
            pair.carrier.exchange(1, b"one", None)
        timer.join()
    pair.host.sendall(record(1, "old") + record(2, "new"))
    assert pair.carrier.exchange(2, b"two", 5) == (True, "new")


def test_interrupts_everywhere(pair: Pair) -> None:
    """Hundreds of exceptions at random points of large and small calls: no frame is torn, no lock is lost."""
    good: list[bool] = []

    def answer(frame: bytes) -> bytes:
        head, _, body = frame.partition(b":")
        good.append(len(body) % 50_000 == 0 and set(body) <= {120})
        return record(int(head), "x" * (len(body) // 10))

    armed = over = False

    def maybe_raise() -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    def storm() -> None:
        rng = random.Random(7)
        while not over:
            time.sleep(rng.uniform(0, 0.0008))
            os.kill(os.getpid(), signal.SIGUSR1)

    stop_serving = pair.serve(answer)
    stormer = threading.Thread(target=storm)
    interrupted = done = call_id = 0
    with handler_of_usr1(maybe_raise):
        stormer.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            call_id += 1
            body = b"x" * (50_000 * (call_id % 5))
            try:
                armed = True
                result = pair.carrier.exchange(call_id, b"%d:" % call_id + body, None)
                armed = False
                assert result == (True, "x" * (len(body) // 10))
                done += 1
            except Interrupted:
                interrupted += 1
        over = True
        stormer.join()
    assert interrupted > 50
    assert pair.carrier.exchange(10**9, b"%d:" % 10**9, 10) == (True, "")
    assert not pair.carrier._sending.locked()
    assert not pair.carrier._leading.locked()
    assert pair.carrier._inside == set()
    assert all(good)
    stop_serving()


def test_call_in_signal_handler(pair: Pair) -> None:
    """A call made by a handler that interrupted a call of its own thread is refused; the call goes on."""
    refused = []

    def call_again() -> None:
        try:
            pair.carrier.exchange(2, b"nested", None)
        except ToolError as error:
            refused.append(str(error))
        pair.host.sendall(record(1, "done"))

    with handler_of_usr1(call_again):
        timer = interrupt_after(0.02)
        assert pair.carrier.exchange(1, b"outer", 5) == (True, "done")
        timer.join()
    assert len(refused) == 1
    assert "signal handler" in refused[0]


def test_full_socket(pair: Pair) -> None:
    """A send that finds the socket full keeps its patience, and a later send finishes the frame first."""
    big = b"y" * 3_000_000
    assert pair.carrier.exchange(1, big, 0.05) is None
    frames: list[bytes] = []

    def collect() -> None:
        frames.extend([pair.frame(), pair.frame()])
        pair.host.sendall(record(2, ""))

    thread = threading.Thread(target=collect)
    thread.start()
    assert pair.carrier.exchange(2, b"next", 10) == (True, "")
    thread.join()
    assert frames == [big, b"next"]


# The host's end


class Limits:
    max_text_bytes = 65_536
    max_rpc_result_bytes = 1000


class Book:
    """Stands for the dispatcher: writes down what it is handed."""

    cell = "1"
    token = "secret"
    limits = Limits()
    max_frame_bytes = 262_144

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.oversized: list[tuple[bytes, int]] = []
        self.accepts_calls = True
        self.send: Callable[[Answer], None] = lambda answer: None

    def connect(self, send: Callable[[Answer], None]) -> None:
        self.send = send

    def receive(self, frame: bytes) -> None:
        self.frames.append(frame)

    def receive_oversized(self, head: bytes, size: int) -> None:
        self.oversized.append((head, size))

    def end_calls(self) -> None:
        self.accepts_calls = False


class Host:
    def __init__(self, helpers: tuple[str, ...] = ("read", "ls")) -> None:
        ours, self.script = socket.socketpair()
        self.script.setblocking(False)
        self.book = Book()
        self.carrier = PipeCarrier(ours, self.book, helpers)  # type: ignore[arg-type]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.carrier.close()
        self.carrier.close()
        self.script.close()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)


def prefixed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + frame


def test_grant_record() -> None:
    """The grant is in the socket before the script is: cell, token, text budget, helpers."""

    async def main() -> None:
        async with Host() as host:
            host.carrier.start()
            assert host.script.recv(1000) == record(0, "1\nsecret\n65536\nread ls")

    asyncio.run(main())


@pytest.mark.parametrize("piece", [1, 3, 1000, 10**6])
def test_frames_in_any_pieces(piece: int) -> None:
    """Frames arrive whole and in order, the empty one too, however the stream is cut."""
    frames = [b"", b"a", b"b" * 300, b"", b"c" * 5]
    stream = b"".join(map(prefixed, frames))

    async def main() -> None:
        async with Host() as host:
            host.carrier.start()
            for start in range(0, len(stream), piece):
                host.script.send(stream[start : start + piece])
                if piece < 10:
                    await asyncio.sleep(0)
            await host.until(lambda: len(host.book.frames) == 5)
            assert host.book.frames == frames

    asyncio.run(main())


@pytest.mark.case(173)
@pytest.mark.parametrize("size", [262_145, 5_000_000])
def test_oversized_frame(size: int) -> None:
    """A frame over the cap is discarded as it arrives but for its head; its neighbours arrive."""

    async def main() -> None:
        async with Host() as host:
            host.carrier.start()
            loop = asyncio.get_running_loop()
            big = b'{"id":5' + b"z" * (size - 7)
            most = 0
            sender = loop.create_task(
                loop.sock_sendall(host.script, prefixed(b"before") + prefixed(big) + prefixed(b"after"))
            )
            while not sender.done():
                most = max(most, len(host.carrier._reader._buffer))
                await asyncio.sleep(0)
            await host.until(lambda: len(host.book.frames) == 2)
            assert host.book.frames == [b"before", b"after"]
            assert host.book.oversized == [(big[:4096], size)]
            assert most <= 262_144 + 65_536

    asyncio.run(main())


def test_absurd_length() -> None:
    """An announced frame of 4 GiB costs its head; the end of the stream ends it."""

    async def main() -> None:
        async with Host() as host:
            host.carrier.start()
            host.script.send(b"\xff\xff\xff\xff" + b"q" * 50_000)
            host.script.close()
            await host.until(lambda: not host.carrier._is_open)
            assert len(host.carrier._reader._buffer) <= 4096
            assert host.book.frames == host.book.oversized == []

    asyncio.run(main())


def test_answers_wait_for_room() -> None:
    """Answers that find the socket full are kept in order and sent as the script reads."""

    async def main() -> None:
        async with Host() as host:
            host.carrier.start()
            expected = record(0, "1\nsecret\n65536\nread ls")
            for call_id in range(1, 21):
                host.book.send(Answer(call_id, call_id % 2 == 1, "é" * 100_000))
                expected += record(call_id, "é" * 100_000, call_id % 2 == 1)
            got = b""
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(10):
                while len(got) < len(expected):
                    got += await loop.sock_recv(host.script, 1_000_000)
            assert got == expected
            await host.until(lambda: not host.carrier._backlog)

    asyncio.run(main())


def test_script_that_never_reads() -> None:
    """A backlog beyond what a run may read is given up; its frames are still taken."""

    async def main() -> None:
        async with Host() as host:
            host.carrier.start()
            for call_id in range(1, 60):
                host.book.send(Answer(call_id, False, "x" * 100_000))
                assert len(host.carrier._backlog) <= BACKLOG_SLACK_BYTES + 1000
            assert not host.carrier._backlog
            host.script.send(prefixed(b"still here"))
            await host.until(lambda: host.book.frames == [b"still here"])

    asyncio.run(main())


def test_script_that_closes() -> None:
    """A closed end costs nothing: what was sent before is taken, answers go nowhere."""

    async def main() -> None:
        async with Host() as host:
            host.carrier.start()
            host.script.send(prefixed(b"last"))
            host.script.close()
            host.book.send(Answer(1, True, "x"))
            await host.until(lambda: not host.carrier._is_open)
            assert host.book.frames == [b"last"]
            host.book.send(Answer(2, True, "x"))

    asyncio.run(main())


@pytest.mark.case(317)
def test_drain() -> None:
    """At the end what is in the socket is taken once; the dispatcher knows that calls are over."""

    async def main() -> None:
        async with Host() as host:
            host.carrier.start()
            host.script.send(prefixed(b"n" * 100_000) + prefixed(b"last") + b"\0\0")
            assert host.book.frames == []
            host.carrier.drain()
            assert host.book.frames == [b"n" * 100_000, b"last"]
            assert not host.book.accepts_calls

    asyncio.run(main())
