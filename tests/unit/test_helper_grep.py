"""`grep`: texts, order, skipping and limits; and that the quick search means what the slow rule says."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lemon_kernel.helpers import HELPERS, HelperContext, HelperError
from lemon_kernel.helpers.patterns import analyse, line_search
from lemon_kernel.scope import AbortSignal


def grep(cwd: Path, pattern: object, *, abort: AbortSignal | None = None, **params: object) -> str:
    context = HelperContext(abort or AbortSignal(), str(cwd))
    result = asyncio.run(_call({"pattern": pattern, **params}, context))
    assert isinstance(result, str)
    return result


async def _call(params: dict[str, object], context: HelperContext) -> object:
    return await HELPERS["grep"](params, context)


def failure(cwd: Path, pattern: object, **params: object) -> str:
    with pytest.raises(HelperError) as caught:
        grep(cwd, pattern, **params)
    return str(caught.value)


@pytest.mark.case(75)
def test_counts_and_shows_matching_lines(tmp_path: Path) -> None:
    """The matches are counted and shown with path and number, separated by nothing."""
    (tmp_path / "hay.txt").write_text("needle 1\nhay\nneedle 2\nneedle 3\n")

    expected = "Found 3 matches.\n\nhay.txt:1: needle 1\nhay.txt:3: needle 2\nhay.txt:4: needle 3"
    assert grep(tmp_path, "needle") == expected
    assert grep(tmp_path, "needle", path="hay.txt") == expected


def test_one_match_is_singular(tmp_path: Path) -> None:
    """One match is "1 match."."""
    (tmp_path / "a").write_text("x")

    assert grep(tmp_path, "x") == "Found 1 match.\n\na:1: x"


@pytest.mark.case(76)
def test_no_match(tmp_path: Path) -> None:
    """Nothing found is said in one sentence."""
    (tmp_path / "a").write_text("x")

    assert grep(tmp_path, "y") == "No matches found."


@pytest.mark.case(77)
def test_regex_and_literal(tmp_path: Path) -> None:
    """The pattern is a regular expression unless `literal`."""
    (tmp_path / "a").write_text("a.c\nabc\n")

    assert grep(tmp_path, "a.c").startswith("Found 2 matches.")
    assert grep(tmp_path, "a.c", literal=True) == "Found 1 match.\n\na:1: a.c"


@pytest.mark.case(78)
def test_case(tmp_path: Path) -> None:
    """Case matters unless `case_sensitive` is false."""
    (tmp_path / "a").write_text("Foo\n")

    assert grep(tmp_path, "foo") == "No matches found."
    assert grep(tmp_path, "foo", case_sensitive=False) == "Found 1 match.\n\na:1: Foo"
    assert grep(tmp_path, "foo", case_sensitive=False, literal=True) == "Found 1 match.\n\na:1: Foo"


@pytest.mark.case(79)
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("[", "Invalid regex pattern at position 1: unterminated character set. Hint: unbalanced '['"),
        ("(a", "Invalid regex pattern at position 2: missing ). Hint: unbalanced '('"),
        (
            "a\\",
            "Invalid regex pattern at position 2: bad escape (end of pattern). Hint: a trailing backslash",
        ),
        ("*a", "Invalid regex pattern at position 0: nothing to repeat"),
    ],
)
def test_bad_pattern(tmp_path: Path, pattern: str, text: str) -> None:
    """A pattern that does not compile is refused with the reason, the place and a hint."""
    assert failure(tmp_path, pattern).startswith(text)
    assert grep(tmp_path, pattern, literal=True) == "No matches found."


@pytest.mark.case(80)
def test_arguments_are_checked_in_order(tmp_path: Path) -> None:
    """Each bad argument has its text, and the first in the order of behaviour 3.4 is named."""
    assert failure(tmp_path, "", context_lines=-1) == "Pattern is required"
    assert failure(tmp_path, None) == "Pattern is required"
    assert failure(tmp_path, 5) == "Pattern must be a string, got: 5"
    assert failure(tmp_path, "é" * 5001) == "Pattern is too long (max 10000 bytes)"
    assert failure(tmp_path, "[", context_lines=-1).startswith("Invalid regex pattern")
    assert (
        failure(tmp_path, "a", context_lines=-1, max_results=0)
        == "context_lines must be a non-negative integer, got: -1"
    )
    assert (
        failure(tmp_path, "a", context_lines=True)
        == "context_lines must be a non-negative integer, got: True"
    )
    assert (
        failure(tmp_path, "a", max_results=0, path="none") == "max_results must be a positive integer, got: 0"
    )
    assert failure(tmp_path, "a", path="none") == f"Path not found: {tmp_path}/none"
    assert grep(tmp_path, "é" * 5000) == "No matches found."


@pytest.mark.case(81)
def test_limit(tmp_path: Path) -> None:
    """`max_results` limits the lines that are shown; all matches are counted."""
    (tmp_path / "a").write_text("hit\n" * 50)

    lines = grep(tmp_path, "hit", max_results=5).split("\n")

    assert lines[0] == "Found 50 matches."
    assert lines[2:7] == [f"a:{n}: hit" for n in range(1, 6)]
    assert lines[7:] == [
        "",
        "[5 matches limit reached. Use max_results=10 for more, or refine pattern]",
    ]
    assert "limit reached" not in grep(tmp_path, "hit", max_results=50)


@pytest.mark.case(82)
def test_context(tmp_path: Path) -> None:
    """Context lines have dashes, overlapping context is merged, groups are separated by ``--``."""
    lines = [f"l{n}" for n in range(1, 25)]
    for n in (3, 5, 20):
        lines[n - 1] = "MATCH"
    (tmp_path / "a").write_text("\n".join(lines) + "\n")
    (tmp_path / "b").write_text("MATCH\n")

    body = grep(tmp_path, "MATCH", context_lines=1).split("\n")[2:]

    assert body == [
        "a-2- l2",
        "a:3: MATCH",
        "a-4- l4",
        "a:5: MATCH",
        "a-6- l6",
        "--",
        "a-19- l19",
        "a:20: MATCH",
        "a-21- l21",
        "--",
        "b:1: MATCH",
    ]


def test_context_stops_before_a_match_that_is_not_shown(tmp_path: Path) -> None:
    """Behind the last shown match no other match poses as context."""
    (tmp_path / "a").write_text("x\ny\nx\n")

    assert "a:1: x\na-2- y\n\n[" in grep(tmp_path, "x", context_lines=5, max_results=1)


@pytest.mark.case(83)
def test_long_line(tmp_path: Path) -> None:
    """A shown line is cut at 500 characters, and a notice says so."""
    (tmp_path / "a").write_text("é" * 700)

    assert grep(tmp_path, "é") == (
        f"Found 1 match.\n\na:1: {'é' * 500}... [truncated]\n\n"
        "[Some lines truncated to 500 chars. Use read tool to see full lines]"
    )


def test_body_is_cut_at_50_kib(tmp_path: Path) -> None:
    """The body holds whole lines of at most 51200 bytes in all."""
    (tmp_path / "a").write_text(("x" * 400 + "\n") * 200)

    text = grep(tmp_path, "x", max_results=200)
    head, body, notice = text.split("\n\n")

    assert head == "Found 200 matches."
    assert notice == "[50.0KB limit reached]"
    assert len(body) <= 51200 < len(body) + 410
    assert all(line.endswith("x" * 400) for line in body.split("\n"))


@pytest.mark.case(84)
def test_binary_files_are_skipped(tmp_path: Path) -> None:
    """A NUL in the first 512 bytes makes a file binary; later ones do not."""
    (tmp_path / "text.txt").write_text("word\n")
    (tmp_path / "early").write_bytes(b"x" * 511 + b"\0word")
    (tmp_path / "late").write_bytes(b"x" * 512 + b"\0\nword")

    assert [line.split(":")[0] for line in grep(tmp_path, "word").split("\n")[2:]] == ["late", "text.txt"]


@pytest.mark.case(86)
def test_glob(tmp_path: Path) -> None:
    """`glob` means ``**/<glob>``: any depth, the whole rest of the path."""
    for name in ("a.py", "b.txt", "sub/c.py", "sub/deep/d.py", "sub/e.ts"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(glob: str) -> list[str]:
        return [line.split(":")[0] for line in grep(tmp_path, "x", glob=glob).split("\n")[2:]]

    assert names("*.py") == ["a.py", "sub/c.py", "sub/deep/d.py"]
    assert names("sub/*.py") == ["sub/c.py"]
    assert names("**/deep/*") == ["sub/deep/d.py"]
    assert names("sub/**") == ["sub/c.py", "sub/e.ts", "sub/deep/d.py"]
    assert names("*.{txt,ts}") == ["b.txt", "sub/e.ts"]


def test_ignore_files_and_hidden_names(tmp_path: Path) -> None:
    """Ignore files of the searched tree are respected, deeper ones first; hidden names are skipped."""
    for name in ("a.log", "keep.log", ".hidden", ".d/x", "build/x", "sub/a.log", "sub/own.txt", "sub/t.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\nbuild/\n!\n")
    (tmp_path / ".ignore").write_text("/t.txt\n")
    (tmp_path / "sub/.gitignore").write_text("!a.log\nown.txt\n")

    assert grep(tmp_path, "x").split("\n")[2:] == ["keep.log:1: x", "sub/a.log:1: x", "sub/t.txt:1: x"]
    assert grep(tmp_path, "x", path="build/x") == "Found 1 match.\n\nx:1: x"


def test_order_and_links(tmp_path: Path) -> None:
    """Files before folders, by code point; a linked folder is entered once, a cycle ends."""
    outside = tmp_path / "outside"
    tree = tmp_path / "tree"
    for name in ("outside/o", "tree/z", "tree/Z", "tree/b/f", "tree/a/f"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tree / "l1").symlink_to(outside)
    (tree / "l2").symlink_to(outside)
    (tree / "a/up").symlink_to(tree)
    (tree / "self").symlink_to("self")
    (tree / "file").symlink_to(outside / "o")

    names = [line.split(":")[0] for line in grep(tree, "x").split("\n")[2:]]
    assert names == ["Z", "file", "z", "a/f", "b/f", "l1/o"]


def test_devices_and_fifos_do_not_hold_a_search(tmp_path: Path) -> None:
    """What is not a file is passed over in a tree and refused as a path."""
    os.mkfifo(tmp_path / "pipe")

    assert grep(tmp_path, "x") == "No matches found."
    assert failure(tmp_path, "x", path="pipe") == f"Path is not a path (fifo): {tmp_path}/pipe"


def test_unreadable_files_are_counted(tmp_path: Path) -> None:
    """A closing notice gives the number of files that could not be read (run without privileges)."""
    (tmp_path / "good").write_text("x")
    (tmp_path / "bad").write_text("x")
    (tmp_path / "bad").chmod(0)
    tmp_path.chmod(0o755)
    code = (
        "import asyncio, os, sys\n"
        "from lemon_kernel.helpers import HELPERS, HelperContext\n"
        "from lemon_kernel.scope import AbortSignal\n"
        "import lemon_kernel.helpers.grep, regex\n"
        "os.chdir(sys.argv[1])\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "async def main(**p): return await HELPERS['grep'](p, HelperContext(AbortSignal(), sys.argv[1]))\n"
        "print(asyncio.run(main(pattern='x')))\n"
        "try: asyncio.run(main(pattern='x', path='bad'))\n"
        "except Exception as e: print(e)\n"
    )
    folder = _readable_by_all(tmp_path)
    output = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    assert output.stdout == (
        f"Found 1 match.\n\ngood:1: x\n\n[1 file could not be read]\nPermission denied: {folder}/bad\n"
    ), output.stderr


def _readable_by_all(folder: Path) -> Path:
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    return folder


def test_abort_ends_a_search(tmp_path: Path) -> None:
    """An aborted run ends with "Operation aborted", also in the middle of a tree."""
    abort = AbortSignal()
    abort.abort()
    with pytest.raises(HelperError, match=r"^Operation aborted$"):
        grep(tmp_path, "x", abort=abort)


@pytest.mark.case(337)
def test_catastrophic_pattern_ends_and_holds_nobody(tmp_path: Path) -> None:
    """A pattern that backtracks for ever ends after 30 s; the loop and other searches go on meanwhile."""
    (tmp_path / "a").write_text("a" * 60 + "!\n")
    (tmp_path / "b").write_text("fine\n")

    async def main() -> tuple[float, float]:
        context = HelperContext(AbortSignal(), str(tmp_path))
        started = time.monotonic()
        bad = asyncio.create_task(_call({"pattern": "(a|aa)+$"}, context))
        slowest = 0.0
        while not bad.done():
            before = time.monotonic()
            assert "1 match" in str(await _call({"pattern": "fine", "path": "b"}, context))
            await asyncio.wait({bad}, timeout=0.05)
            slowest = max(slowest, time.monotonic() - before)
        with pytest.raises(HelperError) as caught:
            await bad
        assert str(caught.value) == "Search timed out after 30000ms"
        return time.monotonic() - started, slowest

    took_s, slowest_s = asyncio.run(main())

    assert 29 < took_s < 31
    assert slowest_s < 2


# What the quick search must mean.

PIECES = (
    "a", "b", "ab", " ", "\\.", ".", "\\w", "\\W", "\\d", "\\D", "\\s", "\\S", "\\b", "\\B", "^", "$", "\\A",
    "\\Z", "[ab]", "[^a]", "[^\\s]", "[\\s\\S]", "[^\\S]", "[\\t-b]", "[]a]", "[^]a]", "\\n", "\n", "\\r",
    "\\t", "|", "a|b", "é", "\ufffd", "(?i)", "\\1", "#", "-", "}", "]", "\\ ", "\\-", "\\\n",
)  # fmt: skip
QUANTIFIERS = ("", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{0,1}", "{,2}", "*+", "++", "?+")
GROUPS = ("(%s)", "(?:%s)", "(?=%s)", "(?!%s)", "(?<=%s)", "(?<!%s)", "(?>%s)", "(?P<n>%s)", "(?i:%s)")

patterns = st.recursive(
    st.sampled_from(PIECES),
    lambda inner: st.one_of(
        st.tuples(st.lists(inner, min_size=1, max_size=4).map("".join), st.sampled_from(QUANTIFIERS)).map(
            "".join
        ),
        st.tuples(st.sampled_from(GROUPS), inner, st.sampled_from(QUANTIFIERS)).map(
            lambda made: (made[0] % made[1]) + made[2]
        ),
    ),
    max_leaves=6,
)
contents = st.lists(
    st.sampled_from([b"a", b"b", b"ab", b"A", b" ", b".", b"\t", b"\r", b"\n", b"\r\n", b"\n\n", b"1", b"-",
                     "é".encode(), b"\xff", b"\xe2\x82"]),
    max_size=14,
).map(b"".join)  # fmt: skip


def reference(pattern: str, data: bytes, flags: int) -> list[str]:
    """The rule as it is written: split into lines, ask each."""
    lines = re.split("\r\n|\n", data.decode("utf-8", "replace"))
    if lines[-1] == "":
        lines.pop()
    rule = regex.compile(pattern, flags)
    return [f"{n}: {line}" for n, line in enumerate(lines, 1) if rule.search(line)]


def quick(pattern: str, data: bytes, *, literal: bool, case_sensitive: bool) -> list[str]:
    search = line_search(pattern, literal=literal, case_sensitive=case_sensitive)
    if search.required is not None and search.required not in data:
        return []
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return [
        f"{text.count(chr(10), 0, start) + 1}: {text[start:end]}"
        for start, end in search.lines(text, lambda: 10.0)
    ]


@settings(max_examples=500, deadline=None)
@given(pattern=patterns, data=contents, literal=st.booleans(), case_sensitive=st.booleans())
@example(pattern="a[^b]*b", data=b"a\nb", literal=False, case_sensitive=True)
@example(pattern="a(?!\\s)", data=b"a\nb", literal=False, case_sensitive=True)
@example(pattern="a$", data=b"a\r\nb", literal=False, case_sensitive=True)
@example(pattern="^$", data=b"a\n", literal=False, case_sensitive=True)
@example(pattern="^$", data=b"a\n\nb\r\n\r\n", literal=False, case_sensitive=True)
@example(pattern="[^x]*a", data=b"x\n\n\na", literal=False, case_sensitive=True)
@example(pattern="a++\\s", data=b"a\na ", literal=False, case_sensitive=True)
@example(pattern="\ufffd", data=b"a\xffb", literal=True, case_sensitive=True)
def test_quick_search_means_the_rule(pattern: str, data: bytes, literal: bool, case_sensitive: bool) -> None:
    """For any pattern and content the quick search finds the lines that the rule finds, and no others."""
    flags = 0 if case_sensitive else regex.IGNORECASE
    try:
        expected = reference(regex.escape(pattern, special_only=True) if literal else pattern, data, flags)
    except regex.error:
        return

    assert quick(pattern, data, literal=literal, case_sensitive=case_sensitive) == expected


def test_usual_patterns_are_analysed() -> None:
    """What people search for gets the quick way: a literal where there is one, and a whole-text form."""
    assert analyse("asyncio").plain
    assert analyse(r"def \w+_request").literal == "_request"
    assert analyse(r"def \w+_request").whole_text == r"def \w+_request"
    assert analyse(r"import\s+(os|sys)").literal == "import"
    assert analyse(r"colou?r").literal == "colo"
    assert analyse(r"foo|bar").literal is None
    assert analyse(r"[^x]\s").whole_text == r"[^\nx][^\S\n]"
    assert analyse(r"\Afoo").whole_text is None
    assert analyse(r"(foo){e<=1}").literal is None


def test_abort_in_the_middle(tmp_path: Path) -> None:
    """The abort signal is looked at between files: a search of many files ends soon after it."""
    for n in range(3000):
        (tmp_path / f"f{n}").write_text("a" * 100 + "\n")
    abort = AbortSignal()
    timer = threading.Timer(0.02, abort.abort)
    timer.start()
    text = ""
    while not abort.aborted or not text:
        try:
            grep(tmp_path, r"(a|b)*c\A", abort=abort)
        except HelperError as error:
            text = str(error)
    timer.join()
    assert text == "Operation aborted"
