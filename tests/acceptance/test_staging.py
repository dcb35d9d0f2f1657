"""What a run puts on disk: private, replaced rather than followed, and gone afterwards (cases section 12)."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import lemon_provisioner.provisioner
import pytest
from lemon_provisioner import workspace

from .conftest import Agent, private_roots
from .gates import Gate, Held

NOBODY = 65534


@pytest.fixture
def tmpdir(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[pathlib.Path]:
    """A fresh TMPDIR, so that the private root is made by the run at hand.

    To be asked for before the agent, which must be closed before the folder goes.
    """
    tmp_path_factory.getbasetemp(), tempfile.gettempdir()  # decided before TMPDIR changes
    folder = tempfile.mkdtemp(prefix="lz-", dir="/tmp")  # short: sockets of a kernel lie below it
    os.chmod(folder, 0o755)
    monkeypatch.setenv("TMPDIR", folder)
    yield pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Set the umask of this process for one test."""
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


def mode(path: pathlib.Path) -> str:
    return stat.filemode(path.lstat().st_mode)


def the_root() -> pathlib.Path:
    roots = private_roots()
    assert len(roots) == 1
    return roots[0]


def running(agent: Agent, script: str, during: Callable[[Held], None]) -> str:
    """Run `script`, call `during` while its call ``ls()`` is held, and return the text of the result."""
    gate = Gate()
    run = agent.start(script, helpers={"ls": gate}, config={"max_output_bytes": 1000})
    held = gate.wait_for(1)[0]
    try:
        during(held)
    finally:
        held.release()
    return run.result().text


@pytest.mark.case(293)
@pytest.mark.parametrize("mask", [0o000, 0o077, 0o022])
def test_modes_are_private_whatever_the_umask(
    tmpdir: pathlib.Path, agent: Agent, umask: Callable[[int], int], mask: int
) -> None:
    """During a run every folder is 0700 and every file 0600; the script's own umask is the host's."""
    umask(mask)
    seen: dict[str, set[str]] = {}

    def look(_: Held) -> None:
        for folder, folders, files in os.walk(tmpdir):
            for name in (*folders, *files):
                path = pathlib.Path(folder, name)
                seen.setdefault(mode(path), set()).add(path.name)

    text = running(
        agent,
        "import os\nprint('x' * 5000)\nls()\nmask = os.umask(0); os.umask(mask); print(oct(mask))",
        look,
    )

    sockets = {kind for kind in seen if kind.startswith("s")}  # the workspace protects them
    assert set(seen) - sockets == {"drwx------", "-rw-------"}, seen
    assert ".lemon-owner" in seen["-rw-------"]
    assert any(name.startswith("pi-python-repl-") for name in seen["-rw-------"])
    if agent.mode == "per_call":
        assert "script.py" in seen["-rw-------"]
        assert not sockets
    else:
        assert "connection.json" in seen["-rw-------"]
    assert f"\n{oct(mask)}\n" in text


@pytest.mark.case(294)
def test_root_and_its_marker(tmpdir: pathlib.Path, agent: Agent) -> None:
    """The first run makes one private root in TMPDIR, whose marker names this host and this process."""
    agent.run("print(1)")

    assert os.listdir(tmpdir) == [the_root().name]
    root = the_root()
    assert root.name.startswith("lemon-private-")
    assert len(root.name) == len("lemon-private-") + 10
    assert mode(root) == "drwx------"
    marker = root / ".lemon-owner"
    assert mode(marker) == "-rw-------"
    assert marker.read_text() == f"{os.uname().nodename}\n{os.getpid()}\n"


@pytest.mark.case(295)
def test_concurrent_first_users_get_one_root(tmpdir: pathlib.Path, agent: Agent) -> None:
    """Sixteen first runs at once share one root."""
    runs = []
    for number in range(16):
        agent.session_id = f"session-{number % 4}"
        runs.append(agent.start(f"print({number})"))

    assert [run.result().text for run in runs] == [f"{number}\n" for number in range(16)]
    assert os.listdir(tmpdir) == [the_root().name]


