"""/v1/.../render: what a request comes to, shown instead of generated.

The body is that of the endpoint beside it and is checked the same way, so what is refused there is refused here.
"""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from inferloop.backends.protocols import GenerateRequest, Preview
from inferloop.core.errors import RequestError
from inferloop.core.ids import TraceContext, new_id
from inferloop.core.request import GrammarKind
from inferloop.serve.answer import Dialect
from inferloop.serve.asgi import read_body
from inferloop.serve.decode import beside_loop
from inferloop.serve.health import json_response
from inferloop.serve.replica import Replica
from inferloop.serve.wire import Call


class RenderedGrammar(Struct, kw_only=True):
    """`text` is a JSON schema, an expression or a grammar; empty for any JSON object."""

    kind: GrammarKind
    text: str


class RenderedSampling(Struct, kw_only=True):
    """With every default filled in. `max_tokens` is what was asked for, or what remains of the context; `seed` null
    means a fresh one."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int
    min_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    grammar: RenderedGrammar | None


class Rendered(Struct, kw_only=True):
    """`prompt` is the text as the chat template printed it, or as it was given; `token_ids` is what the engine gets."""

    model: str
    prompt: str
    token_ids: list[int]
    num_tokens: int
    max_model_len: int
    sampling_params: RenderedSampling
    stream: bool
    cache_salt: str | None
    priority: int


class RenderEndpoint:
    """`several`: the answer is a list, one item per prompt, because the request may have several."""

    def __init__(self, replica: Replica, dialect: Dialect, *, several: bool = False) -> None:
        self._replica, self._dialect, self._several = replica, dialect, several

    async def render(self, request: Request) -> Response:
        body = await read_body(request.receive, self._replica.config.max_body_bytes)
        try:
            call = await beside_loop(self._dialect.parse, body, self._replica.info)
            rendered = [self._shown(call, await self._preview(call, i)) for i in range(len(call.prompts))]
        except RequestError as error:
            self._dialect.in_its_words(error)
            raise
        return json_response(rendered if self._several else rendered[0])

    async def _preview(self, call: Call, index: int) -> Preview:
        codec = self._replica.codec
        if codec is None:
            raise RequestError("this backend does not offer its tokenizer", code="unsupported_endpoint")
        request = GenerateRequest(
            new_id("render"),
            TraceContext.new(),
            call.prompts[index],
            call.sampling,
            t_engine_in_ns=self._replica.clock.now_ns(),
            priority=call.priority,
            cache_salt=call.cache_salt,
            n=call.num_per_prompt,
            num_choices=call.num_per_prompt * len(call.prompts),
            adapter=call.adapter,
        )
        return await codec.preview(request)

    def _shown(self, call: Call, preview: Preview) -> Rendered:
        info = self._replica.info
        return Rendered(
            model=info.model_id if call.adapter is None else call.adapter.name,
            prompt=preview.text,
            token_ids=list(preview.token_ids),
            num_tokens=len(preview.token_ids),
            max_model_len=info.context_length,
            sampling_params=_sampling(call, preview.max_tokens),
            stream=call.stream,
            cache_salt=call.cache_salt or None,
            priority=call.priority,
        )


def _sampling(call: Call, max_tokens: int) -> RenderedSampling:
    sampling, grammar = call.sampling, call.sampling.grammar
    return RenderedSampling(
        n=call.num_per_prompt,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.num_prompt_logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias={str(token_id): bias for token_id, bias in sampling.logit_bias},
        grammar=None if grammar is None else RenderedGrammar(kind=grammar.kind, text=grammar.text),
    )
