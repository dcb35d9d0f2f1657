"""The tools behind the helper functions, and how they are described as direct tools (behaviour 3).

Importing this package imports none of ``regex``, ``pathspec``, ``httpx`` and ``trafilatura``: each is
imported by the first call that needs it.
"""

from __future__ import annotations

from .base import Helper, HelperContext, HelperError, HelperResult, Params, content_text
from .external import wrap_external
from .find import find
from .grep import grep
from .ls import ls
from .read import read
from .specs import SPECS, HelperSpec
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

HELPERS: dict[str, Helper] = {
    "read": read,
    "grep": grep,
    "find": find,
    "ls": ls,
    "webfetch": WebFetch(),
}
"""The helpers by name, in the order of the allowlist; ``webfetch`` reads the configuration of the call's folder."""
