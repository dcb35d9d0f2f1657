"""The helpers as a script sees them (behaviour 3), black-box in both modes; cases 61 to 104."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lemon_kernel import ExecuteCodeConfig, HelperContext, HelperError, HelperResult, ToolPolicy, find_tool

from .conftest import Agent
from .doubles import Answered, answered, ask, ask_all, asking, emptied, files, standing_agent


@pytest.fixture(scope="module", params=["per_call", "session"])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    yield from standing_agent(request.param, tmp_path_factory)


@pytest.fixture
def agent(standing: Agent) -> Agent:
    """An agent in each mode, with an empty folder; kernels are shared by the tests of this module."""
    return emptied(standing)


# read


@pytest.mark.case(61)
def test_read_numbers_every_line_and_the_empty_piece_after_the_last_one(agent: Agent) -> None:
    """A file that ends with a newline has one more, empty, numbered line; the call is accounted for."""
    files(agent.cwd, {"f.txt": "alpha\nbeta\n"})

    result = agent.run('print(read("f.txt"))')

    assert result.text == "1: alpha\n2: beta\n3: \n"
    assert result.details["rpc_calls"] == 1
    assert result.details["rpc_tools"] == ["read"]
    assert result.details["rpc_bytes"] == len("1: alpha\n2: beta\n3: ")


@pytest.mark.case(62)
def test_read_takes_offset_and_limit_without_a_notice(agent: Agent) -> None:
    """A user's own limit is no truncation."""
    files(agent.cwd, {"f": "a\nb\nc\nd\ne"})

    assert ask(agent, 'read("f", offset=2, limit=2)') == Answered("2: b\n3: c")


@pytest.mark.case(63)
def test_read_takes_odd_offsets_as_the_first_line_and_odd_limits_as_none(agent: Agent) -> None:
    """Offsets below 1 mean 1; a limit of 0 means all lines."""
    files(agent.cwd, {"f": "a\nb"})

    answers = ask_all(agent, 'read("f", offset=0)', 'read("f", offset=-5)', 'read("f", limit=0)')

    assert answers == [Answered("1: a\n2: b")] * 3


@pytest.mark.case(64, 65)
def test_read_past_the_end_is_empty_and_an_empty_file_has_one_line(agent: Agent) -> None:
    """An offset past the end is no error; an empty file is one empty line."""
    files(agent.cwd, {"two": "a\nb", "empty": ""})

    assert ask_all(agent, 'read("two", offset=100)', 'read("empty")') == [Answered(""), Answered("1: ")]


@pytest.mark.case(66)
def test_read_shows_2000_lines_and_says_how_to_go_on(agent: Agent) -> None:
    """The line cap bites at 2000 lines and the notice names the next offset."""
    files(agent.cwd, {"f": "\n".join(f"l{n}" for n in range(1, 2501))})

    lines = ask(agent, 'read("f")').value.split("\n")

    assert lines[0] == "1: l1"
    assert lines[1999] == "2000: l2000"
    assert lines[2000:] == ["[Showing lines 1-2000 of 2500. Use offset=2001 to continue.]"]


@pytest.mark.case(68)
def test_read_gives_a_first_line_whole_however_long_it_is(agent: Agent) -> None:
    """The first line is kept even where it alone exceeds the byte cap."""
    files(agent.cwd, {"f": "x" * 102_400})

    assert ask(agent, 'read("f")') == Answered("1: " + "x" * 102_400)


@pytest.mark.case(69)
def test_read_takes_crlf_as_one_line_end(agent: Agent) -> None:
    """No carriage return is left on a line."""
    files(agent.cwd, {"f": b"a\r\nb"})

    assert ask(agent, 'read("f")') == Answered("1: a\n2: b")


@pytest.mark.case(70)
def test_read_of_an_image_says_that_it_was_left_out(agent: Agent) -> None:
    """The extension decides, in any case of letters, not the content."""
    files(agent.cwd, {"x.PNG": "this is text"})

    assert ask(agent, 'read("x.PNG")') == Answered("[non-text content omitted]")


