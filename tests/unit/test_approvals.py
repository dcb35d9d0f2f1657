"""ApprovalBroker: one of all that can end a prompt ends it; nothing fails open (behaviour 4.3)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from lemon_kernel import approvals
from lemon_kernel.approvals import (
    ApprovalBroker,
    ApprovalOutcome,
    ApprovalRequest,
    Decision,
    Done,
    NotPending,
    Resolution,
    RunIdentity,
    Scope,
    action_hash,
    authorizer,
    new_approval_id,
)
from lemon_kernel.bridge.dispatch import Call, Denial, Stats
from lemon_kernel.policy import PolicySource, ToolPolicy

from ..conftest import SOAK
from .bridge_harness import Bridge

ME = RunIdentity(run_id="run", session_id="session", session_key="agent:ada:main", agent_id=None)
ASK_READ = ToolPolicy(require_approval="read")


def call(tool: str = "read", params: dict[str, object] | None = None) -> Call:
    return Call(
        1, tool, params if params is not None else {"path": "x"}, "exec_code_rpc_1", new_approval_id()
    )


async def ask(
    broker: ApprovalBroker | None,
    params: dict[str, object] | None = None,
    *,
    policy: PolicySource = ASK_READ,
    identity: RunIdentity = ME,
) -> Denial | None:
    return await authorizer(policy, broker, identity)(call(params=params))


async def pending(broker: ApprovalBroker, count: int = 1) -> list[ApprovalRequest]:
    """Wait until so many prompts are pending."""
    while len(found := broker.pending()) != count:
        await asyncio.sleep(0.001)
    return found


class Person:
    """Somebody who answers each prompt at once and remembers it."""

    def __init__(self, decision: Decision, **settings: int) -> None:
        self.decision = decision
        self.asked: list[ApprovalRequest] = []
        self.broker = ApprovalBroker(self.answer, **settings)

    def answer(self, request: ApprovalRequest) -> Resolution:
        self.asked.append(request)
        return self.broker.resolve(request.id, self.decision)


def gated(broker: ApprovalBroker, **settings: int) -> Bridge:
    return Bridge(authorize=authorizer(ASK_READ, broker, ME), release_approval=broker.cancel)


# One prompt


@pytest.mark.case(130)
def test_a_granted_call_runs_after_one_prompt() -> None:
    """The prompt names the tool and its params; the tool then runs, and nothing counts as denied."""

    async def main() -> None:
        person = Person("approve_once")
        bridge = gated(person.broker)
        answer = await bridge.ask("read", {"size": 5})
        other = await bridge.ask("ls")
        stats = await bridge.dispatcher.close(killed=False)

        (asked,) = person.asked
        assert (asked.tool, asked.action, asked.rationale) == ("read", {"size": 5}, "Tool execution: read")
        assert (asked.run_id, asked.session_id, asked.session_key) == ("run", "session", "agent:ada:main")
        assert (asked.agent_id, asked.expires_at_ms) == ("ada", None)
        assert abs(asked.requested_at_ms / 1000 - time.time()) < 60
        assert answer.ok
        assert other.ok
        assert stats == Stats(calls=2, bytes=7, tools_used={"read", "ls"})
        assert person.broker.pending() == []

    asyncio.run(main())


@pytest.mark.case(131)
def test_a_denied_call_does_not_run() -> None:
    """Deny is answered in the words of the paper, and counts as denied."""

    async def main() -> None:
        bridge = gated(Person("deny").broker)
        answer = await bridge.ask("read")
        stats = await bridge.dispatcher.close(killed=False)

        assert (answer.ok, answer.content) == (False, "approval denied for 'read'")
        assert (stats, bridge.started) == (Stats(calls=1, denied=1), [])

    asyncio.run(main())


@pytest.mark.case(132)
def test_a_prompt_expires() -> None:
    """Nobody answers: the call is denied as timed out, nothing is pending, and a late decision changes nothing."""

    async def main() -> None:
        asked: list[ApprovalRequest] = []
        broker = ApprovalBroker(asked.append, expiry_ms=50)
        started = time.monotonic()
        denial = await ask(broker)

        assert denial == Denial("approval timed out for 'read'")
        assert time.monotonic() - started >= 0.05
        assert broker.pending() == []
        assert broker.resolve(asked[0].id, "approve_global") is NotPending
        assert broker.approved_by(ME, "read", {"path": "x"}) is None
        assert asked[0].expires_at_ms == asked[0].requested_at_ms + 50

    asyncio.run(main())


async def async_raise(request: ApprovalRequest) -> None:
    await asyncio.sleep(0)
    raise RuntimeError("boom")


async def async_error(request: ApprovalRequest) -> Exception:
    return RuntimeError("boom")


def sync_raise(request: ApprovalRequest) -> None:
    raise RuntimeError("boom")


def sync_exit(request: ApprovalRequest) -> None:
    raise SystemExit(1)


@pytest.mark.case(133)
@pytest.mark.parametrize(
    "on_request",
    [sync_raise, sync_exit, async_raise, async_error, lambda request: RuntimeError("boom"), None],
)
def test_machinery_that_fails_denies(on_request: Callable[[ApprovalRequest], object] | None) -> None:
    """A request function that raises or returns an error, and no broker at all, are a failed approval."""

    async def main() -> None:
        broker = ApprovalBroker(on_request) if on_request is not None else None
        assert await ask(broker) == Denial("approval failed for 'read'")
        assert broker is None or broker.pending() == []

    asyncio.run(main())


def test_params_that_are_not_json_cannot_be_approved() -> None:
    """What cannot be hashed is denied before anybody is asked."""

    async def main() -> None:
        person = Person("approve_global")
        deep: dict[str, object] = {}
        for _ in range(5000):
            deep = {"a": deep}
        assert await ask(person.broker, {"x": object()}) == Denial("approval failed for 'read'")
        assert await ask(person.broker, deep) == Denial("approval failed for 'read'")
        assert person.asked == []

    asyncio.run(main())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_decision_from_within_the_request_function_is_not_missed(is_async: bool) -> None:
    """The waiter is subscribed before the request is published, and the function may finish what it does."""

    async def main() -> None:
        finished = asyncio.Event()

        async def later(request: ApprovalRequest) -> None:
            assert broker.resolve(request.id, "deny") is Done
            await asyncio.sleep(0)
            finished.set()

        def now(request: ApprovalRequest) -> None:
            assert broker.resolve(request.id, "deny") is Done
            finished.set()

        broker = ApprovalBroker(later if is_async else now)
        assert await ask(broker) == Denial("approval denied for 'read'")
        await finished.wait()

    asyncio.run(main())


def test_a_decision_beats_the_fault_that_follows_it() -> None:
    """A request function that decides and then raises has decided."""

    async def main() -> None:
        def decide_and_raise(request: ApprovalRequest) -> None:
            broker.resolve(request.id, "approve_once")
            raise RuntimeError("boom")

        broker = ApprovalBroker(decide_and_raise)
        assert await ask(broker) is None

    asyncio.run(main())


def test_what_was_asked_about_is_what_runs() -> None:
    """The request function gets a copy: changing it changes neither the call nor what is stored."""

    async def main() -> None:
        def tamper(request: ApprovalRequest) -> None:
            request.action["nested"]["path"] = "/etc/shadow"  # type: ignore[index]
            broker.resolve(request.id, "approve_global")

        broker = ApprovalBroker(tamper)
        params: dict[str, object] = {"nested": {"path": "x"}}
        assert await ask(broker, params) is None
        assert params == {"nested": {"path": "x"}}
        assert broker.approved_by(ME, "read", params) == "global"
        assert broker.approved_by(ME, "read", {"nested": {"path": "/etc/shadow"}}) is None

    asyncio.run(main())


@pytest.mark.parametrize("decision", ["approve", "", None, True])
def test_a_decision_that_does_not_exist_decides_nothing(decision: object) -> None:
    """It raises, and the prompt still waits."""

    async def main() -> None:
        broker = ApprovalBroker()
        asking = asyncio.ensure_future(ask(broker))
        (request,) = await pending(broker)
        with pytest.raises(ValueError, match="is none of approve_once"):
            broker.resolve(request.id, decision)  # type: ignore[arg-type]
        assert broker.resolve(request.id, "approve_once") is Done
        assert await asking is None

    asyncio.run(main())


# The policy in the hook


def test_the_hook_applies_the_policy_of_the_moment() -> None:
    """A policy function is asked per call; one that fails denies; denial comes before any prompt."""

    async def main() -> None:
        person = Person("approve_global")
        now = [ToolPolicy(), ToolPolicy(deny="read", require_approval="read"), ToolPolicy(profile="?")]
        verdicts = [await ask(person.broker, policy=lambda policy=policy: policy) for policy in now]

        assert verdicts[0] is None
        assert verdicts[1] == Denial("Tool 'read' is in deny list")
        assert verdicts[2] is not None
        assert "profile" in verdicts[2].message
        assert person.asked == []

    asyncio.run(main())


# Stored approvals


@pytest.mark.case(135)
def test_a_session_approval_holds_for_the_same_action() -> None:
    """The same params do not prompt again, in this session; other params, another session do."""

    async def main() -> None:
        person = Person("approve_session")
        other = RunIdentity(session_key="agent:ada:other")
        for params, identity in (
            ({"path": "x", "limit": 1}, ME),
            ({"limit": 1, "path": "x"}, ME),
            ({"path": "y"}, ME),
            ({"path": "y"}, other),
        ):
            assert await ask(person.broker, params, identity=identity) is None
        assert [(r.action["path"], r.session_key) for r in person.asked] == [
            ("x", ME.session_key),
            ("y", ME.session_key),
            ("y", "agent:ada:other"),
        ]

    asyncio.run(main())


@pytest.mark.case(136)
def test_scopes_are_consulted_from_the_widest() -> None:
    """Global before agent before session; what is stored as not approved does not count."""
    broker = ApprovalBroker()
    scopes: list[tuple[Scope, str | None]] = [
        ("global", None),
        ("agent", "ada"),
        ("session", "agent:ada:main"),
    ]
    for scope, key in scopes:
        broker.store(scope, key, "read", {"path": "x"})
    for scope, key in scopes:
        assert broker.approved_by(ME, "read", {"path": "x"}) == scope
        broker.store(scope, key, "read", {"path": "x"}, approved=False)
    assert broker.approved_by(ME, "read", {"path": "x"}) is None


@pytest.mark.case(137)
@pytest.mark.parametrize(
    ("scope", "key"), [("global", None), ("agent", "ada"), ("session", "agent:ada:main")]
)
def test_the_wildcard_approves_any_params(scope: Scope, key: str | None) -> None:
    """An approval of "any" holds for every action of that tool and for no other tool."""

    async def main() -> None:
        broker = ApprovalBroker(sync_raise)
        broker.store(scope, key, "read", "any")
        assert await ask(broker, {"path": "anything"}) is None
        assert broker.approved_by(ME, "grep", {}) is None

    asyncio.run(main())


@pytest.mark.case(138, 139)
@pytest.mark.parametrize("decision", ["approve_once", "deny"])
def test_once_and_deny_are_not_stored(decision: Decision) -> None:
    """The same call prompts again."""

    async def main() -> None:
        person = Person(decision)
        for _ in range(2):
            await ask(person.broker)
        assert len(person.asked) == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("identity", "agent", "session"),
    [
        (ME, "ada", "agent:ada:main"),
        (RunIdentity(), "default", None),
        (RunIdentity(session_id="s"), "default", "s"),
        (RunIdentity(session_key="agent::x"), "default", "agent::x"),
        (RunIdentity(session_key="agent:ada"), "default", "agent:ada"),
        (RunIdentity(session_key="user:ada:x"), "default", "user:ada:x"),
        (RunIdentity(session_key="agent:ada:x", agent_id="bob"), "bob", "agent:ada:x"),
    ],
)
def test_the_keys_of_an_identity(identity: RunIdentity, agent: str, session: str | None) -> None:
    """The agent id defaults from the session key; without any session there is no session scope."""
    assert (identity.key("agent"), identity.key("session")) == (agent, session)


def test_an_agent_approval_holds_across_sessions() -> None:
    """approve_agent stores under the agent id; a run without a session cannot store for one."""

    async def main() -> None:
        person = Person("approve_agent")
        await ask(person.broker)
        assert person.broker.approved_by(RunIdentity(agent_id="ada"), "read", {"path": "x"}) == "agent"
        person.decision = "approve_session"
        nobody = RunIdentity()
        await ask(person.broker, identity=nobody)
        assert person.broker.approved_by(nobody, "read", {"path": "x"}) is None

    asyncio.run(main())


def test_the_action_hash_is_canonical() -> None:
    """Order does not matter, types do; it is the first 16 hex digits of SHA-256 over the JSON."""
    assert action_hash({}) == "44136fa355b3678a"
    assert action_hash({"a": 1, "b": {"c": 2, "d": 3}}) == action_hash({"b": {"d": 3, "c": 2}, "a": 1})
    different: list[Mapping[str, object]] = [{"a": 1}, {"a": "1"}, {"a": True}, {"a": 1.0}, {"a": [1]}]
    assert len({action_hash(params) for params in different}) == len(different)


@pytest.mark.parametrize(("scope", "key"), [("world", "x"), ("agent", None), ("session", "")])
def test_store_refuses_what_could_never_match(scope: str, key: str | None) -> None:
    """A scope that does not exist, or has no key, is a mistake of the caller."""
    with pytest.raises(ValueError, match="scope"):
        ApprovalBroker().store(scope, key, "read", "any")  # type: ignore[arg-type]


# Races


@pytest.mark.case(140, 141)
def test_whoever_ends_a_prompt_first_wins() -> None:
    """Cancel then resolve: denied, no policy.  Resolve then cancel: approved, the policy stands."""

    async def main() -> None:
        broker = ApprovalBroker()
        for cancel_first in (True, False):
            asking = asyncio.ensure_future(ask(broker))
            (request,) = await pending(broker)
            if cancel_first:
                assert broker.cancel(request.id) is Done
                assert broker.resolve(request.id, "approve_global") is NotPending
                assert await asking == Denial("approval denied for 'read'")
                assert broker.approved_by(ME, "read", {"path": "x"}) is None
            else:
                assert broker.resolve(request.id, "approve_global") is Done
                assert broker.cancel(request.id) is NotPending
                assert await asking is None
                assert broker.approved_by(ME, "read", {"path": "x"}) == "global"
        assert broker.resolve("no such id", "deny") is NotPending
        assert broker.cancel("no such id") is NotPending

    asyncio.run(main())


@pytest.mark.case(142)
def test_of_a_storm_exactly_one_wins() -> None:
    """Eight threads resolve and eight cancel at once: one is Done, and the waiter has that one's outcome.

    A hundred times here, a thousand times in ``make soak``.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(16) as pool:
            for _ in range(1000 if SOAK else 100):
                broker = ApprovalBroker()
                asking = asyncio.ensure_future(ask(broker))
                (request,) = await pending(broker)
                start = threading.Barrier(16)

                def resolve(
                    broker: ApprovalBroker = broker,
                    approval_id: str = request.id,
                    start: threading.Barrier = start,
                ) -> Resolution:
                    start.wait()
                    return broker.resolve(approval_id, "approve_global")

                def cancel(
                    broker: ApprovalBroker = broker,
                    approval_id: str = request.id,
                    start: threading.Barrier = start,
                ) -> Resolution:
                    start.wait()
                    return broker.cancel(approval_id)

                attempts = [loop.run_in_executor(pool, job) for job in [resolve, cancel] * 8]
                results = await asyncio.gather(*attempts)
                denial = await asking

                assert results.count(Done) == 1
                assert results.count(NotPending) == 15
                won_by_resolve = results.index(Done) % 2 == 0
                assert (denial is None) is won_by_resolve
                stored = broker.approved_by(ME, "read", {"path": "x"})
                assert stored == ("global" if won_by_resolve else None)

    asyncio.run(main())


