"""Who is calling: the owner of kernels, the scope that selects one, and the signal that ends a run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from .config import ExecuteCodeConfig

__all__ = ["AbortSignal", "Owner", "SessionScope"]


class _Once:
    """Something that happens at most once, thread-safely, and tells those who asked."""

    def __init__(self) -> None:
        # Reentrant: an owner's finaliser may run in the middle of any line of this thread, also of `_forget`.
        self._lock = threading.RLock()
        self._happened = False
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._next_key = 0

    @property
    def happened(self) -> bool:
        return self._happened

    def happen(self) -> None:
        with self._lock:
            if self._happened:
                return
            self._happened = True
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        for callback in callbacks:
            callback()

    def tell(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` once it happens (at once if it has); return what takes the request back."""
        with self._lock:
            if not self._happened:
                key = self._next_key = self._next_key + 1
                self._callbacks[key] = callback
                return lambda: self._forget(key)
        callback()
        return lambda: None

    def _forget(self, key: int) -> None:
        with self._lock:
            self._callbacks.pop(key, None)


class AbortSignal:
    """A one-way switch that ends a run; safe to use from any thread, any number of times."""

    def __init__(self) -> None:
        self._once = _Once()

    @property
    def aborted(self) -> bool:
        return self._once.happened

    def abort(self) -> None:
        """Abort; callbacks run in the calling thread, once."""
        self._once.happen()

    def on_abort(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` on abort (at once if aborted already); return a function that unsubscribes."""
        return self._once.tell(callback)


class Owner:
    """The agent session that owns kernels; closed or garbage-collected it counts as dead (seed, "Keying").

    `config`, where given, is an async callable without arguments that returns the effective
    :class:`ExecuteCodeConfig`; it is awaited at each call for at most 1000 ms (behaviour 1.3).
    """

    def __init__(self, config: Callable[[], Awaitable[ExecuteCodeConfig]] | None = None) -> None:
        self.config = config
        self.life = _Once()
        """Ends with this owner.  Registries keep this, never the owner itself."""
        self._finalizer = weakref.finalize(self, self.life.happen)
        self._finalizer.atexit = False

    @property
    def alive(self) -> bool:
        return not self.life.happened

    def close(self) -> None:
        """End this owner: its kernels are detached.  Idempotent, thread-safe."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class SessionScope:
    """What selects a session kernel: the persisted session id, the agent id, and the living owner.

    `session_key` is overridable by callers, serves approvals only and is never part of the kernel key
    (behaviour 6.1).
    """

    session_id: str
    agent_id: str
    owner: Owner | None
    session_key: str | None = None
