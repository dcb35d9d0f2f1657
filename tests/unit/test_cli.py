"""The command line, as a person meets it: real processes, their output and their exit status."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import pytest

from lemon_kernel.config import TABLES

BASE = [sys.executable, "-m", "lemon_kernel.cli"]


class Shell:
    """A folder with a home of its own in which commands are run."""

    def __init__(self, root: pathlib.Path) -> None:
        self.cwd = root / "project"
        self.home = root / "home"
        self.cwd.mkdir()
        self.home.mkdir()
        self.environ = {
            **os.environ,
            "HOME": str(self.home),
            "JUPYTER_CONFIG_DIR": str(self.home / "jupyter"),
            "LEMON_EXECUTE_CODE_PYTHON_PATH": sys.executable,
        }

    def file(self, name: str, text: str | bytes) -> pathlib.Path:
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def __call__(
        self, *arguments: str, stdin: str = "", environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BASE, *arguments],
            cwd=self.cwd,
            env={**self.environ, **(environ or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Shell:
    return Shell(tmp_path)


# --- run ---------------------------------------------------------------------------------------------------


def test_run_prints_the_result(shell: Shell) -> None:
    """Typing run enables the tool; the result goes to stdout, nothing to stderr, and the status is 0."""
    shell.file("data.txt", "alpha")
    shell.file("a.py", 'text(read("data.txt"))\n')
    done = shell("run", "a.py")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "Script result (text()):\n1: alpha\n\nDiagnostics (stdout/stderr, not the result):\n"
        "(script produced no output)\n"
    )


def test_run_names_the_line_of_the_persons_file(shell: Shell) -> None:
    """Under a traceback stands the file's own line; the result itself keeps line + 1."""
    shell.file("sub/f.py", "def f():\n    raise ValueError('boom')\n\nf()\n")
    done = shell("run", "sub/f.py")

    assert done.returncode == 1
    assert 'File "<cell 1>", line 3, in f' in done.stdout
    assert done.stdout.endswith("Script exited with code 1\nsub/f.py:2\n")


@pytest.mark.parametrize(
    "source", ["x = 1\nx = = 2\n", '"""Doc."""\nfrom __future__ import annotations\n1 / 0\n']
)
def test_run_names_the_line_of_other_failures(shell: Shell, source: str) -> None:
    """It holds for syntax errors, and for scripts that begin with a docstring and future imports."""
    shell.file("g.py", source)
    done = shell("run", "g.py")

    line = 2 if "= =" in source else 3
    assert done.returncode == 1
    assert done.stdout.endswith(f"\ng.py:{line}\n")


def test_run_reads_stdin_and_prints_json(shell: Shell) -> None:
    """``-`` is standard input; ``--json`` prints content, details and trust and nothing else."""
    done = shell("run", "-", "--json", stdin='print("hi")')
    shown = json.loads(done.stdout)

    assert done.returncode == 0
    assert set(shown) == {"content", "details", "trust"}
    assert shown["content"] == [{"type": "text", "text": "hi\n"}]
    assert shown["details"]["exit_code"] == 0
    assert shown["trust"] == "trusted"


def test_run_times_out(shell: Shell) -> None:
    """``--timeout-ms`` is the wall-time cap; a script that exceeds it has failed."""
    shell.file("a.py", "while True: pass\n")
    done = shell("run", "--timeout-ms", "1000", "a.py")

    assert (done.returncode, done.stdout) == (1, "Script timed out after 1000ms.\n")


def test_run_takes_several_files_until_one_fails(shell: Shell) -> None:
    """Without a session each file has a process of its own; the first that fails is the last."""
    shell.file("a.py", "x = 1; print('a')\n")
    shell.file("b.py", "print(x)\n")
    shell.file("c.py", "print('c')\n")
    done = shell("run", "a.py", "b.py", "c.py")

    assert done.returncode == 1
    assert done.stdout.startswith("a\n")
    assert "NameError" in done.stdout
    assert done.stdout.endswith("\nb.py:1\n")


