"""What a session kernel keeps, what discards it, and who shares it (cases section 9 and its rows of 14)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from lemon_kernel import ExecuteCodeConfig, ExecuteCodeError, Owner, ToolPolicy, hostloop

from .conftest import Agent, process_is_gone, read_pid, wait_until
from .gates import Gate
from .kernels import (
    EXCEPTION,
    FRESH,
    IS_X_THERE,
    ISOLATED,
    LOOPS,
    LOST,
    SUCCESS,
    WAITS,
    contents,
    environment,
    flags,
    inflight,
    live,
    occupied,
    phases,
    pid_of,
    queued,
    registry_of,
    running,
    twin,
)

pytestmark = pytest.mark.timeout(60)

FINISHED_CELL = "lemon_tools bridge belongs to a finished cell; create the pool in this cell"


@pytest.fixture(scope="module")
def standing_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(tmp_path_factory.mktemp("standing"), "session")
    yield agent
    agent.close()


@pytest.fixture
def standing(standing_agent: Agent) -> Agent:
    """An agent whose kernel has run before and lives on: for claims that no fresh kernel is needed for."""
    if live(standing_agent) == 0:
        standing_agent.run("pass")
    return standing_agent


def printed(agent: Agent, script: str) -> str:
    """Run a cell that must succeed on the kernel that is there, and return its output."""
    result = agent.run(script)
    assert flags(result) == SUCCESS, result.text
    return result.text


# -- what persists ------------------------------------------------------------------------------------------


@pytest.mark.case(212)
def test_state_persists(session: Agent) -> None:
    """Names and imports of one call are there in the next, and the details say so."""
    first = session.run("a = 41; import math")
    second = session.run("print(a + 1, math.pi > 3)")

    assert (first.text, flags(first)) == ("(script produced no output)", FRESH)
    assert (second.text, flags(second)) == ("42 True\n", SUCCESS)
    assert first.details["exit_code"] is second.details["exit_code"] is None


@pytest.mark.case(213)
def test_environ_persists_and_the_cwd_does_not(standing: Agent) -> None:
    """`os.environ` is the kernel's, the working directory that of the key, at the start of every cell."""
    standing.run("import os; os.environ['KEPT'] = 'yes'; os.chdir('/')")

    assert printed(standing, "print(os.environ['KEPT'], os.getcwd())") == f"yes {standing.cwd}\n"


@pytest.mark.case(214)
@pytest.mark.reason("exception")
def test_an_exception_keeps_the_state(session: Agent) -> None:
    """The headline names the exception, the traceback is the last output, and what was done before stays."""
    first = session.run('v = [1]\nraise ValueError("boom")')

    assert first.text == (
        "Script raised ValueError: boom\n\n"
        "Traceback (most recent call last):\n"
        '  File "<cell 1>", line 3, in <module>\n'
        '    raise ValueError("boom")\n'
        "ValueError: boom\n"
    )
    assert flags(first) == {**EXCEPTION, "kernel_reused": False}
    assert printed(session, "print(v)") == "[1]\n"


@pytest.mark.case(215)
def test_a_partial_mutation_is_kept(standing: Agent) -> None:
    """Nothing is rolled back when a cell raises."""
    standing.run("changes = ['before']")
    result = standing.run("changes.append('during'); changes[5]; changes.append('after')")

    assert flags(result) == EXCEPTION
    assert printed(standing, "print(changes)") == "['before', 'during']\n"


@pytest.mark.case(217)
@pytest.mark.parametrize(
    ("leave", "headline"),
    [
        ("import sys; sys.exit(3)", "Script raised SystemExit: 3"),
        ("import sys; sys.exit('no')", "Script raised SystemExit: no"),
        ("import sys; sys.exit()", "Script raised SystemExit"),
        ("exit()", "Script raised SystemExit"),
        ("quit()", "Script raised SystemExit"),
    ],
)
def test_system_exit_keeps_the_kernel(standing: Agent, leave: str, headline: str) -> None:
    """Leaving a script is an error of its cell, without traceback; the kernel lives on with what it has."""
    result = standing.run(f"x = 1; {leave}")

    assert (result.text, flags(result)) == (headline, EXCEPTION)
    assert printed(standing, "print(x)") == "1\n"


