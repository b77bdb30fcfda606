"""A small typed reader over located values. It collects every problem of a file instead of stopping at the first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from inferloop.contract.located import Located, kind_of
from inferloop.core.errors import ContractError, ContractProblemsError, nearest

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)")
_NUMBER_LIKE = re.compile(r"([-+]?\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(%|[A-Za-z/]*)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Problems:
    """The problems found so far in one file. Mutated by every reader that is handed it."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._found: list[ContractError] = []

    def add(self, node: Located, problem: str, hint: str | None = None, *, key: str | None = None) -> None:
        where = (f"{node.path}.{key}" if node.path else key) if key else node.path
        self._found.append(ContractError(problem, file=self._file, line=node.line, key=where or None, hint=hint))

    def raise_if_any(self) -> None:
        """Raises the one ContractError, or all of them together in the order of their lines."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ContractProblemsError(tuple(sorted(self._found, key=lambda e: e.line or 0)))


class Section:
    """One mapping of the file. A key outside `valid` is a problem at once; readers answer None for absent or bad."""

    def __init__(
        self, node: Located, problems: Problems, valid: Sequence[str], elsewhere: Mapping[str, str] | None = None
    ) -> None:
        """`elsewhere` tells, of keys that do exist, where they belong."""
        self.node, self.problems = node, problems
        self._children: dict[str, Located] = {}
        if not isinstance(node.value, dict):
            problems.add(node, f"must be a mapping of keys to values, not {kind_of(node)}")
            return
        for key, child in node.value.items():
            if key in valid:
                self._children[key] = child
            else:
                place = (elsewhere or {}).get(key)
                hint = f"it belongs under {place}" if place else did_you_mean(key, valid)
                problems.add(child, "is not a known key here" if place else "is not a known key", hint)

    def get(self, key: str, *, required: bool = False) -> Located | None:
        """The value under `key`. An explicit nothing (null) counts as absent."""
        child = self._children.get(key)
        if child is not None and child.value is not None:
            return child
        if required and isinstance(self.node.value, dict):
            self.problems.add(child or self.node, "is required", key=None if child else key)
        return None

    def section(self, key: str, valid: Sequence[str], *, required: bool = False) -> Section | None:
        child = self.get(key, required=required)
        return Section(child, self.problems, valid) if child else None

    def text(self, key: str, *, choices: Iterable[str] = (), required: bool = False) -> str | None:
        child = self.get(key, required=required)
        return as_text(child, self.problems, choices) if child else None

    def number(self, key: str, *, low: float = 0.0, high: float = 1e9, above: bool = False) -> float | None:
        """A finite number from `low` to `high`; `above`: strictly more than `low`."""
        child = self.get(key)
        return as_number(child, self.problems, low=low, high=high, above=above) if child else None

    def seconds(self, key: str) -> float | None:
        """A duration like 28d, 60s, 500ms; a bare number is seconds."""
        child = self.get(key)
        return as_seconds(child, self.problems) if child else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The nearest valid name, or all of them when none is near."""
    names = list(valid)
    close = nearest(name, names) or nearest(name.lower().replace("-", "_"), names)
    return f"did you mean {close}?" if close else f"valid: {', '.join(names)}"


def as_number(
    node: Located, problems: Problems, *, low: float = 0.0, high: float = 1e9, above: bool = False
) -> float | None:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        problems.add(node, f"must be a number, not {kind_of(node)}", _number_hint(value))
        return None
    if isinstance(value, float) and not math.isfinite(value):
        problems.add(node, f"must be a finite number, not {value}")
        return None
    if value < low or (above and value <= low):
        word = "more than" if above else "at least"
        problems.add(node, f"must be {word} {low:g}, not {_shown(value)}")
        return None
    if value > high:
        problems.add(node, f"must be at most {high:g}, not {_shown(value)}")
        return None
    return float(value) + 0.0  # turns -0.0 into 0.0: one meaning, one digest


def _number_hint(value: object) -> str | None:
    """How to write what was probably meant."""
    found = _NUMBER_LIKE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return None
    number, unit = found[1].replace("_", ""), found[2]
    if unit == "%":
        return f"write {float(number) / 100:g}"
    if unit:
        return f"write {number}; the unit belongs to the key"
    return f"write {number}, without quotes"


def as_text(node: Located, problems: Problems, choices: Iterable[str] = ()) -> str | None:
    if not isinstance(node.value, str) or not node.value.strip():
        problems.add(node, f"must be a word, not {kind_of(node)}")
        return None
    if not node.value.isprintable():
        problems.add(node, f"must be printable on one line, not {kind_of(node)}")
        return None
    names = list(choices)
    if names and node.value not in names:
        close = nearest(node.value.lower(), names)
        hint = f"did you mean {close}? " if close else ""
        problems.add(node, f"{node.value!r} is not known", f"{hint}valid: {', '.join(names)}")
        return None
    return node.value


def as_seconds(node: Located, problems: Problems) -> float | None:
    if isinstance(node.value, str):
        found = _DURATION.fullmatch(node.value.strip())
        if not found:
            problems.add(node, f"must be a duration like 28d, 12h, 60s or 500ms, not {kind_of(node)}")
            return None
        node = node.moved(float(found[1]) * _UNIT_S[found[2]])
    return as_number(node, problems, above=True, high=1e10)


def _shown(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e300 else "a huge number"
