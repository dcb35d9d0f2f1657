"""Reading frames that a script wrote, without trusting a byte of them.

A script holds its own token, so every frame may be hostile and still be authentic.  Three kinds of damage are
told apart, because behaviour 5.1 and 5.8 answer them differently:

* *malformed*: not UTF-8, not JSON, not an object, no string ``type``.  Nobody can be waiting for an answer.
* *unreadable*: JSON that this host will not hold - too large, nested beyond ``MAX_NESTING``, an integer of
  more than 4,300 digits.  A thread of the script may be waiting, so the id is looked for in the first 4 KiB.
* *not Unicode*: an escape such as ``\\ud800`` makes a string that cannot be encoded again.  The frame is read,
  and the caller refuses what is in it.

Duplicate keys keep their last value, and ``NaN`` is read as a float: the tool that gets it refuses it with a
better message than a parser could, and the script is not left waiting.
"""

from __future__ import annotations

import json
import re
from json import JSONDecodeError
from typing import TypeGuard

from lemon_shim.message import is_nested_too_deeply
from lemon_shim.wire import MAX_CALL_ID

__all__ = ["HEAD_BYTES", "UnreadableFrame", "frame_head", "is_call_id", "is_unicode", "parse_frame"]

HEAD_BYTES = 4096
"""How far into a frame that is not parsed its type and id are looked for (behaviour 5.8)."""

_decode = json.JSONDecoder().decode
_TYPE = re.compile(rb'"type"\s*:\s*"([a-z]{1,16})"')
_ID = re.compile(rb'"id"\s*:\s*([0-9]{1,16})(?=[\s,}])')


class UnreadableFrame(Exception):
    """The frame may be JSON, but this host does not hold such values."""


def parse_frame(frame: bytes) -> dict[str, object] | None:
    """Return the object in `frame`, or None if it is malformed; raise :class:`UnreadableFrame`."""
    if is_nested_too_deeply(frame):
        raise UnreadableFrame
    try:
        message = _decode(frame.decode())
    except (UnicodeDecodeError, JSONDecodeError):
        return None
    except (ValueError, RecursionError, MemoryError) as error:  # ValueError: too many digits
        raise UnreadableFrame from error
    return message if type(message) is dict and type(message.get("type")) is str else None


def frame_head(head: bytes) -> tuple[str | None, int | None]:
    """Return the type and the id that the first ``HEAD_BYTES`` of an unparsed frame seem to have.

    A string value may fool this; the script that wrote it then gets an answer it did not ask for, no more.
    """
    head = head[:HEAD_BYTES]
    kind, number = _TYPE.search(head), _ID.search(head)
    call_id = int(number[1]) if number else None
    return kind[1].decode() if kind else None, call_id if is_call_id(call_id) else None


def is_call_id(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer in 1..2**53 (``True`` is none)."""
    return type(value) is int and 1 <= value <= MAX_CALL_ID


def is_unicode(frame: bytes, value: object) -> bool:
    """Return whether every string in `value`, read from `frame`, can be encoded.

    Surrogates can only come from an escape, so a frame without one costs a search.  What is nested too deeply
    to be looked through counts as not Unicode: the caller refuses both.
    """
    if b"\\ud" not in frame and b"\\uD" not in frame:
        return True
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
