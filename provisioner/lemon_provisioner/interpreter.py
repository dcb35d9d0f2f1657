"""Which Python runs the scripts: find it, and ask it once who it is (behaviour 2.3).

``python3`` on PATH may be a shim, a shell script that picks an interpreter by the current folder, costs a second start
each time and hides what it runs.  So the path found is started once with a question; the answer's
``sys.executable``, symlinks unresolved (a resolved one loses its virtual environment), is what is launched and keyed.
"""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER

from lemon_provisioner import tracker
from lemon_provisioner.environment import child_environment
from lemon_provisioner.process import ChildProcess, new_run_id

__all__ = ["Interpreter", "ProbeError", "known", "probe", "resolve"]

_MARK = "lemon-interpreter:"

# Imports nothing that is not there already: a `random.py` in the folder must not matter, and `-c` puts the folder
# first on sys.path.  Works from Python 3.9 on.  ascii() keeps undecodable bytes of a path, as surrogates.
_QUESTION = (
    "import sys; m = sys.modules.get('_frozen_importlib_external'); "
    f"print({_MARK!r} + ascii((sys.executable, sys.prefix, sys.version_info[0], sys.version_info[1], "
    "getattr(m, 'MAGIC_NUMBER', b'').hex())))"
)
_MAX_ANSWER_BYTES = 64 * 1024
_MAX_CACHED = 64


class ProbeError(Exception):
    """The interpreter did not start, did not answer in time, or answered nonsense."""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter's own answer.

    ``executable`` is ``sys.executable``, ``prefix`` is ``sys.prefix``, ``version`` is major and minor, ``magic`` is the
    magic number of its ``.pyc`` files as hex digits (``""`` if it has none).
    """

    executable: str
    prefix: str
    version: tuple[int, int]
    magic: str


_cache: dict[tuple[str, int, str], Interpreter] = {}


def resolve(python_path: str, search_path: str | None = None) -> str:
    """Return the path to start: ``python_path``, or ``python3`` on ``search_path`` (PATH) when it is blank.

    Raises ``ValueError`` with the text of behaviour 2.3.
    """
    if not python_path.strip():
        found = shutil.which("python3", path=search_path)
        if found is None:
            raise ValueError(
                "python3 was not found on this host. execute_code requires python3; "
                "install it or set [runtime.tools.execute_code] python_path."
            )
        return os.path.join(os.getcwd(), found)
    try:
        mode = os.stat(python_path).st_mode
    except (OSError, ValueError):
        raise ValueError(f"configured execute_code python_path not found: {python_path}") from None
    if not stat.S_ISREG(mode) or not mode & 0o111:
        raise ValueError(f"configured execute_code python_path is not an executable file: {python_path}")
    return os.path.join(os.getcwd(), python_path)


async def probe(path: str, cwd: str, timeout_s: float) -> Interpreter:
    """Start ``path`` once in ``cwd`` and return who it says it is; raise :class:`ProbeError` if it does not.

    It is started as a script is, with the environment of behaviour 6.5, and on every path it and its children are gone
    on return.  Answers are cached by path, mtime and cwd; failures are not.
    """
    interpreter = known(path, cwd)
    if interpreter is not None:
        return interpreter
    code, answer = await _ask(path, cwd, timeout_s)
    interpreter = _parse(answer)
    if interpreter is None:
        raise ProbeError(f"{path} did not say who it is (exit status {code}){_last_words(answer)}")
    if len(_cache) >= _MAX_CACHED:
        _cache.clear()
    _cache[_key(path, cwd)] = interpreter
    return interpreter


def known(path: str, cwd: str) -> Interpreter | None:
    """Return the answer that :func:`probe` would give without a start, or None.

    Raises :class:`ProbeError` when there is no such file.
    """
    interpreter = _cache.get(_key(path, cwd))
    if interpreter is None and _is_ours(path):
        return Interpreter(path, sys.prefix, sys.version_info[:2], MAGIC_NUMBER.hex())
    return interpreter


def _key(path: str, cwd: str) -> tuple[str, int, str]:
    try:
        return path, os.stat(path).st_mtime_ns, cwd
    except (OSError, ValueError) as error:
        raise ProbeError(f"{path}: {error}") from None


def _is_ours(path: str) -> bool:
    """Return whether ``path`` is the interpreter that runs here, under this or another name in its folder.

    Its answer is known, then, and a start of it (a tenth of a command line's time) is saved.
    """
    if not sys.executable or os.path.dirname(path) != os.path.dirname(sys.executable):
        return False
    try:
        return os.path.samefile(path, sys.executable)
    except OSError:
        return False


async def _ask(path: str, cwd: str, timeout_s: float) -> tuple[int, bytes]:
    """Run the question; return exit status and output (its last 64 KiB)."""
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    run_id = new_run_id()
    tracker.watch(run_id, "")
    child: ChildProcess | None = None
    answer = bytearray()
    drain = _drainer(reader, answer, lambda: loop.remove_reader(reader))
    try:
        try:
            child = ChildProcess.spawn(
                [path, "-c", _QUESTION], env=child_environment(run_id), cwd=cwd, run_id=run_id, output=writer
            )
        except (OSError, ValueError) as error:
            raise ProbeError(f"{path} cannot be started: {error}") from None
        finally:
            os.close(writer)
        tracker.group(run_id, child.pid)
        loop.add_reader(reader, drain)
        try:
            code = await asyncio.wait_for(child.wait(), timeout_s)
        except TimeoutError:
            raise ProbeError(f"{path} did not answer within {timeout_s:g} s") from None
        drain()
        return code, bytes(answer)
    finally:
        loop.remove_reader(reader)
        os.close(reader)
        if child is not None:
            child.finish()
        tracker.forget(run_id)


def _drainer(reader: int, answer: bytearray, at_end: Callable[[], object]) -> Callable[[], None]:
    """Return a function that moves what the pipe holds into ``answer``, which keeps the last 64 KiB."""

    def drain() -> None:
        try:
            chunk = os.read(reader, _MAX_ANSWER_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            at_end()
        answer.extend(chunk)
        del answer[:-_MAX_ANSWER_BYTES]

    return drain


def _parse(answer: bytes) -> Interpreter | None:
    """Find the answer's line: a shim may talk before and after it."""
    for line in answer.decode("utf-8", "replace").splitlines():
        _, mark, value = line.partition(_MARK)
        if not mark:
            continue
        try:
            executable, prefix, major, minor, magic = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError):
            continue
        if isinstance(executable, str) and os.path.isabs(executable):
            return Interpreter(executable, str(prefix), (int(major), int(minor)), str(magic))
    return None


def _last_words(answer: bytes) -> str:
    lines = answer.decode("utf-8", "replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:200]}" if said else ""
