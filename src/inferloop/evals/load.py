"""Suite files -> Suite. Every fault is a ContractError that names file, line, key and the nearest valid name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import yaml

from inferloop.core.errors import ContractError
from inferloop.core.request import FinishReason
from inferloop.evals.document import Document
from inferloop.evals.suite import KINDS, PROTOCOL_KEYS, Case, CaseKind, Suite

SUITE_KEYS = ("suite", "version", "description", "defaults", "cases")
CASE_KEYS = ("id", "kind", "why", "messages", "prompt", "sampling", "request", "expect", "tags")
DEFAULT_MAX_TOKENS = 32

Check = Callable[[Any], bool]


def _whole(low: int) -> Check:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low


def _number(low: float, high: float) -> Check:
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and low <= v <= high


def _texts(v: Any) -> bool:
    return isinstance(v, list) and bool(v) and all(isinstance(item, str) and item for item in v)


def _ids(v: Any) -> bool:
    return isinstance(v, list) and bool(v) and all(_whole(0)(item) for item in v)


SAMPLING: dict[str, tuple[Check, str]] = {
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
PROTOCOL: dict[str, tuple[Check, str]] = {
    "status": (lambda v: _whole(200)(v) and v < 600, "an HTTP status"),
    "param": (lambda v: isinstance(v, str) and bool(v), "the name of a field"),
    "text": (lambda v: isinstance(v, str), "text"),
    "lacks": (_texts, "a list of texts"),
    "finish_reason": (lambda v: v in get_args(FinishReason), "stop or length"),
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
    "json": (lambda v: True, "a JSON value"),
    "template": (_ids, "a list of token ids"),
}


def load_suite(path: Path) -> Suite:
    """Read a suite file. Raises ContractError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ContractError("no such suite file", file=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"cannot be read: {error}", file=str(path)) from error
    return parse_suite(text, source=str(path))


def parse_suite(text: str, *, source: str = "suite") -> Suite:
    """A suite from YAML (or JSON, which is YAML). Raises ContractError."""
    doc = Document(text, source=source)
    top = doc.mapping(doc.root, key=None, allowed=SUITE_KEYS)
    for required in ("suite", "version", "cases"):
        if required not in top:
            raise doc.error("is missing", doc.root, required)
    version = doc.value(top["version"], key="version")
    if version != 1 or isinstance(version, bool):
        raise doc.error(f"is {version!r}; this inferloop reads version 1", top["version"], "version")
    defaults = _fields(doc, top["defaults"], "defaults", SAMPLING) if "defaults" in top else {}
    cases: list[Case] = []
    lines: dict[str, int] = {}
    for key, node in doc.items(top["cases"], key="cases"):
        case = _case(doc, node, key, defaults)
        if case.id in lines:
            raise doc.error(f"{case.id!r} is already the id of the case on line {lines[case.id]}", node, f"{key}.id")
        lines[case.id] = node.start_mark.line + 1
        cases.append(case)
    if not cases:
        raise doc.error("a suite needs at least one case", top["cases"], "cases")
    return Suite(
        name=doc.text(top["suite"], key="suite"),
        version=version,
        cases=tuple(cases),
        description=doc.text(top["description"], key="description") if "description" in top else "",
        source=source,
    )


def _case(doc: Document, node: yaml.Node, key: str, defaults: dict[str, Any]) -> Case:
    entries = doc.mapping(node, key=key, allowed=CASE_KEYS)
    for required in ("id", "kind", "why", "expect"):
        if required not in entries:
            raise doc.error("is missing", node, f"{key}.{required}")
    if ("messages" in entries) == ("prompt" in entries):
        raise doc.error("needs either messages or prompt", node, key)
    kind = doc.choice(entries["kind"], key=f"{key}.kind", allowed=KINDS)
    assert kind in KINDS
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **defaults}
    if "sampling" in entries:
        sampling |= _fields(doc, entries["sampling"], f"{key}.sampling", SAMPLING)
    request = doc.value(entries["request"], key=f"{key}.request") if "request" in entries else {}
    if not isinstance(request, dict) or not all(isinstance(name, str) for name in request):
        raise doc.error("must be a mapping of request fields", entries["request"], f"{key}.request")
    if request and kind != "protocol":
        raise doc.error("only protocol cases may override request fields", entries["request"], f"{key}.request")
    messages = _messages(doc, entries["messages"], f"{key}.messages") if "messages" in entries else None
    if kind == "template" and messages is None:
        raise doc.error("a template case needs messages", node, key)
    return Case(
        id=doc.text(entries["id"], key=f"{key}.id"),
        kind=kind,
        why=doc.text(entries["why"], key=f"{key}.why"),
        expect=_expect(doc, entries["expect"], f"{key}.expect", kind),
        messages=messages,
        prompt=doc.text(entries["prompt"], key=f"{key}.prompt") if "prompt" in entries else None,
        sampling=sampling,
        request=request,
        tags=_tags(doc, entries["tags"], f"{key}.tags") if "tags" in entries else (),
    )


def _fields(doc: Document, node: yaml.Node, key: str, table: dict[str, tuple[Check, str]]) -> dict[str, Any]:
    """A mapping whose every value passes its check in `table`."""
    found: dict[str, Any] = {}
    for name, value_node in doc.mapping(node, key=key, allowed=table).items():
        found[name] = doc.value(value_node, key=f"{key}.{name}")
        check, want = table[name]
        if not check(found[name]):
            raise doc.error(f"must be {want}, is {found[name]!r}", value_node, f"{key}.{name}")
    return found


def _expect(doc: Document, node: yaml.Node, key: str, kind: CaseKind) -> Any:
    if kind == "protocol":
        found = _fields(doc, node, key, PROTOCOL)
        if not found:
            raise doc.error("expects nothing, so it could not fail", node, key)
        return found
    value = doc.value(node, key=key)
    check, want = EXPECT[kind]
    if not check(value):
        raise doc.error(f"must be {want}, is {value!r}", node, key)
    if kind == "regex":
        try:
            re.compile(value)
        except re.error as error:
            raise doc.error(f"is not a regular expression: {error}", node, key) from error
    if kind == "json":
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise doc.error(f"is not a JSON value: {error}", node, key) from error
    return (value,) if kind == "contains" and isinstance(value, str) else value


def _messages(doc: Document, node: yaml.Node, key: str) -> tuple[dict[str, Any], ...]:
    messages = []
    for path, item in doc.items(node, key=key):
        entries = doc.mapping(item, key=path, allowed=("role", "content"))
        for required in ("role", "content"):
            if required not in entries:
                raise doc.error("is missing", item, f"{path}.{required}")
        role = doc.choice(entries["role"], key=f"{path}.role", allowed=("system", "user", "assistant"))
        content = doc.value(entries["content"], key=f"{path}.content")
        if not isinstance(content, str):
            raise doc.error("must be text", entries["content"], f"{path}.content")
        messages.append({"role": role, "content": content})
    if not messages:
        raise doc.error("must not be empty", node, key)
    return tuple(messages)


def _tags(doc: Document, node: yaml.Node, key: str) -> tuple[str, ...]:
    return tuple(doc.text(item, key=path) for path, item in doc.items(node, key=key))
