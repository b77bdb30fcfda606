"""Reads as much of a request's body as routing has to know, and writes it again for the model that is asked.

Values that are not looked into stay as they were sent, to the letter. What cannot be read is left to the replica,
which checks everything and says what is wrong; only content that is not text is refused here, before any model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from inferloop.fleet.decide.answer_checks import Wants
from inferloop.fleet.decide.routes import Route

Dialect = Literal["chat", "completions", "responses"]
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
}
_TEXT_PARTS = frozenset(("text", "refusal", "input_text", "output_text", "reasoning_text", "summary_text"))
_LISTS_OF_PARTS = {"messages": ("content",), "input": ("content", "output")}


@dataclass(frozen=True, slots=True)
class RoutedBody:
    """`fields` by name, undecoded; None: the body is no JSON object. `asks_usage`: a stream is to end with its usage;
    `asks_logprobs`: log-probabilities are part of the answer; `reads_logprobs`: they are those of the output alone.
    `not_text`: the place of the first content that is no text (an image, audio), or of what asks for such an answer."""

    raw: bytes
    fields: dict[str, msgspec.Raw] | None = None
    dialect: Dialect | None = None
    model: str | None = None
    stream: bool = False
    asks_usage: bool = True
    asks_logprobs: bool = False
    reads_logprobs: bool = True
    wants: Wants = field(default_factory=Wants)
    not_text: str | None = None

    def expecting(self, route: Route) -> Wants:
        """What the answer has to be: by the request itself, and by the rule that took it."""
        if route.expect == "json":
            return replace(self.wants, json=True)
        return replace(self.wants, tool_call=True) if route.expect == "tool_call" else self.wants

    def adds_logprobs(self, needed: bool) -> bool:
        """Whether they are asked for in the caller's stead. Not of responses, which have them in too many places."""
        return needed and self.reads_logprobs and not self.asks_logprobs and self.dialect in ("chat", "completions")

    def for_model(self, name: str, *, needs_logprobs: bool) -> bytes:
        """The body that asks this model. A stream always tells its usage, since what it cost is to be known."""
        if self.fields is None:
            return self.raw
        told: dict[str, Any] = {**self.fields, "model": name}
        if self.adds_logprobs(needs_logprobs):
            told["logprobs"] = True if self.dialect == "chat" else 0
        if self.stream and not self.asks_usage:
            options = _decoded(self.fields, "stream_options")
            told["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return msgspec.json.encode(told)


def read_body(path: str, raw: bytes) -> RoutedBody:
    """Never raises for what somebody sent."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return RoutedBody(raw)
    dialect = DIALECTS.get(path)
    model, stream, options = (_decoded(fields, key) for key in ("model", "stream", "stream_options"))
    if not isinstance(model, str | None):
        return RoutedBody(raw)
    knows_usage = dialect in ("chat", "completions") and (options is None or isinstance(options, dict))
    logprobs = _decoded(fields, "logprobs")
    return RoutedBody(
        raw=raw,
        fields=fields,
        dialect=dialect,
        model=model,
        stream=stream is True,
        asks_usage=not knows_usage or bool((options or {}).get("include_usage")),
        asks_logprobs=logprobs is not None and logprobs is not False,
        reads_logprobs=_decoded(fields, "echo") is not True,
        wants=_wants(fields, dialect) if dialect is not None else Wants(),
        not_text=_not_text(fields),
    )


def _not_text(fields: Mapping[str, msgspec.Raw]) -> str | None:
    for name, keys in _LISTS_OF_PARTS.items():
        if name in fields and (place := _first_part(name, keys, fields[name])):
            return place
    if _decoded(fields, "audio") is not None:
        return "audio"
    modalities = _decoded(fields, "modalities")
    return "modalities" if isinstance(modalities, list) and any(item != "text" for item in modalities) else None


class _Part(msgspec.Struct):
    type: str = "text"


class _Item(msgspec.Struct):
    content: str | list[_Part] | None = None
    output: str | list[_Part] | None = None


def _first_part(name: str, keys: tuple[str, ...], raw: msgspec.Raw) -> str | None:
    try:
        items = msgspec.json.decode(raw, type=str | list[_Item])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    for i, item in enumerate(items if isinstance(items, list) else ()):
        for key in keys:
            parts = getattr(item, key)
            for j, part in enumerate(parts if isinstance(parts, list) else ()):
                if part.type not in _TEXT_PARTS:
                    return f"{name}[{i}].{key}[{j}]"
    return None


def _wants(fields: Mapping[str, msgspec.Raw], dialect: Dialect) -> Wants:
    wants, chosen = _format(fields, dialect), _decoded(fields, "tool_choice")
    offered = _tools(_decoded(fields, "tools"))
    if chosen == "none" or not offered:
        return wants
    function = _get(chosen, "function") if dialect == "chat" else chosen
    name = _get(function, "name")
    return replace(
        wants,
        tool_call=chosen == "required" or isinstance(name, str),
        tool=name if isinstance(name, str) else None,
        offered=offered,
    )


def _format(fields: Mapping[str, msgspec.Raw], dialect: Dialect) -> Wants:
    """What of JSON the request asks its answer to be."""
    asked = _get(_decoded(fields, "text"), "format") if dialect == "responses" else _decoded(fields, "response_format")
    kind, structured = _get(asked, "type"), _decoded(fields, "structured_outputs")
    told = _get(structured, "json")
    if kind == "json_schema":
        told = _get(asked if dialect == "responses" else _get(asked, "json_schema"), "schema")
    is_object = kind == "json_object" or _get(structured, "json_object") is True
    return Wants(
        json=is_object or kind == "json_schema" or told is not None, json_object=is_object, schema=_schema_text(told)
    )


def _tools(tools: Any) -> dict[str, str | None]:
    """Chats have a function's name and parameters inside `function`, responses beside the type."""
    found: dict[str, str | None] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = _get(tool, "function") or tool
        if isinstance(name := _get(function, "name"), str):
            found[name] = _schema_text(_get(function, "parameters"))
    return found


def _schema_text(schema: Any) -> str | None:
    """A schema comes as JSON, or as text that is JSON."""
    try:
        return schema if schema is None or isinstance(schema, str) else msgspec.json.encode(schema).decode()
    except RecursionError:
        return None


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _decoded(fields: Mapping[str, msgspec.Raw], key: str) -> Any:
    try:
        return msgspec.json.decode(fields[key]) if key in fields else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
