"""`python -m benchmarks [suite ...]`: measure, print the tables, write Markdown and JSON."""

from __future__ import annotations

import importlib
import os
import sys

from .harness import RESULTS

SUITES = ("per_call", "session", "notebook", "slopes")
MORE = ("peers",)


def main(names: list[str]) -> int:
    os.environ.pop("PYTHONUNBUFFERED", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in names or SUITES:
        if name not in SUITES + MORE:
            print(f"no suite {name!r}; there are {', '.join(SUITES + MORE)}", file=sys.stderr)
            return 2
        print(importlib.import_module(f".{name}", __package__).main())
    print(f"written to {RESULTS}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
