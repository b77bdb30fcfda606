"""What an answer tells beside the text: what stopped it and, when asked to, token ids and the prompt's
log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from inferloop.backends.protocols import Delta
from inferloop.core.errors import RequestError
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.serve.replies import PromptLogprob, PromptLogprobs, StopReason
from inferloop.serve.sse import AnswerHead
from inferloop.serve.tokens import public_logprob, public_text

MAX_PROMPT_LOGPROBS = 2_000_000
"""In one answer; it is some hundred megabytes large with so many."""


class Extras:
    """For a whole answer `collect` every delta, then ask per choice; what was not asked for is UNSET. For a stream make
    fields from deltas."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._call = head, head.call
        self._token_ids: list[list[int]] = [[] for _ in head.echoes]
        self._prompts: dict[int, Sequence[int]] = {}
        self._scores: dict[int, Sequence[TokenLogprob]] = {}
        self._rows: dict[int, PromptLogprobs] = {}
        self._num_scores = 0
        self._stop_reasons: list[StopReason] = [None for _ in head.echoes]

    def collect(self, index: int, delta: Delta) -> None:
        """Raises RequestError when more is asked of prompts than one answer can hold."""
        prompt = index // self._call.num_per_prompt
        self.see(index, delta)
        if self._call.return_token_ids:
            self._token_ids[index] += delta.token_ids
        if delta.prompt_token_ids is not None:
            self._prompts[prompt] = delta.prompt_token_ids
        if delta.prompt_logprobs is not None:
            self._count_scores(len(delta.prompt_logprobs))
            self._scores[prompt] = delta.prompt_logprobs

    def see(self, index: int, delta: Delta) -> None:
        """Of a stream, before what is asked of how it ended."""
        if delta.finish_reason is not None:
            self._stop_reasons[index] = delta.stop_reason

    def stop_reason(self, index: int) -> StopReason:
        return self._stop_reasons[index]

    def delta_field(self, delta: Delta) -> bytes:
        """The ids of a chunk of a stream, to put behind another field of its choice; empty when they are not wanted."""
        return b',"token_ids":' + msgspec.json.encode(delta.token_ids) if self._call.return_token_ids else b""

    def prompt_field(self, first: Delta) -> bytes:
        """The prompt's ids from the first delta of a stream's choice, likewise."""
        if not self._call.return_token_ids:
            return b""
        return b',"prompt_token_ids":' + msgspec.json.encode(first.prompt_token_ids)

    def token_ids(self, index: int) -> Sequence[int] | UnsetType:
        return self._token_ids[index] if self._call.return_token_ids else UNSET

    def prompt_token_ids(self, index: int) -> Sequence[int] | UnsetType:
        return self.prompt(index)[0] if self._call.return_token_ids else UNSET

    def prompt_logprobs(self, index: int) -> PromptLogprobs | UnsetType:
        num_top = self._call.num_prompt_logprobs
        if num_top is None:
            return UNSET
        place = index // self._call.num_per_prompt
        if place not in self._rows:
            prompt, scores = self.prompt(index)
            rows = zip(prompt[1:], scores, strict=True)
            self._rows[place] = [None, *(self._row(token_id, score, num_top) for token_id, score in rows)]
        return self._rows[place]

    def prompt(self, index: int) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """The ids of a choice's prompt, and the log-probabilities from the second on if they are known."""
        prompt = index // self._call.num_per_prompt
        return self._prompts.get(prompt, ()), self._scores.get(prompt, ())

    def _count_scores(self, num_tokens: int) -> None:
        call = self._call
        per_token = 1 + (call.sampling.num_prompt_logprobs or 0)
        self._num_scores += num_tokens * per_token * call.num_per_prompt  # every choice repeats them
        if self._num_scores > MAX_PROMPT_LOGPROBS:
            field = "logprobs" if call.num_prompt_logprobs is None else "prompt_logprobs"
            message = f"{field}: an answer holds at most {MAX_PROMPT_LOGPROBS} log-probabilities of prompts"
            raise RequestError(message, param=field)

    def _row(self, token_id: int, score: TokenLogprob, num_top: int) -> dict[str, PromptLogprob]:
        def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
            text = public_text(self._head.token_bytes(token_id))
            return PromptLogprob(logprob=public_logprob(logprob), rank=rank, decoded_token=text)

        assert score.rank is not None, "a prompt's token has a rank"
        row = {str(token_id): entry(token_id, score.chosen, score.rank)}
        for rank, (other, logprob) in enumerate(score.top[:num_top], start=1):
            row.setdefault(str(other), entry(other, logprob, rank))
        return row
