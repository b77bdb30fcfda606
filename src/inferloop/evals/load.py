"""Suite files (YAML, TOML or JSON) -> Suite. A fault is a ContractError that names file, line, key and nearest name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from inferloop.contract.located import Located
from inferloop.contract.source import parse_text, read_text
from inferloop.evals.reading import Check, Fields, Reader, bare
from inferloop.evals.suite import KINDS, PROTOCOL_KEYS, Case, CaseKind, Suite

SUITE_KEYS = ("suite", "version", "description", "defaults", "cases")
CASE_KEYS = ("id", "kind", "why", "messages", "prompt", "sampling", "request", "expect", "tags")
DEFAULT_MAX_TOKENS = 32


def _whole(low: int) -> Check:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low


def _number(low: float, high: float) -> Check:
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and low <= v <= high


def _texts(v: Any) -> bool:
    return isinstance(v, list) and bool(v) and all(isinstance(item, str) and item for item in v)


def _ids(v: Any) -> bool:
    return isinstance(v, list) and bool(v) and all(_whole(0)(item) for item in v)


def _finite(v: Any) -> bool:
    """Whether JSON has the value."""
    if isinstance(v, dict | list):
        return all(_finite(item) for item in (v.values() if isinstance(v, dict) else v))
    return not isinstance(v, float) or math.isfinite(v)


SAMPLING: Fields = {
    "temperature": (_number(0, 2), "a number from 0 to 2"),
    "top_p": (_number(0, 1), "a number from 0 to 1"),
    "top_k": (_whole(0), "a whole number >= 0"),
    "min_p": (_number(0, 1), "a number from 0 to 1"),
    "seed": (_whole(0), "a whole number >= 0"),
    "max_tokens": (_whole(1), "a whole number >= 1"),
    "stop": (_texts, "a list of texts"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
}
_TRUE: tuple[Check, str] = (lambda v: v is True, "true (leave it out otherwise)")
PROTOCOL: Fields = {
    "status": (lambda v: _whole(200)(v) and v < 600, "an HTTP status"),
    "param": (lambda v: isinstance(v, str) and bool(v), "the name of a field"),
    "text": (lambda v: isinstance(v, str), "text"),
    "lacks": (_texts, "a list of texts"),
    "finish_reason": (lambda v: v in ("stop", "length"), "stop or length"),
    "prompt_tokens": (_whole(1), "a whole number >= 1"),
    "completion_tokens": (_whole(0), "a whole number >= 0"),
    "usage_exact": _TRUE,
    "stream_equal": _TRUE,
    "round_trip": _TRUE,
}
assert tuple(PROTOCOL) == PROTOCOL_KEYS
EXPECT: dict[CaseKind, tuple[Check, str]] = {
    "exact": (lambda v: isinstance(v, str), "the whole answer as text"),
    "contains": (lambda v: (isinstance(v, str) and bool(v)) or _texts(v), "a text or a list of texts"),
    "regex": (lambda v: isinstance(v, str) and bool(v), "a regular expression"),
    "json": (_finite, "a JSON value"),
    "template": (_ids, "a list of token ids"),
}


def load_suite(path: Path) -> Suite:
    """Read a suite file. Raises UsageError when there is none, ContractError for what is wrong in it."""
    text, fmt = read_text(path)
    return parse_suite(text, fmt=fmt, source=str(path))


def parse_suite(text: str, *, fmt: str = "yaml", source: str = "suite") -> Suite:
    """A suite from text; `fmt` is yaml, toml or json. Raises ContractError."""
    read = Reader(source)
    root = parse_text(text, fmt, source)
    top = read.mapping(root, SUITE_KEYS, required=("suite", "version", "cases"))
    version = read.checked(top["version"], lambda v: v == 1 and v is not True, "1, the only version there is")
    defaults = read.fields(top["defaults"], SAMPLING) if "defaults" in top else {}
    cases: list[Case] = []
    lines: dict[str, int | None] = {}
    for node in read.items(top["cases"]):
        case = _case(read, node, defaults)
        if case.id in lines:
            raise read.error(node, f"{case.id!r} is already the id of the case on line {lines[case.id]}", key="id")
        lines[case.id] = node.line
        cases.append(case)
    return Suite(
        name=read.text(top["suite"]),
        version=version,
        cases=tuple(cases),
        description=read.text(top["description"]) if "description" in top else "",
        source=source,
    )


def _case(read: Reader, node: Located, defaults: dict[str, Any]) -> Case:
    entries = read.mapping(node, CASE_KEYS, required=("id", "kind", "why", "expect"))
    if ("messages" in entries) == ("prompt" in entries):
        raise read.error(node, "needs either messages or prompt")
    kind = read.choice(entries["kind"], KINDS)
    assert kind in KINDS
    if kind == "template" and "messages" not in entries:
        raise read.error(node, "a template case needs messages")
    if "request" in entries and kind != "protocol":
        raise read.error(entries["request"], "only protocol cases may override request fields")
    wanted = "a mapping of request fields"
    given = read.fields(entries["sampling"], SAMPLING) if "sampling" in entries else {}
    return Case(
        id=read.text(entries["id"]),
        kind=kind,
        why=read.text(entries["why"]),
        expect=_expect(read, entries["expect"], kind),
        messages=_messages(read, entries["messages"]) if "messages" in entries else None,
        prompt=read.text(entries["prompt"]) if "prompt" in entries else None,
        sampling={"max_tokens": DEFAULT_MAX_TOKENS, **defaults, **given},
        request=read.checked(entries["request"], lambda v: isinstance(v, dict), wanted) if "request" in entries else {},
        tags=tuple(read.text(item) for item in read.items(entries["tags"])) if "tags" in entries else (),
    )


def _expect(read: Reader, node: Located, kind: CaseKind) -> Any:
    if kind == "protocol":
        found = read.fields(node, PROTOCOL)
        if not found:
            raise read.error(node, "expects nothing, so it could not fail")
        return found
    value = read.checked(node, *EXPECT[kind])
    if kind == "regex":
        try:
            re.compile(value)
        except re.error as error:
            raise read.error(node, f"is not a regular expression: {error}") from error
    return (value,) if kind == "contains" and isinstance(value, str) else value


def _messages(read: Reader, node: Located) -> tuple[dict[str, Any], ...]:
    messages = []
    for item in read.items(node):
        entries = read.mapping(item, ("role", "content"), required=("role", "content"))
        role = read.choice(entries["role"], ("system", "user", "assistant"))
        content = bare(entries["content"])
        if not isinstance(content, str):
            raise read.error(entries["content"], "must be text")
        messages.append({"role": role, "content": content})
    return tuple(messages)
