"""The checks notice servers that get it wrong: a check that cannot fail proves nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inferloop.backends.conformance import CHECKS, Check, run_checks
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

BY_NAME = {check.__name__.removeprefix("check_"): check for check in CHECKS}


class Sloppy:
    """A server in the manner of small engines: takes everything, ignores what it does not know, leaks stops, counts
    chunks as tokens, says "stop" always."""

    TEXT = "The sea is wide and deep and full of fish and very old ships."

    async def answer(self, request: Request) -> Response:
        try:
            body: dict[str, Any] = dict(json.loads(await request.body()))
        except (ValueError, TypeError):
            return Response("bad", 500)
        chat = "messages" in body
        words = self.TEXT.split(" ")
        usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 99}
        if not body.get("stream"):
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": {"content": []}}
            choice |= {"message": {"role": "assistant", "content": self.TEXT}} if chat else {"text": self.TEXT}
            kind = "chat.completion" if chat else "text_completion"
            return JSONResponse({"object": kind, "choices": [choice], "usage": usage})
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": w}, "finish_reason": None}]} for w in words]
        events.append({"choices": [], "usage": usage})
        data = "".join(f"data: {json.dumps(e)}\n\n" for e in events)
        return Response(data + "data: [DONE]\n\n", media_type="text/event-stream")

    async def responses(self, request: Request) -> Response:
        """Right as a whole; as a stream it loses a word."""
        content = [{"type": "output_text", "text": self.TEXT}]
        usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
        output = [{"type": "message", "content": content}]
        whole = {"object": "response", "status": "completed", "output": output, "usage": usage}
        if not (await request.json()).get("stream"):
            return JSONResponse(whole)
        kinds = [{"type": "response.created"}] + [
            {"type": "response.output_text.delta", "delta": word} for word in self.TEXT.split(" ")[1:]
        ]
        events: list[dict[str, Any]] = [*kinds, {"type": "response.completed", "response": whole}]
        data = "".join(f"data: {json.dumps(e | {'sequence_number': i})}\n\n" for i, e in enumerate(events))
        return Response(data, media_type="text/event-stream")

    async def embeddings(self, _: Request) -> Response:
        """One vector for everything, always as floats."""
        return JSONResponse({"data": [{"index": i, "embedding": [1.0, 0.0]} for i in range(3)]})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "other", "max_model_len": 100}]})

    async def tokenize(self, _: Request) -> Response:
        return JSONResponse({"count": 5, "tokens": [1, 2, 3, 4, 5]})

    async def detokenize(self, _: Request) -> Response:
        return JSONResponse({"prompt": "nothing"})

    async def progress(self, _: Request) -> Response:
        return JSONResponse({"running": 1, "waiting": 0})

    async def metrics(self, request: Request) -> Response:
        renamed = "openmetrics" in request.headers["accept"]
        return Response("vllm_x 1\n" if renamed else "vllm:x 1\n")

    def app(self) -> Starlette:
        async def failing(_: Request) -> Response:
            return Response(status_code=500)

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health/progress", self.progress),
                Route("/health/live", failing),
                Route("/metrics", self.metrics),
            ]
        )


async def test_a_sloppy_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferloop.backends.conformance_checks._SETTLE_S", 0.2)
    async with serving(Sloppy().app()) as url:
        results = {r.name: r for r in await run_checks(url, "m")}
    passed = {name for name, result in results.items() if result.outcome != "failed"}
    # What it happens to get right: a text part is answered like any text, ids like their text. Its limit is not known.
    assert passed == {"text_parts", "token_prompt", "context_length"}
    assert all(result.reason for name, result in results.items() if name not in passed)


async def test_what_is_not_offered_is_refused_not_failed() -> None:
    async def nothing(_: Request) -> Response:
        error = {"message": "no", "type": "invalid_request_error", "param": "logprobs", "code": "x"}
        return JSONResponse({"error": error}, 400)

    async def absent(_: Request) -> Response:
        return Response(status_code=404)

    routes = [Route("/v1/chat/completions", nothing, methods=["POST"]), Route("/{rest:path}", absent, methods=["GET"])]
    names = ("logprobs", "embeddings", "health", "metrics", "disconnect", "responses")
    async with serving(Starlette(routes=routes)) as url:
        results = await run_checks(url, "m", checks=[BY_NAME[name] for name in names])
    assert [r.outcome for r in results] == ["refused"] * 6


@pytest.mark.parametrize("check", [BY_NAME["chat"], BY_NAME["disconnect"]], ids=lambda c: c.__name__)
async def test_a_hanging_server_fails_in_time(check: Check) -> None:
    script = Script(error_rate=1.0, error_kind="stall", error_after_tokens=0)
    async with serving(build_app(ScriptedGenerator(script, model_id="m"), ServeConfig(), DropSink())) as url:
        result = (await run_checks(url, "m", checks=[check], timeout_s=0.5))[0]
    assert (result.outcome, result.reason) == ("failed", "no end within 0.5 s")
