"""Every reason a run can end for is produced by some test; those that no case of the papers asks for, here."""

from __future__ import annotations

import ast
import asyncio
import pathlib
from collections.abc import Iterator
from typing import get_args

import pytest

from lemon_kernel import KernelRegistry
from lemon_kernel.bridge import dispatch
from lemon_kernel.result import FallbackReason, Reason

from .conftest import Agent
from .kernels import FRESH, IS_X_THERE, ISOLATED, LOST, flags, queued, registry_of, running

TESTS = pathlib.Path(__file__).parents[1]
SECRET = "a path, a token, a name"


def marked(path: pathlib.Path) -> Iterator[str]:
    """Yield what the ``@pytest.mark.reason(...)`` of the test functions in a file name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.reason":
                yield from (ast.literal_eval(argument) for argument in mark.args)


def test_every_reason_has_a_test() -> None:
    """A reason that nothing produces in the tests is one that nobody knows to work (behaviour 2.7, 6.8)."""
    produced = {name for path in TESTS.rglob("test_*.py") for name in marked(path)}

    assert produced == {*get_args(Reason), *get_args(FallbackReason)}


@pytest.mark.reason("exit")
def test_exit(per_call: Agent) -> None:
    """Per call a non-zero status is the reason, and the headline comes last."""
    result = per_call.run("print('out')\nraise SystemExit(3)")

    assert (result.text, flags(result)) == (
        "out\n\nScript exited with code 3",
        {**ISOLATED, "reason": "exit"},
    )
    assert result.details["exit_code"] == 3


@pytest.mark.reason("protocol_fault", "kernel_discarded")
def test_protocol_fault(session: Agent) -> None:
    """An answer to our request that is no execute_reply costs the kernel; who queued is told, nothing is lost."""
    script = """
import os, sys, time
while not os.path.exists('go'):
    time.sleep(0.01)
text('kept')
print('said')
frame = sys._getframe()
while 'message' not in frame.f_locals:
    frame = frame.f_back
kernel, message = frame.f_locals['self'], frame.f_locals['message']
kernel.shell_stream.send_multipart(
    [*message.route, *kernel._signer.frames('kernel_info_reply', b'{}', message.header)]
)
kernel.shell_stream.flush()
time.sleep(30)
"""
    active = running(session, script)
    waiting = queued(session, "open('ran', 'w')")
    (session.cwd / "go").touch()
    result = active.result()

    assert result.text == (
        "execute_code session failed: protocol_fault\n\n"
        "Script result (text()):\nkept\n\n"
        "Diagnostics (stdout/stderr, not the result):\nsaid\n"
    )
    assert flags(result) == {**LOST, "reason": "protocol_fault"}
    assert flags(waiting.result()) == {**LOST, "reason": "kernel_discarded"}
    assert flags(session.run("pass")) == FRESH
    assert not (session.cwd / "ran").exists()


@pytest.mark.reason("shutting_down", "kernel_discarded")
def test_shutting_down(session: Agent) -> None:
    """A registry that closes answers the active call and the queued one, with what the cell had printed."""
    active = running(session, "print('said')\nopen('go', 'w').close()\nimport time; time.sleep(30)")
    waiting = queued(session, "open('ran', 'w')")
    while not (session.cwd / "go").exists():
        assert not active.done
    asyncio.run(registry_of(session).aclose())

    assert active.result().text == "execute_code session failed: shutting_down\n\nsaid\n"
    assert flags(active.result()) == {**LOST, "reason": "shutting_down"}
    assert flags(waiting.result()) == {**LOST, "reason": "kernel_discarded"}
    assert not (session.cwd / "ran").exists()


@pytest.mark.reason("grant_failed")
def test_grant_failed(session: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token no cell is sent, nor is the script run isolated; the kernel keeps what it has."""
    session.run("x = 1")

    def no_randomness(*ignored: object) -> str:
        raise OSError(SECRET)

    with monkeypatch.context() as broken:
        for name in ("token_hex", "token_urlsafe"):
            broken.setattr(dispatch.secrets, name, no_randomness)
        result = session.run("open('ran', 'w')")

    assert (result.text, flags(result)) == (
        "execute_code session failed: grant_failed",
        {**ISOLATED, "reason": "grant_failed"},
    )
    assert not (session.cwd / "ran").exists()
    assert session.run(IS_X_THERE).text == "True\n"


class Broken(KernelRegistry):
    """A registry with a fault of ours in it."""

    async def acquire(self, *args: object, **options: object) -> object:  # type: ignore[override]
        raise RuntimeError(SECRET)


@pytest.mark.reason("internal_error")
def test_internal_error(session: Agent) -> None:
    """A fault of ours is an error result that gives nothing away, not an exception in the agent."""
    session.registry = Broken()
    result = session.run("open('ran', 'w')")

    assert (result.text, flags(result)) == (
        "execute_code session failed: internal_error",
        {**ISOLATED, "reason": "internal_error"},
    )
    assert not (session.cwd / "ran").exists()


@pytest.mark.reason("internal_error")
def test_internal_error_per_call(per_call: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same per call, where what the script gave with text() before the fault is kept (behaviour 2.6)."""
    from lemon_kernel import per_call as module

    whole = module.run_script

    async def fails_at_the_end(*args: object, **options: object) -> object:
        await whole(*args, **options)  # type: ignore[arg-type]
        raise RuntimeError(SECRET)

    monkeypatch.setattr(module, "run_script", fails_at_the_end)
    result = per_call.run("text('kept')")

    assert result.text == (
        "execute_code session failed: internal_error\n\n"
        "Script result (text()):\nkept\n\n"
        "Diagnostics (stdout/stderr, not the result):\n(script produced no output)"
    )
    assert flags(result) == {**ISOLATED, "reason": "internal_error"}
    assert result.details["exit_code"] is None
