"""What the page of a comparison says of its targets."""

from __future__ import annotations

import html
from typing import Any

from inferloop.pages.setups import setup_tables


def target(label: str, **more: Any) -> dict[str, Any]:
    return {"label": label, "name": "llamacpp", **more}


def test_commands_can_be_pasted_into_a_shell() -> None:
    setup = {"argv": ["serve", "--port", "4711", "--hf-overrides", '{"a b": 1}'], "env": {"BIND": "0 1"}}
    page = html.unescape("".join(map(str, setup_tables([target("A", setup=setup)]))))
    assert """serve --port 4711 --hf-overrides '{"a b": 1}'""" in page and "BIND='0 1'" in page