def test_decisions_race_with_expiry() -> None:
    """A decision from another thread either wins and holds, or loses and leaves no trace."""

    async def race(delay_us: int) -> None:
        results: list[Resolution] = []
        timers: list[threading.Timer] = []

        def decide(request: ApprovalRequest) -> None:
            timers.append(threading.Timer(delay_us / 1e6, approve, (request.id,)))
            timers[0].start()

        def approve(approval_id: str) -> None:
            results.append(broker.resolve(approval_id, "approve_global"))

        broker = ApprovalBroker(decide, expiry_ms=3)
        denial = await ask(broker)
        await asyncio.get_running_loop().run_in_executor(None, timers[0].join)
        won = results == [Done]

        assert denial == (None if won else Denial("approval timed out for 'read'"))
        assert broker.approved_by(ME, "read", {"path": "x"}) == ("global" if won else None)
        assert broker.pending() == []

    async def main() -> None:
        for delay_us in range(0, 6000, 200):
            await race(delay_us)

    asyncio.run(main())


@pytest.mark.case(147)
def test_parallel_calls_have_one_prompt_each() -> None:
    """Three gated calls are three prompts, and three results."""

    async def main() -> None:
        broker = ApprovalBroker()
        bridge = gated(broker)
        ids = [bridge.call("read", {"size": size}) for size in (1, 2, 3)]
        requests = await pending(broker, 3)
        for request in requests:
            assert broker.resolve(request.id, "approve_session") is Done
        answers = [await bridge.answer(call_id) for call_id in ids]
        more = [await bridge.ask("read", {"size": size}) for size in (1, 2, 3)]
        await bridge.dispatcher.close(killed=False)

        assert [len(answer.content) for answer in answers + more] == [1, 2, 3] * 2
        assert {request.action["size"] for request in requests} == {1, 2, 3}
        assert len({request.id for request in requests}) == 3

    asyncio.run(main())


