"""Which kernel a call runs on: keys, owners, forks, the cap on live kernels, idle reaping, quarantine.

Problem.  Many agents, some of them twins that resumed the same session, share a bounded number of kernels.
They come, reset, rename their session and die, from any thread and without warning, while kernels start, run
and end.  Whatever happens, a key has at most one attachable kernel, no busy kernel is ever taken away to make
room, and a kernel whose death is not certain is never forgotten.

What does not work.  Locks: an owner is often noticed dead by the garbage collector, which may run in any thread
and in the middle of any line, so a callback that takes a lock can deadlock its own thread.  Awaiting inside the
admission: between "there is room" and "started" somebody else takes the place.

What we do.  All state belongs to the host loop (:mod:`lemon_kernel.hostloop`); acquiring, releasing, forking and
evicting are plain functions there, without a single await, so each of them is atomic.  A kernel is put into the
table before its start has begun and taken out in the very step that ends it; starts and ends go on in the
background (:mod:`.kernel`).  Only those who ask for a confirmed death (reset, detach, reap, aclose) wait, and
cancelling them stops nothing that has begun.  An owner's death is one ``call_soon_threadsafe``.

What can still fail.  The wait for a death is bounded; a kernel that is not confirmed dead then is quarantined,
shown as ``unreachable``, and tried again at each reap tick.  A program that ends while a cell ignores SIGINT and
SIGTERM exits after three seconds and leaves the rest to the tracker (behaviour 6.12).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from lemon_provisioner import ColdStartReason
from lemon_provisioner.environment import child_environment
from lemon_provisioner.process import new_run_id
from lemon_provisioner.templates import Launch, Templates

from .. import hostloop, telemetry
from ..errors import RegistryUnavailableError
from .kernel import CellEnd, Link, OwnerLife, SessionKernel, Stopper, soon
from .link import STARTUP_TIMEOUT_S, KernelLink
from .states import ATTACHABLE, ENDINGS, Cause, Phase, Unavailable

if TYPE_CHECKING:
    from types import TracebackType

    from lemon_provisioner.key import KernelKey

    from ..bridge.dispatch import Dispatcher
    from ..scope import AbortSignal, Owner

__all__ = ["CellEnd", "KernelRegistry", "KernelSettings", "Lease", "ResetFailed", "Unavailable"]

log = logging.getLogger(__name__)

MAX_LIVE_KERNELS = 16
IDLE_TIMEOUT_MS = 1_800_000
REAP_INTERVAL_MS = 60_000
MAX_QUEUED_CELLS = 8


class ResetFailed(Exception):
    """A reset failed by a fault, not by a death that was not confirmed: nothing may run (behaviour 6.3)."""


class StartLink(Protocol):
    """How a kernel is started; :meth:`.link.KernelLink.start`, or a double of it."""

    def __call__(
        self, *, interpreter: str, cwd: str, helpers: Sequence[str], deadline: float
    ) -> Awaitable[Link]: ...


@dataclass(frozen=True)
class KernelSettings:
    """What the current call says about its kernel; none of it is part of the key (behaviour 6.4, A-18)."""

    kernel_idle_timeout_ms: int = IDLE_TIMEOUT_MS
    max_live_kernels: int = MAX_LIVE_KERNELS
    max_queued_cells_per_kernel: int = MAX_QUEUED_CELLS


_Place = tuple[str, OwnerLife | None]
"""Where a kernel is found: the digest of its key, and the owner whose fork it is, None for the shared one."""


async def call_stop(end: Callable[[], Awaitable[bool]]) -> bool:
    """Carry out the end of a kernel; the default of the `stopper` seam."""
    return await end()


class Lease:
    """One call's hold on a kernel, from acquire to return: as long as it lasts the kernel is not evicted.

    For the host loop only.  :meth:`execute` releases it; so does :meth:`release`, any number of times.  One that
    is dropped, because its call was cut short before it came to anything, releases itself.
    """

    def __init__(
        self,
        kernel: SessionKernel,
        owner: OwnerLife,
        settings: KernelSettings,
        on_release: Callable[[], None],
    ) -> None:
        self._kernel = kernel
        self._owner = owner
        self._settings = settings
        self._on_release: Callable[[], None] | None = on_release
        self._loop = asyncio.get_running_loop()

    def __del__(self) -> None:
        if self._on_release is not None:
            soon(self._loop, self._on_release)  # the collector may be in any thread

    async def execute(
        self,
        script: str,
        *,
        dispatcher: Dispatcher,
        abort: AbortSignal,
        deadline: float,
        max_output_bytes: int,
    ) -> CellEnd:
        """Run `script` as one cell, in its turn, and return how it ended; once per lease.

        `deadline` is a time of the host loop; it includes the kernel's start and the queue.  `abort` is the
        caller's signal.  Raises :class:`Unavailable` when the kernel did not start: nothing has run then.
        Cancelling the awaiting task counts as the caller's death (behaviour 2.9).
        """
        try:
            return await self._kernel.execute(
                script,
                owner=self._owner,
                dispatcher=dispatcher,
                abort=abort,
                deadline=deadline,
                max_output_bytes=max_output_bytes,
                max_queued_cells=self._settings.max_queued_cells_per_kernel,
            )
        finally:
            self.release()

    def release(self) -> None:
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


class KernelRegistry:
    """The live session kernels of this process, by key (behaviour 6).

    Needs no arguments; an (async) context manager.  `detach`, `reap`, `aclose` and `snapshot` may be called from
    any loop and thread.  Test seams: `clock` gives seconds for last use and idle time, `sleep` waits between two
    reap ticks, `stopper` carries out a kernel's end and says whether it is confirmed (False: `stop_failed`; what
    it raises is `reset_failed`), `start` starts a kernel.  `warm_starts` is False where there will be one kernel
    only: then none is forked from a template, and no template is made.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        stopper: Stopper = call_stop,
        start: StartLink | None = None,
        warm_starts: bool = True,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._stopper = stopper
        self._start = start
        self._warm_starts = warm_starts
        self._closed = False
        self._clear()
        _registries.add(self)

    def _clear(self) -> None:
        self._kernels: dict[_Place, SessionKernel] = {}
        self._leaving: set[SessionKernel] = set()
        self._forks: set[_Place] = set()
        self._monitored: dict[OwnerLife, Callable[[], None]] = {}
        self._generations = 0
        self._ticking: asyncio.Task[None] | None = None
        self._templates = Templates(on_fallback=_report_cold_start) if self._warm_starts else None

    @classmethod
    def default(cls) -> KernelRegistry:
        """Return the process-wide registry; when that was closed, a new and empty one (behaviour 6.4)."""
        global _default
        with _default_lock:
            if _default is None or _default.closed:
                _default = cls()
            return _default

    @property
    def closed(self) -> bool:
        return self._closed

    # -- for everybody, from anywhere ------------------------------------------------------------------------

    async def detach(self, owner: Owner) -> bool:
        """Remove `owner` from all its kernels and clear its forks; return whether all that ended is gone.

        The session reset: awaited, while idle, before the new identity is installed.  A kernel without owners
        ends, and one whose active cell is the owner's; siblings' cells go on otherwise (behaviour 6.2).  False
        means that a death could not be confirmed: refuse the session reset as busy.  Bounded to about 5 s;
        cancelling the wait does not undo the detaching.  Raises :class:`RegistryUnavailableError` if closed.
        """
        return await hostloop.call(self._detach(owner.life))

    async def reap(self) -> None:
        """Do now what the tick does every minute: end idle kernels, retry unreachable ones (behaviour 6.4).

        Returns when these ends are confirmed or have failed.  Raises :class:`RegistryUnavailableError` if closed.
        """
        await hostloop.call(self._reap())

    async def aclose(self) -> None:
        """End all kernels and refuse everything from now on; idempotent, bounded to about 5 s."""
        await hostloop.call(self._close())

    def snapshot(self) -> dict[str, object]:
        """Return the counts of behaviour 9.3, without identities.

        Raises :class:`RegistryUnavailableError` if closed.
        """
        if hostloop.running_here():
            return self._snapshot()

        async def there() -> dict[str, object]:
            return self._snapshot()

        return hostloop.run(there())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        """Enter as a plain context manager, for callers of ``run_sync()``; leaving it blocks until all is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hostloop.run(self._close())

    # -- for the tool, on the host loop ----------------------------------------------------------------------

    async def reset(self, key: KernelKey, owner: Owner) -> bool:
        """Discard what `owner` has under `key`; return whether a live kernel was discarded (behaviour 6.3).

        The sole owner's kernel ends.  A co-owner leaves the shared kernel and gets a fork of his own, until he
        detaches.  Waits, bounded, for the death of what ends.  Raises :class:`Unavailable` (`stop_failed`,
        `registry_unavailable`) or :class:`ResetFailed`.
        """
        if self._closed:
            raise Unavailable("registry_unavailable")
        life = owner.life
        kernel = self._find(self._place(key, life))
        if kernel is None:
            return False
        if kernel.owners <= {life}:
            kernel.end(Cause.RESET)
        else:
            self._forks.add((key.digest, life))
            self._monitor(life)
            kernel.depart(life, Cause.RESET)
            if kernel.attachable:
                return True
        if not await kernel.ended():
            if kernel.stop_error is not None:
                raise ResetFailed("the old kernel could not be stopped") from kernel.stop_error
            raise Unavailable("stop_failed")
        return True

    async def acquire(self, key: KernelKey, owner: Owner, settings: KernelSettings) -> Lease:
        """Return a lease on the kernel of `key` for `owner`, starting one if there is none.

        Never waits: a kernel that is starting queues its cells.  Raises
        :class:`Unavailable` (`capacity_exhausted`, `registry_unavailable`, `missing_session_scope`).
        """
        if self._closed:
            raise Unavailable("registry_unavailable")
        life = owner.life
        if life.happened:
            raise Unavailable("missing_session_scope")
        place = self._place(key, life)
        kernel = self._find(place)
        if kernel is None:
            self._make_room(settings.max_live_kernels)
            kernel = self._add(place, key)
        self._monitor(life)
        kernel.owners.add(life)
        kernel.leases += 1
        kernel.last_use = self._clock()
        kernel.idle_timeout_ms = settings.kernel_idle_timeout_ms
        return Lease(kernel, life, settings, partial(self._release, kernel))

    async def prewarm(self, interpreter: str, cwd: str) -> bool:
        """Have a template of `interpreter` before the first kernel needs it; return whether there is one."""
        if self._closed or self._templates is None:
            return False
        run_id = new_run_id()
        launch = Launch([interpreter], child_environment(run_id), cwd, run_id, output=-1)
        return await self._templates.warm(launch)

    def _release(self, kernel: SessionKernel) -> None:
        kernel.leases -= 1
        kernel.last_use = self._clock()

    # -- the table -------------------------------------------------------------------------------------------

    def _place(self, key: KernelKey, life: OwnerLife) -> _Place:
        fork = (key.digest, life)
        return fork if fork in self._forks else (key.digest, None)

    def _find(self, place: _Place) -> SessionKernel | None:
        """Return the attachable kernel there; one that is known dead ends first and is not found."""
        kernel = self._kernels.get(place)
        if kernel is not None:
            kernel.notice_death()
        return self._kernels.get(place)

    def _add(self, place: _Place, key: KernelKey) -> SessionKernel:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

        begin = self._start or partial(KernelLink.start, templates=self._templates)

        async def start() -> Link:
            return await begin(
                interpreter=key.interpreter,
                cwd=key.cwd,
                helpers=key.helpers,
                deadline=asyncio.get_running_loop().time() + STARTUP_TIMEOUT_S,
            )

        def on_change(kernel: SessionKernel, before: Phase, after: Phase) -> None:
            self._on_change(place, kernel, before, after)

        kernel = SessionKernel(start=start, stopper=self._stopper, on_change=on_change)
        self._kernels[place] = kernel
        return kernel

    def _make_room(self, cap: int) -> None:
        """Admit one more kernel under the caller's cap, by evicting one if need be (behaviour 6.4).

        A cap that was lowered evicts nothing.
        """
        if len(self._kernels) < cap:
            return
        for kernel in list(self._kernels.values()):
            kernel.notice_death()
        if len(self._kernels) < cap:
            return
        evictable = [kernel for kernel in self._kernels.values() if kernel.evictable]
        if len(self._kernels) > cap or not evictable:
            raise Unavailable("capacity_exhausted")
        min(evictable, key=lambda kernel: kernel.last_use).end(Cause.CAPACITY_EVICTION)

    def _on_change(self, place: _Place, kernel: SessionKernel, before: Phase, after: Phase) -> None:
        """Keep the table in step with the kernel, and tell the telemetry (behaviour 9.1)."""
        if before is Phase.STARTING and after is Phase.IDLE:
            self._generations += 1
            kernel.generation = self._generations
            telemetry.emit("coding_agent.python_repl.session.start", {"count": 1, **self._live()})
        if after in ATTACHABLE:
            return
        if self._kernels.get(place) is kernel:
            del self._kernels[place]
            self._leaving.add(kernel)
        if after is Phase.GONE:
            self._leaving.discard(kernel)
        if after in (Phase.GONE, Phase.UNREACHABLE):
            assert kernel.cause is not None
            # One that was quarantined has been reported then; what is left is that somebody got rid of it.
            ending = ENDINGS[Cause.SHUTDOWN if before is Phase.UNREACHABLE else kernel.cause]
            telemetry.emit(
                ending.report,
                {"count": 1, "duration_ms": kernel.lived_ms(), **self._live()},
                {"reason": ending.category},
            )

    def _live(self) -> dict[str, int]:
        return {"live_kernels": len(self._kernels), "capacity": MAX_LIVE_KERNELS}

    def _all(self) -> Iterable[SessionKernel]:
        return [*self._kernels.values(), *self._leaving]

    # -- owners ----------------------------------------------------------------------------------------------

    def _monitor(self, life: OwnerLife) -> None:
        """Hear of an owner's death, which may be noticed in any thread and in the middle of any line."""
        if life in self._monitored:
            return
        loop = asyncio.get_running_loop()
        self._monitored[life] = life.tell(lambda: soon(loop, lambda: self._depart(life)))

    def _depart(self, life: OwnerLife) -> list[SessionKernel]:
        """Take an owner out of everything; return his kernels that are ending, or were already."""
        unsubscribe = self._monitored.pop(life, None)
        if unsubscribe is not None:
            unsubscribe()
        self._forks = {fork for fork in self._forks if fork[1] is not life}
        his = [kernel for kernel in self._all() if life in kernel.owners]
        for kernel in his:
            kernel.depart(life, Cause.OWNER_DETACHED)
        return [kernel for kernel in his if not kernel.attachable]

    async def _detach(self, life: OwnerLife) -> bool:
        self._require_open()
        return await _confirmed(self._depart(life))

    # -- reaping and closing ---------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await self._sleep(REAP_INTERVAL_MS / 1000)
            try:
                await self._reap()
            except Exception as error:  # the next tick must come
                log.error("a reap tick failed: %s", type(error).__name__)

    async def _reap(self) -> None:
        self._require_open()
        now = self._clock()
        reaped = []
        for kernel in self._all():
            kernel.notice_death()
            idle_ms = max(0, int((now - kernel.last_use) * 1000))
            if kernel.evictable and idle_ms >= kernel.idle_timeout_ms:
                self._report_reap(kernel, idle_ms, "idle")
                kernel.end(Cause.IDLE)
            elif kernel.phase is Phase.UNREACHABLE:
                self._report_reap(kernel, idle_ms, "unreachable")
                kernel.retry()
            else:
                continue
            reaped.append(kernel)
        if self._templates is not None:
            self._templates.reap()
        await _confirmed(reaped)

    def _report_reap(self, kernel: SessionKernel, idle_ms: int, reason: str) -> None:
        telemetry.emit(
            "coding_agent.python_repl.session.reap",
            {"count": 1, "idle_ms": idle_ms, **self._live()},
            {"reason": reason},
        )

    async def _close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._ticking is not None:
                self._ticking.cancel()
            for unsubscribe in self._monitored.values():
                unsubscribe()
            self._monitored.clear()
            self._forks.clear()
            for kernel in self._all():
                kernel.end(Cause.SHUTDOWN)
                kernel.retry()
        await _confirmed(self._leaving)
        if self._templates is not None:
            await self._templates.aclose()

    def _snapshot(self) -> dict[str, object]:
        self._require_open()
        kernels = list(self._all())
        phases = {phase.value: 0 for phase in Phase if phase is not Phase.GONE}
        for kernel in kernels:
            phases[kernel.phase.value] += 1
        live = len(self._kernels)
        owners = {life for kernel in self._kernels.values() for life in kernel.owners}
        return {
            "capacity": {"live": live, "max": MAX_LIVE_KERNELS, "available": max(MAX_LIVE_KERNELS - live, 0)},
            "phases": phases,
            "inflight_cells": sum(kernel.leases for kernel in kernels),
            "owners": len(owners),
            "forked_owners": len({life for _, life in self._forks}),
            "reap": {"idle_timeout_ms": IDLE_TIMEOUT_MS, "interval_ms": REAP_INTERVAL_MS},
        }

    def _require_open(self) -> None:
        if self._closed:
            raise RegistryUnavailableError("registry_unavailable: the kernel registry is closed")


def _report_cold_start(reason: ColdStartReason) -> None:
    telemetry.emit("coding_agent.python_repl.template.fallback", {"count": 1}, {"reason": reason})


async def _confirmed(kernels: Iterable[SessionKernel]) -> bool:
    """Wait for ends that have begun; return whether all of them are confirmed."""
    return all(await asyncio.gather(*(kernel.ended() for kernel in kernels)))


_default: KernelRegistry | None = None
_default_lock = threading.Lock()
_registries: weakref.WeakSet[KernelRegistry] = weakref.WeakSet()
_inherited: list[object] = []


async def _close_all() -> None:
    await asyncio.gather(*(registry.aclose() for registry in list(_registries)))


def _after_fork() -> None:
    """A forked child has no kernels: those of its parent are not its to use, to end, or to finalise."""
    global _default, _default_lock
    _inherited.append(_default)
    _default = None
    _default_lock = threading.Lock()
    for registry in list(_registries):
        _inherited.append(vars(registry).copy())
        registry._clear()
    hostloop.at_exit(_close_all)


hostloop.at_exit(_close_all)
os.register_at_fork(after_in_child=_after_fork)  # after hostloop's own: it has forgotten its closers by then
