"""Frames, limits and the few functions that both ends of the bridge must share.

Both ends import this module, and the script's end imports it before every per-call script: it needs
nothing that a bare interpreter has not loaded already, and it runs on Python 3.9.

Frames (design 5), JSON objects with a string ``type``:

====================  ==========================================================
script -> host        ``call {cell, id, token, tool, params}``
                      ``text {cell, id, n, token, text}``
                      ``notify {cell, id, token, msg}``
                      ``open {id, request}`` (front-end kernels only)
host -> script        ``grant {id, cell, token, limits, helpers}``
                      ``answer {id, ok, content}``
====================  ==========================================================

Over a comm a frame is the ``data`` of a ``comm_msg``.  Over the socket pair it is a length-prefixed record:
script -> host four bytes of length (big endian) and the JSON; host -> script four bytes of length, eight bytes
of id, one byte of ok (1 or 0) and the content as UTF-8, so that the script needs no JSON parser.  The grant
travels over the pair as the answer with id 0; its content is the lines cell, token, max_text_bytes, and the
enabled helpers separated by blanks.
"""

from __future__ import annotations

from _json import encode_basestring_ascii

quoted = encode_basestring_ascii
"""Return a text as a JSON string in ASCII, quotes included.

Loaded at once and not by the first call: a script that has used up its descriptors must get its text() out.
"""

PROTOCOL_VERSION = 1
COMM_TARGET = "lemon.bridge"

HELPERS = ("read", "grep", "find", "ls", "webfetch")
"""The allowlist, in the order in which helpers are imported, listed and described (seed, "Helpers")."""
CHANNELS = ("text", "notify", "batch")

MAX_FRAME_BYTES = 262_144
TEXT_FRAME_SLACK_BYTES = 256
MAX_CALL_ID = 2**53
MAX_NOTIFY_BYTES = 4096
MAX_FORWARDED_NOTIFIES = 64
NOTIFY_ACK_TIMEOUT_MS = 100
MAX_TRACEBACK_BYTES = 80 * 1024
TRUNCATED = "... [truncated]"
BATCH_WORKERS = 16
OPEN_TIMEOUT_MS = 2000

NOT_CONFIGURED = "lemon_tools is not configured for this cell"
FINISHED_CELL = "lemon_tools bridge belongs to a finished cell; create the pool in this cell"
OTHER_PROCESS = "helpers work only in the process that runs the script"
HOST_GONE = "the helper host is gone"
NO_HOST = "this kernel has no helper host: start it through Jupyter with the lemon kernelspec"
INPUT_UNSUPPORTED = "input() is not supported in execute_code scripts: there is nobody to answer"
INTERRUPTED = "rpc dispatch interrupted"


def normalise_text(value: object) -> str:
    """Return ``str(value)`` with every surrogate code point replaced by U+FFFD (behaviour A-28)."""
    text = value if type(value) is str else str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
    return text


def text_charge_bytes(number: int, escaped_bytes: int) -> int:
    """Return what block `number` costs of ``max_text_bytes``.

    `escaped_bytes` is the length of the block's JSON string, quotes included; the charge is that of
    ``json.dumps({"n": number, "text": text})`` whatever the carrier's own envelope is (behaviour 5.7).
    """
    return 17 + len(str(number)) + escaped_bytes


def text_over_budget(charged_bytes: int, more_bytes: int, cap_bytes: int) -> str:
    return (
        f"text() byte budget exceeded ({charged_bytes} bytes accumulated, "
        f"{more_bytes} more requested, cap {cap_bytes})"
    )


def request_too_large(size_bytes: int) -> str:
    return f"request is too large ({size_bytes} bytes, cap {MAX_FRAME_BYTES})"


def cut_notify(text: str) -> str:
    """Return `text` cut to ``MAX_NOTIFY_BYTES`` of UTF-8 on a character boundary (behaviour 5.7)."""
    if len(text) * 4 <= MAX_NOTIFY_BYTES:
        return text
    raw = text.encode()
    return text if len(raw) <= MAX_NOTIFY_BYTES else raw[:MAX_NOTIFY_BYTES].decode("utf-8", "ignore")


def cut_encoded(text: str, limit_bytes: int) -> str:
    """Return `text` cut so that its JSON string has at most `limit_bytes` (exception data, behaviour 6.10)."""
    if len(text) * 6 + 2 <= limit_bytes or len(quoted(text)) <= limit_bytes:
        return text
    room = limit_bytes - 2 - len(TRUNCATED)
    low, high = 0, min(len(text), room)
    while low < high:
        middle = (low + high + 1) // 2
        if len(quoted(text[:middle])) - 2 <= room:
            low = middle
        else:
            high = middle - 1
    return text[:low] + TRUNCATED
