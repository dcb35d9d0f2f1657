"""What an agent cell may do, what the kernel puts back, and that it always gets its reply (behaviour 6.10)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..kernels import Kernel, wait_until


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(cwd=str(tmp_path_factory.mktemp("cells"))) as kernel:
        yield kernel


def test_grammar_is_plain_python(kernel: Kernel) -> None:
    """Shell lines, magics and top-level await are syntax errors; an expression prints nothing."""
    for code in ("!ls", "%time 1", "await x"):
        ran = kernel.cell(code)
        assert ran.reply is not None
        assert ran.reply.name == "SyntaxError"
        assert "SyntaxError" in ran.output
    assert kernel.cell("1 + 1\n'shown'").output == ""


def test_globals_are_those_of_a_script(kernel: Kernel) -> None:
    """Nothing of IPython is in the globals, and the module is ``__main__`` with the argv of a script."""
    ran = kernel.cell(
        "import json, sys\n"
        "print(json.dumps([sorted(n for n in globals() if not n.startswith('__')), __name__, sys.argv,\n"
        "    '__file__' in globals(), open.__name__, sys.modules['__main__'].__dict__ is globals()]))"
    )
    names, module, argv, has_file, opener, is_main = json.loads(ran.output)

    assert {"In", "Out", "_", "get_ipython", "exit", "quit", "open"} & set(names) == set()
    assert {"read", "text", "notify", "batch", "ToolError"} <= set(names)
    assert (module, argv, has_file, opener, is_main) == ("__main__", ["script.py"], False, "open", True)


def test_state_persists(kernel: Kernel) -> None:
    """Objects, modules and the environment are still there in the next cell, also after an exception."""
    kernel.cell("import os, math\nkept = [1]\nos.environ['KEPT'] = 'yes'\nkept.append(2)\nraise ValueError")

    assert kernel.cell("print(kept, os.environ['KEPT'], math.pi > 3)").output == "[1, 2] yes True\n"
    kernel.cell("del os.environ['KEPT']")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(3)", "3"),
        ("exit()", None),
        ("quit()", None),
        ("raise SystemExit('why')", "why"),
    ],
)
def test_exit_is_a_cell_error(kernel: Kernel, code: str, message: str | None) -> None:
    """Leaving is reported without a traceback, and the kernel lives on (behaviour 2.6)."""
    kernel.cell("kept = 1")
    ran = kernel.cell(code)

    assert ran.reply is not None
    assert (ran.reply.name, ran.reply.message) == ("SystemExit", message)
    assert ran.output == ""
    assert kernel.cell("print(kept)").output == "1\n"


@pytest.mark.parametrize(
    "code", ["input('?')", "import sys; sys.stdin.read()", "import sys\nfor line in sys.stdin: pass"]
)
def test_input_is_refused(kernel: Kernel, code: str) -> None:
    """Every read of standard input raises a RuntimeError that says so; it can be caught."""
    ran = kernel.cell(code)
    assert ran.reply is not None
    assert "input() is not supported" in (ran.reply.message or "")
    caught = "try:\n  input()\nexcept RuntimeError:\n  print('caught')"
    assert kernel.cell(caught).output == "caught\n"


def test_children_read_end_of_file(kernel: Kernel) -> None:
    """Descriptor 0 is the null device, so that a child that reads it does not hang."""
    code = "import subprocess\nprint(subprocess.run(['cat'], stdout=subprocess.PIPE).stdout)"
    assert kernel.cell(code).output == "b''\n"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout = object(); sys.stderr = None",
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import sys; sys.stdout.detach()",
        "import os; os.close(1); os.close(2)",
        "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
        "import json; json.dumps = lambda *a, **k: 1 / 0; json.loads = None",
        "import json; json.JSONEncoder.encode = None; json.JSONDecoder.decode = None",
        "import builtins; kept = builtins.print; builtins.print = None",
        "import threading; kept_thread = threading.Thread; threading.Thread = None",
        "import sys; sys.displayhook = sys.excepthook = None",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, print)",
        "import signal; kept_signal = signal.signal; signal.signal = None",
        "import os; kept_chdir = os.chdir; os.chdir('/'); os.chdir = None",
        "import asyncio; asyncio.set_event_loop(None); asyncio.set_event_loop = None",
        "import hmac, hashlib; hmac.compare_digest = hashlib.sha256 = hashlib.new = None",
        "import traceback, linecache; traceback.TracebackException = None; linecache.clearcache(); 1 / 0",
        "import warnings; warnings.simplefilter('error'); import datetime; datetime.datetime = None",
        "globals().clear()",
        "import logging; logging.disable(); logging.Logger.debug = None",
        "import sys; sys.setrecursionlimit(120)",
    ],
)
def test_a_cell_cannot_silence_its_kernel(code: str) -> None:
    """Whatever common thing a cell overwrites, it gets its reply, and so does the next one with its output."""
    with Kernel() as kernel:
        ran = kernel.cell(code, timeout_s=15)
        assert ran.reply is not None, ran.error
        again = kernel.cell("import os, sys\nos.write(1, b'raw ')\nsys.stdout.write('text\\n')", timeout_s=15)
        assert again.reply is not None, again.error
        assert again.output == "raw text\n"


def test_put_back_after_each_cell(kernel: Kernel) -> None:
    """Hooks, signal handlers and the folder are as before (D-21)."""
    kernel.cell(
        "import os, signal, sys\n"
        "before = (sys.displayhook, sys.excepthook, signal.getsignal(signal.SIGTERM), os.getcwd())\n"
        "sys.displayhook = sys.excepthook = print\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.chdir('/')"
    )
    ran = kernel.cell(
        "print(before == (sys.displayhook, sys.excepthook, signal.getsignal(signal.SIGTERM), os.getcwd()))\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )

    assert ran.output == "True\nTrue\n"


def test_vanished_folder_is_a_cell_error(tmp_path: Path) -> None:
    """Without its folder a cell does not run; the state stays, and so does the next cell's chance."""
    folder = tmp_path / "gone"
    folder.mkdir()
    with Kernel(cwd=str(folder)) as kernel:
        kernel.cell("kept = 1")
        folder.rmdir()
        ran = kernel.cell("kept = 2")
        assert ran.reply is not None
        assert (ran.reply.message or "").startswith("cell cwd is no longer accessible: ")
        folder.mkdir()
        assert kernel.cell("print(kept)").output == "1\n"


