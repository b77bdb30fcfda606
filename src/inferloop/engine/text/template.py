"""Chat templates: the model's own Jinja text, run in a sandbox, with the helpers that such templates expect."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import ModelFileError, RequestError
from inferloop.core.units import NS_PER_S
from inferloop.engine.text.messages import normalize_messages
from inferloop.engine.text.sandbox import Sandbox
from inferloop.engine.text.tools.dialect import Dialect
from inferloop.engine.text.tools.dialects import taught_dialect
from inferloop.engine.text.tools.json_calls import HERMES
from inferloop.engine.text.tools.prompting import spell_out, tools_block

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
RESERVED = frozenset((*_GIVEN, *_SPECIAL, "additional_special_tokens"))
"""Names that mean the same to every template, and are not a caller's to set."""

_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, NotImplementedError),
)
"""Of a template, whatever it was given."""


class ChatTemplate:
    """Compiled once, rendered often, safe to share between threads.

    One that does not know of tools gets them, and what was said with them, as text in its messages.
    """

    def __init__(
        self,
        source: str,
        *,
        special_texts: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        dialect: Dialect = HERMES,
    ) -> None:
        """`special_texts` are `bos_token`, `eos_token`, ...; `dialect` is how calls are to be written where the
        template does not say it. Raises ModelFileError when the template does not parse."""
        self._clock = clock or RealClock()
        self._special_texts = dict(special_texts or {})
        self._dialect = dialect
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        # Beside what Jinja finds: what the Python that it makes of a template runs into.
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as problem:
            raise ModelFileError(f"the model's chat template does not parse: {problem}") from problem
        self.knows_tools = "tools" in read
        self._sandbox = environment
        self.variables = frozenset(read - RESERVED - self._special_texts.keys())
        """What it reads that a caller may set."""
        self.dialect_name = taught_dialect(source) if self.knows_tools else dialect.name
        """In which dialect a model that reads these prompts calls; None: in one that is not known here."""
        self.mentions_thinking = "</think>" in source
        added = "" if self.knows_tools else tools_block([], dialect)
        self.digest = hashlib.sha256((source + added).encode()).hexdigest()
        self._has_system_role = self.knows_tools or self._takes_system()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises RequestError naming `messages` when the template refuses or cannot take them, or
        `chat_template_kwargs.<name>` for one of `variables` that it does not read."""
        variables = variables or {}
        if unread := sorted(variables.keys() - self.variables):
            raise unread_variable(unread[0], self.variables)
        plain, offered = normalize_messages(messages), list(tools or ())
        if not self.knows_tools:
            plain = spell_out(plain, offered, self._dialect, system_role=self._has_system_role)
        return self._render(plain, offered, add_generation_prompt, variables)

    @property
    def opens_thinking(self) -> bool:
        """Whether prompts end inside an open think tag."""
        try:
            return self.render([{"role": "user", "content": "Hello"}]).rstrip().endswith("<think>")
        except RequestError:
            return False

    def _takes_system(self) -> bool:
        try:
            self._render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], [], True, {})
        except RequestError:
            return False
        return True

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        values = {**variables, **self._special_texts, "messages": messages, "tools": tools or None}
        try:
            given = {**values, "add_generation_prompt": add_generation_prompt, "documents": None}
            return self._sandbox.bounded(self._template, given)
        except _FAILURES as problem:
            raise RequestError(f"the model's chat template refuses these messages: {problem}", param="messages") from (
                problem
            )

    def _strftime_now(self, layout: str) -> str:
        return datetime.datetime.fromtimestamp(self._clock.wall_ns() / NS_PER_S).strftime(layout)


def unread_variable(name: str, read: Iterable[str]) -> RequestError:
    """That a template does not read `name` but `read`."""
    param, known = f"chat_template_kwargs.{name}", ", ".join(sorted(read))
    reads = f"reads {known}" if known else "reads no variables"
    return RequestError(f"{param}: this model's chat template does not read it; it {reads}", param=param)


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
