"""What a script printed: made harmless, cut to 40 % head and 60 % rolling tail, kept whole in a spill file.

The problem.  Output arrives in pieces whose borders mean nothing: between the bytes of a character, inside an
escape sequence, anywhere.  The result must not depend on them, a script that prints 50 MB must not cost the
host 50 MB, and one that prints nothing but the beginnings of escape sequences must not cost it minutes.

What does not work.  One regular expression per piece sees half sequences; one over the whole text needs the
whole text.  And "up to the next BEL, at most 4096 bytes" as an expression looks 4096 bytes ahead at each
unterminated start.

What we do.  Three stages, each of which carries what it cannot judge yet to the next piece:

1. bytes to valid UTF-8 (carries at most three bytes),
2. valid UTF-8 to clean text (carries an unfinished sequence, less than 4096 bytes),
3. clean text to everything, or head, tail and spill file.

Stage 2 rests on a property of the three kinds of sequence: only an OSC can have an ESC inside.  So the starts
of OSCs are found first, with the positions of the next terminators remembered, and what lies between them is
cleaned by one substitution and one ``bytes.translate``.  Text without an ESC needs the translate alone.

Rules 4 and 5 of behaviour 7.1 (CRLF becomes LF, other CRs go) are together "CRs go".
"""

from __future__ import annotations

import array
import codecs
import fcntl
import os
import re
import termios
from dataclasses import dataclass

from lemon_provisioner import workspace

__all__ = ["CapturedOutput", "OutputCapture", "held_bytes"]

SPILL_CAP_BYTES = 1 << 30
SPILL_NOTICE = b"\n[output truncated at 1 GiB]"

_PIECE_BYTES = 65_536
_MAX_CSI_BYTES = 64
_MAX_OSC_BYTES = 4096

_REMOVED = bytes(code for code in (*range(0x20), 0x7F) if code not in b"\t\n")
# The look-ahead is the limit of 64 bytes: ESC [, at most 61 more, the final byte.  Two-byte escapes are
# those of ECMA-35 (ESC 0x30-0x7E) without the introducers of CSI and OSC.
_SEQUENCE = re.compile(
    rb"\x1b(?:\[(?=[ -?]{0,61}+[@-~])[0-?]*+[ -/]*+[@-~]|[0-Z\\^-~])",
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*+[ -/]*+)?")
_OSC_START, _BEL, _STRING_END = b"\x1b]", b"\x07", b"\x1b\\"


@dataclass(frozen=True)
class CapturedOutput:
    """A run's output as the result shows it; `full_output_path` names the spill file, where there is one."""

    text: str
    truncated: bool
    full_output_path: str | None


class _Sanitiser:
    """Stages 1 and 2: raw bytes in, clean UTF-8 out, whatever the borders of the pieces (behaviour 7.1)."""

    def __init__(self) -> None:
        self._undecoded = b""
        self._unfinished = b""

    def feed(self, piece: bytes, *, final: bool = False) -> bytes:
        if self._undecoded or final or not piece.isascii():
            text, used = codecs.utf_8_decode(self._undecoded + piece, "replace", final)
            self._undecoded = (self._undecoded + piece)[used:]
            piece = text.encode()
        if self._unfinished:
            piece = self._unfinished + piece
            self._unfinished = b""
        if b"\x1b" not in piece:
            return piece.translate(None, _REMOVED)
        if _OSC_START in piece:
            return self._without_osc(piece, final)
        return self._clean_tail(piece, 0, final)

    def _without_osc(self, data: bytes, final: bool) -> bytes:
        clean = []
        done = 0
        never = len(data) + _MAX_OSC_BYTES + 1  # further away than any limit
        bel = string_end = -1
        start = data.find(_OSC_START)
        while start >= 0:
            if bel < start:
                bel = data.find(_BEL, start)
                bel = never if bel < 0 else bel
            if string_end < start + 2:
                string_end = data.find(_STRING_END, start + 2)
                string_end = never if string_end < 0 else string_end
            end = min(bel + len(_BEL), string_end + len(_STRING_END))
            if end - start <= _MAX_OSC_BYTES:
                clean.append(_clean(data[done:start]))
                done = end
                start = data.find(_OSC_START, end)
            elif len(data) - start < _MAX_OSC_BYTES and not final:
                self._unfinished = data[start:]
                clean.append(_clean(data[done:start]))
                return b"".join(clean)
            else:
                start = data.find(_OSC_START, start + 2)
        clean.append(self._clean_tail(data, done, final))
        return b"".join(clean)

    def _clean_tail(self, data: bytes, done: int, final: bool) -> bytes:
        """Clean ``data[done:]``, but keep a short sequence at its end that may go on."""
        last = data.rfind(b"\x1b", done)
        if (
            last >= 0
            and not final
            and len(data) - last < _MAX_CSI_BYTES
            and _UNFINISHED.fullmatch(data, last)
        ):
            self._unfinished = data[last:]
            return _clean(data[done:last])
        return _clean(data[done:])


def _clean(data: bytes) -> bytes:
    return _SEQUENCE.sub(b"", data).translate(None, _REMOVED)


