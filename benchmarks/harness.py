"""Interleaved rounds, medians and ratios.

These machines are noisy: the same figure moves by a quarter from minute to minute.  So every workload of a
comparison runs once per round, in an order that is shuffled per round, and only ratios of medians of one run
are compared with a bar.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from lemon_kernel import ToolResult

RESULTS = pathlib.Path(__file__).parent / "results"

CALLS = 200
ECHO_SCRIPT = f"""
from time import perf_counter
times = []
for number in range({CALLS}):
    start = perf_counter()
    read("x" * 20)
    times.append(perf_counter() - start)
print(*times)
"""


@dataclass
class Row:
    """One measured workload: `p50` of `n` samples in `unit`, and the ratio to its peer where there is one."""

    name: str
    unit: str
    n: int
    p50: float
    p10: float
    p90: float
    peer: str | None = None
    ratio: float | None = None
    bar: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def holds(self) -> bool | None:
        value = self.ratio if self.peer is not None else self.p50
        if self.bar is None or value is None:
            return None
        return value >= self.bar if self.at_least else value <= self.bar


@dataclass
class Workload:
    """Something to time: `sample` returns one figure in `unit` (or several of them)."""

    name: str
    sample: Callable[[], float | list[float]]
    unit: str = "ms"
    peer: str | None = None
    bar: float | None = None
    at_least: bool = False
    note: str = ""
    figures: list[float] = field(default_factory=list)


def measure(workloads: list[Workload], rounds: int, *, warm_up: int = 2) -> list[Row]:
    """Run every workload once per round in shuffled order; return a row for each."""
    order = list(workloads)
    for round_number in range(rounds + warm_up):
        random.shuffle(order)
        for workload in order:
            figure = workload.sample()
            if round_number >= warm_up:
                workload.figures += figure if isinstance(figure, list) else [figure]
    medians = {workload.name: statistics.median(workload.figures) for workload in workloads}
    rows = []
    for workload in workloads:
        figures = sorted(workload.figures)
        peer_median = medians.get(workload.peer) if workload.peer is not None else None
        rows.append(
            Row(
                workload.name,
                workload.unit,
                len(figures),
                medians[workload.name],
                figures[len(figures) // 10],
                figures[min(len(figures) - 1, len(figures) * 9 // 10)],
                workload.peer,
                medians[workload.name] / peer_median if peer_median else None,
                workload.bar,
                workload.at_least,
                workload.note,
            )
        )
    return rows


def timed(work: Callable[[], object]) -> float:
    """Return how many milliseconds `work` took."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def without_spill(result: ToolResult) -> ToolResult:
    """Remove the spill file of a run that printed much: a benchmark needs no 24 hours of it."""
    spill = result.details.get("full_output_path")
    if isinstance(spill, str):
        os.unlink(spill)
    return result


def clean_environment() -> dict[str, str]:
    """Return the environment a peer is started with: this one, less what would skew it."""
    skewing = {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTEST_CURRENT_TEST"}
    return {key: value for key, value in os.environ.items() if key not in skewing}


def report(title: str, rows: list[Row]) -> str:
    """Return the Markdown table of `rows` and write it, and the JSON, to ``benchmarks/results/``."""
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, CPython {platform.python_version()}"
    lines = [
        f"## {title}",
        "",
        f"{machine}; n and spread (p10-p90) per line; ratios are of medians, interleaved in this run.",
        "",
        "| what | p50 | p10-p90 | n | ratio to | ratio | bar | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.{2 if row.ratio >= 0.01 else 5}f}x"
        sign = "at least " if row.at_least else ""
        bar = "" if row.bar is None else f"{sign}{row.bar:g}" + ("x" if row.peer else f" {row.unit}")
        verdict = {None: "", True: "holds", False: "**misses**"}[row.holds]
        lines.append(
            f"| {row.name} | {row.p50:.3f} {row.unit} | {row.p10:.3f}-{row.p90:.3f} | {row.n} "
            f"| {row.peer or ''} | {ratio} | {bar} | {verdict} {row.note} |"
        )
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(exist_ok=True)
    stem = title.lower().replace(" ", "-")
    (RESULTS / f"{stem}.md").write_text(text)
    chart(title, rows, RESULTS / f"{stem}.png")
    document = {
        "title": title,
        "machine": machine,
        "python": sys.version,
        "rows": [asdict(row) for row in rows],
    }
    (RESULTS / f"{stem}.json").write_text(json.dumps(document, indent=2) + "\n")
    return text


def chart(title: str, rows: list[Row], path: pathlib.Path) -> None:
    """Draw the ratios of `rows` as bars, each with a line where its bar is; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [row for row in reversed(rows) if row.ratio is not None]
    if not shown:
        return
    figure, axes = plt.subplots(figsize=(9, 1 + 0.4 * len(shown)))
    names = [f"{row.name}\n(to {row.peer})" for row in shown]
    colours = ["tab:red" if row.holds is False else "tab:green" for row in shown]
    axes.barh(names, [row.ratio or 0 for row in shown], color=colours)
    for place, row in enumerate(shown):
        axes.text(row.ratio or 0, place, f" {row.ratio:.2f}x", va="center", fontsize=7)
        if row.bar is not None:
            axes.vlines(row.bar, place - 0.4, place + 0.4, color="black")
    axes.set_xscale("log")
    axes.set_xlabel("ratio to the peer in the same run (a black line: the bar)")
    axes.set_title(title)
    axes.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
