"""Tools for models whose chat template does not know them: everything about calls is said in messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferloop.engine.text.tools.dialect import Dialect

_INTRODUCTION = (
    "You may call functions to help the user. These are the functions, each with the schema of its arguments:"
)
_RULES = "Call a function only when it helps; its result comes back to you. Otherwise answer in plain words."


def tools_block(tools: Sequence[Mapping[str, Any]], dialect: Dialect) -> str:
    """What a system message says about `tools`, which are in OpenAI's form."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"{_INTRODUCTION}\n<tools>\n{lines}\n</tools>\n{dialect.instruct()}\n{_RULES}"


def spell_out(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    dialect: Dialect,
    *,
    system_role: bool,
) -> list[dict[str, Any]]:
    """Messages with text content, as engine.text.messages makes them, without `tool_calls` and without the role `tool`:
    calls are text as the model would write it, neighbouring results are one message of the user. The tools end the
    first system message; without `system_role`, which some templates refuse, they begin the first message."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and out[-1].get("is_result"):
                out[-1]["content"] += f"\n{result}"
            else:
                out.append({"role": "user", "content": result, "is_result": True})
        elif message.get("tool_calls"):
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            content = "\n".join(filter(None, (message["content"], dialect.write(calls))))
            out.append({**plain, "content": content})
        else:
            out.append(dict(message))
    for message in out:
        message.pop("is_result", None)
    if tools:
        _announce(out, tools_block(tools, dialect), system_role=system_role)
    return out


def _announce(messages: list[dict[str, Any]], block: str, *, system_role: bool) -> None:
    first = messages[0]
    if first["role"] == "system":
        first["content"] = f"{first['content']}\n\n{block}".lstrip()
    elif system_role:
        messages.insert(0, {"role": "system", "content": block})
    else:
        first["content"] = f"{block}\n\n{first['content']}"
