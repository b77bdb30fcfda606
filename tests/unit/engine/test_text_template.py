"""Chat templates: what they are given, what they may do, and whose fault it is when they fail."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from inferloop.core.clock import VirtualClock
from inferloop.core.errors import ModelFileError, RequestError
from inferloop.engine.text.template import ChatTemplate

ECHO = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("hi", "hi"),
        ("", ""),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_content_is_flattened_to_text(content: Any, shown: str) -> None:
    assert ChatTemplate(ECHO).render(user(content)) == f"[user]{shown}>"


def test_the_generation_prompt_can_be_left_out() -> None:
    assert ChatTemplate(ECHO).render(user("x"), False) == "[user]x"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "no role"}],
        [{"role": 3, "content": "x"}],
        user([{"type": "image_url", "image_url": {"url": "data:"}}]),
        user([{"type": "text"}]),
        user(["bare"]),
        user(7),
        ["not an object"],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": ["f"]}],
        [{"role": "assistant", "tool_calls": 5}],
    ],
)
def test_bad_messages_are_named(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(ECHO).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.strip() }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_400_naming_messages(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(user("x"))
    assert caught.value.param == "messages"


def test_the_templates_own_words_reach_the_caller() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(user("x"))


def test_a_template_that_does_not_parse_is_the_models_fault() -> None:
    with pytest.raises(ModelFileError):
        ChatTemplate("{% for %}")


def test_json_is_not_escaped_for_html() -> None:
    template = ChatTemplate("{{ tools | tojson }}")
    assert template.render(user("x"), tools=[{"d": "<a & 'b'> é"}]) == '[{"d": "<a & \'b\'> é"}]'


def test_tool_call_arguments_arrive_as_an_object() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}{{ tools or '' }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Oslo"
    assert call["function"] == {"name": "f", "arguments": '{"city": "Oslo"}'}, "the caller's message is left alone"


def test_blocks_are_trimmed_and_generation_marks_vanish() -> None:
    source = (
        "{% for m in messages %}\n  {% generation %}\n{{ m.content }}{% endgeneration %}\n{% break %}\n{% endfor %}\n"
    )
    assert ChatTemplate(source).render(user("x")) == "x"


def test_the_date_comes_from_the_injected_clock() -> None:
    clock = VirtualClock(wall_start_ns=1_700_000_000_000_000_000)
    local = datetime.datetime.fromtimestamp(1_700_000_000)
    assert ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", clock=clock).render(user("x")) == f"{local:%Y-%m-%d}"


def test_special_texts_have_their_usual_names() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", special_texts={"bos_token": "<s>"})
    assert template.render(user("x")) == "<s>x"


def test_the_digest_follows_the_source() -> None:
    assert ChatTemplate("a").digest == ChatTemplate("a").digest != ChatTemplate("b").digest


def test_what_a_caller_may_set_is_what_the_template_reads_and_is_not_given() -> None:
    source = (
        "{{ bos_token }}{{ boi_token }}{{ strftime_now('%Y') }}{% set mine = 1 %}{% for m in messages %}{{ mine }}"
        "{% endfor %}{% if not style is defined %}{% set style = 'plain' %}{% endif %}{{ style }}"
        "{% if tools and not documents %}{{ raise_exception('x') }}{% endif %}{{ range(mood | default(1)) | join }}"
    )
    template = ChatTemplate(source, special_texts={"boi_token": "<i>"}, clock=VirtualClock())
    assert template.variables == {"style", "mood"}
    shown = template.render(user("x"))
    assert template.render(user("x"), variables={"style": "grand"}) == shown.replace("plain", "grand") != shown
    for name in ("boi_token", "bos_token", "mine", "range", "messages"):
        with pytest.raises(RequestError) as caught:
            template.render(user("x"), variables={name: 1})
        assert caught.value.param == f"chat_template_kwargs.{name}" and "it reads mood, style" in caught.value.message
