"""One script in one fresh process, and what every run leaves behind: nothing (cases section 3)."""

from __future__ import annotations

import os
import pathlib
import re
import time

import pytest

from .conftest import Agent, private_roots, process_is_gone, read_pid, wait_until

D_1 = {
    "exit_code", "truncated", "duration_ms", "rpc_calls", "rpc_denied", "rpc_errors", "rpc_bytes", "rpc_tools",
    "persistent", "kernel_reused", "reset_performed", "state_retained",
}  # fmt: skip


def entries() -> set[pathlib.Path]:
    return {path for root in private_roots() for path in root.iterdir()}


def workspaces() -> list[pathlib.Path]:
    return [path for root in private_roots() for path in root.glob("lemon-*")]


@pytest.mark.case(46)
def test_output_is_byte_exact(per_call: Agent) -> None:
    """What a script prints is the result, its newline included; the details are those of D-1."""
    result = per_call.run('print("plain output")')

    assert result.text == "plain output\n"
    assert result.content == [{"type": "text", "text": "plain output\n"}]
    assert result.trust == "trusted"
    assert result.details["duration_ms"] >= 0
    assert result.details == {
        "exit_code": 0,
        "truncated": False,
        "duration_ms": result.details["duration_ms"],
        "rpc_calls": 0,
        "rpc_denied": 0,
        "rpc_errors": 0,
        "rpc_bytes": 0,
        "rpc_tools": [],
        "persistent": False,
        "kernel_reused": False,
        "reset_performed": False,
        "state_retained": False,
    }


@pytest.mark.case(47)
def test_script_without_output(agent: Agent) -> None:
    """A script that prints nothing is told so."""
    result = agent.run("x = 1")

    assert result.text == "(script produced no output)"
    assert set(result.details) == D_1


@pytest.mark.case(48)
def test_last_expression_is_not_shown(agent: Agent) -> None:
    """There is no display hook: a bare final expression prints nothing."""
    assert agent.run("1+1").text == "(script produced no output)"


@pytest.mark.case(49)
def test_exit_code_is_reported_after_the_output(per_call: Agent) -> None:
    """A non-zero status ends the text with a headline; ``reason`` says exit."""
    result = per_call.run('import sys; print("a"); sys.exit(3)')

    assert result.text == "a\n\nScript exited with code 3"
    assert result.details["exit_code"] == 3
    assert result.details["reason"] == "exit"
    assert per_call.run("import sys; sys.exit(4)").text == "Script exited with code 4"


def test_death_by_a_signal_of_its_own(per_call: Agent) -> None:
    """A signal that was not ours gives 128 + n (behaviour 2.7)."""
    result = per_call.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    assert result.text == "Script exited with code 137"
    assert result.details["exit_code"] == 137
    assert result.details["reason"] == "exit"


@pytest.mark.case(50)
def test_script_that_is_no_python(per_call: Agent) -> None:
    """A syntax error comes as a traceback, with a status."""
    result = per_call.run("this is not python(")

    assert "SyntaxError" in result.text
    assert result.text.endswith("\n\nScript exited with code 1")
    assert result.details["exit_code"] == 1


@pytest.mark.case(51)
def test_line_numbers_are_offset_by_one(agent: Agent) -> None:
    """The second line of a script is line 3 in its traceback, shown with its own source."""
    result = agent.run("x = 1\nraise ValueError('here')\n")

    assert "File \"<cell 1>\", line 3, in <module>\n    raise ValueError('here')\n" in result.text


@pytest.mark.case(315)
@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("from __future__ import annotations\ndef f(x: Missing): return x\nf(1)\n1/0\n", 5),
        ('"""What\nit does."""\nfrom __future__ import annotations\ntext(__doc__)\n1/0\n', 6),
        ('"""doc"""\n\n1/0\n', 4),
    ],
    ids=["future", "docstring and future", "docstring"],
)
def test_future_imports_keep_the_line_numbers(agent: Agent, script: str, line: int) -> None:
    """A script may open with a docstring and ``__future__`` imports; lines are still submitted + 1."""
    result = agent.run(script)

    assert f'File "<cell 1>", line {line}, in <module>\n    1/0\n' in result.text
    assert "ZeroDivisionError: division by zero\n" in result.text
    if "text(__doc__)" in script:
        assert "Script result (text()):\nWhat\nit does.\n\n" in result.text


@pytest.mark.case(52)
def test_nothing_survives_a_run(per_call: Agent) -> None:
    """Globals and environment of one run are not there in the next."""
    per_call.run('x=1; import os; os.environ["Z"]="1"')

    assert per_call.run('import os; print("x" in globals(), os.environ.get("Z"))').text == "False None\n"


@pytest.mark.case(53)
@pytest.mark.parametrize("reset", [True, False])
def test_reset_is_accepted_and_redundant(per_call: Agent, reset: bool) -> None:
    """A reset changes nothing where nothing is kept."""
    per_call.run("x = 1")
    result = per_call.run('print("x" in globals())', reset=reset)

    assert result.text == "False\n"
    assert result.details["reset_performed"] is False
    assert set(result.details) == D_1


