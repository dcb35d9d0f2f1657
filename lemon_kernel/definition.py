"""What a model is told of ``execute_code``: name, description, parameters (behaviour 2.1)."""

from __future__ import annotations

from .config import ExecuteCodeConfig
from .helpers.specs import SPECS

__all__ = ["LABEL", "NAME", "describe", "parameters"]

NAME = "execute_code"
LABEL = "Execute Code"


def parameters() -> dict[str, object]:
    """Return the JSON Schema of the parameters, a new one each time; the same in both modes."""
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
