"""Small conversions from engine values to what the API shows."""

from __future__ import annotations

_LOWEST = -9999.0
"""What OpenAI sends for a log-probability of minus infinity, which JSON cannot hold."""


def public_logprob(value: float) -> float:
    return max(float(value), _LOWEST)


def public_text(token: bytes) -> str:
    """A part of a character shows as U+FFFD; the bytes beside it tell what it is."""
    return token.decode("utf-8", "replace")
