"""``lemon-kernel install``: put the kernelspec where Jupyter looks for it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

from traitlets import Bool, Unicode

from ..errors import ExecuteCodeError, UsageError
from .app import Command

__all__ = ["KERNEL_NAME", "InstallApp", "packaged_kernelspec"]

KERNEL_NAME = "lemon"


class InstallApp(Command):
    """Install the kernelspec."""

    command = "install"
    description = """Install the kernelspec "lemon" for Jupyter.

    A plain `pip install` puts it beside its own interpreter already; this is for everything else. --user and
    --prefix name this interpreter in the kernelspec, so that a Jupyter of another environment starts the kernel
    with it.
    """

    user = Bool(False, help="Install for this user.").tag(config=True)
    sys_prefix = Bool(False, help="Install for this interpreter's environment.").tag(config=True)
    prefix = Unicode(help="Install under DIR/share/jupyter/kernels.").tag(config=True)

    aliases: ClassVar[dict[str, str]] = {**Command.aliases, "prefix": "InstallApp.prefix"}  # type: ignore[misc]
    flags: ClassVar[dict[str, object]] = {  # type: ignore[misc]
        **Command.flags,
        "user": ({"InstallApp": {"user": True}}, "Install for this user."),
        "sys-prefix": ({"InstallApp": {"sys_prefix": True}}, "Install for this interpreter's environment."),
    }

    def work(self) -> None:
        """Copy the packaged kernelspec, naming this interpreter where another one's Jupyter may read it."""
        from jupyter_client.kernelspec import KernelSpecManager

        self.no_arguments()
        if self.user + self.sys_prefix + bool(self.prefix) != 1:
            raise UsageError("say where, once: --user, --sys-prefix or --prefix DIR")
        prefix = sys.prefix if self.sys_prefix else os.path.abspath(os.path.expanduser(self.prefix))
        own_environment = not self.user and os.path.realpath(prefix) == os.path.realpath(sys.prefix)
        with tempfile.TemporaryDirectory(prefix="lemon-kernelspec-") as staging:
            # By way of a copy: the source may be the very folder that is about to be replaced.
            folder = Path(staging, KERNEL_NAME)
            shutil.copytree(packaged_kernelspec(), folder)
            if not own_environment:
                spec = json.loads((folder / "kernel.json").read_text())
                spec["argv"][0] = sys.executable
                (folder / "kernel.json").write_text(json.dumps(spec, indent=2) + "\n")
            try:
                where = KernelSpecManager().install_kernel_spec(
                    str(folder), KERNEL_NAME, user=self.user, prefix=None if self.user else prefix
                )
            except OSError as error:
                raise ExecuteCodeError(
                    f"the kernelspec cannot be written: {error}; choose a folder of yours with --user or --prefix"
                ) from None
        print(f"Installed kernelspec {KERNEL_NAME} in {where}")


def packaged_kernelspec() -> Path:
    """Return the folder of the kernelspec that came with this package; raises :class:`ExecuteCodeError`.

    A wheel installs it as data, and its record knows where; in a source tree it lies beside the package.
    """
    tree = Path(__file__).resolve().parents[2] / "kernelspec" / KERNEL_NAME
    if (tree / "kernel.json").is_file():
        return tree
    try:
        files = importlib.metadata.distribution("lemon-kernel").files or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.parts[-3:] == ("kernels", KERNEL_NAME, "kernel.json"):
            found = Path(str(file.locate()))
            if found.is_file():
                return found.resolve().parent
    raise ExecuteCodeError("the packaged kernelspec is missing; reinstall lemon-kernel")
