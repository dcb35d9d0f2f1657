"""Asking a person before a tool runs (behaviour 4.2, 4.3), black-box; cases 129 to 148 and 316."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from lemon_kernel import (
    AbortSignal,
    ApprovalBroker,
    ExecuteCodeConfig,
    HelperContext,
    HelperError,
    ToolPolicy,
    tools,
)
from lemon_kernel.approvals import ApprovalRequest, Decision, Done, NotPending, Resolution, RunIdentity

from .conftest import Agent, Pending, wait_until
from .doubles import Answered, Person, answered, ask, asking, emptied, files, standing_agent

ASK_READ = ToolPolicy(require_approval=["read"])
DENIED = Answered(None, "approval denied for 'read'", "read")


@pytest.fixture(scope="module", params=["per_call", "session"])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    yield from standing_agent(request.param, tmp_path_factory)


@pytest.fixture
def agent(standing: Agent) -> Agent:
    """An agent in each mode, with two files; kernels are shared by the tests of this module."""
    emptied(standing)
    files(standing.cwd, {"f": "secret", "g": "other"})
    return standing


class Tool:
    """A tool that counts how often it ran."""

    def __init__(self) -> None:
        self.runs = 0

    async def __call__(self, params: Mapping[str, object], context: HelperContext) -> str:
        self.runs += 1
        return "1: secret"


# the call itself


@pytest.mark.case(129)
def test_a_denied_call_never_starts_its_script(agent: Agent) -> None:
    """One prompt for ``execute_code`` with the call's own parameters, and nothing runs."""
    person = Person("deny")
    script = 'open("ran", "w").close()'

    result = agent.run(
        script, policy=ToolPolicy(require_approval=["execute_code"]), approvals=person, run_id="run-1"
    )

    assert result.details == {"denied": True}
    assert result.text.startswith("Tool 'execute_code' execution was denied")
    assert result.trust == "trusted"
    assert not (agent.cwd / "ran").exists()
    (prompt,) = person.prompts
    assert (prompt.tool, prompt.action, prompt.run_id) == ("execute_code", {"script": script}, "run-1")
    assert prompt.rationale == "Tool execution: execute_code"


@pytest.mark.case(129)
def test_an_approved_call_runs_and_its_helpers_are_not_asked_about(agent: Agent) -> None:
    """The outer approval is one prompt; helpers are judged by their own rules."""
    person = Person("approve_once")

    result = agent.run(
        'print(read("f"))', policy=ToolPolicy(require_approval=["execute_code"]), approvals=person
    )

    assert result.text == "1: secret\n"
    assert [prompt.tool for prompt in person.prompts] == ["execute_code"]


# one helper call


@pytest.mark.case(130)
def test_an_approved_helper_call_works_after_one_prompt(agent: Agent) -> None:
    """The prompt names the helper and its parameters; nothing is counted as denied."""
    person = Person("approve_once")

    result = agent.run(asking('read("f", limit=1)'), policy=ASK_READ, approvals=person, run_id="run-1")

    assert answered(result) == [Answered("1: secret")]
    assert result.details["rpc_denied"] == 0
    (prompt,) = person.prompts
    assert (prompt.tool, prompt.action) == ("read", {"path": "f", "limit": 1})
    assert prompt.rationale == "Tool execution: read"
    assert (prompt.run_id, prompt.session_id, prompt.agent_id) == ("run-1", "session-1", "agent-1")
    assert prompt.expires_at_ms is None
    assert person.pending() == []


@pytest.mark.case(131)
def test_a_denied_helper_call_is_a_tool_error_and_the_tool_never_runs(agent: Agent) -> None:
    """A denial counts one call and one denial, and nothing of the file comes back."""
    tool = Tool()

    result = agent.run(asking('read("f")'), policy=ASK_READ, approvals=Person("deny"), helpers={"read": tool})

    assert answered(result) == [DENIED]
    assert tool.runs == 0
    details = result.details
    assert (details["rpc_calls"], details["rpc_denied"], details["rpc_errors"]) == (1, 1, 0)
    assert "secret" not in str(result)


