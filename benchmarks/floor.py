"""What no forked kernel can be quicker than: fork, bind five sockets, answer one message.

`python -m benchmarks.floor` is the process that forks: it has imported zmq and nothing else of Jupyter, and forks a
child for each folder that it reads from standard input.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self

import zmq

KINDS = (zmq.ROUTER, zmq.XPUB, zmq.ROUTER, zmq.REP, zmq.ROUTER)


class Floor:
    """A running floor process; :meth:`start` takes as long as the floor is high."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._context = zmq.Context()

    def start(self) -> None:
        """Have a child forked and return once it has answered on its last socket."""
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory(prefix="lf-", dir="/tmp") as folder:
            self._process.stdin.write(folder + "\n")
            self._process.stdin.flush()
            with self._context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.reconnect_ivl = 5
                socket.connect(f"ipc://{folder}/{len(KINDS) - 1}")
                socket.send(b"ready?")
                socket.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._context.destroy(linger=0)


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork():
            os.wait()
            continue
        context = zmq.Context()
        sockets = []
        for number, kind in enumerate(KINDS):
            socket = context.socket(kind)
            socket.bind(f"ipc://{pathlib.Path(line.strip(), str(number))}")
            sockets.append(socket)
        sockets[-1].send_multipart(sockets[-1].recv_multipart())
        context.destroy(linger=100)
        os._exit(0)


if __name__ == "__main__":
    main()
