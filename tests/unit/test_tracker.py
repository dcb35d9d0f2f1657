"""A killed host leaves nothing: real hosts, really killed (behaviour 6.12)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lemon_provisioner import tracker_process

NOBODY = 65534
GONE_WITHIN_S = 3  # behaviour 6.12

_HOST = """
import os, signal, subprocess, sys, time
from lemon_provisioner import tracker
from lemon_provisioner.environment import child_environment
from lemon_provisioner.process import ChildProcess, new_run_id

root = sys.argv[1]
null = os.open(os.devnull, os.O_WRONLY)

def say(*words):
    print(*words, flush=True)

def start(code="import time; time.sleep(600)", name="lemon-exec-code-1", tell_group=True, output=null):
    run_id = new_run_id()
    workspace = os.path.join(root, name)
    os.makedirs(os.path.join(workspace, "sub"))
    with open(os.path.join(workspace, "sub", "script.py"), "w"): pass
    tracker.watch(run_id, workspace)
    child = ChildProcess.spawn([sys.executable, "-S", "-c", code], env=child_environment(run_id), cwd="/",
                               run_id=run_id, output=output)
    if tell_group:
        tracker.group(run_id, child.pid)
    return child

def tracker_pid():
    return tracker._tracker._process.pid
"""


class Host:
    """A host program in a process of its own, whose lines of output are process numbers to watch."""

    def __init__(self, root: Path, code: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOST + code, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        (root / ".lemon-owner").write_text(f"host\n{self.process.pid}\n")
        self._pidfds: list[int] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def pidfd(self) -> int:
        """Pin the process whose number the host says next."""
        pidfd = os.pidfd_open(int(self.line()))
        self._pidfds.append(pidfd)
        return pidfd

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def kill(self) -> float:
        """SIGKILL the host; return when."""
        self.process.kill()
        self.process.wait()
        return time.monotonic()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        for pidfd in self._pidfds:
            assert dead(pidfd, 5), "left over"
            os.close(pidfd)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A private root as ``workspace.py`` makes it."""
    path = tmp_path / "lemon-private-0123456789"
    path.mkdir(0o700)
    return path


@pytest.fixture
def host(root: Path) -> Iterator[Callable[[str], Host]]:
    hosts: list[Host] = []

    def start(code: str) -> Host:
        hosts.append(Host(root, code))
        return hosts[-1]

    yield start
    for each in hosts:
        each.close()


def dead(pidfd: int, within_s: float) -> bool:
    """Wait until the process behind ``pidfd`` is dead."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(within_s, 0) * 1000))


def gone(path: Path, until_s: float) -> bool:
    """Wait until ``path`` is removed."""
    while path.exists():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def test_a_killed_host_leaves_nothing(host: Callable[[str], Host], root: Path) -> None:
    """Scripts, a daemon of one, the workspaces, the root and the tracker are gone within 3 s."""
    killed = host(
        f"say(start({_DAEMON!r}, output=1).pid); say(start(name='lemon-kernel-2').pid); say(tracker_pid()); input()"
    )
    pidfds = [killed.pidfd() for _ in range(4)]

    until = killed.kill() + GONE_WITHIN_S

    assert [dead(pidfd, until - time.monotonic()) for pidfd in pidfds] == [True] * 4
    assert gone(root, until)


def test_a_run_whose_group_was_not_told_yet_is_found_by_its_marker(
    host: Callable[[str], Host], root: Path
) -> None:
    """A host that dies between launch and message leaves nothing either."""
    killed = host("say(start(tell_group=False).pid); input()")
    pidfd = killed.pidfd()

    until = killed.kill() + GONE_WITHIN_S

    assert dead(pidfd, until - time.monotonic())
    assert gone(root, until)


def test_an_unmarked_child_in_the_group_dies(host: Callable[[str], Host]) -> None:
    """The group is killed as a whole, also when its leader cannot move."""
    code = "import subprocess, os, signal; print(subprocess.Popen(['/bin/sleep', '600'], env={}).pid, flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    killed = host(f"start({code!r}, output=1); input()")
    pidfd = killed.pidfd()

    killed.kill()

    assert dead(pidfd, GONE_WITHIN_S)


def test_spill_files_keep_the_root(host: Callable[[str], Host], root: Path) -> None:
    """What a result points to is not ours to remove."""
    killed = host("say(start().pid); input()")
    pidfd = killed.pidfd()
    spill = root / "pi-python-repl-0123456789"
    spill.write_text("output")

    until = killed.kill() + GONE_WITHIN_S

    assert dead(pidfd, GONE_WITHIN_S)
    assert gone(root / "lemon-exec-code-1", until)
    assert sorted(path.name for path in root.iterdir()) == [".lemon-owner", spill.name]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_hosts_group_does_not_reach_the_tracker(
    host: Callable[[str], Host], root: Path, signum: int
) -> None:
    """Ctrl-C, or a SIGTERM to the group and even to the tracker itself, kills the host only."""
    killed = host("signal.signal(2, signal.SIG_DFL); say(start().pid); say(tracker_pid()); input()")
    pidfd, tracker_pid = killed.pidfd(), int(killed.line())
    os.kill(tracker_pid, signum)

    os.killpg(killed.process.pid, signum)
    assert killed.process.wait() == -signum
    until = time.monotonic() + GONE_WITHIN_S

    assert dead(pidfd, GONE_WITHIN_S)
    assert gone(root, until)


def test_a_forked_child_of_the_host_does_not_hide_its_death(host: Callable[[str], Host], root: Path) -> None:
    """The child closes the pipe and outlives the host; the host's runs do not."""
    killed = host(
        "child = start()\n"
        "if os.fork() == 0: say(os.getpid()); time.sleep(600)\n"
        "input(); say(child.pid); input()\n"
    )
    forked = killed.pidfd()
    killed.go_on()
    pidfd = killed.pidfd()

    until = killed.kill() + GONE_WITHIN_S

    assert dead(pidfd, GONE_WITHIN_S)
    assert gone(root, until)
    assert not dead(forked, 0)
    signal.pidfd_send_signal(forked, signal.SIGKILL)


