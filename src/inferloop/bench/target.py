"""What a URL says of itself before load is put on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.entry import check_entry, unusable
from inferloop.backends.http import HttpClient, HttpError
from inferloop.core.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """`context_length` and `identity` are None where the server does not tell."""

    endpoint: Endpoint
    model: str
    context_length: int | None
    identity: dict[str, Any] | None
    owner: str | None = None
    """What the server says of whose the model is: engines put their own name there."""

    @property
    def url(self) -> str:
        return self.endpoint.url


@dataclass(frozen=True, slots=True)
class Launched:
    """What whoever launched a target knows of it, for what the target itself does not tell.

    `exact_length` are the fields of a body that make its answer as long as `max_tokens` says. `told` is for the run
    folder: engine, version, argv and env.
    """

    identity: dict[str, Any] | None = None
    context_length: int | None = None
    exact_length: Mapping[str, Any] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)


async def describe_target(
    client: HttpClient, *, model: str | None = None, launched: Launched | None = None
) -> TargetInfo:
    """Ask /v1/models (and /identity), and whether we may ask for answers; `launched` fills in what is not told. Raises
    EnvironmentLacksError when nothing usable answers or a key is wanted that we have not, UsageError when the server
    has several models or not the one asked for."""
    try:
        listed = (await client.get_json("/v1/models"))["data"]
        names = [entry["id"] for entry in listed]
    except HttpError as error:
        raise unusable(client.endpoint, error) from error
    except (KeyError, TypeError) as error:
        raise unusable(client.endpoint, HttpError("protocol", "/v1/models holds no list of models")) from error
    await check_entry(client)
    if model is None and len(names) == 1:
        model = names[0]
    if model is None or model not in names:
        close = nearest(model, names) if model else None
        hint = f"did you mean {close}?" if close else f"it has: {', '.join(names) or 'none'}"
        raise UsageError(
            f"{client.base_url}: " + (f"no model {model!r} ({hint})" if model else f"name a model ({hint})")
        )
    known = launched or Launched()
    told = listed[names.index(model)]
    length, owner = told.get("max_model_len"), told.get("owned_by")
    return TargetInfo(
        client.endpoint,
        model,
        length if isinstance(length, int) else known.context_length,
        await _identity(client) or known.identity,
        owner if isinstance(owner, str) else None,
    )


async def _identity(client: HttpClient) -> dict[str, Any] | None:
    try:
        found = await client.get_json("/identity")
    except (HttpError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("digest"), str) else None
