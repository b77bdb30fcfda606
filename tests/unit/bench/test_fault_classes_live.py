"""Public faults of load generators over real sockets, and self-checks that void by a real cause.

States and orders are checked, never how fast this machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
from tests.unit.bench.conftest import SkipAhead
from tests.unit.bench.test_connections import FRAMED, SSE, Server, always, run, serving
from tests.unit.bench.test_senders import children
from tests.waiting import until, wait_until

from inferloop.bench.checks import Checks, self_checks
from inferloop.bench.drive import DriveOptions, DriveResult, Endpoint, Stop, drive
from inferloop.bench.render import RenderedRequest
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.invariants import violations
from inferloop.measure.summary import summarize
from inferloop.measure.timing import RequestTiming, response_ttlt_ms, ttft_ms, ttlt_ms
from inferloop.measure.verdict import judge

SLO = Slo((Objective("ttft_ms", 0.95, 100.0),))
PATIENT: dict[str, Any] = {"max_catch_up_ms": 60_000.0, "cut_off_s": 30.0}


def plan(count: int, every_s: float) -> list[RenderedRequest]:
    """20 tokens in each."""
    timed = [TimedRequest(i, i * every_s, (Segment(i, 20),), 1) for i in range(count)]
    return [RenderedRequest(t, "/v1/chat/completions", b'{"a":1}', 20, 0, False) for t in timed]


def answer(*, usage: dict[str, Any] | None = None, **frame: Any) -> bytes:
    """A stream of one frame."""
    first = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}], **frame}
    events = [json.dumps(first), *([] if usage is None else [json.dumps({"choices": [], "usage": usage})]), "[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    return SSE + b"content-length: %d\r\n\r\n" % len(body) + body


def checked(result: DriveResult, planned: Sequence[RenderedRequest] = ()) -> Checks:
    return self_checks(result, result.timings, planned, SLO, 0.0)


async def test_an_empty_stream_is_no_number_and_a_clock_set_back_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """99 answers and one that has a role and nothing else; half-way the wall clock is set back by an hour."""
    wall, wall_ns, back_s = time.time, time.time_ns, 0
    monkeypatch.setattr(time, "time", lambda: wall() - back_s)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() - back_s * NS_PER_S)

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        nonlocal back_s
        if number == 50:
            back_s = 3600
        if number == 70:
            writer.write(SSE + b'connection: close\r\n\r\ndata: {"choices":[{"delta":{"role":"assistant"}}]}\n\n')
            writer.close()
        else:
            writer.write(FRAMED)

    async with serving(play) as server:
        result = await run(plan(100, 0.005), server)
    assert back_s == 3600
    assert Counter(t.error for t in result.timings) == {None: 99, "empty_stream": 1}
    (empty,) = [t for t in result.timings if not t.ok]
    assert (ttft_ms(empty), ttlt_ms(empty), empty.chunks) == (None, None, ())
    assert [violations(t) for t in result.timings] == [()] * 100
    for t in result.timings:
        stamps = [t.t_intended_ns or 0, t.t_send_ns, *(c.t_ns for c in t.chunks), t.t_end_ns]
        assert stamps == sorted(stamps) and stamps[-1] - stamps[0] < 1800 * NS_PER_S
    told = summarize(result.timings, mode="open").as_json()
    assert told["errors"] == {"rate": 0.01, "by_class": {"empty_stream": 1}}
    assert (told["ttft_ms"]["num_samples"], told["num_requests"]) == (100, 100)


@contextlib.asynccontextmanager
async def null_server() -> AsyncIterator[tuple[int, Endpoint]]:
    """(its process, where it is)"""
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-m", "inferloop.bench.null_server", "2")
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        yield process.pid, Endpoint(f"http://127.0.0.1:{int(await process.stdout.readline())}")
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("max_in_flight", [None, 2])
async def test_who_should_have_come_during_a_freeze_waited_for_its_end(max_in_flight: int | None) -> None:
    """A server is stopped for a while. With a cap most are sent afterwards and are served at once: only what counts
    from the intended instant shows that they would have waited."""
    frozen: list[int] = []

    def freeze(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        frozen.append(time.monotonic_ns())
        asyncio.get_running_loop().call_later(0.7, thaw, pid)

    def thaw(pid: int) -> None:
        frozen.append(time.monotonic_ns())
        os.kill(pid, signal.SIGCONT)

    async with null_server() as (pid, endpoint):

        def seen(position: int, _: RequestTiming) -> None:
            if position >= 50 and not frozen:
                freeze(pid)

        def served_after_it(timings: Sequence[RequestTiming]) -> Stop | None:
            return "drain" if len(frozen) == 2 and (timings[-1].t_intended_ns or 0) > frozen[1] else None

        options = DriveOptions(max_in_flight=max_in_flight, **PATIENT)
        result = await drive(plan(6000, 0.005), endpoint, options, on_done=seen, stop_when=served_after_it)
    stopped, went_on = frozen
    assert set(Counter(t.error for t in result.timings)) == {None}
    meanwhile = [t for t in result.timings if stopped < (t.t_intended_ns or 0) < went_on]
    assert len(meanwhile) > 50
    for t in meanwhile:
        waited = response_ttlt_ms(t)
        assert waited is not None and waited >= (went_on - (t.t_intended_ns or 0)) / NS_PER_MS
    if max_in_flight is not None:
        assert sum(t.t_send_ns < went_on for t in meanwhile) <= max_in_flight
        assert result.num_capped > 0


async def test_six_of_256_answers_fail_whatever_they_took(skip_ahead: SkipAhead) -> None:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        if number < 6:
            writer.write(FRAMED)

    done: list[int] = []

    async def time_out() -> None:
        await until(lambda: len(done) == 6 and len(server.heads) == 256)
        skip_ahead(3600.0)

    async with serving(play) as server, asyncio.TaskGroup() as group:
        group.create_task(time_out())
        options = DriveOptions(num_senders=0, request_timeout_s=3600.0, **PATIENT)
        result = await drive(plan(256, 0.0), Endpoint(server.url), options, on_done=lambda i, _: done.append(i))
    assert [violations(t) for t in result.timings] == [()] * 256
    verdict = judge(Slo((Objective("ttft_ms", 0.95, 60_000.0),)), result.timings)
    told = summarize(result.timings, mode="burst").as_json()
    assert told["errors"] == {"rate": 250 / 256, "by_class": {"timeout": 250}}
    assert (verdict.verdict, verdict.goodput, verdict.objectives[0].observed) == ("fail", 6 / 256, float("inf"))
    assert (told["ttft_ms"]["p95"], told["ttft_ms"]["infinite"]) == (None, ["p50", "p90", "p95"])
    assert told["ttft_ms"]["successes"]["p95"] < 60_000.0
    json.dumps([verdict.as_json(), told], allow_nan=False)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            answer(usage={"prompt_tokens": 20, "completion_tokens": 9}, inferloop={"num_tokens": 1}),
            "30 of 30 answers have other token counts by frame than by total",
        ),
        (
            answer(usage={"prompt_tokens": 25, "completion_tokens": 1}),
            "30 of 30 prompts have another length at the server",
        ),
        (
            answer(usage={"prompt_tokens": 20, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 19}}),
            "reuse_mismatch: 95% of the input tokens came from the cache, 0% are the workload's",
        ),
        (b"HTTP/1.1 422 No\r\ncontent-length: 6\r\n\r\nstream", "30 requests were refused as wrong: HTTP 422: stream"),
    ],
)
async def test_what_the_server_says_voids(data: bytes, why: str) -> None:
    requests = plan(30, 0.0)
    async with serving(always(data)) as server:
        result = await run(requests, server)
    assert any(why in found for found in checked(result, requests).void)


async def test_waiting_for_a_connection_voids() -> None:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(FRAMED)

    async with serving(play) as server:
        result = await run(plan(9, 0.0), server, max_connections=3)
    assert "6 requests waited in the load generator for one of its connections" in checked(result).void


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are set as on Linux")
async def test_running_out_of_descriptors_voids() -> None:
    """For real: the sender may open no more as soon as it has sent its first request, which the others follow."""
    came, failed = asyncio.Event(), asyncio.Event()

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        if number == 0:
            (sender,) = children()
            most = sender.num_fds()
            sender.rlimit(resource.RLIMIT_NOFILE, (most, most))
            came.set()
        else:
            await failed.wait()  # so that all need connections of their own
        writer.write(FRAMED)

    def seen(_: int, timing: RequestTiming) -> None:
        if timing.error is not None:
            failed.set()

    first, *others = plan(30, 0.0)
    requests = [first, *(replace(r, timed=replace(r.timed, after=0)) for r in others)]
    async with serving(play) as server:
        options = DriveOptions(num_connections=1, **PATIENT)
        result = await drive(requests, Endpoint(server.url), options, on_done=seen)
    assert came.is_set() and sum(t.error == "client" for t in result.timings) >= 1
    assert any(
        "failed in the load generator" in why and "Too many open files" in why for why in checked(result).void
    ), checked(result)
    told = summarize(result.timings, mode="closed")
    assert told.errors["rate"] == 0.0, "the service did nothing wrong"


async def test_a_lost_record_voids() -> None:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(FRAMED)

    async with serving(play) as server:
        result = await run(plan(100, 0.01), server)
    lossy = replace(result, timings=[t for i, t in enumerate(result.timings) if i % 5 != 3])
    assert any(why.startswith("Little's law is off by") for why in checked(lossy).void)


async def test_a_loop_that_does_other_work_voids() -> None:
    """The sender's own loop is kept busy after each answer, as tokenizing there would."""
    burnt_s = 0.03

    def work(_: int, __: RequestTiming) -> None:
        until = time.process_time() + burnt_s
        while time.process_time() < until:
            pass

    async with serving(always(FRAMED)) as server:
        options = DriveOptions(num_senders=0, **PATIENT)
        result = await drive(plan(60, 0.02), Endpoint(server.url), options, on_done=work)
    (stats,) = result.senders
    assert stats.cpu_s >= 60 * burnt_s
    assert any("the load generator's loop was" in why for why in checked(result).void), checked(result)


