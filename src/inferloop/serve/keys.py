"""Who may ask: a server that has API keys answers nobody without one, except where nothing is computed and no text
is told."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from inferloop.core.secret import Secret
from inferloop.serve.asgi import send_error
from inferloop.serve.errors import UnauthorizedError

OPEN_PATHS = frozenset(("/health", "/health/live", "/health/ready", "/health/progress", "/metrics", "/openapi.json"))
"""What probes and scrapers read, which seldom have a key, and what says that one is asked for."""


class ApiKeys:
    """Those that a server takes; only their digests are kept."""

    def __init__(self, keys: Sequence[Secret]) -> None:
        assert keys, "a server without keys asks for none"
        self._digests = tuple(_digest(key.reveal().encode()) for key in keys)

    def refusal(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> UnauthorizedError | None:
        """None for who may enter. `headers` have lower-case names. OPTIONS is open, because browsers ask it without a
        key before they send one."""
        if path in OPEN_PATHS or method == "OPTIONS":
            return None
        given = [value for name, value in headers if name == b"authorization"]
        if not given:
            return UnauthorizedError("This server asks for an API key: send Authorization: Bearer KEY")
        scheme, _, key = given[0].strip().partition(b" ")
        if len(given) > 1 or scheme.lower() != b"bearer":
            return UnauthorizedError("This server asks for an API key in one header, Authorization: Bearer KEY")
        return None if self._has(key.strip()) else UnauthorizedError("This API key is not known here", is_wrong=True)

    def _has(self, key: bytes) -> bool:
        """Compares digests, in the time of all of them: neither that nor where they differ tells anything of a key."""
        digest, found = _digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    """Around every endpoint. Who is refused is told so from the head of the request alone: the body is not read, no
    event is written, which would let anybody fill the disk, and `count` is called with the error's code."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, count: Callable[[str], None]) -> None:
        self._app, self._keys, self._count = app, keys, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._keys.refusal(scope["method"], scope["path"], scope["headers"])
            if refusal is not None:
                self._count(refusal.code)
                await send_error(send, refusal)
                return
        await self._app(scope, receive, send)
