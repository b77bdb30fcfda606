"""Values at which readers of files go wrong."""

from __future__ import annotations

import random
from typing import Any

SIZES = (
    *(0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 48),
    *(1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
TEXTS = ("", "\x00", "a" * 70_000, "\ud800", "\uffff", "\U0010ffff", "token_embd.weight", "../../etc/passwd", "nan")
BYTES = (b"", b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"a" * 70_000, b"token_embd.weight", b"general.alignment")


def size(rng: random.Random, before: int) -> int:
    """Another count, length, offset or type; often one close to what it was."""
    near = (before + 1, before - 1, 2 * before, before // 2, before + 32, before ^ (1 << rng.randrange(64)))
    return rng.choice(near) if rng.random() < 0.4 else rng.choice(SIZES)


def json_value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON holds, and what Python's reader takes beyond it."""
    kind = rng.randrange(12 if depth < 4 else 8)
    if kind < 3:
        return rng.choice((rng.choice(SIZES), -rng.choice(SIZES), 10**30))
    if kind < 5:
        return rng.choice((0.0, -1.5, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")))
    if kind < 6:
        return rng.choice((True, False, None))
    if kind < 8:
        return rng.choice(TEXTS)
    if kind < 10:
        return [json_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS)[:50]: json_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def damaged_json(rng: random.Random, value: Any) -> Any:
    """A copy with one node in it changed, left out or doubled; nodes near the top as likely as deep ones."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        made = dict(value)
        fate = rng.random()
        if fate < 0.1:
            del made[key]
        elif fate < 0.15:
            made[rng.choice(TEXTS)[:50]] = made.pop(key)
        elif fate < 0.2:
            made[key + "x"] = made[key]
        else:
            made[key] = damaged_json(rng, value[key])
        return made
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        fate = rng.random()
        if fate < 0.1:
            return value[:at] + value[at + 1 :]
        if fate < 0.2:
            return value + value[at : at + 1] * rng.choice((1, 2, 300))
        return [*value[:at], damaged_json(rng, value[at]), *value[at + 1 :]]
    if type(value) is int and rng.random() < 0.6:
        return size(rng, value) * rng.choice((1, 1, 1, -1))
    return json_value(rng)


def damaged_bytes(rng: random.Random, data: bytes, most: int) -> bytes:
    """Bits flipped, pieces cut out, put in or doubled, the end cut off; mostly within the first `most` bytes."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        if not made:
            return b""
        at = rng.randrange(min(most, len(made)) if rng.random() < 0.9 else len(made))
        fate = rng.random()
        if fate < 0.6:
            made[at] ^= 1 << rng.randrange(8)
        elif fate < 0.7:
            del made[at : at + rng.choice((1, 4, 8, 64))]
        elif fate < 0.8:
            made[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 8, 64))))
        elif fate < 0.9:
            made[at:at] = made[at : at + rng.choice((8, 64, 1024))]
        else:
            del made[at:]
    return bytes(made)
