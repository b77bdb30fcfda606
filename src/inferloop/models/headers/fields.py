"""Typed look-ups in metadata that a stranger wrote."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path

from inferloop.core.errors import ModelFileError

_MAX_COUNT = 1 << 32


class Fields:
    """A mapping read key by key; a missing or ill-typed value raises ModelFileError naming the file and the key."""

    def __init__(self, values: Mapping[str, object], file: Path, prefix: str = "", *, below: str = "") -> None:
        """`prefix` is part of every key; `below` is where in the file the mapping stands, for errors alone."""
        self._values, self._file, self._prefix, self._below = values, file, prefix, below

    def fail(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._file}: {self._below}{self._prefix}{key} {problem}")

    def raw(self, key: str) -> object:
        """The value, or None when absent."""
        return self._values.get(self._prefix + key)

    def keys(self) -> set[str]:
        """All there are, without regard to the prefix."""
        return set(self._values)

    def within(self, key: str) -> Fields:
        """The object under a key; an empty one when absent."""
        value = self.raw(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(key, "is not an object")
        return Fields(value, self._file, below=f"{self._below}{self._prefix}{key}.")

    def refuse(self, *keys: str) -> None:
        """Raises for the first of these that is set, to anything but nothing: its meaning is not computed here."""
        for key in keys:
            if self.raw(key):
                raise self.fail(key, f"is {repr(self.raw(key))[:80]}, which is not supported")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^32."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        return self._count(key, value)

    def counts(self, key: str, length: int, default: int | None = None) -> tuple[int, ...]:
        """One number per layer; a scalar holds for all. 0 is allowed in a list (a layer that has none)."""
        value = self.raw(key)
        if not isinstance(value, list):
            return (self.count(key, default),) * length
        if len(value) != length:
            raise self.fail(key, f"has {len(value)} values for {length} layers")
        return tuple(0 if v == 0 and type(v) is int else self._count(key, v) for v in value)

    def same_count(self, key: str, length: int) -> int:
        """Like `counts`, for what must be equal in all layers."""
        values = set(self.counts(key, length))
        if len(values) != 1 or 0 in values:
            raise self.fail(key, "differs between layers, which is not supported")
        return values.pop()

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # whole numbers have no bound in JSON
                if math.isfinite(number := float(value)):
                    return number
        raise self.fail(key, self._wrong(value, "a finite number"))

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.real(key, default)
        if value <= 0:
            raise self.fail(key, f"is {value}, not above 0")
        return value

    def between(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number from `low` to `high`."""
        value = self.real(key, default)
        if not low <= value <= high:
            raise self.fail(key, f"is {value:g}, not from {low:g} to {high:g}")
        return value

    def optional_positive(self, key: str) -> float | None:
        """The same, or None when absent."""
        return None if self.raw(key) is None else self.positive(key)

    def text(self, key: str) -> str | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, self._wrong(value, "text"))
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, self._wrong(value, "true or false"))
        return value

    def token_id(self, key: str) -> int | None:
        """A whole number >= 0, or None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < _MAX_COUNT:
            raise self.fail(key, self._wrong(value, "a token id"))
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids."""
        value = self.raw(key)
        if not isinstance(value, list):
            one = self.token_id(key)
            return () if one is None else (one,)
        if any(type(v) is not int or not 0 <= v < _MAX_COUNT for v in value):
            raise self.fail(key, "is not a list of token ids")
        return tuple(value)

    def _count(self, key: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= _MAX_COUNT:
            raise self.fail(key, self._wrong(value, "a whole number above 0"))
        return value

    @staticmethod
    def _wrong(value: object, wanted: str) -> str:
        return "is missing" if value is None else f"is {repr(value)[:80]}, not {wanted}"
