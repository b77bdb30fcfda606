"""Tools and what was said with them, for templates that know of tools and for those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferloop.core.errors import ModelFileError
from inferloop.engine.text.answer import AnswerStyle
from inferloop.engine.text.codec import Codec
from inferloop.engine.text.template import ChatTemplate
from inferloop.engine.text.tools.calls import Tool
from inferloop.engine.text.tools.dialects import DIALECTS
from inferloop.models.resolve import resolve

ASK = "{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + ASK
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
KNOWS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ (m.tool_calls or []) | tojson }}{% endfor %}<tool_call>"
)
USER = {"role": "user", "content": "Hi"}
TOOL = Tool("now", "The time.").definition
CALLS = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": "CET"}}}] * 2
HISTORY: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "Ok.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
    {"role": "tool", "tool_call_id": "1", "content": "one"},
]


def test_a_template_that_knows_tools_gets_them_untouched() -> None:
    template = ChatTemplate(KNOWS)
    assert template.knows_tools and template.dialect_name == "hermes"
    rendered = template.render([USER, HISTORY[1]], tools=[TOOL])
    assert rendered == json.dumps([TOOL]) + "user[]assistant" + json.dumps(CALLS) + "<tool_call>"  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_another_is_told_in_its_messages(dialect: str) -> None:
    template = ChatTemplate(PLAIN, dialect=DIALECTS[dialect])
    assert not template.knows_tools and template.dialect_name == dialect
    written = DIALECTS[dialect].write([("now", {"zone": "CET"})] * 2)
    rendered = template.render([{"role": "system", "content": "Be nice."}, *HISTORY], tools=[TOOL])
    head, _, rest = rendered.partition("[user]")
    assert head.startswith("[system]Be nice.\n\n") and json.dumps(TOOL) in head
    assert DIALECTS[dialect].instruct() in head
    results = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response>"
    assert rest == f"Hi[assistant]Ok.\n{written}[user]{results}[assistant]"


def test_the_tools_take_the_place_that_there_is() -> None:
    assert ChatTemplate(PLAIN).render([USER], tools=[TOOL]).startswith("[system]")
    rendered = ChatTemplate(NO_SYSTEM).render([USER], tools=[TOOL])
    assert rendered.startswith("[user]You may call") and rendered.endswith("\n\nHi[assistant]")


def test_without_tools_nothing_is_added() -> None:
    assert ChatTemplate(PLAIN).render([USER]) == "[user]Hi[assistant]"


def test_how_tools_are_told_is_part_of_the_template() -> None:
    """Two replicas that tell a model differently must not pass for the same."""
    digests = {ChatTemplate(PLAIN, dialect=dialect).digest for dialect in DIALECTS.values()}
    assert len(digests) == len(DIALECTS)
    assert len({ChatTemplate(KNOWS, dialect=dialect).digest for dialect in DIALECTS.values()}) == 1


def test_rendering_mutates_nothing() -> None:
    before = json.dumps(HISTORY)
    ChatTemplate(PLAIN).render(HISTORY, tools=[TOOL])
    assert json.dumps(HISTORY) == before


@pytest.mark.parametrize(
    ("template", "tool_call_parser", "reasoning_parser", "style"),
    [
        (PLAIN, "auto", "auto", AnswerStyle("hermes")),
        (PLAIN, "pythonic", "think", AnswerStyle("pythonic", thinks=True)),
        (PLAIN + "<think>\n", "auto", "think", AnswerStyle("hermes", thinks=True, think_opened=True)),
        (KNOWS + "{# </think> #}", "auto", "auto", AnswerStyle("hermes", thinks=True)),
        (KNOWS + "{# </think> #}<think>", "none", "auto", AnswerStyle(None, thinks=True, think_opened=True)),
        (KNOWS + "{# </think> #}<think>", "llama3_json", "none", AnswerStyle("llama3_json")),
        ("{{ tools }}", "auto", "auto", AnswerStyle(None)),
        (None, "hermes", "think", AnswerStyle()),
    ],
)
def test_the_style_follows_the_template_unless_told(
    tiny_directory: Any, template: str | None, tool_call_parser: str, reasoning_parser: str, style: AnswerStyle
) -> None:
    files = resolve(str(tiny_directory(template=template)))
    codec = Codec(files, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)
    assert codec.answer_style == style


def test_a_broken_template_is_still_refused() -> None:
    with pytest.raises(ModelFileError):
        ChatTemplate("{% if tools %}")
