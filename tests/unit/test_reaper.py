"""The reaper: windows, batches, live spills, and what dead hosts left (behaviour 8)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lemon_provisioner import reaper, workspace

from lemon_kernel.output import OutputCapture

DAY = 24 * 3600.0
HOST = os.uname().nodename


@pytest.fixture(autouse=True)
def fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A TMPDIR of its own, and a reaper that has not looked yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    reaper._forget_after_fork()
    yield
    reaper._forget_after_fork()


@pytest.fixture
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def root() -> Path:
    return Path(workspace.private_root())


def plant(folder: Path, name: str = "pi-python-repl-aaaaaaaaaa", *, age_s: float = DAY + 60) -> Path:
    path = folder / name
    path.touch(mode=0o600)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def plant_many(folder: Path, count: int) -> None:
    for number in range(count):
        plant(folder, f"pi-python-repl-{number:010}")


def plant_root(parent: Path, name: str, marker: str | None, *, mode: int = 0o700) -> Path:
    path = parent / f"lemon-private-{name:x<10}"
    path.mkdir(mode=mode)
    path.chmod(mode)
    if marker is not None:
        (path / ".lemon-owner").write_text(marker)
        (path / ".lemon-owner").chmod(0o600)
    return path


def names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".lemon-owner")


@pytest.mark.case(302)
def test_once_per_window(root: Path) -> None:
    """The first look-up opens the window; what ages after it is kept until 24 h later."""
    spill = plant(root)
    now = time.time()

    for later in (0, 60, DAY - 60):
        reaper.run(now=now + later)
        workspace.private_root()
        assert spill.exists()
    reaper.run(now=now + DAY + 1)

    assert not spill.exists()


def test_a_look_up_reaps() -> None:
    """The look-up of the root itself does the batch: nobody has to call the reaper."""
    spill = plant(Path(workspace.current_root()))

    workspace.private_root()

    assert not spill.exists()


@pytest.mark.case(303)
def test_batch_of_1000(root: Path) -> None:
    """1001 aged spills: one is left after one window, none after two."""
    plant_many(root, 1001)

    reaper.run(now=time.time() + DAY + 1)
    assert len(names(root)) == 1
    reaper.run(now=time.time() + 2 * DAY + 2)
    assert names(root) == []


def test_names_not_reached_come_first(root: Path) -> None:
    """Entries that are no spills count, and cannot keep the reaper from what lies behind them."""
    for number in range(1500):
        (root / f"other-{number}").touch()
    plant_many(root, 1500)
    now = time.time()

    for window in range(1, 4):
        reaper.run(now=now + window * (DAY + 1))

    assert len(names(root)) == 1500
    assert all(name.startswith("other-") for name in names(root))


def test_only_expired_regular_spills_go(root: Path, tmp_path: Path) -> None:
    """Folders, links and their targets, pipes, other names and young spills stay."""
    target = plant(tmp_path, "target")
    young = plant(root, "pi-python-repl-young00000", age_s=-DAY)
    other = plant(root, "other")
    link = root / "pi-python-repl-link000000"
    link.symlink_to(target)
    folder = root / "pi-python-repl-folder0000"
    folder.mkdir()
    fifo = root / "pi-python-repl-fifo000000"
    os.mkfifo(fifo)
    for path in (link, folder, fifo):
        os.utime(path, (0, 0), follow_symlinks=False)
    old = plant(root)

    reaper.run(now=time.time() + DAY + 1)

    assert not old.exists()
    assert target.exists()
    assert set(names(root)) == {path.name for path in (young, other, link, folder, fifo)}


def test_a_spill_lives_24_hours_after_its_end(root: Path) -> None:
    """Finished just now means kept for 24 h, however old its last output is."""
    capture = OutputCapture(10)
    capture.feed(b"x" * 100)
    (spill,) = root.glob("pi-python-repl-*")
    os.utime(spill, (0, 0))
    capture.finish()
    now = time.time()

    reaper.run(now=now + DAY - 60)
    reaper._forget_after_fork()
    reaper.run(now=now + DAY - 30)
    assert spill.exists()
    reaper._forget_after_fork()
    reaper.run(now=now + DAY + 60)

    assert not spill.exists()


@pytest.mark.case(304)
def test_live_spill_is_kept(root: Path) -> None:
    """While its capture is open an aged spill stays; it goes in the next window after the end."""
    capture = OutputCapture(10)
    capture.feed(b"x" * 100)
    (spill,) = root.glob("pi-python-repl-*")
    os.utime(spill, (0, 0))
    now = time.time()

    reaper.run(now=now + DAY + 1)
    assert spill.exists()
    assert capture.finish().full_output_path == str(spill)
    reaper.run(now=now + 2 * DAY + 2)

    assert not spill.exists()


@pytest.mark.case(305)
def test_dead_captures_mark_is_void(root: Path) -> None:
    """A capture that was dropped without an end protects its file no longer."""
    capture = OutputCapture(10)
    capture.feed(b"x" * 100)
    (spill,) = root.glob("pi-python-repl-*")
    os.utime(spill, (0, 0))
    del capture
    gc.collect()

    reaper.run(now=time.time() + DAY + 1)

    assert not spill.exists()


@pytest.mark.case(334)
def test_stale_roots(tmp_path: Path, dead_pid: int) -> None:
    """Only what a dead process of this host owned is touched, and only bare roots are removed."""
    dead = f"{HOST}\n{dead_pid}\n"
    bare = plant_root(tmp_path, "bare", dead)
    full = plant_root(tmp_path, "full", dead)
    spill, file = plant(full), plant(full, "file")
    (full / "lemon-kernel-aaaaaaaaaa").mkdir()
    inner = plant(full / "lemon-kernel-aaaaaaaaaa")
    untouched = [
        plant_root(tmp_path, "live", f"{HOST}\n{os.getpid()}\n"),
        plant_root(tmp_path, "init", f"{HOST}\n1\n"),
        plant_root(tmp_path, "malformed1", f"{HOST}\n{dead_pid}"),
        plant_root(tmp_path, "malformed2", f"{HOST}\n-{dead_pid}\n"),
        plant_root(tmp_path, "malformed3", f"{dead_pid}\n"),
        plant_root(tmp_path, "malformed4", f"{HOST}\n9999999999\n"),
        plant_root(tmp_path, "malformed5", dead + "more\n"),
        plant_root(tmp_path, "elsewhere", f"other-{HOST}\n{dead_pid}\n"),
        plant_root(tmp_path, "missing", None),
        plant_root(tmp_path, "wrongmode", dead, mode=0o755),
        plant_root(tmp_path, "name-too-long", dead),
    ]
    loose = plant_root(tmp_path, "loose", dead)
    (loose / ".lemon-owner").chmod(0o644)
    linked = plant_root(tmp_path, "linked", None)
    (linked / ".lemon-owner").symlink_to(full / ".lemon-owner")
    link = tmp_path / "lemon-private-linkfolder"
    link.symlink_to(full)
    spills = [plant(path) for path in [*untouched, loose, linked]]

    workspace.private_root()

    assert not bare.exists()
    assert not spill.exists()
    assert file.exists()
    assert inner.exists()
    assert (full / ".lemon-owner").exists()
    assert all(path.exists() for path in spills)
    assert link.is_symlink()


def test_a_stale_root_goes_with_its_last_spill(tmp_path: Path, dead_pid: int) -> None:
    """Expired now or in a later window: once only the marker is left the root is removed."""
    marker = f"{HOST}\n{dead_pid}\n"
    expired, young = plant_root(tmp_path, "expired", marker), plant_root(tmp_path, "young", marker)
    plant(expired)
    plant(young, age_s=-60)
    now = time.time()

    reaper.run(now=now)
    assert not expired.exists()
    assert young.exists()
    reaper.run(now=now + DAY)
    assert young.exists()
    reaper.run(now=now + 2 * DAY)

    assert not young.exists()


def test_a_pid_that_is_used_again_protects_its_root(tmp_path: Path, dead_pid: int) -> None:
    """The marker is read again in each window."""
    stale = plant_root(tmp_path, "stale", f"{HOST}\n{dead_pid}\n")
    spill = plant(stale, age_s=0)
    now = time.time()
    reaper.run(now=now)
    (stale / ".lemon-owner").write_text(f"{HOST}\n{os.getpid()}\n")

    reaper.run(now=now + 2 * DAY)

    assert spill.exists()


@pytest.mark.case(335)
def test_one_budget_for_both_roots(tmp_path: Path, dead_pid: int) -> None:
    """999 aged spills here leave one entry for the stale root."""
    stale = plant_root(tmp_path, "stale", f"{HOST}\n{dead_pid}\n")
    plant_many(stale, 5)
    root = Path(workspace.current_root())
    plant_many(root, 999)
    now = time.time()

    reaper.run(now=now)
    assert names(root) == []
    assert len(names(stale)) == 4
    reaper.run(now=now + DAY + 1)

    assert not stale.exists()


def test_one_stale_root_per_window(tmp_path: Path, dead_pid: int) -> None:
    """Two stale roots need two windows, also when the first is not empty yet."""
    for name in ("a", "b"):
        plant_many(plant_root(tmp_path, name, f"{HOST}\n{dead_pid}\n"), 600)
    now = time.time()
    left = []

    for window in range(3):
        reaper.run(now=now + window * (DAY + 1))
        left.append(len(list(tmp_path.glob("lemon-private-?xxxxxxxxx/pi-*"))))

    assert left == [600, 0, 0]
    assert list(tmp_path.glob("lemon-private-?xxxxxxxxx")) == []


def test_doctor_sees_what_is_left(tmp_path: Path, dead_pid: int) -> None:
    """Stale roots with their contents and a command that removes them; live ones are not listed."""
    stale = plant_root(tmp_path, "stale", f"{HOST}\n{dead_pid}\n")
    (stale / "lemon-kernel-aaaaaaaaaa").mkdir()
    plant(stale)
    workspace.private_root()

    (found,) = reaper.stale_roots()

    assert found == reaper.StaleRoot(str(stale), dead_pid, ("lemon-kernel-aaaaaaaaaa",))
    assert found.mend == f"rm -r -- {stale}"
    subprocess.run(found.mend, shell=True, check=True)
    assert reaper.stale_roots() == []
    assert reaper.stale_roots(str(tmp_path / "missing")) == []


def test_a_killed_hosts_spill_is_reaped(tmp_path: Path) -> None:
    """A host that died with an open capture leaves a stale root, and nothing in it is live."""
    code = (
        "import os; from lemon_kernel.output import OutputCapture\n"
        "c = OutputCapture(10); c.feed(b'x' * 100); os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == -9
    (spill,) = tmp_path.glob("lemon-private-*/pi-python-repl-*")
    os.utime(spill, (0, 0))

    workspace.private_root()

    assert not spill.parent.exists()
