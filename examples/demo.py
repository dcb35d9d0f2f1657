"""`make demo`: run the survey over the standard library's own source and say what it cost."""

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


def main() -> int:
    folder = sysconfig.get_path("stdlib")
    print(f"surveying {folder}\n")
    tool = ExecuteCode(folder, config=ExecuteCodeConfig(enabled=True))
    results = [tool.run_sync({"script": SURVEY.read_text()}, on_update=progress)]
    show("per call: one script in a fresh process", results[0])
    for number, result in enumerate(asyncio.run(survey_in_cells(folder)), start=1):
        show(f"session: cell {number} on a live kernel", result)
        results.append(result)
    return 0 if all("reason" not in result.details for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
