"""How scripts and kernels are launched, kept apart and ended; what Jupyter loads as ``lemon-provisioner``.

Importing the package imports nothing else: a per-call run needs neither Jupyter nor traitlets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .provisioner import LemonProvisioner

__all__ = ["ColdStartReason", "LemonProvisioner"]

ColdStartReason = Literal[
    "threads", "environment", "age", "fork_error", "no_answer", "unsupported", "unknown"
]
"""Why a kernel was started from scratch where a template might have been forked (behaviour 9.1).

Here, because the host's telemetry says it too and must not load :mod:`.templates` for that.
"""


def __getattr__(name: str) -> object:
    if name == "LemonProvisioner":
        from .provisioner import LemonProvisioner

        return LemonProvisioner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
