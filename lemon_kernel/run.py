"""One accepted call, on the host loop: per call or as a cell, and the fallback between them.

Nothing here raises an :class:`ExecuteCodeError` once a script has been handed to an interpreter; from then on
every ending is an :class:`Outcome` (behaviour 2.4-2.7).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from . import hostloop, telemetry
from .bridge.dispatch import Authorize, Call, Dispatcher, Limits, PolicyCheck, Stats
from .config import ExecuteCodeConfig
from .errors import DisabledError, ExecuteCodeError, InterpreterError, InvalidParameterError, WorkspaceError
from .helpers.base import Helper, HelperContext, HelperResult
from .output import CapturedOutput
from .result import FallbackReason, Outcome, Reason, ToolUpdate
from .scope import AbortSignal, SessionScope

if TYPE_CHECKING:
    from lemon_provisioner.interpreter import Interpreter

    from .session.kernel import CellEnd
    from .session.registry import KernelRegistry

__all__ = ["Request", "Run", "UpdateCallback", "Updates"]

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_SCRIPT_BYTES = 1_048_576
MIN_TIMEOUT_MS = 1000
FALLBACK_MINIMUM_S = 1.0
OLDEST_PYTHON = (3, 7)
"""Older ones cannot even compile the script's side of the bridge; ``doctor`` says which ones are supported."""

_cell_numbers = itertools.count(1)
"""Names the cells of a host process apart; what a grant is called is no secret, its token is."""

UpdateCallback = Callable[[ToolUpdate], object]
"""A sync or async callable; what it returns is ignored, what it raises is logged once per run."""


@dataclass(frozen=True)
class Request:
    """The checked parameters of one call."""

    script: str
    timeout_ms: int
    reset: bool

    @classmethod
    def check(cls, params: Mapping[str, object], config: ExecuteCodeConfig) -> Request:
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


class Updates:
    """Hands ``notify()`` messages to the caller's callback, one at a time and in order (behaviour 2.9).

    A callback that never returns is given up when the run has ended for ``GRACE_S``: every wait has an end.
    """

    GRACE_S = 1.0

    def __init__(self, callback: UpdateCallback | None, caller: hostloop.CallerLoop) -> None:
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
            await asyncio.wait({self._worker}, timeout=self.GRACE_S)
        finally:
            self._worker.cancel()  # not awaited: a callback may shrug that off


class _Cut(Exception):
    """The run was aborted, or its deadline passed, before its script was handed to an interpreter."""

    def __init__(self, reason: Literal["cancelled", "timeout"]) -> None:
        super().__init__(reason)
        self.reason: Literal["cancelled", "timeout"] = reason


def _tell_of_denial() -> None:
    """A frame of a cell failed authentication; per-call runs have no such event (behaviour 9.1)."""
    telemetry.emit("coding_agent.python_repl.bridge.deny", {"count": 1}, {"reason": "authentication"})


