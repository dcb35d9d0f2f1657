"""What one more costs: per call up to 10,000 calls, per byte of output up to 100 MB, per live kernel up to 16."""

from __future__ import annotations

import asyncio
import pathlib
import sys
import sysconfig
import tempfile
import time

import psutil

from lemon_kernel import ExecuteCode, ExecuteCodeConfig, KernelRegistry, Owner, SessionScope, hostloop

from .harness import Row, Workload, measure, report, without_spill

SURVEY = pathlib.Path(__file__).parents[1] / "examples" / "survey.py"
BYTES_PER_TOKEN = 4
"""A rule of thumb for English and code; what a transcript would have held."""


async def echo(params: object, context: object) -> str:
    return "echo"


def main() -> str:
    with tempfile.TemporaryDirectory(prefix="lemon-bench-") as folder:
        rows = [*_per_call(folder), *_per_byte(folder), *_per_kernel(folder), *_transcript()]
    return report("Slopes", rows)


def _config(**values: object) -> ExecuteCodeConfig:
    return ExecuteCodeConfig(enabled=True, python_path=sys.executable, max_rpc_calls=100_000, **values)


def _per_call(folder: str) -> list[Row]:
    tool = ExecuteCode(folder, config=_config(), helpers={"read": echo})

    def per_call_us(calls: int) -> float:
        script = f"import time\ns = time.perf_counter()\nfor i in range({calls}): read('x')\nprint(time.perf_counter() - s)"
        return float(hostloop.run(tool.execute({"script": script})).text) / calls * 1e6

    smallest = "per helper call, 100 calls in a run"
    return measure(
        [
            Workload(
                f"per helper call, {calls} calls in a run",
                lambda calls=calls: per_call_us(calls),
                unit="us",
                peer=None if calls == 100 else smallest,
                bar=None if calls == 100 else 1.3,
            )
            for calls in (100, 1000, 10_000)
        ],
        rounds=5,
        warm_up=1,
    )


def _per_byte(folder: str) -> list[Row]:
    tool = ExecuteCode(folder, config=_config())

    def per_mb_ms(megabytes: int) -> float:
        script = f"import os\nchunk = (b'x' * 99 + b'\\n') * 10_000\nfor i in range({megabytes}): os.write(1, chunk)"
        start = time.perf_counter()
        result = hostloop.run(tool.execute({"script": script}))
        took = (time.perf_counter() - start) * 1000
        without_spill(result)
        return took / megabytes

    smallest = "per MB of output, 10 MB in a run"
    return measure(
        [
            Workload(
                f"per MB of output, {megabytes} MB in a run",
                lambda megabytes=megabytes: per_mb_ms(megabytes),
                peer=None if megabytes == 10 else smallest,
                bar=None if megabytes == 10 else 1.3,
            )
            for megabytes in (10, 100)
        ],
        rounds=3,
        warm_up=1,
    )


def _per_kernel(folder: str) -> list[Row]:
    """Return what the n-th live kernel costs: time to its first answer, its own and the host's memory."""
    host = psutil.Process()
    figures: dict[str, list[float]] = {}

    async def round_of(kernels: int) -> None:
        async with KernelRegistry() as registry, Owner() as owner:
            start = time.perf_counter()
            before = host.memory_info().rss
            results = []
            for number in range(kernels):
                tool = ExecuteCode(
                    folder,
                    config=_config(kernel_mode="session"),
                    registry=registry,
                    scope=SessionScope(f"bench-{number}", "bench", owner),
                )
                results.append(await tool.execute({"script": "import os; print(os.getpid())"}))
            took = (time.perf_counter() - start) * 1000
            pss = [psutil.Process(int(result.text)).memory_full_info().pss / 1e6 for result in results]
            figures.setdefault(f"start and first cell, mean of {kernels}", []).append(took / kernels)
            figures.setdefault(f"PSS of a kernel, mean of {kernels} alive", []).append(sum(pss) / kernels)
            figures.setdefault(f"host's growth per kernel, {kernels} alive", []).append(
                (host.memory_info().rss - before) / 1e6 / kernels
            )

    for _ in range(3):
        for kernels in (1, 4, 16):
            asyncio.run(round_of(kernels))
    rows = []
    for name, samples in figures.items():
        ordered = sorted(samples)
        unit = "ms" if name.startswith("start") else "MB"
        rows.append(Row(name, unit, len(ordered), ordered[len(ordered) // 2], ordered[0], ordered[-1]))
    return rows


def _transcript() -> list[Row]:
    tool = ExecuteCode(sysconfig.get_path("stdlib"), config=_config())
    script = SURVEY.read_text()
    kept: list[int] = []

    def survey() -> float:
        result = hostloop.run(tool.execute({"script": script}))
        figure = result.details["rpc_bytes"]
        assert isinstance(figure, int)
        kept.append(figure - len(result.text.encode()))
        return float(str(result.details["duration_ms"]))

    rows = measure([Workload("the demo's survey of the standard library", survey)], rounds=3, warm_up=1)
    rows[0].note = f"about {kept[-1] // BYTES_PER_TOKEN:,} tokens kept out of the transcript"
    return rows
