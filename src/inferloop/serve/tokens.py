"""Small conversions from engine values to what the API shows."""

from __future__ import annotations

_LOWEST = -9999.0
"""What OpenAI sends for a log-probability of minus infinity, which JSON cannot hold."""


def public_logprob(value: float) -> float:
    return max(float(value), _LOWEST)


def token_bytes(text: str) -> list[int] | None:
    """None for a token that is a part of a character only."""
    return None if "�" in text else list(text.encode())
