"""Fields that are known and not supported: accepted only with a value that asks for nothing."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from inferloop.core.errors import RequestError

NoOp = Annotated[Any, Meta(description="Accepted only with the value that asks for nothing.")]

ReadByClient = Annotated[Any, Meta(description="Accepted: what the openai package read into our own answer.")]
"""Its helpers leave that in the messages that they give, which conversations send back."""


def check_no_op(value: Any, accepted: tuple[Any, ...], field: str) -> None:
    """Raises RequestError for any value that is neither null nor among `accepted`."""
    if value is None or any(value == a and type(value) is type(a) for a in accepted):
        return
    raise RequestError(f"{field} is not supported by this server", param=field, code="unsupported_parameter")
