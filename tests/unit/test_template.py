"""Warm starts: real templates, real forks, and every way they can fail (issue 7, item 1)."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest
from lemon_provisioner import templates as templates_module
from lemon_provisioner import tracker
from lemon_provisioner.environment import child_environment
from lemon_provisioner.forked import ForkedProcess
from lemon_provisioner.process import LOST_STATUS, ChildProcess, new_run_id
from lemon_provisioner.templates import (
    IDLE_TIMEOUT_S,
    MAX_AGE_S,
    MAX_FORKS,
    Launch,
    Templates,
    _Template,
)

from lemon_kernel import (
    ExecuteCode,
    ExecuteCodeConfig,
    KernelRegistry,
    Owner,
    SessionScope,
    hostloop,
    telemetry,
)
from lemon_kernel.session.link import KernelDied

from ..kernels import Kernel, alive, wait_until, workspaces

pytestmark = pytest.mark.skipif(not templates_module.SUPPORTED, reason="no fork, no pidfd")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a workspace or a process of ours (the tracker excepted)."""
    yield
    wait_until(lambda: workspaces() == [])
    mark = b"TMPDIR=" + os.environ["TMPDIR"].encode()
    wait_until(lambda: [pid for pid in marked(mark) if b"tracker" not in command_line(pid)] == [])


def marked(entry: bytes) -> list[int]:
    """Return the living processes that show `entry` in their environment, this one excepted."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                environment = pathlib.Path("/proc", name, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if entry in environment and alive(int(name)):
                found.append(int(name))
    return found


def command_line(pid: int) -> bytes:
    try:
        return pathlib.Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pool:
    """Templates on a loop of their own, and what they reported."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.clock = Clock()
        self.reasons: list[str] = []
        self.templates = Templates(on_fallback=self.reasons.append, clock=self.clock)

    def warm(self, env: Mapping[str, str] | None = None) -> bool:
        run_id = new_run_id()
        launch = Launch([sys.executable], child_environment(run_id, env), os.environ["HOME"], run_id, -1)
        return self.run(self.templates.warm(launch))

    def run(self, awaitable: Any) -> Any:
        async def main() -> Any:
            return await awaitable

        return self.runner.run(main())

    @property
    def template(self) -> _Template:
        (template,) = self.templates._templates.values()
        return template

    def kernel(self, cwd: str | None = None) -> Kernel:
        return Kernel(cwd=cwd, templates=self.templates, runner=self.runner)

    def close(self) -> None:
        self.run(self.templates.aclose())
        self.runner.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def warm(pool: Pool) -> Pool:
    assert pool.warm()
    return pool


