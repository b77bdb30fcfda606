"""/v1/chat/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferloop.backends.protocols import Delta
from inferloop.serve.extras import Extras
from inferloop.serve.replies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Finish,
    Timings,
    Usage,
)
from inferloop.serve.sse import AnswerHead, ChunkWriter, error_event
from inferloop.serve.tokens import chat_logprobs

_dumps = msgspec.json.encode


class ChatEncoder:
    """See serve.sse.Encoder."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._writer, self._extras = head, ChunkWriter(head, "chat.completion.chunk"), Extras(head)
        self._texts: list[list[str]] = [[] for _ in head.echoes]
        self._logprobs: list[list[ChatLogprob] | None] = [None for _ in head.echoes]

    def opening(self, first: Delta) -> bytes:
        role = b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null'
        choices = (b'{"index":%d,%b}' % (i, role) for i in range(len(self._texts)))
        told = self._extras.prompt_field(first)
        return b"".join(self._writer.choice(choice, Timings(num_tokens=0), told) for choice in choices)

    def chunk(self, index: int, delta: Delta) -> bytes:
        if not self._writer.wants(delta):
            return b""
        logprobs = b"null"
        if delta.logprobs is not None:
            rows = chat_logprobs(self._head.token_bytes, delta.token_ids, delta.logprobs)
            logprobs = _dumps(ChatLogprobs(content=rows))
        text = _dumps(delta.text)
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (
            index,
            text,
            logprobs,
            self._extras.delta_field(delta),
        )
        return self._writer.choice(choice, Timings(num_tokens=len(delta.token_ids)))

    def ended(self, index: int, finish: Finish) -> bytes:
        return self._writer.choice(_finish_choice(index, finish), Timings(num_tokens=0))

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        return self._writer.closing(_finish_choice(index, finish), usage, timings)

    def broken(self, error: BaseException) -> bytes:
        return error_event(error)

    def collect(self, index: int, delta: Delta) -> None:
        self._extras.collect(index, delta)
        self._texts[index].append(delta.text)
        if delta.logprobs is not None:
            rows = chat_logprobs(self._head.token_bytes, delta.token_ids, delta.logprobs)
            self._logprobs[index] = (self._logprobs[index] or []) + rows

    def body(self, finishes: Sequence[Finish], usage: Usage, timings: Timings) -> bytes:
        choices = [
            ChatChoice(
                index=i,
                message=AssistantMessage(content="".join(texts)),
                logprobs=None if logprobs is None else ChatLogprobs(content=logprobs),
                finish_reason=finish,
                token_ids=self._extras.token_ids(i),
            )
            for i, (texts, logprobs, finish) in enumerate(zip(self._texts, self._logprobs, finishes, strict=True))
        ]
        head = self._head
        answer = ChatCompletion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
        answer.prompt_token_ids = self._extras.prompt_token_ids(0)
        answer.prompt_logprobs = self._extras.prompt_logprobs(0)
        if head.with_timings:
            answer.inferloop = timings
        return _dumps(answer)


def _finish_choice(index: int, finish: Finish) -> bytes:
    return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}' % (index, finish.encode())
