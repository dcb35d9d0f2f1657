"""Messages of the errors page that no other test spells out: each is produced here, and compared as a whole."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from lemon_provisioner import workspace
from lemon_shim import api, wire

from lemon_kernel import (
    ApprovalBroker,
    ExecuteCode,
    ExecuteCodeConfig,
    KernelRegistry,
    Owner,
    ToolNotFoundError,
    ToolPolicy,
    ToolResult,
    find_tool,
    hostloop,
)
from lemon_kernel.approvals import RunIdentity
from lemon_kernel.bridge.dispatch import Stats
from lemon_kernel.config import PolicyConfig
from lemon_kernel.errors import (
    ConfigError,
    ExecuteCodeError,
    HelperError,
    InterpreterError,
    RegistryUnavailableError,
    WorkspaceError,
)
from lemon_kernel.helpers import HELPERS, HelperContext, WebFetch
from lemon_kernel.output import CapturedOutput
from lemon_kernel.policy import current_policy
from lemon_kernel.result import Outcome
from lemon_kernel.scope import AbortSignal

from ..jupyter.front_end import FrontEnd


def tool(folder: pathlib.Path, **options: Any) -> ExecuteCode:
    config = ExecuteCodeConfig(enabled=True, python_path=sys.executable, **options.pop("values", {}))
    return ExecuteCode(folder, config=config, policy=options.pop("policy", ToolPolicy()), **options)


def caught(folder: pathlib.Path, statement: str, **options: Any) -> str:
    """Return what the `ToolError` of `statement` in a real script says."""
    script = f"try:\n    {statement}\nexcept ToolError as error:\n    text(error)"
    result = tool(folder, **options).run_sync({"script": script})
    first, _, rest = result.text.partition("\n")
    assert first == "Script result (text()):", result.text
    return rest.partition("\n\n")[0]


def refused(work: Callable[[], object], kind: type[Exception] = ExecuteCodeError) -> str:
    with pytest.raises(kind) as found:
        work()
    return str(found.value)


def helper_error(name: str, params: Mapping[str, object], folder: pathlib.Path) -> str:
    async def main() -> None:
        await HELPERS[name](dict(params), HelperContext(AbortSignal(), str(folder), "test"))

    return refused(lambda: asyncio.run(main()), HelperError)


# Errors


def test_tool_not_found(tmp_path: pathlib.Path) -> None:
    """A name that is no tool, and the tool itself while it is disabled."""
    for name in ("bash", "execute_code"):
        said = refused(partial(find_tool, name, tmp_path, config=ExecuteCodeConfig()), ToolNotFoundError)

        assert said == f"tool not found: {name}"


def test_closed_registry() -> None:
    """Whoever asks a closed registry hears the same from each of its methods."""

    async def main() -> list[str]:
        registry = KernelRegistry()
        await registry.aclose()
        said = [refused(registry.snapshot, RegistryUnavailableError)]
        for work in (registry.reap(), registry.detach(Owner())):
            with pytest.raises(RegistryUnavailableError) as found:
                await work
            said.append(str(found.value))
        return said

    assert asyncio.run(main()) == ["registry_unavailable: the kernel registry is closed"] * 3


def test_interpreter_that_does_not_start(tmp_path: pathlib.Path) -> None:
    """A file with an execute bit that the system cannot run."""
    broken = tmp_path / "python"
    broken.write_bytes(b"\x7fELF nothing")
    broken.chmod(0o755)
    config = ExecuteCodeConfig(enabled=True, python_path=str(broken))
    broken_tool = ExecuteCode(tmp_path, config=config, policy=ToolPolicy())

    said = refused(lambda: broken_tool.run_sync({"script": "1"}), InterpreterError)

    assert said.startswith(f"execute_code could not start {broken}: ")


@pytest.mark.parametrize("kernel_mode", ["per_call", "session"])
def test_interpreter_that_is_too_old(kernel_mode: str, tmp_path: pathlib.Path) -> None:
    """One that cannot compile our side is refused; a script would only see the text of ours."""
    old = tmp_path / "python"
    answer = "import sys; sys.version_info = (3, 6, 15); exec(sys.argv[sys.argv.index('-c', 1) + 1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{answer}" "$@"\n')
    old.chmod(0o755)
    config = ExecuteCodeConfig(enabled=True, python_path=str(old), kernel_mode=kernel_mode)
    old_tool = ExecuteCode(tmp_path, config=config, policy=ToolPolicy())

    said = refused(lambda: old_tool.run_sync({"script": "1"}), InterpreterError)

    assert said == f"execute_code cannot use {sys.executable}: it is Python 3.6"


def test_folder_that_is_gone(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "gone"

    said = refused(lambda: tool(folder).run_sync({"script": "1"}), WorkspaceError)

    assert said == f"the working directory of execute_code is not a directory: {folder}"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "missing",
            (
                "No such file or directory: {tmp} (TMPDIR is {tmp})"
                "; set TMPDIR to an existing local folder that this user can write to"
            ),
        ),
        (
            "a file",
            (
                "TMPDIR ({tmp}) is not a folder"
                "; set TMPDIR to an existing local folder that this user can write to"
            ),
        ),
    ],
)
def test_unusable_tmpdir(
    kind: str, reason: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the call says what is wrong with TMPDIR, and the mend."""
    place = tmp_path / "tmp"
    if kind == "a file":
        place.write_text("")
    monkeypatch.setenv("TMPDIR", str(place))

    said = refused(lambda: tool(tmp_path).run_sync({"script": "1"}), WorkspaceError)

    assert said == f"execute_code could not create its private workspace: {reason.format(tmp=place)}"


