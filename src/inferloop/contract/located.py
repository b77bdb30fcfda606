"""A value that knows where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferloop.core.errors import ContractError

Scalar = None | bool | int | float | str
MAX_DEPTH = 50


@dataclass(frozen=True, slots=True)
class Located:
    """A value and where it stands. `path` is the user's own key path; `line` counts from 1, None when unknown."""

    value: Scalar | dict[str, Located] | list[Located]
    line: int | None
    path: str

    def moved(self, value: Scalar | dict[str, Located] | list[Located]) -> Located:
        """The same place with another value."""
        return Located(value, self.line, self.path)


def locate(value: object, path: str = "", lines: Mapping[str, int] | None = None, depth: int = 0) -> Located:
    """Wrap plain values. A line not known for a key is the line of its nearest known parent.

    Raises ContractError for kinds of value that no contract has (dates, objects).
    """
    line = _line_of(path, lines) if lines else None
    if depth > MAX_DEPTH:
        raise ContractError("is nested too deeply", line=line, key=path)
    if not is_sound_text(value):
        raise ContractError("holds half of a surrogate pair, which is no text", line=line, key=path or None)
    if isinstance(value, Mapping):
        bad = next((k for k in value if not isinstance(k, str) or not is_sound_text(k)), None)
        if bad is not None:
            raise ContractError(f"keys must be words, not {bad!r}", line=line, key=path or None)
        return Located({k: locate(v, join(path, k), lines, depth + 1) for k, v in value.items()}, line, path)
    if isinstance(value, list | tuple):
        return Located([locate(v, f"{path}[{i}]", lines, depth + 1) for i, v in enumerate(value)], line, path)
    if value is None or isinstance(value, bool | int | float | str):
        return Located(value, line, path)
    raise ContractError(f"a {type(value).__name__} has no meaning here", line=line, key=path or None)


def is_sound_text(value: object) -> bool:
    """Whether text, if it is text, can be written down again: no lone surrogates, which escapes can smuggle in."""
    return not isinstance(value, str) or not any("\ud800" <= c <= "\udfff" for c in value)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def kind_of(node: Located) -> str:
    """The value in words a person would use."""
    value = node.value
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"the text {shown}" if isinstance(value, str) else shown


def _line_of(path: str, lines: Mapping[str, int]) -> int | None:
    while path and path not in lines:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return lines.get(path)