@pytest.mark.case(132)
def test_a_prompt_that_nobody_answers_expires(agent: Agent) -> None:
    """The script is told so, the list of prompts is empty, and a late decision does nothing."""
    person = Person(expiry_ms=50)

    result = agent.run(asking('read("f")'), policy=ASK_READ, approvals=person)

    assert answered(result) == [Answered(None, "approval timed out for 'read'", "read")]
    assert result.details["rpc_denied"] == 1
    assert person.pending() == []
    assert person.resolve(person.prompts[0].id, "approve_global") is NotPending


def _returns_an_error(request: ApprovalRequest) -> object:
    return RuntimeError("no terminal")


def _raises(request: ApprovalRequest) -> object:
    raise RuntimeError("no terminal")


@pytest.mark.case(133)
@pytest.mark.parametrize(
    "broker",
    [lambda: ApprovalBroker(_returns_an_error), lambda: ApprovalBroker(_raises), lambda: None],
    ids=["returns an error", "raises", "no broker"],
)
def test_an_approval_that_cannot_be_asked_for_is_a_denial(
    agent: Agent, broker: Callable[[], ApprovalBroker | None]
) -> None:
    """Nothing fails open: without a working broker the tool never runs."""
    tool = Tool()

    result = agent.run(asking('read("f")'), policy=ASK_READ, approvals=broker(), helpers={"read": tool})

    assert answered(result) == [Answered(None, "approval failed for 'read'", "read")]
    assert (tool.runs, result.details["rpc_denied"]) == (0, 1)


# stored approvals


@pytest.mark.case(135)
def test_a_stored_approval_serves_the_same_parameters_again(agent: Agent) -> None:
    """Approved for the session: the same call prompts no more, another one does, in the next run too."""
    agent.session_key = "agent:main:telegram"
    person = Person("approve_session")

    agent.run(asking('read("f")', 'read("f")'), policy=ASK_READ, approvals=person)
    agent.run(asking('read("f")'), policy=ASK_READ, approvals=person)
    assert [prompt.action for prompt in person.prompts] == [{"path": "f"}]

    agent.run(asking('read("g")'), policy=ASK_READ, approvals=person)
    assert [prompt.action for prompt in person.prompts] == [{"path": "f"}, {"path": "g"}]
    assert person.prompts[0].session_key == "agent:main:telegram"

    agent.session_key = "agent:main:another"
    agent.run(asking('read("f")'), policy=ASK_READ, approvals=person)
    assert len(person.prompts) == 3


@pytest.mark.case(136)
def test_stored_approvals_are_consulted_global_then_agent_then_session(agent: Agent) -> None:
    """Each scope alone suffices without a prompt, and the widest that approves is the one that counts."""
    agent.session_key = "key"
    identity = RunIdentity(None, agent.session_id, agent.session_key, agent.agent_id)
    person = Person("deny")
    params = {"path": "f"}
    keys: dict[Any, str] = {"global": "", "agent": agent.agent_id, "session": "key"}

    for scope, key in keys.items():
        person.store(scope, key, "read", params)
    seen = []
    for scope, key in keys.items():
        seen.append(person.approved_by(identity, "read", params))
        assert ask(agent, 'read("f")', policy=ASK_READ, approvals=person) == Answered("1: secret")
        person.store(scope, key, "read", params, approved=False)

    assert seen == ["global", "agent", "session"]
    assert person.prompts == []
    assert ask(agent, 'read("f")', policy=ASK_READ, approvals=person) == DENIED


@pytest.mark.case(137)
def test_a_stored_wildcard_approves_any_parameters(agent: Agent) -> None:
    """``any`` for one tool is no approval of another."""
    person = Person("deny")
    person.store("agent", agent.agent_id, "read", "any")
    policy = ToolPolicy(require_approval=["read", "ls"])

    result = agent.run(asking('read("f")', 'read("g", offset=1)', "ls()"), policy=policy, approvals=person)

    assert answered(result) == [
        Answered("1: secret"),
        Answered("1: other"),
        Answered(None, "approval denied for 'ls'", "ls"),
    ]
    assert [prompt.tool for prompt in person.prompts] == ["ls"]


