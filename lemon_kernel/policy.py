"""Which tools an agent may call, and which of them a person is asked about.

Nothing fails open (behaviour D-8): a policy with a value that cannot be read denies every tool, with a message
that names the value, until it is mended.  It does not raise: a policy function is asked in the middle of a run,
and the script is told why its call is denied.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import TYPE_CHECKING

from .telemetry import fault_name

if TYPE_CHECKING:
    from .scope import AbortSignal

__all__ = ["PolicySource", "ToolPolicy", "current_policy"]

logger = logging.getLogger(__name__)

_LOOKING = frozenset({"read", "grep", "find", "ls"})

PROFILES: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "full_access": lambda tool: True,
        "orchestrator": lambda tool: True,
        "leaf_worker": lambda tool: True,
        "minimal_core": lambda tool: True,
        "no_external": lambda tool: tool != "webfetch",
        "read_only": _LOOKING.__contains__,
        "safe_mode": _LOOKING.__contains__,
        "subagent_restricted": _LOOKING.__contains__,
    }
)
"""Profile to the tools it allows; ``execute_code`` is classified like a shell (behaviour 4.1)."""

_NEVER = frozenset({"never", "false", "none"})


class ToolPolicy:
    """Who may call what (behaviour 4.1).

    `allow` is ``"all"`` or a list of names; `deny` and `blocked_tools` beat it.  `require_approval` lists tools
    that a person is asked about at each call; `approvals` maps a tool to ``"always"`` or ``"never"``, and a mode
    it does not know counts as always.  `profile` is one of :data:`PROFILES`.  A single string stands for a list
    of one; names are trimmed.  Without arguments everything is allowed and nothing needs approval.
    """

    def __init__(
        self,
        allow: object = "all",
        deny: object = (),
        blocked_tools: object = (),
        require_approval: object = (),
        approvals: object = None,
        profile: object = None,
    ) -> None:
        self.unreadable_reason: str | None = None
        """Why every tool is denied, or None for a policy that could be read."""
        is_all = allow is None or (isinstance(allow, str) and allow.strip() == "all")
        self.allow: str | frozenset[str] = "all" if is_all else self._names("allow", allow)
        self.deny = self._names("deny", deny)
        self.blocked_tools = self._names("blocked_tools", blocked_tools)
        self.require_approval = self._names("require_approval", require_approval)
        self.approvals = self._modes(approvals)
        self.profile = self._profile(profile)

    @classmethod
    def unreadable(cls, reason: str) -> ToolPolicy:
        """Return the policy that denies everything because of `reason`."""
        policy = cls()
        policy.unreadable_reason = reason
        return policy

    @staticmethod
    def load(cwd: str | os.PathLike[str]) -> ToolPolicy:
        """Return the configured policy for work in `cwd` (behaviour 1.4).

        Raises :class:`~lemon_kernel.errors.ConfigError` when a configuration file cannot be read.
        """
        from .config import PolicyConfig

        return PolicyConfig.load(cwd).policy()

    def allowed(self, tool: str) -> bool:
        """Return whether `tool` may be called."""
        return self.denial_reason(tool) is None

    def denial_reason(self, tool: str) -> str | None:
        """Return why `tool` may not be called, or None; the first reason that applies (behaviour 4.1)."""
        if self.unreadable_reason is not None:
            return self.unreadable_reason
        if tool in self.blocked_tools:
            return f"Tool '{tool}' is in blocked_tools list"
        if tool in self.deny:
            return f"Tool '{tool}' is in deny list"
        if not isinstance(self.allow, str) and tool not in self.allow:
            return f"Tool '{tool}' not in allowed list"
        if self.profile is not None and not PROFILES[self.profile](tool):
            return f"Tool '{tool}' is not allowed by profile {self.profile}"
        return None

    def requires_approval(self, tool: str) -> bool:
        """Return whether a person is to be asked before `tool` runs."""
        return tool in self.require_approval or self.approvals.get(tool, False)

    def __repr__(self) -> str:
        if self.unreadable_reason is not None:
            return f"ToolPolicy.unreadable({self.unreadable_reason!r})"
        allow = "all" if isinstance(self.allow, str) else sorted(self.allow)
        return f"ToolPolicy(allow={allow!r}, deny={sorted(self.deny)!r}, profile={self.profile!r})"

    def _fail(self, key: str, why: str) -> None:
        if self.unreadable_reason is None:
            self.unreadable_reason = f"tool policy cannot be read: {key} from the policy argument: {why}"

    def _names(self, key: str, value: object) -> frozenset[str]:
        if value is None:
            return frozenset()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple | AbstractSet) or not all(
            isinstance(item, str) for item in items
        ):
            self._fail(key, f"{value!r:.80} is not a list of tool names")
            return frozenset()
        return frozenset(name for item in items if (name := item.strip()))

    def _modes(self, value: object) -> Mapping[str, bool]:
        """Return tool to "is asked about"."""
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(tool, str) for tool in value):
            self._fail("approvals", f"{value!r:.80} does not map tools to modes")
            return {}
        return {tool.strip(): _asks(mode) for tool, mode in value.items()}

    def _profile(self, value: object) -> str | None:
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        if isinstance(value, str) and value.strip() in PROFILES:
            return value.strip()
        self._fail("profile", f"{value!r:.80} is none of {', '.join(PROFILES)}")
        return None


PolicySource = ToolPolicy | Callable[[], ToolPolicy | Awaitable[ToolPolicy]]
"""A policy, or a function that returns (or awaits) the one that holds now."""


async def current_policy(
    source: PolicySource | None, timeout_s: float | None = None, abort: AbortSignal | None = None
) -> ToolPolicy:
    """Return the policy that holds now; one that cannot be had denies everything (behaviour D-8).

    Without a `source` everything is allowed.  A policy cannot be had either that an async function does not return within `timeout_s`, or before `abort`.
    """
    if isinstance(source, ToolPolicy):
        return source
    if source is None:
        return ToolPolicy()
    try:
        policy: object = source()
        if inspect.isawaitable(policy):
            from .hostloop import within

            policy = await within(policy, timeout_s, abort)
    except TimeoutError:
        logger.error("the policy function did not answer; everything is denied")
        return ToolPolicy.unreadable("tool policy cannot be read: the policy function did not answer in time")
    except Exception as error:
        logger.error("the policy function raised (%s); everything is denied", fault_name(error))
        return ToolPolicy.unreadable("tool policy cannot be read: the policy function raised")
    if not isinstance(policy, ToolPolicy):
        kind = type(policy).__name__
        return ToolPolicy.unreadable(f"tool policy cannot be read: the policy function returned {kind}")
    return policy


def _asks(mode: object) -> bool:
    """Return whether an approval mode asks; one that is not known to mean never does (D-8)."""
    if isinstance(mode, Mapping):
        mode = mode.get("mode", "always")
        if mode is None:  # a table that says nothing is no mode that is known
            return True
    if isinstance(mode, str):
        return mode.strip() not in _NEVER
    return not (mode is None or mode is False)
