"""`make demo`: survey the standard library's own source, say what it cost, and run the first notebook."""

from __future__ import annotations

import asyncio
import pathlib
import sys
import sysconfig

from lemon_kernel import (
    ExecuteCode,
    ExecuteCodeConfig,
    KernelRegistry,
    Owner,
    SessionScope,
    ToolResult,
    ToolUpdate,
)

SURVEY = pathlib.Path(__file__).with_name("survey.py")
NOTEBOOK = pathlib.Path(__file__).parents[1] / "notebooks" / "01-first-run.ipynb"
NEXT_CELL = "# --- next cell"


def show(title: str, result: ToolResult) -> None:
    details = result.details
    print(f"--- {title}")
    print(result.text)
    print(
        f"--- {details['rpc_calls']} helper calls, {details['rpc_bytes']} bytes stayed out of the transcript, "
        f"{len(result.text.encode())} bytes came back, {details['duration_ms']} ms\n"
    )


def progress(update: ToolUpdate) -> None:
    print(update.text)


async def survey_in_cells(folder: str) -> list[ToolResult]:
    """Run the survey as cells on one kernel: the second uses the first's variables."""
    async with KernelRegistry() as registry, Owner() as owner:
        tool = ExecuteCode(
            folder,
            # the demo's own interpreter: a session kernel needs ipykernel, which python3 on PATH may not have
            config=ExecuteCodeConfig(enabled=True, kernel_mode="session", python_path=sys.executable),
            registry=registry,
            scope=SessionScope("demo", "demo", owner),
        )
        return [
            await tool.execute({"script": cell}, on_update=progress)
            for cell in SURVEY.read_text().split(NEXT_CELL)
        ]


def run_notebook(path: pathlib.Path) -> None:
    """Run a notebook on the kernel ``lemon``, as CI does, and show its text() blocks."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=60, resources={"metadata": {"path": str(path.parent)}}).execute()
    print(f"--- notebook: {path.name} through nbclient, and what text() showed in it")
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            block = output.get("data", {}).get("application/vnd.lemon.text+json")
            if block is not None:
                print(block["text"])


def main() -> int:
    folder = sysconfig.get_path("stdlib")
    print(f"surveying {folder}\n")
    tool = ExecuteCode(folder, config=ExecuteCodeConfig(enabled=True))
    results = [tool.run_sync({"script": SURVEY.read_text()}, on_update=progress)]
    show("per call: one script in a fresh process", results[0])
    for number, result in enumerate(asyncio.run(survey_in_cells(folder)), start=1):
        show(f"session: cell {number} on a live kernel", result)
        results.append(result)
    run_notebook(NOTEBOOK)
    return 0 if all("reason" not in result.details for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
