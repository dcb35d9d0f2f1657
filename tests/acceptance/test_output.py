"""What a script printed, as the result shows it: made harmless, cut 40/60, kept whole (cases section 11)."""

from __future__ import annotations

import pathlib
import stat

import pytest

from lemon_kernel import ToolResult

from .conftest import Agent, private_roots, wait_until

ESC = "\x1b"


def printed(agent: Agent, output: str, limit: int = 50_000) -> ToolResult:
    """Run a script that prints exactly `output`."""
    return agent.run(f"print({output!r}, end='')", config={"max_output_bytes": limit})


def spill(result: ToolResult) -> pathlib.Path:
    """Return the spill file of a truncated run; its path is in the details and on the text's last line."""
    path = result.details["full_output_path"]
    assert isinstance(path, str)
    assert result.text.endswith(f"\n[Full output saved to: {path}]")
    return pathlib.Path(path)


def cut(result: ToolResult) -> str:
    """Return the captured output of a truncated run without its spill line."""
    return result.text.removesuffix(f"\n\n[Full output saved to: {spill(result)}]")


@pytest.mark.case(279)
def test_output_of_exactly_the_limit_is_whole(agent: Agent) -> None:
    """The limit itself is not over it."""
    result = printed(agent, "x" * 100, limit=100)

    assert result.text == "x" * 100
    assert result.details["truncated"] is False
    assert "full_output_path" not in result.details


@pytest.mark.case(280)
def test_one_byte_over_the_limit_is_cut(agent: Agent) -> None:
    """One byte more leaves one byte out, and says so."""
    result = printed(agent, "x" * 101, limit=100)

    assert cut(result) == "x" * 40 + "\n... [1 bytes truncated] ...\n" + "x" * 60
    assert result.details["truncated"] is True
    assert spill(result).read_text() == "x" * 101


@pytest.mark.case(281)
def test_forty_percent_head_sixty_percent_tail(agent: Agent) -> None:
    """Of 500 digits the first 40 and the last 60 are left."""
    digits = "".join(str(n % 10) for n in range(500))
    result = printed(agent, digits, limit=100)

    assert cut(result) == digits[:40] + "\n... [400 bytes truncated] ...\n" + digits[-60:]


def test_characters_are_not_cut(agent: Agent) -> None:
    """Head and tail give up at most three bytes each to end at whole characters (behaviour 7.2)."""
    result = printed(agent, "漢" * 100, limit=100)

    assert cut(result) == "漢" * 13 + "\n... [201 bytes truncated] ...\n" + "漢" * 20


@pytest.mark.case(282)
def test_pieces_are_cut_like_one_write(agent: Agent) -> None:
    """A hundred flushed pieces give what one write gives."""
    pieces = "".join(f"{n:09}." for n in range(100))
    one = printed(agent, pieces, limit=100)
    many = agent.run(
        "for n in range(100): print(f'{n:09}.', end='', flush=True)", config={"max_output_bytes": 100}
    )

    assert cut(many) == cut(one) == pieces[:40] + "\n... [900 bytes truncated] ...\n" + pieces[-60:]
    assert spill(many).read_text() == spill(one).read_text() == pieces


@pytest.mark.case(283)
def test_lines_are_not_counted(agent: Agent) -> None:
    """There is no cap on lines: 3000 short ones are whole."""
    result = agent.run("for n in range(3000): print(f'{n:04}')")

    assert result.text == "".join(f"{n:04}\n" for n in range(3000))
    assert result.details["truncated"] is False


@pytest.mark.case(285)
def test_spill_file_holds_everything(agent: Agent) -> None:
    """The whole output is in a 0600 file in the private root, which outlives the run and its kernel."""
    result = agent.run("print('y' * 100000, end='')", config={"max_output_bytes": 1000})
    agent.close()

    path = spill(result)
    assert cut(result) == "y" * 400 + "\n... [99000 bytes truncated] ...\n" + "y" * 600
    assert path.parent in private_roots()
    assert path.name.startswith("pi-python-repl-")
    assert len(path.name) == len("pi-python-repl-") + 10
    assert stat.filemode(path.lstat().st_mode) == "-rw-------"
    assert path.read_text() == "y" * 100_000


@pytest.mark.case(286)
def test_spill_line_follows_the_diagnostics(agent: Agent) -> None:
    """With blocks the line stands after the printed part."""
    result = agent.run("text('A'); print('z' * 100000)", config={"max_output_bytes": 1000})

    assert cut(result) == (
        "Script result (text()):\nA\n\nDiagnostics (stdout/stderr, not the result):\n"
        + "z" * 400
        + "\n... [99001 bytes truncated] ...\n"
        + "z" * 599
    )
    assert spill(result).read_text() == "z" * 100_000 + "\n"


