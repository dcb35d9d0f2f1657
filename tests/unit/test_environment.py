"""What a script's environment keeps, loses and gains (behaviour 6.5)."""

from __future__ import annotations

import os

import pytest
from lemon_provisioner.environment import child_environment


@pytest.mark.parametrize(
    "name",
    [
        "PYTEST_CURRENT_TEST",
        "JUPYTER_TOKEN",
        "JPY_PARENT_PID",
        "JPY_SESSION_NAME",
        "PYTHONEXECUTABLE",
        "LEMON_TIMEOUT_MS",
        "FORCE_COLOR",
        "CLICOLOR",
        "CLICOLOR_FORCE",
    ],
)
def test_what_is_the_hosts_own_is_dropped(name: str) -> None:
    """A variable of Jupyter, of ours, or set by ipykernel does not reach a script."""
    assert child_environment("r1", {name: "x", "PATH": "/bin"}) == {"PATH": "/bin", "LEMON_RUN_ID": "r1"}


@pytest.mark.parametrize(
    "name",
    [
        "PYTHONPATH",
        "TERM",
        "PAGER",
        "MPLBACKEND",
        "PYTHONUNBUFFERED",
        "MY_API_KEY",
        "JUPYTER_PATH",
        "lemon_x",
    ],
)
def test_what_is_the_users_stays(name: str) -> None:
    """Everything else is inherited unchanged."""
    assert child_environment("r1", {name: "x"})[name] == "x"


def test_an_outer_marker_is_replaced() -> None:
    """A host that runs inside a run gives its own runs their own marker only."""
    assert child_environment("inner", {"LEMON_RUN_ID": "outer"}) == {"LEMON_RUN_ID": "inner"}


def test_the_hosts_environment_is_the_default_and_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a base the process's own environment is copied."""
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("JUPYTER_TOKEN", "secret")

    environment = child_environment("r1")

    assert environment["KEPT"] == "1"
    assert "JUPYTER_TOKEN" not in environment
    assert os.environ["JUPYTER_TOKEN"] == "secret"
    assert "LEMON_RUN_ID" not in os.environ
