"""The clients: who waits for an answer, who leaves, who asks for what cannot be, who does not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

from lab.soak.answers import Answer, difference
from lab.soak.client import Client
from lab.soak.refusals import REFUSALS, Refusal
from lab.soak.templates import CHAT, COMPLETIONS, PREAMBLE, TEMPLATES, Template

from inferloop.backends.http import HttpError

_MAX_STAY_S = 4.0


class Actors:
    """`truth`: the solo answer of every template, by its name."""

    def __init__(self, client: Client, truth: dict[str, Answer], rng: random.Random) -> None:
        self._client, self._ledger, self._truth, self._rng = client, client.ledger, truth, rng
        self._kinds: tuple[tuple[Callable[[], Awaitable[None]], int], ...] = (
            (self.stay, 50),
            (self.leave, 22),
            (self.leave_while_sending, 3),
            (self.read_slowly, 4),
            (self.ask_for_the_impossible, 10),
            (self.be_unpredictable, 6),
            (self.look_around, 5),
            (self.cancel, 5),
            (self.be_impatient, 4),
        )

    async def work(self, until_s: float) -> None:
        """One client: an action after the other, with short pauses."""
        loop, rng = asyncio.get_running_loop(), self._rng
        actions, weights = zip(*self._kinds, strict=True)
        while loop.time() < until_s:
            (action,) = rng.choices(actions, weights)
            try:
                await action()
            except (HttpError, OSError) as error:
                self._ledger.problem(f"{action.__name__}: {type(error).__name__}: {error}")
            await asyncio.sleep(rng.expovariate(1 / 0.05))

    async def stay(self, pause_s: float = 0.0) -> None:
        """Wait for the answer: it is the solo answer, whoever else is served."""
        template = self._rng.choice(TEMPLATES)
        answer = await self._client.answer(template, self._client.body(template, self._rng), pause_s=pause_s)
        if answer is None:
            return
        self._ledger.counts["answers equal to their solo run"] += 1
        if wrong := difference(answer, self._truth[template.name]):
            self._ledger.counts["answers equal to their solo run"] -= 1
            self._ledger.problem(f"{template.name}: not the solo answer: {wrong}")

    async def cancel(self) -> None:
        """Somebody else ends the request by its id: the client is told, unless its answer was complete already."""
        template = self._rng.choice(TEMPLATES)
        body = self._client.body(template, self._rng)
        request_id = self._client.new_id()
        asked = asyncio.create_task(self._client.ask(template.name, template.path, body, request_id=request_id))
        await asyncio.sleep(self._rng.uniform(0, 2.0))
        told = await self._client.http.request("POST", f"/v1/requests/{request_id}/cancel", body=b"", timeout_s=60)
        await told.read()
        if told.status not in (200, 404):
            self._ledger.problem(f"cancelling {template.name}: status {told.status}")
        reply = await asked
        if reply is None:
            return
        if reply.status == 499 or b'"code":"cancelled"' in reply.body:
            self._ledger.counts["cancelled from outside"] += 1
        elif reply.status not in (200, 429, 503):
            self._ledger.problem(f"cancelled {template.name}: status {reply.status}: {reply.body[:200]!r}")

    async def be_impatient(self) -> None:
        """A deadline that the request can hardly keep."""
        template = self._rng.choice(TEMPLATES)
        body = self._client.body(template, self._rng)
        limit_ms = str(self._rng.randint(1, 1500))
        reply = await self._client.ask(template.name, template.path, body, x_request_timeout_ms=limit_ms)
        if reply is None:
            return
        if reply.status == 408 or b'"code":"timeout"' in reply.body:
            self._ledger.counts["timed out"] += 1
        elif reply.status not in (200, 429, 503):
            self._ledger.problem(f"impatient {template.name}: status {reply.status}: {reply.body[:200]!r}")

    async def read_slowly(self) -> None:
        self._ledger.counts["slow readers"] += 1
        await self.stay(pause_s=self._rng.uniform(0.2, 2.0))

    async def leave(self) -> None:
        """Close the connection at a random time: queued, in prefill, decoding, or between two chunks."""
        rng, template = self._rng, self._rng.choice(TEMPLATES)
        body = self._client.body(template, rng)
        if "structured_outputs" not in body and "response_format" not in body and template.path in (CHAT, COMPLETIONS):
            body |= {"max_tokens": 140, "ignore_eos": True, "min_tokens": 0, "n": rng.choice((1, 1, 4))}
            body.pop("stop", None)
        self._ledger.counts["clients that left"] += 1
        with contextlib.suppress(HttpError, TimeoutError):
            async with asyncio.timeout(rng.uniform(0, _MAX_STAY_S) ** 2 / _MAX_STAY_S):
                sent, response = await self._client.open(template.name, template.path, json.dumps(body).encode())
                async for _ in response.pieces():
                    if rng.random() < 0.03:
                        return
                sent.complete = True

    async def leave_while_sending(self) -> None:
        """Announce a body, send half of it, close."""
        self._ledger.counts["clients that left while sending"] += 1
        host, _, port = self._client.http.base_url.removeprefix("http://").partition(":")
        path, body = self._rng.choice((CHAT, COMPLETIONS)), json.dumps(self._client.body(TEMPLATES[0])).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body[: len(body) // 2])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await asyncio.sleep(self._rng.uniform(0, 0.3))
        writer.close()

    async def ask_for_the_impossible(self) -> None:
        await self.be_refused(self._rng.choice(REFUSALS))

    async def be_refused(self, refusal: Refusal) -> None:
        body: Any = refusal.body
        if isinstance(body, dict):
            body = {"model": self._client.model, **body, "stream": self._rng.random() < 0.3}
        reply = await self._client.ask(refusal.name, refusal.path, body)
        if reply is None or reply.status == 503:
            return
        self._ledger.counts["refusals"] += 1
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(reply.body)["error"]
            named = (error["param"] or "").partition("[")[0]
            if reply.status == refusal.status and (refusal.param is None or refusal.param.partition("[")[0] == named):
                return
        self._ledger.problem(f"{refusal.name}: status {reply.status}: {reply.body[:300]!r}")

    async def be_unpredictable(self) -> None:
        """Draws without a seed: nobody knows the answer, but it has every choice, and counts what it holds."""
        n = self._rng.randint(1, 3)
        template = Template(
            "without a seed",
            COMPLETIONS,
            {"prompt": [PREAMBLE, "It is "], "max_tokens": 20, "n": n, "ignore_eos": True, "temperature": 1.2},
        )
        answer = await self._client.answer(template, self._client.body(template, self._rng))
        if answer is None:
            return
        self._ledger.counts["unseeded answers"] += 1
        endings = [(choice["index"], choice["finish_reason"]) for choice in answer["choices"]]
        if endings != [(i, "length") for i in range(2 * n)]:
            self._ledger.problem(f"without a seed: choices ended as {endings}")
        if answer["usage"] and answer["usage"]["completion_tokens"] != 2 * n * 20:
            self._ledger.problem(f"without a seed: usage {answer['usage']}")

    async def look_around(self) -> None:
        """The small endpoints answer while everybody is served."""
        path = self._rng.choice(("/health/live", "/health/ready", "/health/progress", "/v1/models", "/identity"))
        try:
            await self._client.http.get_json(path, timeout_s=30)
            response = await self._client.http.request("POST", "/tokenize", body=b'{"prompt":"one two"}', timeout_s=30)
            count = (await response.json())["count"]
            if count != 2:
                self._ledger.problem(f"/tokenize counts {count} tokens")
        except (HttpError, TimeoutError) as error:
            self._ledger.problem(f"{path}: {error}")
        self._ledger.counts["looks around"] += 1
