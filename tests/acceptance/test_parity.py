"""The same script gives the same result in both modes, on a kernel from scratch and on a forked one (D-9).

(Session issue 4; speed issue, item 1.)
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
from collections.abc import Iterator

import pytest

from lemon_kernel import ToolResult

from .conftest import Agent
from .parity_scripts import DIFFERENT, SCRIPTS

VOLATILE = ("duration_ms", "full_output_path", "rpc_bytes")  # the folders have names of unequal length
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Agent, Agent]]:
    """One agent per mode, and one whose kernel is forked, over folders that look alike.

    A session's scripts all run on one kernel.
    """
    made = []
    for mode, name in (("per_call", "per_call"), ("session", "session"), ("session", "forked")):
        folder = tmp_path_factory.mktemp(name) / "work"
        (folder / "lib").mkdir(parents=True)
        (folder / "data.txt").write_text("alpha\nbeta\n")
        (folder / "neighbour.py").write_text("VALUE = 1\n")
        (folder / "random.py").write_text("raise RuntimeError('the wrong random')\n")
        (folder / "lib" / "parity_local.py").write_text("VALUE = 'local'\n")
        made.append(Agent(folder, mode))
    assert asyncio.run(made[2].tool().prewarm())
    for agent, forked in ((made[1], False), (made[2], True)):
        command = agent.run("print(open('/proc/self/cmdline').read())").text
        assert ("--template" in command) is forked
    yield made[0], made[1], made[2]
    for agent in made:
        agent.close()


def comparable(result: ToolResult, agent: Agent) -> str:
    """Return what of a result must be equal: all of it but the headline and what names this run."""
    text = result.text.replace(str(agent.cwd), "<cwd>")
    text = re.sub(r"<cell \d+>", "<cell N>", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "<address>", text)
    text = re.sub(r"\[Full output saved to: [^\]]*\]", "[Full output saved to: <path>]", text)
    text = re.sub(r"-- (line )?\d+:\d+:\d+", "--", text)
    if result.details.get("reason") == "exit":  # per call: the headline is last, or first with text()
        text = re.sub(r"(\A|\n\n?)Script exited with code \d+(\n\n|\Z)", "", text)
    if (
        result.details.get("reason") == "exception"
    ):  # session: the headline is first, the message may have lines
        text = text[_headline_length(text) :]
    return text.strip("\n")


def _headline_length(text: str) -> int:
    """The headline ends at a blank line before what the script printed; a message has none in these scripts."""
    return len(text) if "\n\n" not in text else text.index("\n\n")


@pytest.mark.case(315, 47, 48, 51)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_same_result_in_both_modes(name: str, agents: tuple[Agent, Agent, Agent]) -> None:
    """Output, blocks and helper accounting are equal, whatever the mode; a reason is one in both."""
    per_call, session, forked = (agent.run(SCRIPTS[name], timeout_ms=60_000) for agent in agents)

    assert comparable(forked, agents[2]) == comparable(session, agents[1])
    assert [value for key, value in forked.details.items() if key not in VOLATILE] == [
        value for key, value in session.details.items() if key not in VOLATILE
    ]
    assert session.details["persistent"] is True, session.details
    assert session.details["state_retained"] is True, session.text
    if name in DIFFERENT:
        assert comparable(session, agents[1]) != comparable(per_call, agents[0]), "no difference any more"
        return
    assert comparable(session, agents[1]) == comparable(per_call, agents[0])
    for key in ("rpc_calls", "rpc_denied", "rpc_errors", "rpc_tools", "truncated"):
        assert session.details[key] == per_call.details[key], key
    ended_well = per_call.details.get("reason") is None
    if "exit" not in name.lower() and name != "argparse error":
        assert (session.details.get("reason") is None) == ended_well


def page() -> str:
    """Return the page of what differs, from ``DIFFERENT`` and the rules of behaviour 2.6."""
    lines = [
        "# The same script in both modes",
        "",
        f"`tests/acceptance/test_parity.py` runs {len(SCRIPTS)} scripts per call and as cells on one session kernel",
        "and compares everything they give back.",
        "This page is written by that test run (`make docs`); what is not listed is equal.",
        "",
        "| what | per call | session |",
        "|---|---|---|",
        "| a script that raises | `Script exited with code 1` after the output | `Script raised Name: message` before the output |",
        "| `sys.exit(3)` | `Script exited with code 3` | `Script raised SystemExit: 3` |",
        "| `sys.exit()`, `sys.exit(0)` | success | `Script raised SystemExit`, an error with the state retained |",
        "| names of frames | always `<cell 1>` | `<cell N>`, N counts the kernel's cells |",
        "| `__file__` | the staged script | not defined |",
        "| `display()`, `get_ipython()`, `In`, `Out` | not defined | IPython's |",
        "| atexit functions | run at the end of the script | never run: a kernel is ended by signals |",
    ]
    lines += [f"| {name} | {per_call} | {session} |" for name, (per_call, session) in DIFFERENT.items()]
    return "\n".join(lines) + "\n"


def test_the_page_of_differences_is_current() -> None:
    """``docs/parity.md`` says what this run found; WRITE_DOCS=1 writes it."""
    if os.environ.get("WRITE_DOCS") == "1":
        PAGE.write_text(page())

    assert PAGE.read_text() == page()