@pytest.mark.case(72)
def test_read_explains_what_it_cannot_read(agent: Agent) -> None:
    """A missing file, a folder and an empty path are three ToolErrors that name the helper."""
    (agent.cwd / "folder").mkdir()

    answers = ask_all(agent, 'read("missing")', 'read("folder")', 'read("")')

    assert answers == [
        Answered(None, f"File not found: {agent.cwd}/missing", "read"),
        Answered(None, f"Path is a directory, not a file: {agent.cwd}/folder", "read"),
        Answered(None, "Path is required", "read"),
    ]


def directly(agent: Agent, name: str, params: Mapping[str, object]) -> Answered:
    """Call the direct tool and return its text or its error, in the shape of a script's answer."""
    tool = find_tool(name, agent.cwd, config=ExecuteCodeConfig(), policy=ToolPolicy())
    try:
        return Answered(asyncio.run(tool.execute(params)).text)
    except HelperError as error:
        return Answered(None, str(error), name)


@pytest.mark.case(73)
def test_helpers_reach_exactly_what_the_direct_tools_reach(agent: Agent) -> None:
    """Inside, outside, absolute, missing, forbidden: text or error are identical to the direct tool's."""
    outside = agent.cwd.parent / "outside.txt"
    outside.write_text("secret\nplan\n")
    files(agent.cwd, {"a.txt": "one\ntwo\n", "sub/b.py": "two = 2\n", "sub/.hidden": "two\n"})
    calls: list[tuple[str, dict[str, Any]]] = [
        ("read", {"path": str(outside)}),
        ("read", {"path": "../outside.txt", "offset": 2}),
        ("read", {"path": "/etc/hostname"}),
        ("read", {"path": "/etc/no such file"}),
        ("read", {"path": "/dev/null"}),
        ("read", {"path": "sub"}),
        ("read", {"path": "a.txt", "offset": "x"}),
        ("grep", {"pattern": "two", "context_lines": 1}),
        ("grep", {"pattern": "secret", "path": ".."}),
        ("grep", {"pattern": "(", "path": ".."}),
        ("grep", {"pattern": "two", "path": "nowhere"}),
        ("find", {"pattern": "*.txt", "path": ".."}),
        ("find", {"pattern": "*", "hidden": True}),
        ("find", {"pattern": "*", "path": "a.txt"}),
        ("ls", {"path": "sub", "all": True, "long": True}),
        ("ls", {"path": "/", "max_entries": 3}),
        ("ls", {"path": "a.txt"}),
    ]

    answers = ask_all(agent, *[f"{name}(**{params!r})" for name, params in calls])

    for (name, params), through_a_script in zip(calls, answers, strict=True):
        assert through_a_script == directly(agent, name, params), (name, params)


# grep


@pytest.mark.case(75, 76)
def test_grep_counts_matching_lines_and_says_when_there_are_none(agent: Agent) -> None:
    """The count comes first, then the lines with name and number; without a match there is one sentence."""
    files(agent.cwd, {"hay.txt": "needle 1\nhay\nneedle 2\nneedle 3"})

    answers = ask_all(agent, 'grep("needle")', 'grep("pitchfork")')

    assert answers == [
        Answered("Found 3 matches.\n\nhay.txt:1: needle 1\nhay.txt:3: needle 2\nhay.txt:4: needle 3"),
        Answered("No matches found."),
    ]


@pytest.mark.case(77, 78)
def test_grep_takes_patterns_as_regular_expressions_and_letters_as_they_are(agent: Agent) -> None:
    """``literal`` takes the pattern as text, ``case_sensitive=False`` takes letters in either case."""
    files(agent.cwd, {"f": "a.c\nabc\nFoo"})

    answers = ask_all(
        agent, 'grep("a.c")', 'grep("a.c", literal=True)', 'grep("foo")', 'grep("foo", case_sensitive=False)'
    )

    assert answers == [
        Answered("Found 2 matches.\n\nf:1: a.c\nf:2: abc"),
        Answered("Found 1 match.\n\nf:1: a.c"),
        Answered("No matches found."),
        Answered("Found 1 match.\n\nf:3: Foo"),
    ]


