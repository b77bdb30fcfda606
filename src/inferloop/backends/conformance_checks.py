"""The checks. Each raises FailedCheckError or RefusedCheckError, or returns."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from inferloop.backends.conformance_prompts import check_echo_logprobs, check_embeddings
from inferloop.backends.conformance_responses import check_responses
from inferloop.backends.conformance_target import (
    CHAT,
    COMPLETIONS,
    Answer,
    RefusedCheckError,
    Target,
    chat,
    completion,
    deadline_ns,
    require,
)

_QUESTION = "Tell me about the sea in three sentences."
_SETTLE_S = 10.0
"""How long an aborted request may take to leave a busy server."""


async def check_models(t: Target) -> None:
    answer = await t.get("/v1/models")
    require(answer.status == 200, f"GET /v1/models: HTTP {answer.status}")
    names = [entry["id"] for entry in answer.json["data"]]
    require(t.model in names, f"{t.model!r} is not among {names}")


async def check_chat(t: Target) -> None:
    body = await t.ok(CHAT, chat("Say hello.", max_tokens=16))
    require(body["object"] == "chat.completion", f"object is {body['object']!r}")
    choice = body["choices"][0]
    require(choice["message"]["role"] == "assistant", "the answer's role is not assistant")
    require(bool(choice["message"]["content"]), "the answer is empty")
    require(choice["finish_reason"] in ("stop", "length"), f"finish_reason is {choice['finish_reason']!r}")
    _check_usage_sums(body["usage"])


async def check_completion(t: Target) -> None:
    body = await t.ok(COMPLETIONS, completion("The sea is", max_tokens=8))
    require(body["object"] == "text_completion", f"object is {body['object']!r}")
    require(bool(body["choices"][0]["text"]), "the answer is empty")
    _check_usage_sums(body["usage"])


async def check_stream_equals_whole(t: Target) -> None:
    """The joined deltas are the text of the same request without streaming, and so are reason and usage."""
    for path, body in ((CHAT, chat(_QUESTION, max_tokens=48)), (COMPLETIONS, completion("Once", max_tokens=24))):
        whole = await t.ok(path, body)
        stream = await t.stream(path, {**body, "stream_options": {"include_usage": True}})
        choice = whole["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        require(stream.done, f"{path}: the stream did not end with [DONE]")
        require(stream.text == text, f"{path}: streamed {stream.text!r}, whole {text!r}")
        require(stream.finish_reasons == [choice["finish_reason"]], f"{path}: finish {stream.finish_reasons}")
        require(len(stream.usages) == 1 and not stream.events[-1]["choices"], f"{path}: usage is not the last chunk")
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        differs = [k for k in counts if stream.usages[0][k] != whole["usage"][k]]
        require(not differs, f"{path}: usage differs in {differs}: {stream.usages[0]} and {whole['usage']}")


async def check_stream_without_usage(t: Target) -> None:
    stream = await t.stream(CHAT, chat("Say hello.", max_tokens=4))
    require(not stream.usages, "usage was sent although nobody asked for it")
    require(all(event["choices"] for event in stream.events), "a chunk without a choice")


async def check_stop_never_leaks(t: Target) -> None:
    """Stops of several characters, and one that starts inside what may be a token, taken from the model's own
    answer, so that they surely occur."""
    body = chat(_QUESTION, max_tokens=48)
    full = (await t.ok(CHAT, body))["choices"][0]["message"]["content"]
    middle = len(full) // 2
    require(middle >= 8, f"the answer is too short to stop in it: {full!r}")
    for stop in (full[middle : middle + 7], full[middle + 1 : middle + 3]):
        expected = full[: full.index(stop)]
        whole = (await t.ok(CHAT, {**body, "stop": [stop]}))["choices"][0]
        stream = await t.stream(CHAT, {**body, "stop": stop})
        for name, text, reason in (
            ("whole", whole["message"]["content"], whole["finish_reason"]),
            ("streamed", stream.text, stream.finish_reasons[-1]),
        ):
            require(text == expected, f"stop {stop!r}, {name}: {text!r} instead of {expected!r}")
            require(reason == "stop", f"stop {stop!r}, {name}: finish_reason {reason!r}")


async def check_max_tokens(t: Target) -> None:
    for path, body in ((CHAT, chat(_QUESTION, max_tokens=5)), (COMPLETIONS, completion("The sea", max_tokens=5))):
        answer = await t.ok(path, body)
        require(answer["choices"][0]["finish_reason"] == "length", f"{path}: finish_reason is not length")
        num = answer["usage"]["completion_tokens"]
        require(num == 5, f"{path}: max_tokens 5 gave {num} tokens")


async def check_prompt_usage(t: Target) -> None:
    """prompt_tokens agrees with the server's own tokenizer, for texts and conversations."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ñandú 삼겹살 👩‍👩‍👧‍👦"}]
    for path, source in ((COMPLETIONS, {"prompt": "The sea  is\n\nblue"}), (CHAT, {"messages": messages})):
        counted = await t.post("/tokenize", dict(source))
        if counted.status in (404, 405, 400):
            raise RefusedCheckError(f"/tokenize is not offered (HTTP {counted.status})")
        answer = await t.ok(path, {**source, "max_tokens": 1, "temperature": 0})
        expected, told = counted.json["count"], answer["usage"]["prompt_tokens"]
        require(told == expected, f"{path}: usage says {told} prompt tokens, /tokenize {expected}")


