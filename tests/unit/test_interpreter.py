"""Find the interpreter and ask it who it is (behaviour 2.3)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lemon_provisioner import interpreter
from lemon_provisioner.interpreter import Interpreter, ProbeError, probe, resolve


def executable(path: Path, text: str, mode: int = 0o755) -> str:
    """Write a script, by default one that may be executed."""
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    interpreter._cache.clear()


# -- resolve -------------------------------------------------------------------------------------------------------


@pytest.mark.case(42)
def test_a_configured_path_that_does_not_exist() -> None:
    """The error names the path."""
    with pytest.raises(ValueError) as raised:
        resolve("/nonexistent/python3")

    assert str(raised.value) == "configured execute_code python_path not found: /nonexistent/python3"


@pytest.mark.case(43)
def test_a_configured_path_that_is_no_program(tmp_path: Path) -> None:
    """A directory and a file without an execute bit are refused alike, also behind a symlink."""
    plain = executable(tmp_path / "plain", "", 0o600)
    link = tmp_path / "link"
    link.symlink_to(plain)
    for path in (str(tmp_path), plain, str(link)):
        with pytest.raises(ValueError) as raised:
            resolve(path)

        assert str(raised.value) == f"configured execute_code python_path is not an executable file: {path}"


def test_a_dangling_link_and_an_impossible_path_are_not_found(tmp_path: Path) -> None:
    """What cannot be there is not there."""
    dangling = tmp_path / "dangling"
    dangling.symlink_to("nowhere")
    for path in (str(dangling), "a\0b", f"{__file__}/python3"):
        with pytest.raises(ValueError, match="python_path not found: "):
            resolve(path)


@pytest.mark.parametrize("mode", [0o700, 0o610, 0o601])
def test_any_execute_bit_will_do_and_links_stay(tmp_path: Path, mode: int) -> None:
    """The path comes back as it was given: a resolved link loses its virtual environment."""
    link = tmp_path / "python"
    link.symlink_to(executable(tmp_path / "real", "", mode))

    assert resolve(str(link)) == str(link)


def test_unset_means_python3_on_path(tmp_path: Path) -> None:
    """Blank is unset; the first match of the search path counts."""
    first = tmp_path / "first"
    first.mkdir()
    path = executable(first / "python3", "")

    assert resolve("", f"{tmp_path}:{first}") == path
    assert resolve("  ", str(first)) == path


def test_no_python3_anywhere(tmp_path: Path) -> None:
    """The error says what to install or set."""
    with pytest.raises(ValueError) as raised:
        resolve("", str(tmp_path))

    assert str(raised.value) == (
        "python3 was not found on this host. execute_code requires python3; "
        "install it or set [runtime.tools.execute_code] python_path."
    )


# -- probe ---------------------------------------------------------------------------------------------------------


def ask(path: str, cwd: Path, timeout_s: float = 20) -> Interpreter:
    return asyncio.run(probe(path, str(cwd), timeout_s))


def test_an_interpreter_says_who_it_is(tmp_path: Path) -> None:
    """Executable (unresolved), prefix, version and the magic number of its bytecode files."""
    assert ask(sys.executable, tmp_path) == Interpreter(
        sys.executable, sys.prefix, sys.version_info[:2], importlib.util.MAGIC_NUMBER.hex()
    )


def test_a_shim_is_seen_through(tmp_path: Path) -> None:
    """A shell script that starts Python, and talks, gives the Python it starts."""
    shim = executable(tmp_path / "python3", f'#!/bin/sh\necho "picking one"\nexec "{sys.executable}" "$@"\n')

    assert ask(shim, tmp_path).executable == sys.executable


@pytest.mark.parametrize(
    "module", ["random", "os", "ast", "encodings", "importlib", "_frozen_importlib_external"]
)
def test_a_module_in_the_folder_does_not_matter(tmp_path: Path, module: str) -> None:
    """The question imports nothing from the current folder."""
    (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')\n")

    assert ask(sys.executable, tmp_path).version == sys.version_info[:2]


def test_a_path_with_any_bytes_survives(tmp_path: Path) -> None:
    """Executable paths are bytes; quotes, newlines and undecodable bytes come through."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/q'\"\n\xff")
    os.mkdir(folder)
    path = os.path.join(folder, "python3")
    os.symlink(os.path.realpath(sys.executable), path)

    assert ask(path, tmp_path).executable == path


