"""A bridge that breaks at every point, under real scripts in both modes (behaviour 5.6); case 172 and its kind.

Whatever breaks: each call is charged exactly once, no tool runs twice, every call is answered, the result says that
its figures are a lower bound and is untrusted, and the bridge goes on with exactly the budget that is left.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest

from lemon_kernel import HelperContext, HelperError, ToolPolicy, ToolResult
from lemon_kernel.bridge.dispatch import Dispatcher
from lemon_kernel.helpers import wrap_external

from ..unit.bridge_harness import Death, FaultPlan
from .conftest import Agent
from .doubles import Answered, Gate, answered, asking, emptied, standing_agent

CONTENT = "0123456789"
FAILED, INTERRUPTED = "rpc request failed", "rpc dispatch interrupted"


@pytest.fixture(scope="module", params=["per_call", "session"])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    yield from standing_agent(request.param, tmp_path_factory)


@pytest.fixture
def agent(standing: Agent) -> Agent:
    """An agent in each mode, over each carrier; kernels are shared by the tests of this module."""
    return emptied(standing)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultPlan:
    """What breaks the bridge; every dispatcher that a run makes has it."""
    plan = FaultPlan()
    monkeypatch.setattr("lemon_kernel.run.Dispatcher", functools.partial(Dispatcher, faults=plan))
    return plan


class Tools:
    """``read`` returns ten bytes, ``grep`` fails, both counting their runs by path."""

    def __init__(self) -> None:
        self.ran: list[object] = []

    async def read(self, params: Mapping[str, object], context: HelperContext) -> str:
        self.ran.append(params.get("path"))
        return CONTENT

    async def grep(self, params: Mapping[str, object], context: HelperContext) -> str:
        self.ran.append("grep")
        raise HelperError("no such pattern")


@dataclass(frozen=True)
class Kind:
    """A kind of request, as a raw frame, and what it costs where nothing breaks."""

    frame: str
    answer: str
    ok: bool = False
    denied: int = 0
    runs: int = 0
    is_claimed: bool = False


KINDS = {
    "success": Kind('"tool": "read", "params": {"path": "first"}', CONTENT, ok=True, runs=1, is_claimed=True),
    "tool error": Kind(
        '"tool": "grep", "params": {"pattern": "x"}', "no such pattern", runs=1, is_claimed=True
    ),
    "invalid": Kind('"tool": 42', "invalid rpc request"),
    "unknown tool": Kind('"tool": "bash"', "tool 'bash' is not available inside execute_code scripts"),
    "policy denial": Kind('"tool": "ls"', "Tool 'ls' is in deny list", denied=1),
    "approval denial": Kind(
        '"tool": "find", "params": {"pattern": "x"}', "approval failed for 'find'", denied=1, is_claimed=True
    ),
}
CLAIMING = ["before_spend", "after_spend"]
DISPATCH = ["after_claim", "mid_dispatch"]
CONCLUDING = ["after_answer", "accounting"]

SCRIPT = """
import lemon_tools
raw = lemon_tools._raw
def told(frame):
    answer = raw({"type": "call", "id": 50, "token": raw.token, **frame})
    return answer["ok"], answer["content"]
"""

AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
def one(path):
    try:
        return read(path)
    except ToolError as error:
        return str(error)
def all_of_them():
    with ThreadPoolExecutor(8) as pool:
        return sorted(pool.map(one, map(str, range(8))))
"""

FAULTS: dict[str, Callable[[], BaseException]] = {
    "exception": lambda: RuntimeError("a fault of ours"),
    "death": Death,
    "exit": lambda: SystemExit(9),
}


def counts(result: ToolResult) -> tuple[object, object, object, object]:
    """Return calls, denied, errors, bytes."""
    return tuple(result.details[f"rpc_{name}"] for name in ("calls", "denied", "errors", "bytes"))  # type: ignore[return-value]


def combinations() -> Iterator[object]:
    for name, kind in KINDS.items():
        for point in [*CLAIMING, *(DISPATCH if kind.is_claimed else []), *CONCLUDING]:
            for fault in FAULTS if name == "success" else ["exception", "death"]:
                yield pytest.param(kind, point, fault, id=f"{name}-{point}-{fault}")