# Lifetime


@pytest.mark.case(144, 145)
def test_the_end_of_the_run_cancels_its_prompts() -> None:
    """An abort empties the pending list, a late decision installs nothing, and the tool never runs."""

    async def main() -> None:
        broker = ApprovalBroker()
        bridge = gated(broker)
        call_id = bridge.call("read")
        (request,) = await pending(broker)
        stats = await bridge.dispatcher.close(killed=True)

        assert broker.pending() == []
        assert broker.resolve(request.id, "approve_global") is NotPending
        assert broker.approved_by(ME, "read", {}) is None
        assert (await bridge.answer(call_id)).content == "rpc dispatch interrupted"
        assert (stats, bridge.started) == (Stats(calls=1, errors=1, accounting_loss=True), [])

    asyncio.run(main())


class LateBroker(ApprovalBroker):
    """Registers its prompt only after its run has ended, and shrugs off its cancellation meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.may_register = asyncio.Event()
        self.outcome: ApprovalOutcome | None = None

    async def request(self, *args: object, **kwargs: object) -> ApprovalOutcome:
        while not self.may_register.is_set():
            try:
                await self.may_register.wait()
            except asyncio.CancelledError:
                pass
        self.outcome = await super().request(*args, **kwargs)  # type: ignore[arg-type]
        return self.outcome


@pytest.mark.case(316)
@pytest.mark.parametrize("remembered", [True, False])
def test_a_prompt_registered_after_the_end_is_cancelled(
    remembered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled id is refused; were it forgotten, the task's own cancellation would still end the prompt."""

    async def main() -> None:
        broker = LateBroker()
        bridge = gated(broker)
        before = asyncio.all_tasks()
        call_id = bridge.call("read")
        await bridge.settle()
        (task,) = asyncio.all_tasks() - before
        await bridge.dispatcher.close(killed=True)
        if not remembered:
            broker._cancelled.clear()
        broker.may_register.set()
        if remembered:
            await asyncio.wait([task])
            assert broker.outcome is ApprovalOutcome.DENIED
        else:
            (request,) = await pending(broker)
            task.cancel()
            await asyncio.wait([task])
            assert broker.resolve(request.id, "approve_global") is NotPending
        assert broker.pending() == []
        assert broker.approved_by(ME, "read", {}) is None
        assert (await bridge.answer(call_id)).content == "rpc dispatch interrupted"
        assert bridge.started == []

    asyncio.run(main())


