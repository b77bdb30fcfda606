"""No part of a run meets what a target's prefix cache holds from before it, where the target has a way to that.

Prompts differ between the parts of a run and between seeds, so this is for a seed that is used again on a server which
still has the prompts of the run before. Asking for a salt of one's own leaves the cache of everybody else alone, so it
is preferred to emptying it.
"""

from __future__ import annotations

import asyncio
import re
import secrets

from inferloop.backends.http import HttpClient, HttpError

_SALTED = frozenset({"inferloop", "vllm"})
"""Servers in which requests meet in the cache only under the same `cache_salt`, by their models' `owned_by`."""
_REFUSED = re.compile(r"[^A-Za-z0-9._-]")
"""vLLM answers salts that hold some of these with 400."""
_FLUSHED = frozenset({"sglang"})
"""Servers whose cache is emptied by POST /flush_cache, when nothing runs."""
_ATTEMPTS, _PAUSE_S, _TIMEOUT_S = 5, 0.2, 10.0


class FreshCache:
    """One run's, on one target. `owner` is what the target says of whose its models are."""

    def __init__(self, client: HttpClient, owner: str | None) -> None:
        self._client = client
        self._nonce = secrets.token_hex(8)
        self._is_salted, self._is_flushed = owner in _SALTED, owner in _FLUSHED
        self.problem: str | None = None
        """Why the cache could not be emptied, the last time that it could not."""

    @property
    def way(self) -> str | None:
        """What is done, in the target's own words."""
        if self._is_salted:
            return "cache_salt"
        return "POST /flush_cache" if self._is_flushed else None

    @property
    def is_salted(self) -> bool:
        """Whether two parts may hold the same prompts and yet meet nothing of each other."""
        return self._is_salted

    def fields(self, part: str) -> dict[str, str]:
        """What the bodies of a part's requests have besides; the prompts stay as they are."""
        return {"cache_salt": f"bench-{self._nonce}-{_REFUSED.sub('-', part)}"} if self._is_salted else {}

    async def empty(self) -> None:
        """Before a part, while nothing of ours runs. Never raises: a cache that stays warm is found by the checks."""
        if not self._is_flushed:
            return
        for attempt in range(_ATTEMPTS):
            if attempt:  # what was cut off may still be on its way out
                await asyncio.sleep(_PAUSE_S)
            try:
                response = await self._client.request("POST", "/flush_cache", body=b"", timeout_s=_TIMEOUT_S)
                await response.read()
            except HttpError as error:
                self.problem = str(error)
                return
            if response.status == 200:
                self.problem = None
                return
            self.problem = f"POST /flush_cache: HTTP {response.status}"
            if response.status in (401, 403, 404, 405):
                return