def test_asyncio_works_in_cells(kernel: Kernel) -> None:
    """``asyncio.run``, ``run_until_complete``, subprocesses and ``to_thread`` work, with helper calls inside."""
    code = (
        "import asyncio\n"
        "async def main():\n"
        "    child = await asyncio.create_subprocess_exec('echo', 'child')\n"
        "    await child.wait()\n"
        "    return await asyncio.to_thread(read, 'threaded')\n"
        "print(asyncio.run(main()))\n"
    )
    assert kernel.cell(code).output == "child\nthreaded\n"
    again = "loop = asyncio.get_event_loop()\nprint(loop.run_until_complete(main()))"
    assert kernel.cell(again).output == "child\nthreaded\n"
    assert kernel.cell(again).output == "child\nthreaded\n"
    assert kernel.cell("asyncio.get_event_loop().close()").ok
    assert kernel.cell(again).output == "child\nthreaded\n"


def test_threads_of_a_finished_cell_are_refused(kernel: Kernel) -> None:
    """A pool kept in a global, and what its threads construct, cannot use a later cell's bridge (5.7)."""
    kernel.cell(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import threading\n"
        "pool = ThreadPoolExecutor(1)\n"
        "print(pool.submit(read, 'own').result())"
    )
    ran = kernel.cell(
        "def child():\n"
        "    out = []\n"
        "    def call():\n"
        "        try:\n"
        "            read('x')\n"
        "        except ToolError as error:\n"
        "            out.append(str(error))\n"
        "    thread = threading.Thread(target=call)\n"
        "    thread.start(); thread.join()\n"
        "    return out\n"
        "try:\n"
        "    pool.submit(read, 'x').result()\n"
        "except ToolError as error:\n"
        "    print(error)\n"
        "print(pool.submit(child).result())\n"
        "print(ThreadPoolExecutor(1).submit(read, 'fresh').result())"
    )

    refused = "lemon_tools bridge belongs to a finished cell; create the pool in this cell"
    assert ran.output == f"{refused}\n['{refused}']\nfresh\n"
    assert ran.stats.calls == 1


def test_output_of_a_finished_cells_thread_is_dropped(kernel: Kernel) -> None:
    """A thread that prints on after its cell appears in no later cell's output."""
    kernel.cell(
        "import threading, time\n"
        "stop = threading.Event()\n"
        "def chatter():\n"
        "    while not stop.wait(0.002):\n"
        "        print('late')\n"
        "thread = threading.Thread(target=chatter); thread.start(); time.sleep(0.02)"
    )

    assert kernel.cell("time.sleep(0.05); print('mine')").output == "mine\n"
    kernel.cell("stop.set(); thread.join()")


