"""Blocking work of the helpers, done off the loop in daemon threads that are used again.

The problem.  Helpers read files, walk trees and search text: blocking work that must not hold the host
loop, that cannot be killed, and that must neither cost a thread start per call (0.1 ms and more, as much
as the call itself) nor delay the interpreter's exit.

What does not work.  ``asyncio.to_thread`` and ``concurrent.futures`` join their threads when the
interpreter exits (behaviour 2.9 promises an exit), bound their number (a few abandoned jobs would block
every later call) and start a thread for each of the first calls.

What we do.  A list of idle daemon threads, the last used first; a job takes one or starts one.  When the
awaiting task is cancelled, the job is *abandoned*: its outcome is thrown away, its thread comes back when
it ends.  :func:`abandoned` counts those, and the dispatcher refuses calls when there are too many
(behaviour 5.5): that, not this module, bounds the number of threads.

What can still fail.  A thread in C code that never returns is lost for good; it holds its place among the
abandoned and nothing else.  A forked child has none of the threads, so it starts with an empty list.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

from .base import HelperError

__all__ = ["abandoned", "in_thread"]

P = ParamSpec("P")
T = TypeVar("T")

MAX_IDLE_THREADS = 16
"""How many threads wait for work; one more that becomes idle ends."""


class _Job(Generic[T]):
    """One call: what to do, and the future on some loop that waits for it."""

    def __init__(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.ended = False
        self.abandoned = False

    def do(self) -> Callable[[], None]:
        """Do the work and return what hands its outcome over, to be called once the thread is free again."""
        value: T | None = None
        error: BaseException | None = None
        try:
            value = self._work()
        except StopIteration as stop:  # a future cannot carry it
            error = RuntimeError(f"helper work raised {stop!r}")
        except BaseException as raised:
            error = raised

        def settle() -> None:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(value)  # type: ignore[arg-type] # None only where T admits it

        def deliver() -> None:
            try:
                self._loop.call_soon_threadsafe(settle)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

        return deliver


class _Pool:
    """The threads of this process; every field is guarded by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[SimpleQueue[_Job[object]]] = []
        self.abandoned = 0

    def give(self, job: _Job[object]) -> None:
        with self.lock:
            inbox = self.idle.pop() if self.idle else None
        if inbox is None:
            inbox = SimpleQueue()
            try:
                threading.Thread(target=self._serve, args=(inbox,), name="lemon-helper", daemon=True).start()
            except RuntimeError as error:  # the system has no thread left
                raise HelperError("host busy") from error
        inbox.put(job)

    def _serve(self, inbox: SimpleQueue[_Job[object]]) -> None:
        keep = True
        while keep:
            job = inbox.get()
            deliver = job.do()
            with self.lock:
                job.ended = True
                if job.abandoned:
                    self.abandoned -= 1
                keep = len(self.idle) < MAX_IDLE_THREADS
                if keep:
                    self.idle.append(inbox)
            deliver()
            del job, deliver  # an idle thread holds nobody's result

    def abandon(self, job: _Job[object]) -> None:
        with self.lock:
            if not job.ended:
                job.abandoned = True
                self.abandoned += 1


_pool = _Pool()


def _after_fork() -> None:
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_after_fork)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)`` as worked out by a helper thread.

    What it raises is raised here.  If the awaiting task is cancelled the thread is abandoned: it works on,
    counts in :func:`abandoned` until it ends, and its outcome is thrown away.  Raises
    :class:`HelperError` ``host busy`` when the system has no thread to give.
    """
    pool = _pool
    job = _Job[T](lambda: function(*args, **kwargs), asyncio.get_running_loop())
    pool.give(job)  # type: ignore[arg-type] # the pool does not look at the value
    try:
        return await job.future
    except asyncio.CancelledError:
        pool.abandon(job)  # type: ignore[arg-type]
        raise


def abandoned() -> int:
    """Return how many threads still do work that nobody waits for (behaviour 5.5)."""
    return _pool.abandoned
