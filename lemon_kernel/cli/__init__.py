"""``lemon-kernel`` (also ``jupyter lemon``): the command line.

This module is what the console script imports, so it imports next to nothing itself; the sub-commands are
imported when they are named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED_STATUS = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (behaviour 2.10).

    0 ok, 1 the script failed or timed out, 2 usage, 3 refused, 130 interrupted.
    """
    try:
        from .app import launch

        return launch(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