def test_call_in_flight_at_the_end_of_its_cell() -> None:
    """A thread that still waits for an answer when its cell ends gets ToolError; the next cell works."""

    async def slow(call: object, context: object) -> str:
        await asyncio.sleep(60)
        return "never"

    with Kernel(invoke=slow) as kernel:
        ran = kernel.cell(
            "import threading, time\n"
            "errors = []\n"
            "def call():\n"
            "    try:\n"
            "        read('x')\n"
            "    except ToolError as error:\n"
            "        errors.append(str(error))\n"
            "thread = threading.Thread(target=call); thread.start(); time.sleep(0.1)"
        )
        assert ran.ok
        assert ran.stats.accounting_loss
        assert "['" in kernel.cell("thread.join(5); print(errors)").output


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_may_import_and_not_call(kernel: Kernel, method: str, tmp_path: Path) -> None:
    """A forked or spawned child imports ``lemon_tools``; every call there raises ToolError (5.7)."""
    (tmp_path / "job.py").write_text(
        "def job(queue):\n"
        "    import lemon_tools\n"
        "    try:\n"
        "        lemon_tools.read('x')\n"
        "    except lemon_tools.ToolError as error:\n"
        "        queue.put(str(error))\n"
    )
    ran = kernel.cell(
        "import multiprocessing, sys\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "from job import job\n"
        f"context = multiprocessing.get_context({method!r})\n"
        "queue = context.Queue()\n"
        "child = context.Process(target=job, args=(queue,)); child.start()\n"
        "print(queue.get(timeout=20)); child.join()"
    )

    assert ran.output == "helpers work only in the process that runs the script\n"
    assert ran.stats.calls == 0


def test_c_library_output_belongs_to_its_cell(kernel: Kernel) -> None:
    """What C prints through stdio is written out at the end of the cell that printed it."""
    code = "import ctypes\nctypes.CDLL(None).printf(b'from C\\n')"
    assert kernel.cell(code).output == "from C\n"


def test_order_with_children_is_kept(kernel: Kernel) -> None:
    """Complete lines of the script and of its children stand in the order they were written."""
    code = (
        "import subprocess, sys\n"
        "for i in range(30):\n"
        "    print('own', i)\n"
        "    subprocess.run(['sh', '-c', f'echo child {i}; echo error {i} >&2'])\n"
        "    print('err', i, file=sys.stderr)\n"
    )
    expected = "".join(f"own {i}\nchild {i}\nerror {i}\nerr {i}\n" for i in range(30))
    assert kernel.cell(code).output == expected


def test_interrupts_lose_no_reply(kernel: Kernel) -> None:
    """Under a storm of SIGINTs at random moments every cell is answered and the kernel lives."""

    async def main() -> tuple[int, int]:
        async def storm() -> None:
            while True:
                os.kill(kernel.link.pid, signal.SIGINT)
                await asyncio.sleep(0.0007)

        storming = asyncio.ensure_future(storm())
        answered = interrupted = 0
        for _ in range(300):
            ran = await kernel.cell_async("x = sum(range(2000))", timeout_s=10)
            answered += ran.reply is not None
            interrupted += ran.reply is not None and ran.reply.name == "KeyboardInterrupt"
        storming.cancel()
        return answered, interrupted

    answered, _ = kernel.run(main())

    assert answered == 300
    assert kernel.cell("print('alive')").output == "alive\n"


def test_keyboard_interrupt_of_the_script_is_an_exception(kernel: Kernel) -> None:
    """A script that interrupts itself is told where; its state stays."""
    ran = kernel.cell("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)")

    assert ran.reply is not None
    assert ran.reply.name == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in ran.output


def test_source_of_earlier_cells_is_shown(kernel: Kernel) -> None:
    """A function of an earlier cell shows that cell's source in a traceback."""
    kernel.cell("def broken():\n    return undefined_name  # the earlier cell")
    first = kernel.number
    ran = kernel.cell("broken()")

    assert f'File "<cell {first}>", line 3, in broken' in ran.output
    assert "return undefined_name  # the earlier cell" in ran.output


def test_causes_are_kept_and_frames_of_ours_are_not(kernel: Kernel) -> None:
    """Chained causes stand in the traceback; a helper's failure shows no frame of the helper."""
    ran = kernel.cell(
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('outer') from error"
    )
    assert ran.output.index("ZeroDivisionError: division by zero") < ran.output.index("KeyError: 'outer'")
    assert "direct cause" in ran.output

    ran = kernel.cell("from lemon_tools import _raw\nread(3.5j)")
    assert "lemon_tools.ToolError: " in ran.output
    assert "shim" not in ran.output


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("def __str__(self): raise ValueError", "<unprintable Odd object>"),
        ("def __str__(self): return '\\ud800'", "\ufffd"),
        ("def __str__(self): return 'y' * 200_000", None),
    ],
)
def test_odd_exceptions_are_reported(kernel: Kernel, definition: str, message: str | None) -> None:
    """Unprintable, undecodable and huge exceptions are reported within the limits (6.10)."""
    ran = kernel.cell(f"class Odd(Exception):\n    {definition}\nraise Odd")

    assert ran.reply is not None
    assert ran.reply.name == "Odd"
    if message is None:
        assert ran.reply.message is not None
        assert len(json.dumps(ran.reply.message)) <= 48 * 1024
        assert ran.reply.message.endswith("... [truncated]")
        assert len(ran.output) <= 80 * 1024
    else:
        assert ran.reply.message == message


