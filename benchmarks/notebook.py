"""A notebook of 200 cells through nbclient: helper calls on ``lemon`` against none of them on stock ``python3``.

The bar is issue 6's: at most 1.1 times stock's time plus 3 ms per helper call.  The harness compares ratios, so the
3 ms are taken off before; the line above has the time as it was.  Times are those of ``NotebookClient.execute()``,
from the kernel's start to its end.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
import warnings

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from .harness import Workload, measure, report

CELLS = 200
ALLOWANCE_MS = 3 * CELLS
SOURCE = "def total(lemons):\n    return lemons * 0.45\n"
PLAIN = [f"found = {SOURCE!r}\nprint({number}, len(found))" for number in range(CELLS)]
CALLING = [f"found = read('till.py')\nprint({number}, len(found))" for number in range(CELLS)]


def execute(cells: list[str], kernel_name: str, folder: str) -> float:
    """Return how many milliseconds a notebook took; fail unless every cell's output is there, in order."""
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        notebook, kernel_name=kernel_name, timeout=60, resources={"metadata": {"path": folder}}
    )
    start = time.perf_counter()
    client.execute()
    took = (time.perf_counter() - start) * 1000
    shown = ["".join(output["text"] for output in cell.outputs) for cell in notebook.cells]
    for number, text in enumerate(shown):
        assert [int(word) for word in text.split()][:1] == [number], (number, text)
        assert len(text.splitlines()) == 1, (number, text)
    return took


def main() -> str:
    warnings.simplefilter("ignore")  # stock kernels' warnings about their transport are not what is measured
    with tempfile.TemporaryDirectory(prefix="lemon-bench-", dir="/tmp") as folder:
        pathlib.Path(folder, "till.py").write_text(SOURCE)
        # one run is counted twice: as it was, and without what the calls may cost
        calling: list[float] = []

        def with_calls() -> float:
            calling.append(execute(CALLING, "lemon", folder))
            return calling[-1] - ALLOWANCE_MS

        peer = f"stock python3, {CELLS} cells without calls"
        rows = measure(
            [
                Workload(peer, lambda: execute(PLAIN, "python3", folder)),
                Workload(
                    "lemon, the same cells without calls", lambda: execute(PLAIN, "lemon", folder), peer=peer
                ),
                Workload(
                    f"lemon, {CELLS} cells with a read() each, less 3 ms per call",
                    with_calls,
                    peer=peer,
                    bar=1.1,
                ),
            ],
            rounds=5,
            warm_up=1,
        )
        taken = iter(calling[1:])
        rows[-1:-1] = measure(
            [Workload(f"lemon, {CELLS} cells with a read() each", lambda: next(taken))], rounds=5, warm_up=0
        )
    return report("Notebook", rows)
