"""What the page of a comparison says of its targets."""

from __future__ import annotations

import html
from typing import Any

import pytest

from inferloop.pages.compare import reuse_table
from inferloop.pages.setups import setup_tables
from inferloop.pages.text import reuse_told


def target(label: str, **more: Any) -> dict[str, Any]:
    return {"label": label, "name": "llamacpp", **more}


def test_commands_can_be_pasted_into_a_shell() -> None:
    setup = {"argv": ["serve", "--port", "4711", "--hf-overrides", '{"a b": 1}'], "env": {"BIND": "0 1"}}
    page = html.unescape("".join(map(str, setup_tables([target("A", setup=setup)]))))
    assert """serve --port 4711 --hf-overrides '{"a b": 1}'""" in page and "BIND='0 1'" in page


@pytest.mark.parametrize(
    ("verdict", "cached", "word", "told"),
    [
        ("as declared", 0.52, "as declared", None),
        (
            "less",
            0.1,
            "less",
            "A did not get the declared prefix reuse of 50 %: 10 % of the input",
        ),
        ("not told", None, "not told", "A may or may not have got the declared prefix reuse of 50 %"),
    ],
)
def test_what_a_cache_did_stands_beside_what_is_declared(
    verdict: str, cached: float | None, word: str, told: str | None
) -> None:
    reuse = {"declared": 0.5, "possible": 0.4, "cached": cached, "verdict": verdict, "reason": "it is so"}
    a = target("A", reuse=reuse)
    page, line = str(reuse_table([a])), reuse_told(a)
    assert f"{word}<" in page and ">50 %<" in page and (">40 %<" in page) is (cached is not None)
    assert line is None if told is None else line is not None and line.startswith(told) and line.endswith("it is so")


def test_nothing_is_said_of_caches_where_nothing_is_declared_or_known() -> None:
    nothing = {"declared": 0.0, "possible": 0.0, "cached": 0.0, "verdict": "as declared", "reason": ""}
    assert reuse_table([target("A"), target("B", reuse=None), target("C", reuse=nothing)]) is None
    assert reuse_told(target("B")) is None
