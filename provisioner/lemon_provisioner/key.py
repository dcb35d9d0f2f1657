"""Which kernel a call is for: the key of behaviour 6.1, a digest over everything that state may depend on.

Policy, approvals, limits and timeouts are not in it: they belong to a call.  The launched path is the one that the
interpreter gave when asked, symlinks unresolved (a resolved one loses its virtual environment); the *key* has the
resolved file and, beside it, the environment's prefix, so that two environments over one base Python differ while
``python`` and ``python3`` of one environment do not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lemon_shim.wire import HELPERS, PROTOCOL_VERSION

__all__ = ["InvalidKey", "InvalidKeyReason", "KernelKey", "is_name", "kernel_key"]

InvalidKeyReason = Literal[
    "invalid_session_id", "invalid_agent_id", "cwd_not_found", "cwd_not_directory", "interpreter_not_found",
    "invalid_helpers",
]  # fmt: skip


class InvalidKey(ValueError):
    """No key can be made; `reason` says which field is at fault."""

    def __init__(self, reason: InvalidKeyReason) -> None:
        super().__init__(reason)
        self.reason: InvalidKeyReason = reason


@dataclass(frozen=True)
class KernelKey:
    """The identity of a kernel: `digest` (64 hex digits) decides, the rest says what to launch.

    Two keys are equal when their digests are.  `interpreter` is the path to launch.
    """

    digest: str
    cwd: str
    interpreter: str
    helpers: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def kernel_key(
    session_id: str, agent_id: str, cwd: str, interpreter: str, helpers: Iterable[str]
) -> KernelKey:
    """Return the key for a call; raise :class:`InvalidKey`.

    The ids must be non-blank strings and are kept verbatim.  `cwd` is expanded and must be an existing folder;
    two spellings of one folder give one key.  Order and duplicates of `helpers` do not matter.
    """
    if not is_name(session_id):
        raise InvalidKey("invalid_session_id")
    if not is_name(agent_id):
        raise InvalidKey("invalid_agent_id")
    folder = os.path.realpath(os.path.expanduser(cwd))
    if not os.path.exists(folder):
        raise InvalidKey("cwd_not_found")
    if not os.path.isdir(folder):
        raise InvalidKey("cwd_not_directory")
    launched = os.path.abspath(interpreter)
    if not os.path.exists(launched):
        raise InvalidKey("interpreter_not_found")
    enabled = frozenset(helpers)
    if not enabled <= frozenset(HELPERS):
        raise InvalidKey("invalid_helpers")
    ordered = tuple(name for name in HELPERS if name in enabled)
    digest = _digest(
        session_id,
        agent_id,
        folder,
        os.path.realpath(launched),
        environment_prefix(launched),
        *sorted(ordered),
        str(PROTOCOL_VERSION),
    )
    return KernelKey(digest, folder, launched, ordered)


def is_name(value: object) -> bool:
    """Return whether `value` can be the id of a session or an agent: a string that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def environment_prefix(interpreter: str) -> str:
    """Return the nearest parent folder of the unresolved path that holds a ``pyvenv.cfg``, else ``""``.

    The folder itself is resolved, so that two spellings of one environment are one.
    """
    folder = os.path.dirname(interpreter)
    while True:
        if os.path.isfile(os.path.join(folder, "pyvenv.cfg")):
            return os.path.realpath(folder)
        parent = os.path.dirname(folder)
        if parent == folder:
            return ""
        folder = parent


def _digest(*fields: str) -> str:
    """SHA-256 over length-prefixed fields: no two lists of fields look alike when joined."""
    digest = hashlib.sha256()
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
