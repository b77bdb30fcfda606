"""How a model writes its calls: the interface that hermes, llama3_json and pythonic implement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from inferloop.engine.text.tools.calls import Tool, ToolCall


class Dialect(Protocol):
    """All values of a dialect are the same for every request; it has no state."""

    @property
    def name(self) -> str:
        """vLLM's name for it."""
        ...

    @property
    def quotes(self) -> str:
        """What strings inside a call may begin with."""
        ...

    @property
    def closer(self) -> str:
        """What may follow a call and belongs to it; empty: nothing."""
        ...

    @property
    def separators(self) -> str:
        """Characters that are not text when they stand next to a call."""
        ...

    def openers(self, names: Iterable[str]) -> tuple[str, ...]:
        """Texts that begin a call of the functions `names`. One that begins with a bracket is a part of the call's own
        value, another stands before it."""
        ...

    def read(self, value: str) -> list[ToolCall] | None:
        """The calls in one bracketed value; None when it is not one."""
        ...

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, as name and arguments, in the form in which the model wrote them."""
        ...

    def instruct(self) -> str:
        """Tells a model how to call."""
        ...

    def grammar(self, tools: Sequence[Tool], most: int) -> str:
        """Lark rules, from `calls`, for one to `most` calls of these tools and nothing else. Raises RequestError for
        parameters that cannot be forced."""
        ...

    def guard(self, tools: Sequence[Tool]) -> str | None:
        """Lark rules, from `call`, for text (the terminal TEXT) up to a call, and the call: once begun, it is one of
        these tools, and its arguments keep to the schema if the tool is strict. None where text and the beginning of a
        call cannot be told apart."""
        ...
