"""``lemon-kernel tool``: the definition that a model would get."""

from __future__ import annotations

import json
import os

from ..config import ExecuteCodeConfig
from .app import Command

__all__ = ["ToolApp"]


class ToolApp(Command):
    """Print the tool's definition as JSON, whether it is enabled or not."""

    command = "tool"
    description = "Print name, description and parameters of the tool, as a model gets them, as JSON."

    def work(self) -> None:
        """Print it."""
        from ..tool import ExecuteCode

        self.no_arguments()
        folder = self.folder
        config = ExecuteCodeConfig.resolve(self.layers(), cwd=folder, home=os.path.expanduser("~"))
        tool = ExecuteCode(folder, config=config)
        definition = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        print(json.dumps(definition, indent=2))
