"""The notebook host: helpers in kernels that a front end launched (behaviour 6.13, 1.3, 1.4; design 7)."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.manager import AsyncKernelManager, start_new_async_kernel
from lemon_shim import wire
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from lemon_kernel import helpers, hostloop, notebook
from lemon_kernel.helpers.base import HelperContext, Params

from ..kernels import descriptors, wait_until, workspaces
from .front_end import FrontEnd, live_hosts

PROJECT_FILE = Path(".lemon", "config.toml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file to read."""
    (tmp_path / "a.txt").write_text("first\nsecond\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "b.py").write_text("def found():\n    pass\n")
    return tmp_path


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def shared(shared_folder: Path) -> Iterator[FrontEnd]:
    """One kernel for tests that only look at single cells."""
    (shared_folder / "a.txt").write_text("first\nsecond\n")
    with FrontEnd(shared_folder) as front_end:
        yield front_end


@pytest.fixture
def project(shared: FrontEnd, shared_folder: Path) -> Iterator[Path]:
    """The project file of the shared kernel's folder; the next test finds none."""
    file = shared_folder / PROJECT_FILE
    file.parent.mkdir(exist_ok=True)
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture
def slow_ls(monkeypatch: pytest.MonkeyPatch) -> SlowHelper:
    slow = SlowHelper()
    monkeypatch.setitem(helpers.HELPERS, "ls", slow)
    return slow


class SlowHelper:
    """A helper that answers once it is let, and takes note of what becomes of its calls."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self.may_end = asyncio.Event()

    async def __call__(self, params: Params, context: HelperContext) -> str:
        self.started.release()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        return "slow but done"

    def let(self) -> None:
        hostloop.loop().call_soon_threadsafe(self.may_end.set)


def took(semaphore: threading.Semaphore) -> bool:
    return semaphore.acquire(timeout=10)


# Every kind of client


def test_all_helpers_through_nbclient(folder: Path) -> None:
    """A notebook that nbclient runs calls every helper without any configuration."""
    cells = [
        "print(read('a.txt'))",
        "print(grep('def', path='src'))",
        "print(find('*.py'))",
        "print(ls())",
        "try:\n    webfetch('http://127.0.0.1:9/')\nexcept ToolError as error:\n    print(error)",
        "for part in batch([('read', {'path': 'a.txt'}), ('ls', {'path': 'src'})]):\n    print(part)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    NotebookClient(
        book, kernel_name="lemon", timeout=30, resources={"metadata": {"path": str(folder)}}
    ).execute()
    shown = [cell.outputs[0].text for cell in book.cells]

    assert "first" in shown[0]
    assert "b.py" in shown[1]
    assert "b.py" in shown[2]
    assert "a.txt" in shown[3]
    assert "private" in shown[4]
    assert "first" in shown[5]
    assert "b.py" in shown[5]
    assert live_hosts() == 0


def test_failing_helper_through_nbclient(folder: Path) -> None:
    """A ToolError ends an nbclient run like any exception, and the kernel is gone afterwards."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("read('missing.txt')")])
    client = NotebookClient(
        book, kernel_name="lemon", timeout=30, resources={"metadata": {"path": str(folder)}}
    )
    with pytest.raises(CellExecutionError, match="ToolError"):
        client.execute()

    wait_until(lambda: live_hosts() == 0)


def test_blocking_client(folder: Path) -> None:
    """A bare blocking manager and client, whose loop turns only inside calls, has helpers from cell one."""
    with FrontEnd(folder) as front_end:
        assert front_end.ok("read('a.txt')").result.startswith("'1: first")
        assert front_end.ok("import lemon_tools; lemon_tools.grep('sec', path='a.txt')").result != "''"


def test_async_client(folder: Path) -> None:
    """An asynchronous manager and client has helpers too."""

    async def main() -> None:
        async with async_kernel(folder) as (_, client):
            assert "first" in await result_of(client, "read('a.txt')")

    asyncio.run(main())
    wait_until(lambda: live_hosts() == 0)


async def result_of(client: Any, code: str) -> str:
    """Run a cell and return what its last expression showed."""
    message_id = client.execute(code)
    while True:
        message = await client.get_iopub_msg(timeout=20)
        if message["parent_header"].get("msg_id") == message_id:
            if message["header"]["msg_type"] == "execute_result":
                return str(message["content"]["data"]["text/plain"])
            assert message["header"]["msg_type"] != "error", message["content"]


@asynccontextmanager
async def async_kernel(folder: Path) -> AsyncIterator[tuple[AsyncKernelManager, Any]]:
    manager, client = await start_new_async_kernel(kernel_name="lemon", cwd=str(folder))
    try:
        yield manager, client
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


def test_two_clients_on_one_kernel(folder: Path) -> None:
    """A second client calls helpers too, and one that leaves takes nothing with it."""
    with FrontEnd(folder) as front_end:
        second = front_end.another()
        assert "first" in front_end.ok("read('a.txt')").result
        assert "first" in second.ok("read('a.txt')").result
        front_end.close()
        assert "first" in second.ok("read('a.txt')").result
        third = front_end.another()
        assert "first" in third.ok("read('a.txt')").result
        third.close()
        second.close()


def test_encrypted_tcp(folder: Path) -> None:
    """Where the path of the sockets is too long the kernel is on TCP with CurveZMQ, and so is the host."""
    script = textwrap.dedent(
        """
        import sys
        from jupyter_client.manager import start_new_kernel
        manager, client = start_new_kernel(kernel_name="lemon")
        assert manager.transport == "tcp" and manager.curve_publickey, manager.transport
        def show(message):
            if message["msg_type"] in ("stream", "error"):
                print(message["content"].get("text") or message["content"]["evalue"])
        client.execute_interactive("print(read('a.txt'))", timeout=20, output_hook=show)
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        """
    )
    deep = folder / ("d" * 90)
    deep.mkdir()
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(deep)},
        capture_output=True,
        text=True,
        timeout=40,
    )

    assert "first" in done.stdout, done.stderr
    assert os.listdir(deep) == []


