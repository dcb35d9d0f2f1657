"""What a user may set, where each value came from, and what happens to a value that cannot be used.

Three tables (behaviour 1.1, 1.4), each a traitlets class with one trait per key:

=========================================  ==========================  ==================
TOML                                       class                       environment
=========================================  ==========================  ==================
``[runtime.tools.execute_code]``           :class:`ExecuteCodeConfig`  ``LEMON_EXECUTE_CODE_<KEY>``
``[runtime.tools.policy]``                 :class:`PolicyConfig`       ``LEMON_POLICY_<KEY>``
``[runtime.tools.web.fetch]``              :class:`WebFetchConfig`     ``LEMON_WEB_FETCH_<KEY>``
=========================================  ==========================  ==================

Why the traits do not parse for themselves, as traits usually do.  The usual machinery knows one source (a
``Config``), raises on the first bad value, and forgets where a good one came from.  Here a bad value must be
*skipped* and the next of six sources asked; what is wrong with it depends on where it stood (``yes`` is true
in the environment and nothing in a file); and both `lemon-kernel config` and the message "execute_code is
disabled by <source>" need to know who won.  So the sources are a list of :class:`Layer`, strongest first, and
each trait is the *rule* of its key: :meth:`Key.read` turns a raw value into the setting or says why not.
Traitlets still gives what it is good at: ``--help-all``, ``--generate-config``, ``--ExecuteCodeConfig.x=``.

What can still surprise: Jupyter's Python configuration files are executed when they are read, as everywhere in
Jupyter; and a value set there loses against every TOML file (behaviour 1.2).
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Generic, Literal, NamedTuple, NoReturn, Self, TypeVar, cast

from lemon_shim.wire import HELPERS
from traitlets import TraitType
from traitlets.config.configurable import Configurable

from .errors import ConfigError, UsageError
from .policy import PROFILES, ToolPolicy

__all__ = [
    "ENVIRONMENT_PREFIXES",
    "TABLES",
    "ExecuteCodeConfig",
    "Layer",
    "PolicyConfig",
    "Source",
    "WebFetchConfig",
    "jupyter_files",
    "layers",
]

log = logging.getLogger("lemon_kernel.config")

SourceKind = Literal["argument", "command line", "environment", "project", "user", "jupyter", "default"]
KernelMode = Literal["per_call", "session"]

MAX_INTEGER = 2**31 - 1
PROJECT_FILE = os.path.join(".lemon", "config.toml")

T = TypeVar("T")


class Source(str):
    """The place a value came from, as a message names it; `kind` says which of the sources it is."""

    __slots__ = ("kind",)
    kind: SourceKind

    def __new__(cls, kind: SourceKind, text: str) -> Self:
        self = super().__new__(cls, text)
        self.kind = kind
        return self


class Layer(NamedTuple):
    """One source of settings: what each class's table holds there.

    `tables` maps class names to tables.  A table that is there and is no table of keys is kept as it is, so
    that the reader can complain.  `name` is the file, where there is one.
    """

    kind: SourceKind
    tables: Mapping[str, object]
    name: str = ""

    def source(self, owner: str, key: str) -> Source:
        if self.kind == "environment":
            return Source(self.kind, f"environment variable {ENVIRONMENT_PREFIXES[owner]}{key.upper()}")
        if self.kind == "command line":
            return Source(self.kind, f"command line option --{owner}.{key}")
        return Source(self.kind, self.name or self.kind)


class _Reading:
    """Where a raw value stands while its rule looks at it, and what the rule has to say about it."""

    def __init__(self, kind: SourceKind, cwd: str, home: str) -> None:
        self.kind = kind
        self.cwd = cwd
        self.home = home
        self.complaints: list[str] = []

    @property
    def typed(self) -> bool:
        """Whether values are words a person typed into a string: environment and command line."""
        return self.kind in ("environment", "command line")


class _Unusable(Exception):
    """A value is skipped, with a warning that says why; the next source is asked."""


class _Absent(Exception):
    """A value counts as not there; the next source is asked."""


def _show(value: object) -> str:
    """Return `value` for a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- the kinds of values (behaviour 1.2) -----------------------------------------------------------------


