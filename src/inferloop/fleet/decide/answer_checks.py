"""Does an answer hold? Pure checks of what was answered against what was asked for and what the contract demands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from inferloop.contract.workload import Escalation, EvalTag, Routing
from inferloop.fleet.decide.json_schema import fits

UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Wants:
    """What a request asks of its answer. `offered` are the tools it may call, by name, with the schemas of their
    parameters; None: it offers none. `tool`: it must call that one. A schema is a JSON text; None: there is none."""

    json: bool = False
    json_object: bool = False
    schema: str | None = None
    tool_call: bool = False
    tool: str | None = None
    offered: Mapping[str, str | None] | None = None

    @property
    def has_schema(self) -> bool:
        """Then the checks may take as long as `fits` does."""
        return self.schema is not None or any((self.offered or {}).values())


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` as the text that was sent."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChoiceSummary:
    """One choice of an answer. `mean_logprob`: over its tokens, natural; None: not told."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    mean_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """A good answer, as far as the checks look."""

    choices: tuple[ChoiceSummary, ...]


def may_fail(routing: Routing, wants: Wants) -> bool:
    """Whether any check can look at the answer to such a request: only then it is held back until it is complete."""
    escalation = routing.escalation
    return escalation is not None and (
        (escalation.invalid_json and wants.json)
        or (escalation.refused_tool and (wants.tool_call or wants.offered is not None))
        or escalation.low_logprob is not None
        or bool(escalation.eval_tags)
    )


def failed_checks(routing: Routing, wants: Wants, answer: AnswerSummary) -> tuple[str, ...]:
    """The names of the checks that some choice of the answer fails, each once, in the order of the contract's
    reference. A check that has nothing to look at (no log-probabilities were told) does not fail."""
    escalation = routing.escalation
    if escalation is None:
        return ()
    tags = [tag for tag in routing.eval_tags if tag.name in escalation.eval_tags]
    return tuple(dict.fromkeys(name for choice in answer.choices for name in _failed(escalation, tags, wants, choice)))


def _failed(escalation: Escalation, tags: list[EvalTag], wants: Wants, choice: ChoiceSummary) -> Iterator[str]:
    if escalation.invalid_json and wants.json and not choice.calls and not _is_wanted(wants, choice.text):
        yield "invalid_json"
    if escalation.refused_tool and _refused(wants, choice):
        yield "refused_tool"
    limit, told = escalation.low_logprob, choice.mean_logprob
    if limit is not None and told is not None and told < limit:
        yield "low_logprob"
    if not choice.calls:  # what was to be done is no text to judge
        yield from (f"eval_tag:{tag.name}" for tag in tags if not _holds(tag, choice.text))


def _is_wanted(wants: Wants, text: str) -> bool:
    return is_json(text, must_be_object=wants.json_object, schema=wants.schema)


def is_json(text: str, *, must_be_object: bool = False, schema: str | None = None) -> bool:
    """RFC 8259, so neither NaN nor a fence around it. Nesting beyond what the parser takes counts as invalid. With a
    `schema`, whether it is what that asks for."""
    try:
        value: Any = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    if must_be_object and not isinstance(value, dict):
        return False
    return schema is None or fits(value, schema)


def _refused(wants: Wants, choice: ChoiceSummary) -> bool:
    """No call where one was demanded, or one that cannot be carried out."""
    if wants.tool_call and not choice.calls:
        return True
    if wants.tool is not None and all(call.name != wants.tool for call in choice.calls):
        return True
    offered = wants.offered
    return offered is not None and any(
        call.name not in offered or not is_json(call.arguments, must_be_object=True, schema=offered[call.name])
        for call in choice.calls
    )


def _holds(tag: EvalTag, text: str) -> bool:
    found = all(part in text for part in tag.contains) and not any(part in text for part in tag.lacks)
    return found and (tag.regex is None or re.search(tag.regex, text) is not None)
