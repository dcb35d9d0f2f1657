"""The errors page, the code and the tests know the same messages."""

from __future__ import annotations

import re
from importlib import import_module
from typing import get_args

import pytest
from lemon_shim.wire import HELPERS as HELPER_NAMES

from lemon_kernel.result import FallbackReason, Reason

from .messages import GAP, PAGE, Row, code_messages, fixed_part, page_rows, texts_of_code, texts_of_tests

ROWS = page_rows()
TESTS = texts_of_tests()
CODE = texts_of_code()

NO_MESSAGES = {
    # parts of messages, which the page shows within a whole
    "... [truncated]": "the mark of every cut",
    "the name of a parameter": "wrong arguments, which the page names <parameter>",
    "command line": "the source of a value",
    "environment variable \0\0": "the source of a value",
    "command line option --\0.\0": "the source of a value",
    "Jupyter configuration": "the source of a value",
    "\0 from \0 applies": "the end of a warning",
    "; did you mean \0\0?": "the end of a usage error",
    "lemon-kernel run: \0 was denied; \0": "on the page without the command",
    "character device": "a type of file",
    "block device": "a type of file",
    # what results, prompts and progress look like
    "notify: \0": "progress",
    "Tool execution: \0": "the rationale of a prompt",
    "Found 1 match:": "a result of find",
    "Found \0 matches:": "a result of find",
    "Found 1 match.": "a result of grep",
    "Found \0 matches.": "a result of grep",
    "\0... [truncated]": "a cut line of grep",
    "1 file": "part of a notice of grep",
    "Directory: \0": "a result of ls",
    "?????????? \0 \0": "a result of ls",
    "%Y-%m-%d %H:%M": "a result of ls",
    "Print content, details and trust as JSON.": "help",
    "Installed kernelspec \0 in \0": "what install says when it is done",
    # reasons that only a log or `doctor` shows
    "the old kernel could not be stopped": "the cause of a reset_failed, never shown",
    "\0 did not say who it is (exit status \0)\0": "a finding of doctor",
    "\0 cannot be started: \0": "a finding of doctor",
    "\0 did not answer within \0 s": "a finding of doctor",
    "lemon-kernel: %(levelname)s: %(message)s": "a log format",
    # no texts for anybody
    "module \0 has no attribute \0": "Python's own words",
    r'File "<cell (\d+)>", line (\d+)': "a regular expression",
    "lemon-kernel run": "an agent id",
    "lemon-kernel webfetch": "a User-Agent",
    "text/html, application/xhtml+xml, application/json;q=0.9, text/plain;q=0.9, */*;q=0.5": "a header",
    "gzip, deflate": "a header",
    "helper work raised \0": "the note of a fault of ours in a log",
}
"""Texts of several words in the code that are no messages, with what they are."""

OUTSIDE = ("import sys; m = ", "\0\0\nSource: Web Fetch", "SECURITY NOTICE: ")
"""Beginnings of longer ones: the probe's program, and the wrapper, whose first line is on the page."""

NOT_LIMITS = ("MAX_TITLE_CHARACTERS", "MAX_ERROR_BYTES")
"""Cuts of what `webfetch` shows of a title and of an error page, told where they happen."""

HELP_FILES = ("helpers/specs.py",)
HELP_TEXTS = ("Run a script", "Print the definition", "Show every setting", "Find what can stop", "Install ")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_message_is_produced_by_a_test(row: Row) -> None:
    """What does not change of a message on the page stands in some test."""
    fixed = fixed_part(row.pattern)

    assert any(fixed in text for text in TESTS), f"no test says {fixed!r}"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_message_stands_in_the_code(row: Row) -> None:
    """A message that nobody can meet any more has no place on the page."""
    fixed = fixed_part(row.pattern)

    assert any(
        fixed in text or (len(fixed_part(text)) >= 8 and fixed_part(text) in row.pattern) for text in CODE
    )


def test_every_message_is_on_the_page() -> None:
    """A new message is explained before it can be met; what is none is listed above, with a reason."""
    missing = [
        f"{source}: {text.replace(GAP, '<>')}"
        for text, source in code_messages().items()
        if text not in NO_MESSAGES
        and not text.startswith(OUTSIDE)
        and not (source.endswith(HELP_FILES) or ("/cli/" in source and text.startswith(HELP_TEXTS)))
        and not any(fixed_part(text) in row.pattern for row in ROWS)
    ]

    assert missing == []


def test_no_exception_is_stale() -> None:
    """What is excused above is still there."""
    known = code_messages()

    assert [text for text in NO_MESSAGES if text not in known] == []


def test_reasons_are_complete() -> None:
    """The tables of reasons are the closed lists of the code, in their order."""
    tables = {section: [row.message for row in ROWS if row.section == section] for section in _sections()}

    assert tables["Reasons"] == list(get_args(Reason))
    assert tables["Fallback reasons"] == list(get_args(FallbackReason))


def test_limits_are_those_of_the_code() -> None:
    """The numbers in the tables of limits are those that the code has."""
    from lemon_provisioner import workspace
    from lemon_shim import wire

    from lemon_kernel import run
    from lemon_kernel.bridge import dispatch
    from lemon_kernel.config import ExecuteCodeConfig, WebFetchConfig
    from lemon_kernel.session import registry

    page = PAGE.read_text()
    for key, value in (*ExecuteCodeConfig().values().items(), *WebFetchConfig().values().items()):
        if isinstance(value, int) and not isinstance(value, bool):
            assert re.search(rf"`{key}` \| {value}\b", page), (key, value)

    for number in (
        run.MAX_SCRIPT_BYTES,
        run.MIN_TIMEOUT_MS,
        wire.MAX_FRAME_BYTES,
        wire.MAX_NOTIFY_BYTES,
        wire.MAX_FORWARDED_NOTIFIES,
        wire.NOTIFY_ACK_TIMEOUT_MS,
        wire.MAX_TRACEBACK_BYTES,
        wire.BATCH_WORKERS,
        wire.OPEN_TIMEOUT_MS,
        workspace.MAX_VISITS,
        registry.REAP_INTERVAL_MS,
        dispatch.ABANDONED_PER_PARALLEL,
        *_helper_limits(),
    ):
        assert re.search(rf"\b{number}\b", page.partition("## Errors")[0]), number


def _helper_limits() -> list[int]:
    """Return every number that a helper has for a limit."""
    modules = [import_module(f"lemon_kernel.helpers.{name}") for name in HELPER_NAMES]
    limits = {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith(("MAX_", "DEFAULT_", "TIMEOUT_")) and isinstance(value, int)
    }
    assert len(limits) >= 10
    return [value for name, value in limits.items() if not name.endswith(NOT_LIMITS)]


def _sections() -> list[str]:
    return list(dict.fromkeys(row.section for row in ROWS))
