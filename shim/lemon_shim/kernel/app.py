"""LemonKernelApp: how the kernel process is set up, which depends on who launched it (behaviour 6.5)."""

from __future__ import annotations

import logging
import os
import signal
import sys
from json import JSONDecoder, JSONEncoder
from typing import Any

import zmq
from ipykernel.kernelapp import IPKernelApp, kernel_flags
from IPython.core.profiledir import ProfileDir
from jupyter_client.jsonutil import json_default
from traitlets import Bool, Dict, Type
from traitlets.config import Config

from lemon_shim.kernel import SESSION_FLAG
from lemon_shim.kernel.interrupts import ignore
from lemon_shim.kernel.kernel import LemonKernel, NoShellChannelThread
from lemon_shim.kernel.streams import CellStreams

__all__ = ["LemonKernelApp"]

IOPUB_HIGH_WATER_MARK = 100_000
"""iopub drops silently above its mark; ipykernel's is 1000 (jupyter-facts 0.7)."""

_encode = JSONEncoder(default=json_default, ensure_ascii=False, allow_nan=False).encode
_decode = JSONDecoder().decode


def _pack(value: object) -> bytes:
    """Pack for ``Session`` with an encoder bound at import; ``json.dumps`` is a script's to replace."""
    try:
        return _encode(value).encode("utf-8", "surrogateescape")
    except (TypeError, ValueError):
        from ipykernel.jsonutil import json_clean

        return _encode(json_clean(value)).encode("utf-8", "surrogateescape")


def _unpack(data: bytes | str) -> object:
    return _decode(data if isinstance(data, str) else bytes(data).decode("utf-8", "replace"))


class _PrivateProfile(ProfileDir):
    """IPython's folder of a session launch: nothing to run in it, and nothing to read."""

    def check_dirs(self, change: object = None) -> None:
        """Make no folders in it; IPython's README in one would keep its source's mode, too (behaviour 8)."""

    check_log_dir = check_startup_dir = check_security_dir = check_pid_dir = check_dirs


class LemonKernelApp(IPKernelApp):
    """ipykernel's application; its name stays, so that the user's ``ipython_kernel_config`` applies."""

    kernel_class: Any = Type(LemonKernel, klass="ipykernel.kernelbase.Kernel").tag(config=True)
    session_launch = Bool(False, help="Set by our own host: private, quiet, no start-up files.").tag(
        config=True
    )
    flags = Dict(
        kernel_flags
        | {
            SESSION_FLAG.removeprefix("--"): (
                {"LemonKernelApp": {"session_launch": True}},
                "Launched by the host of execute_code.",
            )
        }
    )

    cell_streams: CellStreams | None = None

    # Both launches

    def _bind_socket(self, s: zmq.Socket[bytes], port: int) -> int:
        if s.type == zmq.XPUB:
            s.sndhwm = IOPUB_HIGH_WATER_MARK
        return super()._bind_socket(s, port)  # type: ignore[no-any-return]

    def log_connection_info(self) -> None:
        """Note the ports and print nothing: nobody reads a terminal here."""
        self._ports = {
            name: getattr(self, f"{name}_port") for name in ("shell", "iopub", "stdin", "hb", "control")
        }

    def init_poller(self) -> None:
        """Do not poll for the parent's death: the tracker sees it (behaviour 6.12)."""

    def init_signal(self) -> None:
        signal.signal(signal.SIGINT, ignore)

    def init_kernel(self) -> None:
        self.session.pack, self.session.unpack = _pack, _unpack
        history = {"enabled": False} if self.session_launch else {"hist_file": ":memory:"}
        self.update_config(Config({"HistoryManager": history}))
        super().init_kernel()

    def start(self) -> None:
        self.kernel.start()
        self.io_loop = self.kernel.io_loop
        self.kernel.serve()

    # Session launch

    def _find_my_config(self, cfg: Config) -> Config:
        """Return what is configured for this object, and in this object's section for its parts: nothing.

        In a session launch nobody configures anything.  traitlets asks each part's parent, and its parent, ...
        for their sections: for 33 parts that was a tenth of the set-up.
        """
        return Config() if self.session_launch else super()._find_my_config(cfg)

    def parse_command_line(self, argv: Any = None) -> None:
        """Take the arguments of a session launch as they are; the parser for all of ipykernel's costs 10 ms."""
        words = sys.argv[1:] if argv is None else list(argv)
        if len(words) != 3 or words[0] != "-f" or words[2] != SESSION_FLAG:
            super().parse_command_line(argv)
            return
        self.argv, self.extra_args = words, []
        self.connection_file, self.session_launch = words[1], True

    def init_pdb(self) -> None:
        """Leave ``pdb`` as it is in session kernels, as it is in per-call scripts."""
        if not self.session_launch:
            super().init_pdb()

    def init_profile_dir(self) -> None:
        if not self.session_launch:
            super().init_profile_dir()
            return
        folder = os.path.join(os.path.dirname(os.path.abspath(self.connection_file)), "ipython")
        path = list(sys.path)
        self.ipython_dir = folder
        # IPython puts it on sys.path, and takes the former one off: "", which it reads as the current folder
        sys.path[:] = path
        location = os.path.join(folder, "profile_default")
        self.profile_dir = _PrivateProfile.create_profile_dir(location, self.config)

    def init_config_files(self) -> None:
        if not self.session_launch:
            super().init_config_files()

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        if not self.session_launch:
            super().load_config_file(suppress_errors)

    def configure_tornado_logger(self) -> None:
        """Keep tornado from calling ``basicConfig``, which would change how a script's logging looks."""
        if not self.session_launch:
            super().configure_tornado_logger()
        elif logging.lastResort is not None:
            logging.getLogger("tornado").addHandler(logging.lastResort)

    def init_control(self, context: zmq.Context[Any]) -> None:
        super().init_control(context)
        if self.session_launch:
            self.shell_channel_thread = NoShellChannelThread()  # the main thread reads shell; see kernel.py

    def init_io(self) -> None:
        if not self.session_launch:
            super().init_io()
            return
        self.log.setLevel(logging.CRITICAL)  # descriptor 2 is the script's output
        self.cell_streams = CellStreams()
        self.cell_streams.install()
        from ipykernel.displayhook import ZMQDisplayHook

        self.displayhook = ZMQDisplayHook(self.session, self.iopub_socket)
        self.patch_io()

    def init_path(self) -> None:
        if not self.session_launch:
            if "" not in sys.path:
                sys.path.insert(0, "")  # after our imports: a random.py in the folder must not kill the start
            return
        sys.argv = ["script.py"]

    def init_gui_pylab(self) -> None:
        if not self.session_launch:
            super().init_gui_pylab()

    def init_extensions(self) -> None:
        if not self.session_launch:
            super().init_extensions()

    def init_code(self) -> None:
        if not self.session_launch:
            super().init_code()