@pytest.mark.case(138, 139)
@pytest.mark.parametrize("decision", ["approve_once", "deny"])
def test_a_decision_for_once_is_not_stored(agent: Agent, decision: Decision) -> None:
    """The same call twice is two prompts, approved or denied."""
    person = Person(decision)

    result = agent.run(asking('read("f")', 'read("f")'), policy=ASK_READ, approvals=person)

    assert answered(result) == [DENIED if decision == "deny" else Answered("1: secret")] * 2
    assert len(person.prompts) == 2
    assert result.details["rpc_denied"] == (2 if decision == "deny" else 0)


# races


@pytest.mark.case(140)
def test_a_decision_after_a_cancellation_installs_nothing(agent: Agent) -> None:
    """The cancelled call is denied, the late decision does nothing, and the next call prompts again."""
    person = Person()
    run = agent.start(asking('read("f")'), policy=ASK_READ, approvals=person)
    prompt = person.next_prompt()

    assert person.cancel(prompt.id) is Done
    assert person.resolve(prompt.id, "approve_global") is NotPending

    assert answered(run.result()) == [DENIED]
    person.decision = "deny"
    assert ask(agent, 'read("f")', policy=ASK_READ, approvals=person) == DENIED
    assert len(person.prompts) == 2


@pytest.mark.case(141)
def test_a_cancellation_after_a_decision_changes_nothing(agent: Agent) -> None:
    """The decision stands, also for the next call."""
    person = Person()
    run = agent.start(asking('read("f")'), policy=ASK_READ, approvals=person)
    prompt = person.next_prompt()

    assert person.resolve(prompt.id, "approve_global") is Done
    assert person.cancel(prompt.id) is NotPending

    assert answered(run.result()) == [Answered("1: secret")]
    assert ask(agent, 'read("f")', policy=ASK_READ, approvals=person) == Answered("1: secret")
    assert len(person.prompts) == 1