def test_run_session_cells_share_a_kernel(shell: Shell) -> None:
    """With a session the files are cells on one kernel, which ends with the command."""
    shell.file("a.py", "import os\nvalue = 41\ndef f():\n    return 1 / 0\nprint(os.getpid())\n")
    shell.file("b.py", "print(value + 1)\n")
    shell.file("c.py", "\nf()\n")
    done = shell("run", "--session", "s", "a.py", "b.py", "c.py")
    pid, answer, *rest = done.stdout.splitlines()

    assert done.returncode == 1, done.stderr
    assert answer == "42"
    assert rest[0] == "Script raised ZeroDivisionError: division by zero"
    assert rest[-1] == "a.py:4"
    assert not pathlib.Path("/proc", pid).exists()


def test_run_in_another_folder(shell: Shell) -> None:
    """``--cwd`` is the folder of the script, its helpers and its project file; FILE stays relative to ours."""
    shell.file("other/x.txt", "there")
    shell.file("a.py", 'import os; print(os.path.basename(os.getcwd())); print(read("x.txt"))\n')
    done = shell("run", "a.py", "--cwd", "other")

    assert done.stdout == "other\n1: there\n"


def test_run_reads_what_python_reads(shell: Shell) -> None:
    """A byte order mark and an encoding comment are understood; what is no text is a usage error."""
    shell.file("bom.py", b"\xef\xbb\xbfprint('ok')\n")
    shell.file("latin.py", b"# -*- coding: latin-1 -*-\nprint('\xe4')\n")
    shell.file("junk.py", b"print('\xff')\n")

    assert shell("run", "bom.py").stdout == "ok\n"
    assert shell("run", "latin.py").stdout == "ä\n"
    assert shell("run", "junk.py").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run"], "needs a FILE"),
        (["run", "missing.py"], "missing.py: No such file or directory"),
        (["run", "a.py", "--cwd", "nowhere"], "nowhere"),
        (["run", "a.py", "--timeout-ms", "abc"], "'abc' is not a whole number"),
        (["run", "a.py", "--timeout-ms=2.5"], "'2.5' is not a whole number"),
        (["run", "a.py", "--ExecuteCodeConfig.timeout_ms=true"], "'true' is not a whole number"),
        (
            ["run", "a.py", "--ExecuteCode.timeout_ms=5"],
            "unknown section ExecuteCode; did you mean ExecuteCodeConfig?",
        ),
        (["run", "a.py", "--ExecuteCodeConfig.timout_ms=5"], "no key timout_ms; did you mean timeout_ms?"),
        (["run", "a.py", "--timeout-m=5"], "unknown option --timeout-m; did you mean --timeout-ms?"),
        (["run", "a.py", "--session"], "expected one argument"),
        (["run", "a.py", "--session", " "], "--session needs a name"),
        (["run", "a.py", "--RunApp.json=maybe"], "boolean"),
        (["run", "a.py", "--log-level=loud"], "log_level"),
        (
            ["run", "a.py", "--ExecuteCodeConfig.max_rpc_calls=1", "--ExecuteCodeConfig.max_rpc_calls=2"],
            "one value",
        ),
        (["config", "x"], "takes no argument 'x'"),
        (["confg"], "unknown command confg; did you mean config?"),
        (["install"], "--user, --sys-prefix or --prefix"),
        (["install", "--user", "--prefix", "/x"], "--user, --sys-prefix or --prefix"),
    ],
)
def test_usage_errors(shell: Shell, arguments: list[str], part: str) -> None:
    """What cannot be meant is said in one clear line, without a traceback, and the status is 2."""
    shell.file("a.py", "print('ran')\n")
    done = shell(*arguments)

    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("lemon-kernel")
    assert part in done.stderr