@pytest.mark.case(218)
def test_input_is_refused(standing: Agent) -> None:
    """Reading from the person is an error that says so, that a script may catch, and that loses nothing."""
    for reading in ("input('q')", "import sys; sys.stdin.readline()"):
        result = standing.run(f"kept = 1\n{reading}")
        assert flags(result) == EXCEPTION
        assert "input() is not supported" in result.text.splitlines()[0]
    caught = (
        "try:\n    input()\nexcept RuntimeError as error:\n    print('caught', 'not supported' in str(error))"
    )
    assert printed(standing, caught) == "caught True\n"
    assert printed(standing, "print(kept)") == "1\n"


@pytest.mark.case(219)
@pytest.mark.parametrize("script", ["!ls", "%time 1", "import asyncio\nawait asyncio.sleep(0)"])
def test_grammar_is_plain_python(standing: Agent, script: str) -> None:
    """What only IPython understands is a SyntaxError, and the state stays."""
    standing.run("kept = 'kept'")
    result = standing.run(script)

    assert result.text.startswith("Script raised SyntaxError: ")
    assert flags(result) == EXCEPTION
    assert printed(standing, "print(kept)") == "kept\n"


@pytest.mark.case(220)
def test_helpers_are_bound_again_in_every_cell(standing: Agent) -> None:
    """A script that overwrote a helper gets it back in the next cell."""
    assert printed(standing, "read = text = 5; print(read)") == "5\n"
    result = standing.run("print(read('a'))", helpers={"read": contents})

    assert (result.text, flags(result)) == ("contents of a\n", SUCCESS)


@pytest.mark.case(221)
def test_a_scripts_own_keyboard_interrupt(standing: Agent) -> None:
    """It is an exception like any other, not somebody's abort."""
    result = standing.run("kept = 2\nraise KeyboardInterrupt")

    assert result.text.startswith("Script raised KeyboardInterrupt\n\n")
    assert result.text.endswith("KeyboardInterrupt\n")
    assert flags(result) == EXCEPTION
    assert printed(standing, "print(kept)") == "2\n"


# -- what discards the kernel -------------------------------------------------------------------------------


@pytest.mark.case(224)
@pytest.mark.reason("timeout")
def test_a_timeout_discards_the_state(session: Agent) -> None:
    """The text says after how long; the next call has a new kernel."""
    session.run("x = 1")
    late = session.run(f"print('so far')\n{LOOPS}", timeout_ms=1000)
    after = session.run(IS_X_THERE)

    assert late.text == "Script timed out after 1000ms.\n\nso far\n"
    assert flags(late) == {**LOST, "reason": "timeout"}
    assert (after.text, flags(after)) == ("False\n", FRESH)


@pytest.mark.case(226)
def test_a_cell_that_ignores_signals_is_killed(session: Agent) -> None:
    """Its caller is answered on time, the process is dead within 4 s, and meanwhile there is a new kernel."""
    script = f"""
        import os, signal
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        open('pid', 'w').write(str(os.getpid()))
        {LOOPS.replace(chr(10), chr(10) + " " * 8)}
        """
    session.run("pass")
    began = time.monotonic()
    result = session.run(textwrap.dedent(script), timeout_ms=1000)
    answered = time.monotonic()
    fresh = session.run(IS_X_THERE)

    assert flags(result) == {**LOST, "reason": "timeout"}
    assert 1 <= answered - began < 2.5
    assert flags(fresh) == FRESH
    pid = read_pid(session.cwd / "pid")
    wait_until(lambda: process_is_gone(pid), answered + 4.5 - time.monotonic(), "the kernel's death")