async def test_work_that_holds_the_loop_up_to_the_end_of_a_window_shows_too() -> None:
    def work(_: int, __: RequestTiming) -> None:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass

    async with serving(always(FRAMED)) as server:
        options = DriveOptions(num_senders=0, **PATIENT)
        result = await drive(plan(1, 0.0), Endpoint(server.url), options, on_done=work)
    assert max(result.senders[0].loop_lags_ns) >= 80 * NS_PER_MS


async def test_nothing_is_collected_in_a_window_and_what_is_all_the_same_is_told() -> None:
    states: list[tuple[bool, bool]] = []
    watchers = list(gc.callbacks)

    def seen(position: int, _: RequestTiming) -> None:
        states.append((gc.isenabled(), gc.get_freeze_count() > 0))
        waste: list[Any] = [[] for _ in range(20_000)]
        waste.append(waste)
        if position == 5:
            gc.collect()

    async with serving(always(FRAMED)) as server:
        options = DriveOptions(num_senders=0, **PATIENT)
        result = await drive(plan(10, 0.01), Endpoint(server.url), options, on_done=seen)
    assert states == [(False, True)] * 10
    (stats,) = result.senders
    assert len(stats.collector_pauses_ns) == 1 and stats.collector_pauses_ns[0] > 0
    assert (gc.isenabled(), gc.callbacks) == (True, watchers)


