"""The private folder on disk that holds workspaces, staged files and spill files (behaviour 8).

The problem.  A shared temporary folder belongs to everybody: names in it are guessed, symlinks are planted,
modes depend on a umask somebody else chose.  What we put there (scripts, connection files with their key,
complete outputs) is nobody else's business.

What does not work.  ``mkdtemp`` and a later ``chmod`` leave a moment with the wrong mode, and never notice a
umask that took the owner's own bits.  Writing a file under its final name shows half of it, and follows what
was planted there.  ``shutil.rmtree`` walks as long as a script made the tree, and one with 10,000 nested
folders is longer than any path may be.

What we do.  One root per host process, mode 0700 from ``mkdir`` itself, and everything else inside it.  Each
object is reserved under a random name with ``O_EXCL`` semantics, looked at without following links, and thrown
away again if type, owner or mode are not exactly right: fail closed, nothing is mended afterwards.  Named
files are complete before they get their name.  Removal has a budget and holds one descriptor at a time.

A spill file is *live* while the descriptor :func:`create_spill` returned is open, because it holds a lock
(``flock``) that the kernel takes back when the last holder closes it or dies.  There is no table of live
captures that could outlive its owner, and another process sees the same truth.

What can still fail.  A process of the same user can do all of this to us; the modes are no protection against
oneself.  A process that is killed leaves its root; the tracker (behaviour 6.12) or, for spills, the reaper of
a later host clears it away.
"""

from __future__ import annotations

import atexit
import base64
import fcntl
import logging
import os
import re
import stat
import threading

from lemon_provisioner import tracker

__all__ = [
    "EXEC_PREFIX",
    "KERNEL_PREFIX",
    "MARKER_NAME",
    "ROOT_PREFIX",
    "SPILL_PREFIX",
    "StagingError",
    "create_spill",
    "create_workspace",
    "finish_spill",
    "link_private",
    "private_root",
    "remove_tree",
    "write_private",
]

ROOT_PREFIX = "lemon-private-"
EXEC_PREFIX = "lemon-exec-code-"
KERNEL_PREFIX = "lemon-kernel-"
SPILL_PREFIX = "pi-python-repl-"
MARKER_NAME = ".lemon-owner"
SUFFIX_LENGTH = 10
MAX_VISITS = 10_000

NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"})
"""No IPC sockets, no reliable locks, or no owner to check: refused under TMPDIR (behaviour 8)."""
MOUNTINFO = "/proc/self/mountinfo"

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RESERVATION_ATTEMPTS = 16
_MEND = "set TMPDIR to an existing local folder that this user can write to"

_log = logging.getLogger("lemon_provisioner")


class StagingError(Exception):
    """No private place could be had; the message names TMPDIR and the mend.  Nothing is left behind."""


# The root


_lock = threading.Lock()
_roots: dict[tuple[int, str], str] = {}
"""(pid, TMPDIR) -> root.  The pid keeps a forked child from using, and then removing, its parent's root."""


def private_root() -> str:
    """Return this process's private root, and let the reaper have its look once per 24 h window.

    The root is made at the first call and kept.  One that vanished or no longer is a 0700 folder of this
    user is replaced, and one that lies elsewhere than TMPDIR now says is not used.  Thread-safe.
    """
    root = current_root()
    from . import reaper  # it builds on this module

    reaper.look_up(root)
    return root


def current_root() -> str:
    """Return the root like :func:`private_root`, without waking the reaper."""
    parent = temporary_folder()
    key = (os.getpid(), parent)
    root = _roots.get(key)
    if root is None or not is_private_folder(root):
        with _lock:
            root = _roots.get(key)
            if root is None or not is_private_folder(root):
                root = _roots[key] = _create_root(parent)
    return root


def temporary_folder() -> str:
    """Return the folder that private roots live in: TMPDIR, or ``/tmp``."""
    return os.environ.get("TMPDIR") or "/tmp"