@pytest.mark.case(54)
def test_abort_ends_a_sleeping_script(per_call: Agent) -> None:
    """An abort is answered at once with the cancelled text."""
    run = per_call.start("import time; open('started', 'w'); time.sleep(10)")
    wait_until((per_call.cwd / "started").exists, 20)
    begun = time.monotonic()
    run.abort()
    result = run.result()

    assert time.monotonic() - begun < 2
    assert result.text == "Script cancelled."
    assert result.details["exit_code"] is None
    assert result.details["reason"] == "cancelled"


@pytest.mark.case(55)
def test_timeout_kills_what_ignores_signals(per_call: Agent) -> None:
    """Signal handlers do not keep a per-call script alive, not even for a grace."""
    begun = time.monotonic()
    result = per_call.run(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
        "while True: pass\n",
        timeout_ms=2000,
    )

    assert time.monotonic() - begun < 5
    assert result.text == "Script timed out after 2000ms."
    assert process_is_gone(read_pid(per_call.cwd / "pid"))


CHILDREN = """
import os, subprocess, time
def note(name, pid):
    with open(name + ".new", "w") as file:
        file.write(str(pid))
    os.rename(name + ".new", name)
note("grouped", subprocess.Popen(["sleep", "60"]).pid)
note("setsid", subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("double", os.getpid())
        os.execvp("sleep", ["sleep", "60"])
    os._exit(0)
os.wait()
while not os.path.exists("double"):
    time.sleep(0.01)
"""


@pytest.mark.case(322)
def test_children_die_with_the_run(agent: Agent) -> None:
    """Children in the group, in a session of their own, and double-forked ones are gone after a timeout.

    Per call they are gone when the result is there, in a session within 4 s of it.
    """
    agent.run("pass")  # the time is the script's, not that of a kernel's start
    result = agent.run(CHILDREN + "time.sleep(60)\n", timeout_ms=2000)

    assert result.text == "Script timed out after 2000ms."
    pids = [read_pid(agent.cwd / name) for name in ("grouped", "setsid", "double")]
    if agent.mode == "session":
        wait_until(lambda: all(map(process_is_gone, pids)), 4, "death of the children")
    assert [pid for pid in pids if not process_is_gone(pid)] == []


@pytest.mark.case(322)
def test_children_neither_prolong_nor_outlive_a_run(per_call: Agent) -> None:
    """A run ends with its interpreter though children hold its output open; they end with it (D-15)."""
    begun = time.monotonic()
    result = per_call.run(CHILDREN + "print('done')\n")

    assert result.text == "done\n"
    assert time.monotonic() - begun < 10
    pids = [read_pid(per_call.cwd / name) for name in ("grouped", "setsid", "double")]
    assert [pid for pid in pids if not process_is_gone(pid)] == []


@pytest.mark.case(57)
@pytest.mark.parametrize(
    ("script", "reason"), [("print(1)", None), ("1/0", "exit"), ("while True: pass", "timeout")]
)
def test_workspace_is_removed(per_call: Agent, script: str, reason: str | None) -> None:
    """However a run ends, no staging object of it stays under the private root."""
    before = entries()  # earlier tests may have left spill files
    result = per_call.run(
        "import os\nassert os.listdir(os.path.dirname(__file__))\n" + script, timeout_ms=1000
    )

    assert result.details.get("reason") == reason
    assert workspaces() == []
    assert [path.name for path in entries() - before] in ([], [".lemon-owner"])


@pytest.mark.case(58)
def test_concurrent_runs_are_isolated(tmp_path: pathlib.Path) -> None:
    """Runs at the same time see their own folder each and have budgets of their own."""
    agents, runs = [], []
    for name in ("left", "right"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "marker.txt").write_text(f"this is {name}")
        agents.append(Agent(folder, "per_call"))
    script = "import os, time\nfor _ in range(3): print(read('marker.txt'))\n"
    script += (
        "open('mine', 'w')\nwhile not os.path.exists('../left/mine') or not os.path.exists('../right/mine'):"
    )
    script += " time.sleep(0.01)\n"
    for agent in agents:
        runs.append(agent.start(script, config={"max_rpc_calls": 3}))

    for name, run in zip(("left", "right"), runs, strict=True):
        result = run.result()
        assert result.text == f"1: this is {name}\n" * 3
        assert result.details["rpc_calls"] == 3
        assert result.details["rpc_errors"] == 0


@pytest.mark.case(59)
def test_secrets_are_not_leaked(agent: Agent) -> None:
    """A token is new for each run, 256 bits long, and neither it nor the staging place is in a result."""
    (agent.cwd / "data.txt").write_text("content")
    tokens, results = [], []
    for _ in range(2):
        results.append(
            agent.run(
                "import lemon_tools\n"
                "open('token', 'w').write(lemon_tools._raw.token)\n"
                "print(read('data.txt'))\ntext('a block')\n1/0"
            )
        )
        tokens.append((agent.cwd / "token").read_text())

    assert tokens[0] != tokens[1]
    for token in tokens:
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", token)
    for result in results:
        everything = f"{result.content} {result.details}"
        assert "1: content" in everything
        for secret in (*tokens, "lemon-private-", "lemon-exec-code-", "lemon-kernel-", os.environ["TMPDIR"]):
            assert secret not in everything


