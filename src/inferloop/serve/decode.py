"""JSON bytes to a typed request, every failure as a RequestError that names the field."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from inferloop.core.errors import RequestError, nearest

T = TypeVar("T", bound=msgspec.Struct)
P = ParamSpec("P")
R = TypeVar("R")

_AT = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`\$(?:\.(?P<path>.+))?`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*)`")
_MISSING = re.compile(r"missing required field `(?P<name>.*)`")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_TEXT = re.compile(r"^(messages|input)\[\d+\]\.(content|output)\[\d+\]")

_THREAD_ABOVE_BYTES = 65536
"""Shorter bodies are checked within a millisecond or two."""


async def beside_loop(read: Callable[Concatenate[bytes, P], R], body: bytes, *args: P.args, **kwargs: P.kwargs) -> R:
    """`read(body, ...)`, in a thread when the body is so large that reading it would hold up other requests."""
    if len(body) > _THREAD_ABOVE_BYTES:
        return await asyncio.to_thread(read, body, *args, **kwargs)
    return read(body, *args, **kwargs)


def decode_body(body: bytes, type_: type[T], *, what: str = "The body") -> T:
    """Raises RequestError; `what` is what it calls the whole."""
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise _explain(str(error), type_) from None
    except msgspec.DecodeError as error:
        raise _not_json(body, str(error), what) from None
    except RecursionError:
        raise RequestError(f"{what} is nested too deeply", code="invalid_json") from None


def _explain(text: str, type_: type[msgspec.Struct]) -> RequestError:
    found = _AT.match(text)
    assert found is not None
    problem, path = found["problem"], found["path"]
    if path and _NOT_TEXT.match(path):
        message = f"{path}: only text content parts are supported by this model ({problem})"
        return RequestError(message, param=path, code="unsupported_content")
    if unknown := _UNKNOWN.search(problem):
        param = f"{path}.{unknown['name']}" if path else unknown["name"]
        close = nearest(unknown["name"], type_.__struct_fields__) if not path else None
        hint = f"; did you mean {close}?" if close else ""
        return RequestError(f"{param} is not supported by this server{hint}", param=param, code="unknown_parameter")
    if missing := _MISSING.search(problem):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    return RequestError(f"{path or 'body'}: {problem}", param=path)


def _not_json(body: bytes, problem: str, what: str) -> RequestError:
    """NaN, Infinity and halves of characters are not JSON, but clients send them; then the error can name the field."""
    try:
        unfit = _unfit(json.loads(body), "")
    except (ValueError, RecursionError):
        unfit = None
    if unfit is None:
        return RequestError(f"{what} is not valid JSON: {problem}", code="invalid_json")
    path, why = unfit
    return RequestError(f"{path or what} {why}", param=path or None)


def _unfit(value: Any, path: str) -> tuple[str, str] | None:
    """The place of the first value that JSON cannot hold, and what is wrong with it."""
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, "must be a finite number")
    if isinstance(value, str):
        return (path, "holds a lone surrogate, which is not valid Unicode") if _SURROGATE.search(value) else None
    if isinstance(value, dict):
        items: Any = ((f"{path}.{k}" if path else k, v) for k, v in value.items())
        if any(map(_SURROGATE.search, value)):
            return path, "has a name with a lone surrogate, which is not valid Unicode"
    elif isinstance(value, list):
        items = ((f"{path}[{i}]", v) for i, v in enumerate(value))
    else:
        return None
    return next((found for where, v in items if (found := _unfit(v, where))), None)
