"""The tokenizer of the scripted backend: one token per UTF-8 byte, so every count is exact and every text possible."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inferloop.backends.protocols import Prompt
from inferloop.core.errors import RequestError
from inferloop.engine.text.template import unread_variable

START = 256
"""Begins a turn of a conversation; has no text."""
END = 257
"""Ends a turn or an answer; has no text."""
VOCAB_SIZE = 258


def render(prompt: Prompt, *, add_generation_prompt: bool = True) -> tuple[int, ...]:
    """Raises RequestError for an empty prompt, and for variables: there is no chat template to read them."""
    if prompt.variables:
        raise unread_variable(min(prompt.variables), ())
    if prompt.messages is not None:
        ids: list[int] = [START, *json.dumps(prompt.tools).encode(), END] if prompt.tools else []
        for message in prompt.messages:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            ids += [START, *f"{message['role']}\n{message['content']}{calls}".encode(), END]
        return (*ids, START, *b"assistant\n") if add_generation_prompt else tuple(ids)
    ids = list(prompt.token_ids or ()) if prompt.text is None else list(prompt.text.encode())
    if not ids:
        raise RequestError("the prompt is empty", param="prompt")
    return tuple(ids)


def token_bytes(token_id: int) -> bytes:
    return bytes((token_id,)) if token_id < START else b""


def decode(token_ids: Iterable[int]) -> str:
    return bytes(t for t in token_ids if t < START).decode(errors="replace")


class ByteDecoder:
    """Incremental `decode`: holds the bytes of an unfinished character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(t for t in ids if t < START))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteCodec:
    """Implements native.NativeCodec: our own engine on this vocabulary, without a model's files. Cutting a text costs
    nothing, so that `max_tokens` is left to the engine."""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        return decode(self.encode_chat(messages, tools=tools, variables=variables))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        prompt = Prompt(
            messages=tuple(dict(m) for m in messages),
            tools=tuple(dict(tool) for tool in tools or ()),
            variables=variables or {},
        )
        return render(prompt, add_generation_prompt=add_generation_prompt)

    def encode_text(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        return render(Prompt(text=text))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        return token_bytes(token_id)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> ByteDecoder:
        return ByteDecoder()
