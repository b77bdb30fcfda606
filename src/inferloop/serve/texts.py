"""/v1/models, /identity, /tokenize, /detokenize: what is served, and its tokenizer."""

from __future__ import annotations

import asyncio
import dataclasses

from starlette.requests import Request
from starlette.responses import Response

from inferloop.backends.protocols import Prompt, ServedAdapter, TextCodec
from inferloop.core.errors import RequestError
from inferloop.serve.asgi import read_body
from inferloop.serve.decode import beside_loop, decode_body
from inferloop.serve.health import json_response
from inferloop.serve.messages import checked_variables, plain_messages
from inferloop.serve.replica import Replica
from inferloop.serve.replies import (
    DetokenizeRequest,
    DetokenizeResponse,
    Model,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from inferloop.serve.sampled import adapter_named, check_token_ids
from inferloop.serve.tokens import public_text
from inferloop.serve.tools import tools_of


def model_object(replica: Replica, adapter: ServedAdapter | None) -> Model:
    """What /v1/models tells of the model, or of one of its adapters."""
    info = replica.info
    model = Model(
        id=info.model_id,
        created=replica.created_s,
        max_model_len=info.context_length,
        identity_digest=replica.identity_digest,
    )
    if adapter is not None:
        model.id, model.identity_digest = adapter.name, adapter.identity.digest
        model.root, model.parent = str(adapter.path), info.model_id
    return model


class TextEndpoints:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def models(self, _: Request) -> Response:
        adapters = self._replica.info.adapters.values()
        return json_response(ModelList(data=[model_object(self._replica, one) for one in (None, *adapters)]))

    async def model(self, request: Request) -> Response:
        adapter = adapter_named(request.path_params["model"], self._replica.info)
        return json_response(model_object(self._replica, adapter))

    async def identity(self, request: Request) -> Response:
        """Every field of the serving identity, and its digest; with `model` that of an adapter."""
        info = self._replica.info
        adapter = adapter_named(request.query_params.get("model", info.model_id), info)
        identity = info.identity if adapter is None else adapter.identity
        return json_response({**dataclasses.asdict(identity), "digest": identity.digest})

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request.receive, self._replica.config.max_body_bytes)
        asked, prompt = await beside_loop(self._asked, body)
        return json_response(await asyncio.to_thread(self._tokenized, asked, prompt))

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request.receive, self._replica.config.max_body_bytes)
        tokens = await beside_loop(self._tokens, body)
        text = await asyncio.to_thread(self._codec().decode, tokens)
        return json_response(DetokenizeResponse(prompt=text))

    def _tokenized(self, asked: TokenizeRequest, prompt: Prompt) -> TokenizeResponse:
        codec = self._codec()
        tokens = codec.render(
            prompt,
            add_generation_prompt=asked.add_generation_prompt is not False,
            add_special_tokens=asked.add_special_tokens is not False,
        )
        told = TokenizeResponse(count=len(tokens), max_model_len=self._replica.info.context_length, tokens=list(tokens))
        if asked.return_token_strs:
            told.token_strs = [public_text(codec.token_bytes(token)) for token in tokens]
        return told

    def _asked(self, body: bytes) -> tuple[TokenizeRequest, Prompt]:
        """Raises RequestError, also for a field of messages beside a prompt and the other way round."""
        asked = decode_body(body, TokenizeRequest)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("give exactly one of prompt and messages", param="prompt")
        if asked.messages is not None:
            if asked.add_special_tokens:
                message = "a conversation starts with the special tokens that it has when it is answered"
                raise RequestError(message, param="add_special_tokens", code="unsupported_parameter")
            tools = tuple(tool.definition for tool in tools_of(asked.tools or ()))
            variables = checked_variables(asked.chat_template_kwargs)
            return asked, Prompt(messages=plain_messages(asked.messages), tools=tools, variables=variables)
        if asked.add_generation_prompt is not None:
            raise RequestError("add_generation_prompt belongs to messages", param="add_generation_prompt")
        if asked.tools:
            raise RequestError("tools belong to messages", param="tools")
        if asked.chat_template_kwargs:
            raise RequestError("chat_template_kwargs belong to messages", param="chat_template_kwargs")
        return asked, Prompt(text=asked.prompt)

    def _tokens(self, body: bytes) -> tuple[int, ...]:
        asked = decode_body(body, DetokenizeRequest)
        self._check_model(asked.model)
        check_token_ids(asked.tokens, self._replica.info.vocab_size, "tokens")
        return tuple(asked.tokens)

    def _check_model(self, name: str | None) -> None:
        """An adapter's tokenizer is that of its model."""
        if name is not None:
            adapter_named(name, self._replica.info)

    def _codec(self) -> TextCodec:
        if self._replica.codec is None:
            raise RequestError("this backend does not offer its tokenizer", code="unsupported_endpoint")
        return self._replica.codec