class Key(TraitType[T, T], Generic[T]):
    """A trait that is the rule of one key: it reads raw values, and its instances never change."""

    def __init__(self, default: T, help: str) -> None:
        super().__init__(default_value=default, read_only=True, help=help)
        self.tag(config=True)

    def read(self, raw: object, reading: _Reading) -> T:
        """Return the setting that `raw` stands for, or raise `_Unusable` or `_Absent`."""
        raise NotImplementedError

    @property
    def unset_value(self) -> T:
        """The setting when no source says anything."""
        return cast(T, self.default_value)

    @property
    def unusable_value(self) -> T:
        """The setting when sources spoke and none of them was usable."""
        return self.unset_value


class PositiveInt(Key[int]):
    """A whole number, brought into 1 .. 2**31-1; decimal strings count, nothing else does (D-2)."""

    info_text = "a whole number"

    def read(self, raw: object, reading: _Reading) -> int:
        if isinstance(raw, str):
            digits = raw.strip()
            if not re.fullmatch(r"[+-]?[0-9]+", digits):
                raise _Unusable("is not a whole number")
            if len(digits) > 20:  # int() refuses thousands of digits, and the bound cuts these anyway
                return 1 if digits[0] == "-" or not digits.strip("+0") else MAX_INTEGER
            raw = int(digits)
        if type(raw) is not int:
            raise _Unusable("is not a whole number")
        return min(max(raw, 1), MAX_INTEGER)


class Switch(Key[bool]):
    """True or false; words like ``yes`` count only where a person types words.  Unusable means false."""

    info_text = "true or false"

    def read(self, raw: object, reading: _Reading) -> bool:
        if type(raw) is bool:
            return raw
        if type(raw) is int and raw in (0, 1):
            return raw == 1
        if isinstance(raw, str):
            word = raw.strip().lower()
            if word in ("true", "1") or (reading.typed and word in ("yes", "on")):
                return True
            if word in ("false", "0") or (reading.typed and word in ("no", "off")):
                return False
        raise _Unusable("is neither true nor false")

    @property
    def unusable_value(self) -> bool:
        return False


class Mode(Key[KernelMode]):
    """``session`` when exactly that is said; whatever else a source says is ``per_call`` (seed, "Configuration")."""

    info_text = "'per_call' or 'session'"

    def read(self, raw: object, reading: _Reading) -> KernelMode:
        word = raw.strip() if isinstance(raw, str) else raw
        if word == "session":
            return "session"
        if word != "per_call":
            reading.complaints.append("is neither 'per_call' nor 'session' and means 'per_call'")
        return "per_call"


class HelperNames(Key[tuple[str, ...]]):
    """A selection of the helpers, in the order given; empty means all five, only unknown names mean none."""

    info_text = "names of helpers"

    def read(self, raw: object, reading: _Reading) -> tuple[str, ...]:
        if isinstance(raw, str):
            items: Sequence[object] = re.split("[,:]", raw)
        elif isinstance(raw, (list, tuple)):
            items = raw
        else:
            items = ()
            if raw is not None:
                reading.complaints.append("is not a list of helper names and means all of them")
        if any(not isinstance(item, str) for item in items):
            reading.complaints.append("holds things that are not names of helpers")
        names = [item.strip() for item in items if isinstance(item, str) and item.strip()]
        if not names:
            if reading.kind == "environment":
                raise _Absent
            return HELPERS
        unknown = [name for name in names if name not in HELPERS]
        if unknown:
            reading.complaints.append(f"names no helper with {', '.join(map(_show, unknown[:5]))}")
        return tuple(dict.fromkeys(name for name in names if name in HELPERS))


class InterpreterPath(Key[str]):
    """An absolute path, or empty for "look up python3 on PATH"; relative ones start at the working folder."""

    info_text = "a path"

    def read(self, raw: object, reading: _Reading) -> str:
        if isinstance(raw, os.PathLike) and reading.kind == "argument":
            raw = os.fspath(raw)
        if raw is None:
            return ""
        if not isinstance(raw, str) or "\0" in raw:
            raise _Unusable("is not a path")
        path = raw.strip()
        if path == "~" or path.startswith("~/"):
            path = reading.home + path[1:]
        elif path.startswith("~"):
            path = os.path.expanduser(path)
        return os.path.join(reading.cwd, path) if path else ""