def test_refusals(shell: Shell) -> None:
    """What is refused before anything ran has status 3 and one line that names the mend."""
    shell.file("a.py", "print('ran')\n")
    shell.file("empty.py", "")
    missing = shell("run", "a.py", environ={"LEMON_EXECUTE_CODE_PYTHON_PATH": "/nowhere/py"})
    empty = shell("run", "empty.py")
    denied = shell("run", "a.py", environ={"LEMON_POLICY_DENY": "execute_code"})
    shell.file(".lemon/config.toml", "[runtime\n")
    broken = shell("run", "a.py")

    for done in (missing, empty, denied, broken):
        assert done.returncode == 3, done
        assert "ran" not in done.stdout
    assert missing.stderr.splitlines() == [
        "lemon-kernel run: configured execute_code python_path not found: /nowhere/py"
    ]
    assert "Missing required parameter: script" in empty.stderr
    assert "is in deny list" in denied.stdout
    assert ".lemon/config.toml:1:" in broken.stderr


def test_a_denied_helper_is_explained_on_stderr(shell: Shell) -> None:
    """The text of the denial stays; what to change where goes to stderr."""
    shell.file("a.py", 'try:\n    read("a.py")\nexcept ToolError as error:\n    print(error)\n')
    done = shell("run", "a.py", environ={"LEMON_POLICY_DENY": "read"})

    assert (done.returncode, done.stdout) == (0, "Tool 'read' is in deny list\n")
    assert done.stderr == (
        "lemon-kernel run: read was denied; to allow it, change environment variable LEMON_POLICY_DENY\n"
    )


def test_a_policy_on_the_command_line_applies(shell: Shell) -> None:
    """The command line beats the environment for the policy too."""
    shell.file("a.py", 'print(read("a.py")[:2])\n')
    done = shell("run", "a.py", "--PolicyConfig.deny=grep", environ={"LEMON_POLICY_DENY": "read"})

    assert (done.returncode, done.stdout) == (0, "1:\n")


def test_ctrl_c_is_an_abort(shell: Shell) -> None:
    """Ctrl-C ends the script; what it had to say is printed, without a traceback, and the status is 130."""
    shell.file(
        "a.py", "import sys, time\nprint('started', flush=True)\nopen('up', 'w').close()\ntime.sleep(60)\n"
    )
    running = subprocess.Popen(
        [*BASE, "run", "a.py"],
        cwd=shell.cwd,
        env=shell.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 40
    while not (shell.cwd / "up").exists():
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=40)

    assert running.returncode == 130
    assert out == "Script cancelled.\n\nstarted\n"
    assert err == ""


def test_notify_is_shown_on_a_terminal(shell: Shell) -> None:
    """On a terminal notify() messages appear on stderr as they come, without their control characters."""
    shell.file("a.py", 'notify("half\\x1b[2J done"); print("end")\n')
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*BASE, "run", "a.py"],
            cwd=shell.cwd,
            env=shell.environ,
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0
        shown = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)

    assert done.stdout == b"end\n"
    assert shown == "notify: half\ufffd[2J done\r\n"


def test_a_reader_that_leaves_is_no_error(shell: Shell) -> None:
    """``lemon-kernel ... | head`` ends without a traceback."""
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join([*BASE, 'config'])} | true"],
        cwd=shell.cwd,
        env=shell.environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert done.stderr == ""


# --- tool, config ------------------------------------------------------------------------------------------


def test_tool_prints_the_definition(shell: Shell) -> None:
    """``tool`` prints the definition as JSON, with the settings in force."""
    done = shell("tool", "--ExecuteCodeConfig.max_rpc_calls=9")
    definition = json.loads(done.stdout)

    assert done.returncode == 0
    assert set(definition) == {"name", "description", "parameters"}
    assert definition["name"] == "execute_code"
    assert "9 helper calls" in definition["description"]


