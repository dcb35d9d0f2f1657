"""Per-call runs with real interpreters: what a script sees, how it ends, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from lemon_provisioner import staging, workspace

from lemon_kernel.bridge.dispatch import Call, Dispatcher, Limits, Stats
from lemon_kernel.errors import InterpreterError, WorkspaceError
from lemon_kernel.helpers.base import HelperContext
from lemon_kernel.per_call import RunEnd, run_script
from lemon_kernel.scope import AbortSignal

MAGIC = importlib.util.MAGIC_NUMBER.hex()


def other_interpreters() -> list[str]:
    """Every Python from 3.9 on that pyenv has on this machine; none elsewhere."""
    found = []
    for minor in range(9, 20):
        versions = pathlib.Path("~/.pyenv/versions").expanduser()
        found += sorted(str(path) for path in versions.glob(f"3.{minor}.*/bin/python3"))
    return found


PYTHONS = [pytest.param((sys.executable, MAGIC), id="compiled")] + [
    pytest.param((path, None), id=pathlib.Path(path).parts[-3]) for path in other_interpreters()
]
every_python = pytest.mark.parametrize("python", PYTHONS)
Python = tuple[str, str | None]
HOST: Python = (sys.executable, MAGIC)


@dataclass
class Run:
    """One run to be, with everything it may be given; `await run.go(script)` runs it."""

    timeout_s: float = 30
    helpers: Sequence[str] = ("read", "ls")
    max_output_bytes: int = 50_000
    cwd: str = "/"
    abort: AbortSignal = field(default_factory=AbortSignal)
    notes: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stats: Stats | None = None

    async def invoke(self, call: Call, context: HelperContext) -> str:
        return f"{call.tool} {call.params}"

    async def go(self, script: str, python: Python = HOST) -> RunEnd:
        dispatcher = Dispatcher(
            cell="1",
            limits=Limits(10_000, 5_000_000, 65_536, 4),
            helpers=self.helpers,
            invoke=self.invoke,
            cwd=self.cwd,
            abort=self.abort,
            on_notify=self.notes.append,
        )
        end = None
        try:
            end = await run_script(
                script,
                interpreter=python[0],
                magic=python[1],
                cwd=self.cwd,
                deadline=asyncio.get_running_loop().time() + self.timeout_s,
                helpers=self.helpers,
                dispatcher=dispatcher,
                abort=self.abort,
                max_output_bytes=self.max_output_bytes,
            )
        finally:
            self.stats = await dispatcher.close(killed=end is None or end.cut is not None)
            self.texts = dispatcher.text_blocks
        return end


def run(script: str, python: Python = HOST, **settings: object) -> tuple[RunEnd, Run]:
    the_run = Run(**settings)  # type: ignore[arg-type]
    return asyncio.run(the_run.go(script, python)), the_run


def output_of(script: str, python: Python = HOST, code: int = 0) -> str:
    end, _ = run(script, python)
    assert (end.exit_code, end.cut) == (code, None), end.output.text
    return end.output.text


def leftovers() -> list[str]:
    return [name for name in os.listdir(workspace.private_root()) if name != workspace.MARKER_NAME]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No descriptor, workspace or process of a run survives it."""
    workspace.private_root()
    asyncio.run(Run().go("pass"))  # the tracker and its pipe are started once
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert leftovers() == []


