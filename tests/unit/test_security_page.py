"""``docs/security.md`` names, for every claim and every limit, a test that exists."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def test_every_claim_names_an_existing_test() -> None:
    """Three cells, none empty; the last names tests, or says why there can be none."""
    lines = (ROOT / "docs" / "security.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = [row for row in rows if row[0] not in ("claim", "limit", "---")]

    assert len(rows) > 30
    for row in rows:
        assert len(row) == 3, row
        assert all(row), row
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2])
        assert named or row[2] == "by construction", row
        for path, name in named:
            assert (ROOT / path).exists(), (path, row)
            source = (ROOT / path).read_text()
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), (path, name)


def test_the_limits_are_said_where_people_look() -> None:
    """Readme and report page both say that it is no sandbox, and where the whole of it is."""
    for page in ("README.md", "SECURITY.md"):
        text = (ROOT / page).read_text()
        assert "not a sandbox" in text.replace("*", "")
        assert "docs/security.md" in text
