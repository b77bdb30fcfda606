"""One answer taken apart: what the model thought, what it says, and what it calls.

`AnswerStyle` is how a model writes, `AnswerPlan` what one request wants to have told apart, `AnswerReader` does it for
one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferloop.engine.text.reasoning import ThinkParser
from inferloop.engine.text.tools.calls import ToolCall
from inferloop.engine.text.tools.dialects import DIALECTS
from inferloop.engine.text.tools.json_calls import HERMES
from inferloop.engine.text.tools.parser import Event, ToolParser


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """`tool_dialect`: a key of tools.dialects.DIALECTS; None: no calls can be read. `thinks`: reasoning stands in think
    tags; `think_opened`: the template has opened them at the end of the prompt."""

    tool_dialect: str | None = None
    thinks: bool = False
    think_opened: bool = False


AUTO, NONE = "auto", "none"


def untaught_style(tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerStyle:
    """By the names that `inferloop serve` takes, without a chat template to ask: `auto` means hermes, and no
    reasoning."""
    dialect = {AUTO: HERMES.name, NONE: None}.get(tool_call_parser, tool_call_parser)
    return AnswerStyle(dialect, thinks=reasoning_parser not in (AUTO, NONE))


PLAIN_STYLE = AnswerStyle()
"""All text is the answer."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`tool_dialect` None: calls are not looked for. `max_calls` None: any number."""

    tool_dialect: str | None = None
    tool_names: tuple[str, ...] = ()
    max_calls: int | None = None
    named: bool = False
    """The caller chose the function; such a call is no reason of its own to finish."""
    thinks: bool = False
    think_opened: bool = False

    @property
    def has_parts(self) -> bool:
        """Whether there may be more in an answer than its text."""
        return self.thinks or self.tool_dialect is not None


PLAIN_ANSWER = AnswerPlan()


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """`events` are pieces of the answer's text and calls, in their order; reasoning comes before all of them."""

    reasoning: str
    events: Sequence[Event]

    @property
    def text(self) -> str:
        return "".join(event for event in self.events if isinstance(event, str))

    @property
    def calls(self) -> list[ToolCall]:
        return [event for event in self.events if isinstance(event, ToolCall)]


class AnswerReader:
    """`push` pieces of one answer's text, then `finish`. The parts of all pieces joined do not depend on the cuts."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._think = ThinkParser(opened=plan.think_opened) if plan.thinks else None
        dialect = None if plan.tool_dialect is None else DIALECTS[plan.tool_dialect]
        self._calls = None if dialect is None else ToolParser(dialect, plan.tool_names, max_calls=plan.max_calls)

    @property
    def answering(self) -> bool:
        """Whether what comes is no longer reasoning, nor what may become it."""
        return self._think is None or self._think.answering

    def push(self, text: str) -> AnswerParts:
        reasoning, answer = ("", text) if self._think is None else self._think.push(text)
        return AnswerParts(reasoning, self._events(answer))

    def finish(self) -> AnswerParts:
        reasoning, answer = ("", "") if self._think is None else self._think.finish()
        events = list(self._events(answer))
        if self._calls is not None:
            events += self._calls.finish()
        return AnswerParts(reasoning, events)

    def _events(self, answer: str) -> Sequence[Event]:
        if self._calls is not None:
            return self._calls.push(answer)
        return [answer] if answer else []
