"""Entry point: ``python -P -m lemon_shim.kernel -f FILE``, and what the staged folder runs.

A template (``template.py``) is the same program, stopped between its imports and its set-up.
"""

from __future__ import annotations

import gc
import os
import sys

from lemon_shim.kernel import (
    IPYKERNEL_BELOW,
    IPYKERNEL_FROM,
    IPYKERNEL_REQUIREMENT,
    NO_IPYKERNEL_STATUS,
    TEMPLATE_FLAG,
)


def main() -> None:
    """Run the kernel; exit with ``NO_IPYKERNEL_STATUS`` where ipykernel is missing or too old."""
    umask = os.umask(0o077)  # sockets and IPython's files are nobody else's business
    try:
        import ipykernel

        usable = IPYKERNEL_FROM <= ipykernel.version_info[:2] < IPYKERNEL_BELOW  # type: ignore[attr-defined]
    except ImportError:
        usable = False
    if not usable:
        command = f"{sys.executable} -m pip install '{IPYKERNEL_REQUIREMENT}'"
        sys.stderr.write(f"the lemon kernel needs {IPYKERNEL_REQUIREMENT}: {command}\n")
        raise SystemExit(NO_IPYKERNEL_STATUS)
    from lemon_shim.kernel.app import LemonKernelApp

    if sys.argv[1:2] == [TEMPLATE_FLAG]:
        from lemon_shim.kernel import template

        umask = template.serve(int(sys.argv[2]))  # returns in each forked kernel

    gc.freeze()  # modules stay: no collection need look at them
    app = LemonKernelApp.instance()
    app.initialize()
    os.umask(umask)
    app.start()


if __name__ == "__main__":
    main()
