"""`make demo`: run the survey over the standard library's own source and say what it cost."""

from __future__ import annotations

import pathlib
import sysconfig

from lemon_kernel import ExecuteCode, ExecuteCodeConfig, ToolResult, ToolUpdate

SURVEY = pathlib.Path(__file__).with_name("survey.py")


def show(title: str, result: ToolResult) -> None:
    details = result.details
    print(f"--- {title}")
    print(result.text)
    print(
        f"--- {details['rpc_calls']} helper calls, {details['rpc_bytes']} bytes stayed out of the transcript, "
        f"{len(result.text.encode())} bytes came back, {details['duration_ms']} ms\n"
    )


def main() -> int:
    standard_library = sysconfig.get_path("stdlib")
    print(f"surveying {standard_library}")
    config = ExecuteCodeConfig(enabled=True)
    tool = ExecuteCode(standard_library, config=config)

    def progress(update: ToolUpdate) -> None:
        print(update.text)

    result = tool.run_sync({"script": SURVEY.read_text()}, on_update=progress)
    show("per call: one script in a fresh process", result)
    return 0 if "reason" not in result.details else 1


if __name__ == "__main__":
    raise SystemExit(main())
