"""The application behind the command line: its sub-commands, and what is common to them.

It is a ``JupyterApp``, so the options that every Jupyter command has work here too.  Three things differ from
the stock class, each because a person would be misled otherwise:

- an option that nobody knows, a section that no class has and a value that cannot be meant are usage errors
  (exit status 2, one line); traitlets warns about the first, ignores the second, and shows a traceback for
  the third;
- a configuration file that is broken stops the command, for it may hold a policy;
- ``jupyter-lemon-*`` programs on PATH are not looked for, and the migration from IPython 3 is not tried: both
  cost every start something.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn

from jupyter_core.application import JupyterApp, NoStart, base_aliases, base_flags
from traitlets import TraitError, Unicode
from traitlets.config.configurable import Configurable
from traitlets.config.loader import ArgumentError, Config, KVArgParseConfigLoader

from .._version import __version__
from ..config import TABLES, Layer, jupyter_files, layers
from ..errors import ExecuteCodeError, UsageError

__all__ = ["FAILED", "OK", "REFUSED", "USAGE", "Command", "LemonApp", "launch"]

OK, FAILED, USAGE, REFUSED = 0, 1, 2, 3


def launch(argv: list[str]) -> int:
    """Run the command that `argv` names and return the exit status."""
    logging.getLogger("lemon_kernel").addHandler(_to_stderr())
    try:
        status = _launch(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone (`lemon-kernel config | head -1`); nothing is left to say.  The
        # null device takes what the interpreter flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def _launch(argv: list[str]) -> int:
    app = LemonApp.instance()
    try:
        app.initialize(argv)
        app.start()
    except NoStart:  # what JupyterApp raises once a sub-command, or --generate-config, is done
        pass
    except UsageError as error:
        return _complain(app, error, USAGE)
    except ExecuteCodeError as error:
        return _complain(app, error, REFUSED)
    command = app.subapp
    return command.status if isinstance(command, Command) else OK


def _complain(app: LemonApp, error: ExecuteCodeError, status: int) -> int:
    command = app.subapp.command if isinstance(app.subapp, Command) else ""
    print(f"lemon-kernel{command and ' '}{command}: {error}", file=sys.stderr)
    return status


def _to_stderr() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("lemon-kernel: %(levelname)s: %(message)s"))
    return handler


class _Loader(KVArgParseConfigLoader):
    """Reads a command line; what it does not understand is an error."""

    def load_config(
        self,
        argv: list[str] | None = None,
        aliases: object = None,
        flags: object = None,
        classes: object = None,
    ) -> Config:
        """Read it, after a look whether every option is known (traitlets only warns, or blames its value)."""
        known = ["h", "V", "help", "help-all", "version"]
        known += [name for names in (*self.aliases, *self.flags) for name in _as_tuple(names)]
        for argument in self.argv:
            if argument == "--":
                break
            option = argument.lstrip("-").partition("=")[0]
            if argument.startswith("-") and option and "." not in option and option not in known:
                raise UsageError(f"unknown option {argument.partition('=')[0]}{_meant(option, known, '--')}")
        try:
            return super().load_config()
        except ArgumentError as error:
            raise UsageError(str(error)) from None

    def _create_parser(self) -> None:
        super()._create_parser()
        self.parser.error = _usage_error  # type: ignore[method-assign]


class _LemonBase(JupyterApp):
    """What the main command and its sub-commands share."""

    name = "jupyter-lemon"
    version = __version__
    classes = TABLES  # type: ignore[assignment]

    def _config_file_name_default(self) -> str:
        return "jupyter_lemon_config"

    def _find_subcommand(self, name: str) -> str:
        return ""

    def migrate_config(self) -> None:
        """Skip what JupyterApp does for users of IPython 3."""

    def parse_command_line(self, argv: Sequence[str] | None = None) -> None:
        """Parse `argv`, and hold every section and key against the classes that exist."""
        super().parse_command_line(list(argv or ()))
        if self.subapp is None:
            self._check_sections()

    def _create_loader(
        self,
        argv: Sequence[str] | None,
        aliases: Mapping[str, str],
        flags: Mapping[str, str],
        classes: Sequence[type[Configurable]] | None,
    ) -> _Loader:
        return _Loader(
            list(argv or ()), dict(aliases), dict(flags), log=self.log, classes=list(classes or ())
        )

    def update_config(self, config: Config) -> None:
        """Take `config` over; a value that a trait of the command itself refuses is the person's to mend."""
        try:
            super().update_config(config)
        except TraitError as error:
            raise UsageError(str(error)) from None

    def _check_sections(self) -> None:
        classes = {base.__name__: base for one in (type(self), *TABLES) for base in one.__mro__[::-1]}
        for section, values in self.cli_config.items():
            owner = classes.get(section)
            if owner is None or not issubclass(owner, Configurable):
                known = [table.__name__ for table in TABLES]
                raise UsageError(f"unknown section {section}{_meant(section, known)}")
            known = owner.class_trait_names(config=True)
            for key in values:
                if key not in known:
                    raise UsageError(f"{section} has no key {key}{_meant(key, known)}")

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        """Load Jupyter's configuration files; one that is broken stops the command."""
        self.jupyter_config = jupyter_files(self.config_file)
        for _, config in reversed(self.jupyter_config):
            self.update_config(Config(config))

    jupyter_config: Sequence[tuple[str, Mapping[str, object]]] = ()


