"""Scripts of the kind models write; each must give the same result in both modes.

``SCRIPTS`` maps a name to a source.  ``DIFFERENT`` says which ones differ and why: they become the table of
``docs/parity.md``.
"""

from __future__ import annotations

SCRIPTS: dict[str, str] = {}


def _add(name: str, source: str) -> None:
    assert name not in SCRIPTS, name
    SCRIPTS[name] = source.strip("\n") + "\n"


# -- the language -------------------------------------------------------------------------------------------
_add(
    "names of the module", "print(__name__, __doc__, __package__, __spec__, __builtins__)"
)  # before a docstring stays
_add("print", 'print("hello", 42, [1, 2])')
_add(
    "future annotations",
    """
from __future__ import annotations
def f(x: Missing) -> Undefined:
    return x
print(f(3), f.__annotations__)
""",
)
_add(
    "docstring then future",
    '''
"""What this does."""
from __future__ import annotations
class A:
    x: Later = 1
print(A.x, __doc__)
''',
)
_add(
    "docstring",
    '''
"""Only a docstring."""
print(__doc__)
''',
)
_add(
    "name is main",
    """
def main():
    print("main ran")
if __name__ == "__main__":
    main()
""",
)
_add(
    "dataclasses",
    """
from dataclasses import dataclass, field, asdict
@dataclass(order=True)
class Item:
    price: float
    name: str = field(compare=False)
items = sorted([Item(2.5, "b"), Item(1.0, "a")])
print(items, asdict(items[0]))
""",
)
_add(
    "enum",
    """
import enum
class Colour(enum.Enum):
    RED = 1
    GREEN = enum.auto()
print(list(Colour), Colour(2), Colour["RED"].name)
""",
)
_add(
    "namedtuple",
    """
from collections import namedtuple
from typing import NamedTuple
Point = namedtuple("Point", "x y")
class P(NamedTuple):
    a: int
    b: str = "z"
print(Point(1, 2), P(3))
""",
)
_add(
    "closures and nonlocal",
    """
def counter():
    n = 0
    def step():
        nonlocal n
        n += 1
        return n
    return step
c = counter()
print(c(), c(), c())
""",
)
_add(
    "globals in comprehension",
    """
factor = 3
def scale(values):
    return [v * factor for v in values]
print(scale(range(4)), {k: factor for k in "ab"}, sum(factor for _ in range(2)))
""",
)
_add(
    "generators",
    """
def gen():
    received = yield 1
    print("got", received)
    yield from (2, 3)
g = gen()
print(next(g), g.send("x"), list(g))
""",
)
_add(
    "context managers",
    """
from contextlib import contextmanager, ExitStack, suppress
@contextmanager
def ctx(name):
    print("in", name)
    try:
        yield name
    finally:
        print("out", name)
with ExitStack() as stack:
    names = [stack.enter_context(ctx(n)) for n in "ab"]
with suppress(KeyError):
    {}["x"]
print(names)
""",
)
_add(
    "decorators",
    """
import functools
def twice(f):
    @functools.wraps(f)
    def inner(*args):
        return f(f(*args))
    return inner
@twice
def add_one(x):
    "adds one"
    return x + 1
print(add_one(1), add_one.__name__, add_one.__doc__)
""",
)
_add(
    "lru_cache",
    """
from functools import lru_cache
@lru_cache(maxsize=None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
print(fib(80), fib.cache_info().misses)
""",
)
_add(
    "walrus and f-strings",
    """
if (n := len("four")) > 3:
    print(f"{n=} {n:>5} {n!r:>4} {'nested ' + str(n)}")
""",
)
_add(
    "structural match",
    """
import sys
def kind(value):
    match value:
        case {"type": str(t), **rest}:
            return t, rest
        case [x, *_]:
            return x
        case _:
            return None
print(kind({"type": "a", "b": 1}), kind([7, 8]), kind(5))
""",
)
_add(
    "star expressions",
    """
first, *middle, last = range(6)
print(first, middle, last, [*middle, *"ab"], {**{"a": 1}, "b": 2})
""",
)
_add(
    "global statement",
    """
total = 0
def add(n):
    global total
    total += n
for i in range(5):
    add(i)
print(total)
""",
)
_add(
    "class machinery",
    """
class Meta(type):
    def __new__(mcls, name, bases, namespace):
        namespace["tag"] = name.lower()
        return super().__new__(mcls, name, bases, namespace)
class Base(metaclass=Meta):
    def __init_subclass__(cls, **kwargs):
        print("subclass", cls.__name__)
class Child(Base):
    @property
    def upper(self):
        return self.tag.upper()
print(Child().upper, Child.__module__, Child.__qualname__)
""",
)
_add("repr of a class", "class Thing: pass\nprint(Thing, Thing.__module__)")
_add(
    "slots and abc",
    """
from abc import ABC, abstractmethod
class Shape(ABC):
    __slots__ = ()
    @abstractmethod
    def area(self): ...
class Square(Shape):
    __slots__ = ("side",)
    def __init__(self, side): self.side = side
    def area(self): return self.side ** 2
try:
    Shape()
except TypeError as error:
    print("TypeError")
print(Square(3).area())
""",
)
_add(
    "protocols and generics",
    """
from typing import Protocol, TypeVar, Generic, runtime_checkable
T = TypeVar("T")
@runtime_checkable
class Sized2(Protocol):
    def size(self) -> int: ...
class Box(Generic[T]):
    def __init__(self, value: T): self.value = value
    def size(self) -> int: return 1
print(isinstance(Box(1), Sized2), Box[int])
""",
)
_add(
    "exec and eval",
    """
space = {}
exec("x = 1\\ny = x + 1", space)
print(space["y"], eval("space['x'] * 10"), eval(compile("3*4", "<s>", "eval")))
""",
)
_add(
    "locals and vars at top",
    """
alpha_value = 1
print("alpha_value" in globals(), "alpha_value" in locals(), globals() is locals())
""",
)
_add(
    "del and gc",
    """
import gc, weakref
class Node: pass
node = Node(); node.me = node
ref = weakref.ref(node)
del node
gc.collect()
print(ref() is None)
""",
)
_add(
    "finalizer order",
    """
class Loud:
    def __del__(self): print("deleted")
loud = Loud()
del loud
print("after")
""",
)