def test_tmpdir_that_cannot_be_used(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem, names that are all taken, and a umask that takes the owner's own bits."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 0 0:5 / {tmp_path} rw - nfs4 host:/x rw\n")
    with monkeypatch.context() as patch:
        patch.setattr(workspace, "MOUNTINFO", str(mounts))
        on_network = refused(workspace.private_root, workspace.StagingError)
    with monkeypatch.context() as patch:
        patch.setattr(workspace, "_suffix", lambda: "aaaaaaaaaa")
        pathlib.Path(tmp_path, "lemon-private-aaaaaaaaaa").mkdir()
        taken = refused(workspace.private_root, workspace.StagingError)
    before = os.umask(0o277)
    try:
        not_private = refused(workspace.private_root, workspace.StagingError)
    finally:
        os.umask(before)

    assert on_network == (
        f"TMPDIR ({tmp_path}) is on a network filesystem (nfs4)"
        "; set TMPDIR to an existing local folder that this user can write to"
    )
    assert taken == (
        f"no free name for lemon-private-* in {tmp_path}"
        "; set TMPDIR to an existing local folder that this user can write to"
    )
    assert f" came out with mode 0500 and owner {os.geteuid()}, not 0700 and {os.geteuid()}" in not_private
    assert not_private.endswith(
        ": set a umask that keeps the owner's bits (077), and TMPDIR to a local folder without default ACLs or"
        " setgid bit"
    )


# Configuration


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"[runtime",
            ":1:9: not valid TOML: Expected ']' at the end of a table declaration (line 1, column 9)",
        ),
        (b"a = 1\nb = '\xff'", ":2:6: not valid TOML: the file is not UTF-8 (line 2, column 6)"),
        (b"a = " + b"1" * 5000, ":1:1: not valid TOML: the file cannot be read as TOML (Exceeds the limit"),
    ],
)
def test_broken_file(content: bytes, said: str, tmp_path: pathlib.Path) -> None:
    """The message names the file, the line and the column."""
    file = tmp_path / ".lemon" / "config.toml"
    file.parent.mkdir()
    file.write_bytes(content)

    assert refused(lambda: ExecuteCodeConfig.load(tmp_path), ConfigError).startswith(f"{file}{said}")


