"""The one outcome record of a run, and how it becomes the result a model reads (behaviour 2.6-2.8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .bridge.dispatch import Stats
    from .output import CapturedOutput

__all__ = ["FallbackReason", "Outcome", "Reason", "ToolResult", "ToolUpdate", "Trust"]

Trust = Literal["trusted", "untrusted"]

Reason = Literal[
    "timeout",
    "cancelled",
    "exit",
    "exception",
    "queue_full",
    "kernel_died",
    "protocol_fault",
    "kernel_discarded",
    "kernel_unavailable",
    "shutting_down",
    "reset_failed",
    "invalid_session_key",
    "grant_failed",
    "internal_error",
]
"""Why a run was no success; a closed list (behaviour 2.7)."""

FallbackReason = Literal[
    "missing_session_scope", "registry_unavailable", "capacity_exhausted", "startup_failed", "stop_failed"
]
"""Why a session-mode call ran isolated; all of them before submitted code started (seed)."""

NO_OUTPUT = "(script produced no output)"
RESULT_LABEL = "Script result (text()):"
DIAGNOSTICS_LABEL = "Diagnostics (stdout/stderr, not the result):"
CANCELLED_HEADLINE = "Script cancelled."


@dataclass(frozen=True)
class ToolUpdate:
    """A partial update while a script runs; `text` is ``notify: <message>``."""

    text: str


@dataclass(frozen=True)
class ToolResult:
    """What one call gives back.

    `content` is a list of ``{"type": "text", "text": ...}`` and all that reaches the model; `details` is for
    UI and logs (behaviour 2.7); `trust` is ``"untrusted"`` when fetched web content may be in it.
    """

    content: list[dict[str, object]]
    details: dict[str, object] = field(default_factory=dict)
    trust: Trust = "trusted"

    @classmethod
    def of_text(
        cls, text: str, details: dict[str, object] | None = None, trust: Trust = "trusted"
    ) -> ToolResult:
        return cls([{"type": "text", "text": text}], {} if details is None else details, trust)

    @property
    def text(self) -> str:
        """The text blocks of the content, joined with one newline."""
        return "\n".join(str(block["text"]) for block in self.content if block.get("type") == "text")


@dataclass
class Outcome:
    """How one run ended, in either mode (D-1)."""

    stats: Stats
    output: CapturedOutput
    text_blocks: Sequence[str]
    duration_ms: int
    reason: Reason | None = None
    timeout_ms: int = 0
    exit_code: int | None = None
    exception_name: str | None = None
    exception_message: str | None = None
    persistent: bool = False
    kernel_reused: bool = False
    reset_performed: bool = False
    state_retained: bool = False
    fallback_reason: FallbackReason | None = None

    @property
    def untrusted(self) -> bool:
        return "webfetch" in self.stats.tools_used or self.stats.accounting_loss

    def headline(self) -> str | None:
        """Return the first line of a run that was no success (behaviour 2.6), None on success."""
        match self.reason:
            case None:
                return None
            case "timeout":
                return f"Script timed out after {self.timeout_ms}ms."
            case "cancelled":
                return CANCELLED_HEADLINE
            case "exit":
                return f"Script exited with code {self.exit_code}"
            case "exception":
                if not self.exception_name:
                    return "Script raised an exception."
                if not self.exception_message:
                    return f"Script raised {self.exception_name}"
                return f"Script raised {self.exception_name}: {self.exception_message}"
            case reason:
                return f"execute_code session failed: {reason}"

    def assemble(self) -> str:
        """Return the content text: notice, headline, blocks, diagnostics (behaviour 2.6, 6.9)."""
        text = self._with_blocks() if self.text_blocks else self._historic()
        if self.fallback_reason is not None:
            notice = f"Note: this run was isolated ({self.fallback_reason}); its state will not persist."
            text = f"{notice}\n\n{text}"
        return text

    def _historic(self) -> str:
        """The shape of a run that never called text(), byte for byte."""
        headline = self.headline()
        cut_short = self.reason in ("timeout", "cancelled")
        body = self.output.text if cut_short else self._with_spill_line(self.output.text)
        if headline is None:
            return body or NO_OUTPUT
        if not body:
            return headline
        if self.reason == "exit":
            return _blank_line(body) + headline
        return _blank_line(headline) + body

    def _with_blocks(self) -> str:
        headline = self.headline()
        start = "" if headline is None else _blank_line(headline)
        blocks = "\n".join(self.text_blocks)
        diagnostics = self._with_spill_line(self.output.text or NO_OUTPUT)
        return _blank_line(f"{start}{RESULT_LABEL}\n{blocks}") + f"{DIAGNOSTICS_LABEL}\n{diagnostics}"

    def _with_spill_line(self, output: str) -> str:
        if not self.output.truncated or self.output.full_output_path is None:
            return output
        return f"{_blank_line(output)}[Full output saved to: {self.output.full_output_path}]"

    def details(self) -> dict[str, object]:
        stats = self.stats
        details: dict[str, object] = {
            "exit_code": self.exit_code,
            "truncated": self.output.truncated,
            "duration_ms": max(0, self.duration_ms),
            "rpc_calls": stats.calls,
            "rpc_denied": stats.denied,
            "rpc_errors": stats.errors,
            "rpc_bytes": stats.bytes,
            "rpc_tools": sorted(stats.tools_used),
            "persistent": self.persistent,
            "kernel_reused": self.kernel_reused,
            "reset_performed": self.reset_performed,
            "state_retained": self.state_retained,
        }
        only_when_they_apply: Mapping[str, object] = {
            "full_output_path": self.output.full_output_path if self.output.truncated else None,
            "reason": self.reason,
            "fallback_reason": self.fallback_reason,
            "rpc_accounting_loss": stats.accounting_loss or None,
        }
        details.update((key, value) for key, value in only_when_they_apply.items() if value is not None)
        return details

    def result(self) -> ToolResult:
        """Return the result; an untrusted run's whole text is wrapped as external content (behaviour 2.8)."""
        text = self.assemble()
        if not self.untrusted:
            return ToolResult.of_text(text, self.details())
        from .helpers.external import wrap_external

        return ToolResult.of_text(wrap_external(text), self.details(), "untrusted")


def _blank_line(text: str) -> str:
    """Return `text` followed by exactly one empty line (behaviour 2.6)."""
    return text + ("\n" if text.endswith("\n") else "\n\n")
