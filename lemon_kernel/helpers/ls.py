"""`ls`: the entries of a folder, short or long, also of the folders below it (behaviour 3.5)."""

from __future__ import annotations

import os
import stat
import time
from functools import partial

from lemon_shim.wire import normalise_text

from .base import HelperContext, HelperError, Params
from .paths import Deadline, check_aborted, flag_param, integer_param, require, resolve, text_param
from .walk import is_file, walk
from .worker import in_thread

__all__ = ["ls"]

DEFAULT_MAX_ENTRIES = 500
TIMEOUT_MS = 30_000


async def ls(params: Params, context: HelperContext) -> str:
    """List a folder: by depth, folders first, then by name without regard to case.

    `max_depth` counts levels below the listed folder and matters with `recursive` only.  Raises
    :class:`HelperError` for bad parameters, for what is not a folder, and after 30 s.
    """
    path = resolve(text_param(params, "path") or ".", context.cwd)
    hidden = flag_param(params, "all")
    long = flag_param(params, "long")
    max_depth = integer_param(params, "max_depth")
    if not flag_param(params, "recursive"):
        max_depth = 0
    max_entries = integer_param(params, "max_entries")
    if max_entries is None:
        max_entries = DEFAULT_MAX_ENTRIES
    elif max_entries < 0:
        raise HelperError(f"max_entries must be a non-negative integer, got: {max_entries}")
    deadline = Deadline(TIMEOUT_MS, "Listing")
    return await deadline.bound(in_thread(_ls, path, hidden, long, max_depth, max_entries, deadline, context))


def _ls(
    path: str,
    hidden: bool,
    long: bool,
    max_depth: int | None,
    max_entries: int,
    deadline: Deadline,
    context: HelperContext,
) -> str:
    check_aborted(context)
    require(path, "directory")

    found: list[tuple[int, bool, str, str, os.DirEntry[str]]] = []
    for folder in walk(path, hidden, partial(deadline.look, context)):
        for is_other, entries in ((False, folder.folders), (True, folder.files)):
            for entry in entries:
                name = folder.prefix + entry.name
                found.append((folder.depth, is_other, name.lower(), name, entry))
        if max_depth is not None and folder.depth >= max_depth:
            folder.folders.clear()
    found.sort(key=lambda one: one[:4])

    shown = found[:max_entries]
    lines = [f"Directory: {path}"]
    for _, is_other, _, name, entry in shown:
        letter = "d" if not is_other else ("-" if is_file(entry) else "?")
        lines.append(f"{letter} {_details(entry)} {name}" if long else f"{letter} {name}")
    if len(shown) < len(found):
        lines.append(f"[Showing {len(shown)} of {len(found)} entries. Limit: {max_entries}]")
    elif found:
        lines.append(f"{len(found)} entries")
    else:
        lines.append("(empty directory)")
    return normalise_text("\n".join(lines))


def _details(entry: os.DirEntry[str]) -> str:
    """Return mode, size and time of an entry; of the link itself where it leads nowhere."""
    try:
        status = entry.stat()
    except OSError:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # removed since it was listed
            return f"?????????? {'?':>8} {'?':>16}"
    modified = time.strftime("%Y-%m-%d %H:%M", time.gmtime(status.st_mtime))
    return f"{stat.filemode(status.st_mode)} {_size(status.st_size):>8} {modified}"


def _size(size_bytes: int) -> str:
    if size_bytes < 1024:
        return f"{size_bytes}B"
    size = size_bytes / 1024
    for unit in "KM":
        if size < 1024:
            return f"{size:.1f}{unit}"
        size /= 1024
    return f"{size:.1f}G"