# -- exceptions -----------------------------------------------------------------------------------------------
_add("raise", 'x = 1\nraise ValueError("boom")')
_add(
    "raise in function",
    """
def inner(n):
    return 1 / n
def outer():
    return inner(0)
print("before")
outer()
""",
)
_add(
    "chained",
    """
try:
    int("x")
except ValueError as error:
    raise RuntimeError("wrapped") from error
""",
)
_add(
    "context",
    """
try:
    {}["k"]
except KeyError:
    [][1]
""",
)
_add(
    "suppressed context",
    """
try:
    {}["k"]
except KeyError:
    raise LookupError("clean") from None
""",
)
_add(
    "custom exception",
    """
class MyError(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code
raise MyError(7)
""",
)
_add("exception without message", "raise ValueError")
_add(
    "unprintable exception",
    """
class Bad(Exception):
    def __str__(self): raise RuntimeError("no str")
raise Bad()
""",
)
_add("multi-line message", 'raise ValueError("first\\nsecond\\nthird")')
_add("unicode message", 'raise ValueError("é ü 漢字 🎉")')
_add("syntax error", "print('start')\nthis is not python(")
_add("indentation error", "def f():\nprint(1)")
_add("unclosed bracket", "x = (1,\ny = 2\n")
_add("name error", "print(undefined_name)")
_add(
    "recursion error",
    """
def down(n): return down(n + 1)
try:
    down(0)
except RecursionError:
    print("caught")
""",
)
_add(
    "keyboard interrupt caught",
    """
try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    print("caught")
""",
)
_add(
    "traceback module",
    """
import traceback
def f(): raise KeyError("k")
try:
    f()
except KeyError:
    print(traceback.format_exc())
""",
)
_add(
    "sys.exc_info",
    """
import sys
try:
    1 / 0
except ZeroDivisionError:
    print(sys.exc_info()[0].__name__, sys.exc_info()[2].tb_lineno)
print(sys.exc_info())
""",
)
_add("assert", 'assert 1 == 2, "not equal"')
_add(
    "finally runs",
    """
try:
    try:
        raise ValueError("v")
    finally:
        print("finally")
except ValueError:
    print("except")
""",
)
_add("excepthook untouched", "import sys\nsys.excepthook = lambda *a: print('hook ran')\nprint('set')")
_add("error in nested call of text", "text('kept')\nraise OSError(2, 'No such thing')")