@pytest.mark.case(321)
def test_a_cell_that_obeys_sigterm_is_not_killed(session: Agent) -> None:
    """SIGINT comes at the deadline, SIGTERM a second later, and who then leaves by himself sees no SIGKILL."""
    script = f"""
        import os, signal, time
        def note(what):
            with open('signals', 'a') as file:
                print(what, time.monotonic(), file=file)
        def leave(*ignored):
            note('TERM')
            time.sleep(0.4)
            note('left')
            os._exit(0)
        signal.signal(signal.SIGINT, lambda *ignored: note('INT'))
        signal.signal(signal.SIGTERM, leave)
        open('pid', 'w').write(str(os.getpid()))
        {LOOPS.replace(chr(10), chr(10) + " " * 8)}
        """
    session.run("pass")
    deadline = time.monotonic() + 1
    result = session.run(textwrap.dedent(script), timeout_ms=1000)
    pid = read_pid(session.cwd / "pid")
    wait_until(lambda: process_is_gone(pid), 5, "the kernel's death")
    gone_after_s = time.monotonic() - deadline

    assert flags(result) == {**LOST, "reason": "timeout"}
    lines = (session.cwd / "signals").read_text().split("\n")[:-1]
    assert [line.split()[0] for line in lines] == ["INT", "TERM", "left"]
    interrupted, terminated, _ = (float(line.split()[1]) for line in lines)
    assert -0.1 < interrupted - deadline < 1
    assert 0.9 < terminated - interrupted < 1.7
    assert 1 < gone_after_s < 3


@pytest.mark.case(322)
@pytest.mark.reason("timeout")
def test_children_die_with_the_run(agent: Agent) -> None:
    """A child in the group, one with a session of its own and a double fork are gone 4 s after the result."""
    script = f"""
        import os, subprocess, sys
        wait = [sys.executable, '-Sc', 'import time; time.sleep(60)']
        pids = [subprocess.Popen(wait).pid, subprocess.Popen(wait, start_new_session=True).pid]
        inbound, outbound = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if (grandchild := os.fork()) == 0:
                import time
                time.sleep(60)
                os._exit(0)
            os.write(outbound, str(grandchild).encode())
            os._exit(0)
        pids.append(int(os.read(inbound, 20)))
        os.wait()
        open('pids.new', 'w').write(' '.join(map(str, pids)))
        os.rename('pids.new', 'pids')
        {LOOPS.replace(chr(10), chr(10) + " " * 8)}
        """
    result = agent.run(textwrap.dedent(script), timeout_ms=2000, config={"timeout_ms": 2000})
    answered = time.monotonic()

    assert result.details["reason"] == "timeout"
    pids = [int(pid) for pid in (agent.cwd / "pids").read_text().split()]
    assert len(pids) == 3
    wait_until(
        lambda: all(map(process_is_gone, pids)), answered + 4.5 - time.monotonic(), "the children's death"
    )


@pytest.mark.case(228)
@pytest.mark.reason("cancelled")
def test_an_abort_discards_the_state(session: Agent) -> None:
    """The caller hears at once; the next call has a new kernel."""
    session.run("x = 1")
    run = running(session, f"print('so far')\nopen('said', 'w').close()\n{LOOPS}")
    wait_until(lambda: (session.cwd / "said").exists(), what="the cell's output")
    run.abort()
    began = time.monotonic()
    result = run.result()
    took_s = time.monotonic() - began
    after = session.run(IS_X_THERE)

    assert result.text == "Script cancelled.\n\nso far\n"
    assert flags(result) == {**LOST, "reason": "cancelled"}
    assert took_s < 1.5
    assert (after.text, flags(after)) == ("False\n", FRESH)


@pytest.mark.case(229)
def test_an_abort_beats_the_deadline(session: Agent) -> None:
    """When both are due in the same turn of the loop, the run was cancelled."""
    session.run("pass")
    began = time.monotonic()
    run = running(session, timeout_ms=1000)

    def turn_in_which_both_become_due() -> None:
        time.sleep(max(0.0, began + 1.3 - time.monotonic()))
        run.abort()

    hostloop.loop().call_soon_threadsafe(turn_in_which_both_become_due)
    result = run.result()

    assert (result.text, result.details["reason"]) == ("Script cancelled.", "cancelled")


