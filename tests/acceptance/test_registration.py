"""What an agent sees of the tool, and what a call is refused for before anything runs (cases section 2)."""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import re
import sys

import pytest

import lemon_kernel
from lemon_kernel import AbortSignal, ExecuteCode, ExecuteCodeConfig, ExecuteCodeError, ToolNotFoundError

from .conftest import Agent, Pending, private_roots

DIRECT_TOOLS = ["read", "grep", "find", "ls", "webfetch"]
LOOP = "while True: pass"


def names(folder: pathlib.Path, config: ExecuteCodeConfig | None) -> list[str]:
    return [tool.name for tool in lemon_kernel.tools(folder, config=config)]


def refusal(agent: Agent, params: dict[str, object], **options: object) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises(ExecuteCodeError) as raised:
        agent.tool(**options).run_sync(params)
    return str(raised.value)


def everything_under_tmpdir() -> set[str]:
    return {
        os.path.join(folder, name)
        for folder, folders, files in os.walk(os.environ["TMPDIR"])
        for name in (*folders, *files)
    }


@pytest.mark.case(27)
def test_tool_is_hidden_while_disabled(folder: pathlib.Path) -> None:
    """Without settings the tool is in no list, and looking it up says that there is none."""
    assert names(folder, None) == DIRECT_TOOLS
    with pytest.raises(ToolNotFoundError):
        lemon_kernel.find_tool("execute_code", folder)


@pytest.mark.case(28)
def test_kernel_settings_do_not_enable_the_tool(folder: pathlib.Path) -> None:
    """A kernel mode alone enables nothing, whether given in code or in the project's file."""
    (folder / ".lemon").mkdir()
    (folder / ".lemon" / "config.toml").write_text('[runtime.tools.execute_code]\nkernel_mode = "session"\n')

    assert "execute_code" not in names(folder, None)
    assert "execute_code" not in names(folder, ExecuteCodeConfig(kernel_mode="session"))


@pytest.mark.case(29)
def test_tool_is_registered_last(folder: pathlib.Path) -> None:
    """Enabled it is the last tool, and the definitions before it are byte for byte what they were."""
    without = lemon_kernel.tools(folder, config=ExecuteCodeConfig())
    with_it = lemon_kernel.tools(folder, config=ExecuteCodeConfig(enabled=True))

    assert [tool.name for tool in with_it] == [*DIRECT_TOOLS, "execute_code"]
    for before, after in zip(without, with_it, strict=False):
        assert repr((before.name, before.label, before.description, before.parameters)) == repr(
            (after.name, after.label, after.description, after.parameters)
        )
    found = lemon_kernel.find_tool("execute_code", folder, config=ExecuteCodeConfig(enabled=True))
    assert isinstance(found, ExecuteCode)


@pytest.mark.case(30)
def test_schema(agent: Agent) -> None:
    """Name, label and exactly three parameters, of which only the script is required; equal in both modes."""
    tool = agent.tool()

    assert (tool.name, tool.label) == ("execute_code", "Execute Code")
    schema = tool.parameters
    assert schema["type"] == "object"
    assert schema["required"] == ["script"]
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert isinstance(properties, dict)
    assert {name: part["type"] for name, part in properties.items()} == {
        "script": "string",
        "timeout_ms": "integer",
        "reset": "boolean",
    }
    assert properties["reset"]["default"] is False


@pytest.mark.case(31)
def test_description_says_what_a_script_can_do_and_its_limits(agent: Agent) -> None:
    """Mode, helper signatures, channels, limits with their numbers and the line offset are all told."""
    text = agent.tool(
        config={
            "timeout_ms": 45000,
            "max_rpc_calls": 9,
            "max_parallel_rpc": 3,
            "max_rpc_result_bytes": 7777,
            "max_text_bytes": 8888,
            "max_output_bytes": 6666,
        }
    ).description

    assert f"Kernel mode: {agent.mode}" in text
    assert ("reset=true" in text) == (agent.mode == "session")
    for signature in (
        "read(path, offset=None, limit=None)",
        "grep(pattern, path=None, glob=None, case_sensitive=None, literal=None, context_lines=None, ",
        "find(pattern, path=None, type=None, max_depth=None, max_results=None, hidden=None)",
        "ls(path=None, all=None, long=None, recursive=None, max_depth=None, max_entries=None)",
        "webfetch(url, extract_mode=None, max_chars=None)",
        "text(s)",
        "notify(msg)",
        "batch([(tool, params), ...])",
    ):
        assert signature in text
    for number in ("45000", "9", "3", "7777", "8888", "6666"):
        assert re.search(rf"\b{number}\b", text)
    for words in ("ToolError", "offset by 1", "python3", "diagnostics"):
        assert words in text


@pytest.mark.case(32)
def test_narrowed_helpers_leave_the_description(agent: Agent) -> None:
    """A helper that is not enabled is not described; with none a sentence says so."""
    narrowed = agent.tool(config={"tools": ["read"]}).description
    assert "read(" in narrowed
    for name in ("grep(", "find(", "ls(", "webfetch("):
        assert name not in narrowed

    none = agent.tool(config={"tools": ["bash"]}).description
    assert not any(f"{name}(" in none for name in DIRECT_TOOLS)
    assert "No helper is enabled" in none


@pytest.mark.case(33)
def test_equal_options_give_equal_definitions(agent: Agent) -> None:
    """Two builds of the definition are byte-identical, for prompt caches."""
    one, other = (agent.tool(config={"timeout_ms": 4000}) for _ in range(2))

    assert one.description == other.description
    assert repr(one.parameters) == repr(other.parameters)


