"""/v1/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferloop.backends.protocols import Delta
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.serve.replies import Completion, CompletionChoice, CompletionLogprobs, Finish, Timings, Usage
from inferloop.serve.sse import AnswerHead, ChunkWriter, error_event
from inferloop.serve.tokens import public_logprob, public_text

_dumps = msgspec.json.encode


class CompletionEncoder:
    """See serve.sse.Encoder."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._writer = head, ChunkWriter(head, "text_completion")
        self._texts = [[echo] for echo in head.echoes]
        self._text_lengths = [0 for _ in head.echoes]
        self._logprobs: list[CompletionLogprobs | None] = [None for _ in head.echoes]

    def opening(self) -> bytes:
        return b"".join(
            self._writer.choice(_choice(i, echo), Timings(num_tokens=0))
            for i, echo in enumerate(self._head.echoes)
            if echo
        )

    def chunk(self, index: int, delta: Delta) -> bytes:
        if not self._writer.wants(delta):
            return b""
        logprobs = b"null"
        if delta.logprobs is not None:
            logprobs = _dumps(self._completion_logprobs(index, delta.token_ids, delta.logprobs))
        return self._writer.choice(_choice(index, delta.text, logprobs), Timings(num_tokens=len(delta.token_ids)))

    def ended(self, index: int, finish: Finish) -> bytes:
        return self._writer.choice(_finish_choice(index, finish), Timings(num_tokens=0))

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        return self._writer.closing(_finish_choice(index, finish), usage, timings)

    def broken(self, error: BaseException) -> bytes:
        return error_event(error)

    def collect(self, index: int, delta: Delta) -> None:
        self._texts[index].append(delta.text)
        if delta.logprobs is not None:
            rows = self._completion_logprobs(index, delta.token_ids, delta.logprobs)
            kept = self._logprobs[index]
            if kept is None:
                self._logprobs[index] = rows
            else:
                kept.tokens += rows.tokens
                kept.token_logprobs += rows.token_logprobs
                kept.top_logprobs += rows.top_logprobs
                kept.text_offset += rows.text_offset

    def body(self, finishes: Sequence[Finish], usage: Usage, timings: Timings) -> bytes:
        choices = [
            CompletionChoice(index=i, text="".join(texts), logprobs=logprobs, finish_reason=finish)
            for i, (texts, logprobs, finish) in enumerate(zip(self._texts, self._logprobs, finishes, strict=True))
        ]
        head = self._head
        answer = Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
        if head.with_timings:
            answer.inferloop = timings
        return _dumps(answer)

    def _completion_logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
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
            rows.text_offset.append(self._text_lengths[index])
            self._text_lengths[index] += len(text)
        return rows


def _choice(index: int, text: str, logprobs: bytes = b"null") -> bytes:
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (index, _dumps(text), logprobs)


def _finish_choice(index: int, finish: Finish) -> bytes:
    return b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}' % (index, finish.encode())
