"""/v1/chat/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferloop.backends.protocols import Delta
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
        self._head, self._writer = head, ChunkWriter(head, "chat.completion.chunk")
        self._texts: list[list[str]] = [[] for _ in head.echoes]
        self._logprobs: list[list[ChatLogprob] | None] = [None for _ in head.echoes]

    def opening(self) -> bytes:
        role = b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null'
        choices = (b'{"index":%d,%b}' % (i, role) for i in range(len(self._texts)))
        return b"".join(self._writer.choice(choice, Timings(num_tokens=0)) for choice in choices)

    def chunk(self, index: int, delta: Delta) -> bytes:
        if not self._writer.wants(delta):
            return b""
        logprobs = b"null"
        if delta.logprobs is not None:
            rows = chat_logprobs(self._head.token_bytes, delta.token_ids, delta.logprobs)
            logprobs = _dumps(ChatLogprobs(content=rows))
        text = _dumps(delta.text)
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (index, text, logprobs)
        return self._writer.choice(choice, Timings(num_tokens=len(delta.token_ids)))

    def ended(self, index: int, finish: Finish) -> bytes:
        return self._writer.choice(_finish_choice(index, finish), Timings(num_tokens=0))

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        return self._writer.closing(_finish_choice(index, finish), usage, timings)

    def broken(self, error: BaseException) -> bytes:
        return error_event(error)

    def collect(self, index: int, delta: Delta) -> None:
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
            )
            for i, (texts, logprobs, finish) in enumerate(zip(self._texts, self._logprobs, finishes, strict=True))
        ]
        head = self._head
        answer = ChatCompletion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
        if head.with_timings:
            answer.inferloop = timings
        return _dumps(answer)


def _finish_choice(index: int, finish: Finish) -> bytes:
    return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}' % (index, finish.encode())