def _create_root(parent: str) -> str:
    folder = os.path.abspath(parent)
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise StagingError(f"TMPDIR ({parent}) is not a folder; {_MEND}")
    except OSError as error:
        raise _staging_error(folder, error) from error
    kind = filesystem_type(folder)
    if kind in NETWORK_FILESYSTEMS:
        raise StagingError(f"TMPDIR ({parent}) is on a network filesystem ({kind}); {_MEND}")
    root = _reserve_folder(folder, ROOT_PREFIX)
    try:
        write_private(root, MARKER_NAME, f"{os.uname().nodename}\n{os.getpid()}\n".encode())
    except BaseException:
        _rmdir_quietly(root, None)
        raise
    return root


def remove_bare_root(root: str) -> bool:
    """Remove a root that holds nothing but its owner marker; return whether it is gone."""
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name != MARKER_NAME:
                    return False
        try:
            os.unlink(f"{root}/{MARKER_NAME}")
        except FileNotFoundError:
            pass
        os.rmdir(root)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _release_roots() -> None:
    """Leave nothing behind at a normal exit, unless there are spill files to read."""
    for pid, parent in list(_roots):
        if pid == os.getpid():
            remove_bare_root(_roots.pop((pid, parent)))


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _roots.clear()


atexit.register(_release_roots)
os.register_at_fork(after_in_child=_forget_after_fork)


def filesystem_type(folder: str) -> str | None:
    """Return the type of the filesystem `folder` is on, or None where mountinfo does not say.

    ``statfs`` would name 9p and sshfs alike by a magic number of FUSE; mountinfo has the subtype.
    """
    try:
        with open(MOUNTINFO, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    target = os.fsencode(os.path.realpath(folder)).rstrip(b"/") + b"/"
    longest, kind = -1, None
    for line in lines:
        # id parent major:minor root MOUNT-POINT options [optional...] - TYPE source super-options
        mount, _, filesystem = line.partition(b" - ")
        fields = mount.split(b" ")
        if len(fields) < 5 or not filesystem:
            continue
        point = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), fields[4])
        point = point.rstrip(b"/") + b"/"
        if target.startswith(point) and len(point) >= longest:  # of two on one point the later one counts
            longest, kind = len(point), filesystem.split(b" ", 1)[0].decode("ascii", "replace")
    return kind


# Reservations


def is_private_folder(path: str) -> bool:
    """Return whether `path` itself is a folder of this user with mode exactly 0700."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return is_private(status, folder=True)


def is_private(status: os.stat_result, *, folder: bool) -> bool:
    """Return whether `status` shows this user's folder of mode 0700, or regular file of mode 0600."""
    wanted = stat.S_IFDIR | 0o700 if folder else stat.S_IFREG | 0o600
    return status.st_mode == wanted and status.st_uid == os.geteuid()


def _suffix() -> str:
    return base64.b32encode(os.urandom(7))[:SUFFIX_LENGTH].decode().lower()


def _staging_error(path: str, error: OSError) -> StagingError:
    return StagingError(
        f"{error.strerror}: {path} (TMPDIR is {os.environ.get('TMPDIR') or 'not set'}); {_MEND}"
    )


def _wrong_mode(path: str, status: os.stat_result) -> StagingError:
    wanted = "0700" if stat.S_ISDIR(status.st_mode) else "0600"
    return StagingError(
        f"{path} came out with mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}, not {wanted} "
        f"and {os.geteuid()}: set a umask that keeps the owner's bits (077), and TMPDIR to a local folder "
        "without default ACLs or setgid bit"
    )


def _reserve_folder(parent: str, prefix: str) -> str:
    for _ in range(_RESERVATION_ATTEMPTS):
        path = f"{parent}/{prefix}{_suffix()}"
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _staging_error(path, error) from error
        status = os.lstat(path)
        if is_private(status, folder=True):
            return path
        os.rmdir(path)
        raise _wrong_mode(path, status)
    raise StagingError(f"no free name for {prefix}* in {parent}; {_MEND}")