# -- exits ----------------------------------------------------------------------------------------------------
_add("sys.exit", "import sys\nprint('bye')\nsys.exit()")
_add("sys.exit 0", "import sys\nprint('bye')\nsys.exit(0)")
_add("sys.exit 3", "import sys\nprint('bye')\nsys.exit(3)")
_add("sys.exit message", "import sys\nprint('bye')\nsys.exit('fatal: no')")
_add("exit builtin", "print('bye')\nexit()")
_add("quit builtin", "print('bye')\nquit(2)")
_add("raise SystemExit", "raise SystemExit(4)")
_add(
    "caught SystemExit",
    """
import sys
try:
    sys.exit(5)
except SystemExit as stop:
    print("code", stop.code)
""",
)

# -- asyncio --------------------------------------------------------------------------------------------------
_add(
    "asyncio.run",
    """
import asyncio
async def work(n):
    await asyncio.sleep(0.001)
    return n * 2
async def main():
    return await asyncio.gather(*(work(n) for n in range(4)))
print(asyncio.run(main()))
""",
)
_add(
    "asyncio.run twice",
    """
import asyncio
async def one(): return 1
print(asyncio.run(one()), asyncio.run(one()))
""",
)
_add(
    "run_until_complete",
    """
import asyncio
async def work(): return "done"
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
print(asyncio.get_event_loop().run_until_complete(work()))
loop.close()
""",
)
_add(
    "get_event_loop",
    """
import asyncio, warnings
async def work(): return "done"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    print(asyncio.get_event_loop().run_until_complete(work()))
""",
)
_add(
    "asyncio timeout",
    """
import asyncio
async def main():
    try:
        await asyncio.wait_for(asyncio.sleep(5), 0.01)
    except (asyncio.TimeoutError, TimeoutError):
        print("timed out")
asyncio.run(main())
""",
)
_add(
    "asyncio subprocess",
    """
import asyncio, sys
async def main():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(6*7)", stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    print(out.decode().strip(), process.returncode)
asyncio.run(main())
""",
)
_add(
    "asyncio to_thread and helpers",
    """
import asyncio
async def main():
    results = await asyncio.gather(*(asyncio.to_thread(read, "data.txt") for _ in range(3)))
    print(results[0] == results[1] == results[2], results[0])
asyncio.run(main())
""",
)
_add(
    "async generators",
    """
import asyncio
async def ticks(n):
    for i in range(n):
        yield i
        await asyncio.sleep(0)
async def main():
    print([t async for t in ticks(3)])
asyncio.run(main())
""",
)
_add(
    "no running loop",
    """
import asyncio
try:
    asyncio.get_running_loop()
    print("running")
except RuntimeError as error:
    print(error)
""",
)
_add(
    "asyncio error",
    """
import asyncio
async def main():
    raise ValueError("from a task")
asyncio.run(main())
""",
)