# Grants and budgets


def test_folder_is_the_kernels_start(shared: FrontEnd) -> None:
    """Relative paths are looked up in the folder the kernel was started in, whatever the script did."""
    assert "first" in shared.ok("import os; os.chdir('/'); found = read('a.txt'); found").result
    shared.ok("import os; os.chdir({!r})".format("/tmp"))


def test_call_budget_is_per_cell(shared: FrontEnd, project: Path) -> None:
    """The call budget comes from the project file and is full again in the next cell."""
    project.write_text("[runtime.tools.execute_code]\nmax_rpc_calls = 3\n")
    for _ in range(2):
        ran = shared.run("for number in range(4):\n    read('a.txt'); print(number)")
        assert ran.stdout == "0\n1\n2\n"
        assert ran.error == "ToolError: rpc call limit exceeded (max 3 calls per script)"


def test_text_and_byte_budgets_are_per_cell(shared: FrontEnd, project: Path) -> None:
    """The budgets of text() and of results are full again in the next cell."""
    project.write_text("[runtime.tools.execute_code]\nmax_text_bytes = 40\nmax_rpc_result_bytes = 30\n")
    for _ in range(2):
        ran = shared.run("text('12345')\ntext('x' * 40)")
        assert ran.error.startswith("ToolError: text() byte budget exceeded")
        ran = shared.run("read('a.txt'); read('a.txt')")
        assert ran.error.startswith("ToolError: rpc result byte budget exceeded")


def test_asking_again_gives_the_same_grant(shared: FrontEnd) -> None:
    """A second ``open`` of one request, whatever it claims to be, gets the token it has already."""
    ran = shared.ok(
        """
        import lemon_tools
        read('a.txt')
        carrier, number = lemon_tools._grant.carrier, -1000
        for claim in ("", "somebody else"):
            number -= 1
            frame = b'{"type":"open","id":%d,"request":"%b"}' % (number, claim.encode())
            answer = carrier._ask(number, frame, 5)
            print(answer["type"], answer["token"] == lemon_tools._raw.token)
        """
    )

    assert ran.stdout == "grant True\ngrant True\n"


