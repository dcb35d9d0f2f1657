"""A person at a terminal is asked (behaviour 4.2, 4.3), with real pseudo terminals; and what happens without one."""

from __future__ import annotations

import fcntl
import os
import pathlib
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

BASE = [sys.executable, "-m", "lemon_kernel.cli", "run"]
PROMPT = 'Allow read {"path": "f"} (Tool execution: read)? y once, a this session, N: '


class Terminal:
    """A command at a terminal of its own: what is on its screen, and somebody who types."""

    def __init__(self, folder: pathlib.Path, *arguments: str, stdin: Any = None, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        self.screen = ""
        self._process = subprocess.Popen(
            [*BASE, *arguments],
            cwd=folder,
            env={**os.environ, "LEMON_EXECUTE_CODE_PYTHON_PATH": sys.executable, **environ},
            stdin=theirs if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(2, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - nothing else can
        )
        os.close(theirs)

    def see(self, text: str, count: int = 1) -> None:
        """Wait until `text` is on the screen `count` times."""
        deadline = time.monotonic() + 30
        while self.screen.count(text) < count:
            assert time.monotonic() < deadline, self.screen
            assert self._read(0.2) or self._process.poll() is None, self.screen

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> tuple[int, str]:
        """Wait for the command's end; return its status and what it wrote to standard output."""
        output, _ = self._process.communicate(timeout=40)
        while self._read(0):
            pass
        return self._process.returncode, output.decode()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        os.close(self._ours)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        try:
            self.screen += os.read(self._ours, 4096).decode()
        except OSError:  # nobody has the other end any more
            return False
        return True


Start = Callable[..., Terminal]


@pytest.fixture
def start(folder: pathlib.Path) -> Iterator[Start]:
    terminals: list[Terminal] = []

    def start(script: str, *arguments: str, policy: str = "read", **options: Any) -> Terminal:
        (folder / "f").write_text("secret")
        (folder / "a.py").write_text(script)
        options.setdefault("LEMON_POLICY_REQUIRE_APPROVAL", policy)
        terminals.append(Terminal(folder, *arguments, "a.py", **options))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


READ_TWICE = """
for turn in 1, 2:
    try:
        print(read("f"))
    except ToolError as error:
        print(error)
"""


@pytest.mark.case(130, 138)
@pytest.mark.parametrize("mode", [(), ("--session", "s")])
def test_y_approves_once(start: Start, mode: tuple[str, ...]) -> None:
    """One line with tool, parameters and rationale; a second call is another prompt."""
    terminal = start(READ_TWICE, *mode)
    terminal.see(PROMPT)
    terminal.type("y\n")
    terminal.see(PROMPT, 2)
    terminal.type("Y\n")

    assert terminal.end() == (0, "1: secret\n1: secret\n")
    assert terminal.screen.count("Allow") == 2


@pytest.mark.case(135)
@pytest.mark.parametrize("mode", [(), ("--session", "s")])
def test_a_approves_the_same_call_for_this_session(start: Start, mode: tuple[str, ...]) -> None:
    """The same parameters are not asked about again, until the command ends; others are."""
    terminal = start(
        READ_TWICE + 'try:\n    read("g")\nexcept ToolError as error:\n    print(error)\n', *mode
    )
    terminal.see(PROMPT)
    terminal.type("a\n")
    terminal.see('Allow read {"path": "g"}')
    terminal.type("n\n")

    assert terminal.end() == (0, "1: secret\n1: secret\napproval denied for 'read'\n")
    assert terminal.screen.count("Allow") == 2


@pytest.mark.case(135)
def test_a_holds_for_all_files_of_a_command(start: Start) -> None:
    """A session here is the command: its second file, in another process, is not asked about either."""
    terminal = start('print(read("f"))', "a.py")
    terminal.see(PROMPT)
    terminal.type("a\n")

    assert terminal.end() == (0, "1: secret\n1: secret\n")
    assert terminal.screen.count("Allow") == 1


@pytest.mark.case(131, 139)
@pytest.mark.parametrize("answer", ["\n", "n\n", "yess\n", "\x04"])
def test_anything_else_denies(start: Start, answer: str) -> None:
    """No is the default, also for what is nearly yes and for the end of the input."""
    terminal = start('try:\n    read("f")\nexcept ToolError as error:\n    print(error)')
    terminal.see(PROMPT)
    terminal.type(answer)

    assert terminal.end() == (0, "approval denied for 'read'\n")


@pytest.mark.case(129)
def test_the_call_itself_is_asked_about(start: Start) -> None:
    """``execute_code`` needs one answer before its script starts; denied, the command has status 3."""
    script = 'open("ran", "w").close(); print("started")'
    question = 'Allow execute_code {"script": "open(\\"ran\\", \\"w\\").close(); print(\\"started\\")"}'
    terminal = start(script, policy="execute_code")
    terminal.see(question)
    terminal.type("n\n")

    status, output = terminal.end()
    assert (status, output.startswith("Tool 'execute_code' execution was denied")) == (3, True)

    terminal = start(script, policy="execute_code")
    terminal.see(question)
    terminal.type("y\n")

    assert terminal.end() == (0, "started\n")


def test_parameters_are_cut_and_cannot_drive_the_terminal(start: Start) -> None:
    """200 characters of ASCII JSON on one line, whatever the script passes."""
    terminal = start('try:\n    read("\\x1b[2J\\n\\x07\\u202e" + "x" * 500)\nexcept ToolError:\n    pass')
    terminal.see("N: ")
    terminal.type("n\n")
    terminal.end()

    question = next(line for line in terminal.screen.splitlines() if line.startswith("Allow read "))
    shown = question.removeprefix("Allow read ").partition(" (Tool execution")[0]
    assert len(shown) == 200
    assert shown.startswith('{"path": "\\u001b[2J\\n\\u0007\\u202exxx')
    assert shown.endswith("x...")
    assert "\x1b" not in terminal.screen


def test_what_was_typed_before_a_prompt_does_not_answer_it(start: Start, folder: pathlib.Path) -> None:
    """Only what is typed at a prompt counts: an early ``y`` approves nothing."""
    terminal = start(
        "import os, time\nopen('up', 'w').close()\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n"
        'try:\n    read("f")\nexcept ToolError as error:\n    print(error)'
    )
    deadline = time.monotonic() + 30
    while not (folder / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    terminal.type("y\n")
    terminal.see("y\r\n")  # the terminal has it
    (folder / "go").touch()
    terminal.see(PROMPT)
    terminal.type("n\n")

    assert terminal.end() == (0, "approval denied for 'read'\n")


@pytest.mark.case(147)
def test_parallel_calls_are_asked_about_one_at_a_time(start: Start) -> None:
    """Each prompt has its own answer: three calls, three lines, and the denied one raises."""
    terminal = start(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def call(number):\n"
        "    try:\n"
        "        return read('f', limit=number)\n"
        "    except ToolError as error:\n"
        "        return str(error)\n"
        "with ThreadPoolExecutor() as pool:\n"
        "    print(sorted(pool.map(call, (1, 2, 3))))"
    )
    for number, answer in enumerate("yny", start=1):
        terminal.see("N: ", number)
        assert terminal.screen.count("N: ") == number
        terminal.type(answer + "\n")

    assert terminal.end() == (0, "['1: secret', '1: secret', \"approval denied for 'read'\"]\n")


@pytest.mark.case(144)
@pytest.mark.parametrize("policy", ["read", "execute_code"])
@pytest.mark.parametrize("mode", [(), ("--session", "s")])
def test_ctrl_c_at_the_prompt_aborts_the_run(start: Start, policy: str, mode: tuple[str, ...]) -> None:
    """The command ends at once, with status 130 and without a traceback; the call never ran."""
    terminal = start('print("before", flush=True)\nread("f")\nprint("after")', *mode, policy=policy)
    terminal.see("N: ")
    terminal.type("\x03")

    status, output = terminal.end()

    assert status == 130
    assert "Script cancelled." in output
    assert "after" not in output
    assert "1: secret" not in output
    assert "Traceback" not in terminal.screen + output


@pytest.mark.case(145)
def test_a_run_that_times_out_at_the_prompt_ends(start: Start) -> None:
    """The prompt does not hold the command, and a late answer has nothing to answer."""
    terminal = start('print(read("f"))', "--timeout-ms", "1500")
    terminal.see(PROMPT)

    status, output = terminal.end()

    assert status == 1
    assert "Script timed out after 1500ms." in output
    assert "1: secret" not in output


def test_a_script_from_standard_input_is_asked_about_at_the_controlling_terminal(
    start: Start, folder: pathlib.Path
) -> None:
    """``lemon-kernel run -`` reads its script from a pipe and its approvals from the terminal."""
    (folder / "f").write_text("secret")
    (folder / "script").write_text('print(read("f"))')
    with open(folder / "script") as script:
        terminal = Terminal(folder, "-", stdin=script, LEMON_POLICY_REQUIRE_APPROVAL="read")
    try:
        terminal.see(PROMPT)
        terminal.type("y\n")

        assert terminal.end() == (0, "1: secret\n")
    finally:
        terminal.close()


def run(folder: pathlib.Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "f").write_text("secret")
    return subprocess.run(
        [*BASE, *arguments],
        cwd=folder,
        env={**os.environ, "LEMON_EXECUTE_CODE_PYTHON_PATH": sys.executable, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.case(133)
def test_without_a_terminal_it_is_denied_and_said_how_to_allow_it(folder: pathlib.Path) -> None:
    """The ToolError keeps its text; key and source stand on stderr."""
    (folder / "a.py").write_text('try:\n    read("f")\nexcept ToolError as error:\n    print(error)')

    done = run(folder, "a.py", LEMON_POLICY_REQUIRE_APPROVAL="read")

    assert (done.returncode, done.stdout) == (0, "approval failed for 'read'\n")
    assert done.stderr == (
        "lemon-kernel run: read needs an approval and there is no terminal to ask at; "
        "to allow it, change environment variable LEMON_POLICY_REQUIRE_APPROVAL\n"
    )


@pytest.mark.case(133)
def test_the_hint_names_key_and_file(folder: pathlib.Path) -> None:
    """For what a file says it is that file, for each of the keys that can ask."""
    (folder / "a.py").write_text(
        "for call in lambda: read('f'), lambda: ls(), lambda: grep('x'):\n"
        "    try:\n        call()\n    except ToolError as error:\n        print(error)"
    )
    (folder / ".lemon").mkdir()
    file = folder / ".lemon" / "config.toml"
    file.write_text(
        '[runtime.tools.policy]\nrequire_approval = ["read"]\ndeny = ["grep"]\n'
        '[runtime.tools.policy.approvals]\nls = "always"\n'
    )

    done = run(folder, "a.py")

    assert done.stdout.splitlines() == [
        "approval failed for 'read'",
        "approval failed for 'ls'",
        "Tool 'grep' is in deny list",
    ]
    nobody = "needs an approval and there is no terminal to ask at"
    key = "to allow it, change runtime.tools.policy"
    assert done.stderr.splitlines() == [
        f"lemon-kernel run: grep was denied; {key}.deny in {file}",
        f"lemon-kernel run: ls {nobody}; {key}.approvals in {file}",
        f"lemon-kernel run: read {nobody}; {key}.require_approval in {file}",
    ]


@pytest.mark.case(129)
def test_without_a_terminal_the_call_itself_is_refused(folder: pathlib.Path) -> None:
    """Status 3, nothing ran, and the way to allow it on stderr."""
    (folder / "a.py").write_text('open("ran", "w").close()')

    done = run(folder, "a.py", LEMON_POLICY_REQUIRE_APPROVAL="execute_code")

    assert done.returncode == 3
    assert "execute_code needs an approval and there is no terminal" in done.stderr
    assert not (folder / "ran").exists()
