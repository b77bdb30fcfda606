"""Whether a server lets us in, found out before anything is asked of it in earnest."""

from __future__ import annotations

import asyncio

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient, HttpError
from inferloop.core.errors import EnvironmentLacksError

_TIMEOUT_S = 10.0
_NO_REQUEST = b'{"messages":0}'
"""Refused by all: one server takes an object without messages for an empty conversation, and answers it at length."""


async def check_entry(client: HttpClient, path: str = "/v1/chat/completions") -> None:
    """Raises EnvironmentLacksError for a server that wants another key, or any; and for one that cannot be reached.

    What is sent is no request: who may ask hears that, who may not, hears that first. Lists of models are
    often open to all, so they cannot tell. Any other answer is left to whoever asks in earnest.
    """
    headers = [("content-type", "application/json")]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            response = await client.request("POST", path, headers=headers, body=_NO_REQUEST)
            await response.read()
    except TimeoutError:
        return
    except HttpError as error:
        if error.kind != "connect":
            return
        raise unusable(client.endpoint, error) from error
    client.endpoint.check_entry(response.status)


def unusable(endpoint: Endpoint, error: HttpError) -> EnvironmentLacksError:
    """What a first question that went wrong means to the user."""
    try:
        endpoint.check_entry(error.status or 0)
    except EnvironmentLacksError as refusal:
        return refusal
    if error.is_distrust:
        return EnvironmentLacksError(str(error), fix="Name its authority with --ca-file, or take it with --insecure.")
    return EnvironmentLacksError(
        f"{endpoint.bare} does not answer like an OpenAI API: {error}", fix="Start it, or check the URL."
    )
