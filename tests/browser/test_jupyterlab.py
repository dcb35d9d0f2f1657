"""JupyterLab on the kernel ``lemon`` in headless Chromium (issue 6, "A real browser").

``pytest tests/browser --screenshots docs/images`` also saves the pictures of ``docs/jupyterlab.md``.
"""

from __future__ import annotations

import time

import pytest

from .lab import Lab

pytestmark = pytest.mark.timeout(240)

LOOP = """\
for name in ["prices.py", "till.py", "README.md"]:
    notify(f"reading {name}")
    if "TODO" in read(name):
        text(f"{name} has work left")"""

LOOP_FOR_EVER = """\
import time
kept = 1
print("running")
while True:
    ls()
    time.sleep(0.5)  # a cell has 100 calls"""

TODOS = """\
def todos(name):
    lines = read(name).splitlines()
    found = str(lines).count("TODO")
    return found

text(f"{todos('till.py')} to do")"""


def test_launcher(lab: Lab) -> None:
    """The launcher offers the kernel, with its logo."""
    card = lab.open_launcher().locator(
        ".jp-LauncherCard[data-category=Notebook]", has_text="Lemon (agent kernel)"
    )
    card.wait_for()
    logo = card.locator("img")
    lab.page.wait_for_function("logo => logo.complete && logo.naturalWidth > 0", arg=logo.element_handle())
    lab.screenshot("jupyterlab-launcher")

    assert "kernelspecs/lemon/logo-" in (logo.get_attribute("src") or "")


def test_helpers(lab: Lab) -> None:
    """The first helper call in a fresh notebook works; text() is a display, notify() one line that changes."""
    lab.open(
        "helpers.ipynb",
        ["text(grep('TODO', glob='*.py'))", LOOP, "read('/etc/shadow-of-a-file')"],
    )

    found = lab.run(0)
    looped = lab.run(1)
    lab.screenshot("jupyterlab-helpers")
    failed = lab.run(2)

    assert "prices.py:1" in found[0]
    assert looped == ["notify: reading README.md", "prices.py has work left", "till.py has work left"]
    assert "ToolError" in failed[0]


def test_interrupt_and_restart(lab: Lab) -> None:
    """The stop button ends a cell within a helper's loop; helpers work after it, and after a restart."""
    from playwright.sync_api import expect

    lab.open(
        "interrupt.ipynb",
        [LOOP_FOR_EVER, "text(ls())", "print('kept' in globals())"],
    )

    lab.start(0)
    expect(lab.outputs(0).first).to_contain_text("running")
    start = time.monotonic()
    lab.press("notebook:interrupt-kernel")
    lab.wait_for_end(0)
    took_s = time.monotonic() - start
    interrupted = lab.texts(0)
    after_interrupt = lab.run(1)
    kept = lab.run(2)

    assert "KeyboardInterrupt" in interrupted[-1]
    assert (
        took_s < 10
    )  # the second that the kernel has is tested in tests/jupyter; this is a browser on a busy machine
    assert "till.py" in after_interrupt[0]
    assert kept == ["True"]

    lab.restart()
    after_restart = lab.run(1)
    kept = lab.run(2)

    assert "till.py" in after_restart[0]
    assert kept == ["False"]


def test_debugger(lab: Lab) -> None:
    """A breakpoint stops the cell; the panel shows its variables; step and continue do what they say."""
    from playwright.sync_api import expect

    lab.open(
        "debugger.ipynb",
        [TODOS],
    )
    page = lab.page

    lab.switch_debugger_on()
    gutter = lab.cell(0).locator(".cm-breakpoint-gutter .cm-gutterElement")
    gutter.nth(3).click()
    expect(lab.cell(0).locator(".cm-breakpoint-icon")).to_have_count(2)  # one of them only gives the width
    lab.start(0)
    stopped = page.locator(".jp-DebuggerCallstack-bodyList, .jp-DebuggerCallstack-body").first
    expect(stopped).to_contain_text("todos")
    variables = page.locator(".jp-DebuggerVariables")
    expect(variables).to_contain_text("lines")
    lab.screenshot("jupyterlab-debugger")

    lab.press("debugger:next")
    expect(variables).to_contain_text("found")
    lab.press("debugger:continue")
    lab.wait_for_end(0)

    assert lab.texts(0) == ["1 to do"]
