"""The runnable tour in ``notebooks/``: each runs headless, in time, and ships without outputs (issue 6, item 5)."""

from __future__ import annotations

import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ..kernels import wait_until, workspaces
from .front_end import live_hosts

FOLDER = Path(__file__).parents[2] / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_S = 20


def outputs(book: nbformat.NotebookNode) -> str:
    """Everything that a notebook shows, as text."""
    parts = []
    for cell in book.cells:
        for output in cell.get("outputs", []):
            parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(parts)


def test_there_are_four() -> None:
    """The tour is the four notebooks that the README names."""
    assert [book.stem for book in BOOKS] == [
        "01-first-run",
        "02-codebase-survey",
        "03-debug-an-agents-script",
        "04-drive-it-like-an-agent",
    ]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_ships_clean(path: Path) -> None:
    """No outputs, no counts, the kernel ``lemon``, and a first cell that says what it teaches."""
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)

    assert book.metadata.kernelspec.name == "lemon"
    assert book.cells[0].cell_type == "markdown"
    assert "This notebook teaches" in book.cells[0].source
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if "outputs" in cell)


EXPECTED = {
    "01-first-run": ["functions in json", "read says: File not found"],
    "02-codebase-survey": ["most imported: ", "files read"],
    "03-debug-an-agents-script": [
        "invalid literal for int()",
        "'reason': 'exit'",
        "[['bob', 'n/a']]",
        "{'ann': 15, 'bob': 0}",
        "'kernel_reused': True",
        "call 0 was made",
        "rpc call limit exceeded (max 2 calls per script)",
    ],
    "04-drive-it-like-an-agent": [
        "'done'], 'ok')",
        "ToolError: File not found",
        "(['started'], 'KeyboardInterrupt: ')",
        "alive: False",
    ],
}


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_runs_headless(path: Path) -> None:
    """Runs through nbclient in under 20 s, shows what it says it shows, and leaves nothing behind."""
    book = nbformat.read(path, as_version=4)
    hosts, folders = live_hosts(), workspaces()
    started = time.monotonic()
    NotebookClient(book, timeout=MOST_S, resources={"metadata": {"path": str(FOLDER)}}).execute()
    elapsed_s = time.monotonic() - started
    shown = outputs(book)

    for phrase in EXPECTED[path.stem]:
        assert phrase in shown
    assert elapsed_s < MOST_S
    wait_until(lambda: live_hosts() == hosts and workspaces() == folders)
