"""``python -m lemon_kernel.cli``: the command line where its console script is not on PATH."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
