"""Cells of a front end are ordinary cells: what people expect of an IPython kernel (behaviour 6.13)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lemon_kernel import helpers

from ..kernels import wait_until
from .front_end import TIMEOUT_S, FrontEnd
from .test_notebook_host import SlowHelper, took


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    folder = tmp_path_factory.mktemp("standard")
    (folder / "a.txt").write_text("first\nsecond\n")
    (folder / "beside.py").write_text("here = 'imported'\n")
    with FrontEnd(folder) as front_end:
        yield front_end


def test_last_expression_is_shown(kernel: FrontEnd) -> None:
    """The value of the last expression is an execute_result with the cell's number; ``_`` holds it."""
    ran = kernel.ok("[1, 2] + [3]")

    assert ran.result == "[1, 2, 3]"
    assert ran.of("execute_result")[0]["content"]["execution_count"] == ran.reply["execution_count"]
    assert kernel.ok("_, Out[len(In) - 2]").result == "([1, 2, 3], [1, 2, 3])"


def test_rich_display(kernel: FrontEnd) -> None:
    """Objects show their HTML, and display() its own MIME types."""
    ran = kernel.ok("from IPython.display import HTML, display\ndisplay(HTML('<b>b</b>'))\nHTML('<i>i</i>')")

    assert ran.data("display_data")[0]["text/html"] == "<b>b</b>"
    assert ran.data("execute_result")[0]["text/html"] == "<i>i</i>"


def test_streams(kernel: FrontEnd) -> None:
    """print and a child's output arrive as streams, stderr apart from stdout."""
    ran = kernel.ok(
        "import subprocess, sys\nprint('one')\nprint('two', file=sys.stderr)\n"
        "_ = subprocess.run(['echo', 'three'])"
    )

    assert "one" in ran.stdout
    assert ran.stderr == "two\n"
    wait_until(lambda: "three" in ran.stdout + kernel.ok("").stdout)


def test_magics_and_shell_lines(kernel: FrontEnd) -> None:
    """Line magics, cell magics and ``!`` lines work."""
    assert "\nabc" in "\n" + kernel.ok("!echo abc").stdout.replace("\r", "")
    assert "hello" in kernel.ok("%%bash\necho hello").stdout
    assert kernel.ok("%time 1").result == "1"
    assert "kernel" in kernel.ok("%connect_info").stdout.lower()


def test_top_level_await(kernel: FrontEnd) -> None:
    """``await`` works at the top level, and a task goes on between cells."""
    kernel.ok(
        "import asyncio\nticks = []\nasync def tick():\n    while True:\n"
        "        ticks.append(1)\n        await asyncio.sleep(0.01)\ntask = asyncio.create_task(tick())"
    )
    assert kernel.ok("await asyncio.sleep(0.05, 'slept')").result == "'slept'"
    time.sleep(0.1)
    assert int(kernel.ok("task.cancel(); len(ticks)").result) > 5


def test_folder_is_importable(kernel: FrontEnd) -> None:
    """A module beside the notebook can be imported."""
    assert kernel.ok("import beside; beside.here").result == "'imported'"


def test_errors_are_coloured_tracebacks(kernel: FrontEnd) -> None:
    """An exception gives an error message with IPython's traceback, and queued cells are aborted."""
    first = kernel.send("import time; time.sleep(0.3); 1 / 0")
    second = kernel.send("2")
    ran = kernel.finish(first)

    assert ran.error == "ZeroDivisionError: division by zero"
    assert "\x1b[" in "".join(ran.reply["traceback"])
    assert kernel.finish(second).status == "aborted"


def test_completion(kernel: FrontEnd) -> None:
    """Helpers complete by name, and so do their keyword arguments and those of ``lemon_tools``."""
    kernel.ok("import lemon_tools")
    matches = [
        kernel.ask(kernel.client.complete(code))["matches"]
        for code in ("webf", "lemon_tools.gre", "grep('x', case_s")
    ]

    assert "webfetch" in matches[0]
    assert any("grep" in match for match in matches[1])
    assert any("case_sensitive=" in match for match in matches[2])


@pytest.mark.parametrize("name", ["read", "grep", "find", "ls", "webfetch", "text", "notify", "batch"])
def test_question_mark(kernel: FrontEnd, name: str) -> None:
    """``read?`` shows the signature, what it does and an example."""
    page = kernel.ok(f"{name}?").reply["payload"][0]["data"]["text/plain"]

    assert f"{name}(" in page
    assert "Signature" in page
    assert ">>>" in page


