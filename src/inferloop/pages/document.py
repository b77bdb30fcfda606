"""A whole page in one file that needs nothing else and may reach nothing else.

The Content-Security-Policy allows exactly the scripts in the page, by their hashes (https://www.w3.org/TR/CSP3/), and
no connection at all. Styles are allowed inline because charts set them; they can load nothing under this policy.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from inferloop.pages.html import Child, tag
from inferloop.pages.style import CSS


def document(title: str, body: Sequence[Child], *, scripts: Sequence[str] = ()) -> str:
    """The page. `scripts` run in order after the body; they are our own code, never a user's text."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes or chr(39) + 'none' + chr(39)}",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "font-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    for script in scripts:
        assert "</script" not in script.lower() and "<!--" not in script, "the script would end itself"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(CSS)),
    )
    code = [tag("script", Markup(script)) for script in scripts]
    return Markup("<!doctype html>\n") + tag("html", head, tag("body", *body, *code), lang="en") + "\n"


def data_block(anchor: str, value: Any) -> Markup:
    """JSON for a script to read. It is data to the browser, and `<` is written so that it cannot end the block."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return tag("script", Markup(safe), type="application/json", id=anchor)
