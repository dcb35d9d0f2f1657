"""``lemon-kernel run``: a person runs a script as the agent's tool would.

Starting must be quick, so everything that not every run needs is imported where it is used.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from traitlets import Bool, Unicode

from ..config import ExecuteCodeConfig, PolicyConfig
from ..errors import UsageError
from ..scope import AbortSignal
from . import INTERRUPTED_STATUS
from .app import FAILED, OK, REFUSED, Command
from .approvals import NobodyToAsk, WatchedPolicy, at_terminal, hint

if TYPE_CHECKING:
    from types import FrameType

    from ..approvals import ApprovalBroker
    from ..policy import ToolPolicy
    from ..result import ToolResult, ToolUpdate
    from ..tool import ExecuteCode

__all__ = ["RunApp"]

_OWN_FRAME = re.compile(r'File "<cell (\d+)>", line (\d+)')


class RunApp(Command):
    """Run scripts and print what an agent would have got."""

    command = "run"
    name = "jupyter-lemon"
    description = """Run FILE... with the helpers read, grep, find, ls, webfetch and text, notify, batch at hand.

    Each file runs in a fresh process. With --session NAME the files are cells on one kernel, which ends with
    the command; the first cell that fails is the last that runs. State across commands: use a notebook or the
    Python API. "-" is standard input. Typing this command enables the tool, whatever the configuration says.

    What the policy wants approved is asked at the terminal: y once, a for the same call until the command ends,
    anything else denies. Without a terminal it is denied.

    Exit status: 0 ok, 1 the script failed or timed out, 2 usage, 3 refused, 130 interrupted.
    """
    examples = (
        "lemon-kernel run script.py\n"
        "lemon-kernel run --json --timeout-ms 5000 script.py\n"
        "echo 'text(read(\"README.md\"))' | lemon-kernel run -"
    )

    json = Bool(False, help="Print content, details and trust as one line of JSON per file.").tag(config=True)
    session = Unicode(help="Run the files as cells on one kernel; the name is the session's.").tag(
        config=True
    )

    aliases: ClassVar[dict[str, str]] = {  # type: ignore[misc]
        **Command.aliases,
        "session": "RunApp.session",
        "timeout-ms": "ExecuteCodeConfig.timeout_ms",
    }
    flags: ClassVar[dict[str, object]] = {  # type: ignore[misc]
        **Command.flags,
        "json": ({"RunApp": {"json": True}}, "Print content, details and trust as JSON."),
    }

    def work(self) -> None:
        """Run the files in order; the first that fails ends it."""
        if not self.extra_args:
            raise UsageError("run needs a FILE, or - for standard input")
        if "session" in self.cli_config.get("RunApp", {}) and not self.session.strip():
            raise UsageError("--session needs a name")
        folder = self.folder
        scripts = {file: _source(file) for file in self.extra_args}
        sources = self.layers()
        home = os.path.expanduser("~")
        table = PolicyConfig.resolve(sources, cwd=folder, home=home)
        policy = WatchedPolicy(table)
        config = ExecuteCodeConfig.resolve(sources, cwd=folder, home=home)
        config = config.with_values(enabled=True, kernel_mode="session" if self.session else "per_call")
        abort = AbortSignal()
        with (
            _interrupt_aborts(abort),
            at_terminal() as person,
            self._tool(folder, config, policy, person) as tool,
        ):
            for number, file in enumerate(self.extra_args, start=1):
                result = tool.run_sync({"script": scripts[file]}, abort=abort, on_update=_progress())
                self._show(result, file, number)
                _explain_denials(policy, person, table)
                self.status = _status(result, abort)
                if self.status != OK:
                    return

    @contextmanager
    def _tool(
        self, folder: str, config: ExecuteCodeConfig, policy: ToolPolicy, person: ApprovalBroker
    ) -> Iterator[ExecuteCode]:
        """Give the tool, with a registry of its own for a session, which ends with the command.

        Without a session there is a scope too: what a person approves for the session holds for the command.
        """
        from ..scope import Owner, SessionScope
        from ..tool import ExecuteCode

        with Owner() as owner:
            scope = SessionScope(self.session or "command", "lemon-kernel run", owner)
            if not self.session:
                yield ExecuteCode(folder, config=config, policy=policy, approvals=person, scope=scope)
                return
            from .. import hostloop
            from ..session.registry import KernelRegistry

            registry = KernelRegistry(warm_starts=False)  # one kernel, for as long as the command
            try:
                yield ExecuteCode(
                    folder, config=config, policy=policy, approvals=person, registry=registry, scope=scope
                )
            finally:
                hostloop.run(registry.aclose())

    def _show(self, result: ToolResult, file: str, number: int) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal's encoding must not lose the result
            sys.stdout.reconfigure(errors="backslashreplace")
        if self.json:
            from json import dumps

            shown = {"content": result.content, "details": result.details, "trust": result.trust}
            print(dumps(shown), flush=True)
            return
        text = result.text
        print(text, end="" if text.endswith("\n") else "\n")
        place = _place(text, self.extra_args, number if result.details.get("persistent") else None, file)
        if place is not None:
            print(place)
        sys.stdout.flush()


def _explain_denials(policy: WatchedPolicy, person: ApprovalBroker, table: PolicyConfig) -> None:
    """Say on stderr what to change where to allow what was denied; the text of a denial stays (behaviour 4.3)."""
    denied, policy.denied = policy.denied, set()
    for tool in sorted(denied):
        print(f"lemon-kernel run: {tool} was denied; {hint(tool, table)}", file=sys.stderr)
    if isinstance(person, NobodyToAsk):
        asked, person.asked = person.asked, set()
        for tool in sorted(asked):
            print(
                f"lemon-kernel run: {tool} needs an approval and there is no terminal to ask at; "
                f"{hint(tool, table)}",
                file=sys.stderr,
            )


def _source(file: str) -> str:
    """Return a script's text; its encoding is what Python would take it for."""
    try:
        if file == "-":
            content = sys.stdin.buffer.read()
        else:
            with open(file, "rb") as opened:
                content = opened.read()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        from tokenize import detect_encoding

        try:  # an encoding comment (PEP 263)
            return content.decode(detect_encoding(io.BytesIO(content).readline)[0])
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}: the text cannot be decoded ({error})") from None


