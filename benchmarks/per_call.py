"""Per-call runs and helper calls against a bare interpreter, a bare socket echo and a polling file bridge."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv

from lemon_kernel import ExecuteCode, ExecuteCodeConfig, hostloop, telemetry

from .harness import CALLS, ECHO_SCRIPT, Row, Workload, clean_environment, measure, report, timed

BARE_ECHO_CHILD = f"""
import json, socket, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
stream = sock.makefile("rb")
times = []
for number in range({CALLS}):
    start = time.perf_counter()
    sock.sendall(json.dumps({{"id": number, "tool": "read", "params": {{"path": "x" * 20}}}}).encode() + b"\\n")
    json.loads(stream.readline())
    times.append(time.perf_counter() - start)
print(*times)
"""

POLLING_CALLS = 10
POLLING_CHILD = f"""
import json, os, sys, time
folder = sys.argv[1]
times = []
for number in range({POLLING_CALLS}):
    start = time.perf_counter()
    with open(f"{{folder}}/req-{{number}}.tmp", "w") as file:
        json.dump({{"id": number, "tool": "read", "params": {{"path": "x" * 20}}}}, file)
    os.rename(f"{{folder}}/req-{{number}}.tmp", f"{{folder}}/req-{{number}}.json")
    answer = f"{{folder}}/res-{{number}}.json"
    while not os.path.exists(answer):
        time.sleep(0.020)
    json.load(open(answer))
    times.append(time.perf_counter() - start)
print(*times)
"""


def to_ms(line: str) -> list[float]:
    return [statistics.median(float(word) * 1000 for word in line.split())]


async def bare_run(python: str, script: str) -> None:
    process = await asyncio.create_subprocess_exec(
        python,
        script,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        stdin=asyncio.subprocess.DEVNULL,
        env=clean_environment(),
    )
    await process.communicate()


async def bare_echo(python: str, folder: str) -> list[float]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)

    async def serve() -> None:
        while line := await reader.readline():
            request = json.loads(line)
            writer.write(json.dumps({"id": request["id"], "ok": True, "content": "echo"}).encode() + b"\n")

    server = asyncio.create_task(serve())
    process = await asyncio.create_subprocess_exec(
        python,
        f"{folder}/echo.py",
        str(theirs.fileno()),
        pass_fds=[theirs.fileno()],
        stdout=asyncio.subprocess.PIPE,
        env=clean_environment(),
    )
    theirs.close()
    output, _ = await process.communicate()
    server.cancel()
    writer.close()
    return to_ms(output.decode())


def polling_bridge(python: str, folder: str) -> list[float]:
    with tempfile.TemporaryDirectory(dir=folder) as bridge:
        process = subprocess.Popen(
            [python, f"{folder}/polling.py", bridge], stdout=subprocess.PIPE, env=clean_environment()
        )
        while process.poll() is None:
            for request in pathlib.Path(bridge).glob("req-*.json"):
                number = json.loads(request.read_text())["id"]
                request.unlink()
                answer = pathlib.Path(bridge, f"res-{number}.tmp")
                answer.write_text(json.dumps({"id": number, "ok": True, "content": "echo"}))
                answer.rename(pathlib.Path(bridge, f"res-{number}.json"))
            time.sleep(0.025)
        assert process.stdout is not None
        output = process.stdout.read()
        process.stdout.close()
    return to_ms(output.decode())


def installed() -> dict[str, str]:
    """Return an environment in which everything is as installed from wheels: no editable install's start-up hooks."""
    root = pathlib.Path(__file__).parents[1]
    ours = [str(root), str(root / "provisioner"), str(root / "shim")]
    return {**clean_environment(), "PYTHONPATH": os.pathsep.join([*ours, *filter(None, sys.path)])}


