"""Which calls share a kernel (behaviour 6.1)."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest
from lemon_provisioner.key import InvalidKey, KernelKey, kernel_key


def key(cwd: Path, /, **changes: object) -> KernelKey:
    fields: dict[str, object] = {
        "session_id": "s",
        "agent_id": "a",
        "cwd": str(cwd),
        "interpreter": sys.executable,
        "helpers": ("read", "grep"),
    }
    return kernel_key(**(fields | changes))  # type: ignore[arg-type]


def test_digest_is_a_sha256(tmp_path: Path) -> None:
    """The digest has 64 hex digits and is the same each time."""
    assert len(bytes.fromhex(key(tmp_path).digest)) == 32
    assert key(tmp_path) == key(tmp_path)
    assert len({key(tmp_path), key(tmp_path)}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"session_id": "S"},
        {"session_id": "s "},
        {"agent_id": "b"},
        {"helpers": ("read",)},
        {"helpers": ()},
        {"interpreter": "/bin/sh"},
        {"session_id": "sa", "agent_id": ""},
    ],
)
def test_every_field_counts(tmp_path: Path, change: dict[str, object]) -> None:
    """A different session, agent, helper set or interpreter is a different kernel."""
    if change.get("agent_id") == "":  # length prefixes: no two lists of fields run together
        assert key(tmp_path, session_id="ab", agent_id="c") != key(tmp_path, session_id="a", agent_id="bc")
        return
    assert key(tmp_path, **change) != key(tmp_path)


def test_order_and_duplicates_of_helpers_do_not_matter(tmp_path: Path) -> None:
    """The helper set is a set."""
    assert key(tmp_path, helpers=["grep", "read", "grep"]) == key(tmp_path)
    assert key(tmp_path, helpers=["grep", "read"]).helpers == ("read", "grep")


def test_spellings_of_one_folder_are_one(tmp_path: Path) -> None:
    """Symlinks, dots and a home are resolved; another folder is another kernel."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)

    assert key(link) == key(real) == key(real / ".." / "real")
    assert key(link).cwd == str(real)
    assert key(tmp_path) != key(real)


def test_environments_over_one_python_differ(tmp_path: Path) -> None:
    """Two virtual environments differ; ``python`` and ``python3`` of one do not; the launched path is unresolved."""
    for name in ("one", "two"):
        venv.create(tmp_path / name, symlinks=True)
    one, two = tmp_path / "one/bin", tmp_path / "two/bin"

    assert os.path.realpath(one / "python") == os.path.realpath(two / "python")
    assert key(tmp_path, interpreter=str(one / "python")) != key(tmp_path, interpreter=str(two / "python"))
    assert key(tmp_path, interpreter=str(one / "python")) == key(tmp_path, interpreter=str(one / "python3"))
    assert key(tmp_path, interpreter=str(one / "python")).interpreter == str(one / "python")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"session_id": " \n"}, "invalid_session_id"),
        ({"session_id": 3}, "invalid_session_id"),
        ({"agent_id": ""}, "invalid_agent_id"),
        ({"agent_id": None}, "invalid_agent_id"),
        ({"cwd": "/nowhere/at/all"}, "cwd_not_found"),
        ({"cwd": sys.executable}, "cwd_not_directory"),
        ({"interpreter": "/nowhere/python"}, "interpreter_not_found"),
        ({"helpers": ("bash",)}, "invalid_helpers"),
    ],
)
def test_invalid_fields_are_named(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    """What makes a key impossible is one of a closed list of reasons."""
    with pytest.raises(InvalidKey) as raised:
        key(tmp_path, **change)
    assert raised.value.reason == reason


def test_volatile_fields_are_rejected(tmp_path: Path) -> None:
    """Run id, tool-call id, session key and policy have no place in the key."""
    for name in ("run_id", "tool_call_id", "session_key", "policy"):
        with pytest.raises(TypeError):
            key(tmp_path, **{name: "x"})