class Names(Key[tuple[str, ...]]):
    """A list of names; a string is split at commas (and, for tool names, colons)."""

    info_text = "a list of names"

    def __init__(self, help: str, separators: str = ",") -> None:
        super().__init__((), help)
        self.separators = separators

    def read(self, raw: object, reading: _Reading) -> tuple[str, ...]:
        items = re.split(f"[{self.separators}]", raw) if isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)) or any(not isinstance(item, str) for item in items):
            raise _Unusable("is not a list of names")
        names = tuple(dict.fromkeys(item.strip() for item in items if item.strip()))
        if not names and reading.kind == "environment":
            raise _Absent
        return names


class Allowed(Key[Literal["all"] | tuple[str, ...]]):
    """``"all"`` or a list of tool names; an empty list allows nothing (behaviour 4.1)."""

    info_text = "'all' or a list of tool names"

    def read(self, raw: object, reading: _Reading) -> Literal["all"] | tuple[str, ...]:
        if isinstance(raw, str):
            if raw.strip() == "all":
                return "all"
            raw = re.split("[,:]", raw)
        if not isinstance(raw, (list, tuple)) or any(not isinstance(item, str) for item in raw):
            raise _Unusable("is neither 'all' nor a list of tool names")
        return tuple(dict.fromkeys(item.strip() for item in raw if item.strip()))


ApprovalMode = Literal["always", "never"]


class Approvals(Key[Mapping[str, ApprovalMode]]):
    """Tool name -> whether a person is asked; whatever does not clearly say never counts as always (D-8)."""

    info_text = "a table of tool = mode"

    def read(self, raw: object, reading: _Reading) -> Mapping[str, ApprovalMode]:
        if isinstance(raw, str) and reading.kind == "command line":
            pairs = [item.partition("=") for item in raw.split(",") if item.strip()]
            if any(not equals for _, equals, _ in pairs):
                raise _Unusable("is not a list of tool=mode")
            raw = {tool: mode for tool, _, mode in pairs}
        if not isinstance(raw, Mapping) or any(not isinstance(tool, str) for tool in raw):
            raise _Unusable("is not a table of tool = mode")
        return {str(tool).strip(): self._mode(mode) for tool, mode in raw.items()}

    @staticmethod
    def _mode(mode: object) -> ApprovalMode:
        if isinstance(mode, Mapping):
            mode = mode.get("mode")
        if isinstance(mode, str):
            mode = mode.strip()
        return "never" if mode is False or mode in ("never", "false", "none") else "always"


class Profile(Key[str]):
    """The name of a profile, or empty for none (behaviour 4.1)."""

    info_text = "the name of a profile"

    def read(self, raw: object, reading: _Reading) -> str:
        name = raw.strip() if isinstance(raw, str) else None
        if name is not None and (not name or name in PROFILES):
            return name
        raise _Unusable(f"is no profile (there are {', '.join(PROFILES)})")


# --- the tables --------------------------------------------------------------------------------------------


