"""Loaded by schemathesis (see lab/fuzz.py): makes generated requests reach beyond the first check.

A random model name is always a 404, and one of forty random optional fields is nearly always refused. So the name
becomes the served one, and what is meant to be valid keeps few of its optional fields.
"""

from __future__ import annotations

import os
import random
import zlib
from typing import Any

import schemathesis
from schemathesis import Case, GenerationMode, HookContext

MODEL = os.environ["INFERLOOP_FUZZ_MODEL"]
_KEEP_TYPED, _KEEP_ANY = 0.1, 0.005
"""Shares of optional fields kept; a field of any type is one that asks for nothing or is refused."""
_OTHER_MODEL = 0.02
_STREAMED = 0.3
_PLAIN = 0.7
"""Conversations and mixed lists are mostly refused as well, before the other fields are looked at."""
_TIMEOUT = "x-request-timeout-ms"


@schemathesis.hook
def map_case(_: HookContext, case: Case[Any]) -> Case[Any]:
    rng = random.Random(zlib.crc32(repr((case.path, case.body)).encode()))
    asked = str(case.headers.get(_TIMEOUT, "")) if case.headers else ""
    if _is_negative(case) and asked.isdecimal() and 0 < int(asked) < 60_000:
        case.headers[_TIMEOUT] = "60000"  # a request that is over too soon tells nothing of what is wrong with it
    if rng.random() < _OTHER_MODEL:
        return case
    if case.path_parameters and "model" in case.path_parameters and not _is_negative(case):
        case.path_parameters["model"] = MODEL
    if isinstance(case.body, dict):
        case.body = _body(case, case.body, rng)
    return case


def _body(case: Case[Any], body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    if isinstance(body.get("model"), str):
        body = {**body, "model": MODEL}
    if _is_negative(case):
        return body
    schema = _schema(case)
    properties, required = schema.get("properties", {}), schema.get("required", [])

    def keep(name: str) -> bool:
        is_typed = bool(properties.get(name, {}).keys() & {"type", "anyOf", "$ref", "enum"})
        return name in required or rng.random() < (_KEEP_TYPED if is_typed else _KEEP_ANY)

    kept = {name: value for name, value in body.items() if keep(name)}
    if "stream" in properties and rng.random() < _STREAMED:
        kept["stream"] = True
    for name in kept.keys() & {"messages", "prompt", "input"}:
        if rng.random() < _PLAIN:
            kept[name] = _plain(name, kept[name])
    return kept


def _plain(name: str, value: Any) -> Any:
    """What was generated, as the simplest thing that the field takes."""
    text = value if isinstance(value, str) and value else repr(value)[:40]
    return [{"role": "user", "content": text}] if name == "messages" else text


def _is_negative(case: Case[Any]) -> bool:
    return case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE


def _schema(case: Case[Any]) -> dict[str, Any]:
    """What the document says of this operation's body."""
    content = case.operation.definition.raw.get("requestBody", {}).get("content", {})
    schema: dict[str, Any] = content.get("application/json", {}).get("schema", {})
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = case.operation.schema.raw_schema["components"]["schemas"][name]
    return schema
