"""What can be raised, one class per decision a caller can take.

::

    Exception
    ├── ExecuteCodeError            nothing has run; the message says why and what to do
    │   ├── ConfigError             a configuration source cannot be read (file, line, column)
    │   │   └── UsageError          a value on the command line is wrong; the person mends it there
    │   ├── DisabledError           execute_code is switched off
    │   ├── InvalidParameterError   the call itself is malformed
    │   ├── InterpreterError        no usable Python was found
    │   ├── WorkspaceError          no private workspace could be had; failed closed
    │   ├── ToolNotFoundError       no tool of that name is registered (also a LookupError)
    │   └── RegistryUnavailableError  the kernel registry is closed
    └── HelperError                 a helper's own failure; the script sees it as ``ToolError``

Everything that goes wrong after a script was accepted is not an error but a
:class:`~lemon_kernel.ToolResult` with a ``reason`` (behaviour, "Words").
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DisabledError",
    "ExecuteCodeError",
    "HelperError",
    "InterpreterError",
    "InvalidParameterError",
    "RegistryUnavailableError",
    "ToolNotFoundError",
    "UsageError",
    "WorkspaceError",
]


class ExecuteCodeError(Exception):
    """Nothing has run; the message names the thing, its value and the mend."""


class ConfigError(ExecuteCodeError):
    """A configuration source exists and cannot be read."""


class UsageError(ConfigError):
    """A command line says something that cannot be meant; exit status 2 (behaviour 2.10)."""


class DisabledError(ExecuteCodeError):
    """``execute_code`` is disabled by the effective configuration (behaviour 2.2)."""


class InvalidParameterError(ExecuteCodeError):
    """A parameter of the call is missing, of the wrong type or too large (behaviour 2.2)."""


class InterpreterError(ExecuteCodeError):
    """The interpreter that is configured, or ``python3`` on PATH, cannot be used (behaviour 2.3)."""


class WorkspaceError(ExecuteCodeError):
    """A private workspace could not be created and validated (behaviour 8)."""


class ToolNotFoundError(ExecuteCodeError, LookupError):
    """No tool of that name is registered, or the policy hides it (behaviour 1.3)."""


class RegistryUnavailableError(ExecuteCodeError):
    """The kernel registry has been closed (behaviour 9.3)."""


class HelperError(Exception):
    """A helper failed; its message is what the script's ``ToolError`` says."""
