"""``execute_code`` itself: its definition, the order of checks, the choice of mode, and the fallback.

One call goes through three places.  On the caller's loop: the checks that raise, the owner's configuration,
and the user's callbacks.  On the host loop: the run.  Then the outcome becomes a :class:`ToolResult`.
Everything that raises an :class:`ExecuteCodeError` does so before anything has run (behaviour 2.2).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from lemon_shim.wire import HELPERS as HELPER_NAMES

from . import hostloop, telemetry
from .approvals import ApprovalBroker, RunIdentity, authorizer, new_approval_id
from .bridge.dispatch import Authorize, Call, Dispatcher, Limits, PolicyCheck, Stats, allow_all
from .config import ExecuteCodeConfig
from .errors import (
    DisabledError,
    ExecuteCodeError,
    InterpreterError,
    InvalidParameterError,
    ToolNotFoundError,
    WorkspaceError,
)
from .helpers import HELPERS, SPECS
from .helpers.base import Helper, HelperContext, HelperError, HelperResult, content_text
from .output import CapturedOutput
from .policy import ToolPolicy, current_policy
from .result import CANCELLED_HEADLINE, FallbackReason, Outcome, Reason, ToolResult, ToolUpdate, Trust
from .scope import AbortSignal, SessionScope

if TYPE_CHECKING:
    from lemon_provisioner.interpreter import Interpreter

    from .session.kernel import CellEnd
    from .session.registry import KernelRegistry

__all__ = ["DirectTool", "ExecuteCode", "Tool", "find_tool", "tools"]

T = TypeVar("T")

log = logging.getLogger(__name__)

_cell_numbers = itertools.count(1)
"""Names the cells of a host process apart; what a grant is called is no secret, its token is."""

NAME = "execute_code"
MAX_SCRIPT_BYTES = 1_048_576
MIN_TIMEOUT_MS = 1000
OWNER_CONFIG_TIMEOUT_S = 1.0
STARTUP_TIMEOUT_S = 10.0
FALLBACK_MINIMUM_S = 1.0

PolicySource = ToolPolicy | Callable[[], ToolPolicy | Awaitable[ToolPolicy]]
UpdateCallback = Callable[[ToolUpdate], object]
"""A sync or async callable; what it returns is ignored, what it raises is logged once per run."""


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
    label = "Execute Code"

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
        self.approvals = approvals
        self.doubles = dict(helpers or {})
        self.registry = registry
        self.scope = scope

    # -- definition ---------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """What the model is told; byte-identical for equal options (behaviour 2.1)."""
        return describe(self.config)

    @property
    def parameters(self) -> dict[str, object]:
        """The JSON Schema of the parameters; the same in both modes."""
        return {
            "type": "object",
            "properties": {
                "script": {"type": "string", "description": "The Python source to run."},
                "timeout_ms": {
                    "type": "integer",
                    "description": (
                        "Wall-time limit of this run in milliseconds; at least 1000, at most the configured limit."
                    ),
                },
                "reset": {
                    "type": "boolean",
                    "default": False,
                    "description": "Discard retained interpreter state before the script runs.",
                },
            },
            "required": ["script"],
            "additionalProperties": False,
        }

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
        request = _Request.check(params, config)
        interpreter_path = self._resolve_interpreter(config)
        caller = hostloop.CallerLoop()
        updates = _Updates(on_update, caller)
        with telemetry.run_span(config.kernel_mode) as span:
            run = _Run(self, request, config, interpreter_path, abort, updates, caller, run_id, span)
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

    async def _outer_approval(
        self, params: dict[str, object], abort: AbortSignal, run_id: str | None
    ) -> ToolResult | None:
        """Return a refusal of the call itself, None when it may go on (behaviour 4.2).

        The prompt for ``execute_code`` comes before everything else, and a denial means that nothing runs.
        """
        policy = await current_policy(self._policy)
        reason = policy.denial_reason(NAME)
        if reason is None and policy.requires_approval(NAME):
            call = Call(0, NAME, params, NAME, new_approval_id())
            authorize = authorizer(policy, self.approvals, self._identity(run_id))
            stop = abort.on_abort(lambda: self.release_approval(call.approval_id))
            try:
                denial = await authorize(call)
            finally:
                stop()
                self.release_approval(call.approval_id)
            if abort.aborted:
                return ToolResult.of_text(CANCELLED_HEADLINE)
            reason = denial.message if denial is not None else None
        if reason is None:
            return None
        return ToolResult.of_text(f"Tool '{NAME}' execution was denied: {reason}", {"denied": True})

    async def _effective_config(self) -> ExecuteCodeConfig:
        """Return the configuration of this call (behaviour 1.3).

        A dead owner, or one that fails or does not answer within a second, means the tool's own
        configuration with ``kernel_mode`` forced to ``per_call``.
        """
        owner = self.scope.owner if self.scope is not None else None
        if owner is None:
            return self.config
        if owner.alive:
            if owner.config is None:
                return self.config
            try:
                answer = await asyncio.wait_for(owner.config(), OWNER_CONFIG_TIMEOUT_S)
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

    def _identity(self, run_id: str | None) -> RunIdentity:
        scope = self.scope
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
        return authorizer(source, self.approvals, self._identity(run_id), caller)

    def policy_check(self) -> PolicyCheck:
        """Return the check of the claim step; a policy function is asked in the dispatch task instead.

        It belongs to the caller's loop, and the claim step does not wait (behaviour 2.9, 5.1).
        """
        return self._policy.denial_reason if isinstance(self._policy, ToolPolicy) else allow_all

    def release_approval(self, approval_id: str) -> None:
        """Cancel a prompt whose call has ended."""
        if self.approvals is not None:
            self.approvals.cancel(approval_id)


@dataclass(frozen=True)
class _Request:
    """The checked parameters of one call."""

    script: str
    timeout_ms: int
    reset: bool

    @classmethod
    def check(cls, params: Mapping[str, object], config: ExecuteCodeConfig) -> _Request:
        """Return the request, or raise in the order of behaviour 2.2."""
        if not config.enabled:
            raise DisabledError("execute_code is disabled. Enable [runtime.tools.execute_code] in config.")
        script = params.get("script")
        if not isinstance(script, str) or not script:
            raise InvalidParameterError("Missing required parameter: script")
        size_bytes = len(script.encode("utf-8", "surrogatepass"))
        if size_bytes > MAX_SCRIPT_BYTES:
            raise InvalidParameterError(f"script is too large ({size_bytes} bytes, cap {MAX_SCRIPT_BYTES})")
        reset = params.get("reset")
        if reset is not None and not isinstance(reset, bool):
            raise InvalidParameterError("reset must be a boolean")
        unknown = len(params.keys() - {"script", "timeout_ms", "reset"})
        if unknown:
            log.warning("execute_code: %d unknown parameter(s) ignored", unknown)
        return cls(script, _effective_timeout_ms(params.get("timeout_ms"), config.timeout_ms), bool(reset))


def _effective_timeout_ms(value: object, configured_ms: int) -> int:
    """Return the run's limit; never an error (behaviour 2.2)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(MIN_TIMEOUT_MS, value), configured_ms)
    return configured_ms