def test_each_cell_has_its_own_token(shared: FrontEnd) -> None:
    """The next cell's grant is another one, and the token of the last one is refused."""
    first = shared.ok("import lemon_tools\nread('a.txt')\nold = lemon_tools._raw.token\nold").result
    ran = shared.ok(
        "read('a.txt')\n"
        "print(old != lemon_tools._raw.token)\n"
        "lemon_tools._raw({'type': 'call', 'id': 77, 'token': old, 'tool': 'read', 'params': {}})"
    )

    assert len(first) > 40
    assert ran.stdout == "True\n"
    assert "rpc authentication failed" in ran.result


def test_call_without_a_grant_is_answered(shared: FrontEnd) -> None:
    """A frame that no grant covers is refused: a cell has no deadline, and would wait for ever."""
    shared.ok("import lemon_tools\nread('a.txt')\ncarrier = lemon_tools._grant.carrier")
    ran = shared.ok("""carrier._ask(5, b'{"type":"call","id":5,"cell":""}', 5)["content"]""")

    assert ran.result == repr(wire.FINISHED_CELL)


def test_pool_of_an_earlier_cell_is_refused(shared: FrontEnd) -> None:
    """A thread of a finished cell cannot use the next one's grant, but the next cell's own threads can."""
    shared.ok("from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)")
    shared.ok("pool.submit(read, 'a.txt').result()")
    ran = shared.run("pool.submit(read, 'a.txt').result()")

    assert ran.error == f"ToolError: {wire.FINISHED_CELL}"
    assert "first" in shared.ok("import asyncio\nawait asyncio.to_thread(read, 'a.txt')").result
    assert "first" in shared.ok("await asyncio.to_thread(read, 'a.txt')").result


def test_widget_callbacks_have_helpers(shared: FrontEnd) -> None:
    """What a comm message of a front end sets off may call helpers, twice in a row, and a cell after it too."""
    shared.ok(
        "from comm import get_comm_manager\n"
        "heard = []\n"
        "def opened(comm, message):\n"
        "    def clicked(message):\n"
        "        try:\n"
        "            heard.append(read('a.txt')[:8])\n"
        "        except Exception as error:\n"
        "            heard.append(repr(error))\n"
        "    comm.on_msg(clicked)\n"
        "get_comm_manager().register_target('clicks', opened)"
    )
    client = shared.client
    open_comm = client.session.msg("comm_open", {"comm_id": "c1", "target_name": "clicks", "data": {}})
    client.shell_channel.send(open_comm)
    for _ in range(2):
        client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": "c1", "data": {}}))
    assert shared.ok("heard").result == "['1: first', '1: first']"
    assert "first" in shared.ok("read('a.txt')").result


# What is denied, and what it says


@pytest.mark.parametrize(
    ("table", "key", "reason"),
    [
        ("deny = ['read']", "deny", "Tool 'read' is in deny list"),
        ("blocked_tools = ['read']", "blocked_tools", "Tool 'read' is in blocked_tools list"),
        ("allow = ['ls']", "allow", "Tool 'read' not in allowed list"),
        ("require_approval = ['read']", "require_approval", "approval failed for 'read'"),
        ("approvals = {read = 'always'}", "approvals", "approval failed for 'read'"),
    ],
)
def test_denials_say_what_to_change(
    shared: FrontEnd, project: Path, table: str, key: str, reason: str
) -> None:
    """A denied call says in one line which key of which file to change (behaviour 4.3)."""
    project.write_text(f"[runtime.tools.policy]\n{table}\n")
    ran = shared.run("read('a.txt')")
    hint = f"; to allow it, change runtime.tools.policy.{key} in {project}"

    assert ran.error == f"ToolError: {reason}{hint}"