async def test_stamps_lie_around_those_of_the_server() -> None:
    """A server with fixed timings writes down when it read and when it wrote, by the clock that all share: of what
    passed between two processes, no stamp may be on the wrong side."""
    read: dict[str, int] = {}
    wrote: dict[str, list[int]] = {}
    frame = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        name = server.heads[number].split(b"x-request-id: ")[1].split(b"\r\n")[0].decode()
        read[name] = time.monotonic_ns()
        writer.write(SSE + b"connection: close\r\n\r\n")
        for i in range(5):
            await asyncio.sleep(0.02 if i == 0 else 0.005)
            wrote.setdefault(name, []).append(time.monotonic_ns())
            writer.write(frame)
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    told_ns: dict[str, int] = {}

    def told(_: int, timing: RequestTiming) -> None:
        told_ns[timing.request_id] = time.monotonic_ns()

    async with serving(play) as server:
        requests = plan(60, 0.01)
        result = await drive(
            *(requests, Endpoint(server.url), DriveOptions(num_senders=2, **PATIENT)),
            on_done=told,
        )
    assert [t.error for t in result.timings] == [None] * 60
    start_ns = min(t.t_intended_ns or 0 for t in result.timings)
    assert sorted((t.t_intended_ns or 0) - start_ns for t in result.timings) == [
        round(r.timed.at_s * NS_PER_S) for r in requests
    ]
    for t in result.timings:
        name = t.request_id
        assert (t.t_intended_ns or 0) <= t.t_send_ns <= read[name]
        assert t.t_headers_ns is not None and read[name] <= t.t_headers_ns <= t.chunks[0].t_ns
        assert sum(c.num_tokens for c in t.chunks) == 5
        seen = [c.t_ns for c in t.chunks for _ in range(c.num_tokens)]
        assert all(sent <= got for sent, got in zip(wrote[name], seen, strict=True))
        assert seen[-1] <= t.t_end_ns <= told_ns[name]
        first = ttft_ms(t)
        assert first is not None and first >= (wrote[name][0] - read[name]) / NS_PER_MS >= 20.0