@pytest.mark.case(172)
@pytest.mark.parametrize("settlement", [False, True], ids=["", "settlement breaks too"])
@pytest.mark.parametrize(("kind", "point", "fault"), list(combinations()))
def test_a_fault_at_any_point_costs_exactly_one_call(
    agent: Agent, faults: FaultPlan, kind: Kind, point: str, fault: str, settlement: bool
) -> None:
    """One broken call, a replay of it, two good ones and one over budget: all answered, all charged once."""
    tools = Tools()
    faults.armed[point] = FAULTS[fault]()
    if settlement:
        faults.armed["settlement"] = FAULTS[fault]()
    # the answer of the broken call: what it had when it broke, or what the table of 5.6 says
    if point in CONCLUDING:
        answer, ok, denied = kind.answer, kind.ok, kind.denied
    elif point == "after_claim" or (point == "mid_dispatch" and fault != "exception"):
        answer, ok, denied = INTERRUPTED, False, 0
    else:
        answer, ok, denied = FAILED, False, 0
    runs = kind.runs if point in ("mid_dispatch", *CONCLUDING) else 0
    delivered = 3 if ok else 2

    result = agent.run(
        asking(
            f"told({{{kind.frame}}})",
            f"told({{{kind.frame}}})",
            'read("second")',
            'read("third")',
            'read("fourth")',
            before=SCRIPT,
        ),
        config={"max_rpc_calls": 3, "max_rpc_result_bytes": delivered * len(CONTENT)},
        helpers={"read": tools.read, "grep": tools.grep},
        policy=ToolPolicy(deny=["ls"], require_approval=["find"]),
    )

    assert answered(result) == [
        Answered([ok, answer]),
        Answered([False, "rpc request already processed"]),
        Answered(CONTENT),
        Answered(CONTENT),
        Answered(None, "rpc call limit exceeded (max 3 calls per script)", "read"),
    ]
    assert faults.armed == {}
    broken = ["grep" if kind is KINDS["tool error"] else "first"] * runs
    assert tools.ran == [*broken, "second", "third"]
    errors = 2 + (0 if ok or denied else 1)  # the replay and the call over budget are two
    assert counts(result) == (3, denied, errors, delivered * len(CONTENT))
    assert result.details["rpc_tools"] == ["read"]
    assert result.details["rpc_accounting_loss"] is True
    assert result.trust == "untrusted"
    assert result.text.startswith(wrap_external("x").partition("x")[0])


@pytest.mark.case(172)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", [*CLAIMING, *DISPATCH, *CONCLUDING])
def test_the_fault_of_one_call_is_not_that_of_its_siblings(
    agent: Agent, faults: FaultPlan, point: str, fault: str
) -> None:
    """Of eight calls at once one breaks: eight are charged, none runs twice, all others deliver."""
    tools = Tools()
    faults.armed[point] = FAULTS[fault]()
    result = agent.run(
        asking("all_of_them()", before=AT_ONCE), helpers={"read": tools.read}, config={"max_parallel_rpc": 2}
    )

    kept = point in CONCLUDING
    (answer,) = answered(result)
    failure = INTERRUPTED if point == "after_claim" or fault != "exception" else FAILED
    if point in CLAIMING:
        failure = FAILED
    assert answer.value == sorted([CONTENT] * (8 if kept else 7) + ([] if kept else [failure]))
    ran = 8 if kept or point == "mid_dispatch" else 7
    assert (len(tools.ran), len(set(tools.ran))) == (ran, ran)
    assert counts(result) == (8, 0, 0 if kept else 1, len(answer.value) * 10 if kept else 70)
    assert (result.details["rpc_accounting_loss"], result.trust) == (True, "untrusted")


@pytest.mark.case(165, 172)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_while_a_run_is_settled_at_its_end_loses_nothing(
    agent: Agent, faults: FaultPlan, fault: str
) -> None:
    """Two calls in flight when the run is aborted, and the settlement of the first breaks: two calls, two errors."""
    gate = Gate()
    run = agent.start('batch([("read", {"path": "a"}), ("read", {"path": "b"})])', helpers={"read": gate})
    gate.wait_for("a", "b")
    faults.armed["settlement"] = FAULTS[fault]()

    run.abort()
    result = run.result()

    assert faults.armed == {}
    assert result.details["reason"] == "cancelled"
    assert counts(result) == (2, 0, 2, 0)
    assert (result.details["rpc_accounting_loss"], result.trust) == (True, "untrusted")
    assert (sorted(gate.cancelled), gate.ended) == (["a", "b"], [])


@pytest.mark.case(172)
def test_a_fault_is_gone_with_its_run(agent: Agent, faults: FaultPlan) -> None:
    """The next run has exact figures again and is trusted, on the same kernel where there is one."""
    tools = Tools()
    faults.armed["mid_dispatch"] = Death()
    agent.run('try:\n    read("a")\nexcept ToolError:\n    pass', helpers={"read": tools.read})

    result = agent.run('print(read("b"))', helpers={"read": tools.read})

    assert result.text == CONTENT + "\n"
    assert counts(result) == (1, 0, 0, 10)
    assert "rpc_accounting_loss" not in result.details
    assert result.trust == "trusted"
    assert result.details["kernel_reused"] is (agent.mode == "session")


@pytest.mark.case(172)
@pytest.mark.parametrize("point", [*CLAIMING, *DISPATCH, *CONCLUDING, "settlement"])
def test_the_host_log_says_that_it_broke_and_nothing_else(
    agent: Agent, faults: FaultPlan, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One error record per fault, with the type of it and never its message or its traceback."""
    faults.armed[point] = RuntimeError("s3cret")
    expected = 1
    if point == "settlement":
        faults.armed["after_answer"] = RuntimeError("s3cret")
        expected = 2

    with caplog.at_level(logging.DEBUG):
        agent.run('try:\n    read("a")\nexcept ToolError:\n    pass', helpers={"read": Tools().read})

    records = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(records) == expected
    for record in records:
        assert record.name == "lemon_kernel.bridge.dispatch"
        assert "RuntimeError at lemon_kernel.bridge.dispatch:" in record.getMessage()
        assert record.exc_info is None
        assert "s3cret" not in str(vars(record))
