"""Chat templates: the model's own Jinja text, run in a sandbox, with the helpers that such templates expect."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import ModelFileError, RequestError
from inferloop.core.units import NS_PER_S
from inferloop.engine.text.messages import normalize_messages


class ChatTemplate:
    """Compiled once, rendered often, safe to share between threads."""

    def __init__(
        self, source: str, *, special_texts: Mapping[str, str] | None = None, clock: Clock | None = None
    ) -> None:
        """`special_texts` are `bos_token`, `eos_token`, ... Raises ModelFileError when the template does not parse."""
        self._clock = clock or RealClock()
        self._special_texts = dict(special_texts or {})
        self.digest = hashlib.sha256(source.encode()).hexdigest()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as problem:
            raise ModelFileError(f"the model's chat template does not parse: {problem}") from problem

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text. Raises RequestError naming `messages` when the template refuses or cannot take them."""
        values = {**self._special_texts, "messages": normalize_messages(messages), "tools": list(tools or ()) or None}
        try:
            return self._template.render(add_generation_prompt=add_generation_prompt, documents=None, **values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as problem:
            raise RequestError(f"the model's chat template refuses these messages: {problem}", param="messages") from (
                problem
            )

    def _strftime_now(self, layout: str) -> str:
        return datetime.datetime.fromtimestamp(self._clock.wall_ns() / NS_PER_S).strftime(layout)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; when serving, only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
