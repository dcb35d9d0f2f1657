"""Finding the lines that match a pattern without looking at every line by itself.

The problem.  The rule is per line (behaviour 3.4): a line matches when the pattern, given nothing but that
line, is found in it.  Asked line by line, a source tree of 7 million lines costs seconds in calls alone.

What does not work.  Running the pattern over whole files changes its meaning: ``[^x]`` and ``\\s`` run
across line ends, ``\\A`` and ``\\Z`` mean the file, ``(?!\\s)`` sees the newline behind the line, and one
match that spans lines hides those inside it.

What we do.  Two filters that may let too much through and never too little, then the rule itself:

1. A *required literal*: text that every match must contain.  A file without its bytes has no match.
2. A *whole-text pattern*: the pattern rewritten so that no part of it can consume a newline.  All that is
   left sees a line end as it sees the end of a line that stands alone (``^`` and ``$`` in multi-line mode,
   ``\\b``, lookarounds), so it matches from a place exactly where the line by itself matches.  The leftmost
   match says that no line before its own matches; that line is asked by the rule all the same, and the
   search goes on behind it.

Both come from :func:`analyse`, a scanner that knows the usual part of the syntax and gives up on the rest:
whatever it does not know to be harmless costs speed, never truth.  A pattern it gives up on is asked line
by line.  Files reach us with ``\\r\\n`` turned into ``\\n``, so ``$`` means the same in both.

What can still fail.  A pattern that only the line-by-line way can serve (``\\A``, set operations, Unicode
properties, fuzzy matching) costs about three seconds per million lines; the search's time limit ends it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from .base import HelperError

__all__ = ["Analysis", "LineSearch", "analyse", "line_search"]

_ANY_CASE_ESCAPES = "wWdDsS"
_COUNT = re.compile(r"\{(?:\d+(?:,\d*)?|,\d+)\}")
_GROUPS = ("(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?P<")
"""Extended groups that are known; whatever they hold, what stands outside of them means the same."""


class _Match(Protocol):
    def start(self) -> int: ...


class _Pattern(Protocol):
    """The part of a compiled ``regex`` pattern that is used here."""

    def search(
        self, text: str, pos: int = ..., *, concurrent: bool = ..., timeout: float = ...
    ) -> _Match | None: ...


@dataclass(frozen=True)
class Analysis:
    """What is known of a pattern: text every match contains, and a form for whole texts; None if unknown.

    `plain` says that the pattern is nothing but its literal.
    """

    literal: str | None
    whole_text: str | None
    plain: bool = False


_UNKNOWN = Analysis(None, None)


def analyse(pattern: str) -> Analysis:
    """Scan `pattern` and return what may be used to search whole texts; see the module's essay."""
    if pattern.startswith("(?i)"):
        rest = analyse(pattern[4:])
        return Analysis(None, None if rest.whole_text is None else f"(?i){rest.whole_text}")
    whole: list[str] | None = []
    literals: list[str] = []  # of the outermost level, in the order of the pattern
    run: list[str] = []
    plain = True
    alternatives = False
    depth = 0
    position = 0

    def end_run() -> None:
        nonlocal plain
        plain = False
        literals.append("".join(run))
        run.clear()

    while position < len(pattern):
        char = pattern[position]
        piece = char
        literal: str | None = None
        if char == "\\":
            piece = pattern[position : position + 2]
            escaped = piece[1:]
            if not escaped or not escaped.isascii():
                return _UNKNOWN
            if escaped in _ANY_CASE_ESCAPES or escaped in "bt":
                end_run()
                new = {"W": r"[^\w\n]", "D": r"[^\d\n]", "s": r"[^\S\n]"}.get(escaped, piece)
            elif escaped in "123456789" and not pattern[position + 2 : position + 3].isdigit():
                end_run()
                new = piece  # what a group holds has no newline either
            elif not escaped.isalnum() and escaped != "_":
                literal, new = escaped, piece
            else:
                return _UNKNOWN
        elif char == "[":
            taken = _character_class(pattern, position)
            if taken is None:
                return _UNKNOWN
            end_run()
            piece, rewritten = taken
            if rewritten is None:
                whole = None
            new = rewritten or ""
        elif char == "(":
            end_run()
            if pattern.startswith(_GROUPS, position):
                piece = next(one for one in _GROUPS if pattern.startswith(one, position))
                if piece == "(?P<":
                    end = pattern.find(">", position)
                    if end < 0 or not pattern[position + 4 : end].isidentifier():
                        return _UNKNOWN
                    piece = pattern[position : end + 1]
            elif pattern.startswith(("(?", "(*"), position):
                return _UNKNOWN
            new = piece
            depth += 1
        elif char == ")":
            end_run()
            depth -= 1
            if depth < 0:
                return _UNKNOWN
            new = piece
        elif char == "|":
            end_run()
            alternatives = alternatives or depth == 0
            new = piece
        elif char in "*+?{":
            if char == "{":
                count = _COUNT.match(pattern, position)
                if count is None:
                    return _UNKNOWN
                piece = count[0]
            if char != "+" and run:
                run.pop()  # it may be there not at all
            end_run()
            follows = pattern[position + len(piece) : position + len(piece) + 1]
            if follows == "?":
                piece += "?"
            elif follows == "+":
                piece += "+"
            elif follows and follows in "*{":
                return _UNKNOWN
            new = piece
        elif char in ".^$":
            end_run()
            new = piece
        else:
            literal, new = char, piece
        if literal == "\n":
            whole = None
        if literal is not None and depth == 0:
            run.append(literal)
        if whole is not None:
            whole.append(new)
        position += len(piece)
    if depth:
        return _UNKNOWN
    literals.append("".join(run))
    longest = "" if alternatives else max(literals, key=len)
    return Analysis(longest or None, None if whole is None else "".join(whole), plain and bool(longest))