@pytest.mark.case(34)
def test_disabled_tool_refuses_a_call(agent: Agent) -> None:
    """A stale tool object of a disabled tool runs nothing."""
    message = refusal(agent, {"script": "open('ran', 'w')"}, config={"enabled": False})

    assert message == "execute_code is disabled. Enable [runtime.tools.execute_code] in config."
    assert list(agent.cwd.iterdir()) == []


@pytest.mark.case(35)
@pytest.mark.parametrize("params", [{}, {"script": ""}, {"script": 5}, {"script": None}], ids=repr)
def test_script_is_required(agent: Agent, params: dict[str, object]) -> None:
    """A script that is missing, empty or no string is refused."""
    assert refusal(agent, params) == "Missing required parameter: script"


def test_script_of_white_space_runs(agent: Agent) -> None:
    """Only the empty string is missing; white space is a script (behaviour 2.2)."""
    assert agent.run(" \n ").text == "(script produced no output)"


def test_script_has_a_size_limit(agent: Agent) -> None:
    """A script of 1 MiB of UTF-8 runs, one byte more is refused with both numbers (behaviour 2.2)."""
    script = "print(1)#" + "é" * ((1_048_576 - 9) // 2)
    script += "x" * (1_048_576 - len(script.encode()))

    assert agent.run(script).text == "1\n"
    assert refusal(agent, {"script": script + "x"}) == "script is too large (1048577 bytes, cap 1048576)"


@pytest.mark.case(36)
@pytest.mark.parametrize("reset", ["true", 1, 0, [], {}], ids=repr)
def test_reset_must_be_a_boolean(agent: Agent, reset: object) -> None:
    """Anything that is neither null nor boolean is refused, and nothing runs."""
    message = refusal(agent, {"script": "open('ran', 'w')", "reset": reset})

    assert message == "reset must be a boolean"
    assert list(agent.cwd.iterdir()) == []


@pytest.mark.case(37)
def test_reset_may_be_null(agent: Agent) -> None:
    """``reset=null`` is no reset."""
    result = agent.run("print(1)", reset=None)

    assert result.text == "1\n"
    assert result.details["reset_performed"] is False


def test_unknown_parameters_are_counted_not_named(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """Unknown parameters are ignored with a warning that has their number only (behaviour 2.2)."""
    with caplog.at_level(logging.WARNING, "lemon_kernel"):
        result = agent.tool().run_sync({"script": "print(1)", "secret-one": 1, "secret-two": 2})

    assert result.text == "1\n"
    assert "2 unknown parameter" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.case(39)
def test_timeout_is_clamped_to_the_configured_one(agent: Agent) -> None:
    """A call cannot have more time than the configuration gives."""
    result = agent.run(LOOP, config={"timeout_ms": 2000}, timeout_ms=60_000)

    assert result.text == "Script timed out after 2000ms."
    assert result.details["reason"] == "timeout"
    assert result.details["exit_code"] is None


@pytest.mark.case(40)
def test_timeout_has_a_minimum(agent: Agent) -> None:
    """A call has at least a second."""
    result = agent.run("import time; time.sleep(3)", timeout_ms=1)

    assert result.text == "Script timed out after 1000ms."


@pytest.mark.case(41)
def test_timeout_that_is_no_integer_is_ignored(agent: Agent) -> None:
    """What is no integer means the configured limit; the runs go on side by side, each in its own session."""
    runs: list[Pending] = []
    for number, value in enumerate(("10", 1.5, None)):
        agent.session_id = f"session-{number}"
        runs.append(agent.start(LOOP, config={"timeout_ms": 2000}, timeout_ms=value))

    assert [run.result().text for run in runs] == ["Script timed out after 2000ms."] * 3


@pytest.mark.case(42)
def test_interpreter_must_exist(agent: Agent) -> None:
    """A configured interpreter that is not there is named in the error."""
    message = refusal(agent, {"script": "1"}, config={"python_path": "/nonexistent/python3"})

    assert message == "configured execute_code python_path not found: /nonexistent/python3"


@pytest.mark.case(43)
def test_interpreter_must_be_executable(agent: Agent, tmp_path: pathlib.Path) -> None:
    """A folder and a file without execute bit are refused by name, before anything is staged."""
    plain = tmp_path / "python"
    plain.write_text("#!/bin/sh\n")
    plain.chmod(0o600)
    before = everything_under_tmpdir()

    for path in (str(tmp_path), str(plain)):
        message = refusal(agent, {"script": "1"}, config={"python_path": path})
        assert message == f"configured execute_code python_path is not an executable file: {path}"
    assert everything_under_tmpdir() == before


def test_interpreter_is_looked_up_on_path(
    agent: Agent, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a configured one the first ``python3`` on PATH runs the script; without any, that is said."""
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    result = agent.run("import sys; print(sys.prefix)", config={"python_path": ""})
    assert result.text == f"{sys.prefix}\n"

    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(agent, {"script": "1"}, config={"python_path": ""}) == (
        "python3 was not found on this host. execute_code requires python3; install it or set "
        "[runtime.tools.execute_code] python_path."
    )


@pytest.mark.case(45)
@pytest.mark.parametrize("enabled", [True, False])
def test_call_that_is_aborted_already(agent: Agent, enabled: bool) -> None:
    """Such a call gives the cancelled text as a result, even when disabled, and stages nothing."""
    abort = AbortSignal()
    abort.abort()
    before = everything_under_tmpdir()

    result = asyncio.run(agent.tool(config={"enabled": enabled}).execute({"script": "print(1)"}, abort=abort))

    assert result.content == [{"type": "text", "text": "Script cancelled."}]
    assert result.details == {}
    assert result.trust == "trusted"
    assert everything_under_tmpdir() == before
    assert len(private_roots()) <= 1