class _Table(Configurable):
    """A table of settings that is complete once it is made: every key has a value and a source.

    Constructed directly (``ExecuteCodeConfig(enabled=True)``), the arguments are read by the rules for files
    and every other key has its default.  An unknown name is a ``TypeError``.
    """

    table: ClassVar[str]
    """The TOML table that holds the keys."""

    def __init__(self, **values: object) -> None:
        super().__init__()
        unknown = [name for name in values if name not in self._keys()]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no key {unknown[0]!r}")
        self._resolve([Layer("argument", {type(self).__name__: values})], "", os.path.expanduser("~"))

    @classmethod
    def load(
        cls,
        cwd: str | os.PathLike[str],
        *,
        environ: Mapping[str, str] | None = None,
        home: str | os.PathLike[str] | None = None,
        cli: Mapping[str, object] | None = None,
        jupyter_config: Mapping[str, object] | Sequence[tuple[str, Mapping[str, object]]] | None = None,
    ) -> Self:
        """Return the table as the sources of behaviour 1.2 give it for work in the folder `cwd`.

        `environ` and `home` default to this process's.  `cli` is a command line's configuration (class name
        -> table); a bad value in it is a :class:`UsageError`.  `jupyter_config` is a configuration that was
        loaded already, ``{}`` for none; by default Jupyter's configuration files are looked up.

        Raises :class:`ConfigError` when a file cannot be read or is not TOML.
        """
        folder = os.path.abspath(cwd)
        return cls.resolve(
            layers(folder, environ=environ, home=home, cli=cli, jupyter_config=jupyter_config),
            cwd=folder,
            home=_home(environ, home),
        )

    @classmethod
    def resolve(cls, layers: Sequence[Layer], *, cwd: str, home: str) -> Self:
        """Return the table that `layers` (strongest first) give."""
        self = cls()
        self._resolve(layers, cwd, home)
        return self

    def with_values(self, **values: object) -> Self:
        """Return a copy in which `values` stand as if they had been given to the constructor."""
        other = type(self)(**values)
        for name in self._keys():
            if name not in values:
                other.set_trait(name, getattr(self, name))
                other._sources[name] = self._sources[name]
        return other

    @property
    def sources(self) -> dict[str, str]:
        """Key -> the source that won, as a message names it."""
        return dict(self._sources)

    @property
    def origins(self) -> dict[str, Source]:
        """Key -> the source that won, with its kind."""
        return dict(self._sources)

    def values(self) -> dict[str, object]:
        """Return key -> effective value, in the order of the documentation."""
        return {name: getattr(self, name) for name in self._keys()}

    def __repr__(self) -> str:
        said = {name: value for name, value in self.values().items() if self._sources[name].kind != "default"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    @classmethod
    def _keys(cls) -> Mapping[str, Key[object]]:
        """Return the keys of the table, in the order in which they are written in the class."""
        found = cls.__dict__.get("_keys_cache")
        if found is None:
            found = {name: trait for name, trait in vars(cls).items() if isinstance(trait, Key)}
            cls._keys_cache = found
        return cast("Mapping[str, Key[object]]", found)

    _keys_cache: ClassVar[Mapping[str, Key[object]]]

    def _resolve(self, layers: Sequence[Layer], cwd: str, home: str) -> None:
        self._sources: dict[str, Source] = {}
        owner = type(self).__name__
        tables = list(self._tables(layers))
        for name, key in self._keys().items():
            rejected: list[str] = []
            for layer, table in tables:
                if name not in table:
                    continue
                source = layer.source(owner, name)
                reading = _Reading(layer.kind, cwd, home)
                raw = _plain(table[name])
                try:
                    value = key.read(raw, reading)
                except _Absent:
                    continue
                except _Unusable as reason:
                    self._reject(name, source, f"{_show(raw)} {reason}")
                    rejected.append(f"{_show(raw)} from {source} {reason}")
                    continue
                for complaint in reading.complaints:
                    if layer.kind == "command line":
                        raise UsageError(f"{source}: {_show(raw)} {complaint}")
                    log.warning("%s.%s: %s from %s %s", self.table, name, _show(raw), source, complaint)
                break
            else:
                value = key.unusable_value if rejected else key.unset_value
                source = Source("default", "default")
            if rejected:
                self._warn_rejected(name, rejected, f"{value!r} from {source} applies")
            self.set_trait(name, value)
            self._sources[name] = source

    def _warn_rejected(self, name: str, rejected: Sequence[str], outcome: str) -> None:
        log.warning("%s.%s: skipped %s; %s", self.table, name, "; ".join(rejected), outcome)

    def _tables(self, layers: Sequence[Layer]) -> Iterator[tuple[Layer, Mapping[str, object]]]:
        """Yield the layers that hold a table for this class; complain about things that are no table."""
        owner = type(self).__name__
        for layer in layers:
            if owner not in layer.tables:
                continue
            table = layer.tables[owner]
            if not isinstance(table, Mapping):
                self._reject("", Source(layer.kind, layer.name), f"{_show(table)} is not a table")
                log.warning(
                    "%s: %s from %s is not a table and is skipped", self.table, _show(table), layer.name
                )
                continue
            for name in table:
                if name not in self._keys():
                    source = layer.source(owner, str(name))
                    self._reject(str(name), source, "there is no such key")
                    log.warning("%s.%s: there is no such key (in %s)", self.table, name, source)
            yield layer, table

    def _reject(self, name: str, source: Source, reason: str) -> None:
        """Take note of a value that cannot be used; on a command line it is the person's to mend."""
        if source.kind == "command line":
            raise UsageError(f"{source}: {reason}")


class ExecuteCodeConfig(_Table):
    """Settings of the tool ``execute_code`` (seed, "Configuration"; behaviour 1.1)."""

    table = "runtime.tools.execute_code"

    enabled = Switch(False, "Whether the agent's tool is registered at all.")
    python_path = InterpreterPath(
        "",
        "The interpreter that runs scripts; empty means python3 on PATH. "
        "A relative path starts at the working folder, ~ is the home folder.",
    )
    timeout_ms = PositiveInt(
        120_000, "Wall-time cap of one run in milliseconds, waiting in a queue included."
    )
    max_rpc_calls = PositiveInt(100, "Helper calls that one run may make.")
    max_rpc_result_bytes = PositiveInt(5_242_880, "Bytes of helper results that one run may consume.")
    max_output_bytes = PositiveInt(50_000, "Bytes of stdout and stderr that are returned as diagnostics.")
    max_text_bytes = PositiveInt(65_536, "JSON-encoded bytes of text() blocks that one run may emit.")
    max_parallel_rpc = PositiveInt(4, "Helper calls that are dispatched at the same time.")
    tools = HelperNames(
        HELPERS,
        "The helpers that scripts get, a subset of read, grep, find, ls, webfetch; an empty list means all "
        "five, a list of unknown names none.",
    )
    kernel_mode = Mode(
        "per_call", "'per_call' or 'session'; only exactly 'session' keeps a live kernel between calls."
    )
    kernel_idle_timeout_ms = PositiveInt(1_800_000, "Milliseconds after which an idle kernel is stopped.")
    max_live_kernels = PositiveInt(16, "Kernels that may live at once; idle ones give way, least used first.")
    max_queued_cells_per_kernel = PositiveInt(8, "Cells that may wait behind a kernel's active one.")

    def resolved_python_path(self, cwd: str) -> str:
        """Return the absolute path of the configured interpreter for work in `cwd`, empty for none.

        What `load` returns is absolute already; a relative path given to the constructor waits for its
        folder until here.
        """
        return os.path.join(cwd, self.python_path) if self.python_path else ""

    @property
    def disabled_by(self) -> str | None:
        """The source that says ``enabled = false`` in so many words (environment or TOML), or None.

        Such a source switches the helpers of front-end kernels off too (behaviour 1.3).
        """
        source = self._sources["enabled"]
        explicit = source.kind in ("environment", "project", "user")
        return str(source) if explicit and not self.enabled else None


class PolicyConfig(_Table):
    """Which tools an agent may use, and which of them a person is asked about (behaviour 1.4, 4.1).

    A value that cannot be read is never skipped: `unreadable` then says which one and where, and whoever
    applies the policy denies everything with that message (D-8).  A key that does not exist counts as one:
    a mistyped ``deny`` must not allow.
    """

    table = "runtime.tools.policy"

    allow = Allowed("all", "'all', or the list of tools that are allowed; an empty list allows none.")
    deny = Names("Tools that are denied; beats allow.", ",:")
    blocked_tools = Names("Tools that are denied whatever else is said.", ",:")
    require_approval = Names("Tools that a person is asked about at each call.", ",:")
    approvals = Approvals(
        {},
        "Tool = mode, 'always' or 'never'; an entry in require_approval beats 'never'. No environment name.",
    )
    profile = Profile("", f"A profile: one of {', '.join(PROFILES)}.")

    unreadable: str | None = None
    """Why everything is denied: ``tool policy cannot be read: <key> from <source> ...``, or None."""
    unreadable_at: tuple[str, Source] | None = None
    """The key and the source that `unreadable` names, for a message that says what to mend where."""

    def policy(self) -> ToolPolicy:
        """Return the policy that the table stands for; an unreadable one denies everything."""
        if self.unreadable is not None:
            return ToolPolicy.unreadable(self.unreadable)
        return ToolPolicy(**self.values())

    def decided_by(self, tool: str) -> tuple[str, Source]:
        """Return the key that denies `tool`, or that has a person asked about it, and who set that.

        For a message that says what to change where; the order is that of behaviour 4.1.
        """
        if self.unreadable_at is not None:
            return self.unreadable_at
        policy = self.policy()
        if tool in policy.blocked_tools:
            key = "blocked_tools"
        elif tool in policy.deny:
            key = "deny"
        elif not isinstance(policy.allow, str) and tool not in policy.allow:
            key = "allow"
        elif not policy.allowed(tool):
            key = "profile"
        else:
            key = "require_approval" if tool in policy.require_approval else "approvals"
        return f"{self.table}.{key}", self._sources[key]

    def _resolve(self, layers: Sequence[Layer], cwd: str, home: str) -> None:
        self.unreadable = self.unreadable_at = None
        super()._resolve(layers, cwd, home)

    def _reject(self, name: str, source: Source, reason: str) -> None:
        super()._reject(name, source, reason)
        if self.unreadable is None:
            key = f"{self.table}.{name}" if name else self.table
            self.unreadable = f"tool policy cannot be read: {key} from {source}: {reason}"
            self.unreadable_at = (key, source)

    def _warn_rejected(self, name: str, rejected: Sequence[str], outcome: str) -> None:
        log.warning(
            "%s.%s: %s; every tool is denied until this is mended", self.table, name, "; ".join(rejected)
        )


class WebFetchConfig(_Table):
    """Settings of the helper ``webfetch`` (behaviour 1.4, 3.6)."""

    table = "runtime.tools.web.fetch"

    enabled = Switch(True, "Whether webfetch fetches anything.")
    max_chars = PositiveInt(20_000, "Characters of a page that are returned when the call does not say.")
    max_bytes = PositiveInt(10_485_760, "Bytes of a decoded body that are read.")
    timeout_ms = PositiveInt(30_000, "Milliseconds for a whole fetch, name resolution included.")
    allow_private_network = Switch(False, "Whether addresses of private networks may be fetched.")
    allowed_hostnames = Names("Host names that may be fetched although they are in a private network.")


TABLES: tuple[type[_Table], ...] = (ExecuteCodeConfig, PolicyConfig, WebFetchConfig)

ENVIRONMENT_PREFIXES = {
    "ExecuteCodeConfig": "LEMON_EXECUTE_CODE_",
    "PolicyConfig": "LEMON_POLICY_",
    "WebFetchConfig": "LEMON_WEB_FETCH_",
}


# --- the sources -------------------------------------------------------------------------------------------


def layers(
    cwd: str | os.PathLike[str],
    *,
    environ: Mapping[str, str] | None = None,
    home: str | os.PathLike[str] | None = None,
    cli: Mapping[str, object] | None = None,
    jupyter_config: Mapping[str, object] | Sequence[tuple[str, Mapping[str, object]]] | None = None,
) -> list[Layer]:
    """Return every source that says something, strongest first (behaviour 1.2); arguments as in `load`."""
    found = []
    if cli:
        found.append(Layer("command line", _sections(cli)))
    found.append(Layer("environment", _environment(os.environ if environ is None else environ)))

    folder = os.path.abspath(cwd)
    home_folder = _home(environ, home)
    project = os.path.join(folder, PROJECT_FILE)
    user = os.path.join(home_folder, PROJECT_FILE)
    # Work in the home folder itself: its file is the user's own, not a project's.
    if os.path.realpath(project) != os.path.realpath(user):
        found.append(Layer("project", _file(project), project))
    found.append(Layer("user", _file(user), user))

    if jupyter_config is None:
        jupyter_config = jupyter_files()
    if isinstance(jupyter_config, Mapping):
        jupyter_config = [("Jupyter configuration", jupyter_config)] if jupyter_config else []
    found += [Layer("jupyter", _sections(config), name) for name, config in jupyter_config]
    return found


def jupyter_files(config_file: str = "") -> list[tuple[str, Mapping[str, object]]]:
    """Return Jupyter's configuration files that exist, strongest first, each with what it sets.

    They are ``jupyter_lemon_config`` and ``jupyter_config``, ``.json`` before ``.py``, on Jupyter's
    configuration path.  A `config_file` replaces the former.  Raises :class:`ConfigError` for one that is
    broken: it may hold a policy, and nothing fails open.
    """
    from jupyter_core.paths import jupyter_config_path

    path = jupyter_config_path()
    candidates = [config_file] if config_file else []
    for base in ("jupyter_config",) if config_file else ("jupyter_lemon_config", "jupyter_config"):
        candidates += [os.path.join(folder, base + end) for folder in path for end in (".json", ".py")]
    return [(file, _jupyter_file(file)) for file in candidates if file == config_file or os.path.isfile(file)]


def _jupyter_file(file: str) -> Mapping[str, object]:
    from traitlets.config.loader import JSONFileConfigLoader, PyFileConfigLoader

    loader = JSONFileConfigLoader if file.endswith(".json") else PyFileConfigLoader
    try:
        return cast(
            "Mapping[str, object]", loader(os.path.basename(file), os.path.dirname(file)).load_config()
        )
    except Exception as error:  # the file is code: it may raise anything
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"{file}{line}: {type(error).__name__}: {error}") from error