def test_file_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    """A folder, and a link in a circle, where the file should be."""
    file = tmp_path / ".lemon" / "config.toml"
    file.mkdir(parents=True)
    folder = refused(lambda: ExecuteCodeConfig.load(tmp_path), ConfigError)
    file.rmdir()
    file.symlink_to(file)
    circle = refused(lambda: ExecuteCodeConfig.load(tmp_path), ConfigError)

    assert folder == f"{file}: the configuration file is not a regular file"
    assert circle.startswith(f"{file}: the configuration file cannot be read (")


def test_unknown_key() -> None:
    said = refused(lambda: ExecuteCodeConfig(timeout=1), TypeError)

    assert said == "ExecuteCodeConfig has no key 'timeout'"


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("timeout_ms", "soon", "is not a whole number"),
        ("enabled", "perhaps", "is neither true nor false"),
        ("kernel_mode", "sessions", "is neither 'per_call' nor 'session' and means 'per_call'"),
        ("python_path", 3, "is not a path"),
        ("tools", 3, "is not a list of helper names and means all of them"),
        ("tools", ["read", 3], "holds things that are not names of helpers"),
        ("tools", ["bash"], "names no helper with 'bash'"),
    ],
)
def test_unusable_value_is_told(
    key: str, value: object, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the key, the value, the source and what is wrong."""
    ExecuteCodeConfig(**{key: value})

    (record,) = caplog.records
    assert f"{value!r} from argument {complaint}" in record.getMessage()
    assert f"runtime.tools.execute_code.{key}: " in record.getMessage()


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("deny", 3, "is not a list of names"),
        ("allow", 3, "is neither 'all' nor a list of tool names"),
        ("approvals", 3, "is not a table of tool = mode"),
        ("profile", "readonly", "is no profile (there are full_access,"),
    ],
)
def test_unusable_policy_value_denies(key: str, value: object, complaint: str) -> None:
    """A value of the policy that cannot be read denies every tool, with a message that says which."""
    policy = PolicyConfig(**{key: value}).policy()

    said = policy.denial_reason("read")
    assert said is not None
    assert said.startswith(f"tool policy cannot be read: runtime.tools.policy.{key} from argument")
    assert f": {value!r} {complaint}" in said


def test_wrong_sections(caplog: pytest.LogCaptureFixture, tmp_path: pathlib.Path) -> None:
    """A section that is no table and a key that does not exist are told, the latter by its name."""
    file = tmp_path / ".lemon" / "config.toml"
    file.parent.mkdir()
    file.write_text("[runtime.tools]\nexecute_code = 3\n[runtime.tools.policy]\ndenny = ['read']\n")

    ExecuteCodeConfig.load(tmp_path)
    policy = PolicyConfig.load(tmp_path).policy()

    assert f"3 from {file} is not a table" in caplog.text
    assert str(policy.denial_reason("ls")).endswith(
        f"runtime.tools.policy.denny from {file}: there is no such key"
    )


# Results


def test_exception_without_a_name() -> None:
    outcome = Outcome(Stats(), CapturedOutput("", False, None), (), 0, reason="exception")

    assert outcome.assemble() == "Script raised an exception."


# ToolError


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("read(object())", "parameter 'path' is not a JSON value (object)"),
        ("read('a', limit=float('inf'))", "parameter 'limit' is inf, which JSON cannot hold"),
        ("import sys; read('a', limit=10 ** 5000)", "parameter 'limit' is an integer with too many digits"),
        (
            "read((lambda f: f(f, 99))(lambda f, n: n and [f(f, n - 1)]))",
            "parameter 'path' is nested too deeply",
        ),
        ("read({1: 2})", "a key in parameter 'path' is not a string"),
        ("read('\\ud800')", "parameter 'path' holds a surrogate code point, which is no valid text"),
        ("batch(['read', 3])", "batch() takes (tool, params) pairs"),
        ("batch([('read', 'a')])", "batch() takes the parameters of a call as a dict"),
        ("ls(3)", "Path must be a string, got: 3"),
        ("read('a', offset='1')", "offset must be an integer, got: '1'"),
        ("ls(all='yes')", "all must be a boolean, got: 'yes'"),
        ("grep('(', literal=False)", None),
        ("grep('a\\\\')", None),
        ("webfetch('http://example.com/', max_chars='many')", "maxChars must be an integer, got: 'many'"),
    ],
)
def test_wrong_arguments(statement: str, said: str | None, tmp_path: pathlib.Path) -> None:
    """A real script is told which argument of its call is wrong, and why."""
    message = caught(tmp_path, statement)

    if said is not None:
        assert message == said
        return
    bracket = "(" in statement.partition("'")[2]
    hint = (
        ". Hint: unbalanced '('; escape it as '\\(', or use literal=True"
        if bracket
        else ". Hint: a trailing backslash must be escaped (\\\\), or use literal=True"
    )
    assert re.match(r"Invalid regex pattern at position \d+: ", message)
    assert "Invalid regex pattern at position " in message
    assert message.endswith(hint)


@pytest.fixture
def grant() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Open a grant whose carrier does what the test gives it while a call is under way."""
    doing: list[Callable[[], object]] = []

    class Carrier(api.Carrier):
        def exchange(self, call_id: int, frame: bytes, timeout_s: float | None) -> tuple[bool, str] | None:
            for work in doing:
                work()
            return True, ""

    api.open_grant(Carrier(), "cell", "secret", 65536, wire.HELPERS)
    yield doing.append
    api.close_grant()


def test_no_cell() -> None:
    """A thread that a cell has left behind calls a helper when no cell is running."""
    api.claim_process()

    assert refused(lambda: api.read("a"), api.ToolError) == "lemon_tools is not configured for this cell"


def test_text_from_where_it_cannot_be(grant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters are taken: by the thread itself, which a signal interrupted, or by another one for too long."""
    monkeypatch.setattr(api, "COUNTERS_TIMEOUT_S", 0.01)
    with api._counters:
        own = refused(lambda: api.text("a"), api.ToolError)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with api._counters:
            held.set()
            done.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    other = refused(lambda: api.text("a"), api.ToolError)
    done.set()
    holder.join()

    assert own == "text() cannot be called by a signal handler that interrupted another call"
    assert other == "text() could not take its number: another thread holds the lock"


def test_helper_from_a_signal_handler(tmp_path: pathlib.Path) -> None:
    """A handler that interrupts a call cannot make another; the call itself goes on."""
    script = """
import signal
said = []
def handler(signum, frame):
    try:
        ls()
    except ToolError as error:
        said.append(str(error))
signal.signal(signal.SIGUSR1, handler)
text("slow: " + read("slow"))
text(said)
"""

    async def slow(params: Mapping[str, object], context: HelperContext) -> str:
        """Interrupt the script that waits for this answer, and answer once it has said what it thinks of that."""
        for pid in children():
            os.kill(pid, 10)
        await asyncio.sleep(0.3)
        return "done"

    async def empty(params: Mapping[str, object], context: HelperContext) -> str:
        return ""

    result = tool(tmp_path, helpers={"read": slow, "ls": empty}).run_sync({"script": script})

    assert "slow: done" in result.text
    assert "['helpers cannot be called by a signal handler that interrupted another call']" in result.text


def children() -> list[int]:
    """Return the scripts that this process runs just now."""
    found = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if b"lemon-exec-code-" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_double_that_returns_no_text(tmp_path: pathlib.Path) -> None:
    """A double's wrong type is named to the script."""

    async def wrong(params: Mapping[str, object], context: HelperContext) -> Any:
        return 3

    said = caught(tmp_path, "read('a')", helpers={"read": wrong})

    assert said == "helper 'read' returned int, not text"


def test_input(tmp_path: pathlib.Path) -> None:
    result = tool(tmp_path).run_sync({"script": "input()"})

    assert "input() is not supported in execute_code scripts: there is nobody to answer" in result.text


def test_folder_with_unreadable_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`grep` says how many files it could not read (a test as root can read them all)."""
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")

    def unreadable(path: str, context: HelperContext) -> bytes:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(import_module("lemon_kernel.helpers.grep"), "_load", unreadable)

    async def main() -> object:
        return await HELPERS["grep"]({"pattern": "x"}, HelperContext(AbortSignal(), str(tmp_path), "test"))

    assert asyncio.run(main()) == "No matches found.\n\n[2 files could not be read]"


def test_listing_that_takes_too_long(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("lemon_kernel.helpers.ls"), "TIMEOUT_MS", 0)

    assert helper_error("ls", {}, tmp_path) == "Listing timed out after 0ms"


def test_no_descriptor_to_wait_with(tmp_path: pathlib.Path) -> None:
    """A script that takes away all its descriptors hears what the system says, at every call."""
    script = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\nread('a')"
    result = tool(tmp_path).run_sync({"script": script})

    assert "ToolError: cannot wait for the host: " in result.text


# Notebooks


def test_no_helper_host() -> None:
    """The text that tests/jupyter/test_notebook_host.py meets in a kernel without a helper host."""
    assert wire.NO_HOST == (
        "this kernel has no helper host: start it through Jupyter with the lemon kernelspec"
    )


def test_notebook_with_a_broken_configuration(tmp_path: pathlib.Path) -> None:
    """A cell's helper call says which file is broken, and where."""
    file = tmp_path / ".lemon" / "config.toml"
    file.parent.mkdir()
    file.write_text("[runtime")
    with FrontEnd(tmp_path) as front_end:
        ran = front_end.run("read('a')")

    assert str(ran.error).startswith(
        f"ToolError: the configuration cannot be read: {file}:1:9: not valid TOML"
    )


# Policy and approvals


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            ToolPolicy(deny=3),
            "tool policy cannot be read: deny from the policy argument: 3 is not a list of tool names",
        ),
        (
            ToolPolicy(approvals=3),
            "tool policy cannot be read: approvals from the policy argument: 3 does not map tools to modes",
        ),
        (
            ToolPolicy(profile="x"),
            (
                "tool policy cannot be read: profile from the policy argument: 'x' is none of full_access, orchestrator,"
                " leaf_worker, minimal_core, no_external, read_only, safe_mode, subagent_restricted"
            ),
        ),
        (lambda: 3, "tool policy cannot be read: the policy function returned int"),
        (lambda: 1 / 0, "tool policy cannot be read: the policy function raised"),
    ],
)
def test_unreadable_policy(policy: Any, said: str, tmp_path: pathlib.Path) -> None:
    """It denies the call itself, and says what is wrong."""
    result: ToolResult = tool(tmp_path, policy=policy).run_sync({"script": "1"})

    assert result.text == f"Tool 'execute_code' execution was denied: {said}"
    assert result.details == {"denied": True}


