"""Log-probabilities as /v1/completions shows them: columns, with the place of every token in the text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from inferloop.engine.schedule.step import TokenLogprob
from inferloop.serve.replies import CompletionLogprobs
from inferloop.serve.tokens import public_logprob, public_text


class LogprobColumns:
    """Of one choice, token by token. `num_top` bounds what is shown beside each token."""

    def __init__(self, token_bytes: Callable[[int], bytes], num_top: int) -> None:
        self._token_bytes, self._num_top = token_bytes, num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, text: str, token_ids: Sequence[int], scores: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Of an echoed prompt, before anything else; `scores` begin with the second token.

        Offsets count from the end of `text`, because tokenizers put before a text what it does not show.
        """
        spelt = b"".join(map(self._token_bytes, token_ids)).decode("utf-8", "replace")
        self._offset = len(text) - len(spelt)
        return self.output(token_ids, (None, *scores))

    def output(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, row in zip(token_ids, logprobs, strict=True):
            token = self._token_bytes(token_id)
            columns.tokens.append(public_text(token))
            columns.token_logprobs.append(None if row is None else public_logprob(row.chosen))
            columns.top_logprobs.append(None if row is None else self._top(token_id, row))
            columns.text_offset.append(max(0, self._offset))
            self._offset += len(self._decoder.decode(token))
        return columns

    def _top(self, token_id: int, row: TokenLogprob) -> dict[str, float]:
        """The token itself is always there; of several that read the same, the likeliest counts."""
        by_text = {public_text(self._token_bytes(token_id)): row.chosen}
        for other, value in row.top[: self._num_top]:
            name = public_text(self._token_bytes(other))
            by_text[name] = max(value, by_text.get(name, value))
        return {name: public_logprob(value) for name, value in by_text.items()}
