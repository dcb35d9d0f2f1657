"""Jupyter messages made and read by hand: signing, framing and nothing else.

Both ends of a session kernel use this instead of ``jupyter_client.session.Session`` on the paths that decide how
long a cell and a helper call take.  ``Session`` converts every message to dictionaries with dates and back, looks
its packer up in the ``json`` module each time (a script that assigns to ``json.dumps`` silences it), and keeps a
history of digests; a message here is five byte strings, and whoever wants one parsed does so.  The wire format is
the ordinary one, so any Jupyter client understands the other end.

Everything used here is bound when the module is imported, so that nothing a script assigns to reaches it.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime, timezone
from hmac import compare_digest
from itertools import count
from json import JSONDecoder, JSONEncoder
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DELIMITER", "Message", "Signer", "decode", "encode"]

DELIMITER = b"<IDS|MSG>"
PROTOCOL = "5.4"

_BLOCK_BYTES = 64  # of SHA-256 and of every digest that Jupyter's signature schemes name
_now = datetime.now
_UTC = timezone.utc
_bytes, _str = bytes, str

_encode: Callable[[object], str] = JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_decode: Callable[[str], object] = JSONDecoder().decode


def encode(value: object) -> bytes:
    """Return `value` as ASCII JSON."""
    return _encode(value).encode("ascii")


MAX_NESTING = 200
"""How deep lists and objects in a message may nest; parameters may nest 64 deep (api.py)."""
_PIECES = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


def is_nested_too_deeply(data: bytes) -> bool:
    """Return whether JSON nests beyond ``MAX_NESTING``; looked at before it is parsed.

    The parser would find out by itself, at the interpreter's recursion limit.  But a garbage collection that happens
    to run down there calls finalizers of others, which then fail for want of a stack.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False
    depth = 0
    for piece in _PIECES.finditer(data):
        if piece[0] in (b"[", b"{"):
            depth += 1
            if depth > MAX_NESTING:
                return True
        elif piece[0] in (b"]", b"}"):
            depth -= 1
    return False


def decode(data: bytes | memoryview) -> dict[str, object]:
    """Return the JSON object in `data`; raise ValueError when it is anything else."""
    if isinstance(data, bytes) and is_nested_too_deeply(data):
        raise ValueError("nested too deeply")
    try:
        value = _decode(_str(data, "utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    return value


class Message(NamedTuple):
    """One message as it came: the routing frames before the delimiter, and four pieces of JSON."""

    route: list[bytes]
    header: bytes
    parent: bytes
    metadata: bytes
    content: bytes | memoryview
    """A view where whoever received it wanted no copy made."""


class Signer:
    """Makes and opens the messages of one Jupyter session; an empty key switches signing off, as in Jupyter."""

    def __init__(self, key: bytes, session: str, digest: str = "sha256") -> None:
        self.session = session
        self.refused = 0
        """Messages dropped because their signature was wrong (behaviour 6.11)."""
        self._numbers = count(1)
        self._key = key
        if len(key) > _BLOCK_BYTES:
            key = hashlib.new(digest, key).digest()
        key = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.new(digest, bytes(byte ^ 0x36 for byte in key))
        self._outer = hashlib.new(digest, bytes(byte ^ 0x5C for byte in key))

    def sign(self, header: bytes, parent: bytes, metadata: bytes, content: bytes | memoryview) -> bytes:
        if not self._key:
            return b""
        inner = self._inner.copy()
        inner.update(header)
        inner.update(parent)
        inner.update(metadata)
        inner.update(content)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.hexdigest().encode("ascii")

    def new_id(self) -> str:
        return self.session + "_" + str(next(self._numbers))

    def frames(
        self,
        kind: str,
        content: bytes,
        parent: bytes = b"{}",
        metadata: bytes = b"{}",
        *,
        message_id: str | None = None,
    ) -> list[bytes]:
        """Return the frames of a new message, delimiter first; routing frames are the caller's to put before."""
        header = (
            '{"msg_id":"'
            + (message_id or self.new_id())
            + '","msg_type":"'
            + kind
            + '","username":"lemon","session":"'
            + self.session
            + '","date":"'
            + _now(_UTC).isoformat()
            + '","version":"'
            + PROTOCOL
            + '"}'
        ).encode("ascii")
        return [DELIMITER, self.sign(header, parent, metadata, content), header, parent, metadata, content]

    def open(self, frames: Sequence[bytes | memoryview]) -> Message | None:
        """Return the message in `frames`; None, and one more in `refused`, when it is not signed with our key."""
        try:
            start = frames.index(DELIMITER)
            *head, content = frames[start + 1 : start + 6]
            signature, header, parent, metadata = [_bytes(part) for part in head]  # no copy of bytes
        except ValueError:
            self.refused += 1
            return None
        if not compare_digest(signature, self.sign(header, parent, metadata, content)):
            self.refused += 1
            return None
        return Message([_bytes(part) for part in frames[:start]], header, parent, metadata, content)
