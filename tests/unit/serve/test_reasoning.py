"""A chat's usage tells how much of the answer was thought, whole and streamed, for all choices together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferloop.backends.http import HttpClient
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.text.answer import AnswerStyle
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

THOUGHT = "<think>hm</think>"


async def usages(text: str, style: AnswerStyle, **body: Any) -> list[dict[str, Any]]:
    """Of the whole answer and of the stream."""
    script = Script(ttft_ms=0.1, tpot_ms=0, text=text)
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], **body}
    found = []
    async with serving(
        build_app(ScriptedGenerator(script, model_id="m", answer_style=style), ServeConfig(), DropSink())
    ) as url:
        client = HttpClient(url)
        for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            told = json.dumps({**asked, **stream}).encode()
            data = await (await client.request("POST", "/v1/chat/completions", body=told)).read()
            last = data.decode().split("\n\n")[-3].removeprefix("data: ") if stream else data
            found.append(json.loads(last)["usage"])
        await client.close()
    return found


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("text", "thinks", "num"),
    [
        (f"{THOUGHT}yes", True, len(THOUGHT)),
        ("<think>hm", True, len("<think>hm") + 1),  # the end token too comes before any answer
        ("yes", True, 0),
        (f"{THOUGHT}yes", False, 0),
    ],
)
async def test_reasoning_is_counted(n: int, text: str, thinks: bool, num: int) -> None:
    for usage in await usages(text, AnswerStyle(thinks=thinks), n=n):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": n * num}
        assert usage["completion_tokens"] == n * (len(text) + 1)
