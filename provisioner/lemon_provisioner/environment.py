"""The environment that every script and kernel is started with (behaviour 6.5).

Session kernels and per-call interpreters get the same list: the host's environment, less what belongs to the
host itself, plus the run's marker.  This is hygiene, not a sandbox: what is Jupyter's or ours goes, what is the
user's stays, ``PYTHONPATH`` and API keys included.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["RUN_ID_VARIABLE", "child_environment"]

RUN_ID_VARIABLE = "LEMON_RUN_ID"
"""Carries the run's random marker, by which descendants that left the process group are found (behaviour 6.7)."""

_DROPPED = frozenset(
    {
        "PYTEST_CURRENT_TEST",  # the host's test is not the script's
        "JUPYTER_TOKEN",  # opens the server that launched us
        "PYTHONEXECUTABLE",  # would lie to the interpreter about its own path
        "FORCE_COLOR",  # ipykernel sets it; a host that itself runs in a kernel would pass it on
    }
)
_DROPPED_PREFIXES = (
    "LEMON_",  # ours; an outer run's marker must not name an inner run's processes
    "JPY_",  # another kernel's session; the provisioner adds this kernel's own afterwards
    "CLICOLOR",  # set by ipykernel, as above
)


def child_environment(run_id: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a new environment for the processes of run ``run_id``, made from ``base`` (the host's by default).

    ``TERM``, ``PAGER`` and ``MPLBACKEND`` keep the inherited value (behaviour 6.5).
    """
    inherited = os.environ if base is None else base
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    environment[RUN_ID_VARIABLE] = run_id
    return environment
