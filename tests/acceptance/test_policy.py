"""Who may call what (behaviour 4.1, 4.2), black-box in both modes; cases 123 to 128."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from lemon_kernel import ExecuteCodeConfig, HelperContext, ToolNotFoundError, ToolPolicy, find_tool, tools

from .conftest import Agent
from .doubles import Answered, answered, asking, emptied, files, standing_agent


@pytest.fixture(scope="module", params=["per_call", "session"])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    yield from standing_agent(request.param, tmp_path_factory)


@pytest.fixture
def agent(standing: Agent) -> Agent:
    """An agent in each mode, with an empty folder; kernels are shared by the tests of this module."""
    return emptied(standing)


class Counter:
    """A tool that counts how often it ran."""

    def __init__(self) -> None:
        self.runs = 0

    async def __call__(self, params: Mapping[str, object], context: HelperContext) -> str:
        self.runs += 1
        return "ran"


DENIALS = {
    "deny": (ToolPolicy(deny=["grep"]), "Tool 'grep' is in deny list"),
    "allow": (ToolPolicy(allow=["execute_code", "read"]), "Tool 'grep' not in allowed list"),
    "blocked": (ToolPolicy(allow="all", blocked_tools=["grep"]), "Tool 'grep' is in blocked_tools list"),
    "blocked and allowed": (
        ToolPolicy(allow=["execute_code", "grep"], blocked_tools=["grep"]),
        "Tool 'grep' is in blocked_tools list",
    ),
}


@pytest.mark.case(123, 124, 125)
@pytest.mark.parametrize("as_function", [False, True], ids=["policy", "function"])
@pytest.mark.parametrize("name", DENIALS)
def test_a_denied_helper_raises_the_reason_and_counts_as_denied(
    agent: Agent, name: str, as_function: bool
) -> None:
    """The tool never runs; one call and one denial are counted, no error and no bytes."""
    policy, reason = DENIALS[name]
    grep = Counter()

    result = agent.run(
        asking('grep("x")'), policy=(lambda: policy) if as_function else policy, helpers={"grep": grep}
    )

    assert answered(result) == [Answered(None, reason, "grep")]
    assert grep.runs == 0
    details = result.details
    assert (details["rpc_calls"], details["rpc_denied"], details["rpc_errors"]) == (1, 1, 0)
    assert (details["rpc_bytes"], details["rpc_tools"]) == (0, [])


@pytest.mark.case(124)
def test_an_allow_list_lets_through_what_it_names(agent: Agent) -> None:
    """With ``allow`` a list, ``read`` works and ``ls`` is denied."""
    files(agent.cwd, {"f": "x"})

    result = agent.run(asking('read("f")', "ls()"), policy=ToolPolicy(allow=["execute_code", "read"]))

    assert answered(result) == [Answered("1: x"), Answered(None, "Tool 'ls' not in allowed list", "ls")]


@pytest.mark.case(127)
@pytest.mark.parametrize(
    ("profile", "visible"),
    [
        ("read_only", False),
        ("safe_mode", False),
        ("subagent_restricted", False),
        ("minimal_core", True),
        ("no_external", True),
        ("full_access", True),
        ("orchestrator", True),
        ("leaf_worker", True),
        ("a profile nobody knows", False),
    ],
)
def test_a_profile_hides_the_tool_or_shows_it_last(per_call: Agent, profile: str, visible: bool) -> None:
    """A profile that forbids shells hides ``execute_code``; an unknown one hides everything."""
    config = ExecuteCodeConfig(enabled=True)
    policy = ToolPolicy(profile=profile)

    names = [tool.name for tool in tools(per_call.cwd, config=config, policy=policy)]

    assert ("execute_code" in names) is visible
    assert not visible or names[-1] == "execute_code"
    assert "read" in names or profile == "a profile nobody knows"
    if not visible:
        with pytest.raises(ToolNotFoundError):
            find_tool("execute_code", per_call.cwd, config=config, policy=policy)


@pytest.mark.case(128)
def test_the_profile_no_external_denies_only_webfetch(agent: Agent) -> None:
    """``read`` works; ``webfetch`` is denied with the profile's name and never runs."""
    files(agent.cwd, {"f": "x"})
    webfetch = Counter()

    result = agent.run(
        asking('read("f")', 'webfetch("http://example.org/")'),
        policy=ToolPolicy(profile="no_external"),
        helpers={"webfetch": webfetch},
    )

    assert answered(result) == [
        Answered("1: x"),
        Answered(None, "Tool 'webfetch' is not allowed by profile no_external", "webfetch"),
    ]
    assert (webfetch.runs, result.details["rpc_denied"], result.trust) == (0, 1, "trusted")