def test_spill_line_of_a_failed_run(agent: Agent) -> None:
    """The traceback is output like any other, cut and spilled (D-14); the headline has its place (2.6)."""
    result = agent.run("print('z' * 100000)\n1/0", config={"max_output_bytes": 1000})

    path = pathlib.Path(str(result.details["full_output_path"]))
    line = f"[Full output saved to: {path}]"
    if agent.mode == "per_call":
        assert result.text.endswith(
            f"ZeroDivisionError: division by zero\n\n{line}\n\nScript exited with code 1"
        )
    else:
        assert result.text.startswith("Script raised ZeroDivisionError: division by zero\n\nzzz")
        assert result.text.endswith(f"ZeroDivisionError: division by zero\n\n{line}")
    assert path.read_text().endswith("ZeroDivisionError: division by zero\n")


SANITISED = {
    f"{ESC}[31mred{ESC}[0m": "red",
    f"{ESC}[?25lhidden{ESC}[2K{ESC}[10;20H.": "hidden.",
    f"{ESC}[1;38;5;196mmany{ESC}[m": "many",
    f"{ESC}]0;a title\x07after": "after",
    f"{ESC}]8;;https://example.org{ESC}\\link{ESC}]8;;{ESC}\\.": "link.",
    f"{ESC}=two{ESC}Mbyte{ESC}c": "twobyte",
    "a\x01b\x7fc\x00d\x08e": "abcde",
    "one\r\ntwo\r\n": "one\ntwo\n",
    "a\rb": "ab",
    "progress\rprogress2": "progressprogress2",
    "tab\tstays": "tab\tstays",
    f"{ESC}[{'1' * 70}m": f"[{'1' * 70}m",
    "é ü 漢字 🎉 \x9b": "é ü 漢字 🎉 \x9b",
}
ENDINGS = {b"lone \x1b": "lone ", b"\x1b[31": "[31", b"\x1b]0;title": "]0;title", b"\xe6\xbc": "\ufffd"}
"""What is unfinished when the run ends."""


@pytest.mark.case(287)
@pytest.mark.parametrize("piece_bytes", [1_000_000, 1, 3])
def test_output_is_made_harmless(agent: Agent, piece_bytes: int) -> None:
    """Escape sequences, control characters and CRs go, all else stays, in whatever pieces it arrives."""
    output = "|".join(SANITISED).encode() + b"|\xff|"
    script = (
        f"import os, time\noutput, size = {output!r}, {piece_bytes}\n"
        "for start in range(0, len(output), size):\n"
        "    os.write(1, output[start : start + size]); time.sleep(0.0005)\n"
    )

    assert agent.run(script).text == "|".join(SANITISED.values()) + "|\ufffd|"


@pytest.mark.case(287)
@pytest.mark.parametrize("output", ENDINGS, ids=repr)
def test_unfinished_sequence_at_the_end(agent: Agent, output: bytes) -> None:
    """The end of the run ends what was unfinished: an ESC alone is a control character."""
    assert agent.run(f"import os; os.write(1, b'x' + {output!r})").text == "x" + ENDINGS[output]


@pytest.mark.case(290)
def test_output_of_children_is_in_its_place(agent: Agent) -> None:
    """What a child writes to the inherited descriptors stands between the prints round it."""
    result = agent.run(
        "import subprocess, sys\n"
        "print('before')\n"
        "subprocess.run(['echo', 'from the child'])\n"
        "print('between', file=sys.stderr)\n"
        "subprocess.run('echo on stderr >&2', shell=True)\n"
        "print('after')"
    )

    assert result.text == "before\nfrom the child\nbetween\non stderr\nafter\n"


@pytest.mark.case(290)
def test_much_output_of_a_child_does_not_block(agent: Agent) -> None:
    """A child that writes many times what a pipe holds is read while it runs."""
    result = agent.run(
        "import subprocess, sys\n"
        "print('before')\n"
        "subprocess.run([sys.executable, '-c', 'for n in range(40000): print(n, \"x\" * 50)'], check=True)\n"
        "print('after')",
        config={"max_output_bytes": 4_000_000},
    )

    assert result.text == "before\n" + "".join(f"{n} {'x' * 50}\n" for n in range(40_000)) + "after\n"


@pytest.mark.case(292)
def test_removed_bytes_are_not_counted(agent: Agent) -> None:
    """The limit is one of clean bytes: eight between many colour codes fit into ten."""
    result = printed(agent, "".join(f"{ESC}[3{n % 8}m{n}{ESC}[0m" for n in range(8)) + f"{ESC}[0m" * 1000, 10)

    assert result.text == "01234567"
    assert result.details["truncated"] is False


def test_output_of_leftover_threads_is_in_no_cell(session: Agent) -> None:
    """What a thread prints between cells is thrown away (behaviour 6.10)."""
    first = session.run(
        "import os, threading, time\n"
        "def later():\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "    print('late', flush=True); open('went', 'w')\n"
        "threading.Thread(target=later).start()\nprint('first')"
    )
    (session.cwd / "go").touch()
    wait_until((session.cwd / "went").exists, 20)

    assert first.text == "first\n"
    assert session.run("print('second')").text == "second\n"
