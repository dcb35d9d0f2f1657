"""`find`: globs on names, kinds, depth, links, limits and texts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from lemon_kernel.helpers import HELPERS, HelperContext, HelperError
from lemon_kernel.scope import AbortSignal


def find(cwd: Path, pattern: object, **params: object) -> str:
    async def main() -> object:
        return await HELPERS["find"]({"pattern": pattern, **params}, HelperContext(AbortSignal(), str(cwd)))

    result = asyncio.run(main())
    assert isinstance(result, str)
    return result


def names(cwd: Path, pattern: str, **params: object) -> list[str]:
    return find(cwd, pattern, **params).split("\n")[2:]


def failure(cwd: Path, pattern: object, **params: object) -> str:
    with pytest.raises(HelperError) as caught:
        find(cwd, pattern, **params)
    return str(caught.value)


def make(root: Path, *files: str) -> None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.case(87)
def test_glob(tmp_path: Path) -> None:
    """The glob is for the base name at any depth; results are sorted as whole strings."""
    make(tmp_path, "b.ex", "a.ex", "nested/c.ex", "A.EX", "nested.ex")

    assert find(tmp_path, "*.ex") == "Found 4 matches:\n\na.ex\nb.ex\nnested.ex\nnested/c.ex"
    assert find(tmp_path, "a.ex") == "Found 1 match:\n\na.ex"
    assert names(tmp_path, "**/[bc].ex") == ["b.ex", "nested/c.ex"]


@pytest.mark.case(88)
def test_nothing_found(tmp_path: Path) -> None:
    """Nothing found is said in one sentence."""
    assert find(tmp_path, "*") == "No files found matching the pattern."


@pytest.mark.case(89)
def test_types(tmp_path: Path) -> None:
    """`type` chooses files or folders; anything else is both; folders have no trailing slash."""
    make(tmp_path, "x/x")

    assert names(tmp_path, "x", type="file") == ["x/x"]
    assert names(tmp_path, "x", type="directory") == ["x"]
    assert names(tmp_path, "x", type="both") == ["x", "x/x"]


@pytest.mark.case(90)
def test_hidden(tmp_path: Path) -> None:
    """Hidden names, and all in hidden folders, come only with `hidden`."""
    make(tmp_path, ".h.txt", ".d/x.txt")

    assert find(tmp_path, "*.txt") == "No files found matching the pattern."
    assert names(tmp_path, "*.txt", hidden=True) == [".d/x.txt", ".h.txt"]


def test_depth(tmp_path: Path) -> None:
    """`max_depth` 1 means the direct children."""
    make(tmp_path, "1.t", "a/2.t", "a/b/3.t")

    assert names(tmp_path, "*.t", max_depth=1) == ["1.t"]
    assert names(tmp_path, "*.t", max_depth=2) == ["1.t", "a/2.t"]
    assert names(tmp_path, "*.t", max_depth=0) == []
    assert names(tmp_path, "b", max_depth=2) == ["a/b"]


@pytest.mark.case(92)
def test_limit(tmp_path: Path) -> None:
    """The limit is named when it is reached, also exactly; 0 finds nothing; the first ones are shown."""
    make(tmp_path, "c", "a", "b")

    assert find(tmp_path, "?", max_results=3) == "Found 3 matches (limited to 3):\n\na\nb\nc"
    assert find(tmp_path, "?", max_results=2) == "Found 2 matches (limited to 2):\n\na\nb"
    assert find(tmp_path, "?", max_results=0) == "No files found matching the pattern."
    assert find(tmp_path, "?", max_results=4).startswith("Found 3 matches:\n")


@pytest.mark.case(93)
def test_links_and_ignore_files(tmp_path: Path) -> None:
    """Ignore files count for nothing; linked folders are entered once each; cycles end."""
    tree = tmp_path / "tree"
    make(tmp_path, "tree/ignored.txt", "tree/real/in.txt", "outside/out.txt")
    (tree / ".gitignore").write_text("*\n")
    (tree / "l1").symlink_to(tmp_path / "outside")
    (tree / "l2").symlink_to(tmp_path / "outside")
    (tree / "link").symlink_to("real")
    (tree / "real/loop").symlink_to(tree)
    (tree / "self").symlink_to("self")
    (tree / "broken.txt").symlink_to("nowhere")

    expected = ["broken.txt", "ignored.txt", "l1/out.txt", "link/in.txt", "real/in.txt"]
    assert names(tree, "*.txt") == expected
    assert names(tree, "*.txt", type="file") == expected[1:]
    assert "l2" in names(tree, "l?", type="directory")


@pytest.mark.case(94)
def test_errors(tmp_path: Path) -> None:
    """The path must be a folder that is there; a pattern is needed."""
    make(tmp_path, "file")

    assert failure(tmp_path, "*", path="none") == f"Directory not found: {tmp_path}/none"
    assert failure(tmp_path, "*", path="file") == f"Path is a file, not a directory: {tmp_path}/file"
    assert failure(tmp_path, "") == "Pattern is required"
    assert failure(tmp_path, 5) == "Pattern must be a string, got: 5"
    assert failure(tmp_path, "*", max_depth="1") == "max_depth must be an integer, got: '1'"


def test_results_are_relative_to_the_cwd(tmp_path: Path) -> None:
    """Below the working directory paths are relative, outside of it absolute."""
    make(tmp_path, "cwd/sub/f.txt", "other/f.txt")
    cwd = tmp_path / "cwd"

    assert names(cwd, "f.txt", path="sub") == ["sub/f.txt"]
    assert names(cwd, "f.txt", path=str(cwd / "sub")) == ["sub/f.txt"]
    assert names(cwd, "f.txt", path="../other") == [f"{tmp_path}/other/f.txt"]
    assert names(cwd, "f.txt", path="..") == [f"{tmp_path}/cwd/sub/f.txt", f"{tmp_path}/other/f.txt"]


def test_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that is over its time says so."""
    monkeypatch.setattr(sys.modules["lemon_kernel.helpers.find"], "TIMEOUT_MS", 0)

    assert failure(tmp_path, "*") == "Find timed out after 0ms"
