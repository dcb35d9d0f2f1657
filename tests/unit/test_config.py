"""Settings: six sources, the kinds of values, and what becomes of values that cannot be used."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Mapping

import pytest
from lemon_shim.wire import HELPERS
from traitlets.config.loader import Config

from lemon_kernel.config import ENVIRONMENT_PREFIXES, TABLES, ExecuteCodeConfig, PolicyConfig, WebFetchConfig
from lemon_kernel.errors import ConfigError, UsageError

ENV = "LEMON_EXECUTE_CODE_"
NUMBERS = [name for name, value in ExecuteCodeConfig().values().items() if type(value) is int]


class Place:
    """A working folder and a home, with the files and the environment that a test gives them."""

    def __init__(self, root: pathlib.Path) -> None:
        self.cwd = root / "project"
        self.home = root / "home"
        self.cwd.mkdir()
        self.home.mkdir()
        self.environ: dict[str, str] = {}
        self.jupyter: dict[str, object] | None = {}

    @property
    def project_file(self) -> str:
        return str(self.cwd / ".lemon" / "config.toml")

    @property
    def user_file(self) -> str:
        return str(self.home / ".lemon" / "config.toml")

    def write(self, text: str | bytes, where: pathlib.Path | None = None) -> None:
        folder = (where or self.cwd) / ".lemon"
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_bytes(text if isinstance(text, bytes) else text.encode())

    def project(self, *lines: str, table: str = ExecuteCodeConfig.table) -> None:
        self.write("\n".join([f"[{table}]", *lines]))

    def user(self, *lines: str, table: str = ExecuteCodeConfig.table) -> None:
        self.write("\n".join([f"[{table}]", *lines]), self.home)

    def load(self, cli: Mapping[str, object] | None = None) -> ExecuteCodeConfig:
        return ExecuteCodeConfig.load(
            self.cwd, environ=self.environ, home=self.home, cli=cli, jupyter_config=self.jupyter
        )

    def policy(self, cli: Mapping[str, object] | None = None) -> PolicyConfig:
        return PolicyConfig.load(
            self.cwd, environ=self.environ, home=self.home, cli=cli, jupyter_config=self.jupyter
        )

    def web(self) -> WebFetchConfig:
        return WebFetchConfig.load(
            self.cwd, environ=self.environ, home=self.home, jupyter_config=self.jupyter
        )


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Place:
    return Place(tmp_path)


DEFAULTS = {
    "enabled": False,
    "python_path": "",
    "timeout_ms": 120_000,
    "max_rpc_calls": 100,
    "max_rpc_result_bytes": 5_242_880,
    "max_output_bytes": 50_000,
    "max_text_bytes": 65_536,
    "max_parallel_rpc": 4,
    "tools": HELPERS,
    "kernel_mode": "per_call",
    "kernel_idle_timeout_ms": 1_800_000,
    "max_live_kernels": 16,
    "max_queued_cells_per_kernel": 8,
}


# --- cases.md, section 1 -----------------------------------------------------------------------------------


@pytest.mark.case(1)
def test_defaults(place: Place) -> None:
    """Without any source every key has the default of the table, and says so."""
    config = place.load()

    assert config.values() == DEFAULTS
    assert set(config.sources.values()) == {"default"}


@pytest.mark.case(2)
@pytest.mark.parametrize("text", ["", "execute_code = {}", 'execute_code = "x"', "execute_code = 3"])
def test_shapeless_settings(place: Place, text: str) -> None:
    """A table that is empty, or is no table, means the defaults."""
    place.write(f"[runtime.tools]\n{text}\n")

    assert place.load().values() == DEFAULTS


@pytest.mark.case(2)
def test_null_tools_are_all_tools() -> None:
    """``tools: null``, which TOML cannot say and JSON can, means all of them."""
    assert ExecuteCodeConfig(tools=None).values() == DEFAULTS


VALID = {
    "enabled": ("true", True),
    "python_path": ('"/opt/py"', "/opt/py"),
    "tools": ('["ls", "read"]', ("ls", "read")),
    "kernel_mode": ('"session"', "session"),
    **{name: (str(1000 + index), 1000 + index) for index, name in enumerate(NUMBERS)},
}


@pytest.mark.case(3)
def test_file_values(place: Place) -> None:
    """Every key is taken from the project's file, which is then its source."""
    place.project(*(f"{name} = {text}" for name, (text, _) in VALID.items()))

    config = place.load()

    assert config.values() == {name: VALID[name][1] for name in DEFAULTS}
    assert set(config.sources.values()) == {place.project_file}
    assert {source.kind for source in config.origins.values()} == {"project"}


