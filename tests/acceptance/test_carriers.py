"""The same frames through both carriers give the same answers, stats and blocks (D-9, D-10).

A socket pair carries the frames of a per-call run, a Jupyter comm those of a cell.  What the host makes of them is
decided by one dispatcher, so nothing that a script sends may come out differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lemon_kernel import ToolResult

from .conftest import Agent
from .doubles import emptied, files, standing_agent

FRAMES = """
import json, lemon_tools
raw = lemon_tools._raw
T = raw.token
W = "w" * 43

def call(id, **parts):
    return {"type": "call", "id": id, "token": T, "tool": "read", "params": {"path": "f.txt"}, **parts}

def block(id, n, text, **parts):
    return {"type": "text", "id": id, "token": T, "n": n, "text": text, **parts}

def note(id, msg, **parts):
    return {"type": "notify", "id": id, "token": T, "msg": msg, **parts}

def without(frame, *names):
    return {name: value for name, value in frame.items() if name not in names}

FRAMES = [
    # calls
    ("a call", call(1)),
    ("another cell's name", call(2, cell="nobody")),
    ("a tool that fails", call(3, params={"path": "missing"})),
    ("null params", call(4, tool="ls", params=None)),
    ("no params", without(call(5, tool="ls"), "params")),
    ("an unknown parameter", call(6, params={"path": "f.txt", "colour": "red"})),
    ("the largest id", call(2**53)),
    # replays
    ("a replay", call(1)),
    ("a replay of a failure", call(3)),
    # shapes
    ("no tool", without(call(10), "tool")),
    ("a number for a tool", call(11, tool=42)),
    ("a list for params", call(12, params=[1])),
    ("a string for params", call(13, params="f.txt")),
    ("an unknown tool", call(14, tool="bash")),
    ("a channel for a tool", call(15, tool="text")),
    ("a surrogate in params", call(16, params={"path": "a\\ud800"})),
    ("a surrogate for a tool", call(17, tool="\\udfff")),
    # tokens
    ("no token", without(call(20), "token")),
    ("a wrong token", call(20, token=W)),
    ("a null token", call(20, token=None)),
    ("a number for a token", call(20, token=42)),
    ("an object for a token", call(20, token={})),
    ("a token and a letter", call(20, token=T + "x")),
    ("a token cut short", call(20, token=T[:-1])),
    ("the same id with the right token", call(20)),
    # ids that nobody can be answered on
    ("id zero", call(0)),
    ("a negative id", call(-1)),
    ("an id beyond 2**53", call(2**53 + 1)),
    ("no id", without(call(21), "id")),
    ("a string for an id", call("21")),
    ("true for an id", call(True)),
    ("a float for an id", call(1.5)),
    # what is no frame
    ("nothing", b""),
    ("not JSON", b"{nope"),
    ("an array", b"[1, 2]"),
    ("a string", b'"call"'),
    ("a number", b"7"),
    ("null", b"null"),
    ("not UTF-8", b'{"type": "call", "id": 22, "token": "\\xff"}'),
    ("two objects", b'{"type": "call"}{"type": "call"}'),
    ("no type", {"id": 23, "token": T}),
    ("an unknown type", {"type": "grant", "id": 24, "token": T}),
    ("an open frame", {"type": "open", "id": 25, "request": "x"}),
    ("a deep frame", (26, b'{"type": "call", "id": 26, "params": ' + b"[" * 50000 + b"]" * 50000 + b"}")),
    ("a number of many digits", (27, b'{"type": "call", "id": 27, "params": {"n": ' + b"9" * 5000 + b"}}")),
    # text
    ("block 2 first", block(30, 2, "second")),
    ("block 1", block(31, 1, "first")),
    ("an empty block", block(32, 3, "")),
    ("block 3 again", block(33, 3, "again")),
    ("no number", without(block(34, 4, "x"), "n")),
    ("a string for a number", block(35, "4", "x")),
    ("a number for a text", block(36, 4, 5)),
    ("a surrogate in a text", block(37, 4, "a\\ud800b")),
    ("a text with a bad token", block(38, 4, "x", token=W)),
    ("a text over the budget", block(39, 4, "x" * 900)),
    ("a text frame over its cap", block(40, 4, "x" * 1400)),
    ("a text that still fits", block(41, 5, "fifth \\u00e9\\u4e2d")),
    # notify
    ("a note", note(50, "hello")),
    ("a note without an id", without(note(50, "no id"), "id")),
    ("a note with a bad token", note(51, "bad", token=W)),
    ("a note that is no string", note(52, 5)),
    ("a long note", note(53, "\\u00e9" * 3000)),
    # sizes
    ("an oversized call", call(60, params={"path": "x" * 300000})),
    ("an oversized call with a late id", dict(reversed(call(61, params={"path": "x" * 300000}).items()))),
    ("an oversized note", note(62, "x" * 300000)),
    ("an oversized text", block(63, 6, "x" * 300000)),
    ("oversized junk", b"x" * 300000),
    ("a call just below the cap", call(64, params={"path": "f.txt", "pad": "x" * 261000})),
    # budgets
    ("a result over the budget", call(70, params={"path": "long.txt"})),
    ("a small result after it", call(71)),
    ("a call at the end", call(72)),
]
answers = []
for name, frame in FRAMES:
    # an answer that must not come is not waited for long; all that may come do so at once
    if isinstance(frame, tuple):  # what _raw itself cannot parse
        ok, content = raw.__globals__["_grant"].carrier.exchange(*frame, 10)
        answer = {"ok": ok, "content": content}
    else:
        answer = raw(frame, timeout_s=0.3 if name in SILENT else 10)
    answers.append([name, answer])
