"""The tools an agent is given: the helpers as direct tools, then ``execute_code`` (behaviour 1.3, 4.2)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from lemon_shim.wire import HELPERS as HELPER_NAMES

from . import hostloop
from .approvals import ApprovalBroker, new_approval_id
from .bridge.dispatch import Call
from .config import ExecuteCodeConfig
from .definition import NAME
from .errors import ToolNotFoundError
from .helpers.base import HelperContext, HelperError, HelperResult, content_text
from .helpers.specs import SPECS
from .policy import PolicySource, ToolPolicy, current_policy
from .result import ToolResult, Trust
from .scope import AbortSignal
from .tool import ExecuteCode

__all__ = ["DirectTool", "Tool", "find_tool", "tools"]


class DirectTool:
    """A helper as a direct tool: the same code, policy and approvals as a helper call (behaviour 4.2)."""

    def __init__(
        self,
        name: str,
        cwd: str | os.PathLike[str],
        *,
        policy: PolicySource,
        approvals: ApprovalBroker | None = None,
    ) -> None:
        spec = SPECS[name]
        self.name = name
        self.label = spec.label
        self.description = spec.description
        self.parameters = spec.parameters
        self._tool = ExecuteCode(cwd, config=ExecuteCodeConfig(), policy=policy, approvals=approvals)

    async def execute(
        self, params: Mapping[str, object], *, abort: AbortSignal | None = None, run_id: str | None = None
    ) -> ToolResult:
        """Call the tool; raises :class:`HelperError` with the text a script's ``ToolError`` would have.

        `abort` reaches the tool as its signal, and ends a prompt that still waits as denied.
        """
        caller = hostloop.CallerLoop()
        return await hostloop.call(self._execute(dict(params), abort or AbortSignal(), caller, run_id))

    async def _execute(
        self, params: dict[str, object], abort: AbortSignal, caller: hostloop.CallerLoop, run_id: str | None
    ) -> ToolResult:
        call = Call(id=0, tool=self.name, params=params, call_id=self.name, approval_id=new_approval_id())
        forget = abort.on_abort(lambda: self._tool.release_approval(call.approval_id))
        try:
            denial = await self._tool.authorize(caller, run_id)(call)
        finally:
            forget()
            self._tool.release_approval(call.approval_id)
        if denial is not None:
            raise HelperError(denial.message)
        context = HelperContext(abort=abort, cwd=self._tool.cwd, call_id=self.name)
        from .helpers import HELPERS

        result = await HELPERS[self.name](params, context)
        if isinstance(result, HelperResult) and result.is_error:
            raise HelperError(content_text(result))
        trust: Trust = "untrusted" if self.name == "webfetch" else "trusted"
        if isinstance(result, str):
            return ToolResult.of_text(result, trust=trust)
        return ToolResult([dict(block) for block in result.content], {}, trust)


Tool = DirectTool | ExecuteCode


def tools(
    cwd: str | os.PathLike[str],
    *,
    config: ExecuteCodeConfig | None = None,
    policy: PolicySource | None = None,
    approvals: ApprovalBroker | None = None,
) -> list[Tool]:
    """Return the direct tools that the policy allows, then ``execute_code`` if it is enabled and allowed.

    ``execute_code`` is last, so that toggling it leaves the list's prefix byte-stable (behaviour 1.3).
    """
    folder = os.path.abspath(os.path.expanduser(os.fspath(cwd)))
    config = ExecuteCodeConfig.load(folder) if config is None else config
    source: PolicySource = ToolPolicy.load(folder) if policy is None else policy
    current = source if isinstance(source, ToolPolicy) else _ask(source, config.timeout_ms / 1000)
    found: list[Tool] = [
        DirectTool(name, folder, policy=source, approvals=approvals)
        for name in HELPER_NAMES
        if current.allowed(name)
    ]
    if config.enabled and current.allowed(NAME):
        found.append(ExecuteCode(folder, config=config, policy=source, approvals=approvals))
    return found


def _ask(source: PolicySource, timeout_s: float) -> ToolPolicy:
    """Return the policy that holds now.  The function is the user's, so it never runs on the host's thread."""

    def ask() -> ToolPolicy:
        return asyncio.run(current_policy(source, timeout_s))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ask()
    with ThreadPoolExecutor(1, "lemon-policy") as elsewhere:  # this thread's loop is busy with its caller
        return elsewhere.submit(ask).result()


def find_tool(
    name: str,
    cwd: str | os.PathLike[str],
    *,
    config: ExecuteCodeConfig | None = None,
    policy: PolicySource | None = None,
    approvals: ApprovalBroker | None = None,
) -> Tool:
    """Return the tool called `name`; raises :class:`ToolNotFoundError` when it is not registered."""
    for tool in tools(cwd, config=config, policy=policy, approvals=approvals):
        if tool.name == name:
            return tool
    raise ToolNotFoundError(f"tool not found: {name}")
