"""/v1/chat/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import structs

from inferloop.backends.protocols import Delta
from inferloop.serve.extras import Extras
from inferloop.serve.replies import (
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    CompletionTokensDetails,
    Finish,
    Timings,
    Usage,
)
from inferloop.serve.sse import AnswerHead, ChunkWriter, TextFrame, error_event
from inferloop.serve.tokens import chat_logprobs
from inferloop.serve.tool_calls import ChoiceReader

_dumps = msgspec.json.encode


class ChatEncoder:
    """See serve.sse.Encoder."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._writer, self._extras = head, ChunkWriter(head, "chat.completion.chunk"), Extras(head)
        self._readers = [ChoiceReader(head.call.answer) for _ in head.echoes]
        self._logprobs: list[list[ChatLogprob] | None] = [None for _ in head.echoes]
        self._frames = [self._frame(index) for index in range(len(head.echoes))]

    def opening(self, first: Delta) -> bytes:
        role = b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null'
        choices = (b'{"index":%d,%b}' % (i, role) for i in range(len(self._readers)))
        told = self._extras.prompt_field(first)
        return b"".join(self._writer.choice(choice, Timings(num_tokens=0), told) for choice in choices)

    def chunk(self, index: int, delta: Delta) -> bytes:
        frame = self._frames[index]
        if frame is not None and delta.text and delta.logprobs is None and delta.finish_reason is None:
            return frame.chunk(delta.text, len(delta.token_ids))
        reader = self._readers[index]
        self._extras.see(index, delta)
        shown = [piece for parts in reader.read(delta) for piece in reader.show(parts)]
        if not shown and not self._writer.wants_tokens(delta):
            return b""
        logprobs = b"null"
        if delta.logprobs is not None:
            rows = chat_logprobs(self._head.token_bytes, delta.token_ids, delta.logprobs)
            logprobs = _dumps(ChatLogprobs(content=rows))
        # the first piece has what belongs to the delta's tokens
        head = b'{"index":%d,"delta":%%b,"logprobs":%%b,"finish_reason":null%%b}' % index
        token_ids, num_tokens, chunks = self._extras.delta_field(delta), len(delta.token_ids), []
        for piece in shown or [b'{"content":""}']:
            choice = head % (piece, logprobs, token_ids)
            chunks.append(self._writer.choice(choice, Timings(num_tokens=num_tokens)))
            logprobs, token_ids, num_tokens = b"null", b"", 0
        return b"".join(chunks)

    def ended(self, index: int, finish: Finish) -> bytes:
        return self._writer.choice(self._finish_choice(index, finish), Timings(num_tokens=0))

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        return self._writer.closing(self._finish_choice(index, finish), self._detailed(usage), timings)

    def broken(self, error: BaseException) -> bytes:
        return error_event(error)

    def collect(self, index: int, delta: Delta) -> None:
        self._extras.collect(index, delta)
        self._readers[index].read(delta)
        if delta.logprobs is not None:
            rows = chat_logprobs(self._head.token_bytes, delta.token_ids, delta.logprobs)
            self._logprobs[index] = (self._logprobs[index] or []) + rows

    def body(self, finishes: Sequence[Finish], usage: Usage, timings: Timings) -> bytes:
        choices = [
            ChatChoice(
                index=i,
                message=reader.message(),
                logprobs=None if logprobs is None else ChatLogprobs(content=logprobs),
                finish_reason=reader.finish(finish),
                stop_reason=self._extras.stop_reason(i),
                token_ids=self._extras.token_ids(i),
            )
            for i, (reader, logprobs, finish) in enumerate(zip(self._readers, self._logprobs, finishes, strict=True))
        ]
        head = self._head
        answer = ChatCompletion(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=self._detailed(usage)
        )
        answer.prompt_token_ids = self._extras.prompt_token_ids(0)
        answer.prompt_logprobs = self._extras.prompt_logprobs(0)
        if head.with_timings:
            answer.inferloop = timings
        return _dumps(answer)

    def _detailed(self, usage: Usage) -> Usage:
        num = sum(reader.num_reasoning_tokens for reader in self._readers)
        return structs.replace(usage, completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num))

    def _frame(self, index: int) -> TextFrame | None:
        """None: what a delta shows must be found out one by one."""
        call = self._head.call
        if call.answer.has_parts or call.return_token_ids:
            return None
        before = b'{"index":%d,"delta":{"content":' % index
        return self._writer.frame(before, b'},"logprobs":null,"finish_reason":null}')

    def _finish_choice(self, index: int, finish: Finish) -> bytes:
        told = self._readers[index].finish(finish).encode(), _dumps(self._extras.stop_reason(index))
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}' % (index, *told)
