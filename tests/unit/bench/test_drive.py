"""Load over real sockets against a small server that plays faults."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.unit.bench.conftest import SkipAhead
from tests.waiting import PATIENCE_S, until

from inferloop.bench.agenda import in_chains
from inferloop.bench.drive import DriveOptions, Endpoint, Stop, drive
from inferloop.bench.render import RenderedRequest
from inferloop.core.errors import RecordWriteError
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.units import NS_PER_S
from inferloop.measure import little
from inferloop.measure.invariants import violations
from inferloop.measure.timing import RequestTiming

HOUR_S = 3600.0
STOPS: tuple[Stop, ...] = ("cut", "drain")
Play = Callable[[int, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(text: str | None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


async def answer(number: int, writer: asyncio.StreamWriter, *, wait_s: float = 0.0) -> None:
    writer.write(HEAD)
    for i in range(3):
        await asyncio.sleep(wait_s)
        writer.write(event(f" word{i}", inferloop={"num_tokens": 2 if i else 1}))
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
    writer.write(event(None, usage=usage, inferloop={"num_tokens": 5, "queue_ms": 0.5}) + b"data: [DONE]\n\n")


@dataclass
class Server:
    """Plays `play(number, writer)` for each request and then closes the connection."""

    play: Play
    heads: list[bytes] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    url: str = ""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for(self, count: int) -> None:
        """Until so many requests have come."""
        while len(self.heads) < count:
            self.changed.clear()
            await self.changed.wait()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            await self._serve(reader, writer)
        finally:
            self.num_open -= 1
            writer.transport.abort()
            self.tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            self.heads.append(head)
            self.changed.set()
            await self.play(len(self.heads) - 1, writer)
            await writer.drain()
            writer.close()
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(play: Play) -> AsyncIterator[tuple[Server, Endpoint]]:
    server = Server(play)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server, Endpoint(server.url)
    finally:
        listener.close()
        for task in list(server.tasks):
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)
        await asyncio.sleep(0)


def patient(**values: Any) -> DriveOptions:
    """Nothing is forgone, however busy the machine is."""
    return DriveOptions(max_catch_up_ms=60_000, **values)


def here(**values: Any) -> DriveOptions:
    """In this process, whose clock can skip ahead."""
    return patient(**{"num_senders": 0, "request_timeout_s": 24 * HOUR_S, **values})


def requests(count: int, *, every_s: float = 0.0) -> list[RenderedRequest]:
    return [
        RenderedRequest(
            TimedRequest(i, i * every_s, (Segment(i, 20),), 5), "/v1/chat/completions", b'{"a":1}', 20, 0, False
        )
        for i in range(count)
    ]


def chain(count: int, num_chains: int = 1) -> list[RenderedRequest]:
    plan = requests(count)
    timed = in_chains([r.timed for r in plan], num_chains)
    return [replace(r, timed=t) for r, t in zip(plan, timed, strict=True)]


def check(timings: Sequence[RequestTiming]) -> None:
    assert [violations(t) for t in timings] == [()] * len(timings)


async def test_serial_has_one_in_flight_and_counts_tokens() -> None:
    async with serving(answer) as (server, target):
        result = await drive(chain(5), target, patient())
    assert server.max_open == 1
    check(result.timings)
    assert all(t.ok and t.t_intended_ns is None for t in result.timings)
    first = result.timings[0]
    assert [c.num_tokens for c in first.chunks] == [1, 2, 2]
    assert (first.num_output_tokens, first.num_cached_tokens, first.queue_ms) == (5, 8, 0.5)
    assert result.counted_by == {"server": 5}
    assert (result.num_count_mismatches, result.num_length_mismatches, result.num_unsent) == (0, 0, 0)
    head = server.heads[0].lower()
    for header in (b"x-inferloop-timings: 1", b"x-request-id: ", b"traceparent: 00-"):
        assert header in head


async def test_burst_sends_all_at_once() -> None:
    async with serving(lambda n, w: answer(n, w, wait_s=0.05)) as (server, target):
        result = await drive(requests(12), target, patient())
    assert server.max_open == 12
    assert len(result.timings) == 12
    check(result.timings)


async def test_open_keeps_the_plan_and_littles_law() -> None:
    async with serving(lambda n, w: answer(n, w, wait_s=0.02)) as (_, target):
        seen: list[int] = []
        result = await drive(requests(40, every_s=0.01), target, patient(), on_done=lambda i, t: seen.append(i))
    check(result.timings)
    assert sorted(seen) == list(range(40))
    intended = sorted(t.t_intended_ns or 0 for t in result.timings)
    assert [t - intended[0] for t in intended] == [i * NS_PER_S // 100 for i in range(40)]
    assert result.in_flight is not None
    # What the gauge is late by is the sender's own standing still, which it tells of.
    (stats,) = result.senders
    late = sum(stats.loop_lags_ns) / NS_PER_S / stats.window_s
    law = little.check(result.timings, in_flight=result.in_flight, tolerance=0.2 + late)
    assert law is not None
    assert law.ok


async def test_every_fault_has_its_class(skip_ahead: SkipAhead) -> None:
    async def play(number: int, writer: asyncio.StreamWriter) -> None:
        kind = number
        if kind in (0, 1, 2):
            status = ("400 Bad Request", "429 Too Many Requests", "503 Busy")[kind]
            writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        elif kind == 3:
            writer.write(HEAD + event("half"))
        elif kind == 4:
            writer.write(HEAD + b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\ndata: [DONE]\n\n')
        elif kind == 5:
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        elif kind == 6:
            writer.write(HEAD.replace(b"connection: close", b"content-length: 9999") + event("half"))
        elif kind == 7:
            writer.write(HEAD + event("slow"))
            await writer.drain()
            await asyncio.sleep(0.05)
            skip_ahead(HOUR_S)
            await asyncio.sleep(HOUR_S)
        elif kind == 8:
            writer.write(HEAD + b"data: not json\n\ndata: [DONE]\n\n")
        elif kind == 9:
            writer.write(HEAD + event("a") + b'data: {"error": {"message": "lost"}}\n\n')

    async with serving(play) as (_, target):
        result = await drive(chain(10), target, here(request_timeout_s=HOUR_S))
    check(result.timings)
    assert [t.error for t in result.timings] == [
        *("http_4xx", "http_429", "http_5xx", "truncated", "empty_stream"),
        *("protocol", "truncated", "timeout", "protocol", "truncated"),
    ]
    assert "HTTP 503" in result.details["http_5xx"]
    assert result.details["protocol"].startswith("not HTTP/1.1")
    assert len(result.timings[7].chunks) == 1


async def test_nobody_listening_is_a_connect_error() -> None:
    async with serving(answer) as (server, _):
        url = server.url
    result = await drive(requests(2), Endpoint(url), patient())
    assert [t.error for t in result.timings] == ["connect", "connect"]


async def test_what_is_unfinished_at_the_cut_off_is_censored(skip_ahead: SkipAhead) -> None:
    begun: list[int] = []
    done: list[int] = []

    async def play(number: int, writer: asyncio.StreamWriter) -> None:
        if number % 2:
            writer.write(HEAD + event("first"))
            await writer.drain()
            begun.append(number)
            await asyncio.sleep(HOUR_S)
        else:
            await answer(number, writer)

    async def cut_off() -> None:
        await until(lambda: len(begun) == len(done) == 5)
        await asyncio.sleep(0.05)
        skip_ahead(HOUR_S)

    async with serving(play) as (_, target), asyncio.TaskGroup() as group:
        group.create_task(cut_off())
        options = here(cut_off_s=HOUR_S)
        result = await drive(requests(10), target, options, on_done=lambda i, _: done.append(i))
    check(result.timings)
    assert len(result.timings) == 10
    censored = [t for t in result.timings if t.error == "censored"]
    assert len(censored) == 5
    assert all(len(t.chunks) == 1 for t in censored)


async def test_a_hopeless_window_ends_early() -> None:
    async with serving(lambda n, w: answer(n, w, wait_s=0.01)) as (_, target):
        plan = [*requests(20, every_s=0.02), *requests(1000, every_s=HOUR_S)[20:]]
        for stop in STOPS:

            def rule(timings: Sequence[RequestTiming], stop: Stop = stop) -> Stop | None:
                return stop if len(timings) >= 5 else None

            result = await drive(plan, target, patient(), stop_when=rule)
            assert 5 <= len(result.timings) <= 20
            assert result.num_unsent == 1000 - len(result.timings)
            assert result.stopped == stop
            assert (stop == "cut") or all(t.ok for t in result.timings)


async def test_a_record_that_cannot_be_written_ends_the_run() -> None:
    def full(index: int, timing: RequestTiming) -> None:
        calls.append(index)
        raise RecordWriteError("disk full")

    for plan in (requests(200), requests(200, every_s=0.02), chain(200)):
        calls: list[int] = []
        async with serving(lambda n, w: answer(n, w, wait_s=0.01)) as (_, target):
            with pytest.raises(RecordWriteError):
                await drive(plan, target, patient(), on_done=full)
        assert len(calls) == 1


async def test_budget_ends_a_serial_window(skip_ahead: SkipAhead) -> None:
    async def play(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 3:
            skip_ahead(HOUR_S)
        await answer(number, writer, wait_s=0.02)

    async with serving(play) as (_, target):
        result = await drive(chain(1000), target, here(budget_s=HOUR_S))
    assert [t.error for t in result.timings] == [None] * 4
    assert result.num_unsent == 1000 - 4


async def test_a_serial_request_that_never_ends_is_cut_off(skip_ahead: SkipAhead) -> None:
    async def play(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            skip_ahead(HOUR_S)
            await asyncio.sleep(HOUR_S)
        await answer(number, writer)

    async with serving(play) as (_, target):
        result = await drive(chain(5), target, here(budget_s=HOUR_S, cut_off_s=0.1))
    assert [t.error for t in result.timings] == [None, "censored"]
    assert result.num_unsent == 3


async def test_users_who_wait_for_long_answers_are_not_cut_off_before_their_next_question() -> None:
    """All of them wait, so nothing falls due: that is no end of the window."""
    async with serving(lambda n, w: answer(n, w, wait_s=0.1 if n < 4 else 60.0)) as (_, target):
        result = await drive(chain(6, 2), target, patient(cut_off_s=0.05))
    assert [t.error for t in result.timings] == [None] * 4 + ["censored"] * 2
    assert result.num_unsent == 0


async def test_budget_ends_an_open_window_between_two_sends(skip_ahead: SkipAhead) -> None:
    """The second request falls due long after the budget: nobody may sleep until then."""

    async def play(number: int, writer: asyncio.StreamWriter) -> None:
        skip_ahead(HOUR_S)
        await answer(number, writer)

    async with serving(play) as (_, target):
        for stop in (None, lambda timings: None):
            options = here(budget_s=HOUR_S)
            async with asyncio.timeout(PATIENCE_S):
                result = await drive(requests(3, every_s=9 * HOUR_S), target, options, stop_when=stop)
            assert [t.error for t in result.timings] == [None]
            assert result.num_unsent == 2


async def test_a_cap_delays_sends_and_says_so() -> None:
    async with serving(lambda n, w: answer(n, w, wait_s=0.02)) as (server, target):
        result = await drive(requests(10, every_s=0.001), target, patient(max_in_flight=1))
    assert server.max_open == 1
    assert result.num_capped > 0
    assert len(result.timings) == 10
    check(result.timings)


async def test_cancelling_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferloop.bench.drive._LAST_WORDS_S", PATIENCE_S)
    async with serving(lambda n, w: answer(n, w, wait_s=5.0)) as (server, target):
        seen: list[RequestTiming] = []
        task = asyncio.create_task(drive(requests(8), target, patient(), on_done=lambda i, t: seen.append(t)))
        await server.wait_for(8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [t.error for t in seen] == ["censored"] * 8
    assert gc.isenabled()
