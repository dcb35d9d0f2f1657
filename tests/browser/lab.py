"""What a person does in JupyterLab: open a notebook, run cells, look at what they show."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from ..servers import JupyterServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

PATIENCE_MS = 30_000
"""How long anything on the page may take; two busy cores need seconds for what takes a person's machine none."""

PROJECT = {
    "prices.py": "LEMON = 0.45  # TODO: prices per season\nORANGE = 0.60\n",
    "till.py": "import prices\n\n\ndef total(lemons, oranges):\n    # TODO: discounts\n"
    "    return lemons * prices.LEMON + oranges * prices.ORANGE\n",
    "README.md": "# A fruit stall\n\nWhat a till needs to know.\n",
}
"""A folder with something to find."""

READY = """async () => {
    const context = window.jupyterapp.shell.currentWidget.sessionContext;
    await context.ready;
    await context.session.kernel.info;
}"""

WATCH_RESTART = """() => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    window.restarted = new Promise(resolve => {
        let isRestarting = false;
        kernel.statusChanged.connect((_, status) => {
            isRestarting ||= status === "restarting";
            if (isRestarting && status === "idle") resolve();
        });
    });
}"""


class Lab:
    """One page of JupyterLab."""

    def __init__(self, server: JupyterServer, browser: Browser, screenshots: pathlib.Path | None) -> None:
        self._server = server
        self._screenshots = screenshots
        self.page = browser.new_page(viewport={"width": 1280, "height": 720})
        self.page.set_default_timeout(PATIENCE_MS)

    def open(self, name: str, cells: list[str], kernel_name: str = "lemon") -> None:
        """Write a notebook, open it, and wait until its kernel is connected."""
        notebook = new_notebook(
            cells=[new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"name": kernel_name, "display_name": kernel_name, "language": "python"}},
        )
        nbformat.write(notebook, self._server.folder / name)
        self.page.goto(f"{self._server.url}lab/tree/{name}?reset&token={self._server.token}")
        self.cell(0).wait_for()
        self.page.evaluate(READY)

    def open_launcher(self) -> Locator:
        """Open JupyterLab without a notebook and return its launcher."""
        self.page.goto(f"{self._server.url}lab?reset&token={self._server.token}")
        return self.page.locator(".jp-Launcher")

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def outputs(self, number: int) -> Locator:
        return self.cell(number).locator(".jp-OutputArea-output")

    def start(self, number: int) -> None:
        """Run a cell as a person does, with Shift+Enter; return when its prompt tells of it."""
        prompt = self.cell(number).locator(".jp-InputPrompt").first
        before = prompt.inner_text()
        prompt.click()
        self.page.keyboard.press("Shift+Enter")
        self.page.wait_for_function(
            "([prompt, before]) => prompt.innerText !== before", arg=[prompt.element_handle(), before]
        )

    def run(self, number: int) -> list[str]:
        """Run a cell to its end and return the text of its outputs."""
        self.start(number)
        self.wait_for_end(number)
        return self.texts(number)

    def texts(self, number: int) -> list[str]:
        return [text.strip() for text in self.outputs(number).all_inner_texts()]

    def wait_for_end(self, number: int) -> None:
        """Wait until a cell has its number; a cell that runs has a star for it."""
        self.page.wait_for_function(
            "cell => /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').innerText)",
            arg=self.cell(number).element_handle(),
        )

    def switch_debugger_on(self) -> None:
        """Press the bug of the notebook's toolbar; a press while JupyterLab still asks the kernel does nothing."""
        from playwright.sync_api import TimeoutError as NotYet

        button = ".jp-NotebookPanel-toolbar jp-button.jp-DebuggerBugButton"
        for _ in range(10):
            self.page.locator(button).click()
            try:
                self.page.locator(f"{button}[aria-pressed=true]").wait_for(timeout=PATIENCE_MS / 10)
            except NotYet:
                continue
            return
        raise AssertionError("the debugger cannot be switched on")

    def press(self, command: str) -> None:
        """Click the button of a command on whatever toolbar has it."""
        self.page.locator(f"[data-command='{command}']").first.click()

    def restart(self) -> None:
        """Restart the kernel with the toolbar's button and the dialog that it opens."""
        self.page.evaluate(WATCH_RESTART)
        self.press("notebook:restart-kernel")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.wait_for_function("window.restarted.then(() => true)")

    def screenshot(self, name: str) -> None:
        """Save a picture for the documentation, if they were asked for."""
        if self._screenshots is not None:
            self.page.mouse.move(700, 700)  # no button of a cell under the pointer
            self.page.screenshot(path=self._screenshots / f"{name}.png")

    def close(self) -> None:
        self.page.close()
