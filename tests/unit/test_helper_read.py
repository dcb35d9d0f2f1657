"""`read`: numbering, windows, caps and errors."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lemon_kernel.helpers import HELPERS, HelperContext, HelperError, HelperResult, content_text
from lemon_kernel.helpers.read import numbered
from lemon_kernel.scope import AbortSignal


def read(cwd: Path, abort: AbortSignal | None = None, **params: object) -> str:
    return content_text(read_result(cwd, abort, **params))


def read_result(cwd: Path, abort: AbortSignal | None = None, **params: object) -> str | HelperResult:
    async def main() -> str | HelperResult:
        return await HELPERS["read"](params, HelperContext(abort or AbortSignal(), str(cwd)))

    return asyncio.run(main())


def failure(cwd: Path, **params: object) -> str:
    with pytest.raises(HelperError) as caught:
        read(cwd, **params)
    return str(caught.value)


@pytest.mark.case(61)
def test_lines_are_numbered(tmp_path: Path) -> None:
    """Each line has its number; the empty piece behind the last newline is a line."""
    (tmp_path / "f.txt").write_text("alpha\nbeta\n")

    assert read(tmp_path, path="f.txt") == "1: alpha\n2: beta\n3: "


@pytest.mark.case(62, 63, 64)
def test_offset_and_limit(tmp_path: Path) -> None:
    """A window has no notice; odd values mean the default; past the end there is nothing."""
    (tmp_path / "f").write_text("a\nb\nc\nd\ne")
    everything = "1: a\n2: b\n3: c\n4: d\n5: e"

    assert read(tmp_path, path="f", offset=2, limit=2) == "2: b\n3: c"
    for odd in ({"offset": 0}, {"offset": -5}, {"limit": 0}, {"limit": -1}, {"offset": None}):
        assert read(tmp_path, path="f", **odd) == everything
    assert read(tmp_path, path="f", offset=100) == ""
    assert read(tmp_path, path="f", offset=5, limit=9) == "5: e"
    for wrong in ({"offset": "2"}, {"limit": 1.5}, {"limit": True}):
        assert "must be an integer" in failure(tmp_path, path="f", **wrong)


@pytest.mark.case(65)
def test_empty_file(tmp_path: Path) -> None:
    """An empty file is one empty line."""
    (tmp_path / "f").touch()

    assert read(tmp_path, path="f") == "1: "


@pytest.mark.case(66)
def test_line_cap(tmp_path: Path) -> None:
    """At most 2000 lines come, and the notice says how to go on; a limit beyond the cap does not lift it."""
    (tmp_path / "f").write_text("\n".join(str(n) for n in range(1, 2501)))
    notice = "[Showing lines 1-2000 of 2500. Use offset=2001 to continue.]"

    for params in ({}, {"limit": 2400}):
        lines = read(tmp_path, path="f", **params).split("\n")
        assert lines[1999:] == ["2000: 2000", notice]
    assert read(tmp_path, path="f", limit=2000).split("\n")[-1] == "2000: 2000"
    assert read(tmp_path, path="f", offset=501).split("\n")[-1] == "2500: 2500"


@pytest.mark.case(68)
def test_byte_cap(tmp_path: Path) -> None:
    """At most 51200 bytes come, each line with one more than its own; the first line comes whole."""
    (tmp_path / "huge").write_text("x" * 102_400)
    (tmp_path / "huge2").write_text("é" * 51_200 + "\nnext")
    (tmp_path / "exact").write_text("x" * 25_599 + "\n" + "y" * 25_599)
    (tmp_path / "over").write_text("x" * 25_599 + "\n" + "y" * 25_600)

    assert read(tmp_path, path="huge") == "1: " + "x" * 102_400
    assert read(tmp_path, path="huge2").endswith("é\n[Showing lines 1-1 of 2. Use offset=2 to continue.]")
    assert read(tmp_path, path="exact").endswith("y")
    assert read(tmp_path, path="over").endswith("x\n[Showing lines 1-1 of 2. Use offset=2 to continue.]")


@pytest.mark.case(69)
def test_carriage_returns(tmp_path: Path) -> None:
    """``\\r\\n`` ends a line like ``\\n``; a lone ``\\r`` is part of its line; bad UTF-8 is replaced."""
    (tmp_path / "f").write_bytes(b"a\r\nb")
    (tmp_path / "g").write_bytes(b"a\rb\n\r\n\xff\r")

    assert read(tmp_path, path="f") == "1: a\n2: b"
    assert read(tmp_path, path="g") == "1: a\rb\n2: \n3: \ufffd\r"


@pytest.mark.case(70)
def test_images(tmp_path: Path) -> None:
    """The extension, in any case, makes an image; the script sees the placeholder."""
    (tmp_path / "x.PNG").write_bytes(b"not really")
    (tmp_path / "x.txt").write_bytes(b"\x89PNG")

    result = read_result(tmp_path, path="x.PNG")

    assert isinstance(result, HelperResult)
    assert result.content[0]["type"] == "image"
    assert result.content[0]["mimeType"] == "image/png"
    assert content_text(result) == "[non-text content omitted]"
    assert read(tmp_path, path="x.txt") == "1: \ufffdPNG"


@pytest.mark.case(72)
def test_errors(tmp_path: Path) -> None:
    """What cannot be read is named with its absolute path."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()

    assert failure(tmp_path, path="none") == f"File not found: {tmp_path}/none"
    assert failure(tmp_path, path="none.png") == f"File not found: {tmp_path}/none.png"
    assert failure(tmp_path, path=".") == f"Path is a directory, not a file: {tmp_path}"
    assert failure(tmp_path, path="") == "Path is required"
    assert failure(tmp_path) == "Path is required"
    assert failure(tmp_path, path=5) == "Path must be a string, got: 5"
    assert failure(tmp_path, path="pipe") == f"Path is not a file (fifo): {tmp_path}/pipe"
    assert failure(tmp_path, path="/dev/zero") == "Path is not a file (character device): /dev/zero"
    assert failure(tmp_path, path="file/x") == f"Cannot access file: {tmp_path}/file/x (ENOTDIR)"
    assert failure(tmp_path, path="a\0b") == f"Cannot access file: {tmp_path}/a\0b (EINVAL)"


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths start at the context's folder, ``..`` and ``~`` work, there is no jail."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "f").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))

    for path in ("../f", "..//inner/../f", "~/f", str(tmp_path / "f"), f"{inner}/../f"):
        assert read(inner, path=path) == "1: x"
    (inner / "link").symlink_to(tmp_path / "f")
    assert read(inner, path="link") == "1: x"
    assert failure(inner, path="../none") == f"File not found: {tmp_path}/none"


def test_abort(tmp_path: Path) -> None:
    """An aborted run reads nothing."""
    (tmp_path / "f").touch()
    abort = AbortSignal()
    abort.abort()

    with pytest.raises(HelperError, match=r"^Operation aborted$"):
        read(tmp_path, abort, path="f")


@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\xe2\x82", b"\xff", "é".encode()])).map(
        b"".join
    ),
    offset=st.integers(-1, 8),
    limit=st.integers(-1, 5),
)
def test_lines_are_those_of_the_whole_text(data: bytes, offset: int, limit: int) -> None:
    """Cutting lines out of bytes gives what decoding everything and splitting it would give."""
    lines = data.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    first = max(offset, 1)
    chosen = list(enumerate(lines, 1))[first - 1 :]
    if limit > 0:
        chosen = chosen[:limit]

    assert numbered(data, offset, limit) == "\n".join(f"{n}: {line}" for n, line in chosen)
