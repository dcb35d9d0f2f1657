"""OutputCapture: the same result whatever the borders of the pieces, bounded memory, one spill file (behaviour 7)."""

from __future__ import annotations

import itertools
import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lemon_provisioner import workspace

from lemon_kernel import output
from lemon_kernel.output import CapturedOutput, OutputCapture


@pytest.fixture(autouse=True)
def private_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a TMPDIR, and so a private root, of its own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


# The reference: behaviour 7.1 and 7.2 over the whole text, written to be read.

TWO_BYTE = re.compile(rb"\x1b[0-Z\\^-~]")
CSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
OSC = re.compile(rb"\x1b\].*?(?:\x07|\x1b\\)", re.DOTALL)


def reference_clean(raw: bytes) -> bytes:
    data = raw.decode("utf-8", "replace").encode()  # rule 1
    kept = bytearray()
    index = 0
    while index < len(data):  # rule 2
        for kind, limit in ((CSI, 64), (OSC, 4096), (TWO_BYTE, 2)):
            match = kind.match(data, index)
            if match and len(match[0]) <= limit:
                index = match.end()
                break
        else:
            kept.append(data[index])
            index += 1
    controls = {*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F}
    text = bytes(code for code in kept if code not in controls)  # rule 3
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"")  # rules 4 and 5


def reference_cut(clean: bytes, limit: int) -> str:
    if len(clean) <= limit:
        return clean.decode()
    head_limit = limit * 40 // 100
    head = clean[:head_limit].decode("utf-8", "ignore")
    tail = clean[len(clean) - (limit - head_limit) :].decode("utf-8", "ignore")
    dropped = len(clean) - len(head.encode()) - len(tail.encode())
    return f"{head}\n... [{dropped} bytes truncated] ...\n{tail}"