@pytest.mark.case(142)
def test_of_sixteen_that_end_a_prompt_at_once_exactly_one_does(agent: Agent) -> None:
    """Eight decisions and eight cancellations race; the script gets what the winner said."""
    person = Person()
    run = agent.start(asking('read("f")'), policy=ASK_READ, approvals=person)
    prompt = person.next_prompt()
    start = threading.Barrier(16)
    outcomes: list[tuple[str, Resolution]] = []

    def end(how: str) -> None:
        start.wait()
        if how == "resolve":
            outcomes.append((how, person.resolve(prompt.id, "approve_global")))
        else:
            outcomes.append((how, person.cancel(prompt.id)))

    threads = [threading.Thread(target=end, args=(how,)) for how in ("resolve", "cancel") * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    winners = [how for how, outcome in outcomes if outcome is Done]
    assert len(winners) == 1
    assert [outcome for _, outcome in outcomes].count(NotPending) == 15
    answer = answered(run.result())[0]
    assert answer == (Answered("1: secret") if winners == ["resolve"] else DENIED)
    identity = RunIdentity(None, agent.session_id, agent.session_key, agent.agent_id)
    approved = person.approved_by(identity, "read", {"path": "f"})
    assert approved == ("global" if winners == ["resolve"] else None)


# ends of runs


@pytest.mark.case(144)
def test_an_abort_cancels_the_prompt(agent: Agent) -> None:
    """The list of prompts empties, a late decision installs nothing, the tool never runs."""
    person, tool = Person(), Tool()
    run = agent.start('read("f")', policy=ASK_READ, approvals=person, helpers={"read": tool})
    prompt = person.next_prompt()

    run.abort()
    result = run.result()

    assert result.details["reason"] == "cancelled"
    person.wait_for_none(1)
    assert person.resolve(prompt.id, "approve_global") is NotPending
    identity = RunIdentity(None, agent.session_id, agent.session_key, agent.agent_id)
    assert person.approved_by(identity, "read", {"path": "f"}) is None
    assert tool.runs == 0


@pytest.mark.case(129, 144)
def test_an_abort_cancels_the_prompt_for_the_call_itself(agent: Agent) -> None:
    """A run that is aborted while a person is asked about it never starts."""
    person = Person()
    run = agent.start(
        'open("ran", "w").close()', policy=ToolPolicy(require_approval=["execute_code"]), approvals=person
    )
    prompt = person.next_prompt()

    run.abort()

    assert run.result().text == "Script cancelled."
    assert person.pending() == []
    assert person.resolve(prompt.id, "approve_global") is NotPending
    assert not (agent.cwd / "ran").exists()


@pytest.mark.case(145)
def test_a_timeout_cancels_the_prompt(agent: Agent) -> None:
    """The call that waited for a person is counted as lost, and its tool never runs afterwards."""
    person, tool = Person(), Tool()
    agent.run("pass")  # the second is the call's, not that of a kernel's start

    result = agent.run(
        'read("f")', timeout_ms=1000, policy=ASK_READ, approvals=person, helpers={"read": tool}
    )

    assert result.details["reason"] == "timeout"
    assert "Script timed out after 1000ms." in result.text
    assert (result.details["rpc_accounting_loss"], result.trust) == (True, "untrusted")
    person.wait_for_none(1)
    assert person.resolve(person.prompts[0].id, "approve_once") is NotPending
    assert tool.runs == 0


class LateBroker(ApprovalBroker):
    """A broker whose registration shrugs off its first cancellation and prompts after it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()
        self.registered_late = threading.Event()
        self.ids: list[str] = []

    async def request(  # type: ignore[no-untyped-def]
        self, identity, tool, params, approval_id, caller=None
    ):
        self.ids.append(approval_id)
        self.waiting.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            # longer than the 25 ms that a cancelled dispatch task is given
            await asyncio.sleep(0.1)
        self.registered_late.set()
        return await super().request(identity, tool, params, approval_id, caller)


@pytest.mark.case(316)
def test_a_prompt_registered_after_the_first_cancel_is_removed(agent: Agent) -> None:
    """Work that survives its own cancellation cannot leave a prompt behind, whatever is decided later."""
    broker, tool = LateBroker(), Tool()
    run = agent.start('read("f")', policy=ASK_READ, approvals=broker, helpers={"read": tool})
    assert broker.waiting.wait(10)

    run.abort()
    run.result()

    assert broker.registered_late.wait(5)
    wait_until(lambda: not broker.pending(), 1, "an empty list of prompts")
    assert broker.resolve(broker.ids[0], "approve_global") is NotPending
    assert broker.approved_by(RunIdentity(agent_id=agent.agent_id), "read", {"path": "f"}) is None
    assert tool.runs == 0


# many at once, and over time


@pytest.mark.case(147)
def test_parallel_calls_are_as_many_prompts_none_doubled_none_lost(agent: Agent) -> None:
    """Three gated calls wait at the same time; each is approved by itself."""
    files(agent.cwd, {"h": "third"})
    person = Person()
    run = agent.start(
        asking('batch([("read", {"path": p}) for p in "fgh"])'), policy=ASK_READ, approvals=person
    )
    person.next_prompt(3)

    assert len(person.pending()) == 3
    for prompt in person.pending():
        assert person.resolve(prompt.id, "approve_once") is Done

    assert answered(run.result()) == [Answered(["1: secret", "1: other", "1: third"])]
    assert sorted(str(prompt.action["path"]) for prompt in person.prompts) == ["f", "g", "h"]
    assert len({prompt.id for prompt in person.prompts}) == 3


@pytest.mark.case(148)
def test_the_policy_is_read_again_at_each_call(session: Agent) -> None:
    """A policy function that changes its mind between two cells is heard on the same kernel."""
    files(session.cwd, {"f": "secret"})
    policies = [ToolPolicy()]
    options: dict[str, Any] = {"policy": lambda: policies[-1]}

    first = session.run(asking('read("f")'), **options)
    policies.append(ToolPolicy(deny=["read"]))
    second = session.run(asking('read("f")'), **options)

    assert answered(first) == [Answered("1: secret")]
    assert answered(second) == [Answered(None, "Tool 'read' is in deny list", "read")]
    assert second.details["kernel_reused"] is True


@pytest.mark.case(148)
def test_a_policy_that_cannot_be_had_denies(agent: Agent) -> None:
    """The function works for the call itself and raises for the helper: nothing fails open (D-8)."""
    asked: list[int] = []

    def policy() -> ToolPolicy:
        asked.append(1)
        if len(asked) > 1:
            raise OSError("the policy file is gone")
        return ToolPolicy()

    result = agent.run(asking('read("f")'), policy=policy)

    (answer,) = answered(result)
    assert answer.error is not None
    assert "secret" not in str(result)
    assert result.details["rpc_denied"] == 1


@pytest.mark.case(130, 131)
@pytest.mark.parametrize("decision", ["approve_once", "deny"])
def test_direct_calls_of_a_helper_pass_the_same_approval(per_call: Agent, decision: Decision) -> None:
    """A direct tool asks the same person with the same words and fails with the same text."""
    files(per_call.cwd, {"f": "secret"})
    person = Person(decision)
    tool = tools(per_call.cwd, config=ExecuteCodeConfig(), policy=ASK_READ, approvals=person)[0]

    if decision == "deny":
        with pytest.raises(HelperError) as raised:
            asyncio.run(tool.execute({"path": "f"}))
        assert str(raised.value) == "approval denied for 'read'"
    else:
        assert asyncio.run(tool.execute({"path": "f"})).text == "1: secret"
    assert [(prompt.tool, prompt.action) for prompt in person.prompts] == [("read", {"path": "f"})]


@pytest.mark.case(144)
def test_an_abort_ends_the_prompt_of_a_direct_call(per_call: Agent) -> None:
    """Nobody waits for a person whose answer nobody wants; a late answer installs nothing."""
    person, abort = Person(), AbortSignal()
    tool = tools(per_call.cwd, config=ExecuteCodeConfig(), policy=ASK_READ, approvals=person)[0]
    run = Pending(lambda: asyncio.run(tool.execute({"path": "f"}, abort=abort)), abort)
    prompt = person.next_prompt()

    run.abort()

    with pytest.raises(HelperError, match=r"^approval denied for 'read'$"):
        run.result()
    assert person.pending() == []
    assert person.resolve(prompt.id, "approve_global") is NotPending
    assert person.approved_by(RunIdentity(), "read", {"path": "f"}) is None


@pytest.mark.case(129, 133)
def test_a_call_that_nobody_can_be_asked_about_is_refused(agent: Agent) -> None:
    """Without a broker the outer approval denies too; nothing runs and nothing but ``denied`` is told."""
    result = agent.run('open("ran", "w").close()', policy=ToolPolicy(require_approval=["execute_code"]))

    assert result.details == {"denied": True}
    assert result.text == ("Tool 'execute_code' execution was denied: approval failed for 'execute_code'")
    assert not (agent.cwd / "ran").exists()


@pytest.mark.case(129)
def test_a_stored_approval_serves_the_call_itself(agent: Agent) -> None:
    """The wildcard for ``execute_code`` approves any script, without a prompt."""
    person = Person("deny")
    person.store("global", None, "execute_code", "any")

    result = agent.run('print("ran")', policy=ToolPolicy(require_approval=["execute_code"]), approvals=person)

    assert (result.text, person.prompts) == ("ran\n", [])


@pytest.mark.case(129)
def test_the_prompt_for_a_call_ends_with_whoever_awaits_it(agent: Agent) -> None:
    """Cancelling the awaiting task is the caller's death: the prompt goes, and nothing ever runs."""
    person = Person()
    tool = agent.tool(policy=ToolPolicy(require_approval=["execute_code"]), approvals=person)

    async def main() -> None:
        call = asyncio.create_task(tool.execute({"script": 'open("ran", "w").close()'}))
        while not person.prompts:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())

    assert person.pending() == []
    assert person.resolve(person.prompts[0].id, "approve_once") is NotPending
    assert not (agent.cwd / "ran").exists()
