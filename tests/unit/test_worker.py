"""The helper threads: used again, abandoned on cancellation, never in the way of an exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from lemon_kernel.helpers.worker import MAX_IDLE_THREADS, abandoned, in_thread


def helper_threads() -> int:
    return sum(thread.name == "lemon-helper" for thread in threading.enumerate())


def wait_until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_results_and_errors_come_back() -> None:
    """What the function returns or raises is what the caller gets, off the loop's thread."""

    def fail(error: BaseException) -> None:
        raise error

    async def main() -> None:
        assert await in_thread(divmod, 7, 2) == (3, 1)
        assert await in_thread(threading.get_ident) != threading.get_ident()
        for error in (ValueError("x"), SystemExit(3)):
            with pytest.raises(type(error)) as caught:
                await in_thread(fail, error)
            assert caught.value is error
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_thread(fail, StopIteration())

    asyncio.run(main())


def test_one_thread_serves_many_calls() -> None:
    """Calls one after the other use one thread, whatever loop they come from."""

    async def main() -> set[int]:
        return {await in_thread(threading.get_ident) for _ in range(50)}

    assert len(asyncio.run(main()) | asyncio.run(main())) == 1


def test_calls_run_side_by_side() -> None:
    """Calls at the same time get a thread each; afterwards only a few threads stay."""
    count = MAX_IDLE_THREADS + 8
    barrier = threading.Barrier(count)

    async def main() -> None:
        await asyncio.gather(*(in_thread(barrier.wait, 10) for _ in range(count)))

    asyncio.run(main())
    wait_until(lambda: helper_threads() <= MAX_IDLE_THREADS)


def test_a_cancelled_call_abandons_its_thread() -> None:
    """Cancellation returns at once; the thread counts as abandoned until its work ends, then serves again."""
    entered, gate = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        gate.wait()

    async def main() -> None:
        before = abandoned()
        task = asyncio.create_task(in_thread(work))
        while not entered.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert abandoned() == before + 1
        assert await in_thread(lambda: "alive") == "alive"
        gate.set()
        while abandoned() != before:
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_call_that_ended_just_before_its_cancellation_is_not_abandoned() -> None:
    """Work that is done counts nowhere, even when its result was never collected."""

    async def main() -> None:
        before = abandoned()
        done = threading.Event()
        task = asyncio.create_task(in_thread(done.set))
        await asyncio.sleep(0)
        done.wait()
        wait_until(lambda: True)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        wait_until(lambda: abandoned() == before)

    asyncio.run(main())


def test_a_closed_loop_harms_nobody() -> None:
    """Work that outlives its loop ends quietly, and its thread serves the next loop."""
    entered, gate = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        gate.wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(in_thread(work))
    while not entered.is_set():
        loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    gate.set()

    assert asyncio.run(in_thread(lambda: 1)) == 1
    wait_until(lambda: abandoned() == 0)


def test_an_abandoned_thread_does_not_delay_the_exit() -> None:
    """A program ends although a helper thread sleeps on."""
    code = (
        "import asyncio, time\n"
        "from lemon_kernel.helpers.worker import in_thread\n"
        "async def main():\n"
        "    try: await asyncio.wait_for(in_thread(time.sleep, 60), 0.05)\n"
        "    except TimeoutError: print('left')\n"
        "asyncio.run(main())\n"
    )
    started = time.monotonic()
    done = _python(code)

    assert done.stdout == "left\n", done.stderr
    assert time.monotonic() - started < 15


def test_a_forked_child_has_threads_of_its_own() -> None:
    """After a fork the child does not wait for threads that only its parent has."""
    code = (
        "import asyncio, os\n"
        "from lemon_kernel.helpers.worker import in_thread\n"
        "asyncio.run(in_thread(int))\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    asyncio.run(in_thread(print, 'child', flush=True)); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )

    assert _python(code).stdout == "child\n"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_helpers_import_nothing_heavy() -> None:
    """Importing the helpers imports none of the libraries that only some of them need."""
    code = (
        "import sys, lemon_kernel.helpers\n"
        "print(sorted({'regex', 'pathspec', 'httpx', 'trafilatura'} & set(sys.modules)))\n"
    )

    assert _python(code).stdout == "[]\n"