def test_denial_by_profile(shared: FrontEnd, project: Path) -> None:
    """A profile that denies a helper is named as the key to change."""
    project.write_text("[runtime.tools.policy]\nprofile = 'read_only'\n")
    ran = shared.run("webfetch('http://example.org/')")

    assert (
        "is not allowed by profile read_only; to allow it, change runtime.tools.policy.profile" in ran.error
    )


def test_denial_from_the_environment(
    shared: FrontEnd, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A denial that the environment of the host causes names the variable."""
    monkeypatch.setenv("LEMON_POLICY_DENY", "read")
    ran = shared.run("read('a.txt')")

    assert ran.error.endswith("; to allow it, change LEMON_POLICY_DENY in the environment of Jupyter")


def test_unreadable_policy_denies(shared: FrontEnd, project: Path) -> None:
    """A policy that cannot be read denies everything and says what to mend, and nothing is cached."""
    project.write_text("[runtime.tools.policy]\ndeny = 5\n")
    ran = shared.run("read('a.txt')")

    assert ran.error.startswith("ToolError: tool policy cannot be read: runtime.tools.policy.deny from ")
    assert ran.error.endswith(f"; to allow it, change runtime.tools.policy.deny in {project}")
    project.unlink()
    shared.ok("read('a.txt')")


def test_broken_file_is_an_error(shared: FrontEnd, project: Path) -> None:
    """A file that is not TOML gives a ToolError with file, line and column."""
    project.write_text("[runtime\n")
    ran = shared.run("read('a.txt')")

    assert re.search(rf"ToolError: .*{re.escape(str(project))}:1:\d+: not valid TOML", ran.error)


@pytest.mark.parametrize("source", ["project", "environment"])
def test_explicitly_disabled(
    shared: FrontEnd, project: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """``enabled = false`` in so many words switches helpers and channels off and is named (behaviour 1.3)."""
    if source == "project":
        project.write_text("[runtime.tools.execute_code]\nenabled = false\n")
        name = str(project)
    else:
        monkeypatch.setenv("LEMON_EXECUTE_CODE_ENABLED", "no")
        name = "environment variable LEMON_EXECUTE_CODE_ENABLED"
    for call in ("read('a.txt')", "text('x')", "batch([('ls', None)])"):
        assert shared.run(call).error == f"ToolError: execute_code is disabled by {name}"
    assert shared.ok("1 + 1").result == "2"


def test_helper_that_is_not_in_tools(shared: FrontEnd, project: Path) -> None:
    """Helpers that the configuration leaves out are not available."""
    project.write_text("[runtime.tools.execute_code]\ntools = ['ls']\n")

    assert "tool 'read' is not available" in shared.run("read('a.txt')").error
    assert shared.ok("import lemon_tools; ls(); lemon_tools.__all__[:3]").result == (
        "['ToolError', 'ls', 'text']"
    )


# Interrupts, restarts, deaths


def test_interrupt_during_a_helper_call(folder: Path, slow_ls: SlowHelper) -> None:
    """KeyboardInterrupt within 1 s; the host's task is cancelled; the next call works."""
    with FrontEnd(folder) as front_end:
        for call, calls in (
            ("ls()", 1),
            ("batch([('ls', {})] * 3)", 3),
            ("import asyncio\nawait asyncio.to_thread(ls)", 1),
        ):
            message_id = front_end.send(call)
            for _ in range(calls):
                assert took(slow_ls.started)
            started = time.monotonic()
            front_end.manager.interrupt_kernel()
            ran = front_end.finish(message_id)
            elapsed_s = time.monotonic() - started

            # an async cell is cancelled, as in a stock kernel
            assert ran.reply["ename"] == ("CancelledError" if "await" in call else "KeyboardInterrupt")
            assert elapsed_s < 1
            for _ in range(calls):
                assert took(slow_ls.cancelled)
            assert "first" in front_end.ok("read('a.txt')").result


def test_no_time_limit(shared: FrontEnd, project: Path, slow_ls: SlowHelper) -> None:
    """``timeout_ms`` does not apply to a front end's cell."""
    project.write_text("[runtime.tools.execute_code]\ntimeout_ms = 1\n")
    message_id = shared.send("ls()")
    assert took(slow_ls.started)
    time.sleep(1.2)  # longer than the shortest limit there is
    slow_ls.let()

    assert shared.finish(message_id).status == "ok"


def test_restart(folder: Path) -> None:
    """A restarted kernel has a host again, polite or not, and the old client goes on."""
    hosts = live_hosts()
    with FrontEnd(folder) as front_end:
        for now in (False, True, True):
            front_end.ok("kept = read('a.txt')")
            front_end.restart(now=now)
            assert front_end.run("kept").error.startswith("NameError")
            assert "first" in front_end.ok("read('a.txt')").result
            assert live_hosts() == hosts + 1


def test_restart_under_load(folder: Path, slow_ls: SlowHelper) -> None:
    """A restart in the middle of calls cancels them, and the bridge lives on."""
    with FrontEnd(folder) as front_end:
        for _ in range(2):
            front_end.send("batch([('ls', {})] * 8)")
            for _ in range(4):  # max_parallel_rpc
                assert took(slow_ls.started)
            front_end.restart(now=True)
            for _ in range(4):
                assert took(slow_ls.cancelled)
            assert "first" in front_end.ok("read('a.txt')").result


def test_automatic_restart(folder: Path) -> None:
    """A kernel that a server's restarter starts again after its death has helpers again."""

    async def main() -> None:
        config = Config()
        config.KernelRestarter.time_to_dead = 0.2
        config.KernelRestarter.random_ports_until_alive = False  # or the client is cut off, as it is anywhere
        hosts = live_hosts()
        manager = AsyncIOLoopKernelManager(kernel_name="lemon", config=config)
        await manager.start_kernel(cwd=str(folder))
        client = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=20)
            old: int = manager.provisioner.process.pid
            os.kill(old, signal.SIGKILL)
            async with asyncio.timeout(20):
                while manager.provisioner.process is None or manager.provisioner.process.pid == old:
                    await asyncio.sleep(0.05)
            await client.wait_for_ready(timeout=20)
            assert "first" in await result_of(client, "read('a.txt')")
            assert live_hosts() == hosts + 1
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)

    asyncio.run(main())


