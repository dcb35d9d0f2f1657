"""Importing is cheap, and the public names are exactly those that are promised."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import lemon_kernel

ROOT = pathlib.Path(__file__).parents[2]
DISTRIBUTIONS = {
    "IPython": "ipykernel",
    "opentelemetry": "opentelemetry-api",
    "tornado": "jupyter_client",
    "zmq": "pyzmq",
    "idna": "httpx",
    "websocket": "jupyter_server",
}
"""Modules whose distribution has another name, or comes with the one that is declared."""
HEAVY = "ipykernel IPython zmq jupyter_client traitlets httpx trafilatura rich opentelemetry pathspec psutil regex"
NOT_FOR_A_RUN = "ipykernel IPython zmq httpx trafilatura rich pathspec"


def modules_after(code: str) -> set[str]:
    """Return the top-level names of what `code` has imported in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_the_package_imports_nothing_heavy() -> None:
    """A program that only imports the package pays for none of what it needs later."""
    before, after = modules_after(""), modules_after("import lemon_kernel")

    assert after.isdisjoint(HEAVY.split())
    assert after - before <= {"lemon_kernel", *sys.stdlib_module_names}


def test_a_run_per_call_imports_no_kernel() -> None:
    """The tool with one real run per call needs neither Jupyter's kernel nor the web."""
    code = (
        "import sys\nfrom lemon_kernel import ExecuteCode, ExecuteCodeConfig, ToolPolicy\n"
        "config = ExecuteCodeConfig(enabled=True, python_path=sys.executable)\n"
        "result = ExecuteCode('.', config=config, policy=ToolPolicy()).run_sync({'script': 'print(1)'})\n"
        "assert result.text == '1\\n', result.text"
    )

    assert modules_after(code).isdisjoint(NOT_FOR_A_RUN.split())


def test_public_names_are_there() -> None:
    """Every name of ``__all__`` can be imported, and has a docstring that says what it is."""
    for name in lemon_kernel.__all__:
        value = getattr(lemon_kernel, name)

        assert name == "__version__" or (value.__doc__ or "").strip()


def test_public_names_are_exactly_those() -> None:
    """``dir()`` shows nothing else, a star import gives nothing else, and other names are no attributes."""
    code = "from lemon_kernel import *\nprint(*sorted(name for name in dir() if name[:2] != '__'))"
    star = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )

    assert dir(lemon_kernel) == sorted(lemon_kernel.__all__)
    assert star.stdout.split() == sorted(set(lemon_kernel.__all__) - {"__version__"})
    with pytest.raises(AttributeError, match="module 'lemon_kernel' has no attribute 'Kernel'"):
        _ = lemon_kernel.Kernel


def test_what_tests_import_is_declared() -> None:
    """From a clean checkout every test can be collected: what it imports is a dependency of ours, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    names = {re.split(r"[\[<>=; ]", one)[0].replace("-", "_").lower() for one in declared}
    own = {"lemon_kernel", "lemon_provisioner", "lemon_shim", "lemon_tools", "tests", "benchmarks", "tools"}

    missing = {
        f"{module} in {path.relative_to(ROOT)}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
        for module in [str(name).partition(".")[0]]
        if module not in sys.stdlib_module_names
        and module not in own
        and DISTRIBUTIONS.get(module, module).replace("-", "_").lower() not in names
    }

    assert missing == set()