def run_child(code: str) -> None:
    """Run `code` in a child that finds the packages where this process found them; it must succeed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def capture(pieces: list[bytes], limit: int = 50_000) -> CapturedOutput:
    capturing = OutputCapture(limit)
    for piece in pieces:
        capturing.feed(piece)
    return capturing.finish()


def clean(*pieces: bytes) -> str:
    return capture(list(pieces)).text


SPECIAL = "\x1b [ ] \\ \x07 31 ; m A c 7 \r \t \x00 \x7f \x1b[ \x1b] \x1b\\ \x1b[0m \x1b]0;t\x07 \x1b(B ä 語 🍋 text"
FRAGMENTS = st.sampled_from(
    [
        *SPECIAL.encode().split(b" "),
        *(b" ", b"\n", b"\xc3", b"\xa4", b"\xf0\x9f\x8d", b"\xff", b"\xed\xa0\x80"),
        *(b"x" * 62, b"x" * 4090, b"\x1b[" + b"1" * 60, b"\x1b]" + b"y" * 4091),
    ]
)
RAW = st.one_of(st.binary(max_size=200), st.lists(FRAGMENTS, max_size=40).map(b"".join))


@settings(max_examples=400, deadline=None)
@given(raw=RAW, data=st.data())
@pytest.mark.case(287)
def test_chunking_never_changes_the_result(raw: bytes, data: st.DataObject) -> None:
    """Text and spill file equal the whole-text reference for any pieces and any limit."""
    borders = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    limit = data.draw(st.integers(1, 300))
    edges = [0, *borders, len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    expected = reference_clean(raw)

    result = capture(pieces, limit)

    assert result.text == reference_cut(expected, limit)
    assert result.truncated == (len(expected) > limit)
    if result.truncated:
        assert result.full_output_path is not None
        assert Path(result.full_output_path).read_bytes() == expected
        os.unlink(result.full_output_path)
    else:
        assert result.full_output_path is None


@settings(max_examples=150, deadline=None)
@given(raw=RAW)
def test_byte_by_byte_equals_at_once(raw: bytes) -> None:
    """The extreme of chunking: one byte at a time."""
    one_by_one = [raw[i : i + 1] for i in range(len(raw))]

    assert capture(one_by_one).text == reference_clean(raw).decode()


@pytest.mark.case(287)
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b[?25l\x1b[2K\x1b[1;1Hx", "x"),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        (b"\x1b7\x1bMa\x1bc", "a"),
        (b"a\x01b\x7fc\x0b\x0cd\x1b", "abcd"),
        (b"a\tb\r\nc\rd\n", "a\tb\ncd\n"),
        (b"progress\rprogress2", "progressprogress2"),
        ("ä 語 🍋 \x85".encode(), "ä 語 🍋 \x85"),
        (b"\xffa\xe8\xaa", "\ufffda\ufffd"),
        (b"\x1b[31\nm", "[31\nm"),
        (b"\x1b[3\x1b]0;x\x071m", "[31m"),  # what an OSC parted does not become a sequence
        (b"\x1b[" + b"1" * 61 + b"mx", "x"),
        (b"\x1b[" + b"1" * 62 + b"mx", "[" + "1" * 62 + "mx"),
        (b"\x1b]" + b"t" * 4093 + b"\x07x", "x"),
        (b"\x1b]" + b"t" * 4094 + b"\x07x", "]" + "t" * 4094 + "x"),
        (b"\x1b]" + b"t" * 4092 + b"\x1b\\x", "x"),
        (b"\x1b]" + b"t" * 4093 + b"\x1b\\x", "]" + "t" * 4093 + "x"),
    ],
)
def test_sanitising(raw: bytes, expected: str) -> None:
    """The rules of behaviour 7.1, at once and byte by byte."""
    assert clean(raw) == expected
    assert clean(*(raw[i : i + 1] for i in range(len(raw)))) == expected


@pytest.mark.case(279)
def test_exactly_the_limit_is_kept() -> None:
    """100 bytes of 100 are verbatim, and there is no file."""
    assert capture([b"x" * 100], 100) == CapturedOutput("x" * 100, False, None)


@pytest.mark.case(280)
def test_one_byte_over_is_cut() -> None:
    """101 bytes of 100 lose one."""
    result = capture([b"x" * 101], 100)

    assert result.truncated
    assert result.text == "x" * 40 + "\n... [1 bytes truncated] ...\n" + "x" * 60


@pytest.mark.case(281, 282)
def test_forty_sixty() -> None:
    """500 digits in 100 bytes: 40, marker (400), 60; the same in chunks of five."""
    digits = b"0123456789" * 50
    expected = "0123456789" * 4 + "\n... [400 bytes truncated] ...\n" + "0123456789" * 6

    assert capture([digits], 100).text == expected
    assert capture([digits[i : i + 5] for i in range(0, 500, 5)], 100).text == expected


@pytest.mark.case(283, 292)
def test_only_clean_bytes_count() -> None:
    """Colour codes cost nothing, and there is no cap on lines."""
    assert not capture([b"\x1b[31m12345678\x1b[0m" + b"\x1b[1m" * 500], 10).truncated
    assert not capture([b"abcd\n"] * 3000, 50_000).truncated


@pytest.mark.case(285)
def test_spill_file(private_tmpdir: Path) -> None:
    """The spill is 0600, complete, directly under the private root, and stays."""
    result = capture([b"y" * 1000] * 100, 1000)

    assert result.full_output_path is not None
    path = Path(result.full_output_path)
    assert path.parent == Path(workspace.private_root())
    assert re.fullmatch(r"pi-python-repl-[a-z0-9]{10}", path.name)
    assert path.read_bytes() == b"y" * 100_000
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
@pytest.mark.parametrize("total", [99, 100, 101, 102, 500])
def test_spill_cap(size: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the cap is complete, a longer output ends with the notice within the cap; counting goes on."""
    monkeypatch.setattr(output, "SPILL_CAP_BYTES", 100)
    raw = ("ä" * (total // 2) + "x" * (total % 2)).encode()

    result = capture([raw[i : i + size] for i in range(0, total, size)], 10)

    assert result.full_output_path is not None
    content = Path(result.full_output_path).read_bytes()
    assert result.text == reference_cut(raw, 10)
    if total <= 100:
        assert content == raw
    else:
        assert len(content) <= 100
        assert content.endswith(b"[output truncated at 1 GiB]")
        assert raw.decode().startswith(content.decode().removesuffix("\n[output truncated at 1 GiB]"))


def test_a_full_disk_costs_only_the_file(private_tmpdir: Path) -> None:
    """Where the file cannot be written to its end it is removed; the text is cut all the same."""
    code = (
        "import resource, sys\n"
        "from lemon_kernel.output import OutputCapture\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "c = OutputCapture(100)\n"
        "for _ in range(50): c.feed(b'z' * 10_000)\n"
        "r = c.finish()\n"
        "assert r.truncated and r.full_output_path is None, r\n"
        "assert '[499900 bytes truncated]' in r.text\n"
        "import os\n"
        "from lemon_provisioner import workspace\n"
        "assert os.listdir(workspace.private_root()) == ['.lemon-owner']\n"
    )

    run_child(code)


def test_no_private_root_costs_only_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A spill that cannot be created is no error of the run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))

    result = capture([b"x" * 101], 100)

    assert result.truncated
    assert result.full_output_path is None


def test_finish_is_idempotent_and_ends_the_capture() -> None:
    """Later chunks are ignored, and the result stays the same object."""
    capturing = OutputCapture(100)
    capturing.feed(b"a")
    result = capturing.finish()
    capturing.feed(b"b")

    assert capturing.finish() is result


def test_fifty_megabytes_cost_little_memory(private_tmpdir: Path) -> None:
    """50 MB of output, in one piece or many, stay under 20 MB of host memory."""
    code = (
        "import resource\n"
        "from lemon_kernel.output import OutputCapture\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "piece = b'a line of \\xc3\\xa4 plain text\\n' * 2000\n"
        "before = peak()\n"
        "c = OutputCapture(50_000)\n"
        "for _ in range(50_000_000 // len(piece)): c.feed(piece)\n"
        "r = c.finish()\n"
        "assert r.full_output_path\n"
        "assert peak() - before < 10_000, peak() - before\n"
    )

    run_child(code)


def test_sequences_that_never_end_cost_linear_time() -> None:
    """A megabyte of unterminated OSC starts takes processor time like text, not 4096 times as much."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime

    assert capture([b"\x1b]" * 32_768] * 16, 1000).truncated
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 5