class _Updates:
    """Hands ``notify()`` messages to the caller's callback, one at a time and in order (behaviour 2.9).

    A callback that never returns is given up when the run has ended for ``GRACE_S``: every wait has an end.
    """

    GRACE_S = 1.0

    def __init__(self, callback: UpdateCallback | None, caller: hostloop.CallerLoop) -> None:
        self._callback = callback
        self._caller = caller
        self._queue: asyncio.Queue[str | None] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._complained = False
        if callback is not None:
            self._queue = asyncio.Queue()
            self._worker = asyncio.create_task(self._forward(callback, self._queue))

    @property
    def notify(self) -> Callable[[str], None] | None:
        """What the dispatcher calls on the host loop, None when nobody listens."""
        queue = self._queue
        if queue is None:
            return None
        return lambda message: self._caller.soon(lambda: queue.put_nowait(message))

    async def _forward(self, callback: UpdateCallback, queue: asyncio.Queue[str | None]) -> None:
        while (message := await queue.get()) is not None:
            try:
                answer = callback(ToolUpdate(f"notify: {message}"))
                if isinstance(answer, Awaitable):
                    await answer
            except Exception:
                if not self._complained:
                    self._complained = True
                    log.warning("execute_code: the on_update callback raised; its updates may be incomplete")

    async def finish(self) -> None:
        """Wait until what was forwarded has been handed over."""
        if self._queue is None or self._worker is None:
            return
        self._queue.put_nowait(None)
        try:
            await asyncio.wait_for(self._worker, self.GRACE_S)
        except (TimeoutError, asyncio.CancelledError):
            self._worker.cancel()


