"""ToolPolicy: who may call what; what cannot be read denies everything (behaviour 4.1)."""

from __future__ import annotations

import asyncio

import pytest
from lemon_shim.wire import HELPERS

from lemon_kernel.config import PROFILES as CONFIGURABLE_PROFILES
from lemon_kernel.policy import PROFILES, ToolPolicy, current_policy

TOOLS = (*HELPERS, "execute_code")


def test_no_policy_allows_everything_and_asks_nobody() -> None:
    """Without a word said, every tool is allowed and none needs approval."""
    for policy in (ToolPolicy(), ToolPolicy(allow=None, deny=None, approvals=None, profile="  ")):
        assert all(policy.allowed(tool) and not policy.requires_approval(tool) for tool in TOOLS)


@pytest.mark.case(123, 124, 125)
@pytest.mark.parametrize(
    ("policy", "tool", "reason"),
    [
        (ToolPolicy(deny=["grep"]), "grep", "Tool 'grep' is in deny list"),
        (ToolPolicy(deny=["grep"]), "read", None),
        (ToolPolicy(allow=["execute_code", "read"]), "ls", "Tool 'ls' not in allowed list"),
        (ToolPolicy(allow=["execute_code", "read"]), "read", None),
        (ToolPolicy(allow="all", blocked_tools=["read"]), "read", "Tool 'read' is in blocked_tools list"),
        (ToolPolicy(allow=["read"], deny=["read"]), "read", "Tool 'read' is in deny list"),
        (ToolPolicy(blocked_tools=["read"], deny=["read"]), "read", "Tool 'read' is in blocked_tools list"),
        (ToolPolicy(allow=[]), "read", "Tool 'read' not in allowed list"),
        (ToolPolicy(allow=["ls"], profile="read_only"), "read", "Tool 'read' not in allowed list"),
        (ToolPolicy(profile="read_only"), "webfetch", "Tool 'webfetch' is not allowed by profile read_only"),
        (ToolPolicy(allow="read"), "ls", "Tool 'ls' not in allowed list"),
        (ToolPolicy(allow="read"), "read", None),
        (ToolPolicy(deny=" grep "), "grep", "Tool 'grep' is in deny list"),
        (ToolPolicy(deny=["", "  ", " ls"]), "ls", "Tool 'ls' is in deny list"),
        (ToolPolicy(deny={"ls"}, allow=("ls",)), "ls", "Tool 'ls' is in deny list"),
        (ToolPolicy(allow=" all "), "ls", None),
    ],
)
def test_the_first_reason_that_applies(policy: ToolPolicy, tool: str, reason: str | None) -> None:
    """Blocked beats deny beats allow beats profile, and each has its own words."""
    assert policy.denial_reason(tool) == reason
    assert policy.allowed(tool) is (reason is None)


@pytest.mark.case(127, 128)
@pytest.mark.parametrize(
    ("profile", "denied"),
    [
        ("full_access", set()),
        ("orchestrator", set()),
        ("leaf_worker", set()),
        ("minimal_core", set()),
        ("no_external", {"webfetch"}),
        ("read_only", {"webfetch", "execute_code"}),
        ("safe_mode", {"webfetch", "execute_code"}),
        ("subagent_restricted", {"webfetch", "execute_code"}),
    ],
)
def test_profiles(profile: str, denied: set[str]) -> None:
    """Each profile denies just the tools of its row."""
    policy = ToolPolicy(profile=profile)
    assert {tool for tool in TOOLS if not policy.allowed(tool)} == denied


def test_every_profile_that_can_be_configured_exists() -> None:
    """The configuration and the policy know the same profiles."""
    assert set(CONFIGURABLE_PROFILES) == set(PROFILES)


@pytest.mark.parametrize(
    ("mode", "asks"),
    [
        ("always", True),
        (True, True),
        ("required", True),
        ({"mode": "always"}, True),
        ("sometimes", True),
        (1, True),
        ({}, True),
        ({"mode": None}, True),
        ("Never", True),  # in a configuration file it asks, too
        ("never", False),
        (" never ", False),
        (False, False),
        ("false", False),
        ("none", False),
        (None, False),
        ({"mode": "never"}, False),
    ],
)
def test_approval_modes(mode: object, asks: bool) -> None:
    """Only what surely means never does not ask; require_approval beats it."""
    assert ToolPolicy(approvals={" read ": mode}).requires_approval("read") is asks
    assert not ToolPolicy(approvals={"read": mode}).requires_approval("ls")
    assert ToolPolicy(approvals={"read": mode}, require_approval="read").requires_approval("read")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("allow", 42),
        ("allow", ["read", 42]),
        ("allow", {"read": True}),
        ("deny", True),
        ("deny", b"grep"),
        ("blocked_tools", [["read"]]),
        ("require_approval", 1.5),
        ("approvals", ["read"]),
        ("approvals", {1: "never"}),
        ("profile", "reed_only"),
        ("profile", ["read_only"]),
    ],
)
def test_what_cannot_be_read_denies_everything(key: str, value: object) -> None:
    """One unreadable value denies every tool, with a reason that names its key."""
    policy = ToolPolicy(**{key: value})
    reasons = {policy.denial_reason(tool) for tool in TOOLS}

    assert reasons == {policy.unreadable_reason}
    assert str(policy.unreadable_reason).startswith(f"tool policy cannot be read: {key} from ")
    assert key in repr(policy)


def test_the_current_policy() -> None:
    """A function, sync or async, is asked each time; one that raises or returns something else denies."""

    async def main() -> None:
        answers = [ToolPolicy(), ToolPolicy(deny="read")]

        async def later() -> ToolPolicy:
            return answers[1]

        def broken() -> ToolPolicy:
            raise RuntimeError("boom")

        fixed = ToolPolicy()
        assert await current_policy(fixed) is fixed
        assert (await current_policy(None)).allowed("read")
        assert await current_policy(lambda: answers[0]) is answers[0]
        assert await current_policy(later) is answers[1]
        assert not (await current_policy(broken)).allowed("read")
        assert not (await current_policy(lambda: None)).allowed("read")  # type: ignore[arg-type,return-value]

    asyncio.run(main())