def test_inspection(kernel: FrontEnd) -> None:
    """Shift-Tab shows the signature too."""
    content = kernel.ask(kernel.client.inspect("read(", 5))

    assert content["found"]
    assert "path" in content["data"]["text/plain"]


def test_history_is_in_memory(kernel: FrontEnd) -> None:
    """Arrow-up finds earlier cells, and nothing is written to the profile."""
    kernel.ok("remembered = 1")
    history = kernel.ask(kernel.client.history(hist_access_type="tail", n=5))["history"]

    assert "remembered = 1" in [entry[2] for entry in history]
    assert kernel.ok("get_ipython().history_manager.hist_file").result == "':memory:'"
    assert (
        kernel.ok(
            "import os\n[n for _, _, files in os.walk(get_ipython().profile_dir.location) for n in files "
            "if 'history' in n]"
        ).result
        == "[]"
    )


def test_input(kernel: FrontEnd) -> None:
    """input() and getpass() ask the front end, where it can be asked."""
    client = kernel.client
    for code, answer in (("input('name? ')", "lemon"), ("import getpass; getpass.getpass('pw? ')", "secret")):
        message_id = kernel.send(code, allow_stdin=True)
        request = client.get_stdin_msg(timeout=TIMEOUT_S)
        assert request["content"]["prompt"] in code
        client.input(answer)
        assert kernel.finish(message_id).result == repr(answer)
    assert kernel.run("input()").error.startswith("StdinNotImplementedError")


def test_user_expressions_and_silence(kernel: FrontEnd) -> None:
    """Silent requests count nothing, and expressions of a request are evaluated."""
    before = kernel.ok("1").reply["execution_count"]
    kernel.ok("hidden = 5", silent=True)
    ran = kernel.ok("", user_expressions={"h": "hidden"})

    assert ran.reply["user_expressions"]["h"]["data"]["text/plain"] == "5"
    assert kernel.ok("1").reply["execution_count"] <= before + 2


def test_widgets_comms(kernel: FrontEnd) -> None:
    """A comm that a cell opens talks both ways, as widgets do."""
    ran = kernel.ok(
        "from comm import create_comm\nheard = []\nmine = create_comm(target_name='w', data={'a': 1})\n"
        "mine.on_msg(lambda m: heard.append(m['content']['data']))\nmine.send({'b': 2})\nmine.comm_id"
    )
    client = kernel.client
    client.shell_channel.send(
        client.session.msg(
            "comm_msg", {"comm_id": json.loads(ran.result.replace("'", '"')), "data": {"c": 3}}
        )
    )

    assert ran.of("comm_open")[0]["content"]["data"] == {"a": 1}
    assert ran.of("comm_msg")[0]["content"]["data"] == {"b": 2}
    assert kernel.ok("heard").result == "[{'c': 3}]"


def test_subshell(kernel: FrontEnd) -> None:
    """A subshell runs cells while the main shell is busy."""
    client = kernel.client
    created = control(kernel, "create_subshell_request", {})
    subshell = created["subshell_id"]
    try:
        main = kernel.send("import time; time.sleep(1.5)")
        message = client.session.msg(
            "execute_request", {"code": "6 * 7", "silent": False, "allow_stdin": False}
        )
        message["header"]["subshell_id"] = subshell
        started = time.monotonic()
        client.shell_channel.send(message)
        reply = client.get_shell_msg(timeout=TIMEOUT_S)

        assert reply["parent_header"]["msg_id"] == message["header"]["msg_id"]
        assert reply["content"]["status"] == "ok"
        assert time.monotonic() - started < 1.2
        assert kernel_done(kernel, main) == "ok"
    finally:
        control(kernel, "delete_subshell_request", {"subshell_id": subshell})


def kernel_done(kernel: FrontEnd, message_id: str) -> str:
    while True:
        reply = kernel.client.get_shell_msg(timeout=TIMEOUT_S)
        if reply["parent_header"].get("msg_id") == message_id:
            return str(reply["content"]["status"])


