"""`find`: names below a folder that match a glob (behaviour 3.5); no ignore file is consulted (D-6)."""

from __future__ import annotations

import fnmatch
import os
import re
from functools import partial

from lemon_shim.wire import normalise_text

from .base import HelperContext, HelperError, Params
from .paths import Deadline, check_aborted, flag_param, integer_param, require, resolve, text_param
from .walk import is_file, walk
from .worker import in_thread

__all__ = ["find"]

DEFAULT_MAX_RESULTS = 100
TIMEOUT_MS = 30_000


async def find(params: Params, context: HelperContext) -> str:
    """List files and folders whose base name matches `pattern`, sorted, relative to the working directory.

    Hidden names are left out unless `hidden`; ``.gitignore`` is not honoured; linked folders are followed.
    Raises :class:`HelperError` for bad parameters and after 30 s.
    """
    pattern = text_param(params, "pattern")
    if pattern is None:
        raise HelperError("Pattern is required")
    root = resolve(text_param(params, "path") or ".", context.cwd)
    kind = params.get("type")
    max_depth = integer_param(params, "max_depth")
    max_results = integer_param(params, "max_results")
    if max_results is None:
        max_results = DEFAULT_MAX_RESULTS
    hidden = flag_param(params, "hidden")
    deadline = Deadline(TIMEOUT_MS, "Find")
    work = in_thread(_find, root, pattern, kind, max_depth, max(max_results, 0), hidden, deadline, context)
    return await deadline.bound(work)


def _find(
    root: str,
    pattern: str,
    kind: object,
    max_depth: int | None,
    max_results: int,
    hidden: bool,
    deadline: Deadline,
    context: HelperContext,
) -> str:
    check_aborted(context)
    require(root, "directory")
    matches = re.compile(fnmatch.translate(pattern.removeprefix("**/"))).match
    base = _shown_base(root, context.cwd)
    found: list[str] = []

    if max_depth is not None and max_depth < 1:
        return _report([], max_results)
    for folder in walk(root, hidden, partial(deadline.look, context)):
        prefix = base + folder.prefix
        if kind != "directory":
            # A link that leads nowhere, a socket or a device is neither a file nor a folder, yet it is there.
            found += [
                prefix + entry.name
                for entry in folder.files
                if matches(entry.name) and (kind != "file" or is_file(entry))
            ]
        if kind != "file":
            found += [prefix + entry.name for entry in folder.folders if matches(entry.name)]
        if max_depth is not None and folder.depth + 1 >= max_depth:
            folder.folders.clear()
    found.sort()
    return _report(found[:max_results], max_results)


def _shown_base(root: str, cwd: str) -> str:
    """Return what stands before every result: nothing for `cwd` itself, a relative or an absolute folder."""
    root, cwd = os.path.normpath(root), os.path.normpath(cwd)
    if root == cwd:
        return ""
    inside = cwd if cwd.endswith("/") else cwd + "/"
    shown = root.removeprefix(inside)
    return shown if shown.endswith("/") else shown + "/"


def _report(found: list[str], max_results: int) -> str:
    count = len(found)
    if not count:
        return "No files found matching the pattern."
    if count >= max_results:
        head = f"Found {count} matches (limited to {max_results}):"
    else:
        head = "Found 1 match:" if count == 1 else f"Found {count} matches:"
    return normalise_text("\n".join([head, "", *found]))
