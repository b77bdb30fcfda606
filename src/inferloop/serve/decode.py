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
    """NaN and Infinity are not JSON, but clients send them; then the error can name the field."""
    try:
        path = _not_finite(json.loads(body), "")
    except (ValueError, RecursionError):
        path = None
    if path:
        return RequestError(f"{path} must be a finite number", param=path)
    return RequestError(f"{what} is not valid JSON: {problem}", code="invalid_json")


def _not_finite(value: Any, path: str) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, dict):
        items: Any = ((f"{path}.{k}" if path else str(k), v) for k, v in value.items())
    elif isinstance(value, list):
        items = ((f"{path}[{i}]", v) for i, v in enumerate(value))
    else:
        return None
    return next((found for where, v in items if (found := _not_finite(v, where))), None)