@pytest.mark.case(230, 231, 268)
@pytest.mark.reason("kernel_died")
def test_a_crash_keeps_the_output_and_is_never_replayed(session: Agent) -> None:
    """The error result has what was printed; no fallback runs the code again, nor does the next call."""
    crash = session.run(
        "open('log', 'a').write('one line\\n')\nprint('gone', flush=True)\nimport os; os._exit(9)"
    )
    after = session.run(IS_X_THERE)

    assert crash.text == "execute_code session failed: kernel_died\n\ngone\n"
    assert flags(crash) == {**LOST, "reason": "kernel_died"}
    assert (after.text, flags(after)) == ("False\n", FRESH)
    assert (session.cwd / "log").read_text() == "one line\n"


@pytest.mark.parametrize("way", ["killed", "leaves"])
def test_a_kernel_that_died_between_two_cells_is_replaced(session: Agent, way: str) -> None:
    """A call finds out that the process is dead and gets a new kernel, with nothing to report (behaviour 6.4)."""
    pid = pid_of(session)
    if way == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        session.run(
            "import os, threading, time\n"
            "def leave():\n    while not os.path.exists('go'):\n        time.sleep(0.01)\n    os._exit(0)\n"
            "threading.Thread(target=leave).start()"
        )
        (session.cwd / "go").touch()
    with contextlib.suppress(ChildProcessError):  # the host has reaped it already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    result = session.run(IS_X_THERE)

    assert (result.text, flags(result)) == ("False\n", FRESH)


# -- threads ------------------------------------------------------------------------------------------------


@pytest.mark.case(233)
def test_output_of_a_leftover_thread_is_dropped(standing: Agent) -> None:
    """What a thread prints between two cells is in neither, and the kernel is fine."""
    first = standing.run(
        """
import os, threading, time
def late(printing=print):
    while not os.path.exists('go'):
        time.sleep(0.01)
    printing('late')
    os.write(1, b'later\\n')
    open('said', 'w').close()
threading.Thread(target=late).start()
print('first')
"""
    )
    (standing.cwd / "go").touch()
    wait_until(lambda: (standing.cwd / "said").exists(), what="the thread's output")

    assert (first.text, flags(first)) == ("first\n", SUCCESS)
    assert printed(standing, "print('second')") == "second\n"


@pytest.mark.case(236)
def test_a_thread_of_the_same_cell_has_the_helpers(standing: Agent) -> None:
    """Helpers may be called from any thread of the running cell."""
    result = standing.run(
        "import threading\nthread = threading.Thread(target=lambda: text(read('a')))\nthread.start()\nthread.join()",
        helpers={"read": contents},
    )

    assert result.text == (
        "Script result (text()):\ncontents of a\n\n"
        "Diagnostics (stdout/stderr, not the result):\n(script produced no output)"
    )
    assert flags(result) == SUCCESS
    assert result.details["rpc_tools"] == ["read"]


@pytest.mark.case(323)
def test_a_stale_thread_is_refused(standing: Agent) -> None:
    """A thread of a finished cell, and a thread it starts, get a ToolError and touch no other cell's counters."""
    standing.run(
        """
import json, os, threading, time
answers = []
def ask():
    for call in (lambda: read('stale'), lambda: text('stale')):
        try:
            answers.append(call())
        except Exception as error:
            answers.append(f'{type(error).__name__}: {error}')
def late():
    while not os.path.exists('second'):
        time.sleep(0.01)
    ask()
    child = threading.Thread(target=ask)
    child.start()
    child.join()
    open('answers.new', 'w').write(json.dumps(answers))
    os.rename('answers.new', 'answers')
threading.Thread(target=late).start()
"""
    )
    asked: list[object] = []

    async def read(params: object, context: object) -> str:
        asked.append(params)
        return ""

    result = standing.run(
        "open('second', 'w').close()\nwhile not os.path.exists('answers'):\n    time.sleep(0.01)\nprint('fine')",
        helpers={"read": read},
    )

    assert json.loads((standing.cwd / "answers").read_text()) == [f"ToolError: {FINISHED_CELL}"] * 4
    assert (result.text, flags(result)) == ("fine\n", SUCCESS)
    assert [result.details[name] for name in ("rpc_calls", "rpc_denied", "rpc_errors", "rpc_bytes")] == [
        0
    ] * 4
    assert asked == []


