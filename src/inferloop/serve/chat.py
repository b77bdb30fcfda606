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
        self._texts: list[str] = []
        self._logprobs: list[ChatLogprob] | None = None

    def opening(self) -> bytes:
        role = (
            b'{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        )
        return self._writer.choice(role, Timings(num_tokens=0))

    def chunk(self, delta: Delta) -> bytes:
        if not self._writer.wants(delta):
            return b""
        logprobs = b"null"
        if delta.logprobs is not None:
            logprobs = _dumps(ChatLogprobs(content=self._chat_logprobs(delta.token_ids, delta.logprobs)))
        text = _dumps(delta.text)
        choice = b'{"index":0,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (text, logprobs)
        return self._writer.choice(choice, Timings(num_tokens=len(delta.token_ids)))

    def closing(self, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        choice = b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"%b"}' % finish.encode()
        return self._writer.closing(choice, usage, timings)

    def collect(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        if delta.logprobs is not None:
            self._logprobs = (self._logprobs or []) + self._chat_logprobs(delta.token_ids, delta.logprobs)

    def body(self, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        choice = ChatChoice(
            message=AssistantMessage(content="".join(self._texts)),
            logprobs=None if self._logprobs is None else ChatLogprobs(content=self._logprobs),
            finish_reason=finish,
        )
        head = self._head
        answer = ChatCompletion(id=head.id, created=head.created, model=head.model, choices=[choice], usage=usage)
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