def test_overwritten_helper_is_back_in_the_next_cell(kernel: Kernel) -> None:
    """Each cell gets its helper names anew."""
    kernel.cell("read = text = None")
    assert kernel.cell("print(read('again'))").output == "again\n"


def test_future_imports_work(kernel: Kernel) -> None:
    """A script may open with a docstring and future imports; line numbers stay submitted + 1 (D-7)."""
    ran = kernel.cell('"""Doc."""\nfrom __future__ import annotations\nprint(read("x"))\n1 / 0')
    assert ran.output.startswith("x\n")
    assert "line 5" in ran.output


def test_environment_of_a_kernel(kernel: Kernel) -> None:
    """A kernel adds no colours, no parent poller's variables, and one marker to the environment (6.5)."""
    ran = kernel.cell("import json, os; print(json.dumps(dict(os.environ)))")
    environment = json.loads(ran.output)
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name)
    }
    assert changed <= {
        "LEMON_RUN_ID",
        "PYTEST_CURRENT_TEST",
        "PYTEST_VERSION",
        "LC_CTYPE",
        "COLUMNS",
        "LINES",
    }
    assert len(environment["LEMON_RUN_ID"]) >= 16
    assert "PYTEST_CURRENT_TEST" not in environment


def test_session_launch_is_private(kernel: Kernel) -> None:
    """The umask is the host's again, the folder is not on sys.path, and no history file exists."""
    ran = kernel.cell(
        "import os, sys\n"
        "mask = os.umask(0); os.umask(mask)\n"
        "print(mask, '' in sys.path, os.getcwd() in sys.path)\n"
        "from IPython import get_ipython\n"
        "print(get_ipython().history_manager.enabled)"
    )
    mask = os.umask(0)
    os.umask(mask)

    assert ran.output == f"{mask} False False\nFalse\n"


def test_fork_prints_no_warning(kernel: Kernel) -> None:
    """``os.fork()`` in a kernel with threads prints nothing (Python 3.12 warns)."""
    code = "import os, sys\npid = os.fork()\nif not pid:\n    os._exit(0)\nos.waitpid(pid, 0)\nprint(sys.flags.safe_path)"
    assert kernel.cell(code).output == "True\n"


def test_forked_child_that_runs_on_is_no_second_kernel(kernel: Kernel) -> None:
    """A forked child that reaches the end of the cell ends there, with the status a script would have."""
    ran = kernel.cell(
        "import os\n"
        "pid = os.fork()\n"
        "if pid:\n"
        "    print('status', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "else:\n"
        "    print('child')\n"
        "    raise SystemExit(5)"
    )

    assert ran.output == "child\nstatus 5\n"
    assert kernel.cell("print('one kernel')").output == "one kernel\n"


def test_alarm_between_cells_harms_nothing(kernel: Kernel) -> None:
    """A signal handler that a cell left behind and that raises later does not end the kernel."""
    kernel.cell(
        "import signal\n"
        "def late(*_):\n"
        "    raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, late); signal.setitimer(signal.ITIMER_REAL, 0.05)"
    )

    async def later() -> None:
        await asyncio.sleep(0.2)  # the alarm goes off in the kernel's own loop; nothing tells us when

    kernel.run(later())
    assert kernel.cell("print('alive')").output == "alive\n"


def test_shadowing_module_cannot_kill_the_start(tmp_path: Path) -> None:
    """A ``random.py`` and a ``lemon_shim`` in the folder harm neither start nor cells."""
    for name in ("random.py", "tornado.py", "lemon_tools.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    (tmp_path / "lemon_shim").mkdir()
    with Kernel(cwd=str(tmp_path)) as kernel:
        assert kernel.cell("import random, json; print(read('fine'))").output == "fine\n"


def test_processes_of_a_kernel_end_with_it() -> None:
    """A daemonised child of a cell is dead once the kernel is (D-16)."""
    with Kernel() as kernel:
        ran = kernel.cell(
            "import subprocess\n"
            "command = '(setsid sleep 600 & echo $!) '\n"
            "print(subprocess.run(['sh', '-c', 'setsid sh -c \"sleep 600 >/dev/null 2>&1 & echo \\\\$!\"'],\n"
            "    stdout=subprocess.PIPE, text=True).stdout)"
        )
        pid = int(ran.output)
        assert kernel.run(kernel.link.stop())
        wait_until(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def test_display_and_magics_are_out_of_reach(kernel: Kernel) -> None:
    """A bare expression of an object with a rich display shows nothing."""
    assert kernel.cell("class R:\n    def _repr_html_(self): return 'x'\nR()").output == ""
    assert sys.version_info >= (3, 11)