async def check_token_prompt(t: Target) -> None:
    """A prompt of token ids answers like its text."""
    counted = await t.post("/tokenize", {"prompt": "The sea is"})
    if counted.status != 200:
        raise RefusedCheckError(f"/tokenize is not offered (HTTP {counted.status})")
    by_text = await t.ok(COMPLETIONS, completion("The sea is", max_tokens=8))
    by_ids = await t.ok(COMPLETIONS, completion(counted.json["tokens"], max_tokens=8))
    texts = by_text["choices"][0]["text"], by_ids["choices"][0]["text"]
    require(texts[0] == texts[1], f"text gives {texts[0]!r}, ids give {texts[1]!r}")


async def check_detokenize(t: Target) -> None:
    text = "ñandú 삼겹살\n\n  code()"
    counted = await t.post("/tokenize", {"prompt": text})
    if counted.status != 200:
        raise RefusedCheckError(f"/tokenize is not offered (HTTP {counted.status})")
    back = await t.ok("/detokenize", {"tokens": counted.json["tokens"]})
    require(back["prompt"].endswith(text), f"{text!r} came back as {back['prompt']!r}")


async def check_logprobs(t: Target) -> None:
    answer = await t.post(CHAT, chat("Say hello.", max_tokens=4, logprobs=True, top_logprobs=2))
    _refused_if_named(answer, "logprobs")
    choice = answer.json["choices"][0]
    rows = choice["logprobs"]["content"]
    num = answer.json["usage"]["completion_tokens"]
    require(len(rows) == num, f"{len(rows)} log-probabilities for {num} tokens")
    require(all(row["logprob"] <= 1e-6 for row in rows), "a log-probability above 0")


async def check_bad_parameters(t: Target) -> None:
    """400 naming the field, and the server answers normally afterwards."""
    bad: tuple[tuple[str, Any], ...] = (
        ("temperature", -1),
        ("temperature", 1e308),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 9_999_999),
        ("top_k", -2),
        ("min_p", -0.5),
        ("seed", 1.5),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("n", 0),
        ("n", 1000),
        ("stop", [""]),
        ("stop", [7]),
        ("stop_token_ids", [10**7]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"99999999": 5}),
        ("logit_bias", {"AI": 1}),
        ("logit_bias", {"1": 1000}),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
        ("tools", [{"type": "function", "function": {"name": "two words"}}]),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("no_such_parameter", 1),
    )
    wrong = []
    for field, value in bad:
        answer = await t.post(CHAT, {**chat("hi", max_tokens=2), field: value})
        param = str(answer.error.get("param")) if answer.status == 400 else ""
        if field not in param:
            wrong.append(f"{field}={value!r}: HTTP {answer.status}, param {param!r}")
    require(not wrong, "; ".join(wrong))
    await check_chat(t)


