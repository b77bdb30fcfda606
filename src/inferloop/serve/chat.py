"""/v1/chat/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from inferloop.serve.sse import ChunkWriter
from inferloop.serve.tokens import public_logprob, public_text

_dumps = msgspec.json.encode


class ChatEncoder:
    """See serve.sse.Encoder. `token_bytes` tells what one token stands for, for log-probabilities."""

    def __init__(
        self,
        *,
        id_: str,
        created: int,
        model: str,
        include_usage: bool,
        with_timings: bool,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._writer = ChunkWriter(
            id_=id_,
            object_="chat.completion.chunk",
            created=created,
            model=model,
            include_usage=include_usage,
            with_timings=with_timings,
        )
        self._id, self._created, self._model, self._with_timings = id_, created, model, with_timings
        self._token_bytes = token_bytes
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
        answer = ChatCompletion(id=self._id, created=self._created, model=self._model, choices=[choice], usage=usage)
        if self._with_timings:
            answer.inferloop = timings
        return _dumps(answer)

    def _chat_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[ChatLogprob]:
        rows = []
        for token_id, row in zip(token_ids, logprobs, strict=True):
            token = self._token_bytes(token_id)
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
        token = self._token_bytes(token_id)
        return TopLogprob(token=public_text(token), logprob=public_logprob(logprob), bytes=list(token))