def test_config_shows_every_key_and_its_source(shell: Shell) -> None:
    """Every key has a line with its value and the source that won; a project's values are marked."""
    path = shell.file(".lemon/config.toml", "[runtime.tools.execute_code]\nenabled = true\ntimeout_ms = 7\n")
    done = shell("config", environ={"LEMON_EXECUTE_CODE_TIMEOUT_MS": "8"})
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in done.stdout.splitlines() if "\t" in line}

    assert done.returncode == 0
    assert {key for table in TABLES for key in table().values()} == set(rows)
    assert rows["timeout_ms"] == ["30000", "default"]  # web.fetch's, the last of that name
    assert "timeout_ms\t8\tenvironment variable LEMON_EXECUTE_CODE_TIMEOUT_MS" in done.stdout
    assert rows["max_rpc_calls"] == ["100", "default"]
    assert f"enabled\ttrue\t{path} (project file)" in done.stdout

    shown = json.loads(shell("config", "--json").stdout)
    assert shown["runtime.tools.execute_code"]["enabled"] == {
        "value": True,
        "source": str(path),
        "project": True,
    }


def test_config_says_when_a_policy_denies_everything(shell: Shell) -> None:
    """A policy that cannot be read is shown as what it is."""
    done = shell("config", environ={"LEMON_POLICY_PROFILE": "nobody"})

    assert done.returncode == 0
    assert "Every tool is denied: tool policy cannot be read: runtime.tools.policy.profile" in done.stdout


def test_generate_config_and_the_file_it_writes(shell: Shell) -> None:
    """``--generate-config`` writes a file that is then read as a source."""
    done = shell("--generate-config")
    path = shell.home / "jupyter" / "jupyter_lemon_config.py"
    assert done.returncode == 0, done.stderr
    assert "# c.ExecuteCodeConfig.timeout_ms = 120000" in path.read_text()

    path.write_text(path.read_text() + "\nc.ExecuteCodeConfig.timeout_ms = 4321\n")
    assert f"timeout_ms\t4321\t{path}" in shell("config").stdout


@pytest.mark.parametrize("option", ["--help", "--help-all", "--version"])
@pytest.mark.parametrize("command", ["", "run", "tool", "config", "doctor", "install"])
def test_help(shell: Shell, command: str, option: str) -> None:
    """Every command explains itself."""
    done = shell(*([command] if command else []), option)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


# --- doctor, install ---------------------------------------------------------------------------------------


def findings(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str, str]]:
    return [(one["level"], one["what"], one["mend"]) for one in json.loads(done.stdout)]


