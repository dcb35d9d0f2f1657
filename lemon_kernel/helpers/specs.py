"""What a model is told of the helpers: names, descriptions, parameter schemas, script-side signatures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SPECS", "HelperSpec"]

JsonSchema = Mapping[str, object]


@dataclass(frozen=True)
class HelperSpec:
    """One helper as a direct tool; `signature` is how the script calls it (behaviour 3.1)."""

    name: str
    label: str
    description: str
    parameters: JsonSchema
    signature: str


def _object(required: str, **properties: JsonSchema) -> JsonSchema:
    return {
        "type": "object",
        "properties": properties,
        "required": [required] if required else [],
        "additionalProperties": False,
    }


def _string(description: str, **more: object) -> JsonSchema:
    return {"type": "string", "description": description, **more}


def _integer(description: str, **more: object) -> JsonSchema:
    return {"type": "integer", "description": description, **more}


def _flag(description: str) -> JsonSchema:
    return {"type": "boolean", "description": description, "default": False}


_SPECS = (
    HelperSpec(
        "read",
        "Read",
        "Read a file. Text comes as numbered lines, at most 2000 lines and 51200 bytes at a time; go on with "
        "offset. Images (jpg, jpeg, png, gif, webp) come as images.",
        _object(
            "path",
            path=_string("Path of the file, absolute, relative to the working directory, or with ~"),
            offset=_integer("First line to show, counted from 1"),
            limit=_integer("How many lines to show at most"),
        ),
        "read(path, offset=None, limit=None)",
    ),
    HelperSpec(
        "grep",
        "Grep",
        "Search files for a pattern, line by line. Respects .gitignore and .ignore files inside the searched "
        "tree and skips hidden and binary files. Lines come as path:number: text.",
        _object(
            "pattern",
            pattern=_string("Regular expression, or plain text with literal"),
            path=_string("File or directory to search (default: the working directory)"),
            glob=_string("Only files whose path matches **/<glob>, e.g. *.py"),
            case_sensitive={"type": "boolean", "description": "Mind upper and lower case", "default": True},
            literal=_flag("Take the pattern as plain text"),
            context_lines=_integer("Lines to show before and after each match", minimum=0, default=0),
            max_results=_integer("How many matches to show; all are counted", minimum=1, default=100),
        ),
        "grep(pattern, path=None, glob=None, case_sensitive=None, literal=None, context_lines=None, "
        "max_results=None)",
    ),
    HelperSpec(
        "find",
        "Find",
        "Find files and directories whose base name matches a glob. Consults no ignore files (.gitignore); "
        "hidden names are left out unless hidden is true.",
        _object(
            "pattern",
            pattern=_string("Glob for the base name, e.g. *.py; exact without a wildcard"),
            path=_string("Directory to search (default: the working directory)"),
            type=_string("Only this kind", enum=["file", "directory"]),
            max_depth=_integer("Levels to descend; 1 is the directory itself"),
            max_results=_integer("How many paths to show", default=100),
            hidden=_flag("Also names that begin with a dot"),
        ),
        "find(pattern, path=None, type=None, max_depth=None, max_results=None, hidden=None)",
    ),
    HelperSpec(
        "ls",
        "List",
        "List a directory: d directory, - file, ? other; directories first.",
        _object(
            "",
            path=_string("Directory to list (default: the working directory)"),
            all=_flag("Also names that begin with a dot"),
            long=_flag("Also mode, size and modification time (UTC)"),
            recursive=_flag("Also the directories below"),
            max_depth=_integer("With recursive: how many levels below the directory"),
            max_entries=_integer("How many entries to show", default=500),
        ),
        "ls(path=None, all=None, long=None, recursive=None, max_depth=None, max_entries=None)",
    ),
    HelperSpec(
        "webfetch",
        "Web Fetch",
        "Fetch a public http or https URL and return a JSON string with its main content (key text) and "
        "where it came from. The content is external and untrusted.",
        _object(
            "url",
            url=_string("The http or https URL"),
            extractMode=_string("Form of the content", enum=["markdown", "text"], default="markdown"),
            maxChars=_integer(
                "Characters of wrapped text at most (default from the configuration)", minimum=100
            ),
        ),
        "webfetch(url, extract_mode=None, max_chars=None)",
    ),
)

SPECS: dict[str, HelperSpec] = {spec.name: spec for spec in _SPECS}
"""By name, in the order of the allowlist."""
