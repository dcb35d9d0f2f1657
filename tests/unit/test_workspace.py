"""The private root and what is made in it: modes, reservation, named files, spills, bounded removal (behaviour 8)."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lemon_provisioner import workspace
from lemon_provisioner.workspace import StagingError

NOBODY = 65534


@pytest.fixture(autouse=True)
def private_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a TMPDIR, and so a private root, of its own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


def mode(path: str | Path) -> str:
    return stat.filemode(os.lstat(path).st_mode)


def in_child(function: Callable[[], None], *, uid: int | None = None) -> None:
    """Run `function` in a forked child, as another user where asked and possible; it must not raise."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if uid is not None and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            function()
            status = 0
        except BaseException:  # reported, and the child must not go on as a second pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


# The root


@pytest.mark.case(294)
def test_root_and_marker(private_tmpdir: Path) -> None:
    """The first look-up makes one 0700 root with a 0600 marker of host name and pid; later ones return it."""
    root = workspace.private_root()

    assert workspace.private_root() == root
    assert os.listdir(private_tmpdir) == [os.path.basename(root)]
    assert os.path.basename(root).startswith("lemon-private-")
    assert len(os.path.basename(root)) == len("lemon-private-") + 10
    assert mode(root) == "drwx------"
    marker = Path(root, ".lemon-owner")
    assert mode(marker) == "-rw-------"
    assert marker.read_text() == f"{os.uname().nodename}\n{os.getpid()}\n"


@pytest.mark.case(293)
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask(mask: int, umask: Callable[[int], int]) -> None:
    """Folders are exactly 0700 and files exactly 0600 under any umask that leaves the owner's bits."""
    umask(mask)
    folder = workspace.create_workspace(workspace.EXEC_PREFIX)
    file = workspace.write_private(folder, "script.py", b"pass\n")
    link = workspace.link_private(file, folder, "again.py")
    descriptor, spill = workspace.create_spill()
    os.close(descriptor)

    assert [mode(workspace.private_root()), mode(folder)] == ["drwx------"] * 2
    assert [mode(path) for path in (file, link, spill)] == ["-rw-------"] * 3


@pytest.mark.case(295)
def test_concurrent_first_users_get_one_root(private_tmpdir: Path) -> None:
    """Sixteen threads at once."""
    barrier = threading.Barrier(16)

    def look_up(_: int) -> str:
        barrier.wait()
        return workspace.private_root()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        roots = set(pool.map(look_up, range(16)))

    assert [os.path.basename(root) for root in roots] == os.listdir(private_tmpdir)


@pytest.mark.case(296)
@pytest.mark.parametrize("damage", ["removed", "mode", "symlink"])
def test_a_root_that_no_longer_validates_is_replaced(damage: str, private_tmpdir: Path) -> None:
    """Gone, opened to others, or a link to somewhere: a new root, and the old one is not touched."""
    root = workspace.private_root()
    if damage == "mode":
        os.chmod(root, 0o755)
    else:
        os.rename(root, private_tmpdir / "away")
        if damage == "symlink":
            os.symlink(private_tmpdir / "away", root)

    folder = workspace.create_workspace(workspace.KERNEL_PREFIX)

    assert not folder.startswith(root)
    assert mode(os.path.dirname(folder)) == "drwx------"


def test_a_forked_child_has_its_own_root(private_tmpdir: Path) -> None:
    """The child uses neither its parent's root nor a lock that a thread of the parent held."""
    root = workspace.private_root()

    def child() -> None:
        own = workspace.private_root()
        assert own != root
        assert Path(own, ".lemon-owner").read_text().split()[1] == str(os.getpid())

    with workspace._lock:
        in_child(child)
    assert workspace.private_root() == root


@pytest.mark.parametrize("spill", [False, True])
def test_exit_leaves_only_spills(spill: bool, private_tmpdir: Path) -> None:
    """At a normal exit the root goes, unless a spill file in it is there to be read."""
    code = "import os; from lemon_provisioner import workspace; workspace.private_root()"
    code += "\nos.close(workspace.create_spill()[0])" * spill

    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )

    assert len(os.listdir(private_tmpdir)) == spill


