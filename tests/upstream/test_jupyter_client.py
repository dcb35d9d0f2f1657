"""What the provisioner and the link build on in jupyter_client: each fact one test."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path

import pytest
from jupyter_client import connect, manager
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.session import Session
from lemon_shim.message import Signer, decode


def test_provisioner_set_beforehand_is_used() -> None:
    """A manager that has a provisioner already asks no factory for one."""
    source = inspect.getsource(manager.KernelManager._async_pre_start_kernel)
    assert "if self.provisioner is None:" in source


def test_failed_launch_is_not_cleaned_up() -> None:
    """If ``pre_launch`` raises nobody calls ``cleanup`` (2.13): our provisioner releases itself."""
    source = inspect.getsource(manager.KernelManager._async_start_kernel)
    assert "cleanup" not in source


def test_connection_file_written_once(tmp_path: Path) -> None:
    """``_connection_file_written`` and an existing file keep ``write_connection_file`` from writing."""
    one = AsyncKernelManager(connection_file=str(tmp_path / "c.json"))
    (tmp_path / "c.json").write_text("{}")
    one._connection_file_written = True
    one.write_connection_file()
    assert (tmp_path / "c.json").read_text() == "{}"
    one._connection_file_written = False


def test_reconciliation_compares_with_the_file(tmp_path: Path) -> None:
    """After a launch the manager compares our file with what the provisioner said, key as bytes."""
    assert "_equal_connections" in inspect.getsource(connect.ConnectionFileMixin._reconcile_connection_info)


def test_new_ports_forget_random_ports() -> None:
    """``newports=True`` calls ``cleanup_random_ports``, which sets the ports in ``_random_port_names`` to 0."""
    one = AsyncKernelManager(transport="ipc", ip="/x/k")
    for number, name in enumerate(connect.port_names, 1):
        setattr(one, name, number)
    one._random_port_names = list(connect.port_names)
    one.cleanup_random_ports()
    assert one.shell_port == 0


def test_restart_keeps_the_key() -> None:
    """A restart neither renews the session's key nor rewrites the file (0.13)."""
    source = inspect.getsource(manager.KernelManager._async_restart_kernel)
    assert ".key" not in source


def test_python_is_replaced_by_the_managers() -> None:
    """``python`` in argv becomes the manager's interpreter; other paths stay."""
    one = AsyncKernelManager()
    one._kernel_spec = KernelSpec(argv=["/other/python", "-m", "x", "-f", "{connection_file}"])
    one._launch_args = {}
    assert one.format_kernel_cmd()[:3] == ["/other/python", "-m", "x"]
    assert one.format_kernel_cmd(["--more"])[-1] == "--more"


def test_ipc_endpoints_are_path_and_number() -> None:
    """An IPC socket is ``<ip>-<port>``."""
    one = AsyncKernelManager(transport="ipc", ip="/x/k", shell_port=1)
    assert one._make_url("shell") == "ipc:///x/k-1"


@pytest.mark.parametrize("key", [b"", b"a key", b"k" * 100])
def test_our_messages_are_sessions_messages(key: bytes) -> None:
    """``Session`` opens what our signer makes, and our signer opens what ``Session`` makes."""
    session, signer = Session(key=key), Signer(key, "s")
    frames = signer.frames("execute_reply", b'{"status":"ok"}', b'{"msg_id":"1"}', b'{"x":1}')
    idents, rest = session.feed_identities([b"route", *frames])
    message = session.deserialize(rest)
    assert (idents, message["header"]["msg_type"], message["content"]) == (
        [b"route"],
        "execute_reply",
        {"status": "ok"},
    )

    made = session.serialize(session.msg("status", {"execution_state": "idle"}), ident=b"topic")
    opened = signer.open(made)
    assert opened is not None
    assert opened.route == [b"topic"]
    assert decode(opened.content) == {"execution_state": "idle"}
    assert json.loads(opened.header)["msg_type"] == "status"


def test_sessions_packers_are_replaceable() -> None:
    """``pack`` and ``unpack`` are traits that take any function."""
    session = Session(key=b"k")
    session.pack, session.unpack = (lambda value: b"{}"), (lambda data: {})
    assert session.pack({"a": 1}) == b"{}"


def test_shutdown_wait_is_the_provisioners() -> None:
    """The time of a polite shutdown is asked of the provisioner and halved (0.9)."""
    source = inspect.getsource(manager.KernelManager._async_finish_shutdown)
    assert "get_shutdown_wait_time" in source
    assert source.count("waittime / 2") == 2


def test_async_manager_creates_no_context_unasked() -> None:
    """A manager makes its zmq context only when something asks for it; then ``cleanup_resources`` destroys it."""

    async def main() -> None:
        one = AsyncKernelManager()
        await one.cleanup_resources()
        assert not one._created_context

    asyncio.run(main())