def control(kernel: FrontEnd, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """Send a request on control and return the content of its reply."""
    client = kernel.client
    message = client.session.msg(kind, content)
    client.control_channel.send(message)
    while True:
        reply = client.get_control_msg(timeout=TIMEOUT_S)
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            return dict(reply["content"])


def test_usage_and_info(kernel: FrontEnd) -> None:
    """The info reply offers debugger and subshells, and usage is answered."""
    info = kernel.ask(kernel.client.kernel_info())

    assert {"debugger", "kernel subshells"} <= set(info["supported_features"])
    assert info["implementation"] == "lemon"
    assert control(kernel, "usage_request", {})["pid"] == kernel.process


def test_connect_to_existing(kernel: FrontEnd) -> None:
    """``jupyter console --existing`` finds the kernel through its connection file, and has helpers."""
    script = (
        "import sys\nfrom jupyter_client import BlockingKernelClient\n"
        "client = BlockingKernelClient(connection_file=sys.argv[1])\nclient.load_connection_file()\n"
        "client.start_channels()\nclient.wait_for_ready(timeout=20)\n"
        "client.execute_interactive(\"print(read('a.txt'))\", timeout=20)\nclient.stop_channels()"
    )
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", script, kernel.manager.connection_file],
        capture_output=True,
        text=True,
        timeout=40,
    )

    assert "first" in done.stdout, done.stderr


# The debugger, as JupyterLab drives it


class Debugger:
    """Debug requests and events of one kernel."""

    def __init__(self, kernel: FrontEnd) -> None:
        self.kernel = kernel
        self.number = 0

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.number += 1
        request = {"type": "request", "seq": self.number, "command": command, "arguments": arguments}
        reply = control(self.kernel, "debug_request", request)
        assert reply.get("success"), reply
        return dict(reply.get("body") or {})

    def event(self, name: str) -> dict[str, Any]:
        """Wait for a debug event."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            message = self.kernel.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if message["header"]["msg_type"] == "debug_event" and message["content"]["event"] == name:
                return dict(message["content"]["body"])

    def attach(self) -> None:
        self.ask("initialize", clientID="test", adapterID="", pathFormat="path", linesStartAt1=True)
        self.ask("attach")

    def stop_at(self, code: str, line: int) -> None:
        """Set a breakpoint in `code`, which is to be run as a cell."""
        path = self.ask("dumpCell", code=code)["sourcePath"]
        self.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": line}], sourceModified=False)
        self.ask("configurationDone")


@pytest.fixture
def debugged(tmp_path: Path) -> Iterator[FrontEnd]:
    (tmp_path / "a.txt").write_text("first\nsecond\n")
    with FrontEnd(tmp_path) as front_end:
        yield front_end


def test_debugger(debugged: FrontEnd) -> None:
    """Breakpoint, stop, variables, a helper evaluated there, step, continue."""
    debugger = Debugger(debugged)
    code = "one = 1\ntwo = one + 1\nthree = two + 1\nfour = read('a.txt')\n"
    debugger.attach()
    debugger.stop_at(code, 3)
    message_id = debugged.send(code)
    thread = debugger.event("stopped")["threadId"]
    frame = debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]
    scope = debugger.ask("scopes", frameId=frame["id"])["scopes"][0]
    found = debugger.ask("variables", variablesReference=scope["variablesReference"])["variables"]

    assert frame["line"] == 3
    assert {"one": "1", "two": "2"}.items() <= {v["name"]: v["value"] for v in found}.items()
    value = debugger.ask("evaluate", expression="read('a.txt')", frameId=frame["id"], context="repl")
    assert "first" in value["result"]
    debugger.ask("next", threadId=thread)
    debugger.event("stopped")
    assert debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]["line"] == 4
    debugger.ask("continue", threadId=thread)
    assert debugged.finish(message_id).status == "ok"
    assert "first" in debugged.ok("four").result
    debugger.ask("disconnect", restart=False, terminateDebuggee=False)


def test_debugger_during_a_helper_call(debugged: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debug requests are answered while a helper call is in flight, and the call is not disturbed."""
    slow = SlowHelper()
    monkeypatch.setitem(helpers.HELPERS, "ls", slow)
    debugger = Debugger(debugged)
    debugger.attach()
    code = "answer = ls()\nafter = answer\n"
    debugger.stop_at(code, 1)
    message_id = debugged.send(code)
    thread = debugger.event("stopped")["threadId"]
    debugger.ask("continue", threadId=thread)
    assert took(slow.started)
    assert debugger.ask("debugInfo")["isStarted"]
    assert debugger.ask("threads")["threads"]
    debugger.stop_at(code, 2)  # a breakpoint behind the call that is in flight
    slow.let()
    debugger.event("stopped")
    assert debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]["line"] == 2
    debugger.ask("continue", threadId=thread)

    assert debugged.finish(message_id).status == "ok"
    assert "slow but done" in debugged.ok("after").result