@pytest.mark.case(79)
def test_grep_explains_a_pattern_that_is_none(agent: Agent) -> None:
    """An unbalanced bracket is an invalid pattern, with a hint how to mend it."""
    error = ask(agent, 'grep("[")').error

    assert error is not None
    assert error.startswith("Invalid regex pattern")
    assert "[" in error.split(":", 1)[1]


@pytest.mark.case(80)
def test_grep_refuses_parameters_out_of_range_each_with_its_own_text(agent: Agent) -> None:
    """Three kinds of bad parameter have three texts."""
    answers = ask_all(agent, 'grep("")', 'grep("a", context_lines=-1)', 'grep("a", max_results=0)')

    assert [answer.error for answer in answers] == [
        "Pattern is required",
        "context_lines must be a non-negative integer, got: -1",
        "max_results must be a positive integer, got: 0",
    ]


@pytest.mark.case(81)
def test_grep_counts_beyond_its_limit_and_says_how_to_see_more(agent: Agent) -> None:
    """Five lines are shown, fifty are counted, the notice names the double limit."""
    files(agent.cwd, {"f": "\n".join(["hit"] * 50)})

    text = ask(agent, 'grep("hit", max_results=5)').value

    assert text == (
        "Found 50 matches.\n\n"
        + "".join(f"f:{n}: hit\n" for n in range(1, 6))
        + "\n[5 matches limit reached. Use max_results=10 for more, or refine pattern]"
    )


@pytest.mark.case(82)
def test_grep_shows_context_once_and_separates_groups(agent: Agent) -> None:
    """Lines of context have dashes for colons, no line is shown twice, groups stand apart."""
    one = ["x"] * 6
    one[2] = "MATCH"
    many = ["x"] * 22
    for number in (3, 5, 20):
        many[number - 1] = "MATCH"
    files(agent.cwd, {"one": "\n".join(one), "many": "\n".join(many)})

    answers = ask_all(
        agent, 'grep("MATCH", path="one", context_lines=1)', 'grep("MATCH", path="many", context_lines=1)'
    )

    assert answers[0].value == "Found 1 match.\n\none-2- x\none:3: MATCH\none-4- x"
    assert answers[1].value == (
        "Found 3 matches.\n\nmany-2- x\nmany:3: MATCH\nmany-4- x\nmany:5: MATCH\nmany-6- x\n"
        "--\nmany-19- x\nmany:20: MATCH\nmany-21- x"
    )


@pytest.mark.case(83)
def test_grep_cuts_long_lines_and_says_so(agent: Agent) -> None:
    """A line is shown up to 500 characters, with a mark and a notice."""
    files(agent.cwd, {"f": "y" * 700})

    assert ask(agent, 'grep("y")').value == (
        f"Found 1 match.\n\nf:1: {'y' * 500}... [truncated]\n\n"
        "[Some lines truncated to 500 chars. Use read tool to see full lines]"
    )


@pytest.mark.case(84, 86)
def test_grep_skips_binary_files_and_what_the_glob_leaves_out(agent: Agent) -> None:
    """A file with a NUL is not searched; a glob narrows the files at any depth."""
    files(
        agent.cwd,
        {"text.txt": "word", "binary": b"word\0word", "a.py": "word", "deep/er/b.py": "word"},
    )

    answers = ask_all(agent, 'grep("word")', 'grep("word", glob="*.py")')

    assert answers == [
        Answered("Found 3 matches.\n\na.py:1: word\ntext.txt:1: word\ndeep/er/b.py:1: word"),
        Answered("Found 2 matches.\n\na.py:1: word\ndeep/er/b.py:1: word"),
    ]


# find


@pytest.mark.case(87, 88)
def test_find_lists_names_that_match_sorted_and_relative_to_the_working_folder(agent: Agent) -> None:
    """The glob is one on base names at any depth; without a match there is one sentence."""
    files(agent.cwd, {"b.ex": "", "a.ex": "", "nested/c.ex": "", "other": ""})

    assert ask_all(agent, 'find("*.ex")', 'find("*.nothing")') == [
        Answered("Found 3 matches:\n\na.ex\nb.ex\nnested/c.ex"),
        Answered("No files found matching the pattern."),
    ]


