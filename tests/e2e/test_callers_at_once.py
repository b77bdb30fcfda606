"""All that callers can do to a server at the same time: wait, leave, cancel each other, run out of time, send half of a
request, ask for what cannot be. Every answer that comes is true, every request leaves one event, and the counts add up.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.waiting import PATIENCE_S, until, until_idle

from inferloop.backends import bytecodec
from inferloop.backends.http import HttpClient, HttpError
from inferloop.backends.native import NativeGenerator
from inferloop.engine.compute.echo import EchoRunner, continuation, hidden_state
from inferloop.engine.config import EngineConfig
from inferloop.models.identity import ServingIdentity
from inferloop.records.event import ReplicaEvent
from inferloop.records.sink import Record
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.replica import Replica
from inferloop.serve.run import serving

VOCAB, CONTEXT = bytecodec.VOCAB_SIZE, 128
PATHS = {"completions": "/v1/completions", "embeddings": "/v1/embeddings", "chat": "/v1/chat/completions"}


@dataclass
class ListSink:
    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


@dataclass
class Asked:
    """A request as its caller knows it. `status` None: nothing came before the caller left."""

    status: int | None = None
    body: bytes = b""
    complete: bool = False


class Callers:
    def __init__(self, http: HttpClient, rng: random.Random) -> None:
        self.http, self.rng = http, rng
        self.asked: dict[str, Asked] = {}
        self.counts = Counter[str]()
        rare = (self.cancel, self.hurry, self.send_half, self.ask_wrongly, self.embed)
        self._actions: tuple[Callable[[], Awaitable[None]], ...] = (*[self.stay] * 6, *[self.leave] * 4, *rare)

    async def act(self) -> None:
        await self.rng.choice(self._actions)()

    def _completion(self) -> dict[str, Any]:
        rng = self.rng
        num = rng.choice((1, 1, 3))
        prompts = ["".join(rng.choices("abc", k=rng.randrange(1, 60))) for _ in range(num)]
        fields: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 30)), "n": rng.choice((1, 1, 1, 4))}
        if rng.random() < 0.5:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if rng.random() < 0.3:
            fields["priority"] = rng.randrange(-9, 9)
        return {"model": "m", "prompt": prompts, "ignore_eos": True, "return_token_ids": True, **fields}

    async def _ask(self, path: str, body: Any, asked_id: str, *headers: tuple[str, str]) -> Asked:
        asked = self.asked[asked_id] = Asked()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.request("POST", path, body=data, headers=[("x-request-id", asked_id), *headers])
        asked.status = response.status
        async for _, piece in response.pieces():
            asked.body += piece
        asked.complete = True
        return asked

    def _new_id(self) -> str:
        return f"r{len(self.asked)}.{self.rng.getrandbits(40)}"

    async def stay(self) -> None:
        body = self._completion()
        self._check(body, await self._ask(PATHS["completions"], body, self._new_id()))

    def _check(self, body: dict[str, Any], asked: Asked) -> None:
        if asked.status == 503:
            self.counts["refused"] += 1
            return
        assert asked.status == 200, asked
        choices, usage = collected(asked.body) if body.get("stream") else whole(asked.body)
        truth = [
            continuation(list(prompt.encode()), body["max_tokens"], VOCAB)
            for prompt in body["prompt"]
            for _ in range(body["n"])
        ]
        assert choices == {i: (bytecodec.decode(ids), ids, "length") for i, ids in enumerate(truth)}
        assert usage["completion_tokens"] == sum(map(len, truth))
        assert usage["prompt_tokens"] == sum(len(prompt) for prompt in body["prompt"])
        self.counts["answered"] += 1

    async def leave(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.rng.random() ** 3 * 0.3):
                await self._ask(PATHS["completions"], self._completion(), self._new_id())
                return
        self.counts["left"] += 1

    async def cancel(self) -> None:
        """Sometimes twice, sometimes at the very end."""
        asked_id, body = self._new_id(), self._completion()
        asking = asyncio.create_task(self._ask(PATHS["completions"], body, asked_id))
        for _ in range(self.rng.choice((1, 2))):
            await asyncio.sleep(self.rng.random() ** 2 * 0.1)
            told = await self.http.request("POST", f"/v1/requests/{asked_id}/cancel", body=b"")
            await told.read()
            assert told.status in (200, 404)
        asked = await asking
        if asked.status == 499 or b'"code":"cancelled"' in asked.body:
            self.counts["cancelled"] += 1
        else:
            self._check(body, asked)

    async def hurry(self) -> None:
        body = self._completion()
        limit = ("x-request-timeout-ms", str(self.rng.choice((1, 1, 2, self.rng.randrange(1, 60)))))
        asked = await self._ask(PATHS["completions"], body, self._new_id(), limit)
        if asked.status == 408 or b'"code":"timeout"' in asked.body:
            self.counts["timed out"] += 1
        else:
            self._check(body, asked)

    async def send_half(self) -> None:
        host, _, port = self.http.base_url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await asyncio.sleep(self.rng.random() * 0.05)
        writer.close()

    async def ask_wrongly(self) -> None:
        wrong = {
            **self._completion(),
            **self.rng.choice(({"n": 0}, {"prompt": ""}, {"max_tokens": 10**6}, {"top_k": -9})),
        }
        asked = await self._ask(PATHS["completions"], wrong, self._new_id())
        assert asked.status in (400, 503), asked

    async def embed(self) -> None:
        texts = ["".join(self.rng.choices("abc", k=self.rng.randrange(1, 30))) for _ in range(9)]
        body = {"model": "m", "input": texts, "encoding_format": "base64"}
        asked = await self._ask(PATHS["embeddings"], body, self._new_id())
        if asked.status == 503:
            self.counts["refused"] += 1
            return
        data = json.loads(asked.body)["data"]
        for text, entry in zip(texts, data, strict=True):
            ids = list(text.encode())
            mean = np.mean([hidden_state(ids[: i + 1]) for i in range(len(ids))], axis=0)
            found = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
            assert found.tolist() == (mean / np.linalg.norm(mean)).astype(np.float32).tolist()
        self.counts["embedded"] += 1


Choices = dict[int, tuple[str, list[int], str | None]]


def whole(body: bytes) -> tuple[Choices, dict[str, int]]:
    answer = json.loads(body)
    return {c["index"]: (c["text"], c["token_ids"], c["finish_reason"]) for c in answer["choices"]}, answer["usage"]


def collected(body: bytes) -> tuple[Choices, dict[str, int]]:
    *blocks, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    texts, ids = defaultdict[int, str](str), defaultdict[int, list[int]](list)
    reasons, usage = dict[int, str](), dict[str, int]()
    for block in blocks:
        event = json.loads(block.removeprefix("data: "))
        usage = event["usage"] or usage
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in reasons, "a choice went on after its end"
            texts[index] += choice["text"]
            ids[index] += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    return {index: (texts[index], ids[index], reasons[index]) for index in reasons}, usage


def check_books(asked: dict[str, Asked], records: list[Record], replica: Replica) -> None:
    """One event for every request that the server knew of, with the status that its caller saw; metrics add up."""
    events = [record for record in records if isinstance(record, ReplicaEvent)]
    number = Counter(event.request_id for event in events)
    assert max(number.values()) == 1
    assert {asked_id for asked_id, one in asked.items() if one.status is not None} <= number.keys()
    told = {event.request_id: event.status for event in events}
    wrong = {i: (one, told[i]) for i, one in asked.items() if one.complete and told[i] != one.status}
    assert not wrong
    metrics = replica.metrics
    assert sum(metrics.finished.values()) + sum(metrics.refused.values()) == len(events)
    assert sum(metrics.finished.values()) == metrics.histograms["ttft"].count + metrics.num_without_token
    assert sum(metrics.cut_short.values()) == metrics.finished["abort"]
    ends = Counter(event.finish_reason for event in events)
    assert {reason: num for reason, num in metrics.finished.items() if num and reason != "error"} == {
        reason: num for reason, num in ends.items() if reason != "error"
    }


@pytest.mark.parametrize("seed", range(3))
async def test_callers_at_once(seed: int) -> None:
    rng, sink = random.Random(seed), ListSink()
    runner = EchoRunner(vocab_size=VOCAB, context_length=CONTEXT, block_size=4, num_blocks=40)
    config = EngineConfig(max_sequences=6, max_step_tokens=32, max_waiting=40)
    generator = NativeGenerator(
        bytecodec.ByteCodec(), runner, config, ServingIdentity("m", "w", "none", "echo", "1", "t", "c")
    )
    generator.start()
    try:
        app = build_app(generator, ServeConfig(), sink)
        async with serving(app, wait_ready=True) as url:
            http = HttpClient(url)
            callers = Callers(http, rng)
            for _ in range(30):
                async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as group:
                    for _ in range(rng.randrange(1, 16)):
                        group.create_task(callers.act())
            await until_idle(http)
            await until(lambda: generator.describe()[1].kv_blocks_used == 0 and not generator._receivers)
            stats = generator.describe()[1]
            assert stats.alive
            with contextlib.suppress(HttpError):
                await http.close()
        check_books(callers.asked, sink.records, app.state.replica)
        counts = callers.counts
        assert min(counts[what] for what in ("answered", "left", "cancelled", "timed out", "embedded")) > 0, counts
        assert stats.num_preemptions > 0
    finally:
        await asyncio.to_thread(generator.stop)