def test_policy_function_that_does_not_answer() -> None:
    """It is given up at the limit, and denies everything."""

    async def never() -> ToolPolicy:
        await asyncio.Event().wait()
        return ToolPolicy()

    policy = asyncio.run(current_policy(never, 0.05))

    assert policy.denial_reason("read") == (
        "tool policy cannot be read: the policy function did not answer in time"
    )


def test_wrong_use_of_a_broker() -> None:
    """What a program does wrong with a broker is a ValueError."""
    broker = ApprovalBroker()

    async def twice() -> None:
        first = asyncio.create_task(broker.request(RunIdentity(), "read", {}, "id-1"))
        while not broker.pending():
            await asyncio.sleep(0)
        try:
            await broker.request(RunIdentity(), "read", {}, "id-1")
        finally:
            first.cancel()

    assert refused(lambda: asyncio.run(twice()), ValueError) == "approval id id-1 is in use"
    assert (
        refused(lambda: broker.store("session", None, "read", "any"), ValueError)
        == "an approval of scope 'session' needs a key"
    )


# Command line


def command(folder: pathlib.Path, *arguments: str) -> tuple[int, str]:
    """Run the command line in `folder`; return the exit status and what stderr says."""
    done = subprocess.run(
        [sys.executable, "-m", "lemon_kernel.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "lemon-kernel: which command? One of run, tool, config, doctor, install"),
        (["rum"], "lemon-kernel: unknown command rum; did you mean run?"),
        (["run", "--jsn", "a"], "lemon-kernel run: unknown option --jsn; did you mean --json?"),
        (
            ["run", "--ExecuteCodeCnfig.timeout_ms=1", "a"],
            "lemon-kernel run: unknown section ExecuteCodeCnfig",
        ),
        (
            ["run", "--ExecuteCodeConfig.timeout=1", "a"],
            "lemon-kernel run: ExecuteCodeConfig has no key timeout",
        ),
        (["tool", "now"], "lemon-kernel tool: tool takes no argument 'now'"),
        (["tool", "--cwd", "nowhere"], "lemon-kernel tool: --cwd nowhere: there is no such folder"),
        (["run"], "lemon-kernel run: run needs a FILE, or - for standard input"),
        (["run", "--session", "", "a"], "lemon-kernel run: --session needs a name"),
        (["run", "bad.py"], "lemon-kernel run: bad.py: the text cannot be decoded ("),
        (["install"], "lemon-kernel install: say where, once: --user, --sys-prefix or --prefix DIR"),
        (
            ["config", "--PolicyConfig.approvals=read"],
            "lemon-kernel config: command line option --PolicyConfig.approvals: 'read' is not a list of tool=mode",
        ),
    ],
)
def test_usage_errors(arguments: list[str], said: str, tmp_path: pathlib.Path) -> None:
    """One line on stderr, exit status 2."""
    (tmp_path / "bad.py").write_bytes(b"'\xff'")

    status, stderr = command(tmp_path, *arguments)

    assert status == 2
    assert stderr.splitlines()[-1].startswith(said)