def test_doctor_finds_nothing_wrong(shell: Shell) -> None:
    """Where a run would succeed the status is 0 and no finding is an error."""
    done = shell("doctor", "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    assert not [one for one in findings(done) if one[0] == "error"]


@pytest.mark.parametrize(
    ("environ", "file", "part"),
    [
        ({"LEMON_EXECUTE_CODE_PYTHON_PATH": "/nowhere/py"}, "", "/nowhere/py"),
        ({"LEMON_EXECUTE_CODE_PYTHON_PATH": "/bin/false"}, "", "does not answer"),
        ({"TMPDIR": "/nowhere"}, "", "TMPDIR"),
        ({}, "[runtime", "config.toml:1:"),
        ({"LEMON_POLICY_PROFILE": "nobody"}, "", "every tool is denied"),
        ({"LEMON_POLICY_DENY": "execute_code"}, "", "deny list"),
    ],
)
def test_doctor_finds_what_stops_a_run(shell: Shell, environ: dict[str, str], file: str, part: str) -> None:
    """Whatever would stop a run is an error with its mend, and the status is 1."""
    if file:
        shell.file(".lemon/config.toml", file)
    done = shell("doctor", "--json", environ=environ)
    errors = [one for one in findings(done) if one[0] == "error"]

    assert done.returncode == 1, done.stderr
    assert part in errors[0][1]
    assert errors[0][2]
    shell.file("a.py", "print(1)\n")
    assert shell("run", "a.py", environ=environ).returncode in (1, 3)


def test_doctor_warns(shell: Shell) -> None:
    """A shim, a project that enables the tool and names an interpreter, and a dead host's root are warnings."""
    shim = shell.file("bin/python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    shell.file(
        ".lemon/config.toml", '[runtime.tools.execute_code]\nenabled = true\npython_path = "bin/python3"\n'
    )
    temporary = shell.home / "tmp"
    stale = temporary / "lemon-private-aaaaaaaaaa"
    stale.mkdir(parents=True)
    stale.chmod(0o700)
    dead = subprocess.Popen(["true"])
    dead.wait()
    marker = stale / ".lemon-owner"
    marker.write_text(f"{os.uname().nodename}\n{dead.pid}\n")
    marker.chmod(0o600)
    (stale / "left").write_text("x")
    environ = {"TMPDIR": str(temporary), "LEMON_EXECUTE_CODE_PYTHON_PATH": ""}
    done = shell("doctor", "--json", environ=environ)
    warnings = [one[1:] for one in findings(done) if one[0] == "warning"]

    assert done.returncode == 0, done.stdout
    for part in ("is a shim", "sets enabled = True", "sets python_path = 'bin/python3'", str(stale)):
        (mend,) = [mend for what, mend in warnings if part in what]
        assert mend
    assert f"rm -r -- {stale}" in [mend for _, mend in warnings]


def test_doctor_says_when_socket_paths_are_too_long(shell: Shell) -> None:
    """Where a kernel's sockets do not fit, the person learns what happens instead."""
    deep = shell.home / ("d" * 90)
    deep.mkdir()
    done = shell("doctor", "--json", environ={"TMPDIR": str(deep)})

    assert [one for one in findings(done) if "socket path" in one[1] and one[0] == "warning"]


def test_install_and_what_doctor_says_of_it(shell: Shell) -> None:
    """``install`` writes a kernelspec that names this interpreter; doctor knows it, and one that was changed."""
    prefix = shell.home / "prefix"
    environ = {"JUPYTER_PATH": str(prefix / "share" / "jupyter")}
    done = shell("install", "--prefix", str(prefix), environ=environ)
    path = prefix / "share" / "jupyter" / "kernels" / "lemon" / "kernel.json"
    spec = json.loads(path.read_text())

    assert done.returncode == 0, done.stderr
    assert str(path.parent) in done.stdout
    assert spec["argv"][0] == sys.executable
    assert spec["metadata"]["kernel_provisioner"]["provisioner_name"] == "lemon-provisioner"
    assert ("ok", f"kernelspec lemon in {path.parent}", "") in findings(
        shell("doctor", "--json", environ=environ)
    )

    path.write_text(json.dumps({**spec, "display_name": "mine"}))
    warnings = [one for one in findings(shell("doctor", "--json", environ=environ)) if one[0] == "warning"]
    assert [mend for _, what, mend in warnings if "is not the packaged one" in what and "install" in mend]


def test_install_where_it_cannot_write(shell: Shell) -> None:
    """A folder that cannot be written is a refusal with one line, not a traceback."""
    done = shell("install", "--prefix", "/proc/nowhere")

    assert done.returncode == 3
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


# --- the start ---------------------------------------------------------------------------------------------


def test_run_imports_only_what_it_needs(shell: Shell) -> None:
    """A plain run loads no Jupyter client, no zmq, no rich, no web client: its start is part of every run."""
    shell.file("a.py", "print(1)\n")
    code = (
        "import sys; from lemon_kernel.cli import main; status = main(['run', 'a.py']);"
        "names = {name.partition('.')[0] for name in sys.modules};"
        "print(status, sorted(names & {'jupyter_client', 'zmq', 'rich', 'IPython', 'httpx', 'regex', 'psutil', 'pathspec',"
        "'tornado', 'trafilatura', 'opentelemetry', 'tomli', 'ipykernel'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=shell.cwd,
        env=shell.environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert done.stdout == "1\n0 []\n", done.stderr
