"""/v1/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferloop.backends.protocols import Delta
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.serve.replies import Completion, CompletionChoice, CompletionLogprobs, Finish, Timings, Usage
from inferloop.serve.sse import AnswerHead, ChunkWriter
from inferloop.serve.tokens import public_logprob, public_text

_dumps = msgspec.json.encode


class CompletionEncoder:
    """See serve.sse.Encoder."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._writer = head, ChunkWriter(head, "text_completion")
        self._texts: list[str] = []
        self._text_length = 0
        self._logprobs: CompletionLogprobs | None = None

    def opening(self) -> bytes:
        return b""

    def chunk(self, delta: Delta) -> bytes:
        if not self._writer.wants(delta):
            return b""
        logprobs = b"null"
        if delta.logprobs is not None:
            logprobs = _dumps(self._completion_logprobs(delta.token_ids, delta.logprobs))
        choice = b'{"index":0,"text":%b,"logprobs":%b,"finish_reason":null}' % (_dumps(delta.text), logprobs)
        return self._writer.choice(choice, Timings(num_tokens=len(delta.token_ids)))

    def closing(self, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        choice = b'{"index":0,"text":"","logprobs":null,"finish_reason":"%b"}' % finish.encode()
        return self._writer.closing(choice, usage, timings)

    def collect(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        if delta.logprobs is not None:
            rows = self._completion_logprobs(delta.token_ids, delta.logprobs)
            if self._logprobs is None:
                self._logprobs = rows
            else:
                self._logprobs.tokens += rows.tokens
                self._logprobs.token_logprobs += rows.token_logprobs
                self._logprobs.top_logprobs += rows.top_logprobs
                self._logprobs.text_offset += rows.text_offset

    def body(self, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        choice = CompletionChoice(text="".join(self._texts), logprobs=self._logprobs, finish_reason=finish)
        head = self._head
        answer = Completion(id=head.id, created=head.created, model=head.model, choices=[choice], usage=usage)
        if head.with_timings:
            answer.inferloop = timings
        return _dumps(answer)

    def _completion_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs:
        rows = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, row in zip(token_ids, logprobs, strict=True):
            text = public_text(self._head.token_bytes(token_id))
            rows.tokens.append(text)
            rows.token_logprobs.append(public_logprob(row.chosen))
            # The chosen token is always there; of several that read the same, the likeliest counts.
            by_text = {text: row.chosen}
            for other, value in row.top:
                name = public_text(self._head.token_bytes(other))
                by_text[name] = max(value, by_text.get(name, value))
            rows.top_logprobs.append({name: public_logprob(value) for name, value in by_text.items()})
            rows.text_offset.append(self._text_length)
            self._text_length += len(text)
        return rows
