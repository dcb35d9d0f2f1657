"""A pattern that never comes to an end holds neither the host nor another run (D-6, case 337)."""

from __future__ import annotations

import time

import pytest

from .conftest import Agent, wait_until
from .doubles import Answered, answered, asking, files


@pytest.mark.case(337)
@pytest.mark.timeout(90)
def test_a_catastrophic_pattern_ends_at_its_limit_and_disturbs_nobody(per_call: Agent) -> None:
    """``ToolError`` within 31 s; runs with searches of their own are as quick as ever meanwhile."""
    files(per_call.cwd, {"line": "a" * 60 + "!"})
    script = 'open("begun", "w").close()\n' + asking('grep("(a|aa)+$")')
    started = time.monotonic()
    run = per_call.start(script)
    wait_until((per_call.cwd / "begun").exists, what="the start of the search")

    meanwhile = []
    for _ in range(3):
        before = time.monotonic()
        assert answered(per_call.run(asking('grep("a+!$")')))[0].value.startswith("Found 1 match.")
        meanwhile.append(time.monotonic() - before)
    assert not run.done
    result = run.result(40)

    assert answered(result) == [Answered(None, "Search timed out after 30000ms", "grep")]
    assert 29 < time.monotonic() - started < 31 + 2, "a loaded machine gets 2 s more"
    assert max(meanwhile) < 5
    assert result.details["rpc_errors"] == 1