class LemonApp(_LemonBase):
    """The main command: it only knows the names of the others."""

    description = "Run scripts that call an agent's tools, and look after the kernel that keeps their state."
    subcommand_description = "`lemon-kernel COMMAND --help` says what a command takes."
    examples = (
        "lemon-kernel run script.py              # once, in a fresh process\n"
        "lemon-kernel run --session s a.py b.py  # two cells on one kernel\n"
        "lemon-kernel config                     # every setting, and who set it\n"
        "lemon-kernel doctor                     # what would stop a run, and its mend"
    )
    subcommands: ClassVar[dict[str, tuple[str, str]]] = {  # type: ignore[misc]
        "run": ("lemon_kernel.cli.run.RunApp", "Run a script with the helpers at hand."),
        "tool": ("lemon_kernel.cli.tool.ToolApp", "Print the definition of the tool as JSON."),
        "config": ("lemon_kernel.cli.config.ConfigApp", "Show every setting and the source that won."),
        "doctor": ("lemon_kernel.cli.doctor.DoctorApp", "Find what can stop a run, and say how to mend it."),
        "install": ("lemon_kernel.cli.install.InstallApp", "Install the kernelspec for Jupyter."),
    }

    def start(self) -> None:
        """Start the sub-command that was named; without one, say which there are."""
        super().start()
        if self.extra_args:
            name = self.extra_args[0]
            raise UsageError(f"unknown command {name}{_meant(name, list(self.subcommands))}")
        self.print_help()
        raise UsageError(f"which command? One of {', '.join(self.subcommands)}")


class Command(_LemonBase):
    """A sub-command.  `status` is the exit status it has come to."""

    command: ClassVar[str]
    status = OK

    cwd = Unicode(help="The folder to work in; by default the current one.").tag(config=True)

    aliases: ClassVar[dict[str, str]] = {**base_aliases, "cwd": "Command.cwd"}  # type: ignore[misc]
    flags: ClassVar[dict[str, object]] = dict(base_flags)  # type: ignore[misc]

    def start(self) -> None:
        """Do what the command is for."""
        super().start()
        self.work()

    def work(self) -> None:
        """Do the command's work; errors are raised, `status` is set."""
        raise NotImplementedError

    @property
    def folder(self) -> str:
        """The absolute folder to work in; raises :class:`UsageError` when it is none."""
        folder = os.path.abspath(os.path.expanduser(self.cwd or os.getcwd()))
        if not os.path.isdir(folder):
            raise UsageError(f"--cwd {self.cwd}: there is no such folder")
        return folder

    def layers(self) -> list[Layer]:
        """Return the sources of settings, this command line first (behaviour 1.2)."""
        return layers(self.folder, cli=self.cli_config, jupyter_config=self.jupyter_config)

    def no_arguments(self) -> None:
        """Refuse positional arguments."""
        if self.extra_args:
            raise UsageError(f"{self.command} takes no argument {self.extra_args[0]!r}")


def _usage_error(message: str) -> NoReturn:
    raise UsageError(message.replace("__DOT__", "."))


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,)


def _meant(word: str, known: Sequence[str], prefix: str = "") -> str:
    """Return a question that names the nearest of `known`, or nothing."""
    from difflib import get_close_matches

    nearest = get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
