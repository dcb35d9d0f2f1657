"""The tracker: the program that outlives a killed host and cleans up behind it (behaviour 6.12).

Started by ``tracker.py`` as ``python -I -S -E tracker_process.py <pid of the host>``; reads the host's messages, one a
line, on standard input:

``root <folder>``
    A private root of this host.
``watch <run id> <workspace>``
    A run is about to be launched.
``group <run id> <pgid>``
    Its process group.
``forget <run id>``
    It is over.

Folders are hex digits, ``-`` for none.  At end of file the host is dead, or ends normally and has forgotten everything.  It
runs no code of a script, takes no signal of the host's group, and is not marked as any run's.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` and `collections.abc` would double this program's start
    from collections.abc import Callable, Iterator

SIGKILL = 9
MAX_VISITS = 10_000  # per workspace (behaviour 8); the rest stays, owner-only
SECOND_SWEEP_S = 0.05  # a child that was just being executed shows its marker only now
OWNER_MARKER = ".lemon-owner"
ROOT_PREFIX = "lemon-private-"
WORKSPACE_PREFIXES = ("lemon-exec-code-", "lemon-kernel-")


class Run:
    def __init__(self, workspace: str) -> None:
        self.workspace = workspace
        self.group = 0
        self.born = ""


def main(kill_marked: Callable[[str], int]) -> None:
    """Listen until the host is gone, then clean up: first all processes, then all folders."""
    host_pid = sys.argv[1]
    roots: list[str] = []
    runs: dict[str, Run] = {}
    for line in lines_of(0):
        try:
            receive(line, runs, roots)
        except (ValueError, IndexError):
            pass  # a line cut short by the host's death
    for run in runs.values():
        kill_group(run)
    for _ in range(2):
        for run_id in runs:
            kill_marked(run_id)
        if runs:
            time.sleep(SECOND_SWEEP_S)
    for run in runs.values():
        if run.workspace:
            remove_tree(run.workspace)
    for root in roots:
        remove_root(root, host_pid)


def lines_of(descriptor: int) -> Iterator[list[str]]:
    """Yield complete lines as lists of words until end of file."""
    rest = b""
    while True:
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield line.decode("ascii", "replace").split(" ")


def receive(words: list[str], runs: dict[str, Run], roots: list[str]) -> None:
    kind = words[0]
    if kind == "root":
        roots.append(folder(words[1]))
    elif kind == "watch":
        runs[words[1]] = Run(folder(words[2]))
    elif kind == "group":
        run = runs.setdefault(words[1], Run(""))
        run.group = int(words[2])
        run.born = born(run.group)
    elif kind == "forget":
        runs.pop(words[1], None)


def folder(word: str) -> str:
    return "" if word == "-" else os.fsdecode(bytes.fromhex(word))


def born(pid: int) -> str:
    """Return the start time of a process, which with its number names it for good; ``""`` when there is none."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return ""
    try:
        stat = os.read(descriptor, 4096)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    # field 22, counted from behind the name in parentheses, which may hold anything
    return stat.rpartition(b")")[2].split()[19].decode()


def kill_group(run: Run) -> None:
    """Kill the run's group unless its number has passed to another process since we were told.

    A leader that is gone is no reason to spare the group: a number is not given out again while a group has it.
    """
    if run.group > 1 and born(run.group) in ("", run.born):
        try:
            os.killpg(run.group, SIGKILL)
        except OSError:
            pass


def remove_tree(top: str) -> None:
    """Remove a workspace: iterative, post-order, following no symlink, at most :data:`MAX_VISITS` visits."""
    try:
        if os.path.islink(top):
            return
    except OSError:
        return
    visits = 0
    stack = [(top, False)]
    while stack:
        path, emptied = stack.pop()
        visits += 1
        if visits > MAX_VISITS:
            return
        try:
            if emptied:
                os.rmdir(path)
                continue
            if os.lstat(path).st_mode & 0o700 != 0o700:  # a script took our rights to what is in it
                os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                children = list(entries)
        except OSError:
            continue
        stack.append((path, True))
        for entry in children:
            if entry.is_dir(follow_symlinks=False):
                stack.append((entry.path, False))
                continue
            visits += 1
            if visits > MAX_VISITS:
                return
            try:
                os.unlink(entry.path)
            except OSError:
                pass


def remove_root(root: str, host_pid: str) -> None:
    """Remove the host's private root with all workspaces, unless something else is in it (spill files keep it).

    Workspaces of which we were not told are there, too: the host may be killed between making one and its message.
    """
    if not os.path.basename(root).startswith(ROOT_PREFIX):
        return
    marker = os.path.join(root, OWNER_MARKER)
    try:
        descriptor = os.open(marker, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            owner = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
        if owner.decode("utf-8", "replace").split("\n")[1:2] != [host_pid]:
            return
        for name in os.listdir(root):
            if name.startswith(WORKSPACE_PREFIXES):
                remove_tree(os.path.join(root, name))
        if os.listdir(root) == [OWNER_MARKER]:
            os.unlink(marker)
            os.rmdir(root)
    except OSError:
        pass


if __name__ == "__main__":
    # The one module we share with the host, without the package round it: that would want `site` and much else.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import sweep  # type: ignore[import-not-found]

    del sys.path[0]
    main(sweep.kill_marked)
