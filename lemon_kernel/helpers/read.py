"""`read`: numbered lines of a text file, or an image block (behaviour 3.3)."""

from __future__ import annotations

import base64
import os

from .base import HelperContext, HelperError, HelperResult, Params
from .paths import check_aborted, integer_param, open_error, read_rest, require, resolve, text_param
from .worker import in_thread

__all__ = ["read"]

MAX_LINES = 2000
MAX_BYTES = 51_200

_IMAGES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".gif": "image/gif",
    ".webp": "image/webp",
}


async def read(params: Params, context: HelperContext) -> str | HelperResult:
    """Return lines of a file as ``<n>: <line>``; an image by its extension is returned as an image block.

    Without a limit at most 2000 lines and 51200 bytes are shown; a closing notice then names the offset
    to go on with.  Raises :class:`HelperError` for bad parameters and files that cannot be read.
    """
    path = text_param(params, "path")
    if path is None:
        raise HelperError("Path is required")
    offset = integer_param(params, "offset") or 1
    limit = integer_param(params, "limit") or 0
    return await in_thread(_read, resolve(path, context.cwd), offset, limit, context)


def _read(path: str, offset: int, limit: int, context: HelperContext) -> str | HelperResult:
    check_aborted(context)
    require(path, "file")
    data = _load(path, context)
    mime_type = _IMAGES.get(os.path.splitext(path)[1].lower())
    if mime_type is not None:
        encoded = base64.b64encode(data).decode("ascii")
        return HelperResult(({"type": "image", "data": encoded, "mimeType": mime_type},))
    return numbered(data, offset, limit)


def _load(path: str, context: HelperContext) -> bytes:
    try:
        # Non-blocking: a FIFO put in the file's place since the check must not hold the thread.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise open_error(path, "file", error) from None
    try:
        return read_rest(descriptor, b"", context)
    except OSError as error:
        raise open_error(path, "file", error) from None
    finally:
        os.close(descriptor)


def numbered(data: bytes, offset: int, limit: int) -> str:
    """Return the text of `data` from line `offset` (1-based; less is 1) on, numbered and capped.

    A `limit` of 0 or less is none.  Lines are cut out of the bytes and decoded one by one, which gives the
    same characters (no UTF-8 sequence holds a newline) and touches only what is shown.
    """
    first = max(offset, 1)
    total = data.count(b"\n") + 1
    if first > total:
        return ""
    wanted = min(limit, total - first + 1) if limit > 0 else total - first + 1
    start = 0
    for _ in range(first - 1):
        start = data.index(b"\n", start) + 1
    shown: list[str] = []
    size = 0
    while len(shown) < min(wanted, MAX_LINES):
        end = data.find(b"\n", start)
        if end < 0:
            line = data[start:]
        elif data.startswith(b"\r", end - 1, end) and end > start:
            line = data[start : end - 1]
        else:
            line = data[start:end]
        text = line.decode("utf-8", "replace")
        size += (len(line) if text.isascii() else len(text.encode())) + 1
        if shown and size > MAX_BYTES:
            break
        shown.append(f"{first + len(shown)}: {text}")
        start = end + 1
    if len(shown) < wanted:
        last = first + len(shown) - 1
        shown.append(f"[Showing lines {first}-{last} of {total}. Use offset={last + 1} to continue.]")
    return "\n".join(shown)