@pytest.mark.case(296)
def test_removed_root_is_replaced(tmpdir: pathlib.Path, agent: Agent) -> None:
    """After somebody removed the root the next run makes another one and works."""
    agent.run("print(1)")
    first = the_root()
    shutil.rmtree(first)

    agent.session_id = "another session"  # a kernel that lives needs nothing on disk
    result = agent.run("print(2)")

    assert result.text == "2\n"
    assert result.details.get("fallback_reason") is None
    assert the_root() != first


@pytest.mark.case(296)
def test_root_that_is_private_no_more_is_replaced(tmpdir: pathlib.Path, agent: Agent) -> None:
    """A root that others can enter by now is not used again."""
    agent.run("print(1)")
    first = the_root()
    first.chmod(0o755)

    agent.session_id = "another session"
    assert agent.run("print(2)").text == "2\n"
    assert len(private_roots()) == 2
    assert not list(first.glob("lemon-exec-code-*"))


UNSTAGEABLE = """
import asyncio, json, os, sys
from lemon_kernel import ExecuteCode, ExecuteCodeConfig, ExecuteCodeError, KernelRegistry, Owner, SessionScope
from lemon_kernel import telemetry

mode, folder, python, good, bad, mask, nobody = sys.argv[1:8]
events = []
telemetry.listen(lambda event, measurements, metadata: events.append([event, dict(metadata)]))

def run():
    async def main():
        registry = KernelRegistry()
        config = ExecuteCodeConfig(enabled=True, kernel_mode=mode, python_path=python)
        tool = ExecuteCode(
            folder, config=config, registry=registry, scope=SessionScope("session", "agent", Owner())
        )
        try:
            return (await tool.execute({"script": "open('ran', 'a').write('ran')"})).text
        except ExecuteCodeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            await registry.aclose()
    return asyncio.run(main())

os.environ["TMPDIR"] = good
first = run()  # imports everything, which an unprivileged user may not be able to
if os.getuid() == 0:
    os.setgroups([]); os.setgid(int(nobody)); os.setuid(int(nobody))
os.environ["TMPDIR"] = bad
os.umask(int(mask, 8))
events.clear()
second = run()
os.umask(0o022)
os.environ["TMPDIR"] = good
print(json.dumps({"first": first, "second": second, "events": events}))
"""