@pytest.mark.case(4)
def test_environment_beats_file(place: Place) -> None:
    """Every key is taken from its variable where there is one."""
    place.project(*(f"{name} = {text}" for name, (text, _) in VALID.items()))
    said = {
        "enabled": ("off", False),
        "python_path": ("/usr/py", "/usr/py"),
        "tools": ("grep", ("grep",)),
        "kernel_mode": ("per_call", "per_call"),
        **{name: (str(7 + index), 7 + index) for index, name in enumerate(NUMBERS)},
    }
    place.environ = {f"{ENV}{name.upper()}": text for name, (text, _) in said.items()}

    config = place.load()

    assert config.values() == {name: said[name][1] for name in DEFAULTS}
    assert config.sources["enabled"] == "environment variable LEMON_EXECUTE_CODE_ENABLED"


@pytest.mark.case(5)
def test_empty_environment_is_absent(place: Place) -> None:
    """An empty variable counts as unset."""
    place.project("timeout_ms = 5000")
    place.environ = {f"{ENV}TIMEOUT_MS": ""}

    assert place.load().timeout_ms == 5000


@pytest.mark.case(7)
@pytest.mark.parametrize(("text", "expected"), [("abc", 4), ("", 4), ("0", 1), ("-2", 1), (" 9 ", 9)])
def test_garbage_in_the_environment_falls_to_the_file(place: Place, text: str, expected: int) -> None:
    """A variable that is no number is skipped; one that is too small is brought into bounds."""
    place.project("max_live_kernels = 4")
    place.environ = {f"{ENV}MAX_LIVE_KERNELS": text}

    assert place.load().max_live_kernels == expected


@pytest.mark.case(8)
def test_nothing_valid_anywhere(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """When no source is usable the default applies, and one warning names the key and all of them."""
    place.project('max_live_kernels = "junk"')
    place.user("max_live_kernels = 2.5")
    place.environ = {f"{ENV}MAX_LIVE_KERNELS": "junk"}

    config = place.load()

    assert config.max_live_kernels == 16
    assert config.sources["max_live_kernels"] == "default"
    (warning,) = [record for record in caplog.records if record.name == "lemon_kernel.config"]
    for part in (
        "max_live_kernels",
        "LEMON_EXECUTE_CODE_MAX_LIVE_KERNELS",
        place.project_file,
        place.user_file,
    ):
        assert part in warning.getMessage()
    assert warning.levelno == logging.WARNING


@pytest.mark.case(9)
def test_zero_and_negative_numbers_become_one(place: Place) -> None:
    """Numeric bounds are clamped to positive integers."""
    place.project(
        "kernel_idle_timeout_ms = 0",
        "max_queued_cells_per_kernel = -8",
        "max_text_bytes = 0",
        "max_parallel_rpc = 0",
    )
    config = place.load()

    assert config.kernel_idle_timeout_ms == config.max_queued_cells_per_kernel == 1
    assert config.max_text_bytes == config.max_parallel_rpc == 1


@pytest.mark.case(10)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("raw", [0, -1, 2.5, True, "x", [], None, {}, 1.0, "1_0", "0x10", "", "٣", 2**80])
def test_numbers_are_always_positive(name: str, raw: object) -> None:
    """Whatever a numeric key is set to, the result is an integer in 1 .. 2**31-1."""
    value = ExecuteCodeConfig(**{name: raw}).values()[name]

    assert type(value) is int
    assert 1 <= value < 2**31
    if type(raw) is not int:
        assert value == DEFAULTS[name]


@pytest.mark.case(11)
def test_numeric_strings(place: Place) -> None:
    """A string that is a whole decimal number counts as that number, however long it is."""
    place.project('timeout_ms = "9000"', 'max_rpc_calls = "7"', f'max_text_bytes = "{"9" * 5000}"')
    config = place.load()

    assert (config.timeout_ms, config.max_rpc_calls, config.max_text_bytes) == (9000, 7, 2**31 - 1)
    assert ExecuteCodeConfig(timeout_ms="-" + "9" * 5000).timeout_ms == 1
    assert ExecuteCodeConfig(timeout_ms="0" * 30).timeout_ms == 1


@pytest.mark.case(12)
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        *((raw, True) for raw in (True, "true", "1", 1)),
        *((raw, False) for raw in (False, "false", "0", 0, "yes", "on", None, [], 2, 1.0)),
    ],
)
def test_enabled_spellings_in_settings(raw: object, expected: bool) -> None:
    """Settings know true, 1 and their strings; whatever else is said is not yes."""
    assert ExecuteCodeConfig(enabled=raw).enabled is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, True) for text in ("true", "1", "YES", " on\n")),
        *((text, False) for text in ("no", "Off", "0")),
    ],
)
def test_enabled_spellings_in_the_environment(place: Place, text: str, expected: bool) -> None:
    """The environment also knows yes, no, on and off, in any case."""
    place.project(f"enabled = {str(not expected).lower()}")
    place.environ = {f"{ENV}ENABLED": text}

    assert place.load().enabled is expected