def test_install_that_cannot_write(tmp_path: pathlib.Path) -> None:
    """A file stands where the folder should be made."""
    (tmp_path / "share").write_text("")

    status, stderr = command(tmp_path, "install", "--prefix", str(tmp_path))

    assert status == 3
    last = stderr.splitlines()[-1]  # Jupyter's own warning comes first
    assert last.startswith("lemon-kernel install: the kernelspec cannot be written: ")
    assert last.endswith("; choose a folder of yours with --user or --prefix")


def test_kernelspec_that_is_missing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a source tree nor a wheel's record knows the packaged kernelspec."""
    import importlib.metadata

    from lemon_kernel.cli import install

    def nowhere(name: str) -> object:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(install, "__file__", str(tmp_path / "a" / "b" / "install.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", nowhere)

    assert (
        refused(install.packaged_kernelspec) == "the packaged kernelspec is missing; reinstall lemon-kernel"
    )


# Errors of a program


def test_blocking_call_on_the_host_loop() -> None:
    async def work() -> None: ...

    async def main() -> None:
        coroutine = work()
        try:
            hostloop.run(coroutine)
        finally:
            coroutine.close()

    there: Coroutine[object, object, None] = main()

    assert (
        refused(lambda: hostloop.run(there), RuntimeError) == "hostloop.run() called on the host loop itself"
    )


def test_webfetch_is_told_of_wrong_types(tmp_path: pathlib.Path) -> None:
    """Parameters of `webfetch` are checked before anything is resolved."""

    async def main() -> None:
        await WebFetch()(
            {"url": "http://a/", "maxChars": []}, HelperContext(AbortSignal(), str(tmp_path), "x")
        )

    assert refused(lambda: asyncio.run(main()), HelperError) == "maxChars must be an integer, got: []"