@pytest.mark.case(297)
@pytest.mark.parametrize("mode_", ["per_call", "session"])
@pytest.mark.parametrize("trouble", ["missing", "a file", "not writable", "umask"])
def test_no_private_workspace_to_be_had(tmpdir: pathlib.Path, trouble: str, mode_: str) -> None:
    """Without a private place nothing runs: an error names TMPDIR, in a session after one fallback event."""
    work, good, bad = tmpdir / "work", tmpdir / "good", tmpdir / "bad"
    work.mkdir()
    work.chmod(0o777)
    good.mkdir()
    if trouble == "a file":
        bad.write_text("a file")
    elif trouble != "missing":
        bad.mkdir()
        bad.chmod(0o777 if trouble == "umask" else 0o555)
        if os.getuid() != 0 and trouble == "not writable":
            assert not os.access(bad, os.W_OK)
    # The interpreter may lie where an unprivileged user cannot look; this one says that it lies here.
    python = tmpdir / "python"
    python.write_text(f'#!/bin/bash\nexec -a {python} {os.path.realpath(sys.executable)} "$@"\n')
    python.chmod(0o755)
    child = subprocess.run(
        [
            *(sys.executable, "-c", UNSTAGEABLE, mode_, str(work), str(python), str(good), str(bad)),
            *("0277" if trouble == "umask" else "0022", str(NOBODY)),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert child.returncode == 0, child.stderr
    answer = json.loads(child.stdout)

    assert answer["first"] == "(script produced no output)"
    assert answer["second"].startswith(
        "WorkspaceError: execute_code could not create its private workspace: "
    )
    assert "TMPDIR" in answer["second"]
    fallbacks = [metadata for event, metadata in answer["events"] if event.endswith(".fallback")]
    assert fallbacks == ([{"reason": "startup_failed"}] if mode_ == "session" else [])
    assert (work / "ran").read_text() == "ran"
    assert not bad.is_dir() or os.listdir(bad) == []


@pytest.mark.case(298)
def test_planted_symlinks_are_replaced(
    tmpdir: pathlib.Path, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symlinks at the names that will be staged are replaced; what they point to is not touched."""
    victim = tmpdir / "victim"
    victim.write_text("untouched")
    real = workspace.create_workspace
    planted: list[pathlib.Path] = []

    def plant(prefix: str) -> str:
        folder = real(prefix)
        for name in ("script.py", "lemon_tools.py", "lemon_tools.pyc", "connection.json"):
            os.symlink(victim, f"{folder}/{name}")
            planted.append(pathlib.Path(folder, name))
        return folder

    monkeypatch.setattr(workspace, "create_workspace", plant)
    monkeypatch.setattr(lemon_provisioner.provisioner, "create_workspace", plant)
    replaced: list[str] = []

    def look(_: Held) -> None:
        replaced.extend(path.name for path in planted if mode(path) == "-rw-------")

    text = running(agent, "ls(); print('ran')", look)

    assert text == "ran\n"
    assert ("script.py" if agent.mode == "per_call" else "connection.json") in replaced
    assert victim.read_text() == "untouched"


@pytest.mark.case(298)
def test_planted_folders_are_not_entered(
    tmpdir: pathlib.Path, session: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a folder, where a folder is to be staged, makes the start fail; nothing is written there."""
    outside = tmpdir / "outside"
    outside.mkdir()
    real = workspace.create_workspace

    def plant(prefix: str) -> str:
        folder = real(prefix)
        if prefix == workspace.KERNEL_PREFIX:
            os.symlink(outside, f"{folder}/shim")
        return folder

    monkeypatch.setattr(lemon_provisioner.provisioner, "create_workspace", plant)
    result = session.run("print('ran')")

    assert os.listdir(outside) == []
    assert result.details["fallback_reason"] == "startup_failed"
    assert result.text.endswith("ran\n")
    assert list(the_root().glob("lemon-*")) == []


@pytest.mark.case(300)
def test_removal_does_not_follow_links(tmpdir: pathlib.Path, agent: Agent) -> None:
    """A link out of a workspace is removed, what it points to stays."""
    outside = tmpdir / "outside"
    outside.mkdir()
    (outside / "file").write_text("intact")

    def plant(_: Held) -> None:
        for folder in the_root().glob("lemon-*"):
            os.symlink(outside, folder / "link")
            os.symlink(outside / "file", folder / "file link")

    running(agent, "ls()", plant)
    agent.close()

    assert list(the_root().glob("lemon-*")) == []
    assert (outside / "file").read_text() == "intact"


@pytest.mark.case(333)
def test_removal_has_a_budget(tmpdir: pathlib.Path, agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """A workspace with 20,000 files and 10,000 nested folders delays no end: the rest stays, owner-only."""

    def fill(_: Held) -> None:
        (folder,) = the_root().glob("lemon-*")
        inner = os.open(folder, os.O_RDONLY)
        os.close(os.open("0", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=inner))
        for number in range(1, 20_000):  # names are what counts, and links are made quickly
            os.link("0", f"{number}", src_dir_fd=inner, dst_dir_fd=inner)
        for _ in range(10_000):
            os.mkdir("d", dir_fd=inner)
            outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
            os.close(outer)
        os.close(inner)

    ends: list[float] = []
    gate = Gate()
    run = agent.start("ls()", helpers={"ls": gate})
    held = gate.wait_for(1)[0]
    fill(held)
    with caplog.at_level(logging.WARNING):
        ends.append(time.monotonic())
        held.release()
        run.result()
        ends.append(time.monotonic())
        agent.close()
        ends.append(time.monotonic())
    rest = list(the_root().glob("lemon-*"))

    assert ends[1] - ends[0] < 2  # a second, with slack for a busy machine
    assert ends[2] - ends[0] < 4
    assert [mode(folder) for folder in rest] == ["drwx------"]
    assert len(os.listdir(rest[0])) >= 10_000
    warnings = [record for record in caplog.records if record.name == "lemon_provisioner"]
    assert len(warnings) == 1
    assert "removal of a folder stopped after 10000 entries" in warnings[0].getMessage()
    assert str(tmpdir) not in caplog.text
    assert workspace.remove_tree(str(rest[0]), 100_000)