# -- what a script finds (behaviour 2.4, 6.10) ----------------------------------------------------------------


def test_script_is_main_and_its_folder_is_not_on_the_path(agent: Agent) -> None:
    """``__name__``, ``sys.argv`` and the folder are those of a script, but the folder shadows no module."""
    (agent.cwd / "random.py").write_text("raise RuntimeError('the wrong one')\n")
    result = agent.run(
        "import os, random, sys\n"
        "print(__name__, sys.argv, os.getcwd())\n"
        "print(os.getcwd() in map(os.path.realpath, sys.path), '' in sys.path)"
    )

    assert result.text == f"__main__ ['script.py'] {agent.cwd.resolve()}\nFalse False\n"


def test_standard_input_is_refused(agent: Agent) -> None:
    """``input()`` and reads of ``sys.stdin`` say what is wrong and can be caught; children read nothing."""
    result = agent.run(
        "import subprocess, sys\n"
        "for ask in (input, sys.stdin.readline, sys.stdin.read, lambda: list(sys.stdin)):\n"
        "    try:\n        ask()\n"
        "    except RuntimeError as error:\n        print('input() is not supported' in str(error))\n"
        "print(subprocess.run(['cat'], capture_output=True).stdout)"
    )

    assert result.text == "True\n" * 4 + "b''\n"


def test_environment_is_the_hosts_without_its_secrets(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts inherit the environment, less what is ours or Jupyter's (behaviour 6.5)."""
    for name in ("LEMON_SECRET", "JUPYTER_TOKEN", "JPY_API_TOKEN", "PYTEST_CURRENT_TEST", "KEPT", "PAGER"):
        monkeypatch.setenv(name, f"{name} of the host")
    result = agent.run(
        "import os\n"
        "names = 'LEMON_SECRET JUPYTER_TOKEN JPY_API_TOKEN PYTEST_CURRENT_TEST FORCE_COLOR CLICOLOR KEPT PAGER'\n"
        "print({name for name in names.split() if name in os.environ} == {'KEPT', 'PAGER'}, os.environ['PAGER'])\n"
        "print([name for name in os.environ if name.startswith(('LEMON_', 'JPY_'))])"
    )

    assert result.text == "True PAGER of the host\n['LEMON_RUN_ID']\n"


def test_traceback_shows_the_script_only(agent: Agent) -> None:
    """Frames are the script's own, with source and chained causes, without colours (behaviour 6.10)."""
    result = agent.run(
        "def inner():\n    int('x')\n"
        "try:\n    inner()\nexcept ValueError as error:\n    raise RuntimeError('wrapped') from error"
    )

    traceback = (
        "Traceback (most recent call last):\n"
        '  File "<cell 1>", line 5, in <module>\n'
        "    inner()\n"
        '  File "<cell 1>", line 3, in inner\n'
        "    int('x')\n"
        "ValueError: invalid literal for int() with base 10: 'x'\n"
        "\n"
        "The above exception was the direct cause of the following exception:\n"
        "\n"
        "Traceback (most recent call last):\n"
        '  File "<cell 1>", line 7, in <module>\n'
        "    raise RuntimeError('wrapped') from error\n"
        "RuntimeError: wrapped\n"
    )
    if agent.mode == "per_call":
        assert result.text == f"{traceback}\nScript exited with code 1"
    else:
        assert result.text == f"Script raised RuntimeError: wrapped\n\n{traceback}"


def test_exception_data_is_bounded(agent: Agent) -> None:
    """A huge message is cut in the headline and in the traceback (behaviour 6.10)."""
    result = agent.run("raise ValueError('x' * 1000000)", config={"max_output_bytes": 500_000})

    assert "... [truncated]" in result.text
    assert len(result.text) < (48 + 80 + 1) * 1024
    if agent.mode == "session":
        headline = result.text.split("\n", 1)[0]
        assert headline.startswith("Script raised ValueError: xxx")
        assert headline.endswith("... [truncated]")
        assert 40 * 1024 < len(headline) < 49 * 1024


def test_exception_that_cannot_be_printed(agent: Agent) -> None:
    """An exception whose ``str()`` fails, or has surrogates, is reported all the same (behaviour 6.10)."""
    result = agent.run("class Bad(Exception):\n    def __str__(self): raise RuntimeError\nraise Bad()")
    assert "Bad" in result.text
    assert result.details["reason"] == ("exit" if agent.mode == "per_call" else "exception")

    result = agent.run("raise ValueError('a\\ud800b')")
    assert "ValueError: a" in result.text
    assert result.details["reason"] == ("exit" if agent.mode == "per_call" else "exception")
    result.text.encode()