@pytest.mark.parametrize("broken", ["os.close(1)", "os.close(2)", "os.close(1); os.close(2)"])
def test_what_could_not_be_written_is_in_no_later_cell(standing: Agent, broken: str) -> None:
    """A script that closes its own descriptors fails alone: the next cell's output is its own (behaviour 6.10)."""
    result = standing.run(
        f"import os, sys\n{broken}\nsys.stderr.write('lost')\nprint('lost')\nraise ValueError"
    )
    assert flags(result) == EXCEPTION

    assert printed(standing, "print('mine')") == "mine\n"
    after = standing.run("print('mine')\nraise SystemExit")
    assert after.text == "Script raised SystemExit\n\nmine\n"


# -- what selects a kernel ----------------------------------------------------------------------------------


@pytest.mark.case(237, 238)
def test_the_directory_selects_the_kernel(session: Agent, tmp_path: pathlib.Path) -> None:
    """Another directory is another kernel; another spelling of the same one, a symlink, is not."""
    folder, other, link = session.cwd, tmp_path / "other", tmp_path / "link"
    other.mkdir()
    link.symlink_to(folder)
    session.run("x = 'first'")

    session.cwd = other
    elsewhere = session.run(IS_X_THERE)
    session.cwd = link
    through_link = session.run("print(x)")

    assert (elsewhere.text, flags(elsewhere)) == ("False\n", FRESH)
    assert (through_link.text, flags(through_link)) == ("first\n", SUCCESS)


@pytest.mark.case(240, 241)
def test_what_is_no_part_of_the_key(standing: Agent) -> None:
    """Timeout, limits, policy, run id and session key change between calls; the kernel stays."""
    standing.run("x = 'there'")
    calls: list[dict[str, object]] = [
        {
            "config": {
                "timeout_ms": 30_000,
                "max_text_bytes": 100,
                "max_rpc_calls": 3,
                "max_output_bytes": 2000,
            }
        },
        {"policy": ToolPolicy(deny=["webfetch"])},
        {"config": {"kernel_idle_timeout_ms": 5000, "max_live_kernels": 3, "max_queued_cells_per_kernel": 2}},
        {"timeout_ms": 5000},
        {"run_id": "one"},
        {"run_id": "two"},
    ]
    for options in calls:
        result = standing.run("print(x)", **options)
        assert (result.text, flags(result)) == ("there\n", SUCCESS), options
    standing.session_key = "another"
    assert printed(standing, "print(x)") == "there\n"


@pytest.mark.case(324, 325)
def test_what_is_part_of_the_key(session: Agent, tmp_path: pathlib.Path) -> None:
    """Session id (a sub-agent has its own), agent id, interpreter and helper set; not the helpers' order."""
    python = environment(tmp_path / "venv", with_ipykernel=True)
    session.run("x = 1", config={"tools": ["read", "ls"]})

    for change in ("session_id", "agent_id"):
        before = getattr(session, change)
        setattr(session, change, "another")
        result = session.run(IS_X_THERE, config={"tools": ["read", "ls"]})
        assert (result.text, flags(result)) == ("False\n", FRESH), change
        setattr(session, change, before)
    for config in ({"tools": ["read", "ls"], "python_path": python}, {"tools": ["read"]}):
        result = session.run(IS_X_THERE, config=config)
        assert (result.text, flags(result)) == ("False\n", FRESH), config
    same = session.run(IS_X_THERE, config={"tools": ["ls", "read", "ls"]})
    assert (same.text, flags(same)) == ("True\n", SUCCESS)
    assert live(session) == 5


