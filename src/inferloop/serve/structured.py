"""The fields of a request that say what the whole answer has to be, as one Grammar."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from inferloop.core.errors import RequestError
from inferloop.core.request import Grammar
from inferloop.serve.no_op import NoOp, check_no_op


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """`strict` changes nothing: a schema is always kept to, or refused."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Choice = Annotated[str, Meta(min_length=1)]


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of the first five. `json`: a JSON schema, as an object or as text; `json_object`: any object at all;
    `choice`: one of these texts; `grammar`: in Lark syntax. vLLM's other fields only with the value that asks for
    nothing."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[Choice], Meta(min_length=1)] | None = None
    grammar: str | None = None
    disable_any_whitespace: NoOp = None
    disable_additional_properties: NoOp = None
    whitespace_pattern: NoOp = None
    structural_tag: NoOp = None


_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NO_OP: dict[str, tuple[bool, ...]] = {
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
}


def grammar_of(asked: StructuredOutputs | None, response_format: ResponseFormat | None) -> Grammar | None:
    """Raises RequestError naming the field."""
    formatted = None if response_format is None else _of_format(response_format)
    if asked is None:
        return formatted
    if formatted is not None:
        raise RequestError("give response_format or structured_outputs, not both", param="structured_outputs")
    for field, accepted in _NO_OP.items():
        check_no_op(getattr(asked, field), accepted, f"structured_outputs.{field}")
    given = [kind for kind in _KINDS if getattr(asked, kind) not in (None, False)]
    if len(given) != 1:
        kinds = ", ".join(_KINDS[:-1])
        raise RequestError(
            f"structured_outputs takes exactly one of {kinds} and {_KINDS[-1]}", param="structured_outputs"
        )
    param = f"structured_outputs.{given[0]}"
    if asked.regex is not None:
        return Grammar("regex", asked.regex, param)
    if asked.choice is not None:
        return Grammar("regex", "|".join(map(re.escape, asked.choice)), param)
    if asked.grammar is not None:
        return Grammar("lark", asked.grammar, param)
    if asked.json is None:
        return Grammar("json_object", param=param)
    return Grammar("json_schema", asked.json if isinstance(asked.json, str) else schema_text(asked.json, param), param)


def _of_format(asked: ResponseFormat) -> Grammar | None:
    if (asked.json_schema is not None) != (asked.type == "json_schema"):
        word = "needs" if asked.json_schema is None else "does not take"
        raise RequestError(
            f"response_format of type {asked.type} {word} json_schema", param="response_format.json_schema"
        )
    if asked.json_schema is not None:
        param = "response_format.json_schema.schema"
        return Grammar("json_schema", schema_text(asked.json_schema.schema, param), param)
    return Grammar("json_object", param="response_format") if asked.type == "json_object" else None


def schema_text(schema: Any, param: str) -> str:
    """A schema as JSON. The order of keys is kept: properties are generated in the order in which they are declared."""
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply", param=param) from None