@pytest.mark.case(297)
@pytest.mark.parametrize("kind", ["missing", "file", "dangling"])
def test_unusable_tmpdir_fails_closed(
    kind: str, private_tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR missing or no folder: an error that names it and the mend, and nothing left behind."""
    target = private_tmpdir / "target"
    if kind == "file":
        target.write_text("")
    if kind == "dangling":
        target.symlink_to(private_tmpdir / "nowhere")
    before = sorted(os.listdir(private_tmpdir))
    monkeypatch.setenv("TMPDIR", str(target))

    with pytest.raises(StagingError, match=r"TMPDIR.*set TMPDIR to an existing local folder") as caught:
        workspace.create_workspace(workspace.EXEC_PREFIX)

    assert str(target) in str(caught.value)
    assert sorted(os.listdir(private_tmpdir)) == before


@pytest.mark.case(297)
def test_unwritable_tmpdir_fails_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder the user may not write to."""
    monkeypatch.setenv("TMPDIR", "/proc")

    def child() -> None:
        with pytest.raises(StagingError, match=r"TMPDIR is /proc.*set TMPDIR"):
            workspace.private_root()

    in_child(child, uid=NOBODY)


@pytest.mark.case(297)
@pytest.mark.parametrize("rooted", [False, True])
def test_umask_that_takes_the_owners_bits_fails_closed(
    rooted: bool, umask: Callable[[int], int], private_tmpdir: Path
) -> None:
    """umask 0277 fails the validation, with or without a root from before; nothing is left behind."""
    before: list[str] = []
    if rooted:
        before = os.listdir(workspace.private_root())
    umask(0o277)

    with pytest.raises(StagingError, match=r"mode 0500.*umask.*TMPDIR"):
        workspace.create_workspace(workspace.EXEC_PREFIX)
    with pytest.raises(StagingError, match=r"mode 0[45]00.*umask.*TMPDIR"):
        workspace.create_spill()

    umask(0o077)
    left = [os.listdir(private_tmpdir / name) for name in os.listdir(private_tmpdir)]
    assert left == ([before] if rooted else [])


def test_inherited_modes_fail_closed(private_tmpdir: Path) -> None:
    """A setgid TMPDIR makes 02700, which is not exactly 0700."""
    os.chmod(private_tmpdir, 0o2777)

    with pytest.raises(StagingError, match=r"mode 2700.*setgid"):
        workspace.private_root()

    assert os.listdir(private_tmpdir) == []


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ext4", "tmpfs", "fuse"])
def test_network_filesystems_are_refused(
    kind: str, tmp_path: Path, private_tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the type of the innermost and last mount over TMPDIR; names with blanks are escaped there."""
    folder = private_tmpdir / "a b" / "c"
    folder.mkdir(parents=True)
    point = str(private_tmpdir / "a b").replace(" ", "\\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:5 / {point} rw - xfs other rw\n"
        f"3 1 0:5 /x {point} rw,relatime shared:1 master:2 - {kind} host:/x rw\n"
        f"4 1 0:6 / {point}/cc rw - nfs host:/y rw\n"
        f"5 1 0:6 / {private_tmpdir}/a rw - nfs host:/y rw\n"
        "broken line\n"
    )
    monkeypatch.setattr(workspace, "MOUNTINFO", str(mounts))
    monkeypatch.setenv("TMPDIR", str(folder))

    assert workspace.filesystem_type(str(folder)) == kind
    if kind in ("ext4", "tmpfs", "fuse"):
        assert workspace.private_root().startswith(str(folder))
    else:
        with pytest.raises(StagingError, match=rf"TMPDIR.*network filesystem \({kind}\); set TMPDIR"):
            workspace.private_root()
        assert list(folder.iterdir()) == []


def test_unreadable_mountinfo_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc does not say, nothing is known against TMPDIR."""
    monkeypatch.setattr(workspace, "MOUNTINFO", "/nonexistent/mountinfo")

    assert os.path.isdir(workspace.private_root())


# Named files


def put(how: str, source: str, folder: str) -> str:
    if how == "write":
        return workspace.write_private(folder, "name", b"new")
    return workspace.link_private(source, folder, "name")


@pytest.mark.case(298)
@pytest.mark.parametrize("how", ["write", "link"])
def test_planted_symlink_is_replaced(how: str, tmp_path: Path) -> None:
    """The link goes, its target stays as it was."""
    folder = workspace.create_workspace(workspace.EXEC_PREFIX)
    source = workspace.write_private(folder, "source", b"new")
    target = tmp_path / "target"
    target.write_text("old")
    os.symlink(target, f"{folder}/name")

    path = put(how, source, folder)

    assert path == f"{folder}/name"
    assert mode(path) == "-rw-------"
    assert Path(path).read_text() == "new"
    assert target.read_text() == "old"
    assert sorted(os.listdir(folder)) == ["name", "source"]


@pytest.mark.parametrize("how", ["write", "link"])
def test_planted_folder_fails_and_stays(how: str) -> None:
    """A folder under the name is an error, and no reservation is left."""
    folder = workspace.create_workspace(workspace.EXEC_PREFIX)
    source = workspace.write_private(folder, "source", b"new")
    os.mkdir(f"{folder}/name")

    with pytest.raises(StagingError, match="TMPDIR"):
        put(how, source, folder)

    assert sorted(os.listdir(folder)) == ["name", "source"]
    assert os.path.isdir(f"{folder}/name")


def test_links_share_only_private_regular_files(tmp_path: Path) -> None:
    """A source with another mode, or a symlink, is refused; linking twice leaves one name."""
    folder = workspace.create_workspace(workspace.EXEC_PREFIX)
    source = workspace.write_private(folder, "source", b"new")
    loose = tmp_path / "loose"
    loose.write_text("")
    loose.chmod(0o644)
    os.symlink(source, f"{folder}/symlink")

    for wrong in (str(loose), f"{folder}/symlink", f"{folder}/missing"):
        with pytest.raises(StagingError, match="TMPDIR"):
            workspace.link_private(wrong, folder, "name")
    workspace.link_private(source, folder, "name")
    workspace.link_private(source, folder, "name")

    assert sorted(os.listdir(folder)) == ["name", "source", "symlink"]
    assert os.path.samefile(f"{folder}/name", source)


def test_reservations_are_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that exists is passed over; when all attempts are taken the call fails and removes nothing."""
    names = iter(["aaaaaaaaaa", "aaaaaaaaaa", "bbbbbbbbbb"] + ["aaaaaaaaaa"] * 99)
    workspace.private_root()
    monkeypatch.setattr(workspace, "_suffix", lambda: next(names))

    first, second = (workspace.create_workspace(workspace.EXEC_PREFIX) for _ in range(2))
    with pytest.raises(StagingError, match="no free name"):
        workspace.create_workspace(workspace.EXEC_PREFIX)

    assert first.endswith("-aaaaaaaaaa")
    assert second.endswith("-bbbbbbbbbb")
    assert os.path.isdir(first)


def test_spill_life() -> None:
    """A finished spill stays and is as old as its end; one that failed is removed."""
    descriptor, path = workspace.create_spill()
    assert not os.get_inheritable(descriptor)
    os.utime(path, (0, 0))
    os.close(descriptor)

    workspace.finish_spill(path, keep=True)
    assert os.stat(path).st_mtime > time.time() - 60
    workspace.finish_spill(path, keep=False)
    workspace.finish_spill(path, keep=False)
    workspace.finish_spill(path, keep=True)

    assert not os.path.exists(path)


# Removal


@pytest.mark.case(300)
def test_removal_ignores_links(tmp_path: Path) -> None:
    """Links to files and folders outside go, what they point to stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    folder = Path(workspace.create_workspace(workspace.EXEC_PREFIX))
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "sub" / "file").symlink_to(outside / "file")
    os.mkfifo(folder / "sub" / "fifo")

    assert workspace.remove_tree(str(folder))

    assert not folder.exists()
    assert (outside / "file").read_text() == "kept"


def test_removal_of_a_link_a_file_and_nothing(tmp_path: Path) -> None:
    """The path itself is not followed either, and nothing is as gone as it can be."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "file").write_text("")

    for name in ("link", "file", "missing"):
        assert workspace.remove_tree(str(tmp_path / name))

    assert sorted(os.listdir(tmp_path)) == ["folder"]


@pytest.mark.parametrize(("budget", "left"), [(0, True), (1, True), (2, True), (3, False)])
def test_one_folder_with_one_file_needs_three_visits(
    budget: int, left: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Entry, file, removal; with less the rest stays owner-only, with a warning."""
    folder = workspace.create_workspace(workspace.EXEC_PREFIX)
    workspace.write_private(folder, "file", b"")

    assert workspace.remove_tree(folder, budget) is not left

    assert os.path.isdir(folder) is left
    assert os.path.exists(f"{folder}/file") is (budget < 2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * left
    if left:
        assert mode(folder) == "drwx------"
        assert folder not in caplog.text  # log records name no paths (behaviour 9.1)


@pytest.mark.parametrize("shape", [(1, 0), (3, 2), (0, 7), (5, 5)])
def test_visits_are_exactly_what_a_tree_needs(shape: tuple[int, int]) -> None:
    """Two for each folder and one for each file: one visit less does not do."""
    subfolders, files = shape

    def make() -> str:
        folder = workspace.create_workspace(workspace.EXEC_PREFIX)
        for path in [folder] + [f"{folder}/{number}" for number in range(subfolders)]:
            os.makedirs(path, exist_ok=True)
            for number in range(files):
                Path(path, f"f{number}").touch()
        return folder

    needed = (subfolders + 1) * (2 + files)

    assert workspace.remove_tree(make(), needed)
    assert not workspace.remove_tree(make(), needed - 1)


@pytest.mark.case(333)
def test_removal_budget(caplog: pytest.LogCaptureFixture) -> None:
    """20,000 files and 10,000 nested folders: stops at 10,000 visits within a second; removable in turns."""
    folder = workspace.create_workspace(workspace.EXEC_PREFIX)
    for number in range(20_000):
        os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY, 0o600))
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(10_000):
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)

    start = time.perf_counter()
    assert not workspace.remove_tree(folder)
    assert time.perf_counter() - start < 3  # a second, with slack for a busy machine
    assert mode(folder) == "drwx------"
    assert "stopped after 10000 entries" in caplog.text

    assert workspace.remove_tree(folder, 40_002)
    assert not os.path.exists(folder)