# -- owners -------------------------------------------------------------------------------------------------


@pytest.mark.case(242)
def test_co_owners_share_a_kernel(session: Agent) -> None:
    """Two agent sessions with the same scope see each other's names."""
    other = twin(session)
    session.run("x = 'from A'")
    result = other.run("print(x)")

    assert (result.text, flags(result)) == ("from A\n", SUCCESS)
    other.owner.close()


@pytest.mark.case(243, 244, 245)
def test_reset_of_a_sole_owner(session: Agent) -> None:
    """The state is gone before the script runs, even if that fails; without a kernel nothing was reset."""
    first = session.run("print('runs')\nx = 1", reset=True)
    assert (first.text, flags(first)) == ("runs\n", FRESH)

    pid = pid_of(session)
    second = session.run(IS_X_THERE, reset=True)
    assert process_is_gone(pid)
    assert (second.text, flags(second)) == ("False\n", {**FRESH, "reset_performed": True})

    session.run("x = 1")
    failing = session.run("raise ValueError('no')", reset=True)
    assert flags(failing) == {**EXCEPTION, "kernel_reused": False, "reset_performed": True}
    assert printed(session, IS_X_THERE) == "False\n"


@pytest.mark.case(326, 247)
def test_reset_of_a_co_owner_is_a_fork_of_its_own(session: Agent) -> None:
    """The requester leaves for a private kernel, which is his until he detaches; his sibling keeps the state."""
    other = twin(session)
    session.run("x = 'shared'")
    other.run("pass")

    reset = other.run(IS_X_THERE + "; x = 'forked'", reset=True)
    assert (reset.text, flags(reset)) == ("False\n", {**FRESH, "reset_performed": True})
    assert printed(session, "print(x)") == "shared\n"
    assert printed(other, "print(x)") == "forked\n"
    again = other.run(IS_X_THERE, reset=True)
    assert (again.text, flags(again)) == ("False\n", {**FRESH, "reset_performed": True})
    assert registry_of(session).snapshot()["forked_owners"] == 1

    assert asyncio.run(registry_of(session).detach(other.owner))
    assert printed(other, "print(x)") == "shared\n"
    assert registry_of(session).snapshot()["forked_owners"] == 0
    other.owner.close()


@pytest.mark.case(249)
@pytest.mark.parametrize("way", ["closed", "collected"])
def test_the_kernel_of_a_dead_owner_goes(session: Agent, way: str) -> None:
    """A sole owner that is closed, or garbage, takes its kernel with it."""
    session.owner = Owner()
    pid = pid_of(session)
    assert live(session) == 1
    if way == "closed":
        session.owner.close()
    else:
        session.owner = Owner()
        gc.collect()

    wait_until(lambda: process_is_gone(pid), 10, "the kernel's death")
    wait_until(lambda: live(session) == 0 and phases(session) == {}, 5, "an empty registry")


@pytest.mark.case(250)
def test_an_idle_kernel_survives_one_of_its_owners(session: Agent) -> None:
    """The death of a co-owner takes nothing from the other."""
    other = twin(session)
    other.run("x = 'from A'")
    session.run("pass")
    other.owner.close()
    wait_until(lambda: registry_of(session).snapshot()["owners"] == 1, what="the departure")

    assert printed(session, "print(x)") == "from A\n"


@pytest.mark.case(327)
@pytest.mark.reason("kernel_discarded", "shutting_down")
def test_an_owner_dies_while_its_cell_is_active(session: Agent) -> None:
    """The kernel goes with it, and who queued behind hears `kernel_discarded`; nothing of it is retried."""
    other = twin(session)
    other.run("pass")
    active = running(other)
    waiting = queued(session, "open('ran', 'w')")
    other.owner.close()

    discarded = waiting.result()
    assert discarded.text == "execute_code session failed: kernel_discarded"
    assert flags(discarded) == {**LOST, "reason": "kernel_discarded"}
    lost = active.result()
    assert lost.text == "execute_code session failed: shutting_down"
    assert flags(lost) == {**LOST, "reason": "shutting_down", "kernel_reused": True}
    assert flags(session.run("pass")) == FRESH
    assert not (session.cwd / "ran").exists()