def test_a_waiter_that_dies_takes_its_prompt_along() -> None:
    """Cancelling whoever waits ends the prompt and the request function, and installs nothing."""

    async def main() -> None:
        ended = asyncio.Event()

        async def show(request: ApprovalRequest) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.set()

        broker = ApprovalBroker(show)
        asking = asyncio.ensure_future(ask(broker))
        (request,) = await pending(broker)
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await ended.wait()
        assert asking.cancelled()
        assert broker.pending() == []
        assert broker.resolve(request.id, "approve_global") is NotPending

    asyncio.run(main())


def test_a_closed_loop_cannot_hurt_a_decision() -> None:
    """A prompt whose loop is gone can still be resolved; there is nobody left to tell."""
    broker = ApprovalBroker()

    async def main() -> None:
        asking = asyncio.ensure_future(ask(broker))
        await pending(broker)
        pending_record = broker._pending.copy()
        asking.cancel()
        await asyncio.wait([asking])
        broker._pending.update(pending_record)

    asyncio.run(main())
    assert broker.resolve(broker.pending()[0].id, "approve_once") is Done


def test_cancelled_ids_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ids are cancelled, only the last ones are kept."""
    monkeypatch.setattr(approvals, "MAX_CANCELLED_IDS", 10)
    broker = ApprovalBroker()
    for number in range(100):
        broker.cancel(str(number))
    assert list(broker._cancelled) == [str(number) for number in range(90, 100)]


def test_the_request_function_is_called_on_the_callers_loop() -> None:
    """Where a caller's loop is given, the request function runs there; a failure there is a failed approval."""

    class Caller:
        def __init__(self, broken: bool) -> None:
            self.broken = broken
            self.calls = 0

        async def call(self, work: Callable[[], Awaitable[object]]) -> object:
            self.calls += 1
            if self.broken:
                raise RuntimeError("the caller's event loop is closed")
            return await work()

    async def main() -> None:
        for broken in (False, True):
            caller = Caller(broken)
            broker = Person("approve_once").broker
            hook = authorizer(ASK_READ, broker, ME, caller)  # type: ignore[arg-type]
            denial = await hook(call())
            assert denial == (Denial("approval failed for 'read'") if broken else None)
            assert caller.calls == 1

    asyncio.run(main())
