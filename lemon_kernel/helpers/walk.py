"""Deterministic walks over folders for grep, find and ls: sorted, links followed, cycles end (behaviour 3.4, 3.5).

A folder that is reached through a link is entered unless we are inside of it already, or it was entered
through another link.  Folders that are really there are always entered: what a walk finds under their own
names does not depend on the links that lie around.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

__all__ = ["Folder", "is_file", "walk"]

Entry = os.DirEntry[str]
Identity = tuple[int, int]


class Folder:
    """A folder on the way: its path, its place below the root, and its entries sorted by code point.

    `prefix` is the path relative to the root with a closing slash (empty for the root), `depth` is 0 for
    the root.  The caller may take entries out of `folders` to keep the walk from entering them.
    """

    __slots__ = ("_identity", "depth", "files", "folders", "parent", "path", "prefix")

    def __init__(self, path: str, prefix: str, parent: Folder | None) -> None:
        self.path = path
        self.prefix = prefix
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.files: list[Entry] = []
        self.folders: list[Entry] = []
        self._identity: Identity | None = None

    def is_inside(self, identity: Identity) -> bool:
        """Tell whether this folder, or one that leads to it, is the real folder `identity`."""
        folder: Folder | None = self
        while folder is not None:
            if folder._identity is None:  # asked for only where links are met: most walks need none
                folder._identity = _identify(folder.path)
            if folder._identity == identity:
                return True
            folder = folder.parent
        return False


def walk(root: str, hidden: bool, look: Callable[[], object]) -> Iterator[Folder]:
    """Yield `root` and the folders below it depth-first; files of a folder come before its folders.

    Names that begin with a dot are left out unless `hidden`.  Folders that cannot be read are empty.
    `look` is called before each folder; what it raises ends the walk.
    """
    linked: set[Identity] = set()
    waiting = [Folder(root, "", None)]
    while waiting:
        look()
        folder = waiting.pop()
        for entry in _children(folder.path, hidden):
            (folder.folders if _is_folder(entry) else folder.files).append(entry)
        yield folder
        below: list[Folder] = []
        for entry in folder.folders:
            if entry.is_symlink():
                identity = _identify(entry.path)
                if identity is None or identity in linked or folder.is_inside(identity):
                    continue
                linked.add(identity)
            below.append(Folder(entry.path, f"{folder.prefix}{entry.name}/", folder))
        waiting.extend(reversed(below))


def _is_folder(entry: Entry) -> bool:
    """Tell whether an entry is a folder or a link to one; a link that leads nowhere is not."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or one into a folder that may not be entered
        return False


def is_file(entry: Entry) -> bool:
    """Tell whether an entry is a regular file or a link to one; a device or a broken link is not."""
    try:
        return entry.is_file()
    except OSError:
        return False


def _children(path: str, hidden: bool) -> list[Entry]:
    try:
        with os.scandir(path) as entries:
            found = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    except OSError:
        return []
    found.sort(key=lambda entry: entry.name)
    return found


def _identify(path: str) -> Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
