"""The kernel: ipykernel's, with plain Python cells for agents and the bridge to the host's tools.

The only part of the shim that imports ipykernel; this module itself imports nothing, because the host reads the
names below as well.
"""

from __future__ import annotations

NO_IPYKERNEL_STATUS = 97
"""Exit status of an interpreter that has no usable ipykernel."""

GRANT_METADATA = "lemon_cell"
"""Key of an agent cell's grant in the metadata of its ``execute_request``."""

SESSION_FLAG = "--session-launch"
"""Argument by which a session kernel knows that it is one (behaviour 6.5)."""

TEMPLATE_FLAG = "--template"
"""First argument of the process that session kernels are forked from (``template.py``)."""

IPYKERNEL_FROM, IPYKERNEL_BELOW = (7, 4), (8,)
"""The versions of ipykernel that can be used; below 7.4 messages can be lost for good (jupyter-facts 0.2)."""

IPYKERNEL_REQUIREMENT = f"ipykernel>={'.'.join(map(str, IPYKERNEL_FROM))},<{IPYKERNEL_BELOW[0]}"