@dataclass
class Run:
    """One accepted call, on the host loop."""

    cwd: str
    request: Request
    config: ExecuteCodeConfig
    helpers: Mapping[str, Helper]
    """Every helper of the call: the real ones, which run on this loop, and doubles, wrapped for the caller's."""
    policy: PolicyCheck
    authorize: Authorize
    release_approval: Callable[[str], object]
    scope: SessionScope | None
    registry: KernelRegistry | None
    interpreter_path: str
    abort: AbortSignal
    updates: Updates
    span: telemetry.Span
    reset_performed: bool = False
    probed: bool = False
    stats: Stats = field(default_factory=Stats)
    interpreter: Interpreter | None = None

    async def execute(self) -> Outcome:
        self.loop = asyncio.get_running_loop()
        self.started = self.loop.time()
        self.deadline = self.started + self.request.timeout_ms / 1000
        return await (self._session() if self.config.kernel_mode == "session" else self._per_call())

    # -- per call -----------------------------------------------------------------------------------------

    async def _per_call(self) -> Outcome:
        """Run isolated; the telemetry hears of it once, also when nobody waits for the result any more.

        Not of a refusal, for nothing ran then.
        """
        try:
            outcome = await self._isolated()
        except ExecuteCodeError:
            raise
        except BaseException:
            self._tell_of_end(None)
            raise
        self._tell_of_end(outcome.exit_code)
        return outcome

    def _tell_of_end(self, exit_code: int | None) -> None:
        telemetry.emit(
            "coding_agent.execute_code.stop",
            {"count": 1, "duration_us": self._elapsed_us()},
            {"rpc_calls": self.stats.calls, "rpc_denied": self.stats.denied, "exit_code": exit_code},
        )

    async def _isolated(self) -> Outcome:
        from .per_call import run_script

        if not os.path.isdir(self.cwd):
            raise WorkspaceError(f"the working directory of execute_code is not a directory: {self.cwd}")
        try:
            interpreter = await self._interpreter(self.deadline)
        except _Cut as cut:
            return self._failure(cut.reason)
        if interpreter is not None and interpreter.version < OLDEST_PYTHON:
            version = ".".join(map(str, interpreter.version))
            raise InterpreterError(
                f"execute_code cannot use {interpreter.executable}: it is Python {version}"
            )
        dispatcher = self._dispatcher("1", self.abort, None)
        killed = True
        end = None
        reason: Reason | None = "internal_error"
        try:
            end = await run_script(
                self.request.script,
                interpreter=interpreter.executable if interpreter else self.interpreter_path,
                magic=interpreter.magic if interpreter else None,
                cwd=self.cwd,
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
            log.error("execute_code: a per-call run failed inside the host (%s)", telemetry.fault_name(error))
        finally:
            self.stats = await dispatcher.close(killed=killed)
        outcome = self._outcome(dispatcher, self.stats, end.output if end is not None else None, reason)
        outcome.exit_code = end.exit_code if end is not None else None
        return outcome

    async def _fallback(self, reason: FallbackReason) -> Outcome:
        """Run isolated instead, in the time that remains (behaviour 6.9); only before anything started."""
        telemetry.emit("coding_agent.python_repl.fallback", {"count": 1}, {"reason": reason})
        remaining_s = self.deadline - self.loop.time()
        if self.abort.aborted or remaining_s <= 0:
            outcome = self._failure("cancelled" if self.abort.aborted else "timeout")
        else:
            self.deadline = self.loop.time() + max(remaining_s, FALLBACK_MINIMUM_S)
            outcome = await self._per_call()
        outcome.fallback_reason = reason
        return outcome

    # -- session ------------------------------------------------------------------------------------------

    async def _session(self) -> Outcome:
        from lemon_provisioner.key import InvalidKey, is_name, kernel_key

        from .session.link import STARTUP_TIMEOUT_S
        from .session.registry import KernelRegistry, KernelSettings, ResetFailed, Unavailable

        scope, config = self.scope, self.config
        if (
            scope is None
            or scope.owner is None
            or not is_name(scope.session_id)
            or not is_name(scope.agent_id)
        ):
            return await self._fallback("missing_session_scope")
        registry = self.registry if self.registry is not None else KernelRegistry.default()
        if registry.closed:
            return await self._fallback("registry_unavailable")
        if not os.path.isdir(self.cwd):
            return self._failure("invalid_session_key")
        lease_end: CellEnd | None = None
        cell_abort = AbortSignal()
        dispatcher: Dispatcher | None = None
        stats = Stats()
        try:
            startup_deadline = min(self.deadline, self.started + STARTUP_TIMEOUT_S)
            interpreter = await self._interpreter(startup_deadline)
            if interpreter is None:
                return await self._fallback("startup_failed")
            key = kernel_key(scope.session_id, scope.agent_id, self.cwd, interpreter.executable, config.tools)
            if self.request.reset:
                self.reset_performed = await self._guard(registry.reset(key, scope.owner))
            try:
                dispatcher = self._dispatcher(f"cell-{next(_cell_numbers)}", cell_abort, _tell_of_denial)
            except Exception as error:
                log.error("execute_code: no grant could be made (%s)", telemetry.fault_name(error))
                return self._failure("grant_failed")
            settings = KernelSettings(
                kernel_idle_timeout_ms=config.kernel_idle_timeout_ms,
                max_live_kernels=config.max_live_kernels,
                max_queued_cells_per_kernel=config.max_queued_cells_per_kernel,
            )
            lease = await registry.acquire(key, scope.owner, settings)
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
        except ExecuteCodeError:
            raise
        except Exception as error:
            log.error("execute_code: a session run failed inside the host (%s)", telemetry.fault_name(error))
        finally:
            cell_abort.abort()
            if dispatcher is not None:
                stats = await dispatcher.close(killed=lease_end is None or not lease_end.state_retained)
        if lease_end is None:
            return self._outcome(dispatcher, stats, None, "internal_error")
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

    async def _interpreter(self, deadline: float) -> Interpreter | None:
        """Return who the interpreter says it is, None if it does not; raises :class:`_Cut`."""
        from lemon_provisioner import interpreter

        if not self.probed:  # most runs ask nothing: two tasks and a turn of the loop less
            try:
                self.interpreter = interpreter.known(self.interpreter_path, self.cwd)
            except interpreter.ProbeError:
                pass
            self.probed = self.interpreter is not None
        return self.interpreter if self.probed else await self._guard(self._probe(deadline))

    async def _probe(self, deadline: float) -> Interpreter | None:
        """Ask the interpreter who it is; a run asks once, its fallback does not ask again (behaviour 2.3)."""
        from lemon_provisioner import interpreter

        if not self.probed:
            self.probed = True
            timeout_s = max(deadline - self.loop.time(), 0.001)
            try:
                self.interpreter = await interpreter.probe(self.interpreter_path, self.cwd, timeout_s)
            except interpreter.ProbeError:
                log.warning("execute_code: the interpreter did not answer who it is")
        return self.interpreter

    def _dispatcher(
        self, cell: str, abort: AbortSignal, on_auth_denied: Callable[[], None] | None
    ) -> Dispatcher:
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
            cwd=self.cwd,
            policy=self.policy,
            authorize=self.authorize,
            on_notify=self.updates.notify,
            on_auth_denied=on_auth_denied,
            abort=abort,
            release_approval=self.release_approval,
        )

    async def _invoke(self, call: Call, context: HelperContext) -> str | HelperResult:
        with self.span.helper(call.tool) as span:
            result = await self.helpers[call.tool](call.params, context)
            span.outcome("error" if isinstance(result, HelperResult) and result.is_error else None)
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
