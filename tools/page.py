"""What the generators of pages share: write the page, or say whether it is current."""

from __future__ import annotations

import pathlib

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def keep(name: str, text: str, generator: str, arguments: list[str]) -> int:
    """Write `text` to the page `name`; with ``--check`` compare it, and return 1 where it is stale."""
    page = DOCS / name
    if "--check" in arguments:
        current = page.exists() and page.read_text() == text
        print(f"{name} is {'current' if current else 'stale: run ' + generator}")
        return 0 if current else 1
    page.write_text(text)
    return 0
