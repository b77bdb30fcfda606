"""What the client reaches and adds on this host is measured against a server that does nothing, in its own process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest

from inferloop.bench import calibrate as module
from inferloop.bench.calibrate import Calibration, calibrate
from inferloop.bench.drive import DriveOptions, DriveResult
from inferloop.bench.null_server import _answer
from inferloop.bench.render import RenderedRequest
from inferloop.bench.stream import StreamReader
from inferloop.core.errors import EnvironmentLacksError
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.timing import Chunk, RequestTiming


def null_servers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "inferloop.bench.null_server" in p.cmdline()]


async def test_all_numbers_are_there_and_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OPTIONS", DriveOptions(max_catch_up_ms=60_000.0))
    found = await calibrate()
    assert (found.num_tokens, found.paced_qps, found.num_failed) == (16, 200.0, 0)
    assert found.max_qps is not None and found.max_qps > 0
    assert found.ttft_p50_ms is not None and found.ttft_p95_ms is not None and found.send_delay_p95_ms is not None
    assert 0 < found.ttft_p50_ms <= found.ttft_p95_ms
    assert found.send_delay_p95_ms > 0
    json.dumps(asdict(found), allow_nan=False)
    assert null_servers() == []


async def test_figures_are_those_of_the_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paced: TTFTs of 1 to 200 ms, sent 2 ms late; every tenth fails and is in none of these. Flat out: one every
    half a millisecond."""
    plans: list[list[RenderedRequest]] = []

    async def drive(plan: list[RenderedRequest], *_: Any) -> DriveResult:
        plans.append(plan)
        made = []
        for i, request in enumerate(plan):
            due = round(request.timed.at_s * NS_PER_S)
            failed = len(plans) == 1 and i % 10 == 9
            send = due + 2 * NS_PER_MS if len(plans) == 1 else 0
            end = send + (i + 1) * NS_PER_MS if len(plans) == 1 else (i + 1) * NS_PER_MS // 2
            intended = due if len(plans) == 1 else None
            chunks = () if failed else (Chunk(end, 16),)
            made.append(
                RequestTiming("r", intended, send, send, end, chunks, 1, 16, error="connect" if failed else None)
            )
        return DriveResult(timings=made)

    monkeypatch.setattr(module, "drive", drive)
    found = await calibrate()
    assert found.max_qps == pytest.approx(2000.0)
    assert replace(found, max_qps=None) == Calibration(
        max_qps=None,
        num_tokens=16,
        paced_qps=200.0,
        ttft_p50_ms=99.0,  # the 90th of the 180 that are not multiples of 10
        ttft_p95_ms=189.0,
        send_delay_p95_ms=2.0,
        num_failed=20,
    )
    paced, flat = plans
    assert [r.timed.at_s for r in paced] == [i / 200 for i in range(200)]
    assert {r.timed.after for r in paced} == {None}
    assert [r.timed.after for r in flat] == [None] * 16 + list(range(1584)), "sixteen users who never pause"


async def test_a_null_server_that_does_not_start_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EnvironmentLacksError, match="null server"):
        await calibrate()
    assert null_servers() == []


async def test_cancelling_leaves_no_null_server(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def drive(*_: Any) -> DriveResult:
        begun.set()
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(module, "drive", drive)
    task = asyncio.create_task(calibrate())
    await begun.wait()
    assert len(null_servers()) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert null_servers() == []


def test_the_null_server_answers_each_request_however_it_is_cut_and_ends_with_its_input() -> None:
    words = [sys.executable, "-m", "inferloop.bench.null_server", "3"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        got = asyncio.run(_ask_in_pieces(port))
        process.stdin.close()
        assert process.wait(30) == 0
    assert got == _answer(3) * 2
    reader = StreamReader()
    reader.feed(1, got.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1])
    read = reader.finish()
    assert (read.error, read.num_output_tokens, read.counts, read.count_mismatch) == (None, 3, (1, 1, 1), False)


async def _ask_in_pieces(port: int) -> bytes:
    """Two requests, in pieces that end within the first one's head, its body and the second one's head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello"
    both = request * 2
    for start, end in ((0, 20), (20, 60), (60, 75), (75, len(both))):
        writer.write(both[start:end])
        await writer.drain()
        await asyncio.sleep(0.01)
    got = await reader.readexactly(2 * len(_answer(3)))
    writer.close()
    await writer.wait_closed()
    return got
