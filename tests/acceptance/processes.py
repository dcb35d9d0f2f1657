"""What processes of a test are there: found by the test run's own TMPDIR in their environment."""

from __future__ import annotations

import os
import pathlib


def with_environment(entry: str) -> set[int]:
    """Return the ids of the live processes, this one excepted, that were started with `entry` in their environment.

    Children that left their parent, group and session are among them.
    """
    found = set()
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if entry.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:  # gone meanwhile, or somebody else's
            pass
    return found


def is_tracker(pid: int) -> bool:
    """Return whether `pid` is the tracker process, the one that may outlive a run (behaviour 6.12)."""
    try:
        return b"tracker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def children() -> set[int]:
    """Return the ids of this process's children, zombies included."""
    found: set[int] = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except OSError:  # a thread that ended meanwhile
            pass
    return found