class _Cut(Exception):
    """The run was aborted, or its deadline passed, before its script was handed to an interpreter."""

    def __init__(self, reason: Literal["cancelled", "timeout"]) -> None:
        super().__init__(reason)
        self.reason: Literal["cancelled", "timeout"] = reason


def _is_id(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


@dataclass
class _Run:
    """One accepted call, on the host loop."""

    tool: ExecuteCode
    request: _Request
    config: ExecuteCodeConfig
    interpreter_path: str
    abort: AbortSignal
    updates: _Updates
    caller: hostloop.CallerLoop
    run_id: str | None
    span: telemetry.Span
    reset_performed: bool = False
    probed: bool = False
    interpreter: Interpreter | None = None

    async def execute(self) -> Outcome:
        self.loop = asyncio.get_running_loop()
        self.started = self.loop.time()
        self.deadline = self.started + self.request.timeout_ms / 1000
        return await (self._session() if self.config.kernel_mode == "session" else self._per_call())

    # -- per call -----------------------------------------------------------------------------------------

    async def _per_call(self, fallback_reason: FallbackReason | None = None) -> Outcome:
        from .per_call import run_script

        if not os.path.isdir(self.tool.cwd):
            raise WorkspaceError(f"the working directory of execute_code is not a directory: {self.tool.cwd}")
        try:
            interpreter = await self._guard(self._probe(self.deadline))
        except _Cut as cut:
            outcome = self._failure(cut.reason)
            outcome.fallback_reason = fallback_reason
            return outcome
        dispatcher = self._dispatcher("1", self.abort)
        killed = True
        end = None
        reason: Reason | None = "internal_error"
        try:
            end = await run_script(
                self.request.script,
                interpreter=interpreter.executable if interpreter else self.interpreter_path,
                magic=interpreter.magic if interpreter else None,
                cwd=self.tool.cwd,
                deadline=self.deadline,
                helpers=self.config.tools,
                dispatcher=dispatcher,
                abort=self.abort,
                max_output_bytes=self.config.max_output_bytes,
            )
            killed = end.cut is not None
            reason = end.cut if end.cut is not None else ("exit" if end.exit_code != 0 else None)
        except ExecuteCodeError:
            raise
        except Exception as error:
            log.error("execute_code: a per-call run failed inside the host (%s)", type(error).__name__)
            log.debug("the fault", exc_info=True)
        finally:
            stats = await dispatcher.close(killed=killed)
        outcome = self._outcome(dispatcher, stats, end.output if end is not None else None, reason)
        outcome.exit_code = end.exit_code if end is not None else None
        outcome.fallback_reason = fallback_reason
        telemetry.emit(
            "coding_agent.execute_code.stop",
            {"count": 1, "duration_us": self._elapsed_us()},
            {"rpc_calls": stats.calls, "rpc_denied": stats.denied, "exit_code": outcome.exit_code},
        )
        return outcome

    async def _fallback(self, reason: FallbackReason) -> Outcome:
        """Run isolated instead, in the time that remains (behaviour 6.9); only before anything started."""
        telemetry.emit("coding_agent.python_repl.fallback", {"count": 1}, {"reason": reason})
        remaining_s = self.deadline - self.loop.time()
        if self.abort.aborted or remaining_s <= 0:
            outcome = self._failure("cancelled" if self.abort.aborted else "timeout")
            outcome.fallback_reason = reason
            return outcome
        self.deadline = self.loop.time() + max(remaining_s, FALLBACK_MINIMUM_S)
        return await self._per_call(fallback_reason=reason)

    # -- session ------------------------------------------------------------------------------------------

    async def _session(self) -> Outcome:
        from lemon_provisioner.key import InvalidKey, kernel_key

        from .session.registry import KernelRegistry, KernelSettings, ResetFailed, Unavailable

        scope, config = self.tool.scope, self.config
        if scope is None or scope.owner is None or not _is_id(scope.session_id) or not _is_id(scope.agent_id):
            return await self._fallback("missing_session_scope")
        registry = self.tool.registry if self.tool.registry is not None else KernelRegistry.default()
        if registry.closed:
            return await self._fallback("registry_unavailable")
        if not os.path.isdir(self.tool.cwd):
            return self._failure("invalid_session_key")
        lease_end: CellEnd | None = None
        cell_abort = AbortSignal()
        dispatcher: Dispatcher | None = None
        stats = Stats()
        try:
            startup_deadline = min(self.deadline, self.started + STARTUP_TIMEOUT_S)
            interpreter = await self._guard(self._probe(startup_deadline))
            if interpreter is None:
                return await self._fallback("startup_failed")
            key = kernel_key(
                scope.session_id, scope.agent_id, self.tool.cwd, interpreter.executable, config.tools
            )
            if self.request.reset:
                self.reset_performed = await self._guard(registry.reset(key, scope.owner))
            try:
                dispatcher = self._dispatcher(f"cell-{next(_cell_numbers)}", cell_abort)
            except Exception as error:
                log.error("execute_code: no grant could be made (%s)", type(error).__name__)
                return self._failure("grant_failed")
            settings = KernelSettings(
                kernel_idle_timeout_ms=config.kernel_idle_timeout_ms,
                max_live_kernels=config.max_live_kernels,
                max_queued_cells_per_kernel=config.max_queued_cells_per_kernel,
            )
            lease = await self._guard(registry.acquire(key, scope.owner, settings, self.deadline))
            lease_end = await lease.execute(
                self.request.script,
                dispatcher=dispatcher,
                abort=self.abort,
                deadline=self.deadline,
                max_output_bytes=config.max_output_bytes,
            )
        except Unavailable as unavailable:
            return await self._fallback(unavailable.reason)
        except InvalidKey:
            return self._failure("invalid_session_key")
        except ResetFailed:
            return self._failure("reset_failed")
        except _Cut as cut:
            return self._failure(cut.reason)
        finally:
            cell_abort.abort()
            if dispatcher is not None:
                stats = await dispatcher.close(killed=lease_end is None or not lease_end.state_retained)
        outcome = self._outcome(dispatcher, stats, lease_end.output, lease_end.reason)
        outcome.exception_name, outcome.exception_message = lease_end.name, lease_end.message
        outcome.persistent = True
        outcome.kernel_reused = lease_end.kernel_reused
        outcome.state_retained = lease_end.state_retained
        return outcome

    def _failure(self, reason: Reason) -> Outcome:
        """Return the outcome of a run of which nothing was started."""
        return self._outcome(None, Stats(), None, reason)

    # -- parts --------------------------------------------------------------------------------------------

    async def _guard(self, work: Coroutine[object, object, T]) -> T:
        """Await `work`; raise :class:`_Cut` when the run is aborted or its deadline passes before it is done."""
        task = self.loop.create_task(work)
        aborted = asyncio.Event()
        unsubscribe = self.abort.on_abort(lambda: self.loop.call_soon_threadsafe(aborted.set))
        waiter = self.loop.create_task(aborted.wait())
        try:
            await asyncio.wait(
                (task, waiter),
                timeout=max(self.deadline - self.loop.time(), 0),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self.abort.aborted:
                raise _Cut("cancelled")
            if not task.done():
                raise _Cut("timeout")
            return task.result()
        finally:
            unsubscribe()
            waiter.cancel()
            task.cancel()

    async def _probe(self, deadline: float) -> Interpreter | None:
        """Ask the interpreter who it is; a run asks once, its fallback does not ask again (behaviour 2.3)."""
        from lemon_provisioner import interpreter

        if not self.probed:
            self.probed = True
            timeout_s = max(deadline - self.loop.time(), 0.001)
            try:
                self.interpreter = await interpreter.probe(self.interpreter_path, self.tool.cwd, timeout_s)
            except interpreter.ProbeError:
                log.warning("execute_code: the interpreter did not answer who it is")
        return self.interpreter

    def _dispatcher(self, cell: str, abort: AbortSignal) -> Dispatcher:
        config = self.config
        return Dispatcher(
            cell=cell,
            limits=Limits(
                max_rpc_calls=config.max_rpc_calls,
                max_rpc_result_bytes=config.max_rpc_result_bytes,
                max_text_bytes=config.max_text_bytes,
                max_parallel_rpc=config.max_parallel_rpc,
            ),
            helpers=config.tools,
            invoke=self._invoke,
            cwd=self.tool.cwd,
            policy=self.tool.policy_check(),
            authorize=self.tool.authorize(self.caller, self.run_id),
            on_notify=self.updates.notify,
            abort=abort,
            release_approval=self.tool.release_approval,
        )

    async def _invoke(self, call: Call, context: HelperContext) -> str | HelperResult:
        """Call the tool behind a helper: the real one here, a double on the caller's loop."""
        double = self.tool.doubles.get(call.tool)
        with self.span.helper(call.tool) as span:
            if double is None:
                result = await HELPERS[call.tool](call.params, context)
            else:
                result = await self.caller.call(lambda: double(call.params, context))
            if isinstance(result, HelperResult) and result.is_error:
                span.outcome("error")
        return result

    def _outcome(
        self,
        dispatcher: Dispatcher | None,
        stats: Stats,
        output: CapturedOutput | None,
        reason: Reason | None,
    ) -> Outcome:
        return Outcome(
            stats=stats,
            output=output if output is not None else CapturedOutput("", False, None),
            text_blocks=dispatcher.text_blocks if dispatcher is not None else (),
            duration_ms=self._elapsed_us() // 1000,
            reason=reason,
            timeout_ms=self.request.timeout_ms,
            reset_performed=self.reset_performed,
        )

    def _elapsed_us(self) -> int:
        return int((self.loop.time() - self.started) * 1_000_000)


def describe(config: ExecuteCodeConfig) -> str:
    """Return the description of the tool under `config` (behaviour 2.1)."""
    mode = f"Kernel mode: {config.kernel_mode}"
    if config.kernel_mode == "session":
        mode += (
            " - scripts are cells on a live Python kernel: imports, globals and objects survive from call to"
            " call. Pass reset=true to discard retained state before the script runs."
        )
    else:
        mode += " - every script runs in a fresh process; nothing survives it."
    if config.tools:
        names = "\n".join(f"- {SPECS[name].signature} -> str" for name in config.tools)
        helpers = (
            "Pre-imported helper functions call the agent's own tools; each blocks, returns the tool's text as"
            " str, and raises ToolError on any failure:\n" + names
        )
    else:
        helpers = "No helper is enabled: no agent tool can be called from a script (ToolError still exists)."
    return "\n\n".join(
        (
            (
                "Run a Python script that calls agent tools through pre-imported functions. Intermediate results stay"
                " out of the conversation: read, filter and aggregate in the script, and hand back only what matters."
            ),
            mode,
            helpers,
            (
                "Also pre-imported:\n"
                "- text(s): the result. Only text() blocks are the result; stdout and stderr come back as a labelled"
                " diagnostics tail. For a script that never calls text() its printed output is the result.\n"
                "- notify(msg): shows progress to the user; not part of the result.\n"
                "- batch([(tool, params), ...]): runs helper calls in parallel and returns their results in order;"
                " params is a dict of wire parameters or None."
            ),
            (
                f"Limits per script: {config.timeout_ms} ms wall time, {config.max_rpc_calls} helper calls"
                f" ({config.max_parallel_rpc} in parallel), {config.max_rpc_result_bytes} bytes of helper results,"
                f" {config.max_text_bytes} bytes of text(), {config.max_output_bytes} bytes of stdout/stderr."
            ),
            (
                "Requires python3 on the host. Line numbers in tracebacks are offset by 1 (submitted line + 1)."
                " input() is not supported. This is not a sandbox: scripts run with the user's permissions."
            ),
        )
    )


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
        """Call the tool; raises :class:`HelperError` with the text a script's ``ToolError`` would have."""
        caller = hostloop.CallerLoop()
        return await hostloop.call(self._execute(dict(params), abort or AbortSignal(), caller, run_id))

    async def _execute(
        self, params: dict[str, object], abort: AbortSignal, caller: hostloop.CallerLoop, run_id: str | None
    ) -> ToolResult:
        call = Call(id=0, tool=self.name, params=params, call_id=self.name, approval_id=new_approval_id())
        try:
            denial = await self._tool.authorize(caller, run_id)(call)
        finally:
            self._tool.release_approval(call.approval_id)
        if denial is not None:
            raise HelperError(denial.message)
        context = HelperContext(abort=abort, cwd=self._tool.cwd, call_id=self.name)
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
    current = source if isinstance(source, ToolPolicy) else hostloop.run(current_policy(source))
    found: list[Tool] = [
        DirectTool(name, folder, policy=source, approvals=approvals)
        for name in HELPER_NAMES
        if current.allowed(name)
    ]
    if config.enabled and current.allowed(NAME):
        found.append(ExecuteCode(folder, config=config, policy=source, approvals=approvals))
    return found


def find_tool(
    name: str,
    cwd: str | os.PathLike[str],
    *,
    config: ExecuteCodeConfig | None = None,
    policy: PolicySource | None = None,
) -> Tool:
    """Return the tool called `name`; raises :class:`ToolNotFoundError` when it is not registered."""
    for tool in tools(cwd, config=config, policy=policy):
        if tool.name == name:
            return tool
    raise ToolNotFoundError(f"tool not found: {name}")
