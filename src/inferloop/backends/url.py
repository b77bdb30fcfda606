"""Any server of the OpenAI API as a Generator: for putting our events, metrics and checks in front of it.

Such a server tells texts and counts, not token ids, so ids are UNKNOWN_TOKEN, as many as were counted. An inferloop
replica tells the tokens of every chunk; of others a chunk with text counts as one token while it streams, and the
usage at the end corrects the sum upwards.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

from inferloop.backends.http import HttpClient, HttpError, Response
from inferloop.backends.protocols import Delta, GenerateRequest, GeneratorInfo, StageTimes
from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import EngineError, EnvironmentLacksError, OverloadedError, RequestError
from inferloop.core.request import FinishReason, Sampling
from inferloop.core.units import NS_PER_MS
from inferloop.engine.stats import EngineStats
from inferloop.models.identity import ServingIdentity

UNKNOWN_TOKEN = -1
_UNKNOWN_VOCABULARY = 2**31 - 1
_UNKNOWN_CONTEXT = 2**31 - 1


class UrlGenerator:
    """Implements Generator. Lives on the event loop of its client. Log-probabilities are refused."""

    def __init__(self, client: HttpClient, info: GeneratorInfo, *, clock: Clock | None = None) -> None:
        self._client, self._info, self._clock = client, info, clock or RealClock()
        self._num_running = self._num_chunks = self._generation_tokens = 0

    @classmethod
    async def connect(cls, base_url: str, model: str, *, clock: Clock | None = None) -> UrlGenerator:
        """Ask the server what it serves. Raises EnvironmentLacksError when it is not there or has no such model."""
        client = HttpClient(base_url)
        try:
            models = {entry["id"]: entry for entry in (await client.get_json("/v1/models"))["data"]}
            if model not in models:
                raise EnvironmentLacksError(f"{base_url} serves {', '.join(models) or 'nothing'}, not {model!r}")
            identity = await _identity(client, base_url, model)
        except (HttpError, ValueError, KeyError, TypeError) as error:
            await client.close()
            raise EnvironmentLacksError(f"{base_url} does not answer as an OpenAI server: {error}") from error
        except BaseException:
            await client.close()
            raise
        context_length = int(models[model].get("max_model_len") or _UNKNOWN_CONTEXT)
        return cls(client, GeneratorInfo(model, context_length, identity, _UNKNOWN_VOCABULARY), clock=clock)

    async def close(self) -> None:
        await self._client.close()

    def describe(self) -> tuple[GeneratorInfo, EngineStats]:
        """`num_running` counts our own open requests; what else the server does is not known."""
        stats = EngineStats(
            num_running=self._num_running, step_counter=self._num_chunks, generation_tokens=self._generation_tokens
        )
        return self._info, stats

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if request.sampling.num_logprobs is not None:
            raise RequestError("log-probabilities are not supported through a URL", param="logprobs")
        if request.sampling.num_prompt_logprobs is not None:
            raise RequestError("log-probabilities are not supported through a URL", param="prompt_logprobs")
        self._num_running += 1
        response: Response | None = None
        try:
            response = await self._open(request)
            reader = _Reader(request, self._clock)
            async for t_ns, event in _events(response):
                self._num_chunks += 1
                delta = reader.delta(t_ns, event)
                if delta is not None:
                    self._generation_tokens += len(delta.token_ids)
                    yield delta
            last = reader.last()
            self._generation_tokens += len(last.token_ids)
            yield last
        except HttpError as error:
            raise EngineError(f"the server behind failed: {error.kind}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineError("the server behind answered what is not the OpenAI API") from error
        finally:
            self._num_running -= 1
            if response is not None:
                response.release()

    async def _open(self, request: GenerateRequest) -> Response:
        prompt, body = request.prompt, _sampling_fields(request.sampling)
        body |= {"model": self._info.model_id, "stream": True, "stream_options": {"include_usage": True}}
        if request.priority:
            body["priority"] = request.priority
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if prompt.messages is not None:
            path, body["messages"] = "/v1/chat/completions", [_sent(message) for message in prompt.messages]
            if prompt.tools:  # shown to the model; calls are not told apart through a URL
                body |= {"tools": list(prompt.tools), "tool_choice": "none"}
            if prompt.variables:
                body["chat_template_kwargs"] = dict(prompt.variables)
        else:
            path = "/v1/completions"
            body["prompt"] = prompt.text if prompt.text is not None else list(prompt.token_ids or ())
        headers = [
            ("content-type", "application/json"),
            ("x-request-id", request.request_id),
            ("traceparent", request.trace.header),
            ("x-inferloop-timings", "1"),
        ]
        response = await self._client.request("POST", path, headers=headers, body=json.dumps(body).encode())
        if response.status != 200:
            await _refuse(response)
        return response


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it came: arguments are objects for templates and texts on the wire."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


async def _identity(client: HttpClient, base_url: str, model: str) -> ServingIdentity:
    """The server's own, or one that says how little is known."""
    response = await client.request("GET", "/identity", timeout_s=5.0)
    body = await response.read()
    if response.status == 200:
        fields: dict[str, Any] = {k: v for k, v in json.loads(body).items() if k != "digest"}
        return ServingIdentity(**{**fields, "stop_token_ids": tuple(fields["stop_token_ids"])})
    unknown = "unknown"
    return ServingIdentity(model, unknown, unknown, f"url {base_url}", unknown, unknown, unknown)