def _reserve_file(folder: str, prefix: str) -> tuple[int, str]:
    for _ in range(_RESERVATION_ATTEMPTS):
        path = f"{folder}/{prefix}{_suffix()}"
        try:
            descriptor = os.open(path, _NEW_FILE, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise _staging_error(path, error) from error
        status = os.fstat(descriptor)
        if is_private(status, folder=False):
            return descriptor, path
        os.close(descriptor)
        os.unlink(path)
        raise _wrong_mode(path, status)
    raise StagingError(f"no free name for {prefix}* in {folder}; {_MEND}")


def create_workspace(prefix: str) -> str:
    """Make an empty 0700 folder in the private root; `prefix` is EXEC_PREFIX or KERNEL_PREFIX.

    The tracker knows the root before there is anything in it that a killed host would leave behind.  Raises
    :class:`StagingError`.
    """
    tracker.start()
    tracker.root(current_root())
    return _reserve_folder(private_root(), prefix)


def write_private(folder: str, name: str, data: bytes) -> str:
    """Put a complete 0600 file `name` into `folder` and return its path.

    What has that name is replaced: a symlink itself, not its target.  A folder of that name stays, and the
    call fails with :class:`StagingError`; nothing of it is left behind.
    """
    descriptor, hidden = _reserve_file(folder, f".{name}-")
    path = f"{folder}/{name}"
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)
        os.rename(hidden, path)
    except BaseException as error:
        _unlink_quietly(hidden)
        if isinstance(error, OSError):
            raise _staging_error(path, error) from error
        raise
    return path


def link_private(source: str, folder: str, name: str) -> str:
    """Give the private file `source` a second name in `folder` (a hard link) and return its path.

    For files that many workspaces share, such as the compiled shim: no bytes are copied.  The rules of
    :func:`write_private` hold; `source` must be a regular 0600 file of this user.
    """
    path = reserved = f"{folder}/{name}"
    try:
        try:
            os.link(source, path, follow_symlinks=False)
        except FileExistsError:
            reserved = f"{folder}/.{name}-{_suffix()}"
            os.link(source, reserved, follow_symlinks=False)
        try:
            status = os.lstat(reserved)
            if not is_private(status, folder=False):
                raise _wrong_mode(source, status)
            if reserved != path:
                os.rename(reserved, path)
        except BaseException:
            _unlink_quietly(reserved)
            raise
    except OSError as error:
        raise _staging_error(path, error) from error
    if reserved != path:
        _unlink_quietly(reserved)  # rename() does nothing when both names are one file already
    return path


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


# Spill files


def create_spill() -> tuple[int, str]:
    """Make an empty spill file in the private root; return a descriptor to write to, and its path.

    The file is live, and safe from the reaper, until the descriptor is closed: by its owner, or by the
    kernel when the owner died.  Raises :class:`StagingError`.
    """
    descriptor, path = _reserve_file(private_root(), SPILL_PREFIX)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        _unlink_quietly(path)
        raise _staging_error(path, error) from error
    return descriptor, path


def finish_spill(path: str, *, keep: bool) -> None:
    """Start the 24 h that a finished spill lives, or (`keep` false) remove it.  Close its descriptor first."""
    if not keep:
        _unlink_quietly(path)
        return
    try:
        os.utime(path, follow_symlinks=False)  # the last output may be older than the end of the run
    except OSError:
        pass


# Removal


class _Level:
    """One folder on the way down: which it is, and the folders in it that are still to be removed."""

    __slots__ = ("identity", "name", "subfolders")

    def __init__(self, name: str, identity: tuple[int, int]) -> None:
        self.name = name
        self.identity = identity
        self.subfolders: list[str] = []


