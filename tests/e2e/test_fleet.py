"""Real replica processes (the scripted engine behind our own server), a real gateway, real deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.waiting import PATIENCE_S, until, until_idle

from inferloop.backends.http import HttpClient, HttpError, Response
from inferloop.backends.protocols import LaunchSpec
from inferloop.backends.serve_process import launch_spec
from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import LaunchError, PortInUseError
from inferloop.core.units import NS_PER_S
from inferloop.fleet.act.ports import bind_listener
from inferloop.fleet.act.supervise import Fleet, FleetConfig
from inferloop.fleet.decide.life import Stop
from inferloop.fleet.decide.replicas import ReplicaPolicy
from inferloop.records.event import GatewayEvent
from inferloop.records.sink import JsonlSink

CHAT = "/v1/chat/completions"
POLICY = ReplicaPolicy(backoff_base_s=0.05, kill_grace_s=0.2)
HELD = 'while [ -e "$0" ]; do sleep 0.02; done; exec "$@"'
"""What a shell makes of a file and a command: it waits until there is no such file."""


def scripted(**script: object) -> LaunchSpec:
    pairs = [f"{key}={value}" for key, value in script.items()]
    options = {"script": pairs, "replica": "{replica}"}
    return launch_spec("demo", options, backend="scripted", drain_timeout_s=60.0)


class AdvancingClock(RealClock):
    """Real time, and what was skipped of it."""

    def __init__(self) -> None:
        self.skipped_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.skipped_ns


@asynccontextmanager
async def running(
    tmp_path: Path, num_replicas: int, spec: LaunchSpec, *, clock: Clock | None = None, probe_period_s: float = 0.1
) -> AsyncIterator[tuple[Fleet, HttpClient]]:
    before = set(psutil.Process().children(recursive=True))
    settings = FleetConfig(tmp_path / "logs", probe_period_s=probe_period_s, probe_timeout_s=PATIENCE_S, policy=POLICY)
    sink = JsonlSink(tmp_path / "gateway.jsonl")
    async with Fleet(spec, settings, sink=sink, clock=clock) as fleet:
        await fleet.start(num_replicas)
        client = HttpClient(fleet.url)
        yield fleet, client
        await client.close()
    sink.close()
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert not left, f"left behind: {left}"


def body(max_tokens: int = 8, *, stream: bool = True, content: str = "Hello") -> bytes:
    messages = [{"role": "user", "content": content}]
    return msgspec.json.encode({"model": "demo", "messages": messages, "max_tokens": max_tokens, "stream": stream})


async def chat(client: HttpClient, data: bytes) -> Response:
    headers = [("content-type", "application/json")]
    return await client.request("POST", CHAT, body=data, headers=headers, timeout_s=2 * PATIENCE_S)


def events(tmp_path: Path) -> list[GatewayEvent]:
    decode = msgspec.json.Decoder(GatewayEvent).decode
    return [decode(line) for line in (tmp_path / "gateway.jsonl").read_bytes().splitlines()]


def pid_of(fleet: Fleet, replica_id: str) -> int:
    pid = next(r.pid for r in fleet.status().replicas if r.replica_id == replica_id)
    assert pid is not None
    return pid


async def test_64_at_once_are_balanced_counted_and_leave_one_event_each(tmp_path: Path) -> None:
    spec = scripted(ttft_ms=1, tpot_ms=1, max_concurrency=64)
    async with running(tmp_path, 2, spec, probe_period_s=PATIENCE_S) as (fleet, client):
        engines = [psutil.Process(pid_of(fleet, replica_id)) for replica_id in ("r0", "r1")]
        for engine in engines:
            engine.suspend()  # none is answered before all are there
        asking = [asyncio.create_task(chat(client, body(stream=i % 2 == 0))) for i in range(64)]
        await until(lambda: fleet.status().num_in_flight == 64)
        assert [r.in_flight for r in fleet.status().replicas] == [32, 32]
        for engine in engines:
            engine.resume()
        responses = await asyncio.gather(*asking)
        texts = [await response.read() for response in responses]
        assert {response.status for response in responses} == {200}
        assert all(b"[DONE]" in text for text in texts[::2])
        await until(lambda: fleet.status().num_in_flight == 0)
        by_replica = [response.header("x-inferloop-replica") for response in responses]
        assert sorted(set(by_replica), key=str) == ["r0", "r1"] and by_replica.count("r0") == 32
    rows = events(tmp_path)
    assert len(rows) == 64 == len({row.event_id for row in rows})
    assert {(row.status, row.error_class, row.num_retries) for row in rows} == {(200, None, 0)}
    told = {response.header("x-inferloop-identity") for response in responses}
    assert {row.identity_digest for row in rows} == told and len(told) == 1 and None not in told


async def test_kill_9_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    async with running(tmp_path, 2, scripted(ttft_ms=5, tpot_ms=20)) as (fleet, client):
        response = await chat(client, body(10_000))
        victim = response.header("x-inferloop-replica")
        assert victim is not None
        pieces = response.pieces()
        await anext(pieces)
        os.kill(pid_of(fleet, victim), signal.SIGKILL)
        frames = b"".join([data async for _, data in pieces]).split(b"\n\n")
        assert frames[-1] == b"", "the stream ended at an event boundary, and the response in order"
        assert msgspec.json.decode(frames[-2].removeprefix(b"data: "))["error"]["code"] == "replica_failed"
        for _ in range(5):
            answer = await chat(client, body())
            assert answer.status == 200 and b"[DONE]" in await answer.read()
        await until(lambda: {r.replica_id: r.num_restarts for r in fleet.status().replicas}[victim] == 1)
        await until(lambda: fleet.status().num_ready == 2 and fleet.status().num_in_flight == 0)


async def test_all_replicas_killed_is_503_until_they_are_back(tmp_path: Path) -> None:
    held, spec = tmp_path / "held", scripted(ttft_ms=1, tpot_ms=1)
    spec = replace(spec, argv=("sh", "-c", HELD, str(held), *spec.argv))
    async with running(tmp_path, 2, spec) as (fleet, client):
        held.touch()  # nobody is back before both are gone
        for replica_id in ("r0", "r1"):
            os.kill(pid_of(fleet, replica_id), signal.SIGKILL)
        await until(lambda: fleet.status().num_ready == 0)
        response = await chat(client, body())
        assert (response.status, response.header("retry-after")) == (503, "1")
        held.unlink()
        await until(lambda: fleet.status().num_ready == 2)
        assert (await chat(client, body())).status == 200


async def test_callers_who_leave_return_in_flight_to_zero_and_free_the_replica(tmp_path: Path) -> None:
    async with running(tmp_path, 2, scripted(ttft_ms=300, tpot_ms=100)) as (fleet, client):
        asking = [asyncio.create_task(chat(client, body(10_000))) for _ in range(16)]
        await until(lambda: fleet.status().num_in_flight == 16)
        for task in asking[:8]:
            task.cancel()
        streams = await asyncio.gather(*asking[8:])
        await until(lambda: fleet.status().num_in_flight == 8)
        for stream in streams:
            stream.abort()
        await until(lambda: fleet.status().num_in_flight == 0)
        urls = [r.url for r in fleet.status().replicas]
        assert len(urls) == 2
        for url in urls:
            assert url is not None
            replica = HttpClient(url)
            await until_idle(replica)
            await replica.close()
    assert {row.error_class for row in events(tmp_path)} == {"disconnect"}


async def test_30_oversize_prompts_harm_nobody(tmp_path: Path) -> None:
    async with running(tmp_path, 2, scripted(ttft_ms=1, tpot_ms=1, context_length=200)) as (fleet, client):
        for _ in range(30):
            response = await chat(client, body(content="x" * 1000))
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
        assert (await chat(client, body())).status == 200
        assert fleet.status().num_ready == 2
        assert not [d for _, d in fleet.status().recent if isinstance(d, Stop)]


async def test_a_healthy_endpoint_before_a_dead_engine_is_replaced_once(tmp_path: Path) -> None:
    spec = scripted(ttft_ms=1, tpot_ms=1, error_rate=1.0, error_kind="stall", error_after_tokens=4)
    clock = AdvancingClock()
    async with running(tmp_path, 1, spec, clock=clock) as (fleet, client):
        response = await chat(client, body(100))
        pieces = response.pieces()
        text = (await anext(pieces))[1]

        def stops() -> list[Stop]:
            return [d for _, d in fleet.status().recent if isinstance(d, Stop)]

        def given_up() -> bool:
            clock.skipped_ns += NS_PER_S  # for what the policy allows a replica, nobody waits here
            return bool(stops())

        await until(given_up)
        text += b"".join([data async for _, data in pieces])
        assert b'"replica_failed"' in text
        await until(lambda: fleet.status().num_ready == 1)
        assert len(stops()) == 1 and "no step for" in stops()[0].why
        assert fleet.status().replicas[0].num_restarts == 1


async def test_draining_one_replica_lets_its_stream_finish(tmp_path: Path) -> None:
    async with running(tmp_path, 2, scripted(ttft_ms=5, tpot_ms=20)) as (fleet, client):
        response = await chat(client, body(60))
        busy = response.header("x-inferloop-replica")
        assert busy is not None
        removing = asyncio.gather(*(fleet.remove_replica(busy, PATIENCE_S) for _ in range(2)))
        await until(lambda: fleet.status().num_ready == 1)
        others = [await chat(client, body(2)) for _ in range(6)]
        assert {r.header("x-inferloop-replica") for r in others} == {"r0", "r1"} - {busy}
        text = await response.read()
        assert b"[DONE]" in text and b"error" not in text
        await removing
        assert [r.replica_id for r in fleet.status().replicas] == [r for r in ("r0", "r1") if r != busy]
        assert await fleet.add_replicas(1) == ["r2"]
        assert fleet.status().num_ready == 2


async def test_stopping_the_fleet_lets_a_stream_finish(tmp_path: Path) -> None:
    async with running(tmp_path, 1, scripted(ttft_ms=5, tpot_ms=10)) as (fleet, client):
        response = await chat(client, body(60))
        stopping = [asyncio.create_task(fleet.stop(PATIENCE_S)) for _ in range(2)]
        assert b"[DONE]" in await response.read()
        await asyncio.gather(*stopping)
        with pytest.raises(HttpError):
            await chat(client, body())


async def test_cancelling_a_start_leaves_nothing(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    never = LaunchSpec("test", (sys.executable, "-c", "import time; time.sleep(600)"), "none")
    fleet = Fleet(never, FleetConfig(tmp_path))
    starting = asyncio.create_task(fleet.start(2))
    await until(lambda: all(r.pid for r in fleet.status().replicas) and len(fleet.status().replicas) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_cancelling_a_stop_kills_even_the_stubborn(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    program = (
        "import http.server, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.send_header('content-length', '0'); self.end_headers()\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    fleet = Fleet(
        LaunchSpec("test", (sys.executable, "-c", program, "{port}"), "none", drain_timeout_s=600),
        FleetConfig(tmp_path),
    )
    await fleet.start(1)
    stopping = asyncio.create_task(fleet.stop())
    await until(lambda: any(isinstance(d, Stop) for _, d in fleet.status().recent))
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await asyncio.wait_for(fleet.stop(), PATIENCE_S)
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_replica_that_cannot_start_is_a_launch_error_and_nothing_runs(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    spec = LaunchSpec("test", (sys.executable, "-c", "import sys; sys.exit('no such model')"), "none")
    fleet = Fleet(spec, FleetConfig(tmp_path))
    with pytest.raises(LaunchError, match="no such model"):
        await fleet.start(2)
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_taken_port_is_said_before_anything_is_launched(tmp_path: Path) -> None:
    taken = bind_listener("127.0.0.1", 0)
    fleet = Fleet(scripted(), FleetConfig(tmp_path, port=taken.getsockname()[1]))
    with pytest.raises(PortInUseError):
        await fleet.start(1)
    assert fleet.status().replicas == () and fleet.status().url is None
    taken.close()


OWNER = """
import asyncio, signal, sys
from pathlib import Path
import msgspec
from inferloop.backends.protocols import LaunchSpec
from inferloop.fleet.act.supervise import Fleet, FleetConfig
async def main():
    spec = msgspec.json.decode(sys.argv[1], type=LaunchSpec)
    async with Fleet(spec, FleetConfig(Path(sys.argv[2]))) as fleet:
        await fleet.start(2)
        print("ready", flush=True)
        await asyncio.sleep(600)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_fleet_whose_owner_dies_leaves_no_orphan(tmp_path: Path, number: signal.Signals) -> None:
    spec = scripted()
    argv = [sys.executable, "-c", OWNER, msgspec.json.encode(spec).decode(), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        tree = psutil.Process(owner.pid).children(recursive=True)
        assert len(tree) == 4, "two guards, two engines"
        owner.send_signal(number)
        owner.wait(PATIENCE_S)
    _, alive = psutil.wait_procs(tree, timeout=PATIENCE_S)
    assert not alive
