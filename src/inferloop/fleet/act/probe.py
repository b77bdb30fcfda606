"""Asks one replica how it is, and says it as events for the replica table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from inferloop.backends.http import HttpClient, HttpError
from inferloop.fleet.decide.life import Event, NotReady, ProbeFailed, Progress, Ready

_PROGRESS_PATH = "/health/progress"


class Prober:
    """Probes of one life of one replica, on connections of their own.

    `num_bytes` tells how many bytes the gateway has relayed from it so far. An engine without /health/progress is
    judged by its ready probe and by what it sends.
    """

    def __init__(self, url: str, *, ready_path: str, timeout_s: float, num_bytes: Callable[[], int]) -> None:
        self._client = HttpClient(url, connect_timeout_s=timeout_s)
        self._ready_path, self._timeout_s, self._num_bytes = ready_path, timeout_s, num_bytes
        self._last_num_bytes = num_bytes()
        self._tells_progress = True

    async def probe(self) -> list[Event]:
        """One round. Signs of work come first, so that they are weighed before a late answer."""
        answers = [await self._ready()]
        if self._tells_progress and not isinstance(answers[0], ProbeFailed):
            answers += await self._progress()
        num_bytes = self._num_bytes()
        moved = num_bytes != self._last_num_bytes
        self._last_num_bytes = num_bytes
        return [Progress(relayed=True), *answers] if moved else answers

    async def close(self) -> None:
        await self._client.close()

    async def _ready(self) -> Event:
        try:
            status, body = await self._get(self._ready_path)
        except HttpError as error:
            return ProbeFailed(str(error))
        return Ready() if status == 200 else NotReady(f"{self._ready_path} answered {status}: {body[:200]!r}")

    async def _progress(self) -> list[Event]:
        try:
            status, body = await self._get(_PROGRESS_PATH)
            if status == 404:
                self._tells_progress = False
                return []
            told: Any = json.loads(body)
            return [
                Progress(
                    step_counter=int(told["step_counter"]),
                    num_pending=int(told["running"]) + int(told["waiting"]),
                    alive=bool(told.get("alive", True)),
                )
            ]
        except HttpError as error:
            return [ProbeFailed(str(error))]
        except (ValueError, KeyError, TypeError) as error:
            return [ProbeFailed(f"{_PROGRESS_PATH}: not understood: {error!r}")]

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.request("GET", path)
                return response.status, await response.read()
        except TimeoutError:
            raise HttpError("timeout", f"{path}: no answer within {self._timeout_s:g} s") from None
