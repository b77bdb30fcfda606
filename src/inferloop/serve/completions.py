"""/v1/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferloop.backends.protocols import Delta
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.serve.columns import LogprobColumns
from inferloop.serve.extras import Extras
from inferloop.serve.replies import Completion, CompletionChoice, CompletionLogprobs, Finish, Timings, Usage
from inferloop.serve.sse import AnswerHead, ChunkWriter, TextFrame, error_event

_dumps = msgspec.json.encode


class CompletionEncoder:
    """See serve.sse.Encoder."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._writer, self._extras = head, ChunkWriter(head, "text_completion"), Extras(head)
        self._columns = [LogprobColumns(head.token_bytes, head.call.sampling.num_logprobs or 0) for _ in head.echoes]
        self._opened: set[int] = set()
        self._texts = [[echo] for echo in head.echoes]
        self._tokens: list[list[tuple[int, TokenLogprob]]] = [[] for _ in head.echoes]
        self._frames = [self._frame(index) for index in range(len(head.echoes))]

    def opening(self, first: Delta) -> bytes:
        """Nothing: each choice has its own beginning."""
        return b""

    def chunk(self, index: int, delta: Delta) -> bytes:
        frame = self._frames[index] if index in self._opened else None
        if frame is not None and delta.text and delta.logprobs is None and delta.finish_reason is None:
            return frame.chunk(delta.text, len(delta.token_ids))
        self._extras.see(index, delta)
        opening = b"" if index in self._opened else self._prompt_chunk(index, delta)
        if not self._writer.wants(delta):
            return opening
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._columns[index].output(delta.token_ids, delta.logprobs)
        choice = _choice(index, delta.text, logprobs, self._extras.delta_field(delta))
        return opening + self._writer.choice(choice, Timings(num_tokens=len(delta.token_ids)))

    def ended(self, index: int, finish: Finish) -> bytes:
        return self._writer.choice(self._finish_choice(index, finish), Timings(num_tokens=0))

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        return self._writer.closing(self._finish_choice(index, finish), usage, timings)

    def broken(self, error: BaseException) -> bytes:
        return error_event(error)

    def collect(self, index: int, delta: Delta) -> None:
        self._extras.collect(index, delta)
        self._texts[index].append(delta.text)
        if delta.logprobs is not None:
            self._tokens[index] += zip(delta.token_ids, delta.logprobs, strict=True)

    def body(self, finishes: Sequence[Finish], usage: Usage, timings: Timings) -> bytes:
        head, extras = self._head, self._extras
        choices = [
            CompletionChoice(
                index=i,
                text="".join(self._texts[i]),
                logprobs=self._whole_logprobs(i),
                finish_reason=finish,
                stop_reason=extras.stop_reason(i),
                token_ids=extras.token_ids(i),
                prompt_token_ids=extras.prompt_token_ids(i),
                prompt_logprobs=extras.prompt_logprobs(i),
            )
            for i, finish in enumerate(finishes)
        ]
        answer = Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
        if head.with_timings:
            answer.inferloop = timings
        return _dumps(answer)

    def _prompt_chunk(self, index: int, delta: Delta) -> bytes:
        """What is told of the prompt, before the choice's first token."""
        self._opened.add(index)
        call, echo = self._head.call, self._head.echoes[index]
        if not (echo or call.return_token_ids):
            return b""
        prompt = delta.prompt_token_ids or ()
        logprobs = None
        if call.echo_logprobs:
            logprobs = self._columns[index].prompt(echo, prompt, delta.prompt_logprobs or ())
        choice = _choice(index, echo, logprobs, self._extras.prompt_field(delta))
        return self._writer.choice(choice, Timings(num_tokens=0))

    def _frame(self, index: int) -> TextFrame | None:
        """None: chunks have ids as well."""
        if self._head.call.return_token_ids:
            return None
        return self._writer.frame(b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}')

    def _finish_choice(self, index: int, finish: Finish) -> bytes:
        told = finish.encode(), _dumps(self._extras.stop_reason(index))
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b","stop_reason":%b}' % (index, *told)

    def _whole_logprobs(self, index: int) -> CompletionLogprobs | None:
        ids, rows = [token_id for token_id, _ in self._tokens[index]], [row for _, row in self._tokens[index]]
        columns = self._columns[index]
        if not self._head.call.echo_logprobs:
            return columns.output(ids, rows) if rows else None
        told = columns.prompt(self._head.echoes[index], *self._extras.prompt(index))
        output = columns.output(ids, rows)
        return CompletionLogprobs(
            tokens=told.tokens + output.tokens,
            token_logprobs=told.token_logprobs + output.token_logprobs,
            top_logprobs=told.top_logprobs + output.top_logprobs,
            text_offset=told.text_offset + output.text_offset,
        )


def _choice(index: int, text: str, logprobs: CompletionLogprobs | None, ids: bytes) -> bytes:
    shown = (index, _dumps(text), _dumps(logprobs), ids)
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}' % shown
