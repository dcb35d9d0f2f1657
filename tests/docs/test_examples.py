"""The examples of the documentation do what it says they do.

Each fenced ``python`` block is a whole program and runs as one, in a folder of its own with a few files.  The
``sh`` blocks of a page run one after the other in one folder.  A ``text`` block that follows is what comes out,
where ``...`` stands for anything.  A block below ``<!-- script -->`` is a script for the tool.
"""

from __future__ import annotations

import doctest
import itertools
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from lemon_kernel import ExecuteCode, ExecuteCodeConfig

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(<!-- (\w+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

FILES = {
    "README.md": "# A sample\n\nA sample for the examples.\n",
    "src/app.py": "from util import double\n\n\ndef main():\n    # TODO: ask for the number\n    print(double(21))\n",
    "src/util.py": "def double(number):\n    return 2 * number  # TODO: other bases\n",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the output that is promised below it."""

    page: str
    line: int
    mark: str
    language: str
    text: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: pathlib.Path) -> list[Block]:
    content = page.read_text()
    found: list[Block] = []
    matches = list(FENCE.finditer(content))
    for match, following in itertools.zip_longest(matches, matches[1:]):
        output = None
        if following is not None and not content[match.end() : following.start()].strip():
            output = following[4] if following[3] == "text" else None
        line = content.count("\n", 0, match.start(3)) + 1
        found.append(Block(page.name, line, match[2] or "", match[3], match[4], output))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [block for block in BLOCKS if block.language == "python" and not block.mark]
SCRIPTS = [block for block in BLOCKS if block.mark == "script"]
SHELL_PAGES = {page.name: [block for block in blocks(page) if block.language == "sh"] for page in PAGES}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder that the pages speak of."""
    for name, content in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "project"


def check(block: Block, output: str) -> None:
    if block.output is None:
        return
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
    if not checker.check_output(block.output, output, flags):
        example = doctest.Example(block.text, block.output)
        pytest.fail(f"{block}:\n{checker.output_difference(example, output, flags)}")


def run(command: list[str], folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_program(block: Block, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It runs as it stands and prints what stands below it."""
    program = tmp_path / "program.py"
    program.write_text(block.text)

    done = run([sys.executable, str(program)], folder)

    assert done.returncode == 0, done.stdout
    check(block, done.stdout)


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_script(block: Block, folder: pathlib.Path) -> None:
    """It succeeds as a script for the tool."""
    result = ExecuteCode(folder, config=ExecuteCodeConfig(enabled=True)).run_sync({"script": block.text})

    assert "reason" not in result.details, result.text
    check(block, result.text)


@pytest.mark.parametrize("page", [page for page, found in SHELL_PAGES.items() if found])
def test_shell(page: str, folder: pathlib.Path) -> None:
    """The commands of a page succeed in their order, and print what stands below them."""
    for block in SHELL_PAGES[page]:
        if block.text.startswith("make "):  # sets up a whole clone: CI does
            continue
        done = run(["bash", "-euo", "pipefail", "-c", block.text], folder)

        assert done.returncode == 0, f"{block}:\n{done.stdout}"
        check(block, done.stdout)


def test_there_is_something_to_test() -> None:
    """The patterns above still find the blocks."""
    assert len(PROGRAMS) >= 10
    assert len(SCRIPTS) >= 1
    assert len(SHELL_PAGES["command-line.md"]) >= 5
