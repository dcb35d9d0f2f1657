"""How a per-call script starts, runs and ends inside its interpreter.

``staging.py`` joins ``wire``, ``api``, ``pipe`` and this module into one file, ``lemon_tools``, which the
interpreter is given as its script: ``python <workspace>/lemon_tools.pyc <descriptor>``.  :func:`main` makes
that module importable under its name, puts a fresh ``__main__`` in its place and runs ``script.py`` there.

The problem.  The script must not notice: ``sys.argv``, ``__file__``, exit codes, threads, ``atexit``,
``multiprocessing`` and ``inspect.getsource`` are those of ``python script.py``, while tracebacks say
``<cell 1>``, hold no frame of ours, and have source lines on every Python.

What does not work.  Catching everything and calling ``sys.exit`` loses what the interpreter does after an
exception (``sys.excepthook``, death by SIGINT, waiting for threads).  Leaving the traceback to the interpreter
shows our frames, and before 3.13 no source lines, because its own printer does not ask ``linecache``.

What we do.  Every exception leaves :func:`main` as it came.  ``sys.excepthook`` is ours and prints with the
``traceback`` module, imported only then (15 ms).  ``linecache`` learns the source of ``<cell 1>`` when
somebody imports it, from an import hook that removes itself.

What can still fail.  ``traceback.print_stack()`` in a script shows the frames below it, ours included.
"""

from __future__ import annotations

import io
import posix
import sys

from .api import open_grant
from .pipe import PipeCarrier
from .wire import INPUT_UNSUPPORTED, MAX_TRACEBACK_BYTES, cut_encoded, normalise_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType, TracebackType
    from typing import NoReturn

CELL_NAME = "<cell 1>"
MODULE_NAME = "lemon_tools"
SCRIPT_NAME = "script.py"


# Streams


class UnsupportedInputError(RuntimeError):
    """A script asked for input; there is nobody who could answer (behaviour 6.10)."""

    __module__ = "lemon_tools"


class _NoBytes(io.BufferedIOBase):
    """``sys.stdin.buffer``: every read raises; the descriptor is the null device, for child processes."""

    name = "<stdin>"
    mode = "rb"

    def _refuse(self, *arguments: object) -> NoReturn:
        raise UnsupportedInputError(INPUT_UNSUPPORTED)

    read = read1 = readinto = readinto1 = readline = readlines = peek = __next__ = _refuse

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0


class NoInput(io.TextIOBase):
    """``sys.stdin`` of a script: every read raises UnsupportedInputError, and so does ``input()``."""

    name = "<stdin>"
    mode = "r"
    encoding = "utf-8"
    errors = "strict"
    buffer = _NoBytes()

    def _refuse(self, *arguments: object) -> NoReturn:
        raise UnsupportedInputError(INPUT_UNSUPPORTED)

    read = readline = readlines = __next__ = _refuse

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0


def open_output(descriptor: int, name: str) -> io.TextIOWrapper:
    """Return a line-buffered UTF-8 stream on `descriptor`, whatever PYTHONUNBUFFERED says (behaviour 7.4)."""
    raw = io.FileIO(descriptor, "wb", closefd=False)
    raw.name = name
    stream = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True
    )
    stream.mode = "w"  # type: ignore[misc]
    return stream


# Tracebacks


def format_exception(error: BaseException, hidden: Sequence[str]) -> str:
    """Return the traceback of `error` and its causes, without frames whose file name is in `hidden`.

    An exception without any frame left (a syntax error of the script itself) has no header either, as when
    the interpreter prints it.
    """
    import traceback

    formatted = traceback.TracebackException(type(error), error, error.__traceback__)
    waiting = [formatted]
    seen = set()
    while waiting:
        entry = waiting.pop()
        if id(entry) in seen:
            continue
        seen.add(id(entry))
        frames = [frame for frame in entry.stack if frame.filename not in hidden]
        entry.stack[:] = frames
        causes = [entry.__cause__, entry.__context__, *(getattr(entry, "exceptions", None) or ())]
        waiting.extend(cause for cause in causes if cause is not None)
    lines = list(formatted.format())
    return normalise_text("".join(lines))


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the filtered traceback to descriptor 2, after all that the script printed (behaviour 6.10)."""
    report = cut_encoded(format_exception(error.with_traceback(trace), _own_files()), MAX_TRACEBACK_BYTES)
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except Exception:  # noqa: S110 - a script may have put anything there, or closed it
            pass
    data = report.encode("utf-8", "backslashreplace")
    posix.set_blocking(2, True)  # asyncio's pipe transports change that
    while data:
        data = data[posix.write(2, data) :]


def _own_files() -> tuple[str, ...]:
    """Return the file names of our code objects: the joined module's, and that of the stub around its source."""
    return (main.__code__.co_filename, sys.modules[MODULE_NAME].__file__ or "")


def _shield_excepthook() -> None:
    """Where the script has its own ``sys.excepthook``, let it get a traceback that begins with the script."""
    hook = sys.excepthook
    if hook is _excepthook or not callable(hook):
        return

    def shielded(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in _own_files():
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = shielded


# Source lines


class _SourceHook:
    """Tells ``linecache`` the source of the script as soon as somebody imports it (8 ms that we save)."""

    def __init__(self, source: str) -> None:
        self.source = source

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != "linecache":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader's own again
            finders: list[object] = sys.meta_path  # type: ignore[assignment]
            if self in finders:
                finders.remove(self)
            loader.exec_module(module)
            self.tell(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def tell(self, linecache: ModuleType) -> None:
        lines = self.source.split("\n")
        entry = (len(self.source), None, [line + "\n" for line in lines], CELL_NAME)
        linecache.cache[CELL_NAME] = entry


def _keep_source(source: str) -> None:
    hook = _SourceHook(source)
    linecache = sys.modules.get("linecache")
    if linecache is not None:
        hook.tell(linecache)
    else:
        sys.meta_path.insert(0, hook)  # type: ignore[arg-type]


# The run


def main() -> None:
    """Become ``lemon_tools``, take the grant, and run ``script.py`` as ``__main__``."""
    carrier = PipeCarrier(int(sys.argv[1]))
    cell, token, max_text_bytes, helpers = carrier.receive_grant().split("\n")
    open_grant(carrier, cell, token, int(max_text_bytes), helpers.split())

    own = sys.modules["__main__"]
    own.__name__ = MODULE_NAME
    sys.modules[MODULE_NAME] = own
    assert own.__file__ is not None
    workspace = own.__file__.rpartition("/")[0]
    script = workspace + "/" + SCRIPT_NAME
    sys.argv[:] = [SCRIPT_NAME]
    if not sys.path or sys.path[0] != workspace:  # PYTHONSAFEPATH
        sys.path.insert(0, workspace)

    program = type(sys)("__main__")
    program.__file__ = script
    program.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = program

    sys.stdout = sys.__stdout__ = open_output(1, "<stdout>")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open_output(2, "<stderr>")  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = NoInput()  # type: ignore[misc,assignment]
    sys.excepthook = _excepthook

    with io.FileIO(script) as file:
        source = file.readall().decode()
    _keep_source(source)
    try:
        exec(compile(source, CELL_NAME, "exec", dont_inherit=True), program.__dict__)  # noqa: S102
    except KeyboardInterrupt as error:
        # The interpreter notes it, to die of SIGINT later, and forgets when code is evaluated from a string in
        # between.  What printing imports does that (named tuples), so it is imported before.
        format_exception(error, _own_files())
        _shield_excepthook()
        raise
    except BaseException:
        _shield_excepthook()
        raise
