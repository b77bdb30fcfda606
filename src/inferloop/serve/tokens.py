"""Small conversions from engine values to what the API shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferloop.engine.schedule.step import TokenLogprob
from inferloop.serve.replies import ChatLogprob, TopLogprob

_LOWEST = -9999.0
"""What OpenAI sends for a log-probability of minus infinity, which JSON cannot hold."""


def public_logprob(value: float) -> float:
    return max(float(value), _LOWEST)


def public_text(token: bytes) -> str:
    """A part of a character shows as U+FFFD; the bytes beside it tell what it is."""
    return token.decode("utf-8", "replace")


def chat_logprobs(
    token_bytes: Callable[[int], bytes], token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[ChatLogprob]:
    """One row per token; `token_bytes` tells what a token stands for."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        token = token_bytes(token_id)
        return TopLogprob(token=public_text(token), logprob=public_logprob(logprob), bytes=list(token))

    rows = []
    for token_id, row in zip(token_ids, logprobs, strict=True):
        token = token_bytes(token_id)
        rows.append(
            ChatLogprob(
                token=public_text(token),
                logprob=public_logprob(row.chosen),
                bytes=list(token),
                top_logprobs=[top(other, value) for other, value in row.top],
            )
        )
    return rows
