"""The HTTP side over the scripted generator answers as every backend must."""

from __future__ import annotations

import pytest

from inferloop.backends.conformance import CHECKS, Check, Target, run_check
from inferloop.backends.http import HttpClient
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

TEXT = "The sea is wide and cold. Ñandú 삼겹살 👩‍👩‍👧‍👦 swim in it. " * 2

REFUSED = {"echo_logprobs", "embeddings"}
"""What only a model can tell."""


@pytest.mark.parametrize("tokens_per_chunk", [1, 7])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_scripted(check: Check, tokens_per_chunk: int) -> None:
    script = Script(ttft_ms=1, tpot_ms=0.2, tokens_per_chunk=tokens_per_chunk, context_length=4000, text=TEXT)
    app = build_app(ScriptedGenerator(script, model_id="m"), ServeConfig(), DropSink())
    async with serving(app, wait_ready=True) as url:
        client = HttpClient(url)
        result = await run_check(check, Target(client, "m"))
        await client.close()
    assert result.outcome == ("refused" if result.name in REFUSED else "passed"), result.reason
