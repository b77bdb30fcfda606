"""API keys as people write them: in a variable, with commas between them, or in a file, one on a line."""

from __future__ import annotations

from pathlib import Path

from inferloop.core.errors import UsageError
from inferloop.core.secret import Secret

KEY_VARIABLE = "INFERLOOP_API_KEY"
_MAX_FILE_BYTES = 1 << 16


def keys_in_variable(text: str, name: str) -> tuple[Secret, ...]:
    """At least one; white space around a key does not count. Raises UsageError that tells `name`, and nothing of the
    keys."""
    parts = text.split(",")
    places = [name] if len(parts) == 1 else [f"{name}, key {number}" for number in range(1, len(parts) + 1)]
    return tuple(_checked(part.strip(), place) for part, place in zip(parts, places, strict=True))


def keys_in_file(path: Path) -> tuple[Secret, ...]:
    """At least one. Empty lines and those that begin with # hold none. Raises UsageError that tells file and line, and
    nothing of the keys."""
    try:
        with path.open("rb") as file:  # never to its end: it may have none
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: API keys cannot be read: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path}: API keys take more than {_MAX_FILE_BYTES} bytes")
    lines = [line.strip() for line in data.decode("utf-8", "replace").split("\n")]
    keys = tuple(
        _checked(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line and not line.startswith("#")
    )
    if not keys:
        raise UsageError(f"{path}: holds no API key; it has one on each line")
    return keys


def _checked(text: str, place: str) -> Secret:
    if not text:
        raise UsageError(f"{place}: an API key is empty")
    if not (text.isascii() and text.isprintable()) or " " in text or "," in text:
        raise UsageError(f"{place}: an API key is printable ASCII without spaces and commas")
    return Secret(text)
