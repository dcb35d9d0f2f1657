"""Spawn, watch, signal, sweep and reap: with real processes and real signals."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from lemon_provisioner import sweep
from lemon_provisioner.environment import child_environment
from lemon_provisioner.process import LOST_STATUS, ChildProcess, kill_marked, new_run_id

Spawn = Callable[..., ChildProcess]


class Output:
    """The read end of a child's output."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self._rest = b""

    def line(self) -> str:
        """Wait for the next line of output, at most 20 s."""
        while b"\n" not in self._rest:
            assert select.select([self.reader], [], [], 20)[0], "no output"
            chunk = os.read(self.reader, 4096)
            assert chunk, "end of output"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


@pytest.fixture
def output() -> Iterator[Output]:
    """A pipe for children's output."""
    pipe = Output()
    yield pipe
    os.close(pipe.reader)
    os.close(pipe.writer)


@pytest.fixture
def spawn(output: Output, tmp_path: Path) -> Iterator[Spawn]:
    """Start Python code as a run; whatever is left of it is killed after the test."""
    children: list[ChildProcess] = []

    def start(code: str | Sequence[str], run_id: str | None = None, **more: Sequence[int]) -> ChildProcess:
        run_id = run_id or new_run_id()
        argv = [sys.executable, "-S", "-c", code] if isinstance(code, str) else code
        child = ChildProcess.spawn(
            argv,
            env=child_environment(run_id),
            cwd=str(tmp_path),
            run_id=run_id,
            output=output.writer,
            pass_fds=more.get("pass_fds", ()),
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.finish()


def is_dead(pidfd: int, within_s: float = 5) -> bool:
    """Wait for the death of the process behind ``pidfd`` and close it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(within_s * 1000))
    finally:
        os.close(pidfd)


# -- spawn ---------------------------------------------------------------------------------------------------------


def test_a_child_leads_its_own_session_and_group(spawn: Spawn, output: Output) -> None:
    """The leader's number is its session's and its group's."""
    child = spawn("import os; print(os.getpid(), os.getsid(0), os.getpgrp())")

    assert output.line() == f"{child.pid} {child.pid} {child.pid}"


def test_standard_streams(spawn: Spawn, output: Output) -> None:
    """Reading standard input is end of file; standard error goes where standard output goes."""
    spawn("import os; os.write(2, b'%d\\n' % len(os.read(0, 1)))")

    assert output.line() == "0"


def test_only_the_named_descriptors_are_inherited(spawn: Spawn, output: Output) -> None:
    """An inheritable descriptor of the host that was not passed is closed in the child."""
    passed, stray = os.pipe()
    os.set_inheritable(stray, True)
    try:
        spawn(
            f"import os; print(os.fstat({passed}) and 1)\ntry: os.fstat({stray})\nexcept OSError: print(2)",
            pass_fds=[passed],
        )

        assert [output.line(), output.line()] == ["1", "2"]
    finally:
        os.close(passed)
        os.close(stray)


def test_a_program_that_cannot_be_started_raises(spawn: Spawn) -> None:
    """There is an ``OSError`` and no process."""
    before = psutil.Process().children()

    with pytest.raises(FileNotFoundError):
        spawn(["/nonexistent/python3"])

    assert psutil.Process().children() == before


def test_the_marker_is_in_the_environment(spawn: Spawn, output: Output) -> None:
    """The child can be found by its run id."""
    child = spawn("import os; print(os.environ['LEMON_RUN_ID'])")

    assert output.line() == child.run_id
    assert len(child.run_id) == 32


# -- watching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ],
)
def test_wait_tells_the_status_without_reaping(spawn: Spawn, code: str, status: int) -> None:
    """The status is ``Popen``'s, and the process can still be waited for afterwards."""
    child = spawn(code)

    assert asyncio.run(child.wait()) == status
    assert child.exited
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    assert child.finish() == status