async def check_not_a_number(t: Target) -> None:
    for number in (b"NaN", b"Infinity", b"1e999"):
        body = b'{"model":"%b","prompt":"x","max_tokens":1,"temperature":%b}' % (t.model.encode(), number)
        answer = await t.post(COMPLETIONS, body)
        require(answer.status == 400, f"temperature {number.decode()}: HTTP {answer.status}")
        require("temperature" in str(answer.error["param"]), f"{number.decode()}: param {answer.error['param']!r}")


async def check_invalid_bodies(t: Target) -> None:
    for body in (b"", b"{", b"[]", b'{"model":', b"\xff\xfe"):
        answer = await t.post(CHAT, body)
        require(answer.status in (400, 422), f"body {body!r}: HTTP {answer.status}")
        require(bool(answer.error["message"]), "an error without a message")


async def check_empty_prompts(t: Target) -> None:
    """400 at once, and the engine lives on."""
    empties: tuple[tuple[str, dict[str, Any]], ...] = (
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [""]}),
        (CHAT, {"messages": []}),
    )
    for path, body in empties:
        answer = await t.post(path, {**body, "max_tokens": 1})
        require(answer.status == 400, f"{path} {body}: HTTP {answer.status}")
        field = next(iter(body))
        require(field in str(answer.error["param"]), f"{path} {body}: param {answer.error['param']!r}")
    blank = await t.post(CHAT, chat("", max_tokens=1))
    require(blank.status in (200, 400), f"an empty message: HTTP {blank.status}")
    await check_completion(t)


async def check_text_parts(t: Target) -> None:
    parts = [{"type": "text", "text": "Say hello."}]
    by_part = await t.ok(CHAT, chat("", max_tokens=4) | {"messages": [{"role": "user", "content": parts}]})
    by_text = await t.ok(CHAT, chat("Say hello.", max_tokens=4))
    texts = [answer["choices"][0]["message"]["content"] for answer in (by_part, by_text)]
    require(texts[0] == texts[1], f"a text part gives {texts[0]!r}, the text {texts[1]!r}")


async def check_image_refused(t: Target) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    answer = await t.post(CHAT, {"messages": [{"role": "user", "content": image}], "max_tokens": 1})
    require(answer.status == 400, f"an image for a text model: HTTP {answer.status}")
    require("messages" in str(answer.error["param"]), f"param {answer.error['param']!r}")


async def check_context_length(t: Target) -> None:
    """A prompt that cannot fit is a 400 with its own code, never a hang."""
    models = (await t.get("/v1/models")).json["data"]
    limit = next((m.get("max_model_len") for m in models if m["id"] == t.model), None)
    if limit is None:
        raise RefusedCheckError("/v1/models does not tell max_model_len")
    text = " a" * (limit + 8)
    for path, body in ((COMPLETIONS, {"prompt": text}), (CHAT, chat(text)), (COMPLETIONS, completion("x"))):
        asked = {**body, "max_tokens": 1 if path == CHAT or len(body["prompt"]) > 1 else limit + 1}
        answer = await t.post(path, asked)
        require(answer.status == 400, f"{path} beyond the context: HTTP {answer.status}")
        code = answer.error["code"]
        require(code == "context_length_exceeded", f"{path} beyond the context: code {code!r}")


