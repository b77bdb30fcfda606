"""Requests that must be refused, and as what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lab.soak.templates import CHAT, COMPLETIONS


@dataclass(frozen=True, slots=True)
class Refusal:
    """`body` as bytes is sent as it is. `param` None: the answer need not name a field."""

    path: str
    body: dict[str, Any] | bytes
    param: str | None
    status: int = 400

    @property
    def name(self) -> str:
        return f"refusal of {self.param or str(self.body)[:30]} at {self.path}"


_MESSAGES = [{"role": "user", "content": "Hi"}]
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("stop_token_ids", [10**7]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"AI": 1}),
    ("top_k", 9_999_999),
    ("temperature", 2.5),
    ("max_tokens", 0),
    ("max_tokens", 10**9),
    ("n", 0),
    ("n", 10**6),
    ("min_tokens", 10**6),
    ("cache_salt", ""),
    ("seed", 2**63),
    ("stop", [""]),
    ("no_such_field", 1),
    ("allowed_token_ids", list(range(5000))),
    ("structured_outputs.regex", None),
)


def _body(prompt: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    if field == "structured_outputs.regex":
        return {**prompt, "structured_outputs": {"regex": "(unclosed"}}
    if field == "min_tokens":
        return {**prompt, field: value, "max_tokens": 5}
    return {**prompt, field: value}


REFUSALS = (
    *(Refusal(CHAT, _body({"messages": _MESSAGES}, field, value), field) for field, value in _FIELDS),
    *(Refusal(COMPLETIONS, _body({"prompt": "Hi"}, field, value), field) for field, value in _FIELDS),
    Refusal(COMPLETIONS, {"prompt": ""}, "prompt"),
    Refusal(COMPLETIONS, {"prompt": []}, "prompt"),
    Refusal(COMPLETIONS, {"prompt": [""]}, "prompt[0]"),
    Refusal(COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
    Refusal(COMPLETIONS, {"prompt": "word " * 3000}, "prompt"),
    Refusal(COMPLETIONS, {"prompt": [49152]}, "prompt"),
    Refusal(CHAT, {"messages": []}, "messages"),
    Refusal(CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
    Refusal(CHAT, {"messages": _MESSAGES, "model": "no such model"}, "model", 404),
    Refusal(CHAT, b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}', "temperature"),
    Refusal(CHAT, b"[" * 100_000, None),
    Refusal(COMPLETIONS, b"\xff\xfe", None),
    Refusal(COMPLETIONS, b"{" + b" " * (9 << 20) + b"}", None, 413),
)
