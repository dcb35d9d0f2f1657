"""What every test stands on: a clean environment of its own, and a private TMPDIR that must end empty."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

SOAK = os.environ.get("LEMON_TEST_SOAK") == "1"

# The machine's own settings must not colour what is tested (CONTRIBUTING, "Tests").
for name in [*os.environ]:
    if name.startswith(("LEMON_", "JUPYTER_", "IPYTHON", "JPY_", "PYTHON", "FORCE_COLOR", "CLICOLOR")):
        del os.environ[name]
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


@pytest.fixture(scope="session", autouse=True)
def private_environment() -> Iterator[None]:
    """HOME, TMPDIR and Jupyter's folders are the test run's own."""
    # directly under /tmp: the path of a kernel's sockets may have 107 bytes
    folder = tempfile.mkdtemp(prefix="lk-", dir="/tmp")
    os.chmod(folder, 0o755)
    changes = {"HOME": "home", "TMPDIR": "tmp", "IPYTHONDIR": "ipython"} | {
        f"JUPYTER_{kind}_DIR": f"jupyter-{kind.lower()}" for kind in ("CONFIG", "DATA", "RUNTIME")
    }
    before = {name: os.environ.get(name) for name in changes}
    for name, part in changes.items():
        path = pathlib.Path(folder, part)
        path.mkdir()
        os.environ[name] = str(path)
    tempfile.tempdir = None
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not SOAK:
        skip = pytest.mark.skip(reason="a long storm: make soak")
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(skip)
