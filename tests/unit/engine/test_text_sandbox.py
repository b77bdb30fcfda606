"""Chat templates that would never end, or fill the memory: each is refused, and what templates do every day is not."""

from __future__ import annotations

import tracemalloc

import pytest

from inferloop.core.errors import ModelFileError, RequestError
from inferloop.engine.text import sandbox
from inferloop.engine.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "ab"}]
GROWS = "{% set ns = namespace(s=START) %}{% for i in range(100) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s }}"


def render(source: str) -> str:
    return ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + "{% endfor %}" * 3,
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        GROWS.replace("START", "'ab'").replace("STEP", "ns.s ~ ns.s"),
        GROWS.replace("START", "'ab'").replace("STEP", "ns.s + ns.s"),
        GROWS.replace("START", "[1]").replace("STEP", "ns.s + ns.s"),
        GROWS.replace("START", "'ab'").replace("STEP", "ns.s * 2"),
        GROWS.replace("START", "'ab'").replace("STEP", "ns.s | replace('a', 'aaaa')"),
        GROWS.replace("START", "'ab'").replace("STEP", "ns.s.replace('a', 'aaaa')"),
        GROWS.replace("START", "'ab'").replace("STEP", "[ns.s, ns.s] | join"),
        GROWS.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]"),
        GROWS.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]").replace("{{ ns.s }}", "{{ ns.s | tojson }}"),
        GROWS.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]").replace("{{ ns.s }}", "{{ ns.s ~ 'a' }}"),
        GROWS.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]").replace("{{ ns.s }}", "{{ '%s' % ns.s }}"),
        GROWS.replace("START", "[1]").replace("STEP", "{'a': ns.s, 'b': ns.s}"),
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * [0] }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 7 ** 99999999 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%0999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a' | indent(10**10, true) }}",
        "{{ [1] | batch(10**10, 0) | list }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ range(99999) | join('x' * 99999) }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ lipsum(n=10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
    ],
)
def test_what_would_take_all_time_or_memory_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_ROUNDS", 2_000)
    monkeypatch.setattr(sandbox, "_MAX_NODES", 2_000)
    tracemalloc.start()
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        render(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * sandbox.MAX_CHARS


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ ['b'] }}", "a1None['b']"),
        (
            "{{ 2 ** 10 }} {{ 3 * 4 }} {{ '-' * 3 }} {{ '%s|%3d' % ('x', 5) }} {{ [1] + [2] }}",
            "1024 12 --- x|  5 [1, 2]",
        ),
        ("{{ 'call 13800138000: %s' | format('x') }}", "call 13800138000: x"),
        ("{{ '{:>5}|{}'.format('x', 1) }} {{ 'a' | center(5) }}|", "    x|1   a  |"),
        ("{{ 'a b'.replace(' ', '_') }} {{ [1, 2] | join(', ') }} {{ 'a\nb' | indent(2) }}", "a_b 1, 2 a\n  b"),
        ("{% for i in range(3) %}{{ loop.index }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}", "12"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) ~ m('a') }}", "<1><a>"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_what_templates_do_is_as_before(source: str, text: str) -> None:
    assert render(source) == text


def test_each_rendering_has_its_own_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_ROUNDS", 10)
    template = ChatTemplate("{% for i in range(6) %}x{% endfor %}")
    assert [template.render(MESSAGES) for _ in range(5)] == ["xxxxxx"] * 5
    with pytest.raises(RequestError, match="loops more than 10 times"):
        ChatTemplate("{% for i in range(11) %}x{% endfor %}").render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% if true %}" * 300 + "{% endif %}" * 300,
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ 9" + "9" * 5000 + " }}",
    ],
)
def test_what_python_cannot_compile_does_not_parse(source: str) -> None:
    with pytest.raises(ModelFileError, match="chat template does not parse"):
        ChatTemplate(source)
