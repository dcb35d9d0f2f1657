"""Session kernels against stock ipykernel driven by jupyter_client, side by side."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from lemon_kernel import ExecuteCode, ExecuteCodeConfig, KernelRegistry, Owner, SessionScope, hostloop
from lemon_kernel.session.link import KernelLink

from .harness import Workload, measure, report, timed

CALLS = 200
SERIAL = f"""
from time import perf_counter
times = []
for number in range({CALLS}):
    start = perf_counter()
    read("x" * 20)
    times.append(perf_counter() - start)
print(*times)
"""
SIXTEEN = f"""
from time import perf_counter
import threading
def work():
    for number in range({CALLS} // 4):
        read("x" * 20)
threads = [threading.Thread(target=work) for _ in range(16)]
start = perf_counter()
for thread in threads: thread.start()
for thread in threads: thread.join()
print(16 * ({CALLS} // 4) / (perf_counter() - start))
"""


class Stock:
    """A stock kernel and its client."""

    def __init__(self) -> None:
        self.manager: KernelManager
        self.client: BlockingKernelClient
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def cell(self, code: str = "1", *, idle: bool = True) -> None:
        request = self.client.execute(code, store_history=False)
        while self.client.get_shell_msg(timeout=10)["parent_header"].get("msg_id") != request:
            pass
        if idle:
            self._until_idle(request)

    def shell_round_trip(self) -> None:
        request = self.client.kernel_info()
        while self.client.get_shell_msg(timeout=10)["parent_header"].get("msg_id") != request:
            pass
        self._until_idle(request)

    def control_round_trip(self) -> None:
        """An empty control request and its reply; its busy and idle are read before the next one."""
        message = self.client.session.msg("kernel_info_request")
        self.client.control_channel.send(message)
        while (
            self.client.get_control_msg(timeout=10)["parent_header"].get("msg_id")
            != message["header"]["msg_id"]
        ):
            pass

    def drain_iopub(self) -> None:
        while self.client.iopub_channel.msg_ready():
            self.client.get_iopub_msg(timeout=1)

    def _until_idle(self, request: str) -> None:
        while True:
            message = self.client.get_iopub_msg(timeout=10)
            if (
                message["msg_type"] == "status"
                and message["content"]["execution_state"] == "idle"
                and message["parent_header"].get("msg_id") == request
            ):
                return

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@contextlib.contextmanager
def stock() -> Iterator[Stock]:
    kernel = Stock()
    try:
        yield kernel
    finally:
        kernel.stop()


async def start_ours(folder: str) -> KernelLink:
    loop = asyncio.get_running_loop()
    return await KernelLink.start(
        interpreter=sys.executable, cwd=folder, helpers=["read"], deadline=loop.time() + 30
    )


def pss_mb(pid: int) -> float:
    return psutil.Process(pid).memory_full_info().pss / 1e6


async def echo(params: object, context: object) -> str:
    return "echo"


def main() -> str:
    folder = tempfile.mkdtemp(prefix="lemon-bench-", dir="/tmp")
    registry = KernelRegistry()
    tool = ExecuteCode(
        folder,
        config=ExecuteCodeConfig(
            enabled=True, kernel_mode="session", max_rpc_calls=1_000_000, python_path=sys.executable
        ),
        helpers={"read": echo},
        registry=registry,
        scope=SessionScope("bench", "bench", Owner()),
    )

    def run(script: str) -> str:
        result = hostloop.run(tool.execute({"script": script}))
        assert result.details["persistent"], result.text
        return result.text

    with stock() as peer, asyncio.Runner() as runner:
        run("pass")

        def control() -> float:
            took = timed(peer.control_round_trip)
            time.sleep(0.01)  # its busy and idle
            peer.drain_iopub()
            return took

        rows = measure(
            [
                Workload("stock: trivial cell, reply and idle", lambda: timed(peer.cell)),
                Workload(
                    "session cell (execute() on the host's loop)",
                    lambda: timed(lambda: run("1")),
                    peer="stock: trivial cell, reply and idle",
                    bar=0.6,
                ),
                Workload(
                    "session cell (execute() on the caller's loop)",
                    lambda: timed(lambda: runner.run(tool.execute({"script": "1"}))),
                    peer="stock: trivial cell, reply and idle",
                    bar=0.6,
                ),
                Workload("stock: empty shell round trip", lambda: timed(peer.shell_round_trip)),
                Workload("stock: empty control round trip", control),
                Workload(
                    "print 100k lines",
                    lambda: timed(lambda: run("for i in range(100_000): print(i)")),
                    peer="stock: print 100k lines",
                ),
                Workload(
                    "stock: print 100k lines",
                    lambda: timed(lambda: peer.cell("for i in range(100_000): print(i)")),
                ),
            ],
            rounds=15,
        )
        calls = measure(
            [
                Workload("stock: empty control round trip", control),
                Workload(
                    "echo helper call in a session cell",
                    lambda: [statistics.median(float(word) * 1000 for word in run(SERIAL).split())],
                    peer="stock: empty control round trip",
                    bar=0.8,
                ),
                Workload(
                    "16 threads calling",
                    lambda: [float(run(SIXTEEN))],
                    unit="calls/s",
                    bar=1500,
                    at_least=True,
                ),
            ],
            rounds=11,
        )
        rows += [row for row in calls if not row.name.startswith("stock")]
    hostloop.run(registry.aclose())

    links: list[KernelLink] = []
    peers: list[Stock] = []
    stops: list[float] = []
    stock_stops: list[float] = []

    def start_one() -> float:
        start = time.perf_counter()
        link = hostloop.run(start_ours(folder))
        took = (time.perf_counter() - start) * 1000
        stops.append(timed(lambda: hostloop.run(link.stop())))
        return took

    def start_stock() -> float:
        start = time.perf_counter()
        kernel = Stock()
        took = (time.perf_counter() - start) * 1000
        stock_stops.append(timed(kernel.stop))
        return took

    async def eight() -> None:
        links.extend(await asyncio.gather(*(start_ours(folder) for _ in range(8))))

    def eight_ours() -> float:
        took = timed(lambda: hostloop.run(eight()))
        while links:
            hostloop.run(links.pop().stop())
        return took

    def eight_stock() -> float:
        with ThreadPoolExecutor(8) as pool:
            took = timed(lambda: peers.extend(pool.map(lambda _: Stock(), range(8))))
        while peers:
            peers.pop().stop()
        return took

    rows += measure(
        [
            Workload("stock: start with wait_for_ready", start_stock),
            Workload(
                "cold start to ready, through the provisioner",
                start_one,
                peer="stock: start with wait_for_ready",
                bar=0.65,
            ),
        ],
        rounds=9,
    )
    rows += measure(
        [
            Workload("stock: 8 starts in parallel", eight_stock),
            Workload("8 starts in parallel", eight_ours, peer="stock: 8 starts in parallel"),
        ],
        rounds=3,
        warm_up=1,
    )

    def pss_ours() -> float:
        link = hostloop.run(start_ours(folder))
        figure = pss_mb(link.pid)
        hostloop.run(link.stop())
        return figure

    def pss_stock() -> float:
        with stock() as kernel:
            return pss_mb(kernel.manager.provisioner.process.pid)

    ours = iter(stops)
    theirs = iter(stock_stops)
    rows += measure(
        [
            Workload("stock: stop", lambda: next(theirs)),
            Workload("stop, death confirmed", lambda: next(ours), peer="stock: stop"),
        ],
        rounds=7,
        warm_up=1,
    )
    rows += measure(
        [
            Workload("stock: PSS of an idle kernel", pss_stock, unit="MB"),
            Workload("PSS of an idle kernel", pss_ours, unit="MB", peer="stock: PSS of an idle kernel"),
        ],
        rounds=3,
        warm_up=1,
    )
    pathlib.Path(folder).rmdir()
    return report("Session", rows)
