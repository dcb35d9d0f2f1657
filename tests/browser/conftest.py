"""JupyterLab on a server of its own, and a page of it in the system's Chromium."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil
import pytest

from ..kernels import wait_until, workspaces
from ..servers import JupyterServer
from .lab import PROJECT, Lab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers give /dev/shm 64 MiB
    # nothing but the page of the test: no updates, no look-ups of the browser's own
    "--no-first-run",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots",
        metavar="FOLDER",
        help="save the pictures of the documentation there: pytest tests/browser --screenshots docs/images",
    )


@pytest.fixture(scope="module")
def chromium() -> str:
    """The path of the system's Chromium."""
    pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'lemon-kernel[browser]'")
    pytest.importorskip("jupyterlab", reason="no JupyterLab: pip install 'lemon-kernel[browser]'")
    for name in CHROMIUM_NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on PATH: tools/ci-prepare installs Debian's")


@pytest.fixture(scope="module")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    """JupyterLab in a small project; when it ends it has left no process, no runtime file and no workspace."""
    folder = tmp_path_factory.mktemp("project")
    for name, content in PROJECT.items():
        (folder / name).write_text(content)
    with JupyterServer(
        folder,
        tmp_path_factory.mktemp("home"),
        lab=True,
        # so that a test can wait until the page's kernel is connected
        arguments=["--LabApp.expose_app_in_browser=True"],
    ) as lab:
        yield lab
        processes = lab.processes()
    wait_until(lambda: not any(psutil.pid_exists(process.pid) for process in processes))
    assert (lab.runtime_files(), workspaces()) == ([], [])


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """A headless browser, whose profile is thrown away."""
    from playwright.sync_api import sync_playwright

    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def lab(server: JupyterServer, browser: Browser, pytestconfig: pytest.Config) -> Iterator[Lab]:
    """A page of JupyterLab that no test has used."""
    screenshots = pytestconfig.getoption("screenshots", None)
    lab = Lab(server, browser, pathlib.Path(screenshots) if screenshots else None)
    try:
        yield lab
    finally:
        lab.close()
