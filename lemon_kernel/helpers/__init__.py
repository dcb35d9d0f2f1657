"""The tools behind the helper functions, and how they are described as direct tools (behaviour 3).

Importing this package imports none of ``regex``, ``pathspec``, ``httpx`` and ``trafilatura``: each is
imported by the first call that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .base import Helper, HelperContext, HelperError, HelperResult, Params, content_text
from .specs import SPECS, HelperSpec

if TYPE_CHECKING:
    from .external import wrap_external
    from .webfetch import WebFetch

__all__ = [
    "HELPERS",
    "SPECS",
    "Helper",
    "HelperContext",
    "HelperError",
    "HelperResult",
    "HelperSpec",
    "Params",
    "WebFetch",
    "content_text",
    "wrap_external",
]


class _AtFirstCall:
    """A helper whose module is imported by its first call: most scripts use one or two of the five."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._helper: Helper | None = None

    async def __call__(self, params: Params, context: HelperContext) -> str | HelperResult:
        if self._helper is None:
            module = import_module(f".{self._name}", __name__)
            self._helper = module.WebFetch() if self._name == "webfetch" else getattr(module, self._name)
        assert self._helper is not None
        return await self._helper(params, context)


HELPERS: dict[str, Helper] = {name: _AtFirstCall(name) for name in SPECS}
"""The helpers by name, in the order of the allowlist; ``webfetch`` reads the configuration of the call's folder."""


def __getattr__(name: str) -> object:
    homes = {"wrap_external": ".external", "WebFetch": ".webfetch"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name], __name__), name)