@pytest.mark.case(89, 90)
def test_find_tells_files_from_folders_and_leaves_hidden_names_out(agent: Agent) -> None:
    """``type`` selects one kind; names that begin with a dot, and what is below them, need ``hidden``."""
    files(agent.cwd, {"a.txt": "", "folder/b.txt": "", ".h.txt": "", ".d/x.txt": ""})

    answers = ask_all(
        agent,
        'find("*", type="file")',
        'find("*", type="directory")',
        'find("*.txt")',
        'find("*.txt", hidden=True)',
    )

    assert answers == [
        Answered("Found 2 matches:\n\na.txt\nfolder/b.txt"),
        Answered("Found 1 match:\n\nfolder"),
        Answered("Found 2 matches:\n\na.txt\nfolder/b.txt"),
        Answered("Found 4 matches:\n\n.d/x.txt\n.h.txt\na.txt\nfolder/b.txt"),
    ]


@pytest.mark.case(92)
def test_find_says_when_its_limit_was_reached_also_exactly(agent: Agent) -> None:
    """Three files and a limit of three read "limited to 3"; a limit of zero finds nothing."""
    files(agent.cwd, {"a": "", "b": "", "c": ""})

    answers = ask_all(agent, *[f'find("*", max_results={limit})' for limit in (3, 2, 0)])

    assert answers == [
        Answered("Found 3 matches (limited to 3):\n\na\nb\nc"),
        Answered("Found 2 matches (limited to 2):\n\na\nb"),
        Answered("No files found matching the pattern."),
    ]


@pytest.mark.case(93)
def test_find_reads_no_ignore_files_follows_links_and_ends_in_cycles(agent: Agent) -> None:
    """Ignored files are found, files behind links too; a cycle and a broken link do no harm."""
    files(agent.cwd, {".gitignore": "ignored.f\n", "ignored.f": "", "real/in.f": ""})
    files(agent.cwd.parent, {"elsewhere/linked.f": ""})
    (agent.cwd / "link").symlink_to(agent.cwd.parent / "elsewhere")
    (agent.cwd / "real" / "cycle").symlink_to(agent.cwd)
    (agent.cwd / "broken.f").symlink_to(agent.cwd / "nothing")

    assert ask(agent, 'find("*.f", type="file")').value == (
        "Found 3 matches:\n\nignored.f\nlink/linked.f\nreal/in.f"
    )
    assert "broken.f" in ask(agent, 'find("*.f")').value


@pytest.mark.case(94)
def test_find_explains_a_folder_that_is_none(agent: Agent) -> None:
    """A missing folder and a file in its place are two ToolErrors."""
    files(agent.cwd, {"file": ""})

    answers = ask_all(agent, 'find("*", path="missing")', 'find("*", path="file")')

    assert answers == [
        Answered(None, f"Directory not found: {agent.cwd}/missing", "find"),
        Answered(None, f"Path is a file, not a directory: {agent.cwd}/file", "find"),
    ]


# ls


@pytest.mark.case(95)
def test_ls_shows_the_folder_its_entries_and_their_number(agent: Agent) -> None:
    """The header is the absolute path, the footer the count."""
    files(agent.cwd, {"a": "", "b": ""})

    assert ask(agent, "ls()") == Answered(f"Directory: {agent.cwd}\n- a\n- b\n2 entries")


@pytest.mark.case(96)
def test_ls_puts_folders_first_and_sorts_without_regard_to_case(agent: Agent) -> None:
    """Within each kind the order is that of a person, not that of code points."""
    files(agent.cwd, {"b": "", "A": "", "C": "", "d/x": "", "E/x": ""})

    assert ask(agent, "ls()").value == f"Directory: {agent.cwd}\nd d\nd E\n- A\n- b\n- C\n5 entries"


