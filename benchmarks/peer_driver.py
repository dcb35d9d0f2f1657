"""Runs inside the peers' own virtual environment: one workload name per line in, milliseconds per line out.

Started once by ``benchmarks/peers.py``, so that a peer's imports are paid before anything is timed.  A peer that
is not installed or fails answers ``unavailable``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable

LOOP = "total = 0\nfor i in range(100_000):\n    total += i\n"
LINES = "for i in range(100_000): print(i)\n"

workloads: dict[str, Callable[[], object]] = {}
loop = asyncio.new_event_loop()


def hermes() -> None:
    from tools.code_execution_tool import execute_code

    def run(script: str) -> None:
        answer = json.loads(execute_code(script, task_id="benchmark"))
        assert answer["status"] == "success", answer

    run("print(1)")
    workloads["hermes-agent: trivial script"] = lambda: run("print(1)")
    workloads["hermes-agent: 100k-iteration loop"] = lambda: run(LOOP)
    calls = "from hermes_tools import read_file\nfor i in range(20): read_file(__file__)\n"
    run(calls)
    workloads["hermes-agent: script with 20 helper calls"] = lambda: run(calls)


def smolagents() -> None:
    from smolagents.local_python_executor import LocalPythonExecutor

    executor = LocalPythonExecutor([])
    executor.send_tools({})
    executor("1")
    workloads["smolagents: trivial cell"] = lambda: executor("1")
    workloads["smolagents: 100k-iteration loop"] = lambda: executor(LOOP)


def autogen() -> None:
    from autogen_core import CancellationToken
    from autogen_core.code_executor import CodeBlock
    from autogen_ext.code_executors.jupyter import JupyterCodeExecutor

    executor = JupyterCodeExecutor()
    loop.run_until_complete(executor.start())

    def run(code: str) -> None:
        block = CodeBlock(code=code, language="python")
        loop.run_until_complete(executor.execute_code_blocks([block], CancellationToken()))

    async def start() -> None:
        async with JupyterCodeExecutor() as another:
            await another.execute_code_blocks([CodeBlock(code="1", language="python")], CancellationToken())

    run("1")
    workloads["autogen: trivial cell"] = lambda: run("1")
    workloads["autogen: 100k-iteration loop"] = lambda: run(LOOP)
    workloads["autogen: print 100k lines"] = lambda: run(LINES)
    workloads["autogen: start and first cell"] = lambda: loop.run_until_complete(start())


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # peers print
    for peer in (hermes, smolagents, autogen):
        try:
            peer()
        except Exception as error:  # it is not there, or does not work here
            print(f"{peer.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
    print(json.dumps(sorted(workloads)), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        workloads[line.strip()]()
        print((time.perf_counter() - start) * 1000, file=answers, flush=True)


if __name__ == "__main__":
    main()
