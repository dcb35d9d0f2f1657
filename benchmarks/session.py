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
from lemon_provisioner.environment import child_environment
from lemon_provisioner.process import new_run_id
from lemon_provisioner.templates import Launch, Templates

from lemon_kernel import ExecuteCode, ExecuteCodeConfig, KernelRegistry, Owner, SessionScope, hostloop
from lemon_kernel.session.link import KernelLink

from .floor import Floor
from .harness import CALLS, ECHO_SCRIPT, Row, Workload, measure, report, timed, without_spill

CELLS = 10
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


async def start_ours(folder: str, templates: Templates | None = None) -> KernelLink:
    loop = asyncio.get_running_loop()
    return await KernelLink.start(
        interpreter=sys.executable,
        cwd=folder,
        helpers=["read"],
        deadline=loop.time() + 30,
        templates=templates,
    )


def pss_mb(pid: int) -> float:
    return psutil.Process(pid).memory_full_info().pss / 1e6


async def echo(params: object, context: object) -> str:
    return "echo"


def main() -> str:
    return report("Session", rows())


def rows(rounds: int | None = None) -> list[Row]:
    """Measure and return every line; `rounds` overrides how often each is sampled."""
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
        result = without_spill(hostloop.run(tool.execute({"script": script})))
        assert result.details["persistent"], result.text
        return result.text

    with stock() as peer, asyncio.Runner() as runner:
        run("pass")

        def control() -> float:
            took = timed(peer.control_round_trip)
            time.sleep(0.01)  # its busy and idle
            peer.drain_iopub()
            return took

        # a few cells in a row, apart from the heavy workloads: an agent's cells follow one another, too
        found = measure(
            [
                Workload(
                    "stock: trivial cell, reply and idle", lambda: [timed(peer.cell) for _ in range(CELLS)]
                ),
                Workload(
                    "session cell (execute() on the host's loop)",
                    lambda: [timed(lambda: run("1")) for _ in range(CELLS)],
                    peer="stock: trivial cell, reply and idle",
                    bar=0.3,
                ),
                Workload(
                    "session cell (execute() on the caller's loop)",
                    lambda: [timed(lambda: runner.run(tool.execute({"script": "1"}))) for _ in range(CELLS)],
                    peer="stock: trivial cell, reply and idle",
                    bar=0.3,
                ),
            ],
            rounds=rounds or 15,
        )
        found += measure(
            [
                Workload("stock: empty shell round trip", lambda: timed(peer.shell_round_trip)),
                Workload("stock: empty control round trip", control),
                Workload(
                    "print 100k lines",
                    lambda: timed(lambda: run("for i in range(100_000): print(i)")),
                    peer="stock: print 100k lines",
                    bar=0.3,
                ),
                Workload(
                    "stock: print 100k lines",
                    lambda: timed(lambda: peer.cell("for i in range(100_000): print(i)")),
                ),
            ],
            rounds=rounds or 15,
        )
        calls = measure(
            [
                Workload("stock: empty control round trip", control),
                Workload(
                    "echo helper call in a session cell",
                    lambda: [statistics.median(float(word) * 1000 for word in run(ECHO_SCRIPT).split())],
                    peer="stock: empty control round trip",
                    bar=0.45,
                ),
                Workload(
                    "16 threads calling",
                    lambda: [float(run(SIXTEEN))],
                    unit="calls/s",
                    bar=2500,
                    at_least=True,
                ),
            ],
            rounds=rounds or 11,
        )
        found += [row for row in calls if not row.name.startswith("stock")]
    hostloop.run(registry.aclose())

    links: list[KernelLink] = []
    peers: list[Stock] = []
    pss: dict[bool, list[float]] = {True: [], False: []}
    stock_pss: list[float] = []
    stops: list[float] = []
    stock_stops: list[float] = []

    fallbacks: list[str] = []
    templates = Templates(on_fallback=fallbacks.append)
    launch = Launch([sys.executable], child_environment(run_id := new_run_id()), folder, run_id, -1)
    assert hostloop.run(templates.warm(launch))

    def start_one(templates: Templates | None = None) -> float:
        start = time.perf_counter()
        link = hostloop.run(start_ours(folder, templates))
        took = (time.perf_counter() - start) * 1000
        stops.append(timed(lambda: hostloop.run(link.stop())))
        return took

    def start_stock() -> float:
        start = time.perf_counter()
        kernel = Stock()
        took = (time.perf_counter() - start) * 1000
        stock_stops.append(timed(kernel.stop))
        return took

    async def eight(templates: Templates | None) -> None:
        links.extend(await asyncio.gather(*(start_ours(folder, templates) for _ in range(8))))

    def eight_ours(templates: Templates | None = None) -> float:
        took = timed(lambda: hostloop.run(eight(templates)))
        pss[templates is not None].append(statistics.mean(pss_mb(link.pid) for link in links))
        while links:
            hostloop.run(links.pop().stop())
        return took

    def eight_stock() -> float:
        with ThreadPoolExecutor(8) as pool:
            took = timed(lambda: peers.extend(pool.map(lambda _: Stock(), range(8))))
        stock_pss.append(statistics.mean(pss_mb(kernel.manager.provisioner.process.pid) for kernel in peers))
        while peers:
            peers.pop().stop()
        return took

    with Floor() as floor:
        found += measure(
            [
                Workload("stock: start with wait_for_ready", start_stock),
                Workload(
                    "floor: fork, five binds, one answer",
                    lambda: timed(floor.start),
                    peer="stock: start with wait_for_ready",
                ),
                Workload(
                    "warm start to ready, through the provisioner",
                    lambda: start_one(templates),
                    peer="stock: start with wait_for_ready",
                    bar=0.15,
                ),
                Workload(
                    "cold start to ready, through the provisioner",
                    start_one,
                    peer="stock: start with wait_for_ready",
                    bar=0.6,
                ),
            ],
            rounds=rounds or 9,
        )
    found += measure(
        [
            Workload("stock: 8 starts in parallel", eight_stock),
            Workload(
                "8 warm starts in parallel",
                lambda: eight_ours(templates),
                peer="stock: 8 starts in parallel",
                bar=0.2,
            ),
            Workload("8 cold starts in parallel", eight_ours, peer="stock: 8 starts in parallel"),
        ],
        rounds=rounds or 3,
        warm_up=1,
    )
    ours = iter(stops)
    theirs = iter(stock_stops)
    found += measure(
        [
            Workload("stock: stop", lambda: next(theirs)),
            Workload("stop, death confirmed", lambda: next(ours), peer="stock: stop"),
        ],
        rounds=rounds or 7,
        warm_up=1,
    )
    template_mb = pss_mb(next(iter(templates.pids())))
    warm_pss, cold_pss, peer_pss = iter(pss[True]), iter(pss[False]), iter(stock_pss)
    found += measure(
        [
            Workload("stock: PSS of an idle kernel, 8 alive", lambda: next(peer_pss), unit="MB"),
            Workload(
                "PSS of an idle warm kernel, 8 alive",
                lambda: next(warm_pss),
                unit="MB",
                peer="stock: PSS of an idle kernel, 8 alive",
                bar=0.6,
                note=f"(and one template: {template_mb:.0f} MB alone)",
            ),
            Workload(
                "PSS of an idle cold kernel, 8 alive",
                lambda: next(cold_pss),
                unit="MB",
                peer="stock: PSS of an idle kernel, 8 alive",
            ),
        ],
        rounds=rounds or 3,
        warm_up=1,
    )
    assert not fallbacks, fallbacks
    hostloop.run(templates.aclose())
    pathlib.Path(folder).rmdir()
    return found
