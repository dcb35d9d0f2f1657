"""Folders that a kernel or a script has been seen to trip over."""

from __future__ import annotations

import pathlib
import sysconfig

import pytest

from .conftest import Agent


@pytest.mark.parametrize("mode", ["per_call", "session"])
def test_a_folder_that_is_on_the_path_stays_on_it(mode: str) -> None:
    """A script runs in the standard library's own folder (IPython took the folder off sys.path)."""
    agent = Agent(pathlib.Path(sysconfig.get_path("stdlib")), mode)
    try:
        result = agent.run("import pdb, wave\nprint('found')")
    finally:
        agent.close()

    assert result.text == "found\n"
    assert "fallback_reason" not in result.details
