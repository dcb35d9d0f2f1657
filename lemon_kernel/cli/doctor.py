"""``lemon-kernel doctor``: everything that can stop a run, each with its mend.

An *error* is what would stop a run of ``lemon-kernel run`` or of the agent's tool; it makes the exit status 1.
A *warning* is what a person should know: it stops something else, or it lets somebody else decide.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from lemon_shim.kernel import IPYKERNEL_BELOW, IPYKERNEL_FROM, IPYKERNEL_REQUIREMENT
from traitlets import Bool

from ..config import TABLES, ExecuteCodeConfig, Layer, PolicyConfig
from ..errors import ConfigError, ExecuteCodeError, UsageError
from .app import FAILED, Command
from .install import KERNEL_NAME, packaged_kernelspec

__all__ = ["DoctorApp", "Finding"]

ASK_TIMEOUT_S = 30.0
OLDEST_PYTHON = (3, 9)
RISKY_KEYS = ("enabled", "python_path")
"""What a project's file must not decide unnoticed (behaviour 1.3)."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, how it is, and what mends it (empty where nothing needs mending)."""

    level: Literal["ok", "warning", "error"]
    what: str
    mend: str = ""


class DoctorApp(Command):
    """Look at everything a run needs."""

    command = "doctor"
    description = """Find what can stop a run, and say how to mend it.

    Exit status 1 when a run would fail.
    """

    json = Bool(False, help="Print JSON.").tag(config=True)
    flags: ClassVar[dict[str, object]] = {  # type: ignore[misc]
        **Command.flags,
        "json": ({"DoctorApp": {"json": True}}, "Print JSON."),
    }

    broken_file: str | None = None

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        """Load Jupyter's configuration files; here a broken one is a finding."""
        try:
            super().load_config_file(suppress_errors)
        except ConfigError as error:
            self.broken_file = str(error)

    def work(self) -> None:
        """Print the findings; the status is 1 when one of them is an error."""
        self.no_arguments()
        folder = self.folder
        findings = list(self.examine(folder))
        if any(finding.level == "error" for finding in findings):
            self.status = FAILED
        if self.json:
            print(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            _draw(findings)

    def examine(self, folder: str) -> Iterator[Finding]:
        """Yield the findings for runs in `folder`."""
        home = os.path.expanduser("~")
        sources: list[Layer] = []
        try:
            sources = self.layers()
        except UsageError:
            raise
        except ConfigError as error:
            yield Finding("error", str(error), "correct the file, or move it away")
        if self.broken_file is not None:
            yield Finding("error", self.broken_file, "correct the file, or move it away")
        yield from _files(sources, folder, home)
        config = ExecuteCodeConfig.resolve(sources, cwd=folder, home=home)
        yield from _interpreter(config, folder)
        yield from _staging()
        yield from _kernelspec()


def _files(sources: Sequence[Layer], folder: str, home: str) -> Iterator[Finding]:
    """Say what each file sets; a project's choice of interpreter, or of the tool itself, is a warning."""
    for layer in sources:
        keys = [
            f"{table.table}.{key}"
            for table in TABLES
            if isinstance(found := layer.tables.get(table.__name__), Mapping)
            for key in found
        ]
        if not keys:
            continue
        yield Finding("ok", f"{layer.name or layer.kind} sets {', '.join(keys)}")
        settings = layer.tables.get("ExecuteCodeConfig")
        if layer.kind == "project" and isinstance(settings, Mapping):
            for key in RISKY_KEYS:
                if key in settings:
                    yield Finding(
                        "warning",
                        f"the project's own file {layer.name} sets {key} = {settings[key]!r}",
                        "keep it only if you trust whoever wrote the project; your environment beats it: "
                        f"LEMON_EXECUTE_CODE_{key.upper()}",
                    )
    policy = PolicyConfig.resolve(sources, cwd=folder, home=home)
    if policy.unreadable is not None:
        yield Finding("error", f"every tool is denied: {policy.unreadable}", "correct that value")
    elif (reason := policy.policy().denial_reason("execute_code")) is not None:
        where = sorted({source for source in policy.sources.values() if source != "default"})
        yield Finding("error", reason, f"change [{policy.table}] in {', '.join(where)}")


def _interpreter(config: ExecuteCodeConfig, folder: str) -> Iterator[Finding]:
    """Find the interpreter, ask it who it is, and look for ipykernel."""
    from lemon_provisioner import interpreter

    source = config.sources["python_path"]
    try:
        path = interpreter.resolve(config.resolved_python_path(folder))
    except ValueError as error:
        yield Finding("error", str(error), f"install Python 3, or set python_path (now from: {source})")
        return
    try:
        answer = asyncio.run(interpreter.probe(path, folder, ASK_TIMEOUT_S))
    except interpreter.ProbeError as error:
        yield Finding(
            "error", f"the interpreter does not answer: {error}", "set python_path to one that works"
        )
        return
    version = ".".join(map(str, answer.version))
    if answer.version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Finding(
            "error",
            f"{answer.executable} is Python {version}",
            f"set python_path to Python {oldest} or later",
        )
    else:
        yield Finding("ok", f"interpreter {answer.executable}, Python {version}")
    if _is_script(path):
        yield Finding(
            "warning",
            f"{path} is a shim, a script that starts {answer.executable}: each first run pays for both",
            f'set python_path = "{answer.executable}"',
        )
    yield _ipykernel(answer.executable)


def _is_script(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _ipykernel(executable: str) -> Finding:
    """Session mode and notebooks need ipykernel beside the interpreter; without it calls run isolated."""
    question = "import importlib.metadata as m; print(m.version('ipykernel'))"
    mend = f"{executable} -m pip install '{IPYKERNEL_REQUIREMENT}'"
    try:
        done = subprocess.run(
            [executable, "-c", question],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("warning", f"ipykernel cannot be looked for ({type(error).__name__})", mend)
    version = done.stdout.strip()
    if done.returncode != 0 or not version:
        return Finding("warning", "ipykernel is not there: session mode runs every call isolated", mend)
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not IPYKERNEL_FROM <= parts < IPYKERNEL_BELOW:
        return Finding("warning", f"ipykernel {version} is not one that is supported", mend)
    return Finding("ok", f"ipykernel {version}")


def _staging() -> Iterator[Finding]:
    """Look at TMPDIR: whether it can be used, whether a kernel's sockets fit, and what the dead have left."""
    from lemon_provisioner import reaper, workspace
    from lemon_provisioner.provisioner import MAX_SOCKET_PATH_BYTES

    parent = os.path.abspath(workspace.temporary_folder())
    try:
        root = workspace.private_root()
    except workspace.StagingError as error:
        yield Finding(
            "error", f"no private workspace: {error}", "export TMPDIR=/tmp, or another local folder of yours"
        )
    else:
        kind = workspace.filesystem_type(parent)
        yield Finding("ok", f"TMPDIR {parent} ({kind or 'filesystem unknown'}) can be used")
        socket = os.path.join(root, workspace.KERNEL_PREFIX + "x" * workspace.SUFFIX_LENGTH, "k-5")
        length = len(os.fsencode(socket))
        if length > MAX_SOCKET_PATH_BYTES:
            yield Finding(
                "warning",
                f"a kernel's socket path would have {length} bytes, of at most {MAX_SOCKET_PATH_BYTES}: "
                "kernels listen on TCP with CurveZMQ instead",
                "set TMPDIR to a folder with a shorter path",
            )
        else:
            yield Finding(
                "ok", f"a kernel's socket path has {length} bytes, of at most {MAX_SOCKET_PATH_BYTES}"
            )
    for stale in reaper.stale_roots(parent):
        yield Finding(
            "warning",
            f"{stale.path} was left by process {stale.pid}, which is dead ({len(stale.names)} entries)",
            stale.mend,
        )


def _kernelspec() -> Iterator[Finding]:
    """Compare the kernelspec that Jupyter finds with the packaged one."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    mend = "lemon-kernel install --sys-prefix (or --user)"
    try:
        packaged = _spec(str(packaged_kernelspec()))
    except (ExecuteCodeError, OSError, ValueError) as error:
        yield Finding("warning", f"the packaged kernelspec: {error}", "reinstall lemon-kernel")
        return
    try:
        folder = KernelSpecManager().get_kernel_spec(KERNEL_NAME).resource_dir
        installed = _spec(folder)
    except NoSuchKernel:
        yield Finding(
            "warning", "the kernelspec lemon is not installed: Jupyter does not offer the kernel", mend
        )
        return
    except (OSError, ValueError) as error:
        yield Finding("warning", f"the kernelspec lemon cannot be read: {error}", mend)
        return
    command = installed.get("argv")
    if isinstance(command, list) and command and os.path.isabs(command[0]):
        if not os.access(command[0], os.X_OK):
            yield Finding(
                "warning", f"the kernelspec in {folder} names {command[0]}, which is not there", mend
            )
            return
        # `install` names its interpreter; everything else must be as it was packaged.
        installed = {**installed, "argv": ["python", *command[1:]]}
    if installed != packaged:
        yield Finding("warning", f"the kernelspec in {folder} is not the packaged one", mend)
        return
    yield Finding("ok", f"kernelspec lemon in {folder}")


def _spec(folder: str) -> dict[str, object]:
    with open(os.path.join(folder, "kernel.json"), encoding="utf-8") as file:
        spec: object = json.load(file)
    return spec if isinstance(spec, dict) else {}


_MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("FAIL", "bold red")}


def _draw(findings: Sequence[Finding]) -> None:
    if not sys.stdout.isatty():
        for finding in findings:
            print(f"{_MARKS[finding.level][0]:5} {finding.what}")
            if finding.mend:
                print(f"      -> {finding.mend}")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        console.print(Text(f"{mark:5} ", style=style) + Text(finding.what))
        if finding.mend:
            console.print(Text(f"      -> {finding.mend}", style="cyan"))