# -- threads and processes ------------------------------------------------------------------------------------
_add(
    "threads",
    """
import threading
results = []
lock = threading.Lock()
def work(n):
    with lock:
        results.append(n)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(sorted(results), threading.current_thread() is threading.main_thread())
""",
)
_add(
    "thread pool",
    """
from concurrent.futures import ThreadPoolExecutor, as_completed
with ThreadPoolExecutor(4) as pool:
    print(sorted(f.result() for f in as_completed([pool.submit(pow, n, 2) for n in range(5)])))
""",
)
_add(
    "thread pool and helpers",
    """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print(len(set(pool.map(read, ["data.txt"] * 6))))
""",
)
_add(
    "exception in a thread",
    """
import threading
def bad(): raise ValueError("in a thread")
t = threading.Thread(target=bad, name="worker-1")
t.start(); t.join()
print("main goes on")
""",
)
_add(
    "queue and events",
    """
import queue, threading
q, done = queue.Queue(), threading.Event()
def consume():
    while (item := q.get()) is not None:
        print("item", item)
    done.set()
threading.Thread(target=consume, daemon=True).start()
for i in range(3): q.put(i)
q.put(None)
print(done.wait(5))
""",
)
_add(
    "timer",
    """
import threading
t = threading.Timer(0.01, lambda: print("tick"))
t.start(); t.join()
""",
)
_add(
    "multiprocessing fork",
    """
import multiprocessing
def square(n): return n * n
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        print(pool.map(square, range(5)))
""",
)
_add(
    "multiprocessing fork printing",
    """
import multiprocessing
def shout(n): print("child", n)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    p = context.Process(target=shout, args=(1,))
    p.start(); p.join()
    print("exit", p.exitcode)
""",
)
_add(
    "multiprocessing queue",
    """
import multiprocessing
def put(q): q.put("from child")
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    q = context.Queue()
    p = context.Process(target=put, args=(q,))
    p.start(); print(q.get(timeout=10)); p.join()
""",
)
_add(
    "process pool fork",
    """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
def cube(n): return n ** 3
if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        print(list(pool.map(cube, range(4))))
""",
)
_add(
    "multiprocessing spawn of a library function",
    """
import multiprocessing, os
if __name__ == "__main__":
    p = multiprocessing.get_context("spawn").Process(target=os.write, args=(1, b"spawned\\n"))
    p.start(); p.join()
    print("exit", p.exitcode)
""",
)
_add(
    "multiprocessing spawn of the script's own function",
    """
import multiprocessing
def shout(n): print("spawned", n)
if __name__ == "__main__":
    p = multiprocessing.get_context("spawn").Process(target=shout, args=(1,))
    p.start(); p.join()
    print("exit", p.exitcode)
""",
)
_add(
    "os.fork",
    """
import os
pid = os.fork()
if pid == 0:
    os.write(1, b"child\\n")
    os._exit(7)
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
)
_add(
    "helpers in a child",
    """
import os, sys
pid = os.fork()
if pid == 0:
    try:
        read("data.txt")
    except ToolError as error:
        os.write(1, str(error).encode() + b"\\n")
    os._exit(0)
os.waitpid(pid, 0)
print(read("data.txt"))
""",
)
_add(
    "subprocess.run",
    """
import subprocess, sys
r = subprocess.run([sys.executable, "-c", "print('out'); import sys; print('err', file=sys.stderr)"], capture_output=True, text=True)
print(repr(r.stdout), repr(r.stderr), r.returncode)
""",
)
_add(
    "subprocess inherits",
    """
import subprocess
print("one")
subprocess.run(["echo", "two"])
print("three")
subprocess.run("echo four >&2", shell=True)
print("five")
""",
)
_add(
    "subprocess stdout=sys.stdout",
    """
import subprocess, sys
subprocess.run(["echo", "to sys.stdout"], stdout=sys.stdout, stderr=sys.stderr)
""",
)
_add(
    "subprocess pipeline",
    """
import subprocess
a = subprocess.Popen(["printf", "b\\\\na\\\\nc\\\\n"], stdout=subprocess.PIPE)
b = subprocess.Popen(["sort"], stdin=a.stdout, stdout=subprocess.PIPE, text=True)
a.stdout.close()
print(b.communicate()[0].split())
a.wait()
""",
)
_add(
    "subprocess check",
    """
import subprocess
try:
    subprocess.run(["false"], check=True)
except subprocess.CalledProcessError as error:
    print(error)
""",
)
_add(
    "subprocess timeout",
    """
import subprocess
try:
    subprocess.run(["sleep", "5"], timeout=0.1)
except subprocess.TimeoutExpired as error:
    print("timeout", round(error.timeout, 1))
""",
)
_add(
    "subprocess stdin",
    """
import subprocess
print(subprocess.run(["cat"], input="through cat", text=True, capture_output=True).stdout)
print(repr(subprocess.run(["cat"], capture_output=True, text=True).stdout))
""",
)
_add("os.system", "import os\nprint('code', os.system('echo system; exit 3') >> 8)")
_add("os.popen", "import os\nprint(os.popen('echo popen').read())")
_add(
    "signal handlers",
    """
import os, signal
got = []
old = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
os.kill(os.getpid(), signal.SIGUSR1)
print(got == [signal.SIGUSR1])
signal.signal(signal.SIGUSR1, old)
""",
)
_add(
    "signal alarm",
    """
import signal, time
class Alarm(Exception): pass
def ring(number, frame): raise Alarm
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    time.sleep(5)
except Alarm:
    print("rang")
signal.signal(signal.SIGALRM, signal.SIG_DFL)
""",
)

# -- the process ----------------------------------------------------------------------------------------------
_add("sys.argv", "import sys\nprint(sys.argv)")
_add(
    "argparse",
    """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--count", type=int, default=3)
parser.add_argument("--name")
print(parser.parse_args())
print(parser.prog)
""",
)
_add(
    "argparse error",
    """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("required")
parser.parse_args()
""",
)
_add("cwd", "import os\nprint(os.path.basename(os.getcwd()), sorted(os.listdir('.')))")
_add("chdir does not move helpers", "import os\nos.chdir('/')\nprint(read('data.txt'))")
_add(
    "environment",
    """
import os
os.environ["PARITY_VARIABLE"] = "set"
import subprocess
print(subprocess.run("echo $PARITY_VARIABLE", shell=True, capture_output=True, text=True).stdout)
del os.environ["PARITY_VARIABLE"]
print([k for k in os.environ if k.startswith(("LEMON_", "JPY_", "JUPYTER_TOKEN")) and k != "LEMON_RUN_ID"])
""",
)
_add(
    "colour variables",
    """
import os
print({k: os.environ.get(k) for k in ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")})
""",
)
_add(
    "cwd is not importable",
    """
try:
    import neighbour
    print("imported")
except ImportError as error:
    print(error)
""",
)
_add("local shadowing module", "import random\nprint(hasattr(random, 'randint'))")
_add(
    "sys.path insert",
    """
import sys
sys.path.insert(0, "lib")
import parity_local
print(parity_local.VALUE)
sys.path.remove("lib")
del sys.modules["parity_local"]
""",
)
_add("umask", "import os\nold = os.umask(0o22)\nos.umask(old)\nprint(oct(old))")
_add("recursion limit", "import sys\nprint(sys.getrecursionlimit() >= 1000)")
_add("flags", "import sys\nprint(sys.flags.optimize, sys.flags.utf8_mode, sys.dont_write_bytecode)")
_add(
    "main module",
    """
import sys
main = sys.modules["__main__"]
value_of_mine = 5
print(main.__name__, main.value_of_mine, main.__dict__ is globals())
""",
)
_add("module reload", "import importlib, json\nprint(importlib.reload(json).dumps({}))")
_add("atexit is registered", "import atexit\nprint(callable(atexit.register))")
_add(
    "platform facts",
    "import sys, platform\nprint(sys.version_info[:2] == tuple(map(int, platform.python_version_tuple()[:2])))",
)
_add(
    "locale and encoding",
    "import sys\nprint(sys.stdout.encoding, sys.getfilesystemencoding(), sys.stdout.errors)",
)

# -- streams --------------------------------------------------------------------------------------------------
_add(
    "stderr order",
    """
import sys
print("one")
print("two", file=sys.stderr)
print("three")
sys.stderr.write("four\\n")
print("five")
""",
)
_add("print without newline", "print('a', end='')\nprint('b', end=' ')\nprint('c')")
_add("print flush", "for i in range(5): print(i, end=',', flush=True)")
_add("sys.stdout.write", "import sys\nn = sys.stdout.write('abc\\n')\nprint(n)")
_add(
    "sys.stdout.buffer", "import sys\nsys.stdout.buffer.write(b'bytes\\n')\nsys.stdout.flush()\nprint('text')"
)
_add("os.write", "import os\nprint('first')\nos.write(1, b'second\\n')\nprint('third')")
_add(
    "redirect_stdout",
    """
import contextlib, io
buffer = io.StringIO()
with contextlib.redirect_stdout(buffer):
    print("captured")
print(repr(buffer.getvalue()))
""",
)
_add(
    "replace sys.stdout",
    """
import sys, io
old, sys.stdout = sys.stdout, io.StringIO()
print("hidden")
seen = sys.stdout.getvalue()
sys.stdout = old
print("seen:", seen)
""",
)
_add("isatty and fileno", "import sys\nprint(sys.stdout.isatty(), sys.stdout.fileno(), sys.stderr.fileno())")
_add("unicode output", "print('é ü 漢字 🎉 \\u202e')")
_add("surrogates in output", "print('a\\ud800b')")
_add("binary junk in output", "import os\nos.write(1, b'\\xff\\xfe ok\\n')")
_add("ansi colours", "print('\\x1b[31mred\\x1b[0m plain')")
_add("carriage returns", "print('progress 1\\rprogress 2\\r\\nend')")
_add("big output", "for i in range(20000): print(i)")
_add("long line", "print('x' * 200_000)")
_add("input", "input('question? ')")
_add(
    "input caught",
    """
try:
    input("q")
except RuntimeError as error:
    print("refused:", error)
""",
)
_add(
    "stdin read",
    """
import sys
for read_it in (sys.stdin.read, sys.stdin.readline, lambda: next(iter(sys.stdin)), lambda: list(sys.stdin)):
    try:
        print("got", read_it())
    except RuntimeError as error:
        print(type(error).__mro__[1].__name__, "refused")
""",
)
_add(
    "getpass",
    """
import getpass, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        getpass.getpass()
    except Exception as error:
        print("refused")
""",
)
_add(
    "logging",
    """
import logging, sys
logger = logging.getLogger("parity")
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
logger.addHandler(handler)
logger.setLevel(logging.INFO)
logger.info("hello %s", "log")
logger.debug("not shown")
logger.removeHandler(handler)
""",
)
_add(
    "logging without configuration",
    """
import logging
logging.getLogger("parity.plain").warning("to stderr")
logging.getLogger("parity.plain").info("not shown")
""",
)
_add(
    "logging basicConfig",
    """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s:%(message)s", stream=sys.stdout, force=True)
logging.info("configured")
logging.getLogger().handlers.clear()
""",
)
_add(
    "warnings",
    """
import warnings
warnings.warn("careful")
warnings.warn("old", DeprecationWarning)
def f(): warnings.warn("from f", UserWarning, stacklevel=2)
f()
""",
)
_add(
    "warnings as errors",
    """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        warnings.warn("x")
    except UserWarning as error:
        print("raised", error)
""",
)
_add("no repr of the last expression", "1 + 1")
_add("pprint", "from pprint import pprint\npprint({'b': list(range(30)), 'a': {'nested': ['x' * 30] * 3}})")

# -- libraries ------------------------------------------------------------------------------------------------
_add(
    "json", "import json\nprint(json.dumps({'a': [1, None, True, 'é']}, sort_keys=True), json.loads('[1.5]'))"
)
_add("re", "import re\nprint(re.findall(r'(\\w+)@(\\w+)', 'a@b c@d'), re.sub('x+', 'y', 'axxb'))")
_add(
    "collections",
    "from collections import Counter, defaultdict, deque\nprint(Counter('banana').most_common(2), dict(defaultdict(list, a=[1])), deque([1, 2], 1))",
)
_add(
    "itertools",
    "import itertools as it\nprint(list(it.islice(it.count(5, 5), 3)), [''.join(g) for _, g in it.groupby('aabb')])",
)
_add(
    "pathlib",
    "from pathlib import Path\nPath('made.txt').write_text('x')\nprint(Path('made.txt').read_text(), Path('made.txt').resolve().name)\nPath('made.txt').unlink()",
)
_add("csv", "import csv, io\nprint(list(csv.DictReader(io.StringIO('a,b\\n1,2\\n'))))")
_add(
    "sqlite3",
    """
import sqlite3
db = sqlite3.connect(":memory:")
db.execute("create table t (a, b)")
db.executemany("insert into t values (?, ?)", [(1, "x"), (2, "y")])
print(db.execute("select sum(a), group_concat(b) from t").fetchone())
db.close()
""",
)
_add(
    "tempfile",
    """
import os, tempfile
with tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile("w+", dir=d) as f:
    f.write("x"); f.seek(0)
    print(f.read(), oct(os.stat(d).st_mode & 0o777))
print(os.path.exists(d))
""",
)
_add("open and close", "with open('data.txt') as f:\n    print([line.strip() for line in f])")
_add("open a descriptor", "import os\nwith open(os.dup(1), 'w') as f:\n    f.write('through open\\n')")
_add("datetime", "import datetime as dt\nprint(dt.datetime(2020, 2, 29) + dt.timedelta(days=366))")
_add(
    "decimal and fractions",
    "from decimal import Decimal\nfrom fractions import Fraction\nprint(Decimal('0.1') * 3, Fraction(1, 3) + Fraction(1, 6))",
)
_add("random is seeded apart", "import random\nrandom.seed(7)\nprint(random.random())")
_add(
    "hashlib and base64",
    "import hashlib, base64\nprint(hashlib.sha256(b'x').hexdigest()[:8], base64.b64encode(b'abc'))",
)
_add("zlib and gzip", "import gzip\nprint(gzip.decompress(gzip.compress(b'z' * 100)) == b'z' * 100)")
_add("struct", "import struct\nprint(struct.pack('>IH', 1, 2), struct.calcsize('qq'))")
_add(
    "socket pair",
    "import socket\na, b = socket.socketpair()\na.sendall(b'hi')\nprint(b.recv(9))\na.close(); b.close()",
)
_add(
    "local http server",
    """
import http.server, threading, urllib.request
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"served")
    def log_message(self, *a): pass
s = http.server.HTTPServer(("127.0.0.1", 0), H)
t = threading.Thread(target=s.serve_forever, daemon=True); t.start()
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(f"http://127.0.0.1:{s.server_port}/").read())
s.shutdown(); s.server_close(); t.join()
""",
)
_add("xml", "import xml.etree.ElementTree as E\nprint(E.tostring(E.fromstring('<a><b x=\"1\"/></a>')))")
_add(
    "unittest",
    """
import unittest
class T(unittest.TestCase):
    def test_ok(self): self.assertEqual(1, 1)
    def test_bad(self): self.assertEqual(1, 2)
result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromTestCase(T).run(result)
print(result.testsRun, len(result.failures))
""",
)
_add(
    "doctest",
    """
import doctest
def double(x):
    '''
    >>> double(2)
    4
    '''
    return 2 * x
print(doctest.run_docstring_examples(double, {"double": double}))
""",
)
_add("timeit", "import timeit\nprint(timeit.timeit('1+1', number=10) >= 0)")
_add("ast", "import ast\nprint(ast.dump(ast.parse('x = 1').body[0].value))")
_add(
    "pickle a class of the script",
    """
import pickle
class Pickled:
    def __init__(self, v): self.v = v
print(pickle.loads(pickle.dumps(Pickled(3))).v, pickle.loads(pickle.dumps(Pickled)) is Pickled)
""",
)
_add("copy", "import copy\na = [[1], 2]\nb = copy.deepcopy(a)\nb[0].append(9)\nprint(a, b)")
_add(
    "inspect.getsource",
    """
import inspect
def documented(a, b=2):
    # a comment that must be in the source
    return a + b
print(inspect.getsource(documented))
print(inspect.signature(documented))
""",
)
_add(
    "inspect.getsource of a class",
    """
import inspect
class Klass:
    def method(self): return 1
print(inspect.getsource(Klass.method))
print(inspect.getsource(Klass))
""",
)
_add("help", "def f(x):\n    'doc of f'\nimport pydoc\nprint(pydoc.plain(pydoc.render_doc(f)))")
_add(
    "types and typing",
    "import typing\ndef f(a: int, b: 'str' = '') -> typing.Optional[int]: ...\nprint(typing.get_type_hints(f))",
)
_add(
    "operator and functools",
    "import operator, functools\nprint(functools.reduce(operator.mul, range(1, 6)), sorted('bca', key=functools.cmp_to_key(lambda a, b: (a > b) - (a < b))))",
)
_add("big integers", "print(2 ** 200, (10 ** 30) // 7)")
_add(
    "sorting and strings",
    "print(sorted({'b': 1, 'a': 2}.items()), 'a-b'.partition('-'), 'x'.center(5, '*'), 'ß'.upper())",
)
_add(
    "bytes and bytearray",
    "b = bytearray(b'abc'); b[0] = 120\nprint(b, bytes(3), memoryview(b)[1:].tobytes())",
)
_add(
    "heapq and bisect", "import heapq, bisect\nprint(heapq.nsmallest(2, [3, 1, 2]), bisect.bisect([1, 3], 2))"
)
_add(
    "shlex and textwrap",
    "import shlex, textwrap\nprint(shlex.split('a \"b c\"'), textwrap.fill('word ' * 5, 12))",
)
_add("difflib", "import difflib\nprint(list(difflib.unified_diff(['a'], ['b'], lineterm='')))")
_add("statistics", "import statistics\nprint(statistics.mean([1, 2, 4]), statistics.stdev([1, 2, 4]))")
_add(
    "matplotlib",
    """
try:
    import matplotlib
except ImportError:
    print("not installed")
else:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.plot([1, 2]); plt.savefig("plot.png"); plt.close()
    import os; print(os.path.getsize("plot.png") > 0); os.remove("plot.png")
""",
)
_add("ctypes printf", "import ctypes\nctypes.CDLL(None).printf(b'from C\\n')\nprint('from Python')")

# -- the bridge -----------------------------------------------------------------------------------------------
_add("text", "print('noise')\ntext('A')\ntext('B')\nprint('more')")
_add("text of objects", "text(42); text([1, 'x']); text(None); text('')")
_add(
    "text from threads",
    """
import threading
threads = [threading.Thread(target=text, args=("block",)) for _ in range(5)]
[t.start() for t in threads]; [t.join() for t in threads]
""",
)
_add("helpers", "print(read('data.txt')); print(grep('alpha')); print(find('*.txt')); print(ls())")
_add("batch", "print(batch([('read', {'path': 'data.txt'}), ('ls', None), ('find', {'pattern': '*.txt'})]))")
_add("batch of nothing", "print(batch([]))")
_add("batch failing", "batch([('read', {'path': 'data.txt'}), ('read', {'path': 'missing.txt'})])")
_add(
    "tool error",
    "try:\n    read('missing.txt')\nexcept ToolError as error:\n    print(type(error).__module__, error.tool)\n    raise",
)
_add("tool error uncaught", "read('missing.txt')")
_add("notify", "notify('working')\nprint('done')")
_add("helper arguments", "print(read('data.txt', 2, 1)); print(read('data.txt', offset=1, limit=1))")
_add(
    "helper signature",
    "import inspect\nprint(inspect.signature(read))\nprint(read.__module__, read.__name__)",
)
_add("wrong helper argument", "read('data.txt', offset='x')")
_add("unknown helper keyword", "read('data.txt', encoding='utf-8')")
_add(
    "lemon_tools module",
    "import lemon_tools\nprint(lemon_tools.read is read, lemon_tools.ToolError is ToolError)",
)
_add("helper overwritten", "read = 5\nprint(read)")

DIFFERENT: dict[str, tuple[str, str]] = {
    "sys.exit message": ("the message is the last line of the output", "the message is in the headline"),
    "multiprocessing spawn of the script's own function": (
        "works: the child imports the staged script",
        "the child ends with `AttributeError`: a cell is no file to import (use fork)",
    ),
    "inspect.getsource of a class": (
        "the source",
        "`OSError`: Python finds a class's source through its module's `__file__` (functions work)",
    ),
}
"""Script -> what happens per call and in a session, in words for the documentation."""