def _home(environ: Mapping[str, str] | None, home: str | os.PathLike[str] | None) -> str:
    if home is not None:
        return os.fspath(home)
    return (environ or {}).get("HOME") or os.path.expanduser("~")


def _sections(config: Mapping[str, object]) -> dict[str, object]:
    return {owner: config[owner] for owner in ENVIRONMENT_PREFIXES if owner in config}


def _plain(raw: object) -> object:
    """Return a traitlets configuration value as a plain one (``c.X.tools.append("read")`` is lazy)."""
    from traitlets.config.loader import LazyConfigValue

    return raw.get_value([]) if isinstance(raw, LazyConfigValue) else raw


def _environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Return what the environment sets; an empty string counts as unset (behaviour 1.2)."""
    return {
        owner.__name__: {
            name: environ[variable]
            for name, key in owner._keys().items()
            if not isinstance(key, Approvals)
            and environ.get(variable := ENVIRONMENT_PREFIXES[owner.__name__] + name.upper())
        }
        for owner in TABLES
    }


def _file(path: str) -> dict[str, object]:
    """Return the tables that a TOML file holds; a file that is missing holds none."""
    content = _content(path)
    if content is None:
        return {}
    import tomli

    try:
        document: object = tomli.loads(content.decode())
    except tomli.TOMLDecodeError as error:
        _refuse(path, error.lineno, error.colno, error.msg)
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode(errors="replace")) + 1
        _refuse(path, before.count(b"\n") + 1, column, "the file is not UTF-8")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets without end
        _refuse(path, 1, 1, f"the file cannot be read as TOML ({error})")

    tables: dict[str, object] = {}
    for owner in TABLES:
        value = document
        for part in owner.table.split("."):
            if not isinstance(value, Mapping):
                break
            value = value.get(part, _NOTHING)
        if value is not _NOTHING:
            tables[owner.__name__] = value
    return tables


_NOTHING: Mapping[str, object] = {}


def _content(path: str) -> bytes | None:
    """Return a configuration file's bytes, None when there is no such file."""
    try:
        # Not blocking: a named pipe in a project's folder must not hold the host.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path}: the configuration file cannot be read ({error.strerror})") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path}: the configuration file is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _refuse(path: str, line: int, column: int, reason: str) -> NoReturn:
    raise ConfigError(f"{path}:{line}:{column}: not valid TOML: {reason} (line {line}, column {column})")
