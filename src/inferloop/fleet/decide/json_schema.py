"""Does a JSON value satisfy a schema that a stranger sent? Nothing is fetched for it, and the work has a bound.

Checked with jsonschema, whose keywords are counted: schemas of a few lines can demand more steps than there is time
for. Patterns are matched by RE2 (through pyarrow), which takes time linear in the text whatever the pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

    Check = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]

MAX_SCHEMA_CHARS = 65536
MAX_STEPS = 30_000
"""Of the keywords that are looked at, each with as many as it or the value has parts. At the bound they take one or two
tenths of a second of a core (Zen 5, busy); what people send takes some dozens."""
_UNCHECKED = ("patternProperties", "unevaluatedItems", "unevaluatedProperties")
"""The library matches names with `re` for these, which a pattern can hold up for ever."""
_left: ContextVar[int] = ContextVar("_left")


class _UnknownError(Exception):
    """Whether the value satisfies the schema cannot be told."""


def fits(value: Any, schema: str) -> bool:
    """False only where it is known that `value` does not satisfy `schema`, a JSON text. Everything fits what says
    nothing: a text that is no schema, one that refers to what is elsewhere, is beyond the bounds or uses what is not
    checked."""
    try:
        validator = _validator(schema)
        _left.set(MAX_STEPS)
        return validator is None or validator.is_valid(value)
    except Exception:  # jsonschema promises no type for what goes wrong in a schema (RecursionError, TypeError, ...)
        return True


@functools.lru_cache(maxsize=64)
def _validator(schema: str) -> Validator | None:
    """None where the schema is refused. Takes some milliseconds, microseconds when it is known."""
    from jsonschema_specifications import REGISTRY  # what is not in it is an error and is never fetched

    if len(schema) > MAX_SCHEMA_CHARS:
        return None
    try:
        told = msgspec.json.decode(schema)
        kind = _kind(told.get("$schema") if isinstance(told, dict) else None)
        _left.set(MAX_STEPS)
        if not kind(kind.META_SCHEMA, registry=REGISTRY).is_valid(told):
            return None
        return kind(told, registry=REGISTRY)
    except Exception:  # as above
        return None


@functools.cache
def _kind(dialect: str | None) -> type[Validator]:
    """The validator of a draft, 2020-12 where none is told. Of the URIs only the known ones are remembered."""
    from jsonschema import validators

    base: Any = validators.Draft202012Validator
    if dialect is not None:
        base = validators.validator_for({"$schema": dialect}, default=None)  # type: ignore[arg-type]
    if base is None:
        raise _UnknownError("no known draft")
    checks: dict[str, Check] = {name: _counted(check) for name, check in base.VALIDATORS.items()}
    checks |= dict.fromkeys(_UNCHECKED, _unknown) | {"pattern": _counted(_pattern)}
    kind: type[Validator] = validators.extend(base, checks)  # type: ignore[no-untyped-call]
    return kind


def _counted(check: Check) -> Check:
    def counted(validator: Any, told: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
        num_parts = len(instance) if isinstance(instance, list | dict) else 0
        num_steps = 1 + (len(told) if isinstance(told, list | dict) else 0) + num_parts
        if told is True and schema.get("uniqueItems") is told:  # each is compared with each
            num_steps += num_parts * num_parts
        left = _left.get() - num_steps
        if left < 0:
            raise _UnknownError("too many steps")
        _left.set(left)
        return check(validator, told, instance, schema)

    return counted


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterable[ValidationError]:
    import pyarrow.compute
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not pyarrow.compute.match_substring_regex(instance, pattern).as_py():
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _unknown(validator: Any, told: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
    raise _UnknownError("a keyword that is not checked")
