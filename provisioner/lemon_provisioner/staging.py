"""What is put into a workspace before a script runs: the script with its first line, and the script-side module.

Two things, both pure: :func:`with_prelude` puts the import of the helpers in front of a script (both modes), and
:func:`shim_source` and :func:`shim_pyc` join the script-side modules into the one file that a per-call
interpreter is started with.

One file, because each import costs a search of ``sys.path`` before every run; compiled, because compiling it
costs 5 ms (recipes 5).  Each workspace gets its own copy rather than a hard link to a shared one: 30 kB are
written in 0.05 ms, and a script that overwrites the file in its workspace changes no other run.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib.util
import io
import marshal
import os
import re
import sys
import tokenize
from collections.abc import Sequence

import lemon_shim
from lemon_shim.wire import CHANNELS, HELPERS, normalise_text

__all__ = [
    "PYC_NAME",
    "SCRIPT_NAME",
    "SOURCE_NAME",
    "shim_pyc",
    "shim_source",
    "staged_script",
    "with_prelude",
]

SCRIPT_NAME = "script.py"
SOURCE_NAME = "lemon_tools.py"
PYC_NAME = "lemon_tools.pyc"

_PACKAGE = os.path.dirname(os.path.abspath(lemon_shim.__file__))
# not importlib.resources, whose imports cost a command line 10 ms: what a kernel is started from are files anyway
_MODULES = ("wire", "api", "pipe", "script")
_SHIM_FILE_NAME = "<lemon_tools>"  # in tracebacks; a path would be that of a workspace
_COMMENT = "# -*- coding: utf-8 -*- the helpers of lemon_tools are imported below"
_MAY_HAVE_HEAD = re.compile(
    r"""(?:[ \t\f]*(?:\#[^\n]*|\\)?\n)*[ \t\f]*(?:[rRuU]?["']|\(|from[ \t\f\\\n]+__future__\b)"""
)


# The script


def prelude(helpers: Sequence[str]) -> str:
    """Return the statement that imports what a script may use, in the order of behaviour 2.4.2."""
    names = ["ToolError", *(name for name in HELPERS if name in helpers), *CHANNELS]
    return f"from lemon_tools import {', '.join(names)}"


def with_prelude(script: str, helpers: Sequence[str]) -> str:
    r"""Return `script` one line longer, importing `helpers` on that line (decision D-7).

    A docstring and ``from __future__`` imports must come first in a module.  Where the script opens with
    them line 1 is a comment and the import follows the last of them, on its line.

    Line ends become ``\n`` and a byte order mark goes, as they do when Python reads a file; surrogates, which
    no file can hold, become U+FFFD (A-28).
    """
    script = normalise_text(script).removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    end = _end_of_head(script)
    if end is None:
        return f"{prelude(helpers)}\n{script}"
    return f"{_COMMENT}\n{script[:end]}; {prelude(helpers)}{script[end:]}"


def staged_script(script: str, helpers: Sequence[str]) -> bytes:
    """Return the bytes of ``script.py``."""
    return with_prelude(script, helpers).encode()


def _end_of_head(script: str) -> int | None:
    """Return where the opening docstring and future imports end, or None if there are none.

    Tokens, not ``ast``: the host's grammar may be older than the interpreter's, and a script of a mebibyte
    must not be parsed whole for its first lines.
    """
    if _MAY_HAVE_HEAD.match(script) is None:
        return None
    end: tuple[int, int] | None = None
    statement: list[tokenize.TokenInfo] = []
    is_first = True
    depth = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(script, newline="\n").readline):
            if token.type in (tokenize.COMMENT, tokenize.NL):
                continue
            if token.type in (tokenize.INDENT, tokenize.DEDENT):  # a blank line with a backslash makes both
                depth += 1 if token.type == tokenize.INDENT else -1
                continue
            if depth:
                break
            if token.type not in (tokenize.NEWLINE, tokenize.ENDMARKER) and token.string != ";":
                statement.append(token)
                continue
            if statement:
                if not (is_first and _is_docstring(statement)) and not _is_future_import(statement):
                    break
                end = statement[-1].end
                is_first = False
                statement = []
    except (tokenize.TokenError, SyntaxError):
        pass  # Python will say so, too; what came before stands
    if end is None:
        return None
    line, column = end
    start = 0
    for _ in range(line - 1):
        start = script.index("\n", start) + 1
    return start + column


