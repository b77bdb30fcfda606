"""One request with a deadline, accounted for whatever becomes of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass
from typing import Any

from lab.soak.answers import Answer, BrokenAnswerError, streamed, whole
from lab.soak.ledger import Ledger, Sent
from lab.soak.templates import RESPONSES, Template

from inferloop.backends.http import HttpClient, HttpError, Response

DEADLINE_S = 120.0
"""No request may take longer; one that does is a hang."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    retry_after: str | None


class Client:
    """Sends requests to one server and writes into the ledger what came of them."""

    def __init__(self, url: str, model: str, ledger: Ledger) -> None:
        self.http = HttpClient(url, max_idle=64)
        self.model, self.ledger = model, ledger
        self._numbers = itertools.count()

    def body(self, template: Template, rng: random.Random | None = None, **more: Any) -> dict[str, Any]:
        """The template's body, with what has no influence on the answer drawn at random."""
        body = {"model": self.model, **template.body, **more}
        if rng is None:
            return body
        if template.takes_salt and "cache_salt" not in body and rng.random() < 0.5:
            body["cache_salt"] = rng.choice(["tenant a", "tenant b", f"once {rng.getrandbits(60)}"])
        if template.can_stream and rng.random() < 0.5:
            body["stream"] = True
            if template.path != RESPONSES and rng.random() < 0.7:
                body["stream_options"] = {"include_usage": True}
        if template.takes_salt and rng.random() < 0.3:
            body["priority"] = rng.choice((-10, -1, 1, 10))
        return body

    def new_id(self) -> str:
        return f"soak-{next(self._numbers)}"

    async def open(
        self, what: str, path: str, body: bytes, *, request_id: str | None = None, **headers: str
    ) -> tuple[Sent, Response]:
        """Send; returns with the headers. Raises HttpError."""
        sent = Sent(request_id or self.new_id(), what)
        self.ledger.sent[sent.request_id] = sent
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        response = await self.http.request("POST", path, body=body, headers=[("x-request-id", sent.request_id), *named])
        sent.status = response.status
        return sent, response

    async def ask(
        self,
        what: str,
        path: str,
        body: Any,
        *,
        pause_s: float = 0.0,
        request_id: str | None = None,
        **headers: str,
    ) -> Reply | None:
        """A whole exchange; None (and a problem in the ledger) when it hung or broke. `pause_s`: how long the reader
        sleeps after the first piece, and after every tenth of it for as long again."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            async with asyncio.timeout(DEADLINE_S + 2 * pause_s):
                sent, response = await self.open(what, path, data, request_id=request_id, **headers)
                pieces = []
                async for _, piece in response.pieces():
                    pieces.append(piece)
                    if pause_s:
                        await asyncio.sleep(pause_s)
                        pause_s /= 2
        except TimeoutError:
            self.ledger.problem(f"{what}: no complete answer within {DEADLINE_S:g} s")
            return None
        except HttpError as error:
            self.ledger.problem(f"{what}: {error}")
            return None
        sent.complete = True
        if response.status >= 500 and response.status != 503:
            self.ledger.problem(f"{what}: status {response.status}: {b''.join(pieces)[:300]!r}")
        return Reply(response.status, b"".join(pieces), response.header("retry-after"))

    async def answer(self, template: Template, body: dict[str, Any], *, pause_s: float = 0.0) -> Answer | None:
        """The answer to a template's request, None when it was refused for overload or went wrong (which the ledger
        then says)."""
        reply = await self.ask(template.name, template.path, body, pause_s=pause_s)
        if reply is None:
            return None
        if reply.status in (429, 503):
            self.ledger.counts["refused for overload"] += 1
            if reply.retry_after is None:
                self.ledger.problem(f"{template.name}: {reply.status} without Retry-After")
            return None
        if reply.status != 200:
            self.ledger.problem(f"{template.name}: status {reply.status}: {reply.body[:300]!r}")
            return None
        try:
            return streamed(reply.body) if body.get("stream") else whole(reply.body)
        except BrokenAnswerError as error:
            self.ledger.problem(f"{template.name}: {error}")
            return None