async def check_unknown_model(t: Target) -> None:
    answer = await t.post(CHAT, {**chat("hi"), "model": t.model + "-not-here"})
    require(answer.status == 404, f"an unknown model: HTTP {answer.status}")
    require(answer.error["code"] == "model_not_found", f"code {answer.error['code']!r}")


async def check_request_id(t: Target) -> None:
    headers = [("x-request-id", "conformance-1234"), ("traceparent", f"00-{'a1' * 16}-{'b2' * 8}-01")]
    answer = await t.post(CHAT, chat("hi", max_tokens=1), headers=headers)
    require(answer.status == 200, f"HTTP {answer.status} with x-request-id and traceparent")
    require(answer.header("x-request-id") == "conformance-1234", f"came back as {answer.header('x-request-id')!r}")
    made = (await t.post(CHAT, {})).header("x-request-id")
    require(bool(made), "an answer without x-request-id")


async def check_health(t: Target) -> None:
    for path in ("/health/live", "/health/ready", "/health/progress"):
        answer = await t.get(path)
        if answer.status == 404:
            raise RefusedCheckError(f"{path} is not offered")
        require(answer.status == 200, f"GET {path}: HTTP {answer.status}")


async def check_metrics(t: Target) -> None:
    """The same names under every Accept header."""
    names = set()
    for accept in ("text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0", "*/*"):
        answer = await t.get("/metrics", headers=[("accept", accept)])
        if answer.status == 404:
            raise RefusedCheckError("/metrics is not offered")
        require(answer.status == 200, f"GET /metrics: HTTP {answer.status}")
        lines = answer.body.decode().splitlines()
        names.add(frozenset(line.split("{")[0].split(" ")[0] for line in lines if line and line[0] != "#"))
    require(len(names) == 1, "metric names depend on the Accept header")


async def check_disconnect(t: Target) -> None:
    """Whoever leaves, streaming or not, stops costing: running and waiting return to zero."""
    if (await t.get("/health/progress")).status != 200:
        raise RefusedCheckError("/health/progress is not offered")
    endless = chat(_QUESTION, max_tokens=2000, ignore_eos=True)
    stream = await t.open(CHAT, {**endless, "stream": True})
    require(stream.status == 200, f"HTTP {stream.status}")
    async for _ in stream.pieces():
        break
    stream.abort()
    whole = asyncio.create_task(t.open(CHAT, endless))
    await asyncio.sleep(0.2)
    whole.cancel()
    await asyncio.gather(whole, return_exceptions=True)
    deadline = deadline_ns(time.monotonic_ns(), _SETTLE_S)
    while True:
        progress = (await t.get("/health/progress")).json
        if progress["running"] == progress["waiting"] == 0:
            return
        require(time.monotonic_ns() < deadline, f"{_SETTLE_S:g} s after the clients left: {progress}")
        await asyncio.sleep(0.05)


def _check_usage_sums(usage: dict[str, Any]) -> None:
    require(usage["prompt_tokens"] > 0 and usage["completion_tokens"] > 0, f"usage {usage}")
    require(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], f"usage {usage}")


def _refused_if_named(answer: Answer, field: str) -> None:
    if answer.status == 400 and field in str(answer.error["param"]):
        raise RefusedCheckError(answer.error["message"])
    require(answer.status == 200, f"HTTP {answer.status}: {answer.body[:300]!r}")


CHECKS = (
    check_models,
    check_chat,
    check_completion,
    check_stream_equals_whole,
    check_stream_without_usage,
    check_stop_never_leaks,
    check_max_tokens,
    check_prompt_usage,
    check_token_prompt,
    check_detokenize,
    check_logprobs,
    check_echo_logprobs,
    check_embeddings,
    check_bad_parameters,
    check_not_a_number,
    check_invalid_bodies,
    check_empty_prompts,
    check_text_parts,
    check_image_refused,
    check_context_length,
    check_unknown_model,
    check_request_id,
    check_health,
    check_metrics,
    check_disconnect,
    check_responses,
)
