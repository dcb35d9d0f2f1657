"""The script's side of helpers and channels, with a carrier that remembers what it was given."""

from __future__ import annotations

import _thread
import inspect
import json
import os
import pathlib
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
from lemon_shim import api, wire
from lemon_shim.api import ToolError


class Recorder(api.Carrier):
    """Answers every exchange with what `answer` says, and keeps the frames."""

    def __init__(self) -> None:
        self.frames: list[dict[str, object]] = []
        self.junk: list[bytes] = []
        self.timeouts: list[float | None] = []
        self.answer: Callable[[dict[str, object]], tuple[bool, str] | None] = lambda frame: (True, "ok")
        self.lock = threading.Lock()

    def exchange(self, call_id: int, frame: bytes, timeout_s: float | None) -> tuple[bool, str] | None:
        parsed = json.loads(frame)
        assert call_id == parsed["id"]
        with self.lock:
            self.frames.append(parsed)
            self.timeouts.append(timeout_s)
        return self.answer(parsed)

    def send(self, frame: bytes) -> None:
        self.junk.append(frame)


@pytest.fixture
def carrier() -> Iterator[Recorder]:
    recorder = Recorder()
    api.open_grant(recorder, "cell", "secret", 65536, wire.HELPERS)
    yield recorder
    api.close_grant()
    api.check_generation = api.request_grant = None


def only_params(carrier: Recorder) -> object:
    (frame,) = carrier.frames
    return frame["params"]


def test_call_frame(carrier: Recorder) -> None:
    """A call is one frame with cell, token and its own id; the id stands in the first bytes."""
    assert api.read("a.txt", limit=3) == "ok"
    assert carrier.frames == [
        {
            "type": "call",
            "id": 1,
            "cell": "cell",
            "token": "secret",
            "tool": "read",
            "params": {"path": "a.txt", "limit": 3},
        }
    ]
    assert list(carrier.frames[0])[:2] == ["type", "id"]


@pytest.mark.parametrize(
    ("call", "params"),
    [
        (lambda: api.read("p", 1, 2), {"path": "p", "offset": 1, "limit": 2}),
        (
            lambda: api.grep("x", "p", "*.py", True, False, 2, 5),
            {
                "pattern": "x",
                "path": "p",
                "glob": "*.py",
                "case_sensitive": True,
                "literal": False,
                "context_lines": 2,
                "max_results": 5,
            },
        ),
        (
            lambda: api.find("*", "p", "f", 1, 2, True),
            {"pattern": "*", "path": "p", "type": "f", "max_depth": 1, "max_results": 2, "hidden": True},
        ),
        (
            lambda: api.ls("p", True, False, True, 1, 2),
            {"path": "p", "all": True, "long": False, "recursive": True, "max_depth": 1, "max_entries": 2},
        ),
        (lambda: api.webfetch("u", "text", 9), {"url": "u", "extractMode": "text", "maxChars": 9}),
        (lambda: api.ls(), {}),
        (lambda: api.read(pathlib.Path("a") / "b"), {"path": "a/b"}),  # type: ignore[arg-type]
    ],
)
def test_wire_names(carrier: Recorder, call: Callable[[], str], params: dict[str, object]) -> None:
    """Parameters travel under the names of behaviour 3.1, and those that are None not at all."""
    call()
    assert only_params(carrier) == params


@pytest.mark.parametrize("name", wire.HELPERS)
def test_helpers_explain_themselves(name: str) -> None:
    """`read?` in a notebook shows types and an example."""
    function = getattr(api, name)
    assert ">>> " in (function.__doc__ or "")
    assert "str" in str(inspect.signature(function))
    assert function.__module__ == "lemon_tools"


@pytest.mark.case(319)
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("x\ud800", "surrogate"),
        ({1, 2}, "not a JSON value (set)"),
        (b"raw", "not a JSON value (bytes)"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        pytest.param(10**5000, "too many digits", id="digits"),
        ({1: 2}, "not a string"),
        ({"k\udfff": 1}, "surrogate"),
        (object(), "not a JSON value (object)"),
    ],
)
def test_what_json_cannot_hold(carrier: Recorder, value: object, says: str) -> None:
    """A value that cannot travel raises ToolError that names the parameter, and nothing is sent."""
    with pytest.raises(ToolError) as caught:
        api.read("p", offset=value)  # type: ignore[arg-type]
    assert "parameter 'offset'" in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.tool == "read"
    assert carrier.frames == []


def test_cycles_end(carrier: Recorder) -> None:
    """A list that holds itself is refused, not followed."""
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(ToolError, match="nested too deeply"):
        api.read(cycle)  # type: ignore[arg-type]
    assert carrier.frames == []


def test_values_survive(carrier: Recorder) -> None:
    """What is sent is what `json` would have sent, for every kind of value."""

    class Number:
        def __index__(self) -> int:
            return 7

    value = [None, True, False, 0, -5, 1.5, 1e300, 'é"\\\n\u2028\U0001f600', {"k": [{}]}, ()]
    api.batch([("read", {"path": value, "n": Number()})])
    assert only_params(carrier) == {"path": [*value[:-1], []], "n": 7}


