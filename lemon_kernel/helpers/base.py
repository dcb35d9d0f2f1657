"""What a helper is: an async callable that takes wire parameters and a context and returns text or blocks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import HelperError
from ..scope import AbortSignal

__all__ = ["Helper", "HelperContext", "HelperError", "HelperResult", "Params", "content_text"]

Params = Mapping[str, object]
"""Wire parameters of one call: JSON values under the names of behaviour 3.1."""

NON_TEXT_CONTENT = "[non-text content omitted]"


@dataclass(frozen=True)
class HelperContext:
    """What a helper may know of its caller.

    `abort` is the run's signal (long work looks at it between files and every MiB), `cwd` the absolute
    folder that relative paths are joined to, `call_id` a name for logs: ``exec_code_rpc_<id>`` for a
    helper call.
    """

    abort: AbortSignal
    cwd: str
    call_id: str = ""


@dataclass(frozen=True)
class HelperResult:
    """A helper's content: blocks like ``{"type": "text", "text": ...}``; with `is_error` the text is the error."""

    content: Sequence[Mapping[str, object]] = field(default_factory=tuple)
    is_error: bool = False


Helper = Callable[[Params, HelperContext], Awaitable[str | HelperResult]]


def content_text(result: str | HelperResult) -> str:
    """Return a result as the script sees it: text blocks joined with one newline (behaviour 3.1)."""
    if isinstance(result, str):
        return result
    return "\n".join(
        str(block.get("text", "")) if block.get("type") == "text" else NON_TEXT_CONTENT
        for block in result.content
    )
