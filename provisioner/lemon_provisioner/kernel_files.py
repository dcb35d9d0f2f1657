"""The files that a kernel's workspace needs before it starts: the script side, and the connection file.

The kernel may run in any interpreter that has ipykernel, so it gets the script side from the workspace, not from
``site-packages``.  The folder is a program (``python -P <folder>``) and, while it runs, first on ``sys.path``, so that
``multiprocessing`` children can import ``lemon_tools`` as well (where every call is refused).  Beside each source lies
its bytecode for interpreters of the host's own version, never checked for age: compiling would cost 20 ms a start.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import marshal
import os
import sys
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from .workspace import StagingError, write_private

__all__ = ["CONNECTION_NAME", "SHIM_FOLDER", "stage_shim", "write_connection"]

SHIM_FOLDER = "shim"
CONNECTION_NAME = "connection.json"

_ENTRY = "from lemon_shim.kernel.__main__ import main\n\nmain()\n"
_ALIAS = '''"""The helpers of a script; importable in its children, where every call is refused."""
import sys

from lemon_shim import api

sys.modules[__name__] = api
'''
_MODULES = ("__init__", "wire", "api", "pipe", "script", "message", "generations")


def stage_shim(workspace: str) -> str:
    """Write the script side into `workspace` and return the folder to run.  Raises StagingError."""
    root = os.path.join(workspace, SHIM_FOLDER)
    made: set[str] = set()
    for folder, name, data in _staged_files():
        path = os.path.join(root, folder) if folder else root
        if path not in made:
            _make_folder(path)
            made.add(path)
        write_private(path, name, data)
    return root


def write_connection(workspace: str, info: Mapping[str, object]) -> str:
    """Write a connection file of mode 0600 and return its path.

    Not ``jupyter_client``'s function: that one sets the sticky bit on the folder.
    """
    data = {key: value.decode("ascii") if isinstance(value, bytes) else value for key, value in info.items()}
    return write_private(workspace, CONNECTION_NAME, json.dumps(data, indent=2).encode())


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path, 0o700)  # not makedirs: what is there already was planted, and may lead elsewhere
    except OSError as error:
        raise StagingError(f"{error.strerror}: {path}; set TMPDIR to a local folder") from error


@functools.cache
def _staged_files() -> tuple[tuple[str, str, bytes], ...]:
    """Return (folder, name, content) of every staged file."""
    package = files("lemon_shim")
    modules: list[tuple[str, Traversable]] = [("lemon_shim", package / f"{name}.py") for name in _MODULES]
    modules += [
        ("lemon_shim/kernel", entry) for entry in (package / "kernel").iterdir() if entry.name.endswith(".py")
    ]
    staged = [("", "__main__.py", _ENTRY.encode()), *_with_bytecode("", "lemon_tools.py", _ALIAS.encode())]
    for folder, entry in modules:
        staged += _with_bytecode(folder, entry.name, entry.read_bytes())
    return tuple(staged)


def _with_bytecode(folder: str, name: str, source: bytes) -> list[tuple[str, str, bytes]]:
    shown = f"<{folder.replace('/', '.')}.{name}>" if folder else f"<{name}>"
    code = compile(source, shown, "exec", dont_inherit=True, optimize=0)
    pyc = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)
    cached = f"{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
    return [(folder, name, source), (os.path.join(folder, "__pycache__"), cached, pyc)]