@pytest.mark.case(14)
@pytest.mark.parametrize(
    "text", ['"Session"', '"SESSION"', '"sessions"', '"persistent"', '"per-call"', '""', "42", "true"]
)
def test_only_exactly_session_is_session(place: Place, text: str) -> None:
    """Any other kernel_mode means per_call, also where a weaker source says session."""
    place.project(f"kernel_mode = {text}")
    place.user('kernel_mode = "session"')

    assert place.load().kernel_mode == "per_call"


@pytest.mark.case(15)
def test_session_is_trimmed(place: Place) -> None:
    """White space round the word does not matter."""
    place.environ = {f"{ENV}KERNEL_MODE": "  session\n"}

    assert place.load().kernel_mode == "session"


@pytest.mark.case(16)
def test_malformed_mode_in_the_environment_never_defers(place: Place) -> None:
    """A typo in the environment cannot enable persistence through the file."""
    place.project('kernel_mode = "session"')
    place.environ = {f"{ENV}KERNEL_MODE": "sessions"}

    assert place.load().kernel_mode == "per_call"


@pytest.mark.case(17)
def test_per_call_in_the_environment_overrides_session(place: Place) -> None:
    """The environment beats the file in this direction too."""
    place.project('kernel_mode = "session"')
    place.environ = {f"{ENV}KERNEL_MODE": "per_call"}

    assert place.load().kernel_mode == "per_call"


@pytest.mark.case(18, 19, 20, 21, 22)
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (["grep", "read"], ("grep", "read")),
        (["read", "bash", "write"], ("read",)),
        (["read", "read"], ("read",)),
        (["bash"], ()),
        ("bash", ()),
        ([" read ", "", 42], ("read",)),
        *((raw, HELPERS) for raw in ([], "", [""], [42], 42, None, {}, " , ")),
        ("read, ls", ("read", "ls")),
        ("grep:find", ("grep", "find")),
    ],
)
def test_tools(raw: object, expected: tuple[str, ...]) -> None:
    """Known names in the configured order; nothing said means all; only unknown names mean none."""
    assert ExecuteCodeConfig(tools=raw).tools == expected


@pytest.mark.case(23)
@pytest.mark.parametrize(
    ("text", "expected"), [("read,ls", ("read", "ls")), (",", ("grep",)), (" : ", ("grep",)), ("bash", ())]
)
def test_tools_in_the_environment_replace_the_file(
    place: Place, text: str, expected: tuple[str, ...]
) -> None:
    """A variable with any item left replaces the list of the file; one without counts as absent."""
    place.project('tools = ["grep"]')
    place.environ = {f"{ENV}TOOLS": text}

    assert place.load().tools == expected


