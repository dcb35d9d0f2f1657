"""`grep`: the lines below a folder, or of a file, that match a pattern (behaviour 3.4).

``.gitignore`` and ``.ignore`` files inside the searched tree are respected; hidden files, binary files and
files that cannot be read are skipped.  How lines are found quickly is told in :mod:`.patterns`.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lemon_shim.wire import normalise_text

from .base import HelperContext, HelperError, Params
from .paths import Deadline, check_aborted, flag_param, open_error, read_rest, require, resolve, text_param
from .patterns import line_search
from .walk import Folder, is_file, walk
from .worker import in_thread

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

__all__ = ["grep"]

MAX_PATTERN_BYTES = 10_000
MAX_BODY_BYTES = 51_200
MAX_LINE_CHARACTERS = 500
DEFAULT_MAX_RESULTS = 100
TIMEOUT_MS = 30_000
BINARY_PROBE_BYTES = 512
FIRST_READ_BYTES = 65_536


async def grep(params: Params, context: HelperContext) -> str:
    """Search files for a pattern, line by line, and return the matching lines with path and number.

    Raises :class:`HelperError` for bad parameters, in the order of behaviour 3.4, and after 30 s.
    """
    deadline = Deadline(TIMEOUT_MS, "Search")
    return await deadline.bound(in_thread(_grep, params, deadline, context))


def _grep(params: Params, deadline: Deadline, context: HelperContext) -> str:
    check_aborted(context)
    pattern = params.get("pattern")
    if pattern is None or pattern == "":
        raise HelperError("Pattern is required")
    if not isinstance(pattern, str):
        raise HelperError(f"Pattern must be a string, got: {pattern!r}")
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_PATTERN_BYTES:
        raise HelperError(f"Pattern is too long (max {MAX_PATTERN_BYTES} bytes)")
    search = line_search(
        pattern,
        literal=flag_param(params, "literal"),
        case_sensitive=flag_param(params, "case_sensitive", default=True),
    )
    context_lines = _number(params.get("context_lines"), 0, 0, "context_lines must be a non-negative integer")
    max_results = _number(
        params.get("max_results"), DEFAULT_MAX_RESULTS, 1, "max_results must be a positive integer"
    )
    glob = text_param(params, "glob")
    root = resolve(text_param(params, "path") or ".", context.cwd)
    is_folder = os.path.isdir(root)
    require(root, "path")

    left_s = partial(deadline.look, context)
    report = _Report(max_results, context_lines)
    if is_folder:
        files = _files(root, _glob_filter(glob), left_s)
    else:
        files = iter([(root, os.path.basename(root))])
    for path, name in files:
        try:
            data = _load(path, context)
        except (OSError, ValueError) as error:
            if not is_folder:
                raise open_error(path, "path", error) from None
            report.unreadable += 1
            continue
        if data is None or (search.required is not None and search.required not in data):
            left_s()
            continue
        text = data.decode("utf-8", "replace")
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        report.add(name, text, search.lines(text, left_s))
    return normalise_text(report.text())


def _number(value: object, default: int, least: int, complaint: str) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise HelperError(f"{complaint}, got: {value!r}")
    return value


def _load(path: str, context: HelperContext) -> bytes | None:
    """Return the bytes of a file, or None if it is binary."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        first = os.read(descriptor, FIRST_READ_BYTES)
        if first.find(b"\0", 0, BINARY_PROBE_BYTES) >= 0:
            return None
        return read_rest(descriptor, first, context)
    finally:
        os.close(descriptor)


def _files(root: str, wanted: Callable[[str], bool], look: Callable[[], object]) -> Iterator[tuple[str, str]]:
    """Yield path and relative name of the files to search: not hidden, not ignored, wanted by the glob."""
    rules: dict[Folder | None, _Rules | None] = {None: None}
    for folder in walk(root, hidden=False, look=look):
        here = rules[folder] = _read_rules(folder, rules[folder.parent])
        if here is not None:
            folder.folders[:] = [one for one in folder.folders if not here.ignores(folder, one.name + "/")]
        for entry in folder.files:
            name = folder.prefix + entry.name
            if not wanted(name) or (here is not None and here.ignores(folder, entry.name)):
                continue
            if is_file(entry):  # no device, no FIFO, no link that leads nowhere
                yield entry.path, name


@dataclass(frozen=True)
class _Rules:
    """The ignore rules of one folder and, through `above`, of the folders that lead to it."""

    spec: GitIgnoreSpec
    prefix: str
    above: _Rules | None

    def ignores(self, folder: Folder, name: str) -> bool:
        """Tell whether an entry of `folder` is ignored; the deepest folder with an opinion decides."""
        whole = folder.prefix + name
        rules: _Rules | None = self
        while rules is not None:
            verdict = rules.spec.check_file(whole[len(rules.prefix) :]).include
            if verdict is not None:
                return verdict
            rules = rules.above
        return False


