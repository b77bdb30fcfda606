"""Cursors of lists, as OpenAI's clients use them."""

from __future__ import annotations

from typing import Protocol, TypedDict, TypeVar

from inferloop.core.errors import RequestError


class Named(Protocol):
    id: str


T = TypeVar("T", bound=Named)


class Page(TypedDict):
    first_id: str | None
    last_id: str | None
    has_more: bool


def limit_of(text: str | None, default: int, most: int) -> int:
    """Raises RequestError."""
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
        raise RequestError(f"limit must be 1 to {most}", param="limit")
    return int(text)


def page_of(found: list[T], limit: int) -> tuple[list[T], Page]:
    """The first `limit` of what was found with a limit of one more."""
    data = found[:limit]
    page = Page(
        first_id=data[0].id if data else None, last_id=data[-1].id if data else None, has_more=len(found) > limit
    )
    return data, page