def test_many_may_wait_and_one_may_leave(spawn: Spawn) -> None:
    """Cancelling one waiter leaves the others waiting; all get the status."""

    async def main() -> None:
        child = spawn("import time; time.sleep(60)")
        waiters = [asyncio.create_task(child.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not child.exited
        waiters[0].cancel()
        await asyncio.sleep(0)
        child.signal_group(signal.SIGTERM)
        assert await asyncio.gather(*waiters[1:]) == [-15, -15]
        assert waiters[0].cancelled()
        child.finish()
        assert await child.wait() == -15

    before = os.listdir("/proc/self/fd")
    asyncio.run(main())

    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_waiting_and_finishing_at_once(spawn: Spawn) -> None:
    """``finish`` while somebody waits: the waiter gets the status of the killed process."""

    async def main() -> None:
        child = spawn("import time; time.sleep(60)")
        waiter = asyncio.create_task(child.wait())
        await asyncio.sleep(0)
        assert child.finish() == -9
        assert await waiter == -9

    asyncio.run(main())


def test_a_child_that_somebody_else_reaped_is_never_signalled(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``waitpid`` by the embedding program the number may be a stranger's: no signal, status unknown."""
    child = spawn("pass")
    os.waitpid(child.pid, 0)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("signalled"))

    assert not child.signal_group(signal.SIGKILL)
    assert child.exited
    assert child.finish() == LOST_STATUS
    assert asyncio.run(child.wait()) == LOST_STATUS


# -- finishing -----------------------------------------------------------------------------------------------------

_GROUP_CHILD = """
import os, subprocess, sys
child = subprocess.Popen(["/bin/sleep", "60"], env={})
print(child.pid, flush=True)
os._exit(7)
"""

_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    os._exit(0)
os.wait()
os._exit(7)
"""


@pytest.mark.parametrize("code", [_GROUP_CHILD, _DAEMON], ids=["in the group", "left the group"])
def test_finish_kills_what_the_leader_left(spawn: Spawn, output: Output, code: str) -> None:
    """A child in the group (even without the marker) and a marked daemon outside it both die; the status stays."""
    child = spawn(code)
    left = os.pidfd_open(int(output.line()))

    assert asyncio.run(child.wait()) == 7
    assert child.finish() == 7
    assert is_dead(left)


def test_after_finish_nothing_is_signalled(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """``finish`` is idempotent; once reaped, the number is left alone."""
    child = spawn("import time; time.sleep(60)")
    assert child.finish() == -9
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, 0)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("signalled"))

    assert child.finish() == -9
    assert not child.signal_group(signal.SIGTERM)


def test_the_group_is_killed_before_the_leader_is_reaped(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the group gets its SIGKILL the leader is still ours to wait for."""
    child = spawn("pass")
    asyncio.run(child.wait())
    unreaped: list[bool] = []

    def killpg(group: int, signum: int) -> None:
        assert (group, signum) == (child.pid, signal.SIGKILL)
        unreaped.append(os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)

    monkeypatch.setattr(os, "killpg", killpg)
    child.finish()

    assert unreaped == [True]


def test_a_forked_child_of_the_host_touches_nothing(spawn: Spawn) -> None:
    """The objects a fork inherits are not its children: no signal, no sweep."""
    child = spawn("import time; time.sleep(60)")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if child.finish() is None and not child.signal_group(9) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not child.exited


def test_the_host_side_of_a_run_is_cheap(spawn: Spawn) -> None:
    """Spawn and finish together cost the host less than 1.5 ms (the best of 20: the machine is shared)."""
    costs = []
    for _ in range(20):
        start = time.perf_counter()
        child = spawn(["/bin/true"])
        spawned = time.perf_counter() - start
        asyncio.run(child.wait())
        start = time.perf_counter()
        child.finish()
        costs.append(spawned + time.perf_counter() - start)

    assert min(costs) < 0.0015


# -- the sweep -----------------------------------------------------------------------------------------------------


def test_a_fork_bomb_is_swept(spawn: Spawn, output: Output) -> None:
    """200 children with sessions of their own, all gone when ``finish`` returns."""
    child = spawn(
        "import os, time\n"
        "for _ in range(200):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(60); os._exit(0)\n"
        "os._exit(0)\n"
    )
    pidfds = [os.pidfd_open(int(output.line())) for _ in range(200)]
    asyncio.run(child.wait())

    child.finish()

    assert [is_dead(pidfd, 0) for pidfd in pidfds] == [True] * 200
    assert kill_marked(child.run_id) == 0


def test_children_that_keep_forking_are_swept(spawn: Spawn, output: Output) -> None:
    """A chain in which each process forks its successor and exits is dead when ``finish`` returns."""
    alive, held = os.pipe()  # end of file when the last of the chain is dead
    child = spawn(
        "import os\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "os.write(1, b'on\\n')\n"
        "for _ in range(5000):\n"  # an end of its own: a broken sweep must not cost the machine
        "    if os.fork(): os._exit(0)\n",
        pass_fds=[held],
    )
    os.close(held)
    output.line()
    asyncio.run(child.wait())

    child.finish()

    assert select.select([alive], [], [], 0.2)[0]
    os.close(alive)


def test_only_the_exact_marker_counts(spawn: Spawn) -> None:
    """Neither a longer id nor another variable that holds it makes a process ours."""
    stranger = spawn("import time; time.sleep(60)", run_id="abcdef")

    assert kill_marked("abc") == 0
    assert kill_marked("bcdef") == 0
    assert not stranger.exited
    assert kill_marked("abcdef") == 1
    assert asyncio.run(stranger.wait()) == -9


def test_a_number_that_changed_hands_is_not_killed(spawn: Spawn) -> None:
    """The process is checked again once it is pinned: an unmarked one lives."""
    stranger = spawn("import time; time.sleep(60)")

    assert sweep._kill_pinned(stranger.pid, b"LEMON_RUN_ID=other") is None
    assert not stranger.exited


def test_the_sweep_looks_at_newer_processes_only_while_numbers_cannot_have_wrapped(
    spawn: Spawn, output: Output
) -> None:
    """The shortcut is for young runs; an old run's sweep looks at all."""
    older = spawn("import time; print(1, flush=True); time.sleep(60)")
    output.line()
    newer = spawn("pass")
    asyncio.run(newer.wait())

    assert kill_marked(older.run_id, newer.pid, 0.0) == 0
    assert kill_marked(older.run_id, newer.pid, 1e6) == 1


def test_a_sweep_without_newer_processes_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after the newest process was born there is nobody to look at; wrapped numbers mean a full look."""
    monkeypatch.setattr(sweep, "_read", lambda path: b"0.0 0.0 0.0 1/90 700\n")
    assert sweep._newest() == 700
    assert list(sweep._candidates(700, 700)) == []
    assert list(sweep._candidates(697, 700)) == [698, 699, 700]
    assert 1 in sweep._candidates(701, 700)
    assert all(pid > 500 for pid in sweep._candidates(500, 700))
    monkeypatch.setattr(sweep, "_read", lambda path: None)
    assert sweep._newest() == -1
    assert 1 in sweep._candidates(700, -1)


def test_a_host_without_descriptors_does_not_take_blindness_for_absence(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no descriptor is to be had the sweep tries again instead of finding nobody."""
    child = spawn("import time; time.sleep(60)")
    opened = os.open
    failures = [OSError(errno.EMFILE, "too many open files")] * 3

    def sparse(path: str, flags: int) -> int:
        if path.startswith("/proc/") and failures:
            raise failures.pop()
        return opened(path, flags)

    monkeypatch.setattr(os, "open", sparse)

    assert kill_marked(child.run_id) == 1
    assert not failures


# -- escalation ----------------------------------------------------------------------------------------------------

_STUBBORN = """
import os, signal, time
def told(signum, frame): os.write(1, b"%d %.3f\\n" % (signum, time.monotonic()))
signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, told)
os.write(1, b"ready\\n")
while True: time.sleep(60)
"""


def test_escalation_keeps_its_times(spawn: Spawn, output: Output) -> None:
    """SIGINT at once, SIGTERM after one grace, SIGKILL after two."""
    child = spawn(_STUBBORN)
    output.line()
    start = time.monotonic()

    assert asyncio.run(child.escalate(0.5))
    took_s = time.monotonic() - start

    (first, int_s), (second, term_s) = (output.line().split() for _ in range(2))
    assert (int(first), int(second)) == (signal.SIGINT, signal.SIGTERM)
    assert float(int_s) - start == pytest.approx(0, abs=0.2)
    assert float(term_s) - start == pytest.approx(0.5, abs=0.2)
    assert took_s == pytest.approx(1.0, abs=0.2)
    assert child.finish() == -9


def test_escalation_ends_with_the_leader_and_takes_the_rest_along(spawn: Spawn, output: Output) -> None:
    """A leader that obeys SIGINT ends it at once; its child that ignores signals dies all the same."""
    child = spawn(
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    left = os.pidfd_open(int(output.line()))
    start = time.monotonic()

    assert asyncio.run(child.escalate())
    assert time.monotonic() - start < 0.9
    assert is_dead(left)


def test_a_cancelled_escalation_kills_at_once(spawn: Spawn, output: Output) -> None:
    """Nobody waits any more: the graces are skipped, not the death."""

    async def main() -> None:
        task = asyncio.create_task(child.escalate(30))
        assert await asyncio.to_thread(output.line)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    child = spawn(_STUBBORN)
    output.line()
    asyncio.run(main())

    assert child.finish() == -9


def test_a_stopped_group_dies(spawn: Spawn) -> None:
    """A group that was stopped with SIGSTOP neither hears the polite signals nor escapes SIGKILL."""
    child = spawn("import time; time.sleep(60)")
    child.signal_group(signal.SIGSTOP)

    assert asyncio.run(child.escalate(0.1))
    assert subprocess.call(["/bin/kill", "-0", "--", f"-{child.pid}"], stderr=subprocess.DEVNULL) != 0