def test_death_during_a_helper_call(folder: Path, slow_ls: SlowHelper) -> None:
    """When the kernel dies the call is cancelled and the host lets go, though nobody has cleaned up yet."""
    hosts = live_hosts()
    with FrontEnd(folder) as front_end:
        front_end.send("ls()")
        assert took(slow_ls.started)
        os.kill(front_end.process, signal.SIGKILL)

        assert took(slow_ls.cancelled)
        wait_until(lambda: live_hosts() == hosts)


def test_late_calls_end_with_their_cell(folder: Path, slow_ls: SlowHelper) -> None:
    """A thread that calls on after its cell is told so at once, and its call is cancelled."""
    with FrontEnd(folder) as front_end:
        front_end.ok(
            "import threading\nended = []\n"
            "def late():\n"
            "    try:\n        ls()\n    except ToolError as error:\n        ended.append(str(error))\n"
            "thread = threading.Thread(target=late)\n"
            "thread.start()\n"
            "while not thread.is_alive(): pass\n"
            "import time; time.sleep(0.3)"
        )
        assert took(slow_ls.started)
        assert took(slow_ls.cancelled)

        assert "gone" in front_end.ok("thread.join(5); ended").result


def test_nothing_is_left_after_many_kernels(folder: Path) -> None:
    """Kernels come and go; descriptors, threads, tasks and workspaces of the host do not pile up."""

    def one() -> None:
        with FrontEnd(folder) as front_end:
            front_end.ok("text(read('a.txt'))")

    hosts, folders = live_hosts(), len(workspaces())
    one()
    gc.collect()
    wait_until(lambda: live_hosts() == hosts)
    before = descriptors(), threading.active_count()
    for _ in range(4):
        one()
    gc.collect()
    wait_until(lambda: live_hosts() == hosts)

    assert len(workspaces()) == folders
    wait_until(lambda: descriptors() <= before[0] and threading.active_count() <= before[1])


