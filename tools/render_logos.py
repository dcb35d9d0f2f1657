"""Render the kernelspec's PNG logos from its SVG, in the system's Chromium through Playwright (extra ``browser``)."""

from __future__ import annotations

import pathlib
import shutil
import sys

from playwright.sync_api import sync_playwright

FOLDER = pathlib.Path(__file__).parent.parent / "kernelspec" / "lemon"
SIZES_PX = (32, 64)


def main() -> int:
    """Write ``logo-32x32.png`` and ``logo-64x64.png``; transparent where the drawing is not."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no chromium on PATH: tools/ci-prepare installs Debian's", file=sys.stderr)
        return 1
    svg = (FOLDER / "logo-svg.svg").read_text()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for size in SIZES_PX:
            page = browser.new_page(viewport={"width": size, "height": size})
            page.set_content(
                f"<style>body{{margin:0}}svg{{display:block;width:{size}px;height:{size}px}}</style>{svg}"
            )
            page.screenshot(path=FOLDER / f"logo-{size}x{size}.png", omit_background=True)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
