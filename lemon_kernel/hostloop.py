"""The one thread and event loop that the host side runs on.

Problem: kernels, sockets and timers must outlive the caller's event loop.  Agents call
``asyncio.run(tool.execute(...))`` once per turn, notebooks block their loop, and blocking Jupyter managers
turn their loop only while a call is in progress.  Objects bound to such a loop die or starve with it.

What does not work: the caller's loop (dies), a loop per call (kernels cannot be shared), a coroutine that
waits to be turned by somebody else (starves under the blocking manager; tried).

What we do: one daemon thread, "lemon-host", started at first use, runs one loop for everything of the host
side.  Callers hop onto it with :func:`call` or :func:`run`; helper doubles and callbacks of the user hop back
to the caller's loop with :class:`CallerLoop`, so that user code never runs on, and never blocks, this thread.

What can still fail: a forked child has no such thread (it gets its own at first use), and a user who blocks
the caller's loop stalls his own helper doubles until their deadline.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from .scope import AbortSignal

__all__ = ["CallerLoop", "at_exit", "call", "loop", "run", "running_here", "stop", "within"]

T = TypeVar("T")

EXIT_BOUND_S = 2.0
"""How long our closing may delay the interpreter's exit; the tracker's second makes it the 3 s of behaviour 2.9."""

LAST_TURNS_S = 0.05
"""How long tasks that are left may take to end when the loop does."""

JOIN_S = 0.3
"""What of it the end of the thread may take; a loop that is blocked does not end, and its daemon thread need not."""


class _HostThread:
    """A started loop in its thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._turn, args=(started,), name="lemon-host", daemon=True)
        self.thread.start()
        started.wait()

    def _turn(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(started.set)
        try:
            self.loop.run_forever()
        finally:
            self._end_tasks()
            self.loop.close()

    def _end_tasks(self) -> None:
        """Cancel what is left and let it take note: a task that is dropped complains at the interpreter's exit."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=LAST_TURNS_S))


_lock = threading.Lock()
_host: _HostThread | None = None
_closers: list[Callable[[], Awaitable[object]]] = []
_calls: set[concurrent.futures.Future[Any]] = set()


def _after_fork() -> None:
    """Forget the parent's thread: it does not exist in a forked child."""
    global _host, _lock
    _host = None
    _lock = threading.Lock()
    _closers.clear()
    _calls.clear()


os.register_at_fork(after_in_child=_after_fork)


def loop() -> asyncio.AbstractEventLoop:
    """Return the host loop, starting its thread at first use."""
    host = _host
    if host is not None and not host.loop.is_closed():
        return host.loop
    return _start()


def _start() -> asyncio.AbstractEventLoop:
    global _host
    from lemon_provisioner import tracker, workspace  # noqa: F401 - their exit hooks must be older than ours

    with _lock:
        if _host is None or _host.loop.is_closed():
            _host = _HostThread()
            atexit.unregister(_exit)
            atexit.register(_exit)
        return _host.loop


def running_here() -> bool:
    """Return whether the calling code runs on the host loop."""
    host = _host
    return host is not None and threading.current_thread() is host.thread


async def call(work: Coroutine[object, object, T]) -> T:
    """Await `work` on the host loop, from any loop; cancelling the caller cancels the work."""
    if running_here():
        return await work
    future = asyncio.run_coroutine_threadsafe(work, loop())
    _calls.add(future)
    future.add_done_callback(_calls.discard)
    return await asyncio.wrap_future(future)


def run(work: Coroutine[object, object, T], timeout_s: float | None = None) -> T:
    """Run `work` on the host loop and block until it is done; not to be called from the host loop."""
    if running_here():
        work.close()
        raise RuntimeError("hostloop.run() called on the host loop itself")
    future = asyncio.run_coroutine_threadsafe(work, loop())
    try:
        return future.result(timeout_s)
    except BaseException:
        future.cancel()
        raise


async def within(work: Awaitable[T], timeout_s: float | None, abort: AbortSignal | None = None) -> T:
    """Return what `work`, which is a user's, returns within `timeout_s` and before `abort`, on any loop.

    Raises TimeoutError.  Unlike :func:`asyncio.wait_for` it does not wait for work that shrugs off its
    cancellation: that goes on alone, and what it raises is nobody's.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    aborted: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not aborted.done():
            aborted.set_result(None)

    forget = abort.on_abort(lambda: loop.call_soon_threadsafe(stop)) if abort is not None else None
    waiting: set[asyncio.Future[Any]] = {task, aborted}
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        if forget is not None:
            forget()
        aborted.cancel()
        task.cancel()


def at_exit(closer: Callable[[], Awaitable[object]]) -> None:
    """Await `closer` on the host loop when the interpreter exits, within ``EXIT_BOUND_S`` for all of them."""
    _closers.append(closer)


def stop(timeout_s: float = EXIT_BOUND_S) -> None:
    """End the loop and join its thread, for at most `timeout_s`; the next use starts a new one."""
    global _host
    with _lock:
        host, _host = _host, None
    if host is None or host.pid != os.getpid() or not host.thread.is_alive():
        return
    host.loop.call_soon_threadsafe(host.loop.stop)
    if threading.current_thread() is not host.thread:
        host.thread.join(timeout_s)


async def _close_all(closers: list[Callable[[], Awaitable[object]]]) -> None:
    await asyncio.gather(*(closer() for closer in closers), return_exceptions=True)


def _exit() -> None:
    host = _host
    if host is None or host.pid != os.getpid() or not host.thread.is_alive():
        return
    for call_in_flight in list(_calls):  # nobody waits for it any more: its caller's death
        call_in_flight.cancel()
    future = asyncio.run_coroutine_threadsafe(_close_all(list(_closers)), host.loop)
    try:
        future.result(EXIT_BOUND_S - JOIN_S)
    except BaseException:
        future.cancel()
    stop(JOIN_S)


class _Exit(NamedTuple):
    """What work on the caller's loop raised to end its process."""

    error: SystemExit


class CallerLoop:
    """The loop that ``execute()`` was awaited on: where the user's doubles and callbacks run.

    A blocked loop makes them late, a closed one makes them fail; neither touches the host loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_host = running_here()

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()`` on the caller's loop and return its result here."""
        if self._is_host:
            return await work()

        async def there() -> T | _Exit:
            try:
                return await work()
            except SystemExit as error:  # would end the caller's loop, and with it everything else there
                return _Exit(error)

        coroutine = there()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise RuntimeError("the caller's event loop is closed") from None
        result = await asyncio.wrap_future(future)
        if isinstance(result, _Exit):
            raise result.error
        return result

    def soon(self, callback: Callable[[], object]) -> None:
        """Schedule `callback` on the caller's loop, in order; dropped when that loop is closed."""
        if self._is_host:
            self._loop.call_soon(callback)
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            pass