def first_byte(python: str, script: str) -> float:
    """Return milliseconds from the start of the command line to the first byte of its output."""
    environment = {**installed(), "LEMON_EXECUTE_CODE_PYTHON_PATH": python}
    start = time.perf_counter()
    with subprocess.Popen(
        [python, "-m", "lemon_kernel.cli", "run", script], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        took = (time.perf_counter() - start) * 1000
        process.stdout.read()
    return took


async def echo(params: object, context: object) -> str:
    return "echo"


async def slow(params: object, context: object) -> str:
    await asyncio.sleep(0.05)
    return "done"


TOLD = 100


def tell_of_a_run() -> None:
    """Do, a hundred times, what a run and its one helper call do for telemetry when nobody listens."""
    for _ in range(TOLD):
        with telemetry.run_span("per_call") as span:
            with span.helper("read") as call:
                call.outcome(None)
            span.outcome(None)
        telemetry.emit(
            "coding_agent.execute_code.stop",
            {"count": 1, "duration_us": 20_000},
            {"rpc_calls": 1, "rpc_denied": 0, "exit_code": 0},
        )


def main() -> str:
    return report("Per call", rows())


def rows(rounds: int | None = None) -> list[Row]:
    """Measure and return every line; `rounds` overrides how often each is sampled."""
    with tempfile.TemporaryDirectory() as folder:
        # Nothing in its site-packages: start-up hooks of an editable install or of the machine would flatter us.
        venv.create(f"{folder}/venv", symlinks=True)
        python = f"{folder}/venv/bin/python"
        pathlib.Path(folder, "trivial.py").write_text("print(1)\n")
        pathlib.Path(folder, "echo.py").write_text(BARE_ECHO_CHILD)
        pathlib.Path(folder, "polling.py").write_text(POLLING_CHILD)
        config = ExecuteCodeConfig(enabled=True, max_rpc_calls=100_000, python_path=python)
        plain = ExecuteCode(folder, config=config)
        echoing = ExecuteCode(folder, config=config, helpers={"read": echo})
        slowly = ExecuteCode(folder, config=config, helpers={"read": slow})

        with asyncio.Runner() as runner:

            def ours_on_host_loop() -> list[float]:
                return to_ms(hostloop.run(echoing.execute({"script": ECHO_SCRIPT})).text)

            found = measure(
                [
                    Workload(
                        "bare interpreter, trivial script",
                        lambda: timed(lambda: runner.run(bare_run(python, f"{folder}/trivial.py"))),
                    ),
                    Workload(
                        "per-call run of the same script",
                        lambda: timed(lambda: runner.run(plain.execute({"script": "print(1)\n"}))),
                        peer="bare interpreter, trivial script",
                        bar=1.25,
                    ),
                    Workload(
                        "telemetry of such a run with one helper call, without an SDK",
                        lambda: timed(tell_of_a_run) / TOLD,
                        peer="per-call run of the same script",
                        bar=0.02,
                    ),
                ],
                rounds=rounds or 50,
            )
            found += measure(
                [
                    Workload(
                        "bare asyncio socket-pair JSON echo", lambda: runner.run(bare_echo(python, folder))
                    ),
                    Workload(
                        "echo helper call (double on the host's loop)",
                        ours_on_host_loop,
                        peer="bare asyncio socket-pair JSON echo",
                        bar=1.2,
                    ),
                    Workload(
                        "echo helper call (double on the caller's own loop)",
                        lambda: to_ms(runner.run(echoing.execute({"script": ECHO_SCRIPT})).text),
                        peer="bare asyncio socket-pair JSON echo",
                        note="two more thread hops",
                    ),
                    Workload(
                        "helper call: ls of a small folder",
                        lambda: to_ms(
                            runner.run(
                                plain.execute({"script": ECHO_SCRIPT.replace('read("x" * 20)', "ls()")})
                            ).text
                        ),
                        peer="bare asyncio socket-pair JSON echo",
                        note="the real tool, in a worker thread",
                    ),
                ],
                rounds=rounds or 11,
            )
            found += measure(
                [
                    Workload("file bridge polled every 20/25 ms", lambda: polling_bridge(python, folder)),
                    Workload(
                        "the same call through our pipe",
                        ours_on_host_loop,
                        peer="file bridge polled every 20/25 ms",
                        bar=0.01,
                    ),
                ],
                rounds=rounds or 5,
            )
            batch = "batch([('read', {'path': 'x'})] * 40)"
            found += measure(
                [
                    Workload(
                        "batch of 40 calls of 50 ms, 4 at a time",
                        lambda: timed(lambda: runner.run(slowly.execute({"script": batch}))),
                        bar=600,
                    )
                ],
                rounds=rounds or 3,
                warm_up=1,
            )
            imports = {
                "import asyncio, traitlets.config": "import asyncio, traitlets.config",
                "import lemon_kernel": "import lemon_kernel",
                "from lemon_kernel import ExecuteCode": "from lemon_kernel import ExecuteCode",
            }

            def importing(code: str) -> float:
                return timed(lambda: subprocess.run([python, "-c", code], env=installed(), check=True))

            peer = "import asyncio, traitlets.config"
            found += measure(
                [
                    Workload(
                        name,
                        lambda code=code: importing(code),
                        peer=None if name == peer else peer,
                        bar=1.3 if name == "import lemon_kernel" else None,
                    )
                    for name, code in imports.items()
                ],
                rounds=rounds or 15,
            )
            found += measure(
                [
                    Workload(
                        "python -c 'import jupyter_core.application'",
                        lambda: timed(
                            lambda: subprocess.run(
                                [python, "-c", "import jupyter_core.application"], env=installed(), check=True
                            )
                        ),
                    ),
                    Workload(
                        "lemon-kernel run, to the first byte of output",
                        lambda: first_byte(python, f"{folder}/trivial.py"),
                        peer="python -c 'import jupyter_core.application'",
                        bar=1.7,
                    ),
                ],
                rounds=rounds or 15,
            )
    return found