def _character_class(pattern: str, start: int) -> tuple[str, str | None] | None:
    """Return a class as written and in a form without newline (None if there is none); None if not known."""
    position = start + 1
    negated = pattern.startswith("^", position)
    position += negated
    body = position
    crosses = False
    while True:
        char = pattern[position : position + 1]
        if not char or char == "[":
            return None
        crosses = crosses or char <= "\n"  # by itself or as the start of a range
        if char == "]" and position > body:
            break
        if char == "\\":
            escaped = pattern[position + 1 : position + 2]
            if not escaped or not escaped.isascii():
                return None
            if escaped.isalnum():
                if escaped not in _ANY_CASE_ESCAPES and escaped != "t":
                    return None
                crosses = (
                    crosses or escaped in "WDs" or (pattern.startswith("-", position + 2) and escaped == "t")
                )
            position += 1
        position += 1
    if any(pair in pattern[body:position] for pair in ("&&", "||", "~~", "--")):
        return None  # set operations in other modes: nothing to be sure of
    written = pattern[start : position + 1]
    if negated:
        first = "\\" if pattern[body] == "]" else ""  # a bracket is plain in the first place only
        return written, f"[^\\n{first}{pattern[body : position + 1]}"
    return written, None if crosses else written


@dataclass(frozen=True)
class LineSearch:
    """A pattern ready to be looked for.

    `required` are bytes that a file with a match contains (None: unknown).  `lines` yields start and end
    of every matching line of a text whose lines end with ``\\n``, in order.
    """

    required: bytes | None
    lines: Callable[[str, Callable[[], float]], Iterator[tuple[int, int]]]
    """The second argument returns the seconds that are left, and raises to end the search."""


def line_search(pattern: str, *, literal: bool, case_sensitive: bool) -> LineSearch:
    """Return the search for `pattern`; raise :class:`HelperError` if it is no pattern (behaviour 3.4)."""
    import regex

    flags = 0 if case_sensitive else regex.IGNORECASE
    source = regex.escape(pattern, special_only=True) if literal else pattern
    try:
        rule = regex.compile(source, flags)
    except regex.error as error:
        raise HelperError(
            _explain(pattern, getattr(error, "msg", str(error)), getattr(error, "pos", None))
        ) from None
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise HelperError(_explain(pattern, str(error) or type(error).__name__, None)) from None

    known = analyse(source)
    required = _required(known.literal) if case_sensitive and known.literal else None
    if case_sensitive and known.plain and known.literal is not None and "\n" not in known.literal:
        text = known.literal
        return LineSearch(required, lambda whole, left_s: _plain_lines(text, whole, left_s))
    candidates = None
    if known.whole_text is not None:
        try:
            candidates = regex.compile(known.whole_text, flags | regex.MULTILINE)
        except (regex.error, ValueError, OverflowError, RecursionError, MemoryError):
            pass  # the rule alone will do
    return LineSearch(required, lambda whole, left_s: _rule_lines(rule, candidates, whole, left_s))


def _required(literal: str) -> bytes | None:
    """Return the bytes of `literal` in a file; None where decoding can make it from other bytes."""
    try:
        return None if "\ufffd" in literal else literal.encode()
    except UnicodeEncodeError:  # a surrogate: no file decodes to it, the rule will find nothing
        return None


def _plain_lines(literal: str, text: str, left_s: Callable[[], float]) -> Iterator[tuple[int, int]]:
    found = text.find(literal)
    while found >= 0:
        left_s()
        start = text.rfind("\n", 0, found) + 1
        end = text.find("\n", found)
        if end < 0:
            end = len(text)
        yield start, end
        found = text.find(literal, end)


def _rule_lines(
    rule: _Pattern, candidates: _Pattern | None, text: str, left_s: Callable[[], float]
) -> Iterator[tuple[int, int]]:
    size = len(text)
    start = 0
    while start < size:  # what follows a closing newline is not a line
        if candidates is not None:
            found = _search(candidates, text, start, left_s)
            if found is None:
                return
            start = text.rfind("\n", start, found.start()) + 1 or start
            if start >= size:
                return
        end = text.find("\n", start)
        if end < 0:
            end = size
        if _search(rule, text[start:end], 0, left_s) is not None:
            yield start, end
        start = end + 1


def _search(pattern: _Pattern, text: str, start: int, left_s: Callable[[], float]) -> _Match | None:
    """Search with the GIL released and an end.

    The library measures its timeout in processor time of the whole process: with other threads at work it
    ends too early by the clock on the wall, and then the search begins again with the time that is left.
    It can also end too late, on a busy machine: the caller does not wait for it then (``Deadline.bound``).
    """
    while True:
        try:
            return pattern.search(text, start, concurrent=True, timeout=left_s())
        except TimeoutError:
            continue


def _explain(pattern: str, reason: str, position: int | None) -> str:
    where = "" if position is None else f" at position {position}"
    message = f"Invalid regex pattern{where}: {reason}"
    if re.search(r"(?:^|[^\\])(?:\\\\)*\\$", pattern):
        return f"{message}. Hint: a trailing backslash must be escaped (\\\\), or use literal=True"
    for opening, closing in ("[]", "()", "{}"):
        if pattern.count(opening) != pattern.count(closing):
            return f"{message}. Hint: unbalanced {opening!r}; escape it as '\\{opening}', or use literal=True"
    return message
