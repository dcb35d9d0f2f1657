"""What the kernel builds on in ipykernel: each fact one test, so that a change upstream is one red name."""

from __future__ import annotations

import inspect

import ipykernel
import pytest
import zmq
from ipykernel import debugger, iostream, ipkernel, kernelapp, kernelbase, zmqshell
from ipykernel.comm.comm import BaseComm


def test_version_is_the_one_we_know() -> None:
    """7.4 is the floor: below it requests can be lost for good (jupyter-facts 0.2)."""
    assert (7, 4) <= ipykernel.version_info[:2] < (8, 0)


def test_control_messages_go_through_dispatch_control() -> None:
    """``start`` hands ``self.dispatch_control`` to the control stream, so overriding it sees every message."""
    source = inspect.getsource(kernelbase.Kernel.start)
    assert "self.control_stream.on_recv(self.dispatch_control, copy=False)" in source


def test_shell_without_channel_thread_goes_through_shell_main() -> None:
    """Without a shell channel thread ``start`` reads shell in the main loop and calls ``shell_main(None, msg)``."""
    source = inspect.getsource(kernelbase.Kernel.start)
    assert "partial(self.shell_main, None)" in source
    assert list(inspect.signature(kernelbase.Kernel.shell_main).parameters) == ["self", "subshell_id", "msg"]
    assert "if self.shell_channel_thread:" in inspect.getsource(kernelapp.IPKernelApp.init_kernel)


def test_async_cells_ask_the_channel_thread_for_its_parent() -> None:
    """An awaiting cell compares its thread with ``shell_channel_thread.parent_thread``, whether there is one or not."""
    source = inspect.getsource(ipkernel.IPythonKernel.do_execute)
    assert "self.shell_channel_thread.parent_thread" in source
    assert isinstance(kernelbase.Kernel._supports_kernel_subshells, property)


def test_awaiting_cells_are_cancelled_through_one_method() -> None:
    """``_cancel_on_sigint(future)`` is the context manager round an awaiting cell; we bring our own."""
    assert "self._cancel_on_sigint" in inspect.getsource(ipkernel.IPythonKernel.do_execute)
    assert "self.io_loop.add_callback(set_sigint_result)" in inspect.getsource(
        ipkernel.IPythonKernel._cancel_on_sigint
    )


def test_main_shell_has_one_lock() -> None:
    """Cells of the main shell are serialised by ``_main_asyncio_lock``; our agent cells take it too."""
    assert "_main_asyncio_lock" in inspect.getsource(kernelbase.Kernel.shell_main)


def test_xpub_greets_subscribers() -> None:
    """iopub is an XPUB that publishes ``iopub_welcome`` for each subscription: that is how it is *heard*."""
    assert "iopub_welcome" in inspect.getsource(iostream.IOPubThread)
    assert "zmq.XPUB" in inspect.getsource(kernelapp.IPKernelApp.init_iopub)


def test_sockets_are_bound_through_one_method() -> None:
    """``_bind_socket`` is where iopub's high-water mark can be set before bind."""
    for method in (kernelapp.IPKernelApp.init_iopub, kernelapp.IPKernelApp.init_control):
        assert "self._bind_socket(" in inspect.getsource(method)


def test_interrupts_are_armed_in_handler_hooks() -> None:
    """Stock code arms SIGINT in ``pre_handler_hook`` and disarms it in ``post_handler_hook``, and nowhere else."""
    assert "default_int_handler" in inspect.getsource(kernelbase.Kernel.pre_handler_hook)
    others = inspect.getsource(kernelbase.Kernel.dispatch_shell) + inspect.getsource(ipkernel.IPythonKernel)
    assert "default_int_handler" not in others


def test_comms_are_rerouted_to_subshells() -> None:
    """7.4 re-routes shell comm messages to the shell that sent last: why answers come on control (0.1)."""
    assert hasattr(BaseComm, "_reply_subshell_for")


def test_debugger_is_asked_for_by_module() -> None:
    """``_is_debugpy_available`` is imported from ``ipykernel.debugger`` where it is needed, each time."""
    for function in (ipkernel.IPythonKernel.__init__, ipkernel.IPythonKernel.dispatch_debugpy):
        assert "from .debugger import _is_debugpy_available" in inspect.getsource(function)
    assert hasattr(debugger.Debugger, "process_request")
    assert hasattr(debugger.Debugger, "handle_stopped_event")


def test_shell_colours_children_in_init_environment() -> None:
    """``FORCE_COLOR`` and its like are set in ``init_environment``, which we override."""
    source = inspect.getsource(zmqshell.ZMQInteractiveShell.init_environment)
    assert all(name in source for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TERM", "PAGER"))


def test_iopub_thread_sends_what_it_is_given() -> None:
    """``IOPubThread.send_multipart`` takes finished frames from any thread."""
    assert "self.schedule(" in inspect.getsource(iostream.IOPubThread.send_multipart)


def test_execute_request_passes_cell_metadata() -> None:
    """``do_execute`` gets the request's metadata only if its signature takes it."""
    assert kernelbase._accepts_parameters(ipkernel.IPythonKernel.do_execute, ["cell_meta"])["cell_meta"]


@pytest.mark.parametrize(("bytes_in_path", "fits"), [(107, True), (108, False)])
def test_length_of_socket_paths(
    tmp_path_factory: pytest.TempPathFactory, bytes_in_path: int, fits: bool
) -> None:
    """107 bytes of path can be bound, 108 cannot."""
    folder = tmp_path_factory.mktemp("s", numbered=True)
    path = str(folder) + "/"
    path += "x" * (bytes_in_path - len(path))
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    try:
        if fits:
            socket.bind(f"ipc://{path}")
        else:
            with pytest.raises(zmq.ZMQError):
                socket.bind(f"ipc://{path}")
    finally:
        socket.close(0)
        context.term()