def _is_docstring(statement: list[tokenize.TokenInfo]) -> bool:
    words = [token for token in statement if token.string not in ("(", ")")]
    return bool(words) and all(
        token.type == tokenize.STRING and not set("bBfFtT") & set(token.string.partition(token.string[-1])[0])
        for token in words
    )


def _is_future_import(statement: list[tokenize.TokenInfo]) -> bool:
    return [token.string for token in statement[:3]] == ["from", "__future__", "import"]


# The script-side module


@functools.cache
def shim_source() -> str:
    """Return ``lemon_tools`` as source, for interpreters that cannot read this host's compiled form.

    The module stands in it as a string, so that its code has the same file name as the compiled form, not
    a path in the workspace.
    """
    joined = _joined()
    joined.body.insert(1, ast.parse("from __future__ import annotations").body[0])
    source = ast.unparse(joined)
    return f"exec(compile({source!r}, {_SHIM_FILE_NAME!r}, 'exec', dont_inherit=True))\n"


@functools.cache
def shim_pyc() -> bytes:
    """Return ``lemon_tools`` compiled for interpreters with this host's magic number; never checked for age.

    Joining and compiling cost 15 ms, a good part of a command line's start, so the result is kept where Python
    keeps the bytecode of the modules it is made of, by Python's rules: not if ``sys.dont_write_bytecode``,
    and not where the folder cannot be written.  The header's hash is that of the sources.
    """
    sources = b"\0".join(map(_source_of, _MODULES))
    unchecked_hash = (1).to_bytes(4, "little") + importlib.util.source_hash(sources)
    header = importlib.util.MAGIC_NUMBER + unchecked_hash
    kept = os.path.join(_PACKAGE, "__pycache__", f"lemon_tools.{sys.implementation.cache_tag}.pyc")
    try:
        with open(kept, "rb") as file:
            data = file.read()
    except OSError:
        data = b""
    if data.startswith(header):
        return data
    # as a flag, not as a statement: executing that would import the module __future__ before every run
    code = compile(
        _joined(),
        _SHIM_FILE_NAME,
        "exec",
        __future__.annotations.compiler_flag,
        dont_inherit=True,
        optimize=0,
    )
    data = header + marshal.dumps(code)
    if not sys.dont_write_bytecode:
        _keep(kept, data)
    return data


def _keep(path: str, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    part = f"{path}.{os.getpid()}"
    try:
        with open(part, "xb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError:
        try:
            os.unlink(part)
        except OSError:
            pass


def _source_of(name: str) -> bytes:
    with open(os.path.join(_PACKAGE, f"{name}.py"), "rb") as file:
        return file.read()


def _joined() -> ast.Module:
    """Return the script-side modules as one: without comments, their own imports and their docstrings but one.

    Raises ValueError when two of them define one name, which the joined module would silently confuse.
    """
    body: list[ast.stmt] = []
    seen: set[str] = set()
    defined: set[str] = set()
    docstring: ast.stmt | None = None
    for name in _MODULES:
        tree = ast.parse(_source_of(name))
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom) and (
                statement.level or statement.module == "__future__"
            ):
                continue
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstring = statement if name == "api" and docstring is None else docstring
                continue
            if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assign)):
                text = ast.dump(statement)
                if text in seen:
                    continue
                seen.add(text)
            names = _names(statement)
            if twice := names & defined:
                raise ValueError(f"lemon_shim.{name} defines {', '.join(sorted(twice))} a second time")
            defined |= names
            body.append(statement)
    assert docstring is not None
    start = ast.parse("if __name__ == '__main__':\n    main()").body
    return ast.Module([docstring, *body, *start], type_ignores=[])


def _names(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement binds."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()