class _Spill:
    """The whole clean output in a file of at most SPILL_CAP_BYTES, or nothing at all (behaviour 7.3).

    The last bytes before the cap are held back until it is known whether they or the notice end the file.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self._descriptor = -1
        self._written_bytes = 0
        self._held: bytes | None = None
        self._full = False
        try:
            self._descriptor, self.path = workspace.create_spill()
        except (workspace.StagingError, OSError):
            pass

    def write(self, data: bytes | bytearray) -> None:
        if self._descriptor < 0 or self._full:
            return
        if self._held is not None:
            self._held += data
        else:
            room = SPILL_CAP_BYTES - len(SPILL_NOTICE) - self._written_bytes
            if len(data) <= room:
                self._write(data)
                return
            cut = _character_start(data, max(room, 0))
            self._held = bytes(data[cut:])
            self._write(data[:cut])
        if self._descriptor >= 0 and self._written_bytes + len(self._held) > SPILL_CAP_BYTES:
            self._held = b""
            self._write(SPILL_NOTICE)
            self._full = True

    def finish(self) -> None:
        """Close the file; it lives for 24 h from now.  Its registration as live ends."""
        if self._descriptor >= 0 and self._held:
            self._write(self._held)
        self._close(keep=True)

    def _write(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        try:
            while view:
                count = os.write(self._descriptor, view)
                self._written_bytes += count
                view = view[count:]
        except OSError:  # a full disk: no file is better than half of one
            view.release()
            self._close(keep=False)

    def _close(self, *, keep: bool) -> None:
        if self._descriptor < 0:
            return
        try:
            os.close(self._descriptor)
        except OSError:  # the descriptor is gone all the same
            pass
        self._descriptor = -1
        if self.path is not None:
            workspace.finish_spill(self.path, keep=keep)
        if not keep:
            self.path = None

    def __del__(self) -> None:
        # The owner died without finishing: the file is no longer live, and the reaper may have it.
        if self._descriptor >= 0:
            os.close(self._descriptor)


class OutputCapture:
    """Takes the output of one run piece by piece; memory stays near `max_output_bytes` whatever is printed.

    `max_output_bytes` counts clean UTF-8 bytes of stdout and stderr together and is at least 1.  Until it is
    exceeded everything is kept and no file is made (behaviour 7.2).
    """

    def __init__(self, max_output_bytes: int) -> None:
        self._limit = max(max_output_bytes, 1)
        self._head_limit = self._limit * 40 // 100
        self._tail_limit = self._limit - self._head_limit
        self._sanitiser = _Sanitiser()
        self._total_bytes = 0
        self._head = b""
        self._tail = bytearray()  # everything, until the limit is exceeded
        self._spill: _Spill | None = None
        self._result: CapturedOutput | None = None

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes; their borders mean nothing.  Never raises; after :meth:`finish` ignored."""
        if self._result is not None:
            return
        if len(chunk) <= _PIECE_BYTES:
            self._take(self._sanitiser.feed(chunk))
            return
        for start in range(0, len(chunk), _PIECE_BYTES):
            self._take(self._sanitiser.feed(chunk[start : start + _PIECE_BYTES]))

    def finish(self) -> CapturedOutput:
        """Return what was captured; unfinished characters and sequences count as ended.  Idempotent."""
        if self._result is None:
            self._take(self._sanitiser.feed(b"", final=True))
            self._result = self._assemble()
            self._tail = bytearray()
        return self._result

    def _take(self, clean: bytes) -> None:
        if not clean:
            return
        self._total_bytes += len(clean)
        if self._spill is not None:
            self._spill.write(clean)
            if len(clean) >= self._tail_limit:
                self._tail[:] = clean[-self._tail_limit :]
                return
        self._tail += clean
        if self._spill is None:
            if self._total_bytes <= self._limit:
                return
            self._spill = _Spill()
            self._spill.write(self._tail)
            self._head = bytes(self._tail[: _character_start(self._tail, self._head_limit)])
        del self._tail[: -self._tail_limit]

    def _assemble(self) -> CapturedOutput:
        if self._spill is None:
            return CapturedOutput(self._tail.decode(), False, None)
        self._spill.finish()
        # The window may begin inside a character: at most three bytes of one.
        cut = 0
        while cut < len(self._tail) and self._tail[cut] & 0xC0 == 0x80:
            cut += 1
        tail = bytes(self._tail[cut:])
        dropped = self._total_bytes - len(self._head) - len(tail)
        text = f"{self._head.decode()}\n... [{dropped} bytes truncated] ...\n{tail.decode()}"
        return CapturedOutput(text, True, self._spill.path)


def held_bytes(descriptor: int) -> int:
    """Return how many bytes a pipe or socket holds now: how far the end of a run is read (behaviour 7.4).

    Reading until there is nothing has no end while a child goes on writing.  Raises OSError.
    """
    held = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, held)
    return held[0]


def _character_start(data: bytes | bytearray, index: int) -> int:
    """Return `index`, or the start of the character it lies in."""
    while 0 < index < len(data) and data[index] & 0xC0 == 0x80:
        index -= 1
    return index
