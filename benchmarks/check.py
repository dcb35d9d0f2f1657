"""`make bench-check`: fail when a ratio got worse than the committed baseline by more than 30 %.

A ratio counts as worse when it is so in two of three repeats, each the median of five interleaved rounds: one
noisy minute of a machine is no regression.  ``python -m benchmarks.check --write`` measures a new baseline.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections import Counter

from . import per_call, session
from .harness import Row

BASELINE = pathlib.Path(__file__).with_name("baseline.json")
ROUNDS = 5
REPEATS = 3
TOLERANCE = 1.3


def ratios() -> dict[str, float]:
    """Return name -> ratio to its peer, for every line that has one."""
    rows: list[Row] = [*per_call.rows(ROUNDS), *session.rows(ROUNDS)]
    return {row.name: row.ratio for row in rows if row.ratio is not None}


def main(arguments: list[str]) -> int:
    if "--write" in arguments:
        BASELINE.write_text(json.dumps(ratios(), indent=2, sort_keys=True) + "\n")
        print(f"written: {BASELINE.name}")
        return 0
    baseline: dict[str, float] = json.loads(BASELINE.read_text())
    worse: Counter[str] = Counter()
    for repeat in range(1, REPEATS + 1):
        for name, ratio in ratios().items():
            expected = baseline.get(name)
            if expected is None:
                continue
            verdict = ratio > expected * TOLERANCE
            worse[name] += verdict
            print(f"{repeat}  {name}: {ratio:.2f}x, baseline {expected:.2f}x{'  WORSE' if verdict else ''}")
    failed = sorted(name for name, times in worse.items() if times >= 2)
    for name in failed:
        print(
            f"regression: {name} is worse than the baseline by more than 30 % in {worse[name]} of {REPEATS}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