def test_oversized_call_is_not_sent(carrier: Recorder) -> None:
    """A request over 256 KiB raises with its size; one of exactly 256 KiB goes."""
    api.read("")
    room = wire.MAX_FRAME_BYTES - len(json.dumps(carrier.frames[0], separators=(",", ":")))
    api.read("x" * room)
    with pytest.raises(ToolError) as caught:
        api.read("x" * (room + 1))
    assert str(caught.value) == "request is too large (262145 bytes, cap 262144)"
    assert len(carrier.frames) == 2


def test_failure_is_tool_error(carrier: Recorder) -> None:
    """What the host refuses is a ToolError with the host's words and the helper's name; it pickles."""
    carrier.answer = lambda frame: (False, "no such file")
    with pytest.raises(ToolError, match="no such file") as caught:
        api.ls("nowhere")
    assert caught.value.tool == "ls"
    assert ToolError.__module__ == "lemon_tools"
    state = caught.value.__reduce__()
    assert state[1] == ("no such file",)
    assert state[2] == {"tool": "ls"}
    with pytest.raises(pickle.PicklingError):  # there is no module lemon_tools in this process
        pickle.dumps(caught.value)


@pytest.mark.case(182, 183, 184)
def test_text_budget(carrier: Recorder) -> None:
    """A refused block costs neither bytes nor a number; a later, smaller one fits."""
    api.open_grant(carrier, "cell", "secret", 64, ())
    api.text("0123456789")
    with pytest.raises(ToolError) as caught:
        api.text("X" * 40)
    assert str(caught.value) == (
        "text() byte budget exceeded (30 bytes accumulated, 60 more requested, cap 64)"
    )
    api.text("ok")
    assert [(frame["n"], frame["text"]) for frame in carrier.frames] == [(1, "0123456789"), (2, "ok")]


@pytest.mark.parametrize("value", ["", "plain", '"\\', "\0" * 9, "é\U0001f600", "a\ud800b", 42, None, [1]])
def test_text_charge_is_that_of_json(carrier: Recorder, value: object) -> None:
    """The charge is len(json.dumps({'n': n, 'text': s})), whatever the envelope (behaviour 5.7)."""
    block = wire.normalise_text(value)
    charge = len(json.dumps({"n": 1, "text": block}))
    api.open_grant(carrier, "cell", "secret", charge, ())
    api.text(value)
    assert carrier.frames[0]["text"] == block
    api.open_grant(carrier, "cell", "secret", charge - 1, ())
    with pytest.raises(ToolError, match="budget exceeded"):
        api.text(value)


def test_text_is_acknowledged(carrier: Recorder) -> None:
    """text() raises what the host refuses it with."""
    carrier.answer = lambda frame: (False, "rpc authentication failed")
    with pytest.raises(ToolError, match="authentication") as caught:
        api.text("x")
    assert caught.value.tool == "text"