@pytest.mark.case(25)
def test_python_path_is_relative_to_the_working_folder(place: Place) -> None:
    """Relative paths start at the working folder, ~ is the home folder, absolute ones stay."""
    for raw, expected in {
        "bin/py": f"{place.cwd}/bin/py",
        " /opt/py ": "/opt/py",
        "~/py": f"{place.home}/py",
        "~": str(place.home),
    }.items():
        place.project(f'python_path = "{raw}"')
        assert place.load().python_path == expected

    assert ExecuteCodeConfig(python_path="bin/py").resolved_python_path("/c") == "/c/bin/py"
    assert ExecuteCodeConfig().resolved_python_path("/c") == ""


@pytest.mark.case(26)
def test_python_path_blank_is_unset(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A blank path means python3 on PATH; what is no path at all is skipped."""
    place.project('python_path = "  "')
    place.user('python_path = "/opt/py"')
    assert place.load().python_path == ""
    assert not caplog.records

    place.project("python_path = 42")
    assert place.load().python_path == "/opt/py"
    assert place.project_file in caplog.text


# --- sources -----------------------------------------------------------------------------------------------


def test_sources_in_order(place: Place) -> None:
    """Command line, environment, project, user, Jupyter, default: the first that is there wins."""
    place.jupyter = {"ExecuteCodeConfig": {"timeout_ms": 1}}
    seen = [place.load().sources["timeout_ms"]]
    place.user("timeout_ms = 2")
    seen.append(place.load().sources["timeout_ms"])
    place.project("timeout_ms = 3")
    seen.append(place.load().sources["timeout_ms"])
    place.environ = {f"{ENV}TIMEOUT_MS": "4"}
    seen.append(place.load().sources["timeout_ms"])
    config = place.load(cli={"ExecuteCodeConfig": {"timeout_ms": "5"}})
    seen.append(config.sources["timeout_ms"])

    assert config.timeout_ms == 5
    assert seen == [
        "Jupyter configuration",
        place.user_file,
        place.project_file,
        "environment variable LEMON_EXECUTE_CODE_TIMEOUT_MS",
        "command line option --ExecuteCodeConfig.timeout_ms",
    ]


def test_home_folder_as_working_folder_is_no_project(place: Place) -> None:
    """In the home folder itself the file is the user's own, not input from outside."""
    place.user("enabled = true")
    config = ExecuteCodeConfig.load(place.home, environ={}, home=place.home, jupyter_config={})

    assert config.origins["enabled"].kind == "user"


def test_jupyter_files_are_read_and_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a loaded configuration the files on Jupyter's path are asked; each is named as a source."""
    folder = place.home / "jupyter"
    folder.mkdir()
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(folder))
    (folder / "jupyter_lemon_config.py").write_text(
        "c = get_config()\nc.ExecuteCodeConfig.timeout_ms = 77\nc.ExecuteCodeConfig.tools.append('read')\n"
    )
    (folder / "jupyter_config.json").write_text('{"ExecuteCodeConfig": {"timeout_ms": 5, "enabled": true}}')
    place.jupyter = None

    config = place.load()

    assert (config.timeout_ms, config.enabled, config.tools) == (77, True, ("read",))
    assert config.sources["timeout_ms"] == str(folder / "jupyter_lemon_config.py")
    assert config.sources["enabled"] == str(folder / "jupyter_config.json")


