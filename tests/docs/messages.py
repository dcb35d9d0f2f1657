"""What the errors page, the code and the tests say, as sets of message patterns that can be compared.

A pattern is a message with every changing part replaced by :data:`GAP`.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

__all__ = [
    "GAP",
    "PAGE",
    "Row",
    "code_messages",
    "fixed_part",
    "page_rows",
    "texts_of_code",
    "texts_of_tests",
]

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits-and-errors.md"
GAP = "\0"

SOURCES = (
    "shim/lemon_shim/wire.py",
    "shim/lemon_shim/api.py",
    "shim/lemon_shim/pipe.py",
    "shim/lemon_shim/kernel/bridge.py",
    "lemon_kernel/tool.py",
    "lemon_kernel/toolset.py",
    "lemon_kernel/run.py",
    "lemon_kernel/per_call.py",
    "lemon_kernel/result.py",
    "lemon_kernel/policy.py",
    "lemon_kernel/approvals.py",
    "lemon_kernel/config.py",
    "lemon_kernel/notebook.py",
    "lemon_kernel/hostloop.py",
    "lemon_kernel/session/registry.py",
    "lemon_kernel/cli/app.py",
    "lemon_kernel/cli/run.py",
    "lemon_kernel/cli/install.py",
    "lemon_kernel/bridge/dispatch.py",
    "lemon_kernel/bridge/ledger.py",
    "lemon_kernel/bridge/comm.py",
    "provisioner/lemon_provisioner/interpreter.py",
    "provisioner/lemon_provisioner/workspace.py",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "lemon_kernel" / "helpers").glob("*.py")),
)
"""Where the messages that people, models and scripts can see are made."""

FOR_PROGRAMMERS = frozenset({"__repr__", "_question"})
"""Functions whose texts are no messages."""


def fixed_part(pattern: str) -> str:
    """Return the longest piece of `pattern` that does not change."""
    return max(pattern.split(GAP), key=len).strip()


class Row:
    """One row of a table on the page whose first column is a message."""

    def __init__(self, section: str, message: str, rest: list[str]) -> None:
        self.section = section
        self.message = message
        self.pattern = re.sub(r"<[^<>]+>", GAP, message)
        self.rest = rest

    def __repr__(self) -> str:
        return self.message


def page_rows() -> list[Row]:
    """Return the rows of the tables that start with a column ``message``."""
    rows, section, is_message_table = [], "", False
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        if not line.startswith("|"):
            is_message_table = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] in ("message", "reason"):
            is_message_table = True
        elif is_message_table and not cells[0].startswith("---"):
            rows.append(Row(section, cells[0].strip("`"), cells[1:]))
    return rows


def _text(node: ast.AST) -> str | None:
    """Return the pattern of a string expression, None for anything else."""
    if isinstance(node, ast.Constant):
        value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
        return value if isinstance(value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else GAP
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is right is None else (left or GAP) + (right or GAP)
    return None


def _strings(node: ast.AST) -> Iterator[str]:
    """Yield the outermost string expressions in `node` that are no docstring, annotation or log record."""
    text = _text(node)
    if text is not None:
        yield text
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Call) and (_name(node.func) == "cast" or _is_logging(node.func)):
        return
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children = [] if node.name in FOR_PROGRAMMERS else [*node.decorator_list, *node.body]
    elif isinstance(node, ast.AnnAssign):
        children = [] if node.value is None else [node.value]
    elif isinstance(node, ast.ClassDef):  # what stands in a class itself is help for `--help` and the docs
        children = [part for part in node.body if not isinstance(part, ast.Assign)]
    for child in children:
        yield from _strings(child)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_logging(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and _name(function.value) in ("log", "logger", "_log")


def code_messages() -> dict[str, str]:
    """Return pattern -> the file it stands in, for every text of :data:`SOURCES` that has several words."""
    found: dict[str, str] = {}
    for source in SOURCES:
        for text in _strings(ast.parse((ROOT / source).read_text())):
            if " " in text.strip() and len(fixed_part(text)) >= 6:
                found.setdefault(text, source)
    return found


def texts_of_code() -> list[str]:
    """Return every text of the sources, whatever it is."""
    texts: list[str] = []
    for source in (*SOURCES, "lemon_kernel/output.py"):
        texts += _strings(ast.parse((ROOT / source).read_text()))
    return texts


def texts_of_tests() -> list[str]:
    """Return every string expression of the tests, docstrings and the tests of this folder excepted."""
    texts: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name in ("messages.py", "test_errors_page.py"):
            continue
        texts += _strings(ast.parse(path.read_text()))
    return texts