# Kernels without a host


@pytest.mark.parametrize("host", ["", "no_such_package.serve"])
def test_kernel_without_a_host(folder: Path, host: str) -> None:
    """Where nobody answers, the kernel is an ordinary one and a helper says within 3 s what is missing."""
    config = Config()
    config.LemonProvisioner.notebook_host = host
    with FrontEnd(folder, config=config) as front_end:
        assert front_end.ok("1 + 1").result == "2"
        started = time.monotonic()
        ran = front_end.run("read('a.txt')")

        assert ran.error == f"ToolError: {wire.NO_HOST}"
        assert time.monotonic() - started < 3
        assert front_end.ok("1 + 1").result == "2"


def test_host_that_comes_later(folder: Path) -> None:
    """A host that takes over a running kernel serves its next calls; what waited for the old one ends."""
    with FrontEnd(folder) as front_end:
        front_end.ok("read('a.txt')")
        info = dict(front_end.manager.provisioner.connection_info)
        stop = notebook.serve(connection_info=info, cwd=str(folder / "src"))
        try:
            wait_until(lambda: "b.py" in front_end.run("ls()").result)
        finally:
            stop()


@pytest.mark.parametrize("call", ["read('no.txt')", "batch([('read', {'path': 'no.txt'})])"])
def test_traceback_ends_in_the_cell(shared: FrontEnd, call: str) -> None:
    """A traceback shows the person's own frames and the message, not how a call travels."""
    trace = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(shared.run(call).reply["traceback"]))

    assert call in trace
    assert "ToolError: File not found" in trace
    assert "api.py" not in trace
    assert "bridge.py" not in trace


# text() and notify()


def test_text_shows_as_a_display(shared: FrontEnd) -> None:
    """text() is a display of plain text and of the block with its number."""
    ran = shared.ok("text('one')\ntext(2)\ntext('line\\nbreak')")

    assert ran.data("display_data") == [
        {"text/plain": text, "application/vnd.lemon.text+json": {"n": number, "text": text}}
        for number, text in enumerate(["one", "2", "line\nbreak"], 1)
    ]


def test_notify_is_one_updating_line(shared: FrontEnd) -> None:
    """notify() shows once per cell and is updated from then on; the next cell has a line of its own."""
    names = set()
    for _ in range(2):
        ran = shared.ok("for part in range(3): notify(f'part {part}')")
        shown, updates = ran.of("display_data"), ran.of("update_display_data")
        names.add(shown[0]["content"]["transient"]["display_id"])

        assert [m["content"]["data"]["text/plain"] for m in shown] == ["notify: part 0"]
        assert [m["content"]["data"]["text/plain"] for m in updates] == ["notify: part 1", "notify: part 2"]
        assert {m["content"]["transient"]["display_id"] for m in updates} <= names
    assert len(names) == 2


def test_order_of_prints_and_blocks(shared: FrontEnd) -> None:
    """What a cell prints and what text() shows stand in the order in which they were made."""
    ran = shared.ok("for n in range(5):\n    print(n, flush=True)\n    text(n)")
    shown = [
        m["content"].get("text", "").strip() or m["content"]["data"]["text/plain"]
        for m in ran.messages
        if m["header"]["msg_type"] in ("stream", "display_data")
    ]

    assert shown == [str(n) for n in range(5) for _ in range(2)]


def test_bridge_is_unseen(shared: FrontEnd) -> None:
    """Helper calls cause no busy or idle, and no output, beyond those of the cell itself."""
    ran = shared.ok("for _ in range(20): read('a.txt')")
    kinds = [m["header"]["msg_type"] for m in ran.messages if m["header"]["msg_type"] != "comm_msg"]

    assert kinds == ["status", "execute_input", "status"]
