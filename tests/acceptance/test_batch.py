"""``batch()`` runs helper calls side by side and gives their results in order (cases section 8)."""

from __future__ import annotations

import time

import pytest

from .conftest import Agent
from .gates import Gate

BATCH = "print(batch([('read', {'path': str(n)}) for n in range(%d)]))"


@pytest.mark.case(203, 174)
def test_calls_overlap_and_results_keep_their_order(agent: Agent) -> None:
    """Three calls are in flight before the first is answered, and the order of answers does not matter."""
    gate = Gate()
    run = agent.start(BATCH % 3, helpers={"read": gate}, config={"max_parallel_rpc": 4})
    gate.wait_for(3)
    for path in ("2", "0", "1"):
        gate.call(path).release(f"answer {path}")

    result = run.result()
    assert result.text == "['answer 0', 'answer 1', 'answer 2']\n"
    assert result.details["rpc_calls"] == 3
    assert result.details["rpc_tools"] == ["read"]


@pytest.mark.case(204)
def test_number_of_calls_in_flight_is_bounded(agent: Agent) -> None:
    """Never more than ``max_parallel_rpc`` tools run; a place that becomes free is taken at once."""
    gate = Gate()
    run = agent.start(BATCH % 5, helpers={"read": gate}, config={"max_parallel_rpc": 2})
    for number in range(5):
        gate.wait_for(min(number + 2, 5))[number].release("ok")

    assert run.result().text == f"{['ok'] * 5}\n"
    assert gate.most_in_flight == 2


@pytest.mark.case(320)
def test_first_failure_in_order_is_raised_after_all_ended(agent: Agent) -> None:
    """Of two failures the one that stands first is raised, though it came last, and only when all ended."""
    gate = Gate()
    run = agent.start(
        "try:\n    batch([('read', {'path': str(n)}) for n in (1, 2, 3, 4)])\n"
        "except ToolError as error:\n    print(error, error.tool)",
        helpers={"read": gate},
    )
    gate.wait_for(4)
    gate.call("3").fail("three failed")
    gate.call("4").release("four")
    gate.call("2").fail("two failed")
    time.sleep(0.2)  # time in which batch() must not return
    assert not run.done
    gate.call("1").release("one")

    result = run.result()
    assert result.text == "two failed read\n"
    assert result.details["rpc_calls"] == 4
    assert result.details["rpc_errors"] == 2


@pytest.mark.case(207)
def test_batch_spends_calls(agent: Agent) -> None:
    """Each element takes a slot; the one that finds none fails the batch."""
    result = agent.run(
        "try:\n    batch([('ls', None)] * 3)\nexcept ToolError as error:\n    print(error)",
        config={"max_rpc_calls": 2},
    )

    assert result.text == "rpc call limit exceeded (max 2 calls per script)\n"
    assert result.details["rpc_calls"] == 2
    assert result.details["rpc_errors"] == 1


@pytest.mark.case(208)
def test_batch_of_nothing_and_without_parameters(agent: Agent) -> None:
    """No calls give no results; parameters may be null, and null values in them are left out."""
    (agent.cwd / "one.txt").write_text("x")
    result = agent.run(
        "print(batch([]))\n"
        "first, second = batch([('ls', None), ('ls', {'path': None, 'all': None})])\n"
        "print(first == second == ls(), 'one.txt' in first)"
    )

    assert result.text == "[]\nTrue True\n"
    assert result.details["rpc_calls"] == 3


@pytest.mark.case(209)
def test_batch_has_at_most_16_threads(agent: Agent) -> None:
    """Of 40 calls 16 are under way at once, whatever the host would allow, and all 40 come back in order."""
    gate = Gate()
    run = agent.start(
        "import threading\nbefore = threading.active_count()\n" + BATCH % 40 + "\n"
        "print(threading.active_count() - before)",
        helpers={"read": gate},
        config={"max_parallel_rpc": 64},
    )
    gate.wait_for(16)
    time.sleep(0.2)  # time in which no 17th call may come
    assert len(gate.held) == 16
    for number in range(40):
        held = gate.wait_for(number + 1)[number]
        held.release(str(held.params["path"]))

    result = run.result()
    assert result.text == f"{[str(n) for n in range(40)]}\n0\n"
    assert gate.most_in_flight == 16
    assert result.details["rpc_calls"] == 40


@pytest.mark.case(211)
def test_parallel_of_one_serialises(agent: Agent) -> None:
    """With ``max_parallel_rpc`` 1 the second tool starts only after the first has ended."""
    gate = Gate()
    run = agent.start(BATCH % 2, helpers={"read": gate}, config={"max_parallel_rpc": 1})
    gate.wait_for(1)
    time.sleep(0.2)  # time in which the second call must not start
    assert len(gate.held) == 1
    gate.held[0].release("ok")
    gate.wait_for(2)[1].release("ok")

    assert run.result().text == "['ok', 'ok']\n"
    assert gate.most_in_flight == 1