@pytest.mark.case(327)
def test_an_owner_dies_while_its_cell_is_queued(session: Agent) -> None:
    """Its cell leaves the queue unrun; the sibling's active cell and later ones go on."""
    other, gate = twin(session), Gate()
    active = occupied(session, gate)
    waiting = queued(other, "open('ran', 'w')")
    later = queued(session, "print('later')")
    other.owner.close()

    assert flags(waiting.result()) == {**LOST, "reason": "kernel_discarded"}
    gate.call("busy").release()
    assert (active.result().text, flags(active.result())) == ("done\n", FRESH)
    assert (later.result().text, flags(later.result())) == ("later\n", SUCCESS)
    assert not (session.cwd / "ran").exists()


@pytest.mark.case(253)
def test_session_reset_rotates_the_kernel(session: Agent) -> None:
    """After `detach` the old kernel is gone, before the new identity exists; the same call starts fresh."""
    session.run("x = 1")
    pid = pid_of(session)
    assert asyncio.run(registry_of(session).detach(session.owner))
    assert process_is_gone(pid)
    assert live(session) == 0

    session.session_id = "session-2"
    result = session.run(IS_X_THERE)
    assert (result.text, flags(result)) == ("False\n", FRESH)


@pytest.mark.case(254, 255)
def test_the_owners_configuration_counts_at_each_call(session: Agent) -> None:
    """An old tool object follows its owner to per_call, to disabled and back; the kernel waits meanwhile."""
    current = session.config()

    async def config() -> ExecuteCodeConfig:
        return current

    session.owner = Owner(config=config)
    tool = session.tool()
    assert flags(session.run("x = 1", tool=tool)) == FRESH

    current = ExecuteCodeConfig(
        enabled=True, kernel_mode="per_call", python_path=sys.executable, max_output_bytes=10
    )
    per_call = session.run("print('x' in globals())\nprint('y' * 20)", tool=tool)
    assert flags(per_call) == ISOLATED
    assert per_call.details["exit_code"] == 0
    assert per_call.details["truncated"] is True
    assert per_call.text.startswith("Fals\n... [17 bytes truncated] ...\nyyyyy\n")

    current = session.config(enabled=False)
    with pytest.raises(ExecuteCodeError) as raised:
        session.run("print('runs')", tool=tool)
    assert str(raised.value) == "execute_code is disabled. Enable [runtime.tools.execute_code] in config."

    current = session.config()
    back = session.run("print(x)", tool=tool)
    assert (back.text, flags(back)) == ("1\n", SUCCESS)


@pytest.mark.case(256)
def test_a_dead_owner_means_per_call(session: Agent) -> None:
    """It is not a fallback and has no notice; no kernel is started."""
    session.owner.close()
    result = session.run("print('runs')")

    assert (result.text, flags(result)) == ("runs\n", ISOLATED)
    assert result.details["exit_code"] == 0
    assert live(session) == 0
    assert phases(session) == {}


@pytest.mark.case(332)
@pytest.mark.reason("kernel_discarded")
def test_the_active_caller_dies(session: Agent) -> None:
    """Cancelling the awaiting task discards the kernel; who queued is told so, and the next call is fresh."""
    session.run("x = 1")
    gate = Gate()

    async def main() -> tuple[str, dict[str, object]]:
        async def until(count: int) -> None:
            async with asyncio.timeout(10):
                while inflight(session) != count:
                    await asyncio.sleep(0.005)

        active = asyncio.create_task(session.tool(helpers={"read": gate}).execute({"script": WAITS}))
        async with asyncio.timeout(10):
            while not gate.held:
                await asyncio.sleep(0.005)
        waiting = asyncio.create_task(session.tool().execute({"script": "open('ran', 'w')"}))
        await until(2)
        active.cancel()
        with pytest.raises(asyncio.CancelledError):
            await active
        result = await waiting
        return result.text, flags(result)

    assert asyncio.run(main()) == (
        "execute_code session failed: kernel_discarded",
        {**LOST, "reason": "kernel_discarded"},
    )
    after = session.run(IS_X_THERE)
    assert (after.text, flags(after)) == ("False\n", FRESH)
    assert not (session.cwd / "ran").exists()


