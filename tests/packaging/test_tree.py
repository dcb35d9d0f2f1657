"""Nothing of the machine it was written on is in the tree."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ALLOWED_SECRETS = ("tests/",)
"""Where made-up tokens stand to be looked for in what is told of a run."""

# classes of one character, so that the pattern does not match itself
REGISTRY = re.compile(
    r'index[-]url|"resolved"[:] "http|registry [=] "http|url [=] "https?://[^"]*\.(?:whl|tar\.gz)"'
)
SECRETS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36}\b"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[baprs]-[A-Za-z0-9-]{10,}|://[^/\s:@'\"<>{}]+:[^/\s@'\"<>{}]+@"
)


def tracked_texts() -> list[tuple[str, str]]:
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]  # also in a clone of somebody else
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("this is no git checkout that this user may read")
    texts = []
    for name in done.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            content = path.read_bytes()
            if b"\0" not in content:
                texts.append((name, content.decode("utf-8", "replace")))
    return texts


def lines_with(pattern: re.Pattern[str], but: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts()
        if not name.startswith(but or ("\0",)) and name != "tests/packaging/test_tree.py"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_path_of_this_machine() -> None:
    """No tracked file names the folder that the tree stands in, or the home of whoever runs this."""
    machine = [str(ROOT.parent), str(pathlib.Path("~").expanduser())]
    paths = [re.escape(path) + "/" for path in machine if path not in ("/", "/tmp", "/root", "/home")]
    if ROOT.parent != pathlib.Path("/"):
        paths.append(re.escape(str(ROOT)) + r"\b")

    assert lines_with(re.compile("|".join(paths))) == []


def test_no_address_of_a_registry() -> None:
    """A lock file or a pip option with an address would make everybody install from there."""
    assert lines_with(REGISTRY) == []


def test_no_secret() -> None:
    """No private key, no token of a known shape, no password in a URL."""
    assert lines_with(SECRETS, ALLOWED_SECRETS) == []