@pytest.mark.case(97)
def test_ls_shows_hidden_names_details_and_lower_levels_on_request(agent: Agent) -> None:
    """``all``, ``long`` and ``recursive`` with ``max_depth`` each add what they are named for."""
    files(agent.cwd, {".dot": "", "f": "hello world", "one/two/three": ""})
    os.utime(agent.cwd / "f", (1_700_000_000, 1_700_000_000))
    (agent.cwd / "f").chmod(0o644)

    shown_all, shown_long, recursive = (
        answer.value
        for answer in ask_all(agent, "ls(all=True)", "ls(long=True)", "ls(recursive=True, max_depth=1)")
    )

    assert "- .dot\n" in shown_all
    assert "\n- -rw-r--r--      11B 2023-11-14 22:13 f\n" in shown_long
    assert recursive == f"Directory: {agent.cwd}\nd one\n- f\nd one/two\n3 entries"


@pytest.mark.case(98)
def test_ls_says_how_many_entries_its_limit_left_out(agent: Agent) -> None:
    """Five of ten entries are shown and the footer says so."""
    files(agent.cwd, {f"f{n}": "" for n in range(10)})

    lines = ask(agent, "ls(max_entries=5)").value.split("\n")

    assert lines[1:] == [*(f"- f{n}" for n in range(5)), "[Showing 5 of 10 entries. Limit: 5]"]


@pytest.mark.case(99)
def test_ls_explains_what_is_no_folder_and_names_an_empty_one(agent: Agent) -> None:
    """A missing folder and a file are ToolErrors; an empty folder is no error."""
    files(agent.cwd, {"file": ""})
    (agent.cwd / "empty").mkdir()

    answers = ask_all(agent, 'ls("missing")', 'ls("file")', 'ls("empty")')

    assert answers == [
        Answered(None, f"Directory not found: {agent.cwd}/missing", "ls"),
        Answered(None, f"Path is a file, not a directory: {agent.cwd}/file", "ls"),
        Answered(f"Directory: {agent.cwd}/empty\n(empty directory)"),
    ]


# what holds for all helpers


@pytest.mark.case(101)
def test_a_disabled_helper_is_not_defined(agent: Agent) -> None:
    """Calling a helper that the configuration leaves out is a NameError like any other."""
    result = agent.run('print("read" in globals())\ngrep("x")', config={"tools": ["read"]})

    assert "True\n" in result.text
    assert "NameError: name 'grep' is not defined" in result.text
    assert result.details["reason"] == ("exit" if agent.mode == "per_call" else "exception")


@pytest.mark.case(102)
def test_what_a_script_does_not_print_stays_out_of_the_result(agent: Agent) -> None:
    """Two thousand lines of hits are read and counted; only the count comes back."""
    files(agent.cwd, {"f": "\n".join(f"NEEDLE-{n} " + "x" * 30 for n in range(2000))})

    result = agent.run('print(len(grep("NEEDLE", max_results=5000).splitlines()) > 1000)\nread("f")')

    assert result.text == "True\n"
    assert int(str(result.details["rpc_bytes"])) > 50_000
    assert "NEEDLE" not in str(result)


@pytest.mark.case(103)
def test_a_tool_that_raises_on_the_host_is_a_tool_error_and_no_more(agent: Agent) -> None:
    """The script gets the exception's message and its next call works."""
    files(agent.cwd, {"f": "x"})

    async def ls(params: Mapping[str, object], context: HelperContext) -> str:
        raise RuntimeError("the disk is on fire")

    result = agent.run(asking("ls()", 'read("f")'), helpers={"ls": ls})

    assert answered(result) == [Answered(None, "the disk is on fire", "ls"), Answered("1: x")]
    assert result.details["rpc_errors"] == 1
    assert result.details["rpc_tools"] == ["read"]


@pytest.mark.case(104)
def test_content_that_is_no_text_is_flagged_in_its_place(agent: Agent) -> None:
    """Text blocks are joined with one newline; any other block becomes the literal."""

    async def read(params: Mapping[str, object], context: HelperContext) -> HelperResult:
        image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
        return HelperResult([{"type": "text", "text": "before"}, image, {"type": "text", "text": "after"}])

    result = agent.run('print(read("x"))', helpers={"read": read})

    assert result.text == "before\n[non-text content omitted]\nafter\n"
