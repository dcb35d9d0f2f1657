"""Programmatic tool calling: Python scripts that call an agent's own tools.

The public names are listed in ``__all__``; importing the package imports none of them yet, so that a program
which only wants the configuration does not pay for Jupyter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .approvals import ApprovalBroker
    from .config import ExecuteCodeConfig
    from .errors import ExecuteCodeError, ToolNotFoundError
    from .helpers.base import HelperContext, HelperError, HelperResult
    from .policy import ToolPolicy
    from .result import ToolResult, ToolUpdate
    from .scope import AbortSignal, Owner, SessionScope
    from .session.registry import KernelRegistry
    from .tool import ExecuteCode
    from .toolset import find_tool, tools

_HOMES = {
    "ApprovalBroker": ".approvals",
    "ExecuteCodeConfig": ".config",
    "ExecuteCodeError": ".errors",
    "ToolNotFoundError": ".errors",
    "HelperContext": ".helpers.base",
    "HelperError": ".helpers.base",
    "HelperResult": ".helpers.base",
    "ToolPolicy": ".policy",
    "ToolResult": ".result",
    "ToolUpdate": ".result",
    "AbortSignal": ".scope",
    "Owner": ".scope",
    "SessionScope": ".scope",
    "KernelRegistry": ".session.registry",
    "ExecuteCode": ".tool",
    "find_tool": ".toolset",
    "tools": ".toolset",
}

__all__ = [
    "AbortSignal",
    "ApprovalBroker",
    "ExecuteCode",
    "ExecuteCodeConfig",
    "ExecuteCodeError",
    "HelperContext",
    "HelperError",
    "HelperResult",
    "KernelRegistry",
    "Owner",
    "SessionScope",
    "ToolNotFoundError",
    "ToolPolicy",
    "ToolResult",
    "ToolUpdate",
    "__version__",
    "find_tool",
    "tools",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