def test_removal_of_what_a_script_locked() -> None:
    """A folder whose rights a script took away goes like any other, also for a user who is not root."""

    def child() -> None:
        os.environ["TMPDIR"] = "/tmp"
        folder = Path(workspace.create_workspace(workspace.EXEC_PREFIX))
        for bits in (0, 0o400, 0o500):
            locked = folder / f"{bits:o}"
            (locked / "inner").mkdir(parents=True)
            (locked / "file").touch()
            (locked / "link").symlink_to("/")
            locked.chmod(bits)
        folder.chmod(0)
        assert workspace.remove_tree(str(folder))
        assert workspace.remove_tree(os.path.dirname(folder))

    in_child(child, uid=NOBODY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can plant a folder of somebody else")
def test_removal_ignores_errors_of_entries(caplog: pytest.LogCaptureFixture) -> None:
    """A folder of somebody else stays with its parents; everything else goes."""

    def child() -> None:
        os.environ["TMPDIR"] = "/tmp"
        folder = Path(workspace.create_workspace(workspace.EXEC_PREFIX))
        (folder / "a").mkdir()
        (folder / "a" / "file").touch()
        (folder / "locked").mkdir()
        (folder / "locked" / "file").touch()
        for path in (folder.parent, folder, folder / "a", folder / "a" / "file"):
            os.chown(path, NOBODY, NOBODY)

        def removal() -> None:
            assert not workspace.remove_tree(str(folder))
            assert os.listdir(folder) == ["locked"]

        in_child(removal, uid=NOBODY)
        assert workspace.remove_tree(os.path.dirname(folder))

    in_child(child)


def test_removal_holds_few_descriptors() -> None:
    """Depth costs no descriptors: fifty levels with eight to spare."""

    def child() -> None:
        import resource

        folder = workspace.create_workspace(workspace.EXEC_PREFIX)
        os.makedirs(folder + "/d" * 50)
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
        assert workspace.remove_tree(folder)
        workspace._release_roots()

    in_child(child)
