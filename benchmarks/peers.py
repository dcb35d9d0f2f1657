"""The closest peers, each doing the same work, interleaved with ours; `make bench-peers` installs them.

They run in a virtual environment of their own, ``.venv-peers``.  ``llm-sandbox`` needs Docker and is left out.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import tempfile
from collections.abc import Callable

from lemon_kernel import ExecuteCode, ExecuteCodeConfig, KernelRegistry, Owner, SessionScope, hostloop

from .harness import Row, Workload, clean_environment, measure, report, timed, without_spill
from .peer_driver import LINES, LOOP

ROOT = pathlib.Path(__file__).parents[1]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"

OURS: dict[str, tuple[str, str]] = {
    "trivial script": ("per_call", "print(1)"),
    "script with 20 helper calls": ("per_call", "for i in range(20): read('trivial.txt')"),
    "trivial cell": ("session", "1"),
    "100k-iteration loop": ("session", LOOP),
    "print 100k lines": ("session", LINES),
}
"""Workload -> our mode and script."""


IN_PROCESS = {"smolagents: trivial cell"}


def main() -> str:
    if not PYTHON.exists():
        return "peers are not installed: make bench-peers\n"
    with tempfile.TemporaryDirectory(prefix="lemon-bench-") as folder:
        pathlib.Path(folder, "trivial.txt").write_text("one line\n")
        environment = {**clean_environment(), "HOME": folder}
        driver = subprocess.Popen(
            [str(PYTHON), str(ROOT / "benchmarks" / "peer_driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env=environment,
        )
        assert driver.stdin is not None
        assert driver.stdout is not None
        ask, answers = driver.stdin, driver.stdout
        try:
            names: list[str] = json.loads(answers.readline())

            def theirs(name: str) -> float:
                print(name, file=ask, flush=True)
                return float(answers.readline())

            return report("Peers", _measure(folder, names, theirs))
        finally:
            driver.stdin.close()
            driver.wait(30)
            driver.stdout.close()


def _measure(folder: str, names: list[str], theirs: Callable[[str], float]) -> list[Row]:
    """Return the rows of one interleaved run: each peer's workload, and ours against it."""
    registry = KernelRegistry()
    modes = {
        mode: ExecuteCode(
            folder,
            config=ExecuteCodeConfig(enabled=True, kernel_mode=mode, python_path=str(PYTHON)),
            registry=registry,
            scope=SessionScope("bench", "bench", Owner()),
        )
        for mode in ("per_call", "session")
    }

    def run(mode: str, script: str) -> None:
        result = without_spill(hostloop.run(modes[mode].execute({"script": script})))
        assert "reason" not in result.details, result.text

    run("session", "1")
    workloads = []
    for what, (mode, script) in OURS.items():
        for name in names:
            if not name.endswith(what):
                continue
            workloads.append(Workload(name, lambda name=name: theirs(name)))
            workloads.append(
                Workload(
                    f"ours: {what}, beside {name.partition(':')[0]}",
                    lambda mode=mode, script=script: timed(lambda: run(mode, script)),
                    peer=name,
                    bar=None if name in IN_PROCESS else 1.0,
                    note="the peer interprets in the host's own process" if name in IN_PROCESS else "",
                )
            )
    rows = measure(workloads, rounds=7, warm_up=1)
    hostloop.run(registry.aclose())
    return rows