def test_a_broken_jupyter_file_stops_everything(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Jupyter configuration file that fails may have held a policy: nothing runs without it."""
    folder = place.home / "jupyter"
    folder.mkdir()
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(folder))
    (folder / "jupyter_lemon_config.py").write_text("c = get_config()\n)\n")
    place.jupyter = None

    with pytest.raises(ConfigError, match=r"jupyter_lemon_config\.py:2: SyntaxError"):
        place.load()


def test_a_loaded_jupyter_configuration(place: Place) -> None:
    """The configuration that a Jupyter server hands down is a source like its files."""
    place.jupyter = Config({"ExecuteCodeConfig": {"kernel_mode": "session"}, "KernelManager": {"x": 1}})

    assert place.load().kernel_mode == "session"


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"[runtime.tools.execute_code]\nenabled = maybe\n", ":2:11:"),
        (b"a = 1\nb = '\xff'\n", ":2:6:"),
        (b"a = " + b"9" * 5000, ":1:1:"),
        (b"a = " + b"[" * 5000, ":1:1:"),
    ],
)
def test_a_broken_file_is_an_error(place: Place, content: bytes, where: str) -> None:
    """A file that is not TOML names itself, the line and the column, and nothing runs."""
    place.write(content)

    with pytest.raises(ConfigError) as caught:
        place.load()

    assert f"{place.project_file}{where}" in str(caught.value)
    assert not isinstance(caught.value, UsageError)


def test_a_file_that_cannot_be_read_is_an_error(place: Place) -> None:
    """Only a missing file is absent: a pipe or a folder in its place is an error at once, never a hang."""
    folder = place.cwd / ".lemon"
    folder.mkdir()
    os.mkfifo(folder / "config.toml")
    with pytest.raises(ConfigError, match="not a regular file"):
        place.load()

    os.unlink(folder / "config.toml")
    (folder / "config.toml").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        place.load()

    (folder / "config.toml").rmdir()
    folder.rmdir()
    folder.write_text("a file where the folder should be")
    assert place.load().values() == DEFAULTS


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("timeout_ms", "abc"),
        ("timeout_ms", "2.5"),
        ("enabled", "maybe"),
        ("kernel_mode", "sessions"),
        ("tools", "raed"),
        ("timeoutms", "5"),
    ],
)
def test_a_bad_value_on_the_command_line_is_a_usage_error(place: Place, name: str, raw: str) -> None:
    """What a person has just typed is not skipped but said."""
    with pytest.raises(UsageError, match=f"--ExecuteCodeConfig.{name}"):
        place.load(cli={"ExecuteCodeConfig": {name: raw}})


def test_an_unknown_key_is_named(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A key that does not exist is a typo worth a warning."""
    place.project("timeout = 5")
    place.load()

    assert "runtime.tools.execute_code.timeout" in caplog.text
    assert place.project_file in caplog.text


# --- the object --------------------------------------------------------------------------------------------


def test_constructed_directly() -> None:
    """Arguments are read by the rules for files; the rest is default; a wrong name is a TypeError."""
    config = ExecuteCodeConfig(enabled=True, timeout_ms=2000, tools=["ls"], kernel_mode="Session")

    assert (config.enabled, config.timeout_ms, config.tools) == (True, 2000, ("ls",))
    assert config.kernel_mode == "per_call"
    assert config.sources["timeout_ms"] == "argument"
    assert config.sources["max_rpc_calls"] == "default"
    assert repr(ExecuteCodeConfig(timeout_ms=5)) == "ExecuteCodeConfig(timeout_ms=5)"
    with pytest.raises(TypeError, match="no key 'timeout'"):
        ExecuteCodeConfig(timeout=3)


def test_it_does_not_change() -> None:
    """A setting cannot be assigned: a run must not see half of a change."""
    config = ExecuteCodeConfig()
    with pytest.raises(Exception, match="read-only"):
        config.enabled = True

    assert config.enabled is False


def test_with_values_keeps_the_other_sources(place: Place) -> None:
    """A copy with one value changed still knows where the others came from."""
    place.project("timeout_ms = 5", 'kernel_mode = "session"')
    before = place.load()
    after = before.with_values(kernel_mode="per_call")

    assert (before.kernel_mode, after.kernel_mode) == ("session", "per_call")
    assert (after.timeout_ms, after.sources["timeout_ms"]) == (5, place.project_file)
    assert after.sources["kernel_mode"] == "argument"


def test_disabled_by_names_an_explicit_source(place: Place) -> None:
    """Only a source that says ``enabled = false`` in so many words disables front-end helpers."""
    assert place.load().disabled_by is None
    place.project('enabled = "junk"')
    assert place.load().disabled_by is None
    place.project("enabled = false")
    assert place.load().disabled_by == place.project_file
    place.environ = {f"{ENV}ENABLED": "no"}
    assert place.load().disabled_by == "environment variable LEMON_EXECUTE_CODE_ENABLED"
    place.environ = {f"{ENV}ENABLED": "yes"}
    assert place.load().disabled_by is None


def test_every_table_has_a_prefix_and_documented_keys() -> None:
    """The tables, their classes and their environment names stay in step."""
    assert set(ENVIRONMENT_PREFIXES) == {table.__name__ for table in TABLES}
    for table in TABLES:
        for name, trait in table.class_own_traits(config=True).items():
            assert trait.help, f"{table.__name__}.{name} has no help"


# --- policy and web fetch (behaviour 1.4) ------------------------------------------------------------------


def test_policy_from_files_and_environment(place: Place) -> None:
    """The policy has the sources of every other table; lists may be strings."""
    place.project(
        'allow = ["read", "ls"]',
        'deny = "webfetch"',
        'profile = " read_only "',
        'approvals = { read = "always", ls = "never", grep = { mode = "none" }, find = "sometimes", x = false }',
        table=PolicyConfig.table,
    )
    place.environ = {"LEMON_POLICY_BLOCKED_TOOLS": "find, grep", "LEMON_POLICY_APPROVALS": "ignored"}

    policy = place.policy()

    assert policy.unreadable is None
    assert policy.allow == ("read", "ls")
    assert policy.deny == ("webfetch",)
    assert policy.blocked_tools == ("find", "grep")
    assert policy.profile == "read_only"
    assert policy.approvals == {
        "read": "always",
        "ls": "never",
        "grep": "never",
        "find": "always",
        "x": "never",
    }
    assert policy.policy().denial_reason("webfetch") == "Tool 'webfetch' is in deny list"
    assert policy.policy().denial_reason("read") is None


@pytest.mark.parametrize("name", ["allow", "deny", "blocked_tools", "require_approval"])
@pytest.mark.parametrize("raw", ["42", "true", '["read", 1]', "{}"])
def test_an_unreadable_policy_denies_everything(place: Place, name: str, raw: str) -> None:
    """A policy value that cannot be read is not skipped: it denies, and the message names key and source."""
    place.project(f"{name} = {raw}", table=PolicyConfig.table)
    place.user(f"{name} = []", table=PolicyConfig.table)

    policy = place.policy()

    assert policy.unreadable is not None
    assert name in policy.unreadable
    assert place.project_file in policy.unreadable
    for tool in (*HELPERS, "execute_code"):
        assert policy.policy().denial_reason(tool) == policy.unreadable


@pytest.mark.parametrize(
    "text",
    [
        '[runtime.tools]\npolicy = "deny everything"',
        "runtime = 3",
        '[runtime.tools.policy]\nprofile = "admin"',
        "[runtime.tools.policy]\nprofile = 1",
        "[runtime.tools.policy]\napprovals = 5",
        '[runtime.tools.policy]\ndenny = ["webfetch"]',
    ],
)
def test_other_unreadable_policies(place: Place, text: str) -> None:
    """No table, an unknown profile, a mistyped key: all deny."""
    place.write(text)

    assert place.policy().unreadable is not None
    assert not place.policy().policy().allowed("read")


def test_an_unreadable_policy_in_the_environment(place: Place) -> None:
    """The environment can make a policy unreadable too, and an empty allow list allows nothing."""
    place.environ = {"LEMON_POLICY_PROFILE": "nobody"}
    assert "LEMON_POLICY_PROFILE" in (place.policy().unreadable or "")

    place.environ = {"LEMON_POLICY_ALLOW": " , "}
    assert place.policy().allow == ()


def test_a_policy_on_the_command_line(place: Place) -> None:
    """On the command line a bad policy is a usage error; modes are written tool=mode."""
    with pytest.raises(UsageError):
        place.policy({"PolicyConfig": {"profile": "nobody"}})

    approvals = place.policy({"PolicyConfig": {"approvals": "read=always,ls=never"}}).approvals
    assert approvals == {"read": "always", "ls": "never"}


def test_web_fetch(place: Place) -> None:
    """webfetch's table follows the same rules; a switch that cannot be read is off."""
    assert place.web().enabled is True
    place.project('enabled = "junk"', 'allowed_hostnames = ["a.b"]', table=WebFetchConfig.table)
    place.environ = {"LEMON_WEB_FETCH_MAX_CHARS": "12", "LEMON_WEB_FETCH_ALLOW_PRIVATE_NETWORK": "on"}
    web = place.web()

    assert web.enabled is False
    assert (web.max_chars, web.allow_private_network, web.allowed_hostnames) == (12, True, ("a.b",))
