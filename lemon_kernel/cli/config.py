"""``lemon-kernel config``: the effective value of every key, and the source that won."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from traitlets import Bool

from ..config import TABLES, PolicyConfig
from .app import Command

__all__ = ["ConfigApp"]

PROJECT_MARK = "(project file)"


class ConfigApp(Command):
    """Show the settings."""

    command = "config"
    description = """Show the effective value of every key and the source that won.

    Values that come from the project's .lemon/config.toml are marked: whoever wrote the project chose them.
    """

    json = Bool(False, help="Print JSON.").tag(config=True)
    flags: ClassVar[dict[str, object]] = {  # type: ignore[misc]
        **Command.flags,
        "json": ({"ConfigApp": {"json": True}}, "Print JSON."),
    }

    def work(self) -> None:
        """Print the tables, for a person on a terminal or tab-separated for a program."""
        self.no_arguments()
        folder, sources = self.folder, self.layers()
        tables = [table.resolve(sources, cwd=folder, home=os.path.expanduser("~")) for table in TABLES]
        if self.json:
            from json import dumps

            shown = {
                table.table: {
                    key: {
                        "value": value,
                        "source": table.sources[key],
                        "project": table.origins[key].kind == "project",
                    }
                    for key, value in table.values().items()
                }
                for table in tables
            }
            print(dumps(shown, indent=2))
            return
        rows = [
            (
                f"[{table.table}]",
                [
                    (key, _toml(value), table.sources[key], table.origins[key].kind == "project")
                    for key, value in table.values().items()
                ],
            )
            for table in tables
        ]
        if sys.stdout.isatty():
            _draw(rows)
        else:
            for title, lines in rows:
                print(title)
                for key, value, source, project in lines:
                    print(key, value, f"{source} {PROJECT_MARK}" if project else source, sep="\t")
        policy = next(table for table in tables if isinstance(table, PolicyConfig))
        if policy.unreadable is not None:
            print(f"\nEvery tool is denied: {policy.unreadable}")


Row = tuple[str, str, str, bool]


def _draw(tables: list[tuple[str, list[Row]]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, rows in tables:
        table = Table(
            title=Text(title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
        )
        table.add_column("key", style="cyan", no_wrap=True)
        table.add_column("value")
        table.add_column("source", style="dim")
        for key, value, source, project in rows:
            shown = Text(f"{source} {PROJECT_MARK}", style="yellow") if project else Text(source)
            table.add_row(Text(key), Text(value), shown)
        console.print(table)
        console.print()


def _toml(value: object) -> str:
    """Return a value as one would write it in the file."""
    from json import dumps

    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return dumps(value, ensure_ascii=False)
