"""Scripts that mean harm, or might as well (issue 4): a clear error or an honest result, and the next run works.

Each runs in both modes where it applies.  The fixture :func:`agent` checks afterwards that no process, no
workspace and no descriptor of the run is left.  Every script ends by itself: counts and lifetimes are bounded, so
that a fault of the product costs a test and not the machine.  A frame of 64 MiB is case 173 in ``test_bridge.py``;
here it is a frame that never ends.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from lemon_kernel import ExecuteCodeError, ToolResult

from ..conftest import SOAK
from .conftest import Agent, private_roots, process_is_gone, read_pid, wait_until
from .doubles import files

pytestmark = pytest.mark.timeout(120)

DEATH_S = 4.0
"""The graces of a session kernel (behaviour 6.7), and some slack."""


def marked_processes() -> set[int]:
    """Return the processes that this test run's product has launched: marked, and with our own TMPDIR."""
    mine = b"TMPDIR=" + os.environb[b"TMPDIR"]
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                environ = pathlib.Path("/proc", name, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mine in environ and any(entry.startswith(b"LEMON_RUN_ID=") for entry in environ):
                found.add(int(name))
    return {pid for pid in found if not process_is_gone(pid)}


def workspaces() -> set[str]:
    return {
        entry.name
        for root in private_roots()
        for entry in root.iterdir()
        if entry.name.startswith(("lemon-exec-code-", "lemon-kernel-"))
    }


@pytest.fixture
def agent(agent: Agent) -> Iterator[Agent]:
    """An agent in each mode; nothing of what it launched is there after the test."""
    processes, folders = marked_processes(), workspaces()
    yield agent
    if agent.mode == "per_call":  # a run leaves nothing when it returns
        assert (marked_processes() - processes, workspaces() - folders) == (set(), set())
    agent.close()
    wait_until(lambda: marked_processes() <= processes, DEATH_S, "the death of everything that was launched")
    wait_until(lambda: workspaces() <= folders, DEATH_S, "the removal of the workspaces")


@pytest.fixture
def session(session: Agent) -> Iterator[Agent]:
    """As :func:`agent`, in session mode only."""
    processes, folders = marked_processes(), workspaces()
    yield session
    session.close()
    wait_until(lambda: marked_processes() <= processes, DEATH_S, "the death of everything that was launched")
    wait_until(lambda: workspaces() <= folders, DEATH_S, "the removal of the workspaces")


def assert_next_works(agent: Agent, before: ToolResult) -> None:
    """The next run prints, uses a helper and has its result; its kernel is new exactly if the last was lost."""
    files(agent.cwd, {"after.txt": "still here"})
    result = agent.run("import sys; sys.stdout.write('out\\n'); text(read('after.txt'))")
    assert result.details.get("reason") is None, result.text
    assert "1: still here" in result.text
    assert "out\n" in result.text
    if agent.mode == "session":
        assert "fallback_reason" not in result.details
        assert result.details["kernel_reused"] is before.details["state_retained"]


def ended(agent: Agent, result: ToolResult, signal_number: int) -> None:
    """The interpreter died of a signal that was not ours: each mode says so in its own way (2.7, 6.8)."""
    if agent.mode == "per_call":
        assert result.details["reason"] == "exit"
        assert result.details["exit_code"] == 128 + signal_number
        assert f"Script exited with code {128 + signal_number}" in result.text
    else:
        assert result.details["reason"] == "kernel_died"
        assert result.details["state_retained"] is False
        assert "execute_code session failed: kernel_died" in result.text


# descriptors


def test_it_closes_the_first_ten_descriptors(agent: Agent) -> None:
    """The bridge is out of reach; what was acknowledged stands, and in a kernel the loss is said (D-21)."""
    result = agent.run("import os\ntext('held')\nos.closerange(0, 10)\ntext('after')", timeout_ms=5000)

    assert "Script result (text()):\nheld" in result.text
    if agent.mode == "per_call":
        assert "reason" not in result.details
        assert "held\nafter" in result.text
    else:
        assert result.details.get("reason") in (None, "kernel_died", "timeout", "protocol_fault")
    assert_next_works(agent, result)


def test_it_closes_descriptors_3_to_200(agent: Agent) -> None:
    """As above, with everything that a kernel's sockets stand on."""
    result = agent.run("import os\ntext('held')\nos.closerange(3, 201)\nprint('closed')", timeout_ms=5000)

    assert "Script result (text()):\nheld" in result.text
    if agent.mode == "per_call":
        assert "reason" not in result.details
        assert "closed\n" in result.text
    else:
        assert result.details.get("reason") in (None, "kernel_died", "timeout", "protocol_fault")
    assert_next_works(agent, result)


def test_it_opens_until_no_descriptor_is_left(agent: Agent) -> None:
    """text() and helpers need no new descriptor; a kernel that was let go of them works on."""
    files(agent.cwd, {"f": "x"})
    result = agent.run(
        """
import os, resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
opened = []
try:
    while True:
        opened.append(os.dup(2))
except OSError as error:
    text(error.strerror)
text(read("f"))
for descriptor in opened:
    os.close(descriptor)
print(len(opened) > 100)
"""
    )

    assert "reason" not in result.details, result.text
    assert "Too many open files\n1: x\n\nDiagnostics" in result.text
    assert result.text.endswith("True\n")
    assert_next_works(agent, result)


def test_it_keeps_every_descriptor(session: Agent) -> None:
    """With none left in the kernel the reply and the next cell still come: neither needs a new one."""
    result = session.run(
        """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
opened = []
try:
    while True:
        opened.append(os.dup(2))
except OSError:
    pass
"""
    )

    assert "reason" not in result.details, result.text
    assert_next_works(session, result)


# signals and death


def test_it_terminates_its_own_group(agent: Agent) -> None:
    """SIGTERM to the group, and with it to the interpreter: its output until then is there."""
    result = agent.run(
        "import os, signal, time\nprint('before')\nos.killpg(os.getpgrp(), 15)\ntime.sleep(20)"
    )

    ended(agent, result, 15)
    assert "before\n" in result.text
    assert_next_works(agent, result)


def test_it_kills_its_own_group(agent: Agent) -> None:
    """``os.killpg(0, 9)`` reaches neither the host nor the tracker."""
    result = agent.run("import os\ntext('held')\nprint('before')\nos.killpg(0, 9)")

    ended(agent, result, 9)
    assert "held\n\nDiagnostics" in result.text
    assert "before\n" in result.text
    assert_next_works(agent, result)


def test_it_leaves_without_a_word(agent: Agent) -> None:
    """``os._exit(3)``: the status per call, ``kernel_died`` for a cell; text() and output survive."""
    result = agent.run("import os\ntext('held')\nprint('before')\nos._exit(3)")

    if agent.mode == "per_call":
        assert (result.details["reason"], result.details["exit_code"]) == ("exit", 3)
    else:
        assert (result.details["reason"], result.details["state_retained"]) == ("kernel_died", False)
    assert "held\n\nDiagnostics" in result.text
    assert "before\n" in result.text
    assert_next_works(agent, result)


def test_it_reads_address_zero(agent: Agent) -> None:
    """A segmentation fault ends the interpreter only."""
    result = agent.run(
        "import ctypes, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nprint('before')\n"
        "ctypes.string_at(0)"
    )

    ended(agent, result, 11)
    assert "before\n" in result.text
    assert_next_works(agent, result)


def test_it_recurses_until_the_stack_is_gone(agent: Agent) -> None:
    """Recursion through C with the limit lifted overflows the stack: a crash, reported as one."""
    result = agent.run(
        """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
sys.setrecursionlimit(10**9)
def deeper(x):
    return sorted([x], key=deeper)
print('before')
deeper(1)
"""
    )

    ended(agent, result, 11)
    assert "before\n" in result.text
    assert_next_works(agent, result)


def test_it_recurses_without_an_end(agent: Agent) -> None:
    """An ordinary RecursionError is an ordinary exception, its traceback of sane size."""
    result = agent.run("def deeper():\n    deeper()\ndeeper()")

    assert result.details["reason"] == ("exit" if agent.mode == "per_call" else "exception")
    assert "RecursionError: maximum recursion depth exceeded" in result.text
    assert len(result.text) < 10_000
    assert_next_works(agent, result)


def test_it_sets_an_alarm(agent: Agent) -> None:
    """SIGALRM has its default action: it ends the interpreter as it would end any program."""
    result = agent.run("import signal, time\nprint('before')\nsignal.alarm(1)\ntime.sleep(20)")

    ended(agent, result, 14)
    assert "before\n" in result.text
    assert_next_works(agent, result)


def test_an_alarm_whose_handler_raises_interrupts_a_helper_call(agent: Agent) -> None:
    """The exception comes out of the call; the next call of the same script works."""

    async def read(params: object, context: object) -> str:
        import asyncio

        await asyncio.sleep(1 if params == {"path": "slow"} else 0)
        return "read"

    result = agent.run(
        """
import signal
class Late(Exception):
    pass
def late(*_):
    raise Late
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    read("slow")
except Late:
    text("late")
text(read("quick"))
signal.signal(signal.SIGALRM, signal.SIG_DFL)
""",
        helpers={"read": read},
    )

    assert "late\nread\n\nDiagnostics" in result.text
    assert "reason" not in result.details
    assert_next_works(agent, result)


# limits of its own


def test_it_forbids_itself_new_descriptors(agent: Agent) -> None:
    """RLIMIT_NOFILE below almost every descriptor in use: what is open works, new ones are the script's error."""
    result = agent.run(
        """
import os, resource
old = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, old[1]))
try:
    open("/dev/null")
except OSError as error:
    text(error.strerror)
resource.setrlimit(resource.RLIMIT_NOFILE, old)
"""
    )

    assert "Too many open files\n\nDiagnostics" in result.text, result.text
    assert "reason" not in result.details
    assert_next_works(agent, result)


def test_it_forbids_itself_all_descriptors(per_call: Agent) -> None:
    """With RLIMIT_NOFILE 0 not even ``poll()`` works: a ToolError says so, and text() is told all the same."""
    result = per_call.run(
        """
import resource
old = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, old[1]))
try:
    text("held")
except ToolError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, old)
text(type(ls()).__name__)
"""
    )

    assert "held\nstr\n\nDiagnostics" in result.text
    assert "reason" not in result.details
    assert_next_works(per_call, result)


def test_it_limits_its_memory(agent: Agent) -> None:
    """RLIMIT_AS: a MemoryError is an exception like any other, and the traceback still fits."""
    result = agent.run(
        """
import resource
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
print("before")
bytearray(1 << 30)
"""
    )

    assert result.details["reason"] == ("exit" if agent.mode == "per_call" else "exception")
    assert "before\n" in result.text
    assert "MemoryError" in result.text
    assert_next_works(agent, result)


def test_it_limits_its_processor_time(agent: Agent) -> None:
    """RLIMIT_CPU ends a loop with SIGXCPU."""
    result = agent.run(
        """
import resource, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
used = int(time.process_time())
resource.setrlimit(resource.RLIMIT_CPU, (used + 1, used + 3))
print("before", flush=True)
while True:
    pass
"""
    )

    ended(agent, result, 24)
    assert "before\n" in result.text
    assert_next_works(agent, result)


# processes


def test_parent_and_child_both_call_helpers(agent: Agent) -> None:
    """The child is refused, whatever it calls; the parent is served, and no frame is mixed up."""
    files(agent.cwd, {"f": "x"})
    result = agent.run(
        """
import os
child = os.fork()
who = "parent" if child else "child"
outcomes = []
for call in (lambda: read("f"), lambda: text(who), lambda: batch([("read", {"path": "f"})])[0]) * 20:
    try:
        outcomes.append(call())
    except ToolError as error:
        outcomes.append(str(error))
if not child:
    open("child", "w").write("\\n".join(sorted(set(outcomes))))
    os._exit(0)
os.waitpid(child, 0)
print(sorted(set(map(str, outcomes))))
"""
    )

    assert (agent.cwd / "child").read_text() == "helpers work only in the process that runs the script"
    assert "['1: x', 'None']\n" in result.text
    assert result.text.count("parent\n") == 20
    assert "child" not in result.text
    assert result.details["rpc_calls"] == 40
    assert_next_works(agent, result)


FORKS = """
import os, time
for number in range(200):
    if os.fork() == 0:
        {leave}
        time.sleep(20)
        os._exit(0)
print("forked")
"""


@pytest.mark.parametrize(
    "leave",
    ["pass", "os.setsid()", "os.setsid(); os._exit(0) if os.fork() else None"],
    ids=["group", "sessions", "double forks"],
)
def test_it_forks_two_hundred_children(agent: Agent, leave: str) -> None:
    """The run is not held up by them; per call they are gone when it returns, else with their kernel."""
    started = time.monotonic()
    result = agent.run(FORKS.format(leave=leave))

    assert result.text == "forked\n"
    assert time.monotonic() - started < 15  # of their 20 seconds
    assert_next_works(agent, result)


def test_two_hundred_children_that_all_print_and_call(agent: Agent) -> None:
    """Bedlam on the shared descriptors harms neither the parent's frames nor the count of calls."""
    files(agent.cwd, {"f": "x"})
    result = agent.run(
        """
import os
children = []
for number in range(200):
    child = os.fork()
    if child == 0:
        try:
            read("f")
        except ToolError:
            os.write(1, b"refused\\n")
        os._exit(0)
    children.append(child)
    if number % 20 == 0:
        assert read("f") == "1: x"
for child in children:
    os.waitpid(child, 0)
"""
    )

    assert "reason" not in result.details, result.text
    assert result.text == "refused\n" * 200
    assert result.details["rpc_calls"] == 10


def test_a_child_with_two_forks_and_a_session_of_its_own(agent: Agent) -> None:
    """Nobody's descendant any more, and found by its marker all the same."""
    result = agent.run(
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open("daemon.tmp", "w").write(str(os.getpid()))
    os.rename("daemon.tmp", "daemon")
    time.sleep(30)
    os._exit(0)
while not os.path.exists("daemon"):
    time.sleep(0.01)
"""
    )

    daemon = read_pid(agent.cwd / "daemon")
    assert result.text == "(script produced no output)"
    assert process_is_gone(daemon) is (agent.mode == "per_call")
    assert_next_works(agent, result)
    agent.close()
    wait_until(lambda: process_is_gone(daemon), DEATH_S, "the daemon's death")


# files


def test_it_deletes_its_workspace(agent: Agent) -> None:
    """What runs does not need it any more: this run's calls work, the next run too."""
    files(agent.cwd, {"f": "x"})
    result = agent.run(
        """
import lemon_tools, pathlib, shutil
parts = pathlib.Path(lemon_tools.__file__).parts
place = next(n for n, part in enumerate(parts) if part.startswith(("lemon-exec-code-", "lemon-kernel-")))
workspace = pathlib.Path(*parts[: place + 1])
shutil.rmtree(workspace)
text(read("f"))
print(workspace.exists())
"""
    )

    assert "reason" not in result.details, result.text
    assert "1: x\n\nDiagnostics" in result.text
    assert result.text.endswith("False\n")
    assert_next_works(agent, result)


def test_it_deletes_the_private_root(agent: Agent) -> None:
    """The host makes a new one for the next run (behaviour 8)."""
    result = agent.run(
        "import glob, os, shutil\n"
        "for root in glob.glob(os.environ['TMPDIR'] + '/lemon-private-*'):\n    shutil.rmtree(root)"
    )

    assert "reason" not in result.details, result.text
    assert_next_works(agent, result)


def test_it_fills_its_workspace_with_traps(agent: Agent) -> None:
    """Links to elsewhere, a deep tree, a folder nobody may enter: removed without following anything."""
    files(agent.cwd, {"precious/f": "x"})
    result = agent.run(
        f"""
import lemon_tools, os, pathlib
folder = pathlib.Path(lemon_tools.__file__).parent
(folder / "link").symlink_to({str(agent.cwd / "precious")!r})
(folder / "loop").symlink_to(folder)
deep = folder
for _ in range(60):
    deep = deep / "d"
    deep.mkdir()
(folder / "shut").mkdir(mode=0)
os.mkfifo(folder / "fifo")
"""
    )

    assert "reason" not in result.details, result.text
    assert (agent.cwd / "precious" / "f").read_text() == "x"
    assert_next_works(agent, result)


TMPDIR_FULL = '''
import asyncio, json, os, pathlib, sys
from lemon_kernel import ExecuteCode, ExecuteCodeConfig, ExecuteCodeError, KernelRegistry, Owner, SessionScope

mode, work = sys.argv[1:]
tmp = pathlib.Path(os.environ["TMPDIR"])

def fill():
    with open(tmp / "filler", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass

async def main():
    registry, owner, told = KernelRegistry(), Owner(), []
    async def run(script):
        config = ExecuteCodeConfig(enabled=True, kernel_mode=mode, python_path=sys.executable)
        tool = ExecuteCode(work, config=config, registry=registry, scope=SessionScope("s", "a", owner))
        try:
            result = await tool.execute({"script": script})
        except ExecuteCodeError as error:
            return ["error", type(error).__name__, str(error)]
        return ["result", result.details, result.text]
    fill()
    told.append(await run("print('ran')"))
    os.unlink(tmp / "filler")
    told.append(await run("print('ran')"))
    told.append(await run("""
import os
try:
    with open(os.environ["TMPDIR"] + "/filler", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
except OSError as error:
    text(error.strerror)
print("y" * 200_000)
"""))
    os.unlink(tmp / "filler")
    told.append(await run("print('ran')"))
    owner.close()
    await registry.aclose()
    told.append([name for root in tmp.glob("lemon-private-*") for name in os.listdir(root)])
    print(json.dumps(told))

asyncio.run(main())
'''


@pytest.mark.parametrize("mode", ["per_call", "session"])
def test_tmpdir_is_full(mode: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Before a run: refused, with TMPDIR named.  During one: output is truncated without a spill file."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting a small tmpfs takes root and unshare")
    mount = pathlib.Path("/tmp", f"lk-full-{os.getpid()}")  # short: kernels keep their sockets there
    mount.mkdir(mode=0o700)
    try:
        done = subprocess.run(
            [
                "unshare",
                "--mount",
                "sh",
                "-c",
                f'mount -t tmpfs -o size=3m,mode=700 tmpfs {mount} && exec "$@"',
                "sh",
                sys.executable,
                "-c",
                TMPDIR_FULL,
                mode,
                str(folder),
            ],
            env={**os.environ, "TMPDIR": str(mount)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        mount.rmdir()
    if done.returncode != 0 and "mount" in done.stderr and "Traceback" not in done.stderr:
        pytest.skip(f"no mount here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    full, freed, filled, after, left = json.loads(done.stdout)
    assert full[:2] == ["error", "WorkspaceError"], full
    assert "execute_code could not create its private workspace" in full[2]
    assert "TMPDIR" in full[2]
    assert (freed[0], freed[2]) == ("result", "ran\n")
    assert filled[0] == "result"
    assert "No space left on device\n\nDiagnostics" in filled[2]
    assert "bytes truncated] ..." in filled[2]
    assert filled[1]["truncated"] is True
    assert "full_output_path" not in filled[1]
    assert (after[0], after[2]) == ("result", "ran\n")
    assert [name for name in left if name != ".lemon-owner"] == []


# output and bridge


def test_it_prints_what_is_no_utf8(agent: Agent) -> None:
    """Bad bytes become U+FFFD; what follows is intact."""
    result = agent.run(
        "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\xc3( ok \\xe2\\x82')\nsys.stdout.flush()"
    )

    assert result.text == "\ufffd\ufffd\ufffd( ok \ufffd"
    assert "reason" not in result.details
    assert_next_works(agent, result)


def test_it_announces_a_frame_that_never_ends(per_call: Agent) -> None:
    """A length of 4 GiB and 64 MiB of it: discarded as it comes, the host holds next to nothing (5.8)."""
    per_call.run("print('warm')")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before_kib = _memory_kib("VmRSS")

    result = per_call.run(
        """
import lemon_tools, os
text("held")
carrier = lemon_tools._raw.__globals__["_grant"].carrier
os.set_blocking(carrier._descriptor, True)
os.write(carrier._descriptor, b"\\xff\\xff\\xff\\xff")
for _ in range(64):
    data = b"x" * (1 << 20)
    while data:
        data = data[os.write(carrier._descriptor, data):]
print("written")
"""
    )

    assert "held\n\nDiagnostics" in result.text
    assert result.text.endswith("written\n")
    assert "reason" not in result.details
    assert _memory_kib("VmHWM") - before_kib < 10 << 10
    assert_next_works(per_call, result)


def _memory_kib(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise AssertionError(field)


def test_many_threads_each_call_text_once(agent: Agent) -> None:
    """10,000 threads (2,000 outside of soak), 200 at a time: each block arrives, none twice."""
    count = 10_000 if SOAK else 2_000
    result = agent.run(
        f"""
import threading
def tell(number):
    text("block %d" % number)
for start in range(0, {count}, 200):
    threads = [threading.Thread(target=tell, args=(number,)) for number in range(start, start + 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("joined")
""",
        config={"max_text_bytes": 10_000_000},
        timeout_ms=100_000,
    )

    assert "reason" not in result.details, result.text[-500:]
    blocks = [line for line in result.text.splitlines() if line.startswith("block ")]
    assert sorted(blocks) == sorted(f"block {number}" for number in range(count))
    assert result.text.endswith("joined\n")
    assert_next_works(agent, result)


def test_it_replaces_the_functions_of_lemon_tools(agent: Agent) -> None:
    """It harms itself only: a clear error in this run, and the helpers are whole in the next (6.10)."""
    result = agent.run(
        """
import lemon_tools
text("held")
for name in ("read", "grep", "find", "ls", "webfetch", "text", "notify", "batch", "_call", "_content",
             "_authority", "_number_block", "_head", "_encode", "open_grant", "close_grant", "ToolError"):
    setattr(lemon_tools, name, lambda *arguments, **options: "mine")
print(lemon_tools.read("f"))
try:
    print(text("lost"))
except Exception as error:
    print(type(error).__name__)
"""
    )

    assert "held\n\nDiagnostics" in result.text
    assert "mine\n" in result.text
    assert "reason" not in result.details, result.text
    assert_next_works(agent, result)


def test_it_deletes_everything_in_lemon_tools(agent: Agent) -> None:
    """An emptied module is an honest NameError for this run; the next one has its helpers."""
    result = agent.run(
        """
import lemon_tools
text("held")
vars(lemon_tools).clear()
text("lost")
"""
    )

    assert "held\n\nDiagnostics" in result.text
    assert result.details["reason"] in ("exit", "exception", "kernel_died", "timeout")
    assert_next_works(agent, result)


@pytest.mark.parametrize(
    "overwrite",
    [
        "import builtins; builtins.print = None",
        "import sys; sys.stdout = None",
        "import sys; sys.stdout = object()",
        "import sys; sys.stderr = sys.stdin = sys.displayhook = sys.excepthook = None",
        "import threading; threading.Thread = None",
        "import json; json.dumps = json.loads = None",
        "import time, random, datetime; time.time = time.sleep = random.random = datetime.datetime = None",
        "import logging; logging.Logger.handle = logging.Logger.makeRecord = None",
        "import traceback, linecache; traceback.TracebackException = linecache.getline = None",
    ],
)
def test_it_overwrites_what_everybody_needs(agent: Agent, overwrite: str) -> None:
    """A cell that overwrites streams, hooks or library functions still gets its reply (6.10, D-21)."""
    result = agent.run(f"text('held')\n{overwrite}", timeout_ms=10_000)

    assert "held\n\nDiagnostics" in result.text
    if agent.mode == "per_call" and overwrite.endswith("object()"):
        assert result.details["exit_code"] == 120  # what Python says when it cannot flush stdout at its end
    else:
        assert "reason" not in result.details, result.text
    assert result.details["state_retained"] is (agent.mode == "session")
    assert_next_works(agent, result)


@pytest.mark.parametrize(
    "overwrite",
    [
        "import time; time.monotonic = None",
        "import asyncio; asyncio.new_event_loop = asyncio.get_running_loop = asyncio.Future = None",
        "import builtins; builtins.isinstance = builtins.len = builtins.type = None",
        "import os; os.read = os.write = os.getpid = os.urandom = None",
        "import sys; sys.modules.clear()",
        "import sys; sys.settrace(lambda *_: 1 / 0)",
        "import gc, zmq; [each.close(0) for each in gc.get_objects() if isinstance(each, zmq.Socket)]",
    ],
)
def test_it_ruins_its_interpreter(session: Agent, overwrite: str) -> None:
    """Worse than what 6.10 promises to survive: an honest outcome, and at the latest the call after next works."""
    allowed = (None, "exception", "kernel_died", "timeout", "protocol_fault", "kernel_unavailable")
    first = session.run(f"text('held')\n{overwrite}", timeout_ms=5000)
    assert "held\n\nDiagnostics" in first.text
    assert first.details.get("reason") in allowed
    second = session.run("print('after')", timeout_ms=5000)
    assert second.details.get("reason") in allowed

    third = session.run("print(len([1]))", reset=True)

    assert (third.text, third.details.get("reason")) == ("1\n", None)


@pytest.mark.parametrize(
    "script",
    ["\0" * 100, "print('a')\0", "# \0\nprint('a')", "'\0'"],
    ids=["only", "after code", "in a comment", "in a string"],
)
def test_a_script_of_nul_bytes(agent: Agent, script: str) -> None:
    """No Python: said as for any other syntax error."""
    result = agent.run(script)

    assert result.details["reason"] == ("exit" if agent.mode == "per_call" else "exception")
    assert "null bytes" in result.text
    assert_next_works(agent, result)


def test_a_script_of_20_mb_is_refused(agent: Agent) -> None:
    """Before anything is staged, with both numbers."""
    with pytest.raises(ExecuteCodeError) as refused:
        agent.run("#" * (20 << 20))

    assert str(refused.value) == "script is too large (20971520 bytes, cap 1048576)"
    assert agent.run("print('next')").text == "next\n"


def test_a_script_of_surrogates(agent: Agent) -> None:
    """What cannot be encoded is an honest failure, not a fault of the host."""
    result = agent.run("print('before')\nx = '\ud800'\nprint(len(x))")

    assert result.details.get("reason") in (None, "exit", "exception")
    assert_next_works(agent, result)


# cells that will not end


def test_it_ignores_every_signal_it_can(agent: Agent) -> None:
    """The caller is answered at the deadline; what is deaf is killed."""
    agent.run("pass")  # a start may take longer than the deadline below
    result = agent.run(
        """
import os, signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
open("pid", "w").write(str(os.getpid()))
print("deaf", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end:
    time.sleep(0.1)
""",
        timeout_ms=1000,
    )

    assert result.details["reason"] == "timeout"
    assert result.text == "Script timed out after 1000ms.\n\ndeaf\n"
    assert_next_works(agent, result)
    wait_until(lambda: process_is_gone(read_pid(agent.cwd / "pid")), DEATH_S, "the deaf script's death")


def test_it_is_blocked_in_c_with_the_gil_held(agent: Agent) -> None:
    """No byte code runs, no signal handler, no heartbeat: the deadline holds all the same."""
    agent.run("pass")  # a start may take longer than the deadline below
    result = agent.run(
        "import ctypes, os\nopen('pid', 'w').write(str(os.getpid()))\nprint('before', flush=True)\n"
        "ctypes.PyDLL(None).sleep(20)",
        timeout_ms=1000,
    )

    assert result.details["reason"] == "timeout"
    assert "before\n" in result.text
    assert_next_works(agent, result)
    wait_until(lambda: process_is_gone(read_pid(agent.cwd / "pid")), DEATH_S, "the blocked script's death")


def test_c_code_that_holds_the_gil_for_a_while_is_healthy(agent: Agent) -> None:
    """Three seconds without any answer are no reason to discard anything (D-28)."""
    result = agent.run("import ctypes\nctypes.PyDLL(None).sleep(3)\nprint('done')")

    assert result.text == "done\n"
    assert_next_works(agent, result)


def test_it_stops_itself(agent: Agent) -> None:
    """A stopped process takes no signal but SIGKILL and SIGCONT: the deadline ends it."""
    agent.run("pass")  # a start may take longer than the deadline below
    result = agent.run(
        "import os, signal\nopen('pid', 'w').write(str(os.getpid()))\nos.kill(os.getpid(), signal.SIGSTOP)",
        timeout_ms=1000,
    )

    assert result.details["reason"] == "timeout"
    assert_next_works(agent, result)
    wait_until(lambda: process_is_gone(read_pid(agent.cwd / "pid")), DEATH_S, "the stopped script's death")


def test_its_threads_never_end(agent: Agent) -> None:
    """Per call the interpreter waits for them until the deadline; a cell does not."""
    script = textwrap.dedent(
        """
        import threading, time
        end = time.monotonic() + 20
        def linger():
            while time.monotonic() < end:
                time.sleep(0.05)
        for _ in range(50):
            threading.Thread(target=linger).start()
        print("started", flush=True)
        """
    )
    result = agent.run(script, timeout_ms=1500)

    assert "started\n" in result.text
    assert result.details.get("reason") == ("timeout" if agent.mode == "per_call" else None)
    assert_next_works(agent, result)
