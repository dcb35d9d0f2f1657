"""What is staged: the prelude is one line wherever it goes, and the joined module is whole."""

from __future__ import annotations

import ast
import importlib.util
import marshal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lemon_provisioner import staging
from lemon_shim.wire import HELPERS

IMPORT = "from lemon_tools import ToolError, read, ls, text, notify, batch"


def staged(script: str) -> str:
    return staging.with_prelude(script, ["ls", "read"])


def test_plain_script() -> None:
    """The import is line 1, in the fixed order, whatever the order of the configuration."""
    assert staged("x = 1\n") == f"{IMPORT}\nx = 1\n"
    assert staged("") == f"{IMPORT}\n"
    assert staging.with_prelude("", []) == "from lemon_tools import ToolError, text, notify, batch\n"
    assert staging.prelude(HELPERS).endswith("read, grep, find, ls, webfetch, text, notify, batch")


@pytest.mark.case(315)
@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("from __future__ import annotations\nx", "from __future__ import annotations; {}"),
        ("from __future__ import annotations; x = 1", "from __future__ import annotations; {}; x = 1"),
        ("from __future__ import annotations  # why\nx", "from __future__ import annotations; {}  # why"),
        ('"""doc"""\nx', '"""doc"""; {}'),
        ('"""doc\nmore"""\nfrom __future__ import (annotations,\n  division)\nx', "  division); {}"),
        ("# c\n\n'doc' 'more'\n\nfrom __future__ import division\n", "from __future__ import division; {}"),
        ("('doc')\nfrom __future__ import division", "from __future__ import division; {}"),
        ("from __future__ import \\\n  division\n1", "  division; {}"),
        ("'d'\nfrom __future__ import division\n'e'\n", "from __future__ import division; {}"),
        ("\f'd'\nx", "\f'd'; {}"),
        ("'\x0c\u2028'\nx", "'\x0c\u2028'; {}"),
        ("'é\U0001f600'; x = 1", "'é\U0001f600'; {}; x = 1"),
        ("'d'\ntype X = int\nf'{'a'}'", "'d'; {}"),  # newer grammar than the host's may be
        ("'d'\nthis is not python(", "'d'; {}"),
    ],
)
def test_head_stays_first(script: str, line: str) -> None:
    """A docstring and future imports stay where Python wants them; the import follows on their last line."""
    result = staged(script)
    assert result.count("\n") == script.count("\n") + 1
    assert result.startswith("# -*- coding: utf-8 -*-")
    assert line.format(IMPORT) in result.split("\n")


@pytest.mark.parametrize(
    "script",
    [
        "x = 'not a docstring'\n'''really'''",
        "f'no docstring {1}'\n",
        "b'no docstring'\n",
        "(1, 2)\n",
        "from futures import x\n",
        "'unterminated",
        "  'indented'\n",
        "# only a comment",
        "'a' + 'b'\n",
    ],
)
def test_everything_else_gets_the_plain_line(script: str) -> None:
    """What does not open with a docstring or future import, or cannot be read, has the import in line 1."""
    assert staged(script) == f"{IMPORT}\n{script}"


def test_line_ends_marks_and_surrogates() -> None:
    """CRLF and CR become LF, a byte order mark goes, surrogates become U+FFFD."""
    assert staged("\ufeffa = 1\r\nb = 2\rc = '\ud800'") == f"{IMPORT}\na = 1\nb = 2\nc = '\ufffd'"


def test_coding_cookies_do_not_matter() -> None:
    """The staged file is UTF-8 for every reader, whatever the script's own first lines declare."""
    for script in ("# -*- coding: latin-1 -*-\nx = 'é'\n", "# coding: latin-1\n'doc'\nx = 'é'\n"):
        names: dict[str, object] = {}
        source = staging.staged_script(script, ["read"]).replace(IMPORT.encode(), b"pass")
        source = source.replace(staging.prelude(["read"]).encode(), b"pass")
        exec(compile(source, "script.py", "exec"), names)  # noqa: S102
        assert names["x"] == "é"


PARTS = st.sampled_from(
    [
        "'doc'",
        '"""a\nb"""',
        "from __future__ import annotations",
        "from __future__ import (\n division)",
        "x = 1",
        "# note",
        "\\\n",
        "\n",
        "; ",
        "(",
        ")",
        "import os",
        "f'{1}'",
        " ",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PARTS, max_size=8).map("".join))
def test_staging_changes_no_meaning(script: str) -> None:
    """A script that compiles still does, one line down and with the same docstring; others do not hang us."""
    result = staged(script)
    assert result.count("\n") == script.count("\n") + 1
    try:
        compile(script, "s", "exec", dont_inherit=True)
        before = ast.parse(script)
    except (SyntaxError, ValueError):
        return
    compile(result, "s", "exec", dont_inherit=True)
    after = ast.parse(result)
    assert ast.get_docstring(after, clean=False) == ast.get_docstring(before, clean=False)
    rest = [node for node in after.body if getattr(node, "module", None) != "lemon_tools"]
    assert [node.lineno for node in rest] == [node.lineno + 1 for node in before.body]
    assert [ast.dump(node) for node in rest] == [ast.dump(node) for node in before.body]


def test_joined_module() -> None:
    """The compiled module is for this magic number, unchecked, and holds no path."""
    data = staging.shim_pyc()
    assert data[:4] == importlib.util.MAGIC_NUMBER
    assert data[4:8] == b"\x01\0\0\0"
    code = marshal.loads(data[16:])
    assert code.co_filename == "<lemon_tools>"
    assert b"lemon_shim" not in data
    compile(staging.shim_source(), "s", "exec")


def test_one_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining refuses a name that two modules define."""
    monkeypatch.setattr(staging, "_MODULES", ("api", "api"))
    with pytest.raises(ValueError, match="a second time"):
        staging._joined()