class _Remover:
    """One removal: a walk in post-order with a budget of visits and one open folder at a time.

    Going up opens ``..`` and compares it with the folder we came from, so that depth costs neither
    descriptors nor path length, and a folder moved meanwhile leads nowhere.
    """

    def __init__(self, max_visits: int) -> None:
        self.left = max_visits
        self.cut = False
        self.known_folders = 0  # found and not yet entered; each will need at least one visit

    def run(self, path: str) -> None:
        if not self._visit():
            return
        try:
            folder = _open_folder(path, None)
        except OSError:  # not a folder, or not ours to enter
            _unlink_quietly(path)
            return
        try:
            levels = [self._enter(path, folder)]
            while True:
                level = levels[-1]
                if self.left <= 0:  # what is left needs a visit more, at least
                    self.cut = True
                    return
                if level.subfolders:
                    folder = self._go_down(levels, folder)
                elif len(levels) > 1:
                    levels.pop()
                    folder, inner = self._go_up(levels[-1], folder), folder
                    os.close(inner)
                    if folder < 0:
                        return
                    if self._visit():
                        _rmdir_quietly(level.name, folder)
                else:
                    break
        finally:
            if folder >= 0:
                os.close(folder)
        if self._visit():
            _rmdir_quietly(path, None)

    def _visit(self) -> bool:
        if self.left <= 0:
            self.cut = True
            return False
        self.left -= 1
        return True

    def _go_down(self, levels: list[_Level], folder: int) -> int:
        """Enter the next subfolder; return its descriptor, or `folder` where it cannot be entered."""
        name = levels[-1].subfolders.pop()
        self.known_folders -= 1
        if not self._visit():
            return folder
        try:
            inner = _open_folder(name, folder)
        except OSError:
            return folder
        os.close(folder)
        levels.append(self._enter(name, inner))
        return inner

    @staticmethod
    def _go_up(level: _Level, folder: int) -> int:
        """Open the folder above `folder`; -1 if that is not where we came from."""
        try:
            outer = os.open("..", _FOLDER, dir_fd=folder)
        except OSError:
            return -1
        status = os.fstat(outer)
        if (status.st_dev, status.st_ino) == level.identity:
            return outer
        os.close(outer)
        return -1

    def _enter(self, name: str, folder: int) -> _Level:
        """Unlink all in `folder` that is no folder, and note the rest."""
        status = os.fstat(folder)
        level = _Level(name, (status.st_dev, status.st_ino))
        try:
            if status.st_mode & 0o700 != 0o700:  # a script took our rights to what is in it
                os.fchmod(folder, 0o700)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if self.known_folders >= self.left:
                            self.cut = True  # there is no budget to enter another one
                            break
                        self.known_folders += 1
                        level.subfolders.append(entry.name)
                    elif self._visit():
                        try:
                            os.unlink(entry.name, dir_fd=folder)
                        except OSError:
                            pass
                    else:
                        break
        except OSError:
            pass
        return level


def _open_folder(name: str, within: int | None) -> int:
    """Open a folder that is to be removed, also one of this user's that nobody may enter; follow no link."""
    try:
        return os.open(name, _FOLDER, dir_fd=within)
    except PermissionError:
        found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        # a name for the object: whatever is put in its place is not touched
        itself = f"/proc/self/fd/{found}"
        os.chmod(itself, 0o700)
        return os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(found)


def _rmdir_quietly(name: str, folder: int | None) -> None:
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError:
        pass


def remove_tree(path: str, max_visits: int = MAX_VISITS) -> bool:
    """Remove `path` and what is in it without following links; return whether all of it is gone.

    A file costs one visit, a folder two (entry and removal).  Over the budget the rest stays where it is,
    owner-only, and a warning is logged; so is a rest that could not be removed.  Never raises OSError.
    The warnings name no path (behaviour 9.1): ``lemon-kernel doctor`` does.
    """
    remover = _Remover(max_visits)
    remover.run(path)
    if not remover.cut and not os.path.lexists(path):
        return True
    if remover.cut:
        _log.warning(
            "removal of a folder stopped after %d entries; the rest stays in the private root", max_visits
        )
    else:
        _log.warning("a folder could not be removed completely; the rest stays in the private root")
    return False