# -- the host's own end -------------------------------------------------------------------------------------

HOST = """
import json, os, sys, threading
from lemon_kernel import AbortSignal, ExecuteCode, ExecuteCodeConfig, Owner, SessionScope

owner = Owner()
config = ExecuteCodeConfig(enabled=True, kernel_mode="session", python_path=sys.executable)

def tool(session_id):
    return ExecuteCode(".", config=config, scope=SessionScope(session_id, "agent-1", owner))

def say(**what):
    print(json.dumps(what), flush=True)
"""

FORGETFUL = (
    HOST
    + """
say(pid=int(tool("idle").run_sync({"script": "import os; print(os.getpid())"}).text))
"""
)

KILLED = (
    HOST
    + """
script = '''
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(60)"], start_new_session=True)
x = 1
print(os.getpid(), child.pid)
'''
pids = [int(pid) for pid in tool("idle").run_sync({"script": script}).text.split()]

def tell(update):
    say(pids=pids + [int(pid) for pid in update.text.split()[1:]])

running = script.replace("print(", "notify(f'{os.getpid()} {child.pid}') #") + "while True: pass"
tool("running").run_sync({"script": running}, on_update=tell)
"""
)


@contextlib.contextmanager
def host(script: str, folder: pathlib.Path, tmpdir: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """A program of its own that uses the product, with a TMPDIR of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmpdir)},
    ) as program:
        try:
            yield program
        finally:
            program.kill()


@pytest.fixture
def tmpdir() -> Iterator[pathlib.Path]:
    """A TMPDIR with a short name, which must be empty at the end: a kernel's sockets lie below it."""
    folder = pathlib.Path(os.environ["TMPDIR"]) / f"host-{time.monotonic_ns()}"
    folder.mkdir()
    yield folder
    left = [str(path.relative_to(folder)) for path in folder.rglob("lemon-kernel-*")]
    assert left == []


@pytest.mark.case(328)
def test_a_forgotten_registry(folder: pathlib.Path, tmpdir: pathlib.Path) -> None:
    """A program that uses a session and never closes it exits with 0, within 3 s, and leaves nothing."""
    with host(FORGETFUL, folder, tmpdir) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        line = program.stdout.readline()
        said = time.monotonic()
        assert program.wait(20) == 0, program.stderr.read()
        took_s = time.monotonic() - said
        assert program.stderr.read() == ""

    assert took_s < 3.5
    assert process_is_gone(json.loads(line)["pid"])
    assert list(tmpdir.rglob("lemon-kernel-*")) == []


@pytest.mark.case(336)
def test_a_killed_host(session: Agent, tmpdir: pathlib.Path) -> None:
    """Its idle and its running kernel and their children are gone within 3 s, with all of its workspaces."""
    with host(KILLED, session.cwd, tmpdir) as program:
        assert program.stdout is not None
        pids = json.loads(program.stdout.readline())["pids"]
        assert len(pids) == 4
        assert not any(map(process_is_gone, pids))
        assert len(list(tmpdir.rglob("lemon-kernel-*"))) == 2
        program.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        program.wait()
        wait_until(lambda: all(map(process_is_gone, pids)), killed + 3.5 - time.monotonic(), "their deaths")
    wait_until(lambda: list(tmpdir.iterdir()) == [], 3, "the removal of the dead host's files")

    session.session_id = "idle"
    fresh = session.run(IS_X_THERE)
    assert (fresh.text, flags(fresh)) == ("False\n", FRESH)
