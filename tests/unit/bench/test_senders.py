"""Load from processes of their own, which end with their work, with their caller, and when they are killed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.bench.test_connections import FRAMED, Server, always, run, serving
from tests.waiting import PATIENCE_S, until

from inferloop.bench.drive import DriveOptions, Endpoint, drive
from inferloop.bench.messages import (
    Frames,
    FromSender,
    Halt,
    Job,
    Ready,
    Refused,
    Start,
    decode_from_sender,
    decode_to_sender,
    framed,
)
from inferloop.bench.plan import steps_of
from inferloop.bench.render import RenderedRequest
from inferloop.bench.senders import Sender, _launch
from inferloop.bench.share import parts
from inferloop.core.errors import UsageError
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.units import NS_PER_MS
from inferloop.measure.timing import RequestTiming


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "inferloop.bench.sender" in p.cmdline()]


def plan(count: int, *, every_s: float = 0.0, session: bool = False) -> list[RenderedRequest]:
    return [
        RenderedRequest(
            TimedRequest(
                index=i,
                at_s=every_s if session and i else i * every_s,
                segments=(Segment(i, 20),),
                output_tokens=1,
                after=i - 1 if session and i else None,
                session=1 if session else None,
            ),
            *("/v1/chat/completions", b'{"a":1}', 20, 0, False),
        )
        for i in range(count)
    ]


PATIENT: dict[str, Any] = {"max_catch_up_ms": 60_000.0, "cut_off_s": 30.0}


async def test_senders_share_a_plan_and_its_clock() -> None:
    async with serving(always(FRAMED)) as server:
        found: list[int] = []
        options = DriveOptions(num_senders=2, **PATIENT)
        result = await drive(
            plan(40, every_s=0.005), Endpoint(server.url), options, on_done=lambda i, _: found.append(i)
        )
    assert [t.error for t in result.timings] == [None] * 40
    assert sorted(found) == list(range(40))
    intended = sorted(t.t_intended_ns or 0 for t in result.timings)
    assert [(t - intended[0]) // NS_PER_MS for t in intended] == [5 * i for i in range(40)]
    assert len({t.request_id for t in result.timings}) == len(set(server.heads)) == 40
    assert len({s.pid for s in result.senders} - {os.getpid()}) == 2
    assert all(s.cpu_s > 0 and s.window_s > 0.1 and s.loop_lags_ns and s.timer_errors_ns for s in result.senders)
    assert sum(s.num_bytes_received for s in result.senders) == 40 * len(FRAMED)
    assert [s.collector_pauses_ns for s in result.senders] == [(), ()]
    assert len({s.priority for s in result.senders}) == 1
    assert result.in_flight is not None
    assert children() == []


async def test_senders_share_what_may_be_in_flight() -> None:
    async with serving(always(FRAMED)) as server:
        options = DriveOptions(num_senders=2, max_in_flight=2, max_connections=3, **PATIENT)
        result = await drive(plan(20), Endpoint(server.url), options)
    assert [t.error for t in result.timings] == [None] * 20
    assert server.num_connections <= 3


async def test_nobody_waits_for_a_sender_that_does_not_know_yet_that_it_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its link is being closed the loop stands still, and a sender that has told all hears of it only then."""
    waited: list[float | None] = []

    class Watched(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if threading.current_thread() is threading.main_thread() and self.returncode is None:
                waited.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr("inferloop.bench.senders.subprocess.Popen", Watched)
    monkeypatch.setattr("inferloop.bench.senders._END_S", PATIENCE_S)
    async with serving(always(FRAMED)) as server:
        result = await drive(plan(5), Endpoint(server.url), DriveOptions(**PATIENT))
    assert [t.error for t in result.timings] == [None] * 5
    assert waited == []


async def test_timings_need_not_be_kept() -> None:
    seen: list[RequestTiming] = []
    async with serving(always(FRAMED)) as server:
        options = DriveOptions(keep_timings=False, **PATIENT)
        result = await drive(plan(5), Endpoint(server.url), options, on_done=lambda _, t: seen.append(t))
    assert (len(seen), result.timings, result.num_unsent) == (5, [], 0)


async def test_a_sender_that_dies_fails_its_requests_as_the_clients_and_ends_the_window() -> None:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        if number == 20:
            children()[0].kill()
        writer.write(FRAMED)

    async with serving(play) as server, asyncio.timeout(60):
        options = DriveOptions(num_senders=2, **PATIENT)
        requests = [*plan(40, every_s=0.01), *plan(2000, every_s=3600.0)[40:]]
        result = await drive(requests, Endpoint(server.url), options)
    errors = Counter(t.error for t in result.timings)
    assert errors["client"] >= 1
    assert f"code {-signal.SIGKILL}" in result.details["client"]
    assert result.num_unsent >= 2000 - 40
    assert len(result.senders) == 1
    assert children() == []


async def test_a_sender_that_dies_before_the_window_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    result = await drive(plan(3), Endpoint("http://127.0.0.1:9"), DriveOptions(**PATIENT))
    assert [t.error for t in result.timings] == ["client"] * 3


async def test_a_sender_that_dies_while_it_is_given_its_share_is_told_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It reads nothing, so that whoever writes to it has to wait."""
    program = tmp_path / "deaf"
    program.write_text("#!/bin/sh\nsleep 0.5\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    requests = [replace(r, body=bytes(1 << 20)) for r in plan(8)]
    async with asyncio.timeout(60):
        result = await drive(requests, Endpoint("http://127.0.0.1:9"), DriveOptions(**PATIENT))
    assert [t.error for t in result.timings] == ["client"] * 8


async def test_a_sender_heeds_a_word_that_comes_before_it_has_begun() -> None:
    later = plan(2, every_s=3600.0)[1:]
    job = Job("http://127.0.0.1:9", None, None, False, DriveOptions(**PATIENT), None, bytes(16), 1)
    for is_ready in (True, False):
        sender = Sender(lambda _: None)
        await sender.start()
        try:
            async with asyncio.timeout(60):
                await sender.hand(job, parts(later, steps_of([r.timed for r in later]), [0]))
                if is_ready:
                    await sender.ready
                sender.begin(time.monotonic_ns())
                sender.halt("cut")
                assert (await sender.report).num_started == 0
        finally:
            await sender.close()


async def test_cancelling_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferloop.bench.drive._LAST_WORDS_S", PATIENCE_S)

    async def never(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        pass

    async with serving(never) as server:
        seen: list[RequestTiming] = []
        options = DriveOptions(num_senders=2, **PATIENT)
        task = asyncio.create_task(drive(plan(2), Endpoint(server.url), options, on_done=lambda _, t: seen.append(t)))
        await until(lambda: len(server.heads) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [t.error for t in seen] == ["censored"] * 2
    assert children() == []
    assert gc.isenabled()


async def test_a_sender_ends_with_its_caller() -> None:
    ours, process = _launch()
    assert process.poll() is None
    ours.close()
    assert await asyncio.to_thread(process.wait, 30) == 1


async def test_what_cannot_be_driven_is_refused_before_anything_starts() -> None:
    endpoint = Endpoint("http://127.0.0.1:9")
    with pytest.raises(UsageError, match="core 4095"):
        await drive(plan(1), endpoint, DriveOptions(sender_cores=(4095,)))
    with pytest.raises(UsageError, match="3 senders cannot share 2 requests in flight"):
        DriveOptions(num_senders=3, max_in_flight=2)
    with pytest.raises(UsageError, match="3 senders cannot share 2 connections"):
        DriveOptions(num_senders=3, max_connections=2)
    with pytest.raises(UsageError, match="2 cores are named for 1"):
        DriveOptions(sender_cores=(0, 1))
    with pytest.raises(UsageError, match="number 0"):
        await drive([*plan(1), *plan(1)], endpoint)
    with pytest.raises(UsageError, match="no certificates"):
        await drive(plan(1), Endpoint("https://x", ca_file=Path(__file__)))
    assert children() == []


async def test_a_conversation_goes_turn_by_turn_and_ends_with_a_failed_one() -> None:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(FRAMED if number < 3 else b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")

    async with serving(play) as server:
        result = await run(plan(6, every_s=0.01, session=True), server)
    assert [t.error for t in result.timings] == [None, None, None, "http_5xx"]
    assert [(t.session, t.turn, t.num_turns) for t in result.timings] == [(1, i, 6) for i in range(4)]
    assert (result.num_dropped_turns, result.num_unsent) == (2, 0)
    for before, after in zip(result.timings, result.timings[1:], strict=False):
        assert after.t_intended_ns == before.t_end_ns + 10 * NS_PER_MS


async def test_no_plan_is_no_load() -> None:
    for num_senders in (0, 1):
        result = await drive([], Endpoint("http://127.0.0.1:9"), DriveOptions(num_senders=num_senders))
        assert (result.timings, result.in_flight) == ([], None)


def test_messages_come_whole_however_they_are_cut() -> None:
    messages: list[FromSender] = [Ready(), Refused("no"), Ready()]
    data = b"".join(framed(m) for m in messages)
    for size in range(1, len(data) + 1):
        frames = Frames()
        found = [
            decode_from_sender(bytes(m)) for i in range(0, len(data), size) for m in frames.feed(data[i : i + size])
        ]
        assert found == messages
    assert [decode_to_sender(framed(m)[4:]) for m in (Start(5), Halt("cut"))] == [Start(5), Halt("cut")]
