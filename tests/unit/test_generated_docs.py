"""The pages that are generated from the code are those that the code would generate."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

TOOLS = sorted((pathlib.Path(__file__).parents[2] / "tools").glob("generate_*.py"))


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_generated_page_is_current(tool: pathlib.Path) -> None:
    """``make docs`` would change nothing."""
    done = subprocess.run(
        [sys.executable, str(tool), "--check"], capture_output=True, text=True, timeout=50, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
