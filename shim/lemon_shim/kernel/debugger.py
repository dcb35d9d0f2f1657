"""The debugger, imported when somebody debugs: debugpy costs a quarter of a kernel's start.

ipykernel asks ``ipykernel.debugger`` three things: whether debugpy is there, for its Debugger class, and that
object's services.  Until the first ``debug_request`` a stand-in module answers the first (so that
``supported_features`` stays true) and :class:`LazyDebugger` is the second.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tornado.locks import Event

__all__ = ["LazyDebugger", "stand_in"]

_NAME = "ipykernel.debugger"


class LazyDebugger:
    """Keeps the arguments of ipykernel's Debugger until somebody needs one."""

    def __init__(self, *arguments: object) -> None:
        self._arguments = arguments
        self._real: object = None
        self._made = Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._load(), name)

    async def handle_stopped_event(self) -> None:
        """Wait for the debugger, then for its next stop; ipykernel calls this for ever."""
        await self._made.wait()
        await self._load().handle_stopped_event()  # type: ignore[attr-defined]

    def _load(self) -> object:
        if self._real is None:
            if isinstance(sys.modules.get(_NAME), _StandIn):
                del sys.modules[_NAME]
            from ipykernel.debugger import Debugger

            self._real = Debugger(*self._arguments)
            self._made.set()
        return self._real


class _StandIn(ModuleType):
    pass


def stand_in() -> None:
    """Put the stand-in where ``ipykernel.debugger`` would be."""
    if _NAME not in sys.modules:
        module = _StandIn(_NAME)
        module._is_debugpy_available = importlib.util.find_spec("debugpy") is not None  # type: ignore[attr-defined]
        module.Debugger = LazyDebugger  # type: ignore[attr-defined]
        sys.modules[_NAME] = module
