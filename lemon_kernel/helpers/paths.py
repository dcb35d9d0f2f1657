"""Paths, parameters and bounded reading: the rules that read, grep, find and ls share (behaviour 3.2)."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Awaitable
from typing import Literal, TypeVar

from .base import HelperContext, HelperError, Params

__all__ = [
    "Deadline",
    "check_aborted",
    "flag_param",
    "integer_param",
    "open_error",
    "read_rest",
    "require",
    "resolve",
    "text_param",
]

T = TypeVar("T")

CHUNK_BYTES = 1024 * 1024
"""After this much of a file the run's abort signal is looked at again."""

_TYPES = {
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def resolve(path: str, cwd: str) -> str:
    """Return the absolute form of `path`: ``~`` expanded, absolute as given, relative joined to `cwd`."""
    if path.startswith("~"):
        path = os.path.expanduser(path)
    if path.startswith("/"):
        return path
    return os.path.normpath(os.path.join(cwd, path))


def require(path: str, want: Literal["file", "directory", "path"]) -> os.stat_result:
    """Return the status of `path`, links followed; raise :class:`HelperError` unless it is what is wanted."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise open_error(path, want, error) from None
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        if want == "file":
            raise HelperError(f"Path is a directory, not a file: {path}")
        if not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            raise HelperError(f"Permission denied: {path}")
    elif kind == stat.S_IFREG:
        if want == "directory":
            raise HelperError(f"Path is a file, not a directory: {path}")
    else:
        raise HelperError(f"Path is not a {want} ({_TYPES.get(kind, 'unknown')}): {path}")
    return status


def open_error(path: str, want: str, error: OSError | ValueError) -> HelperError:
    """Return what a caller is told when `path` cannot be reached."""
    if isinstance(error, OSError):
        if error.errno == errno.ENOENT:
            return HelperError(f"{want.capitalize()} not found: {path}")
        if error.errno in (errno.EACCES, errno.EPERM):
            return HelperError(f"Permission denied: {path}")
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
    else:  # a NUL byte, or a surrogate that no file name can hold
        name = "EINVAL"
    return HelperError(f"Cannot access {want}: {path} ({name})")


def check_aborted(context: HelperContext) -> None:
    """Raise :class:`HelperError` if the run that a helper works for has been aborted."""
    if context.abort.aborted:
        raise HelperError("Operation aborted")


def read_rest(descriptor: int, first: bytes, context: HelperContext) -> bytes:
    """Return `first` and everything that follows it in the file, looking at the abort signal every MiB."""
    chunk = os.read(descriptor, CHUNK_BYTES)
    if not chunk:
        return first
    chunks = [first]
    while chunk:
        check_aborted(context)
        chunks.append(chunk)
        chunk = os.read(descriptor, CHUNK_BYTES)
    return b"".join(chunks)


class Deadline:
    """The end of a search, `timeout_ms` from now by the wall; `what` says what timed out."""

    def __init__(self, timeout_ms: int, what: str) -> None:
        self._message = f"{what} timed out after {timeout_ms}ms"
        self._timeout_s = timeout_ms / 1000
        self._end = time.monotonic() + self._timeout_s

    async def bound(self, work: Awaitable[T]) -> T:
        """Return what `work` gives; at the end of time cancel it and raise :class:`HelperError`.

        A thread looks at the time between its steps; a step that does not end (a pattern that backtracks,
        a network file system) is left behind by this.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as timer:
                return await work
        except TimeoutError:
            if timer.expired():
                raise self.error() from None
            raise

    def left_s(self) -> float:
        """Return the seconds that are left; raise :class:`HelperError` when there are none."""
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise self.error()
        return left_s

    def look(self, context: HelperContext) -> float:
        """Return the seconds that are left; raise :class:`HelperError` for none, or when the run is aborted."""
        check_aborted(context)
        return self.left_s()

    def error(self) -> HelperError:
        return HelperError(self._message)


def text_param(params: Params, name: str) -> str | None:
    """Return a string parameter, or None where it is absent, null or empty."""
    value = params.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise HelperError(f"{name.capitalize()} must be a string, got: {value!r}")
    return value


def integer_param(params: Params, name: str) -> int | None:
    """Return an integer parameter, or None where it is absent or null; a bool is no integer."""
    value = params.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise HelperError(f"{name} must be an integer, got: {value!r}")
    return value


def flag_param(params: Params, name: str, default: bool = False) -> bool:
    """Return a boolean parameter, or `default` where it is absent or null."""
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise HelperError(f"{name} must be a boolean, got: {value!r}")
    return value
