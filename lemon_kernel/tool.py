"""``execute_code`` itself: what a caller holds, and everything of a call that comes before its run.

One call goes through three places.  On the caller's loop: approval, the owner's configuration, the checks that
raise, and the user's callbacks.  On the host loop: the run (:mod:`.run`).  Then the outcome becomes a
:class:`ToolResult`.  Everything that raises an :class:`ExecuteCodeError` does so before anything has run
(behaviour 2.2).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import hostloop, telemetry
from .approvals import ApprovalBroker, RunIdentity, authorizer, new_approval_id
from .bridge.dispatch import Authorize, Call, PolicyCheck, allow_all
from .config import ExecuteCodeConfig
from .definition import LABEL, NAME, describe, parameters
from .errors import InterpreterError
from .helpers.base import Helper, HelperContext, HelperResult, Params
from .policy import PolicySource, ToolPolicy, current_policy
from .result import CANCELLED_HEADLINE, ToolResult
from .run import Request, Run, UpdateCallback, Updates
from .scope import AbortSignal, SessionScope

if TYPE_CHECKING:
    from .session.registry import KernelRegistry

__all__ = ["ExecuteCode", "UpdateCallback"]

OWNER_CONFIG_TIMEOUT_S = 1.0


class ExecuteCode:
    """The tool: runs a model's Python script with the agent's tools at hand.

    `cwd` is the folder that helpers and scripts work in.  `config` defaults to
    ``ExecuteCodeConfig.load(cwd)``; an `owner` with a configuration of its own beats it at each call
    (behaviour 1.3).  `policy` is a :class:`ToolPolicy` or a function that returns one, asked per helper call;
    without it the configured policy applies.  `helpers` replaces tools behind helper functions by async
    callables ``(params, context) -> str | HelperResult``, which run on the caller's loop.  `registry` and
    `scope` serve session mode only.
    """

    name = NAME
    label = LABEL

    def __init__(
        self,
        cwd: str | os.PathLike[str],
        *,
        config: ExecuteCodeConfig | None = None,
        policy: PolicySource | None = None,
        approvals: ApprovalBroker | None = None,
        helpers: Mapping[str, Helper] | None = None,
        registry: KernelRegistry | None = None,
        scope: SessionScope | None = None,
    ) -> None:
        self.cwd = os.path.abspath(os.path.expanduser(os.fspath(cwd)))
        self.config = ExecuteCodeConfig.load(self.cwd) if config is None else config
        self._policy: PolicySource = ToolPolicy.load(self.cwd) if policy is None else policy
        self._approvals = approvals
        self._doubles = dict(helpers or {})
        self._registry = registry
        self._scope = scope

    # -- definition ---------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """What the model is told; byte-identical for equal options (behaviour 2.1)."""
        return describe(self.config)

    @property
    def parameters(self) -> dict[str, object]:
        """The JSON Schema of the parameters; the same in both modes."""
        return parameters()

    # -- calling ------------------------------------------------------------------------------------------

    async def execute(
        self,
        params: Mapping[str, object],
        *,
        abort: AbortSignal | None = None,
        on_update: UpdateCallback | None = None,
        run_id: str | None = None,
    ) -> ToolResult:
        """Run ``params["script"]`` and return its result; may be awaited from any event loop.

        `abort` ends the run early; cancelling the awaiting task does too.  `on_update` gets a
        :class:`ToolUpdate` per ``notify()``, one at a time and in order.  `run_id` appears in approval
        requests only.

        Raises an :class:`ExecuteCodeError` when the call is refused before anything ran.
        """
        abort = AbortSignal() if abort is None else abort
        if abort.aborted:
            return ToolResult.of_text(CANCELLED_HEADLINE)
        params = dict(params)
        refusal = await self._outer_approval(params, abort, run_id)
        if refusal is not None:
            return refusal
        config = await self._effective_config()
        request = Request.check(params, config)
        interpreter_path = self._resolve_interpreter(config)
        caller = hostloop.CallerLoop()
        updates = Updates(on_update, caller)
        with telemetry.run_span(config.kernel_mode) as span:
            run = Run(
                cwd=self.cwd,
                request=request,
                config=config,
                helpers=self._helpers(caller),
                policy=self.policy_check(),
                authorize=self.authorize(caller, run_id),
                release_approval=self.release_approval,
                scope=self._scope,
                registry=self._registry,
                interpreter_path=interpreter_path,
                abort=abort,
                updates=updates,
                span=span,
            )
            try:
                outcome = await hostloop.call(run.execute())
            finally:
                await updates.finish()
            span.outcome(outcome.reason)
        return outcome.result()

    def run_sync(
        self,
        params: Mapping[str, object],
        *,
        abort: AbortSignal | None = None,
        on_update: UpdateCallback | None = None,
        run_id: str | None = None,
    ) -> ToolResult:
        """:meth:`execute` for callers without an event loop: a loop of its own runs in the calling thread."""
        return asyncio.run(self.execute(params, abort=abort, on_update=on_update, run_id=run_id))

    async def prewarm(self) -> bool:
        """Prepare warm starts before the first session kernel is needed; return whether they can be had.

        Without it they are prepared in the background after the first kernel's start.  False in ``per_call``
        mode.  Raises :class:`InterpreterError` as :meth:`execute` does.
        """
        config = await self._effective_config()
        if config.kernel_mode != "session":
            return False
        return await hostloop.call(self._prewarm(self._resolve_interpreter(config)))

    async def _prewarm(self, path: str) -> bool:
        from lemon_provisioner.interpreter import ProbeError, probe

        from .session.link import STARTUP_TIMEOUT_S
        from .session.registry import KernelRegistry

        registry = KernelRegistry.default() if self._registry is None else self._registry
        try:
            interpreter = await probe(path, self.cwd, STARTUP_TIMEOUT_S)
        except ProbeError:
            return False
        return await registry.prewarm(os.path.abspath(interpreter.executable), self.cwd)

    async def _outer_approval(
        self, params: dict[str, object], abort: AbortSignal, run_id: str | None
    ) -> ToolResult | None:
        """Return a refusal of the call itself, None when it may go on (behaviour 4.2).

        The prompt for ``execute_code`` comes before everything else, and a denial means that nothing runs.
        """
        policy = await current_policy(self._policy, self.config.timeout_ms / 1000, abort)
        reason = policy.denial_reason(NAME)
        if reason is None and policy.requires_approval(NAME):
            call = Call(0, NAME, params, NAME, new_approval_id())
            authorize = authorizer(policy, self._approvals, self._identity(run_id))
            stop = abort.on_abort(lambda: self.release_approval(call.approval_id))
            try:
                denial = await authorize(call)
            finally:
                stop()
                self.release_approval(call.approval_id)
            reason = denial.message if denial is not None else None
        if abort.aborted:
            return ToolResult.of_text(CANCELLED_HEADLINE)
        if reason is None:
            return None
        return ToolResult.of_text(f"Tool '{NAME}' execution was denied: {reason}", {"denied": True})

    async def _effective_config(self) -> ExecuteCodeConfig:
        """Return the configuration of this call (behaviour 1.3).

        A dead owner, or one that fails or does not answer within a second, means the tool's own
        configuration with ``kernel_mode`` forced to ``per_call``.
        """
        owner = self._scope.owner if self._scope is not None else None
        if owner is None:
            return self.config
        if owner.alive:
            if owner.config is None:
                return self.config
            try:
                answer = await hostloop.within(owner.config(), OWNER_CONFIG_TIMEOUT_S)
            except Exception:
                answer = None
            if isinstance(answer, ExecuteCodeConfig) and owner.alive:
                return answer
        return self.config.with_values(kernel_mode="per_call")

    def _resolve_interpreter(self, config: ExecuteCodeConfig) -> str:
        from lemon_provisioner import interpreter

        try:
            return interpreter.resolve(config.resolved_python_path(self.cwd))
        except ValueError as error:
            raise InterpreterError(str(error)) from None

    # -- what a run and a direct tool need of it ------------------------------------------------------------

    def _helpers(self, caller: hostloop.CallerLoop) -> dict[str, Helper]:
        """Return every helper of a call: a double runs on the caller's loop, the real ones on the host's."""
        from .helpers import HELPERS

        def on_callers_loop(double: Helper) -> Helper:
            async def call(params: Params, context: HelperContext) -> str | HelperResult:
                return await caller.call(lambda: double(params, context))

            return call

        return {**HELPERS, **{name: on_callers_loop(double) for name, double in self._doubles.items()}}

    def _identity(self, run_id: str | None) -> RunIdentity:
        scope = self._scope
        if scope is None:
            return RunIdentity(run_id=run_id)
        return RunIdentity(run_id, scope.session_id, scope.session_key, scope.agent_id)

    def authorize(self, caller: hostloop.CallerLoop, run_id: str | None) -> Authorize:
        """Return the hook that a helper call passes between its claim and its tool (behaviour 4.2, 4.3)."""
        source = self._policy
        if not isinstance(source, ToolPolicy):
            function = source

            async def ask_the_caller() -> ToolPolicy:
                return await caller.call(lambda: current_policy(function))

            source = ask_the_caller
        return authorizer(source, self._approvals, self._identity(run_id), caller)

    def policy_check(self) -> PolicyCheck:
        """Return the check of the claim step; a policy function is asked in the dispatch task instead.

        It belongs to the caller's loop, and the claim step does not wait (behaviour 2.9, 5.1).
        """
        return self._policy.denial_reason if isinstance(self._policy, ToolPolicy) else allow_all

    def release_approval(self, approval_id: str) -> None:
        """Cancel a prompt whose call has ended."""
        if self._approvals is not None:
            self._approvals.cancel(approval_id)