def _read_rules(folder: Folder, above: _Rules | None) -> _Rules | None:
    lines: list[str] = []
    for name in (".gitignore", ".ignore"):  # the later one wins
        try:
            with open(f"{folder.path}/{name}", encoding="utf-8", errors="replace") as file:
                lines += file.read().splitlines()
        except OSError:
            continue
    if not lines:
        return above
    return _Rules(_compile_rules(lines), folder.prefix, above)


def _compile_rules(lines: list[str]) -> GitIgnoreSpec:
    """Compile ignore lines; those that git would not understand are left out, as git does."""
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError:
        good = []
        for line in lines:
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError:
                continue
            good.append(line)
        return GitIgnoreSpec.from_lines(good)


def _glob_filter(glob: str | None) -> Callable[[str], bool]:
    """Return whether a relative path matches ``**/<glob>``; ``{a,b}`` stands for either."""
    if glob is None:
        return lambda name: True
    choices = [
        [None if part == "**" else re.compile(fnmatch.translate(part)) for part in one.lstrip("/").split("/")]
        for one in _braces(glob)
    ]
    return lambda name: any(_matches(name.split("/"), [None, *parts]) for parts in choices)


def _braces(glob: str) -> list[str]:
    found = re.search(r"\{([^{}]*,[^{}]*)\}", glob)
    if found is None:
        return [glob]
    head, tail = glob[: found.start()], glob[found.end() :]
    return [whole for choice in found[1].split(",") for whole in _braces(head + choice + tail)]


def _matches(names: list[str], parts: list[re.Pattern[str] | None]) -> bool:
    """Tell whether the names of a path match the parts of a glob; None is ``**``."""
    if not parts:
        return not names
    first, rest = parts[0], parts[1:]
    if first is None:
        if len(rest) == 1 and rest[0] is not None:  # the usual case: a glob for the base name
            return bool(names) and rest[0].match(names[-1]) is not None
        return any(_matches(names[skipped:], rest) for skipped in range(len(names) + 1))
    return bool(names) and first.match(names[0]) is not None and _matches(names[1:], rest)


@dataclass
class _Report:
    """What was found so far: all matches are counted, the first `max_results` are shown."""

    max_results: int
    context_lines: int
    count: int = 0
    unreadable: int = 0
    _body: list[str] = field(default_factory=list)
    _size: int = 0
    _full: bool = False
    _cut: bool = False

    def add(self, name: str, text: str, found: Iterator[tuple[int, int]]) -> None:
        """Count the matching lines of one file and show those that there is room for."""
        shown: list[int] = []
        after: int | None = None  # the first matching line that is not shown: no context reaches it
        number, counted = 1, 0
        for start, end in found:
            self.count += 1
            if self._full or self.count > self.max_results:
                if after is None:
                    after = number + text.count("\n", counted, start)
                continue
            number += text.count("\n", counted, start)
            counted = start
            if self.context_lines:
                shown.append(number)
            else:
                self._show(f"{name}:{number}: ", text[start:end])
        if shown:
            self._show_groups(name, text, shown, after)

    def _show_groups(self, name: str, text: str, matches: list[int], after: int | None) -> None:
        lines = text.split("\n")
        last = len(lines) - (not lines[-1])
        if after is not None:
            last = min(last, after - 1)
        matching = set(matches)
        done = 0  # the last line that has been looked at
        for match in matches:
            first = max(match - self.context_lines, done + 1)
            if first > done + 1 or done == 0:
                self._separate()
            for number in range(first, min(match + self.context_lines, last) + 1):
                mark = ":" if number in matching else "-"
                self._show(f"{name}{mark}{number}{mark} ", lines[number - 1])
                done = number

    def _separate(self) -> None:
        if self._body:
            self._put("--")

    def _show(self, head: str, line: str) -> None:
        cut = len(line) > MAX_LINE_CHARACTERS
        if cut:
            line = f"{line[:MAX_LINE_CHARACTERS]}... [truncated]"
        if self._put(head + line) and cut:
            self._cut = True

    def _put(self, line: str) -> bool:
        size = len(line.encode("utf-8", "surrogateescape")) + bool(self._body)
        if self._full or self._size + size > MAX_BODY_BYTES:
            self._full = True
            return False
        self._size += size
        self._body.append(line)
        return True

    def text(self) -> str:
        """Return the answer: how many, the lines, and notices of what is not shown."""
        notices: list[str] = []
        if self.count > self.max_results:
            notices.append(
                f"{self.max_results} matches limit reached. "
                f"Use max_results={2 * self.max_results} for more, or refine pattern"
            )
        if self._full:
            notices.append("50.0KB limit reached")
        if self._cut:
            notices.append(
                f"Some lines truncated to {MAX_LINE_CHARACTERS} chars. Use read tool to see full lines"
            )
        if self.unreadable:
            files = "1 file" if self.unreadable == 1 else f"{self.unreadable} files"
            notices.append(f"{files} could not be read")
        if not self.count:
            parts = ["No matches found."]
        else:
            if self._body and self._body[-1] == "--":
                self._body.pop()
            head = "Found 1 match." if self.count == 1 else f"Found {self.count} matches."
            parts = [head, "\n".join(self._body)]
        if notices:
            parts.append(f"[{'. '.join(notices)}]")
        return "\n\n".join(parts)