def is_alive(pid: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


# What a script sees


@every_python
def test_surroundings(python: Python) -> None:
    """argv, names, paths, streams and descriptors are those of a script that was started plainly."""
    script = """
import os, sys
print(sys.argv, __name__, os.path.basename(__file__), os.path.exists(__file__), __doc__, __spec__)
print(sys.modules["__main__"].__dict__ is globals(), sys.path[0] == os.path.dirname(__file__), "" in sys.path)
print(sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.fileno(), sys.stdout.name)
print(sorted(n for n in globals() if not n.startswith("__")))
print([fd for fd in sorted(map(int, os.listdir("/proc/self/fd"))) if 2 < fd < 200 and os.path.exists(f"/proc/self/fd/{fd}")])
print(os.readlink("/proc/self/fd/0"), os.getcwd())
import lemon_tools
print(lemon_tools is sys.modules["lemon_tools"], sys.modules["lemon_tools"].__name__)
print("\\ud800")
"""
    assert output_of(script, python).splitlines() == [
        "['script.py'] __main__ script.py True None None",
        "True True False",
        "utf-8 backslashreplace True 1 <stdout>",
        "['ToolError', 'batch', 'ls', 'notify', 'os', 'read', 'sys', 'text']",
        "[]",
        "/dev/null /",
        "True lemon_tools",
        "\\ud800",
    ]


@every_python
def test_bridge(python: Python) -> None:
    """Helpers, text, notify and batch work, and so do threads of the script."""
    script = """
import threading
text(read("a", limit=2))
print(batch([("ls", None), ("read", {"path": "b"})]))
threads = [threading.Thread(target=text, args=(n,)) for n in range(5)]
for t in threads: t.start()
for t in threads: t.join()
try:
    read("x\\ud800")
except ToolError as error:
    print(type(error).__module__, error.tool, error)
print(help(read))
notify("last")
"""
    end, the_run = run(script, python)
    assert end.exit_code == 0, end.output.text
    assert the_run.texts[0] == "read {'path': 'a', 'limit': 2}"
    assert sorted(the_run.texts[1:]) == ["0", "1", "2", "3", "4"]
    assert the_run.notes == ["last"]
    lines = end.output.text.splitlines()
    assert lines[0] == """['ls {}', "read {'path': 'b'}"]"""
    assert lines[1].startswith("lemon_tools read parameter 'path' holds a surrogate")
    assert "Help on function read in module lemon_tools:" in lines
    assert the_run.stats is not None
    assert the_run.stats.calls == 3


def test_disabled_helper() -> None:
    """A disabled helper is not defined, and past the stub the host refuses it."""
    script = """
try:
    ls()
except NameError as error:
    print(error)
import lemon_tools
print(lemon_tools._raw({"type": "call", "id": 1, "token": lemon_tools._raw.token, "tool": "ls"})["content"])
"""
    end, _ = run(script, helpers=["read"])
    assert end.output.text == (
        "name 'ls' is not defined\ntool 'ls' is not available inside execute_code scripts\n"
    )


@every_python
def test_input(python: Python) -> None:
    """Every way to read from stdin raises the unsupported-input error; children see end of file."""
    script = """
import subprocess, sys
for ask in (input, sys.stdin.read, sys.stdin.readline, sys.stdin.readlines, lambda: next(iter(sys.stdin)),
            lambda: list(sys.stdin), sys.stdin.buffer.read, sys.stdin.buffer.readline, sys.__stdin__.read):
    try:
        ask()
        print("read something")
    except RuntimeError as error:
        if "input() is not supported" not in str(error): print(error)
print(subprocess.run(["cat"], stdin=sys.stdin).returncode, sys.stdin.isatty(), sys.stdin.fileno())
"""
    assert output_of(script, python) == "0 False 0\n"


@every_python
def test_child_output_order(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines keep their order with those of children, whatever PYTHONUNBUFFERED says; no deadlock at 1 MB."""
    script = """
import os, subprocess, sys
for n in range(3):
    print("ours", n)
    subprocess.run(["echo", "child", str(n)])
    print("error", n, file=sys.stderr)
os.write(1, b"raw\\n")
subprocess.run(["head", "-c", "1000000", "/dev/zero"])
print("end")
"""
    for value in ("1", ""):
        monkeypatch.setenv("PYTHONUNBUFFERED", value)
        text = output_of(script, python)
        assert text.startswith("".join(f"ours {n}\nchild {n}\nerror {n}\n" for n in range(3)) + "raw\n")
        assert text.endswith("end\n")


@every_python
def test_multiprocessing_spawn(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned and forked children work, import lemon_tools, and get ToolError from every call."""
    script = """
import multiprocessing
def work(n):
    said = []
    for call in (ls, lambda: text("x"), lambda: batch([("ls", None)])):
        try:
            call()
        except ToolError as error:
            said.append(str(error))
    return n * 2, set(said)
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(work, [21]))
"""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    expected = "[(42, {'helpers work only in the process that runs the script'})]\n"
    assert output_of(script, python) == expected * 2


# Tracebacks and exit codes


def plainly(script: str, python: Python, folder: pathlib.Path) -> tuple[int, str]:
    """Run `script` with its prelude as Python itself would, and name its file as we do."""
    pathlib.Path(folder, "lemon_tools.py").write_text(
        "class ToolError(Exception): pass\ndef read(path): raise ToolError('nothing there')\n"
        "ls = text = notify = batch = None\n"
    )
    file = pathlib.Path(folder, "script.py")
    file.write_bytes(staging.staged_script(script, ["read", "ls"]))
    done = subprocess.run(
        [python[0], str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"},
        check=False,
    )
    return done.returncode, done.stdout.decode().replace(str(file), "<cell 1>")


FAILURES = {
    "raise": "def f(x):\n    return 1 / x\n\nf(0)\n",
    "chain": "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('two\\nlines') from e\n",
    "context": "try:\n    {}['k']\nexcept KeyError:\n    import os\n    os.stat('/nowhere')\n",
    "syntax": "x = 1\nthis is not python(\n",
    "indent": "if 1:\nx = 1\n",
    "syntax in a library": "compile('a b', 'lib.py', 'exec')\n",
    "group": "import sys\nif sys.version_info < (3, 11): raise ValueError\n"
    "raise ExceptionGroup('many', [ValueError(1), ExceptionGroup('in', [KeyError('k')])])\n",
    "recursion": "def f(): f()\nf()\n",
    "notes": "e = ValueError('x')\ne.__notes__ = ['a note']\nraise e\n",
    "unprintable": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n",
    "no message": "raise KeyError\n",
    "base": "raise BaseException('b')\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "name suggestion": "value = 1\nvalu\n",
    "non-ascii": "é = 'ä\U0001f600'\nraise ValueError(é)\n",
    "exit": "import sys\nsys.exit()\n",
    "exit 3": "print('a')\nimport sys\nsys.exit(3)\n",
    "exit text": "raise SystemExit('stopped: é')\n",
    "exit -1": "exit(-1)\n",
    "exit 256": "exit(256)\n",
    "exit True": "exit(True)\n",
    "exit object": "raise SystemExit([1, 2])\n",
    "os._exit": "import os\nprint('kept')\nos._exit(7)\n",
    "killed": "import os\nprint('kept')\nos.kill(os.getpid(), 9)\n",
    "aborted": "import os\nprint('kept')\nos.abort()\n",
    "own excepthook": "import sys, traceback\n"
    "sys.excepthook = lambda t, v, tb: print('hook', traceback.format_exception(t, v, tb))\n1/0\n",
    "broken stdout": "import sys\nprint('first')\nsys.stdout = None\n1/0\n",
    "closed stdout": "import sys\nprint('first')\nsys.stdout.close()\n1/0\n",
    "atexit and threads": "import atexit, threading, time\natexit.register(print, 'atexit')\n"
    "threading.Thread(target=lambda: (time.sleep(.05), print('thread'))).start()\nprint('main')\n",
    "finaliser": "class A:\n    def __del__(self): print('deleted')\na = A()\n",
    "thread raises": "import threading\nt = threading.Thread(target=lambda: 1/0, name='T')\nt.start()\nt.join()\n",
    "future": "from __future__ import annotations\ndef f(a: nowhere): pass\n1/0\n",
    "warning": "import warnings\nwarnings.warn('careful')\n",
    "print_exc": "import traceback\ntry:\n    1/0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n",
}


FIRST_MINOR_TO_PRINT_ALIKE = {"syntax": 10, "unprintable": 11, "name suggestion": 12, "thread raises": 13}


def minor_version(python: Python) -> int:
    """Return the minor version, which pyenv has in the path."""
    if python[1] is not None:
        return sys.version_info[1]
    return int(pathlib.Path(python[0]).parts[-3].split(".")[1])


def repetitions_hidden(text: str) -> str:
    """Forget how deep the stack was when it overflowed: ours is two frames deeper."""
    return re.sub(r"repeated \d+ more", "repeated many more", text)


@every_python
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.case(49, 50, 51, 315)
def test_ends_as_python_does(name: str, python: Python, tmp_path: pathlib.Path) -> None:
    """Output and exit code are those of `python script.py`, but for the file's name in tracebacks."""
    if minor_version(python) < FIRST_MINOR_TO_PRINT_ALIKE.get(name, 9):
        pytest.skip("this interpreter's own printer and its traceback module differ")
    script = FAILURES[name]
    end, _ = run(script, python)
    code, text = plainly(script, python, tmp_path)
    assert repetitions_hidden(end.output.text) == repetitions_hidden(text)
    assert end.exit_code == (code if code >= 0 else 128 - code)


@every_python
def test_tool_error_traceback(python: Python) -> None:
    """A helper's failure shows the script's line and no frame of ours, also in causes and in threads."""
    script = """
try:
    text("x" * 70000)
except ToolError as error:
    raise ValueError("second") from error
"""
    text = output_of(script, python, code=1)
    assert [line for line in text.splitlines() if line.startswith("  File ")] == [
        '  File "<cell 1>", line 4, in <module>',
        '  File "<cell 1>", line 6, in <module>',
    ]
    assert '    text("x" * 70000)\n' in text
    assert "\nlemon_tools.ToolError: text() byte budget exceeded (0 bytes" in text
    assert "lemon-private" not in text


@every_python
def test_sources(python: Python) -> None:
    """inspect and linecache know the script's source, also when the script imports them late."""
    script = """def f():
    return 'é'  # f
class C:
    pass  # C
import importlib.util, sys
importlib.util.find_spec("linecache")  # looking is not importing
import inspect
print(any("lemon" in type(finder).__module__ for finder in sys.meta_path))
print(inspect.getsource(f), inspect.getsource(C), sep="")
print(f.__code__.co_filename, inspect.getsourcefile(f))
"""
    text = output_of(script, python)
    assert text == ("False\ndef f():\n    return 'é'  # f\nclass C:\n    pass  # C\n\n<cell 1> <cell 1>\n")


def test_start_is_lean() -> None:
    """Nothing that costs milliseconds is imported before the script runs (recipes 5)."""
    script = "import sys\nprint(sorted(sys.modules))"
    heavy = {"json", "threading", "traceback", "linecache", "re", "enum", "typing", "socket", "signal"}
    plain = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    there = set(plain.strip("[]\n'").split("', '"))
    ours = set(output_of(script).strip("[]\n'").split("', '"))
    assert not (ours - there) & heavy


# Ends


@pytest.mark.case(181)
@pytest.mark.parametrize("death", ["os._exit(0)", "os.kill(os.getpid(), 9)", "1/0", "time.sleep(60)"])
def test_text_survives(death: str) -> None:
    """What text() returned for is in the result, however the interpreter dies."""
    end, the_run = run(f"import os, time\ntext('kept')\nnotify('seen')\n{death}", timeout_s=1)
    assert the_run.texts == ["kept"]
    assert the_run.notes == ["seen"]
    assert (end.cut is None) == ("sleep" not in death)


@pytest.mark.case(55)
def test_timeout() -> None:
    """At the deadline the group is killed at once, handlers or not; there is no exit code."""
    script = """
import os, signal, time
for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(60)
"""
    began = time.monotonic()
    end, _ = run(script, timeout_s=0.7)
    assert time.monotonic() - began < 5
    assert (end.cut, end.exit_code) == ("timeout", None)
    assert not is_alive(int(end.output.text))


@pytest.mark.case(54)
@pytest.mark.parametrize("early", [False, True])
def test_abort(early: bool) -> None:
    """An abort is noticed at once, also one that came before the start, and beats an expired deadline."""

    async def main() -> None:
        the_run = Run(timeout_s=-1 if early else 30)
        if early:
            the_run.abort.abort()
        task = asyncio.create_task(the_run.go("notify('up')\nimport time\ntime.sleep(60)"))
        while not early and not the_run.notes:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await asyncio.to_thread(the_run.abort.abort)
        end = await task
        assert time.monotonic() - began < 2
        assert (end.cut, end.exit_code) == ("cancelled", None)

    asyncio.run(main())


@pytest.mark.case(322)
@pytest.mark.parametrize("ending", ["", "time.sleep(60)"])
def test_children_end_with_the_run(ending: str) -> None:
    """Children in the group, in a session of their own, and double-forked: all gone on return."""
    script = f"""
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(w, str(os.getpid()).encode())
    os.execv(sys.executable, sleep)
pids.append(int(os.read(r, 20)))
print(*pids, flush=True)
{ending}
os._exit(0)
"""
    end, _ = run(script, timeout_s=1.5)
    assert end.cut == ("timeout" if ending else None)
    pids = [int(pid) for pid in end.output.text.split()]
    assert len(pids) == 3
    assert not any(map(is_alive, pids))


def test_chatty_child_prolongs_nothing() -> None:
    """The run ends with its interpreter, although a child still writes into the pipe without a pause."""
    script = "import subprocess\nprint('first')\nsubprocess.Popen(['yes'])\n"
    began = time.monotonic()
    end, _ = run(script, max_output_bytes=100_000_000)
    assert time.monotonic() - began < 5
    assert end.exit_code == 0
    assert end.output.text.startswith("first\n")


@pytest.mark.case(317)
def test_posthumous_request() -> None:
    """A call that a forked child writes after the script's end is not run, counted or answered."""
    script = """
import json, os, lemon_tools, time
carrier = lemon_tools._grant.carrier
frame = json.dumps({"type": "call", "id": 9, "token": lemon_tools._raw.token, "tool": "ls"}).encode()
if os.fork() == 0:
    time.sleep(0.05)
    os.write(carrier._descriptor, len(frame).to_bytes(4, "big") + frame)
    os._exit(0)
os._exit(0)
"""
    end, the_run = run(script)
    assert end.exit_code == 0
    assert the_run.stats == Stats()


@pytest.mark.parametrize("moments", [0, 1, 3, 30])
def test_caller_dies(moments: int) -> None:
    """When the awaiting task is cancelled at any moment, twice even, everything is gone on return."""

    async def main() -> None:
        the_run = Run()
        task = asyncio.create_task(
            the_run.go("notify('up')\nprint('x' * 60000)\nimport time\ntime.sleep(60)")
        )
        for _ in range(moments):
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert leftovers() == []  # no spill file either: nobody will read it


def test_hostile_script() -> None:
    """A script that closes, floods or floods with junk harms itself only."""
    scripts = [
        "import os\nos.closerange(3, 1000)\ntry: ls()\nexcept ToolError as e: print(e)",
        "import os, lemon_tools\nfor _ in range(200): os.write(lemon_tools._grant.carrier._descriptor, b'\\xff' * 9)",
        'import lemon_tools\nfor n in range(3000): lemon_tools._raw(b\'{"type": "call", "id": 1.5}\')\nprint(ls())',
        "import sys\nsys.modules.clear()\nprint(read('x'))",
    ]
    expected = ["the helper host is gone\n", None, "ls {}\n", "read {'path': 'x'}\n"]
    for script, text in zip(scripts, expected, strict=True):
        end, _ = run(script, timeout_s=2)
        assert text is None or end.output.text == text


# Failures of the start


def test_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a private workspace nothing is started."""

    def refuse(folder: str, name: str, data: bytes) -> str:
        raise workspace.StagingError("disk full (TMPDIR)")

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "write_private", refuse)
        with pytest.raises(WorkspaceError) as caught:
            asyncio.run(Run().go("pass"))
    assert str(caught.value) == "execute_code could not create its private workspace: disk full (TMPDIR)"


@pytest.mark.parametrize("settings", [{"python": ("/nowhere/python", MAGIC)}, {"cwd": "/nowhere"}])
def test_cannot_start(settings: dict[str, object]) -> None:
    """An interpreter or folder that vanished is an error before anything ran, and leaves nothing."""
    python = settings.pop("python", HOST)
    with pytest.raises(InterpreterError, match="nowhere"):
        run("pass", python, **settings)  # type: ignore[arg-type]


@pytest.mark.case(58)
def test_concurrent_runs() -> None:
    """Runs side by side share nothing."""

    async def main() -> None:
        runs = [Run() for _ in range(6)]
        ends = await asyncio.gather(
            *(the_run.go(f"text(read({n}))\nprint({n})") for n, the_run in enumerate(runs))
        )
        for n, (the_run, end) in enumerate(zip(runs, ends, strict=True)):
            assert end.output.text == f"{n}\n"
            assert the_run.texts == [f"read {{'path': {n}}}"]

    asyncio.run(main())


def test_large_script_and_output() -> None:
    """A script of a mebibyte runs, and output over the cap goes to a spill file that survives the run."""
    end, _ = run("x = '''" + "a" * 1_000_000 + "'''\nprint(x)\n", max_output_bytes=1000)
    assert end.output.truncated
    assert end.output.full_output_path is not None
    assert os.path.getsize(end.output.full_output_path) == 1_000_001
    workspace.finish_spill(end.output.full_output_path, keep=False)
