"""Gather over HTTP what scoring one case needs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from inferloop.backends.http import HttpClient, HttpError
from inferloop.evals.reply import read_stream, read_whole
from inferloop.evals.scorer import Observation, Reply, needs
from inferloop.evals.suite import Case

_JSON = (("content-type", "application/json"),)


class CaseSkippedError(Exception):
    """The target has no way to answer this kind of case; the text says what is absent."""


class Asker:
    """Asks one target. `timeout_s` bounds each exchange from connecting to the last byte."""

    def __init__(self, client: HttpClient, model: str, *, timeout_s: float) -> None:
        self._client, self._model, self._timeout_s = client, model, timeout_s

    async def observe(self, case: Case) -> Observation:
        """Raises HttpError when an exchange did not complete and CaseSkippedError when the target lacks the route."""
        wanted = needs(case)
        return Observation(
            reply=await self._generate(case) if "reply" in wanted else None,
            streamed=await self._generate(case, stream=True) if "streamed" in wanted else None,
            token_ids=await self._token_ids(case) if "token_ids" in wanted else None,
            round_trip=await self._round_trip(case) if "round_trip" in wanted else None,
        )

    async def _generate(self, case: Case, *, stream: bool = False) -> Reply:
        body = {"model": self._model, **case.body}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        status, data = await self.post(case.endpoint, body)
        return read_stream(status, data) if stream else read_whole(status, data)

    async def _token_ids(self, case: Case) -> tuple[int, ...]:
        start: dict[str, Any] = {"prompt": case.prompt}
        if case.messages is not None:
            start = {"messages": list(case.messages)}  # up to where the answer begins, which is the default everywhere
        found = await self._post_for("/tokenize", {"model": self._model, **start}, "tokens")
        if not isinstance(found, list) or not all(isinstance(item, int) for item in found):
            raise HttpError("protocol", "/tokenize: `tokens` is not a list of ids")
        if not found and any(start.values()):  # as llama.cpp's, which reads `content`
            raise CaseSkippedError(f"the target's /tokenize does not read {' or '.join(start)}: no token found")
        return tuple(found)

    async def _round_trip(self, case: Case) -> str:
        found = await self._post_for(
            "/detokenize", {"model": self._model, "tokens": list(await self._token_ids(case))}, "prompt"
        )
        if not isinstance(found, str):
            raise HttpError("protocol", "/detokenize: `prompt` is not text")
        return found

    async def _post_for(self, path: str, body: dict[str, Any], name: str) -> Any:
        """The field `name` of a JSON answer of one of the two token routes."""
        status, data = await self.post(path, body)
        if status in (404, 405, 501):
            raise CaseSkippedError(f"the target has no {path}")
        if status != 200:
            raise HttpError("protocol", f"{path}: HTTP {status}")
        try:
            return json.loads(data)[name]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise HttpError("protocol", f"{path}: no {name!r} in the answer") from error

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and the whole body, but for our key. Raises HttpError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                payload = json.dumps(body, ensure_ascii=False).encode()
                response = await self._client.request("POST", path, headers=_JSON, body=payload)
                return response.status, self._client.endpoint.redact_bytes(await response.read())
        except TimeoutError:
            raise HttpError("timeout", f"POST {path}: not finished within {self._timeout_s:g} s") from None