def test_a_forked_child_has_a_tracker_of_its_own(host: Callable[[str], Host], root: Path) -> None:
    """A child of the host that launches is tracked by itself: its death takes its run, and only its run."""
    killed = host(
        "first = start()\n"
        "if os.fork() == 0: say(os.getpid()); say(start(name='lemon-exec-code-2').pid); time.sleep(600)\n"
        "input(); say(first.pid); input()\n"
    )
    forked, second = killed.pidfd(), killed.pidfd()
    killed.go_on()
    first = killed.pidfd()

    signal.pidfd_send_signal(forked, signal.SIGKILL)

    assert dead(second, GONE_WITHIN_S)
    assert gone(root / "lemon-exec-code-2", time.monotonic() + GONE_WITHIN_S)
    assert not dead(first, 0.1)
    assert (root / "lemon-exec-code-1").exists()


@pytest.mark.parametrize("noticed_by", ["start(name='lemon-exec-code-2')", "tracker.check()"])
def test_a_killed_tracker_is_replaced_and_told_everything(
    host: Callable[[str], Host], root: Path, noticed_by: str
) -> None:
    """The next message, or a look, starts another; it knows the runs of before."""
    killed = host(
        f"say(tracker_pid() if (child := start()) else 0); input(); {noticed_by}; say(child.pid); say(tracker_pid()); input()"
    )
    first = killed.pidfd()
    signal.pidfd_send_signal(first, signal.SIGKILL)
    assert dead(first, 5)
    killed.go_on()
    run, second = killed.pidfd(), killed.pidfd()

    until = killed.kill() + GONE_WITHIN_S

    assert dead(run, GONE_WITHIN_S)
    assert dead(second, GONE_WITHIN_S)
    assert gone(root, until)


def test_a_tracker_that_does_not_read_is_replaced(host: Callable[[str], Host], root: Path) -> None:
    """A stopped tracker holds the host up for a moment only, and does not mistake its replacement for our death."""
    killed = host(
        "child = start(); say(tracker_pid()); input()\n"
        "longest = 0\n"
        "for number in range(1500):\n"
        "    before = time.monotonic(); tracker.watch(f'{number:032x}', os.path.join(root, 'x')); longest = max(longest, time.monotonic() - before)\n"
        "for number in range(1500): tracker.forget(f'{number:032x}')\n"
        "say(longest); say(child.pid); say(tracker_pid()); input()\n"
    )
    first = killed.pidfd()
    signal.pidfd_send_signal(first, signal.SIGSTOP)
    killed.go_on()
    longest_s = float(killed.line())
    run, second = killed.pidfd(), killed.pidfd()

    assert longest_s < 1
    assert dead(first, 0)
    assert not dead(run, 0.1)
    until = killed.kill() + GONE_WITHIN_S
    assert dead(run, GONE_WITHIN_S)
    assert dead(second, GONE_WITHIN_S)
    assert gone(root, until)


def test_a_closed_descriptor_is_noticed(host: Callable[[str], Host], root: Path) -> None:
    """A host that closes descriptors it does not own gets a new tracker with the next message."""
    killed = host(
        "first = start(); os.close(tracker._tracker._pipe); say(start(name='lemon-exec-code-2').pid); input()"
    )
    pidfd = killed.pidfd()

    until = killed.kill() + GONE_WITHIN_S

    assert dead(pidfd, GONE_WITHIN_S)
    assert gone(root, until)


def test_a_host_that_ends_normally_leaves_no_tracker(host: Callable[[str], Host], root: Path) -> None:
    """When the host's process is over, so are its tracker and its empty root."""
    ended = host(
        "child = start(); child.finish(); say(tracker_pid()); import shutil\n"
        "shutil.rmtree(os.path.join(root, 'lemon-exec-code-1')); tracker.forget(child.run_id); input()\n"
    )
    pidfd = ended.pidfd()
    ended.go_on()
    assert ended.process.wait() == 0

    assert dead(pidfd, 0)
    assert not root.exists()