@pytest.fixture
def sitecustomize(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let templates, and only they, run some code when they start."""

    def install(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\nif '--template' in sys.orig_argv:\n"
            + "".join(f"    {line}\n" for line in code.splitlines())
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def process(kernel: Kernel) -> ForkedProcess | ChildProcess:
    assert kernel.link._provisioner is not None
    return cast("ForkedProcess | ChildProcess", kernel.link._provisioner.process)


def is_forked(kernel: Kernel) -> bool:
    return isinstance(process(kernel), ForkedProcess)


# What a forked kernel is


LOOK = r"""
import asyncio, atexit, builtins, gc, json, locale, multiprocessing, os, re, resource, signal, sys, threading, time, warnings
def kinds():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield re.sub(r"\d+|lemon-\S*", "N", os.readlink("/proc/self/fd/" + name))
        except OSError:
            pass
status = dict(line.split(":", 1) for line in open("/proc/thread-self/status"))
workspace = os.path.dirname(sys.path[0])
def plain(value):
    return re.sub(r" at 0x\w+", "", str(value)).replace(workspace, "<workspace>")
own = dict(os.environ)
assert re.fullmatch("[0-9a-f]{32}", own.pop("LEMON_RUN_ID"))
print(json.dumps({
    "handlers": {int(n): plain(signal.getsignal(n)) for n in signal.valid_signals()},
    "wakeup": signal.set_wakeup_fd(-1),
    "masks": {n: status[n].split() for n in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")},
    "descriptors": sorted(kinds()),
    "threads": sorted((t.name, t.daemon) for t in threading.enumerate()),
    "tasks": len(os.listdir("/proc/self/task")),
    "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "flags": str(sys.flags),
    "environment": own,
    "umask": status["Umask"].strip(),
    "cwd": os.getcwd(),
    "argv": [plain(word) for word in sys.argv],
    "orig_argv": [plain(word) for word in sys.orig_argv],
    "path": [plain(word) for word in sys.path],
    "modules": sorted(sys.modules),
    "files": sorted(plain(m.__file__) for n, m in sys.modules.items() if n.startswith("lemon") and m.__file__),
    "origins": sorted(plain(m.__spec__.origin) for n, m in sys.modules.items() if n.startswith("lemon") and m.__spec__),
    "packages": sorted(plain(p) for m in list(sys.modules.values()) if m.__name__.startswith("lemon") for p in getattr(m, "__path__", ())),
    "globals": sorted(globals()),
    "builtins": sorted(vars(builtins)),
    "frozen": gc.get_freeze_count() > 0,
    "collector": [gc.isenabled(), gc.get_threshold()],
    "switch": sys.getswitchinterval(),
    "atexit": atexit._ncallbacks(),
    "filters": [plain(filter) for filter in warnings.filters],
    "locale": locale.setlocale(locale.LC_ALL),
    "zone": time.tzname,
    "streams": [[s.encoding, s.errors, s.line_buffering, s.isatty()] for s in (sys.stdout, sys.stderr)],
    "hooks": [plain(h) for h in (sys.excepthook, sys.displayhook, threading.excepthook, sys.breakpointhook)],
    "affinity": sorted(os.sched_getaffinity(0)),
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "stack": len([f for f in sys._current_frames()]),
    "child": multiprocessing.current_process().name,
}))
"""


def test_cold_and_forked_kernels_are_alike(warm: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that looks at everything it can finds no difference.

    Signals, masks, descriptors, threads, session, limits, flags, environment, umask, folder, modules and more;
    what may differ is the command line, the parent and the seed of string hashes.
    """
    monkeypatch.setenv("NEW_SINCE_THE_TEMPLATE", "yes")
    monkeypatch.delenv("LOGNAME", raising=False)
    umask = os.umask(0o027)
    try:
        seen = []
        for templates in (None, warm.templates):
            with Kernel(cwd=os.environ["HOME"], templates=templates, runner=warm.runner) as kernel:
                assert is_forked(kernel) is (templates is not None)
                ran = kernel.cell(LOOK)
                assert ran.ok, ran.output
                seen.append(json.loads(ran.output))
    finally:
        os.umask(umask)
    cold, forked = seen

    assert cold["environment"]["NEW_SINCE_THE_TEMPLATE"] == "yes"
    assert cold["umask"] == "0027"
    for name in cold:
        assert forked[name] == cold[name], name


def test_a_forked_kernel_does_all_that_a_kernel_does(warm: Pool) -> None:
    """State, helpers, text, notify, children, threads, ``asyncio.run`` and ``multiprocessing`` work."""
    with warm.kernel() as kernel:
        assert is_forked(kernel)
        ran = kernel.cell("value = read('a path')\nprint(value)\ntext('a block')\nnotify('a note')")
        assert (ran.output, ran.blocks, ran.notes) == ("a path\n", ["a block"], ["a note"])
        code = (
            "import asyncio, subprocess, threading, multiprocessing\n"
            "print(asyncio.run(asyncio.sleep(0, value)))\n"
            "subprocess.run(['sh', '-c', 'echo child'])\n"
            "threads = [threading.Thread(target=read, args=('x',)) for _ in range(8)]\n"
            "[t.start() for t in threads]; [t.join() for t in threads]\n"
            "pool = multiprocessing.get_context('spawn').Pool(1)\n"
            "print(pool.apply(len, ('four',))); pool.terminate()\n"
        )
        ran = kernel.cell(code)
        assert ran.output == "a path\nchild\n4\n"
        assert ran.stats.calls == 8
        ran = kernel.cell("1 / 0")
        assert ran.reply is not None
        assert ran.reply.name == "ZeroDivisionError"
        assert "lemon" not in ran.output
    assert warm.reasons == []


def test_siblings_draw_different_numbers(pool: Pool, sitecustomize: Callable[[str], None]) -> None:
    """``random``, ``uuid4`` and multiprocessing's key differ between kernels of one template, which has drawn some."""
    sitecustomize("import random, multiprocessing\nrandom.random()")
    assert pool.warm()
    code = (
        "import random, uuid, multiprocessing\n"
        "print(random.random(), uuid.uuid4(), bytes(multiprocessing.current_process().authkey).hex())"
    )
    drawn = []
    for _ in range(2):
        with pool.kernel() as kernel:
            assert is_forked(kernel)
            drawn += kernel.cell(code).output.split()

    assert len(set(drawn)) == 6


def test_the_template_is_quiet(warm: Pool) -> None:
    """One thread, no zmq, no loop: nothing open but the null device and its end of the private socket."""
    folder = pathlib.Path("/proc", str(warm.template.pid))
    links = sorted(os.readlink(entry) for entry in (folder / "fd").iterdir())

    assert len(list((folder / "task").iterdir())) == 1
    assert links[:3] == ["/dev/null"] * 3
    assert [link.partition(":")[0] for link in links[3:]] == ["socket"]


def test_the_marker_of_a_forked_kernel_is_its_own(warm: Pool) -> None:
    """``/proc/<pid>/environ`` names the kernel's run and no longer the template's."""
    with warm.kernel() as kernel:
        shown = pathlib.Path("/proc", str(kernel.link.pid), "environ").read_bytes().split(b"\0")
        ours = [entry for entry in shown if entry.startswith(b"LEMON_RUN_ID=")]

        assert ours == [b"LEMON_RUN_ID=" + process(kernel).run_id.encode()]
        assert process(kernel).run_id != warm.template._run_id


# Its end


LEAVE = """
import os, subprocess, sys, time
def daemon(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            work()
        os._exit(0)
reader, writer = os.pipe()
def forked():
    os.write(writer, b"%d " % os.getpid()); time.sleep(60); os._exit(0)
def executed():
    os.write(writer, b"%d " % os.getpid()); os.execv("/bin/sleep", ["sleep", "60"])
daemon(forked); daemon(executed)
subprocess.Popen(["sleep", "60"])
said = b""
while said.count(b" ") < 2:
    said += os.read(reader, 99)
print(said.decode())
"""


def descendants(kernel: Kernel) -> list[int]:
    """Let the kernel leave a forked and an executed daemon, each in a session of its own; return their ids."""
    ran = kernel.cell(LEAVE)
    pids = [int(word) for word in ran.output.split()]
    assert len(pids) == 2, ran.output
    return pids


@pytest.mark.parametrize("way", ["stop", "cancel"])
def test_what_left_the_group_is_found(warm: Pool, way: str) -> None:
    """Double-forked children die with their kernel, whether they were executed or only forked."""
    with warm.kernel() as kernel:
        pids = [*descendants(kernel), kernel.link.pid]
        assert kernel.run(getattr(kernel.link, way)())

    assert not any(alive(pid) for pid in pids)
    assert not pathlib.Path("/proc", str(kernel.link.pid)).exists(), "nobody reaped it"


@pytest.mark.parametrize(
    ("code", "status"),
    [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 11)", -11)],
)
def test_the_exit_status_arrives(warm: Pool, code: str, status: int) -> None:
    """A kernel that dies in a cell is noticed at once, and the provisioner knows how it ended."""
    with warm.kernel() as kernel:
        ran = kernel.cell("import os\n" + code)
        assert isinstance(ran.error, KernelDied)
        provisioner = kernel.link._provisioner
        assert provisioner is not None
        assert kernel.run(process(kernel).wait()) == status
        assert kernel.run(provisioner.poll()) == status


def test_signals_reach_the_group(warm: Pool) -> None:
    """An interrupt ends a cell; one that ignores everything polite is killed by the escalation."""
    with warm.kernel() as kernel:

        async def interrupted() -> Any:
            running = asyncio.ensure_future(
                kernel.cell_async("print('in', flush=True)\nimport time; time.sleep(60)")
            )
            await asyncio.sleep(0.3)
            process(kernel).signal_group(signal.SIGINT)
            return await running

        ran = kernel.run(interrupted())
        assert ran.reply.name == "KeyboardInterrupt"
        started = time.monotonic()
        kernel.cell("import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)")
        assert kernel.run(kernel.link.stop())
        assert time.monotonic() - started < 2
        assert process(kernel) is None


def test_fifty_forks_leak_nothing(warm: Pool) -> None:
    """After fifty kernels host and template have the descriptors, children and memory they had after two."""

    def inventory() -> tuple[int, int, str]:
        folder = pathlib.Path("/proc", str(warm.template.pid))
        children = (folder / "task" / str(warm.template.pid) / "children").read_text()
        return len(os.listdir("/proc/self/fd")), len(os.listdir(folder / "fd")), children

    def resident_kb() -> int:
        status = pathlib.Path("/proc", str(warm.template.pid), "status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    async def start_and_stop() -> None:
        run_id = new_run_id()
        null = os.open(os.devnull, os.O_WRONLY)
        tracker.watch(run_id, "")
        folder = os.path.join(warm.template._workspace, "shim")
        argv = [sys.executable, "-P", folder, "-f", "/nonexistent", "--session-launch"]
        forked = await warm.templates.fork(Launch(argv, child_environment(run_id), "/", run_id, null))
        os.close(null)
        assert forked is not None
        assert forked.finish() is not None
        tracker.forget(run_id)

    for _ in range(2):
        warm.run(start_and_stop())
    before, memory = inventory(), resident_kb()
    for _ in range(50):
        warm.run(start_and_stop())

    assert inventory() == before
    assert resident_kb() < memory + 1024


# Fallbacks


def cold(pool: Pool, reasons: list[str]) -> None:
    """Start a kernel that must not be forked but must work, and compare what was counted."""
    with pool.kernel() as kernel:
        assert not is_forked(kernel)
        assert kernel.cell("print('works')").output == "works\n"
    assert pool.reasons == reasons


def test_the_first_kernel_is_cold_and_later_ones_are_not(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted for a template that was never there; it is made in the background."""
    monkeypatch.setattr(templates_module, "WARM_DELAY_S", 0.05)
    cold(pool, [])

    async def appears() -> None:
        while not pool.templates._templates:
            await asyncio.sleep(0.01)

    pool.run(asyncio.wait_for(appears(), 20))
    with pool.kernel() as kernel:
        assert is_forked(kernel)
    assert pool.reasons == []


def test_threads(pool: Pool, sitecustomize: Callable[[str], None]) -> None:
    """A template with a second thread forks nothing, and no other one is made for that interpreter."""
    sitecustomize(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    assert pool.warm()

    cold(pool, ["threads"])
    cold(pool, ["threads", "threads"])
    assert not pool.warm()


def test_fork_error(pool: Pool, sitecustomize: Callable[[str], None]) -> None:
    """A fork that the system refuses is a cold start."""
    sitecustomize("import os\ndef fork(): raise OSError(11, 'no')\nos.fork = fork")
    assert pool.warm()

    cold(pool, ["fork_error"])


def test_setup_error(pool: Pool, sitecustomize: Callable[[str], None]) -> None:
    """A forked kernel that cannot become what was asked for is none, and leaves nothing."""
    sitecustomize("import os\ndef setsid(): raise OSError(1, 'no')\nos.setsid = setsid")
    assert pool.warm()

    cold(pool, ["fork_error"])


def test_a_slow_setup(pool: Pool, sitecustomize: Callable[[str], None]) -> None:
    """A forked kernel that becomes ready after its host has given up ends without having been one."""
    sitecustomize("import os, time\nown = os.setsid\ndef setsid(): own(); time.sleep(1)\nos.setsid = setsid")
    assert pool.warm()
    pid = pool.template.pid

    cold(pool, ["no_answer"])
    wait_until(lambda: not alive(pid))


@pytest.mark.parametrize("name", ["LANG", "TZ", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "LC_TIME", "HOME"])
def test_another_environment(warm: Pool, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What Python reads only at its start must be as it was when the template started."""
    monkeypatch.setenv(name, {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}.get(name, os.environ["HOME"] + "/."))

    cold(warm, ["environment"])


def test_another_interpreter(warm: Pool, tmp_path: pathlib.Path) -> None:
    """A template is of one interpreter: a kernel of another one starts from scratch."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    run_id = new_run_id()
    launch = Launch([str(link)], child_environment(run_id), "/", run_id, -1)

    assert warm.run(warm.templates.fork(launch)) is None
    assert warm.reasons == ["environment"]
    assert len(warm.templates._templates) == 1


def test_a_changed_folder_on_the_path(
    pool: Pool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that was installed since the template started is seen."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert pool.warm()
    (tmp_path / "installed_since.py").write_text("")

    cold(pool, ["environment"])


def test_other_limits(warm: Pool) -> None:
    """What a process inherits from its parent, limits for one, must be as it was."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else min(4096, hard if hard >= 0 else 4096), hard))
    try:
        cold(warm, ["environment"])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_age(warm: Pool) -> None:
    """A template is good for an hour."""
    warm.clock.now += MAX_AGE_S + 1

    cold(warm, ["age"])


def test_forks(warm: Pool) -> None:
    """A template is good for 500 forks."""
    warm.template.forks = MAX_FORKS

    cold(warm, ["age"])


def test_a_stopped_template(warm: Pool) -> None:
    """No answer in 500 ms is a cold start, and the template is replaced, not waited for."""
    pid = warm.template.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    run_id = new_run_id()
    argv = [sys.executable, "-P", "/x", "-f", "/x", "--session-launch"]
    assert warm.run(warm.templates.fork(Launch(argv, child_environment(run_id), "/", run_id, 2))) is None
    waited_s = time.monotonic() - started

    assert 0.45 < waited_s < 2
    assert warm.reasons == ["no_answer"]
    assert not alive(pid)


def test_a_late_fork_comes_to_nothing(warm: Pool) -> None:
    """A template that wakes up after its host has given up leaves no second kernel in the workspace."""
    with warm.kernel() as first:  # keeps the template from being killed at once
        pid = warm.template.pid
        os.kill(pid, signal.SIGSTOP)
        with warm.kernel() as kernel:
            assert not is_forked(kernel)
            assert warm.reasons == ["no_answer"]
            os.kill(pid, signal.SIGCONT)
            run_id = process(kernel).run_id.encode()
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
            wait_until(lambda: len(children.read_text().split()) == 1)
            assert marked(b"LEMON_RUN_ID=" + run_id) == [kernel.link.pid]
            assert kernel.cell("print(1)").output == "1\n"
        assert first.cell("print(2)").output == "2\n"
        assert alive(pid)
    wait_until(lambda: not alive(pid))


def test_a_killed_template(warm: Pool) -> None:
    """Its kernels go on and end as they should, only without a status; the next start is cold."""
    with warm.kernel() as kernel:
        os.kill(warm.template.pid, signal.SIGKILL)
        assert kernel.cell("print('on')").output == "on\n"
        pids = descendants(kernel)
        cold(warm, ["no_answer"])
        leader = process(kernel)
        assert kernel.run(kernel.link.cancel())

    assert not any(alive(pid) for pid in [*pids, kernel.link.pid])
    assert kernel.run(leader.wait()) in (LOST_STATUS, -signal.SIGINT, 0, 1)
    assert leader.signal_group(signal.SIGKILL) is False


def test_an_unsupported_platform(warm: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no fork every start is cold and counted."""
    monkeypatch.setattr(templates_module, "SUPPORTED", False)

    cold(warm, ["unsupported"])


def test_a_fault_of_ours(warm: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else goes wrong costs no kernel."""

    def fail(launch: Launch) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(templates_module, "_request", fail)

    cold(warm, ["unknown"])


def test_a_template_that_does_not_start(pool: Pool, sitecustomize: Callable[[str], None]) -> None:
    """An interpreter whose template dies at once is not asked again for an hour."""
    sitecustomize("import os\nos._exit(3)")
    assert not pool.warm()

    cold(pool, ["unknown"])


# Its life


def test_an_idle_template_is_reaped(warm: Pool) -> None:
    """After half an hour without a fork, and not before, at the registry's tick."""
    pid = warm.template.pid
    warm.clock.now += IDLE_TIMEOUT_S - 1
    warm.templates.reap()
    assert alive(pid)
    warm.clock.now += 2
    warm.templates.reap()

    assert not alive(pid)
    assert warm.templates._templates == {}


def test_a_retired_template_waits_for_its_kernels(warm: Pool) -> None:
    """It is their parent: it ends with the last of them, and forks no more."""
    with warm.kernel() as kernel:
        pid = warm.template.pid
        warm.clock.now += MAX_AGE_S + 1
        cold(warm, ["age"])
        assert alive(pid)
        assert kernel.cell("print(1)").output == "1\n"

    assert not alive(pid)


def test_prewarm_and_the_registry() -> None:
    """``prewarm()`` makes the first kernel a forked one; closing the registry ends the template."""
    heard: list[tuple[str, Any]] = []
    unlisten = telemetry.listen(lambda event, measured, said: heard.append((event, said)))
    registry = KernelRegistry()
    tool = ExecuteCode(
        os.environ["HOME"],
        config=ExecuteCodeConfig(enabled=True, kernel_mode="session", python_path=sys.executable),
        registry=registry,
        scope=SessionScope("session", "agent", Owner()),
    )
    try:
        assert asyncio.run(tool.prewarm())
        (template,) = registry._templates._templates.values()
        result = tool.run_sync({"script": "import os\nprint(os.getppid())"})
        assert result.text.strip() == str(template.pid)
        template.forks = MAX_FORKS
        other = ExecuteCode(
            os.environ["HOME"],
            config=tool.config,
            registry=registry,
            scope=SessionScope("other", "agent", Owner()),
        )
        assert other.run_sync({"script": "print(1)"}).text.strip() == "1"
    finally:
        asyncio.run(registry.aclose())
        unlisten()

    assert ("coding_agent.python_repl.template.fallback", {"reason": "age"}) in heard
    assert not alive(template.pid)
    assert not asyncio.run(tool.prewarm())
    hostloop.stop()


def test_no_template_where_none_is_wanted() -> None:
    """Neither in per-call mode nor in a registry that will have one kernel only."""
    config = ExecuteCodeConfig(enabled=True, kernel_mode="per_call", python_path=sys.executable)
    assert not asyncio.run(ExecuteCode(os.environ["HOME"], config=config).prewarm())

    registry = KernelRegistry(warm_starts=False)
    config = config.with_values(kernel_mode="session")
    scope = SessionScope("session", "agent", Owner())
    tool = ExecuteCode(os.environ["HOME"], config=config, registry=registry, scope=scope)
    try:
        assert not asyncio.run(tool.prewarm())
        assert tool.run_sync({"script": "print(1)"}).text.strip() == "1"
    finally:
        asyncio.run(registry.aclose())
    hostloop.stop()


HOST = """
import asyncio, os, sys
from lemon_kernel import ExecuteCode, ExecuteCodeConfig, KernelRegistry, Owner, SessionScope
registry, owner = KernelRegistry(), Owner()
tool = ExecuteCode("/", config=ExecuteCodeConfig(enabled=True, kernel_mode="session", python_path=sys.executable),
                   registry=registry, scope=SessionScope("s", "a", owner))
async def main():
    assert await tool.prewarm()
    script = "import os, subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print(os.getpid(), os.getppid(), p.pid)"
    print((await tool.execute({"script": script})).text, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_killed_host_takes_template_and_kernels_along(tmp_path: pathlib.Path) -> None:
    """SIGKILL for the host: within 3 s kernel, child, template and every workspace are gone (behaviour 6.12)."""
    folder = tmp_path / "t"
    folder.mkdir()
    host = subprocess.Popen(
        [sys.executable, "-c", HOST],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        assert host.stdout is not None
        pids = [int(word) for word in host.stdout.readline().split()]
        assert len(pids) == 3
        assert b"--template" in command_line(pids[1])
    finally:
        host.kill()
        host.wait()
        host.stdout.close() if host.stdout else None
    wait_until(lambda: not any(alive(pid) for pid in pids), 3)
    wait_until(lambda: marked(b"TMPDIR=" + str(folder).encode()) == [], 3)
    wait_until(lambda: os.listdir(folder) == [], 3)