def _place(text: str, files: Sequence[str], number: int | None, file: str) -> str | None:
    """Return ``file.py:line`` for the innermost line of the person's own in the last traceback of `text`.

    A cell's line is the file's + 1 (behaviour 2.6), and cell N of this command's kernel is its Nth file.
    `number` is None where the run was no cell.
    """
    frames = _OWN_FRAME.findall(text)
    if not frames:
        return None
    cell, line = map(int, frames[-1])
    if number is not None:
        if not 1 <= cell <= number:
            return None
        file = files[cell - 1]
    return f"{file}:{line - 1}" if file != "-" and line > 1 else None


def _status(result: ToolResult, abort: AbortSignal) -> int:
    """Return the exit status that a result stands for (behaviour 2.10)."""
    details = result.details
    if details.get("denied"):
        return REFUSED
    if abort.aborted and details.get("reason", "cancelled") == "cancelled":
        return INTERRUPTED_STATUS
    return FAILED if "reason" in details else OK


def _progress() -> Callable[[ToolUpdate], None] | None:
    """Return what shows ``notify()`` messages as they come, None when nobody looks at stderr."""
    if not sys.stderr.isatty():
        return None

    def show(update: ToolUpdate) -> None:
        # A message must not drive the person's terminal.
        text = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in update.text)
        print(text, file=sys.stderr, flush=True)

    return show


@contextmanager
def _interrupt_aborts(abort: AbortSignal) -> Iterator[None]:
    """Make the first Ctrl-C an abort, whose result is still shown; the second one ends the command."""

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # From another thread: this one may be holding the lock of the signal it interrupts.
        threading.Thread(target=abort.abort, name="lemon-abort", daemon=True).start()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
