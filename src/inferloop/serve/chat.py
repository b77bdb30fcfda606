"""/v1/chat/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferloop.backends.protocols import Delta
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.serve.replies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Finish,
    Timings,
    TopLogprob,
    Usage,
)
from inferloop.serve.sse import AnswerHead, ChunkWriter
from inferloop.serve.tokens import public_logprob, public_text

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
            logprobs = _dumps(ChatLogprobs(content=self._chat_logprobs(delta.token_ids, delta.logprobs)))
        text = _dumps(delta.text)
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (index, text, logprobs)
        return self._writer.choice(choice, Timings(num_tokens=len(delta.token_ids)))

    def ended(self, index: int, finish: Finish) -> bytes:
        return self._writer.choice(_finish_choice(index, finish), Timings(num_tokens=0))

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        return self._writer.closing(_finish_choice(index, finish), usage, timings)

    def collect(self, index: int, delta: Delta) -> None:
        self._texts[index].append(delta.text)
        if delta.logprobs is not None:
            rows = self._chat_logprobs(delta.token_ids, delta.logprobs)
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

    def _chat_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[ChatLogprob]:
        rows = []
        for token_id, row in zip(token_ids, logprobs, strict=True):
            token = self._head.token_bytes(token_id)
            rows.append(
                ChatLogprob(
                    token=public_text(token),
                    logprob=public_logprob(row.chosen),
                    bytes=list(token),
                    top_logprobs=[self._top(other, value) for other, value in row.top],
                )
            )
        return rows

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        token = self._head.token_bytes(token_id)
        return TopLogprob(token=public_text(token), logprob=public_logprob(logprob), bytes=list(token))


def _finish_choice(index: int, finish: Finish) -> bytes:
    return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}' % (index, finish.encode())