async def _refuse(response: Response) -> NoReturn:
    body = await response.read()
    try:
        error = json.loads(body)["error"]
        message, param, code = str(error["message"]), error.get("param"), str(error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = f"HTTP {response.status}", None, "unknown"
    if response.status in (429, 503):
        retry_after = response.header("retry-after") or ""
        raise OverloadedError(message, retry_after_s=float(retry_after) if retry_after.isdecimal() else 1.0)
    if 400 <= response.status < 500:
        raise RequestError(message, param=param, code=code)
    raise EngineError(message)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Only what differs from the defaults: foreign servers refuse fields that they do not know."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    default = Sampling()
    for name in (
        "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty",
        "repetition_penalty",
    ):  # fmt: skip
        value = getattr(sampling, name)
        if value != getattr(default, name):
            fields[name] = value
    if sampling.cut_max_tokens:
        fields.pop("max_tokens", None)  # the server behind has the same default, and knows what fits
    if sampling.seed is not None and sampling.seed >= 2**63:
        fields["seed"] = sampling.seed - 2**64
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    return fields


async def _events(response: Response) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """(arrival ns, parsed data) of each server-sent event before [DONE]. Raises EngineError for an error event and
    for a stream that ends without [DONE]."""
    pending = b""
    async for t_ns, piece in response.pieces():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                # Read on to the end of the response, so that the connection can be used again.
                async for _ in response.pieces():
                    pass
                return
            if not data:
                continue
            event = json.loads(data)
            if "error" in event:
                raise EngineError(str(event["error"].get("message", "the server behind failed")))
            yield t_ns, event
    raise EngineError("the server behind ended its stream without [DONE]")


class _Reader:
    """One stream's events to deltas; the last one waits for the usage, which comes after the finish reason."""

    def __init__(self, request: GenerateRequest, clock: Clock) -> None:
        self._request, self._clock = request, clock
        self._finish: FinishReason | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._num_tokens = 0
        self._t_first_ns: int | None = None
        self._t_last_ns: int | None = None

    def delta(self, t_ns: int, event: dict[str, Any]) -> Delta | None:
        self._usage = event.get("usage") or self._usage
        extension = event.get("inferloop") or {}
        self._timings |= extension
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        if choice.get("finish_reason") is not None:
            self._finish = "length" if choice["finish_reason"] == "length" else "stop"
        text = (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
        num_tokens = int(extension.get("num_tokens", 1 if text else 0))
        if not (text or num_tokens):
            return None
        self._num_tokens += num_tokens
        if num_tokens:
            self._t_first_ns, self._t_last_ns = self._t_first_ns or t_ns, t_ns
        return Delta(text, (UNKNOWN_TOKEN,) * num_tokens, t_ns)

    def last(self) -> Delta:
        details = self._usage.get("prompt_tokens_details") or {}
        num_left = max(0, int(self._usage.get("completion_tokens") or 0) - self._num_tokens)
        t_in_ns, queue_ms = self._request.t_engine_in_ns, self._timings.get("queue_ms")
        now_ns = self._clock.now_ns()
        return Delta(
            text="",
            token_ids=(UNKNOWN_TOKEN,) * num_left,
            t_ns=self._t_last_ns or now_ns,
            prompt_token_ids=(UNKNOWN_TOKEN,) * int(self._usage.get("prompt_tokens") or 0),
            num_cached_tokens=int(details.get("cached_tokens") or 0),
            finish_reason=self._finish or "error",
            times=StageTimes(
                t_engine_in_ns=t_in_ns,
                t_scheduled_ns=None if queue_ms is None else t_in_ns + int(queue_ms * NS_PER_MS),
                t_first_token_ns=self._t_first_ns,
                t_last_token_ns=self._t_last_ns,
            ),
        )
