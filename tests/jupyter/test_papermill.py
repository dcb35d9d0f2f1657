"""papermill: parameters, helpers and failures on the kernel ``lemon``."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest

from ..kernels import workspaces


def book(*cells: str) -> nbformat.NotebookNode:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    made.cells[0].metadata["tags"] = ["parameters"]
    made.metadata["kernelspec"] = {"name": "lemon", "display_name": "Lemon", "language": "python"}
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("first\nsecond\n")
    return tmp_path


def test_parameters_and_helpers(folder: Path) -> None:
    """A notebook with parameters runs, calls helpers in the folder it is given, and keeps its blocks."""
    source, target = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(book("name = 'none'", "text(read(name))"), source)
    papermill.execute_notebook(
        source, target, parameters={"name": "a.txt"}, cwd=folder, progress_bar=False, log_output=False
    )
    shown = nbformat.read(target, as_version=4).cells[-1].outputs[0].data

    assert "first" in shown["text/plain"]
    assert shown["application/vnd.lemon.text+json"]["n"] == 1


def test_failure(folder: Path) -> None:
    """A ToolError ends the run as papermill's own error, and nothing of the kernel is left."""
    before = workspaces()
    source, target = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(book("name = 'missing.txt'", "read(name)"), source)
    with pytest.raises(papermill.PapermillExecutionError, match="ToolError"):
        papermill.execute_notebook(source, target, cwd=folder, progress_bar=False)

    assert workspaces() == before