def test_it_is_asked_once(tmp_path: Path) -> None:
    """The answer is kept until the file, or the folder, is another."""
    shim = executable(tmp_path / "python3", f'#!/bin/sh\necho >> asked\nexec "{sys.executable}" "$@"\n')
    other = tmp_path / "other"
    other.mkdir()

    ask(shim, tmp_path)
    ask(shim, tmp_path)
    assert (tmp_path / "asked").read_text() == "\n"
    os.utime(shim, (1, 1))
    ask(shim, tmp_path)
    assert (tmp_path / "asked").read_text() == "\n\n"
    ask(shim, other)
    assert (other / "asked").read_text() == "\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho no such version >&2\nexit 3\n", "exit status 3): no such version"),
        ("#!/bin/sh\n", "exit status 0)"),
        ("#!/bin/sh\necho 'lemon-interpreter:(1,)'\n", "did not say who it is"),
        ("#!/nonexistent\n", "cannot be started"),
        ("not a program", "cannot be started"),
    ],
)
def test_what_does_not_answer_is_an_error_and_is_asked_again(tmp_path: Path, text: str, words: str) -> None:
    """The error has the path, the status and the last line; nothing is cached."""
    path = executable(tmp_path / "python3", text)

    with pytest.raises(ProbeError) as raised:
        ask(path, tmp_path)
    assert path in str(raised.value)
    assert words in str(raised.value)

    executable(tmp_path / "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    os.utime(path, (1, 1))
    assert ask(path, tmp_path).executable == sys.executable


def test_a_vanished_path_and_a_vanished_folder(tmp_path: Path) -> None:
    """Both are a ``ProbeError``."""
    with pytest.raises(ProbeError, match="No such file"):
        ask(str(tmp_path / "python3"), tmp_path)
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    with pytest.raises(ProbeError, match="cannot be started"):
        ask(str(other), tmp_path / "gone")


def test_our_own_interpreter_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs here is known, under every name that it has in its folder; the answer is that of a start."""
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    for name in ("python3", "python"):
        path = os.path.join(os.path.dirname(sys.executable), name)
        if not os.path.exists(path):
            continue
        asked = subprocess.run(
            [path, "-c", "import sys; print(sys.executable, sys.prefix, *sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=True,
        )
        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "_ask", None)
            answer = ask(path, tmp_path)
        assert asked.stdout.split() == [answer.executable, answer.prefix, *map(str, answer.version)]
        assert answer.magic == importlib.util.MAGIC_NUMBER.hex()


def test_one_that_sleeps_is_given_up_with_its_children(tmp_path: Path) -> None:
    """After the timeout the error comes at once, and neither shim nor child is left."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    alive = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # end of file when all its writers are dead
    shim = executable(
        tmp_path / "python3", f'#!/bin/sh\nexec 9> "{fifo}"\necho on >&9\nsetsid sleep 60 & sleep 60\n'
    )
    start = time.monotonic()

    with pytest.raises(ProbeError, match=r"did not answer within 0\.5 s"):
        ask(shim, tmp_path, 0.5)
    assert time.monotonic() - start < 1.5

    assert os.read(alive, 10) == b"on\n"
    assert select.select([alive], [], [], 2)[0]
    assert os.read(alive, 10) == b""
    os.close(alive)


def test_one_that_floods_does_not_stall_it(tmp_path: Path) -> None:
    """More output than a pipe holds is drained, and the last of it is searched for the answer."""
    shim = executable(
        tmp_path / "python3", f'#!/bin/sh\nhead -c 300000 /dev/zero\necho\nexec "{sys.executable}" "$@"\n'
    )

    assert ask(shim, tmp_path).executable == sys.executable


def test_a_probe_leaves_no_descriptor(tmp_path: Path) -> None:
    """Success, failure and timeout all close what they opened."""
    ask(sys.executable, tmp_path)
    before = os.listdir("/proc/self/fd")
    good = executable(tmp_path / "good", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    bad = executable(tmp_path / "bad", "not a program")
    slow = executable(tmp_path / "slow", "#!/bin/sh\nsleep 60\n")

    ask(good, tmp_path)
    for path in (bad, slow):
        with pytest.raises(ProbeError):
            ask(path, tmp_path, 0.2)

    assert len(os.listdir("/proc/self/fd")) == len(before)