def test_a_forgotten_run_is_left_alone(host: Callable[[str], Host], root: Path) -> None:
    """A process that the host has said is over is not touched, whoever has its number now.

    Folders are another matter: nobody else's can be in the root, and all of it goes with the host.
    """
    killed = host("child = start(); tracker.forget(child.run_id); say(child.pid); input()")
    pidfd = killed.pidfd()

    killed.kill()

    assert not dead(pidfd, 0.5)
    assert not root.exists()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def test_the_tracker_carries_no_marker(host: Callable[[str], Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host inside a run must not lose its tracker to the outer run's sweep."""
    monkeypatch.setenv("LEMON_RUN_ID", "outer")
    killed = host("start(); say(tracker_pid()); say(tracker_pid()); input()")
    pid = int(killed.line())
    killed.pidfd()

    assert b"LEMON_RUN_ID" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_nothing_raises_when_no_tracker_can_be_started(host: Callable[[str], Host]) -> None:
    """The run goes on without a safety net, and the log says so once; the next success makes up for it."""
    ended = host(
        "import logging; logging.basicConfig(format='%(message)s', stream=sys.stdout)\n"
        "real, sys.executable = sys.executable, '/nonexistent'\n"
        "tracker.watch('a', os.path.join(root, 'a')); tracker.group('a', 1); tracker.forget('a'); tracker.check()\n"
        "say('on'); sys.executable = real; say(start().pid); input()\n"
    )

    assert "no tracker process" in ended.line()
    assert ended.line() == "on"
    pidfd = ended.pidfd()
    ended.kill()
    assert dead(pidfd, GONE_WITHIN_S)


def test_a_host_in_development_mode_hears_no_complaint(host: Callable[[str], Host], root: Path) -> None:
    """Ending with a live tracker is on purpose: no ``ResourceWarning`` at exit, and no long wait."""
    code = "child = start(); child.finish(); tracker.forget(child.run_id)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", _HOST + code, str(root)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stderr) == (0, "")


# -- the program's parts -------------------------------------------------------------------------------------------


def test_a_number_that_passed_to_a_stranger_is_spared() -> None:
    """A group is killed only if its leader is the process we were told of, or gone."""
    stranger = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
    run = tracker_process.Run("")
    run.group = stranger.pid
    try:
        for born in ("", "1"):
            run.born = born
            tracker_process.kill_group(run)
            assert stranger.poll() is None
        run.born = tracker_process.born(stranger.pid)
        tracker_process.kill_group(run)
        assert stranger.wait(5) == -9
    finally:
        stranger.kill()
        stranger.wait()


def test_removal_follows_no_link(tmp_path: Path) -> None:
    """A link in the workspace goes, its target stays; a workspace that is a link is not entered."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    workspace = tmp_path / "workspace"
    (workspace / "deep" / "er").mkdir(parents=True)
    (workspace / "deep" / "link").symlink_to(target)
    (workspace / "deep" / "er" / "file").touch()
    link = tmp_path / "link"
    link.symlink_to(target)

    tracker_process.remove_tree(str(workspace))
    tracker_process.remove_tree(str(link))

    assert not workspace.exists()
    assert (target / "kept").exists()


def test_removal_of_what_a_script_locked() -> None:
    """A folder whose rights a script took away goes like any other, also for a user who is not root."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setuid(NOBODY)
            workspace = Path(tempfile.mkdtemp(dir="/tmp"))
            for mode in (0, 0o400, 0o500):
                folder = workspace / f"{mode:o}"
                folder.mkdir()
                (folder / "file").touch()
                folder.chmod(mode)
            tracker_process.remove_tree(str(workspace))
            status = int(workspace.exists())
        finally:
            os._exit(status)

    assert os.waitpid(pid, 0)[1] == 0


def test_removal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory costs two visits and a file one; what is over the budget stays."""
    monkeypatch.setattr(tracker_process, "MAX_VISITS", 3)
    for name, files in (("small", 1), ("large", 2)):
        (tmp_path / name).mkdir()
        for number in range(files):
            (tmp_path / name / str(number)).touch()
        tracker_process.remove_tree(str(tmp_path / name))

    assert not (tmp_path / "small").exists()
    assert (tmp_path / "large").exists()


@pytest.mark.parametrize("owner", ["host\n1\n", "host\n", ""])
def test_a_root_of_another_host_stays(root: Path, owner: str) -> None:
    """Only a root whose marker names the host is removed."""
    (root / ".lemon-owner").write_text(owner)

    tracker_process.remove_root(str(root), "4711")

    assert (root / ".lemon-owner").exists()


def test_a_message_cut_short_does_not_spoil_the_rest() -> None:
    """The host can die in the middle of a message; what came before counts."""
    runs: dict[str, tracker_process.Run] = {}
    for line in ("watch r1 2f77", "group r1 99999999", "bogus", "group r1", "watch r2 2f7", "forget"):
        try:
            tracker_process.receive(line.split(" "), runs, [])
        except (ValueError, IndexError):
            pass

    assert runs["r1"].workspace == "/w"
    assert runs["r1"].group == 99999999