print(json.dumps(answers))
"""

SILENT = [
    "id zero",
    "a negative id",
    "an id beyond 2**53",
    "true for an id",
    "an unknown type",
    "an open frame",
    "a note with a bad token",
    "a note that is no string",
    "an oversized note",
    "an oversized call with a late id",
    "no type",
]
"""Frames with an integer id that may stay unanswered."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Agent]]:
    """An agent per carrier, over folders that look alike."""
    one, two = (standing_agent(mode, tmp_path_factory) for mode in ("per_call", "session"))
    yield next(one), next(two)
    for agents in (one, two):
        next(agents, None)


def send_all(agent: Agent) -> tuple[dict[str, object], ToolResult, list[str]]:
    """Send the frames and return the answers by name, the result, and the updates."""
    emptied(agent)
    files(agent.cwd, {"f.txt": "alpha", "long.txt": "x" * 5000})
    updates: list[str] = []
    result = agent.run(
        f"SILENT = {SILENT!r}\n{FRAMES}",
        config={
            "max_rpc_calls": 40,
            "max_rpc_result_bytes": 2000,
            "max_text_bytes": 1000,
            "max_output_bytes": 1_000_000,
        },
        timeout_ms=60_000,
        on_update=lambda update: updates.append(update.text),
    )
    output = result.text.split("Diagnostics (stdout/stderr, not the result):\n")[1]
    return dict(json.loads(output.replace(str(agent.cwd), "<cwd>"))), result, updates


@pytest.mark.case(154, 156, 159, 160, 161, 162, 173)
def test_both_carriers_give_the_same_answers_stats_and_blocks(pair: tuple[Agent, Agent]) -> None:
    """Calls, bad tokens, replays, junk, text, notify and oversized frames: equal in every answer and count."""
    pipe, comm = (send_all(agent) for agent in pair)

    for name, answer in pipe[0].items():
        assert comm[0][name] == answer, name
    assert comm[2] == pipe[2]
    blocks = [result.text.split("Diagnostics")[0] for result in (pipe[1], comm[1])]
    assert blocks[0] == blocks[1]
    for key in ("rpc_calls", "rpc_denied", "rpc_errors", "rpc_tools"):
        assert comm[1].details[key] == pipe[1].details[key], key
    assert "rpc_accounting_loss" not in {**pipe[1].details, **comm[1].details}
    assert comm[1].details["persistent"] is True


@pytest.mark.case(156, 159, 160, 161, 173)
def test_what_the_carriers_agree_on_is_what_is_written(pair: tuple[Agent, Agent]) -> None:
    """The answers themselves, for each kind of frame, over the socket pair."""
    answers, result, updates = send_all(pair[0])
    contents = {
        name: answer["content"] if isinstance(answer, dict) else None for name, answer in answers.items()
    }

    read = "1: alpha"
    assert contents["a call"] == contents["another cell's name"] == contents["the largest id"] == read
    assert contents["the same id with the right token"] == contents["a call at the end"] == read
    assert contents["a call just below the cap"] == read
    assert contents["a tool that fails"] == "File not found: <cwd>/missing"
    assert contents["null params"] == contents["no params"]
    assert contents["a replay"] == contents["a replay of a failure"] == "rpc request already processed"
    for name in ("no tool", "a number for a tool", "a list for params", "a string for params"):
        assert contents[name] == "invalid rpc request", name
    for name in ("a surrogate in params", "a surrogate for a tool", "a deep frame"):
        assert contents[name] == "invalid rpc request", name
    assert contents["an unknown tool"] == "tool 'bash' is not available inside execute_code scripts"
    assert contents["a channel for a tool"] == "tool 'text' is not available inside execute_code scripts"
    for name in (
        "no token",
        "a wrong token",
        "a null token",
        "a number for a token",
        "an object for a token",
    ):
        assert contents[name] == "rpc authentication failed", name
    assert contents["a text with a bad token"] == "rpc authentication failed"
    for name in ("nothing", "not JSON", "an array", "a string", "id zero", "a string for an id", "no id"):
        assert contents[name] is None, name
    assert contents["an oversized call"] == "invalid rpc request"
    assert contents["an oversized call with a late id"] is None
    assert contents["oversized junk"] is None
    assert contents["a result over the budget"] is not None
    assert "rpc result byte budget exceeded (result 5003 bytes, " in contents["a result over the budget"]
    assert contents["a small result after it"] == read
    assert result.text.startswith("Script result (text()):\nfirst\nsecond\n\nagain\nfifth é中\n\nDiagnostics")
    assert updates[:2] == ["notify: hello", "notify: no id"]
    assert updates[2] == "notify: " + "é" * 2048
    assert len(updates) == 3
