"""What ``docs/security.md`` says is *not* protected: each limit is shown, so that nobody takes it for a promise."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

from lemon_kernel import ExecuteCode, ExecuteCodeConfig, ToolPolicy
from lemon_kernel.config import PolicyConfig

from .conftest import Agent, process_is_gone, read_pid, wait_until


def test_a_policy_for_helpers_does_not_bind_python(agent: Agent) -> None:
    """``read`` is denied, ``open`` is Python's own."""
    (agent.cwd / "f").write_text("content")

    result = agent.run(
        'try:\n    read("f")\nexcept ToolError as error:\n    print(error)\nprint(open("f").read())',
        policy=ToolPolicy(deny=["read"]),
    )

    assert result.text == "Tool 'read' is in deny list\ncontent\n"


def test_a_script_can_read_its_token(agent: Agent) -> None:
    """It is in the script's own memory; a frame made with it is checked by the host like any other."""
    result = agent.run(
        "import lemon_tools\nraw = lemon_tools._raw\n"
        'frame = {"type": "call", "id": 50, "token": raw.token, "tool": "ls"}\n'
        'print(len(raw.token), raw(frame)["content"])',
        policy=ToolPolicy(deny=["ls"]),
    )

    assert result.text == "43 Tool 'ls' is in deny list\n"
    assert result.details["rpc_denied"] == 1


def test_a_child_without_marker_and_group_escapes(agent: Agent) -> None:
    """It left the group and has no environment: neither way to find it finds it."""
    agent.run(
        "import subprocess\n"
        'child = subprocess.Popen(["/bin/sleep", "30"], env={}, start_new_session=True,\n'
        "    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        'open("child", "w").write(str(child.pid))\n'
    )
    pid = read_pid(agent.cwd / "child")
    try:
        agent.close()

        assert not process_is_gone(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: process_is_gone(pid), what="the child's death")


def test_a_projects_file_can_enable_the_tool(folder: pathlib.Path) -> None:
    """A file in the folder enables the tool and chooses the interpreter; the environment beats it."""
    (folder / ".lemon").mkdir()
    python = folder / "python"
    python.symlink_to(sys.executable)
    (folder / ".lemon" / "config.toml").write_text(
        '[runtime.tools.execute_code]\nenabled = true\npython_path = "python"\n'
    )

    tool = ExecuteCode(folder)
    overruled = ExecuteCodeConfig.load(folder, environ={"LEMON_EXECUTE_CODE_ENABLED": "false"})

    assert tool.run_sync({"script": "print(1)"}).text == "1\n"
    assert tool.config.python_path == str(python)
    assert tool.config.sources["python_path"] == str(folder / ".lemon" / "config.toml")
    assert overruled.enabled is False


def test_a_projects_file_can_lift_the_users_policy(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The nearer file wins, for the policy too; the environment wins over both."""
    for place, denied in ((tmp_path, '["read"]'), (folder, "[]")):
        (place / ".lemon").mkdir()
        (place / ".lemon" / "config.toml").write_text(f"[runtime.tools.policy]\ndeny = {denied}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def policy(cwd: pathlib.Path, **environ: str) -> ToolPolicy:
        return PolicyConfig.load(cwd, home=tmp_path, environ=environ).policy()

    assert not policy(elsewhere).allowed("read")
    assert policy(folder).allowed("read")
    assert not policy(folder, LEMON_POLICY_DENY="read").allowed("read")


def test_a_cell_can_leave_traps_for_the_next(session: Agent) -> None:
    """Cells of one kernel trust each other; a reset does away with what one has left."""
    session.run('import math\nmath.sqrt = lambda number: "trapped"')
    ask = "import math\nprint(math.sqrt(4))"

    assert session.run(ask).text == "trapped\n"
    assert session.run(ask, reset=True).text == "2.0\n"
