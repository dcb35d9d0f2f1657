"""`ls`: entries, order, long form, recursion, limits and errors."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from lemon_kernel.helpers import HELPERS, HelperContext, HelperError
from lemon_kernel.scope import AbortSignal


def ls(cwd: Path, **params: object) -> str:
    async def main() -> object:
        return await HELPERS["ls"](params, HelperContext(AbortSignal(), str(cwd)))

    result = asyncio.run(main())
    assert isinstance(result, str)
    return result


def failure(cwd: Path, **params: object) -> str:
    with pytest.raises(HelperError) as caught:
        ls(cwd, **params)
    return str(caught.value)


def make(root: Path, *files: str) -> None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.case(95)
def test_basic(tmp_path: Path) -> None:
    """Header with the absolute path, one line per entry, their number."""
    make(tmp_path, "a", "b")

    assert ls(tmp_path) == f"Directory: {tmp_path}\n- a\n- b\n2 entries"


def test_one_entry(tmp_path: Path) -> None:
    """One entry is still "1 entries"."""
    make(tmp_path, "a")

    assert ls(tmp_path, path=str(tmp_path)).endswith("\n1 entries")


@pytest.mark.case(96)
def test_order(tmp_path: Path) -> None:
    """Folders first, each group by name without regard to case; a link has the type of its target."""
    make(tmp_path, "B", "a", "Zd/x", "cd/x")
    (tmp_path / "link").symlink_to("cd")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")

    assert ls(tmp_path).split("\n")[1:-1] == ["d cd", "d link", "d Zd", "- a", "- B", "? gone", "? pipe"]


@pytest.mark.case(97)
def test_hidden_long_and_recursive(tmp_path: Path) -> None:
    """`all` shows dot files, `long` mode, size and time, `recursive` goes down as far as `max_depth`."""
    make(tmp_path, ".dot", "f", "d1/f1", "d1/d2/f2")
    (tmp_path / "f").write_bytes(b"x" * 11)
    (tmp_path / "f").chmod(0o640)
    os.utime(tmp_path / "f", (0, 0))

    assert "- .dot" in ls(tmp_path, all=True).split("\n")
    assert "- .dot" not in ls(tmp_path).split("\n")
    assert "- -rw-r-----      11B 1970-01-01 00:00 f" in ls(tmp_path, long=True).split("\n")
    assert ls(tmp_path).split("\n")[1:-1] == ["d d1", "- f"]
    assert ls(tmp_path, max_depth=5).split("\n")[1:-1] == ["d d1", "- f"]
    assert ls(tmp_path, recursive=True, max_depth=0).split("\n")[1:-1] == ["d d1", "- f"]
    assert ls(tmp_path, recursive=True, max_depth=1).split("\n")[1:-1] == [
        "d d1",
        "- f",
        "d d1/d2",
        "- d1/f1",
    ]
    assert ls(tmp_path, recursive=True).split("\n")[-2] == "- d1/d2/f2"


def test_sizes(tmp_path: Path) -> None:
    """Sizes have one decimal from a KiB on and are aligned to eight characters."""
    for name, size in (("a", 1023), ("b", 2048), ("c", 3 * 2**19), ("d", 2**30)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)

    sizes = [line[12:21] for line in ls(tmp_path, long=True).split("\n")[1:-1]]
    assert sizes == ["    1023B", "     2.0K", "     1.5M", "     1.0G"]


def test_a_broken_link_in_the_long_form(tmp_path: Path) -> None:
    """A link that leads nowhere is listed as unreadable, with its own mode."""
    (tmp_path / "gone").symlink_to("nowhere")

    assert ls(tmp_path, long=True).split("\n")[1].startswith("? lrwxrwxrwx")


def test_recursion_through_links_ends(tmp_path: Path) -> None:
    """A cycle of links is listed once."""
    make(tmp_path, "d/f")
    (tmp_path / "d/up").symlink_to(tmp_path)

    assert ls(tmp_path, recursive=True).split("\n")[1:-1] == ["d d", "d d/up", "- d/f"]


@pytest.mark.case(98)
def test_limit(tmp_path: Path) -> None:
    """Beyond `max_entries` the footer says how many there are."""
    make(tmp_path, *(f"f{n}" for n in range(10)))

    lines = ls(tmp_path, max_entries=5).split("\n")

    assert lines[1:] == [*(f"- f{n}" for n in range(5)), "[Showing 5 of 10 entries. Limit: 5]"]
    assert ls(tmp_path, max_entries=10).endswith("\n10 entries")


@pytest.mark.case(99)
def test_errors_and_empty(tmp_path: Path) -> None:
    """What is no folder is refused, an empty one says so."""
    make(tmp_path, "file")
    (tmp_path / "empty").mkdir()

    assert failure(tmp_path, path="none") == f"Directory not found: {tmp_path}/none"
    assert failure(tmp_path, path="file") == f"Path is a file, not a directory: {tmp_path}/file"
    assert failure(tmp_path, max_entries=-1) == "max_entries must be a non-negative integer, got: -1"
    assert failure(tmp_path, all="yes") == "all must be a boolean, got: 'yes'"
    assert ls(tmp_path, path="empty") == f"Directory: {tmp_path}/empty\n(empty directory)"


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    """A file name that is no UTF-8 is shown with replacement characters: results always encode."""
    os.close(os.open(os.fsencode(tmp_path) + b"/x\xff", os.O_CREAT | os.O_WRONLY))

    assert "- x\ufffd" in ls(tmp_path).split("\n")