def test_text_from_threads(carrier: Recorder) -> None:
    """Twenty threads get twenty different numbers and ids."""
    threads = [threading.Thread(target=api.text, args=(str(i),)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(frame["n"] for frame in carrier.frames) == list(range(1, 21))  # type: ignore[type-var]
    assert len({frame["id"] for frame in carrier.frames}) == 20


def test_notify_waits_little_and_never_raises(carrier: Recorder) -> None:
    """notify() gives 100 ms as its patience and swallows refusals, silence and messages without a string."""

    class Mute:
        def __str__(self) -> str:
            raise ValueError("no words")

    def gone(frame: dict[str, object]) -> tuple[bool, str]:
        raise ToolError(wire.HOST_GONE)

    api.notify("é" * 3000)
    assert carrier.timeouts == [0.1]
    assert carrier.frames[0]["msg"] == "é" * 2048
    for answer in (lambda frame: None, lambda frame: (False, "no"), gone):
        carrier.answer = answer
        api.notify("x")
    api.notify(Mute())


@pytest.mark.case(208)
def test_batch_shapes(carrier: Recorder) -> None:
    """[] gives [], parameters may be None, and None among them is dropped."""
    assert api.batch([]) == []
    assert api.batch(iter([("ls", None), ["ls", {"path": None, "all": True}]])) == ["ok", "ok"]  # type: ignore[list-item]
    assert [frame["params"] for frame in carrier.frames] == [{}, {"all": True}]
    for bad in (["ls"], [("ls",)], [("ls", [1])], [7]):
        with pytest.raises(ToolError, match=r"batch\(\) takes"):
            api.batch(bad)  # type: ignore[arg-type]
    assert len(carrier.frames) == 2


@pytest.mark.case(209)
def test_batch_order_and_width(carrier: Recorder) -> None:
    """Forty calls run in at most 16 threads; results come in the order of the input."""
    inside = most = 0

    def answer(frame: dict[str, object]) -> tuple[bool, str]:
        nonlocal inside, most
        with carrier.lock:
            inside += 1
            most = max(most, inside)
        barrier.wait(5)
        with carrier.lock:
            inside -= 1
        return True, str(frame["params"]["n"])  # type: ignore[index]

    barrier = threading.Barrier(8)
    carrier.answer = answer
    assert api.batch([("ls", {"n": n}) for n in range(40)]) == [str(n) for n in range(40)]
    assert 8 <= most <= 16


@pytest.mark.case(320)
def test_batch_failures(carrier: Recorder) -> None:
    """The first failure in input order is raised, after all calls have ended."""
    ended = []

    def answer(frame: dict[str, object]) -> tuple[bool, str]:
        n = frame["params"]["n"]  # type: ignore[index]
        if n == 1:
            failed.wait(5)
        if n == 2:
            failed.set()
        ended.append(n)
        return n not in (1, 2), f"failure {n}"

    failed = threading.Event()
    carrier.answer = answer
    with pytest.raises(ToolError, match="failure 1"):
        api.batch([("ls", {"n": n}) for n in range(4)])
    assert sorted(ended) == [0, 1, 2, 3]


def test_no_grant() -> None:
    """Before and after a grant every call says that there is none."""
    api.close_grant()
    api.claim_process()
    for call in (api.ls, lambda: api.text("x"), lambda: api.notify("x"), lambda: api.batch([("ls", None)])):
        with pytest.raises(ToolError) as caught:
            call()
        assert str(caught.value) == wire.NOT_CONFIGURED


def test_request_grant(carrier: Recorder) -> None:
    """A front-end kernel fetches the grant at the first call of a cell, and not again."""
    asked = []

    def request() -> None:
        asked.append(1)
        api.open_grant(carrier, "cell 2", "new", 100, ())

    api.close_grant()
    api.request_grant = request
    api.ls()
    api.ls()
    assert asked == [1]
    assert [(frame["id"], frame["token"]) for frame in carrier.frames] == [(1, "new"), (2, "new")]


def test_stale_threads(carrier: Recorder) -> None:
    """A thread of a finished cell is refused in helpers and channels, before anything is sent."""

    def refuse() -> None:
        raise ToolError(wire.FINISHED_CELL)

    api.check_generation = refuse
    for name, call in {
        "ls": api.ls,
        "text": lambda: api.text("x"),
        "notify": lambda: api.notify("x"),
        "batch": lambda: api.batch([("ls", None)]),
    }.items():
        with pytest.raises(ToolError, match="finished cell") as caught:
            call()
        assert caught.value.tool == name
    assert carrier.frames == []


def test_fresh_grant(carrier: Recorder) -> None:
    """A new grant has new ids, numbers and budget, and narrows what `import *` gives."""
    api.text("a")
    api.open_grant(carrier, "cell", "other", 30, ("ls",))
    api.text("0123456789")
    assert [(frame["id"], frame["n"], frame["token"]) for frame in carrier.frames] == [
        (1, 1, "secret"),
        (1, 1, "other"),
    ]
    assert api.__all__ == ["ToolError", "ls", "text", "notify", "batch"]


def test_forked_child(carrier: Recorder) -> None:
    """In a forked child every call raises, and nothing is sent."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for call in (api.ls, lambda: api.text("x"), lambda: api.notify("x"), lambda: api._raw({"id": 1})):
            try:
                call()
            except ToolError as error:
                said.append(str(error))
        os.write(write_end, json.dumps([said, len(carrier.frames)]).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as pipe:
        said, frames = json.load(pipe)
    os.waitpid(pid, 0)
    assert said == [wire.OTHER_PROCESS] * 4
    assert frames == 0


def test_raw(carrier: Recorder) -> None:
    """_raw sends as is: past size and shape, waiting only where there is an integer id."""
    assert api._raw({"type": "call", "id": 7, "x": "y" * 300_000}) == {"id": 7, "ok": True, "content": "ok"}
    assert api._raw(b'{"id": 8}', timeout_s=1) == {"id": 8, "ok": True, "content": "ok"}
    assert carrier.timeouts == [5, 1]
    assert [api._raw(frame) for frame in (b"", b"junk", b"[1]", {"type": "call"})] == [None] * 4
    assert carrier.junk == [b"", b"junk", b"[1]", b'{"type": "call"}']
    assert api._raw.token == "secret"  # type: ignore[attr-defined]


def test_reentry_under_the_lock(carrier: Recorder) -> None:
    """A signal handler that interrupted text() while it numbers its block is refused, not hung."""
    api._counters.acquire()
    try:
        with pytest.raises(ToolError, match="signal handler"):
            api.text("x")
    finally:
        api._counters.release()
    api.text("x")
    assert len(carrier.frames) == 1
    assert isinstance(api._counters, _thread.RLock)
