"""`inferloop serve` as a process: its port, its signals, its exit codes, its files."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.waiting import PATIENCE_S, until, until_async

from inferloop.backends.http import HttpClient
from inferloop.backends.serve_process import launch_spec
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.records.event import ReplicaEvent

SERVE = [sys.executable, "-m", "inferloop", "serve"]


@contextmanager
def scripted(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A scripted server and its URL, read from the line it prints."""
    command = [*SERVE, "m", "--backend", "scripted", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, f"http://127.0.0.1:{json.loads(line)['port']}"
    finally:
        process.kill()
        process.communicate()


def events_of(path: Path) -> list[ReplicaEvent]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [msgspec.json.decode(line, type=ReplicaEvent) for line in data.splitlines()]


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "x", "stream": True, "ignore_eos": True, **fields}).encode()


async def draining(client: HttpClient) -> bool:
    ready = await client.request("GET", "/health/ready")
    return "draining" in str(await ready.json()) and ready.status == 503


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_leaves_with_zero(tmp_path: Path, signum: signal.Signals) -> None:
    """Two answers are under way; the second one lasts until its caller has seen enough, and holds the server."""
    events = tmp_path / "events.jsonl"
    flags = ("--script", "tpot_ms=10", "--events", str(events), "--drain-timeout-s", "300")
    with scripted(*flags) as (process, url):
        client = HttpClient(url)
        stream = await client.request("POST", "/v1/completions", body=body(max_tokens=50))
        endless = await client.request("POST", "/v1/completions", body=body(max_tokens=30_000))
        process.send_signal(signum)
        await until_async(lambda: draining(client))
        refused = await client.request("POST", "/v1/completions", body=body())
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "overloaded")
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        endless.abort()
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        await client.close()
    ends = {(e.finish_reason, e.error_class) for e in events_of(events)}
    assert ends == {("length", None), ("error", "overloaded"), ("abort", "disconnect")}


async def test_drain_timeout_and_second_signal_cut_with_an_error_event(tmp_path: Path) -> None:
    for timeout_s, num_signals in (("0.2", 1), ("300", 2)):
        events = tmp_path / f"{num_signals}.jsonl"
        flags = ("--script", "tpot_ms=10", "--events", str(events), "--drain-timeout-s", timeout_s)
        with scripted(*flags) as (process, url):
            client = HttpClient(url)
            stream = await client.request("POST", "/v1/completions", body=body(max_tokens=30_000))
            process.send_signal(signal.SIGTERM)
            if num_signals == 2:
                await until_async(lambda: draining(client))  # noqa: B023  two at once may arrive as one
                process.send_signal(signal.SIGTERM)
            data = await stream.read()
            await client.close()
            last = json.loads(data.decode().rstrip().rpartition("data: ")[2])
            assert last["error"]["code"] == "engine_error"
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        assert [(e.finish_reason, e.error_class) for e in events_of(events)] == [("abort", "drain")]


async def test_kill_leaves_whole_events(tmp_path: Path) -> None:
    """No close is needed for events to reach the file: a kill loses only what the writer had not taken yet."""
    events = tmp_path / "events.jsonl"
    with scripted("--script", "ttft_ms=0", "--script", "tpot_ms=10", "--events", str(events)) as (process, url):
        client = HttpClient(url)
        for _ in range(20):
            await (await client.request("POST", "/v1/completions", body=body(max_tokens=1))).read()
        await until(lambda: events.read_bytes().count(b"\n") == 20)
        await client.request("POST", "/v1/completions", body=body(max_tokens=30_000))
        process.kill()
        process.wait()
        await client.close()
    assert [e.finish_reason for e in events_of(events)] == ["length"] * 20


def test_port_in_use_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [*SERVE, "/no/such/model.gguf", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["/no/such/model.gguf"], 3, "no such file"),
        (["smollm2-135m-instrukt"], 2, "did you mean"),
        (["m", "--backend", "scripted", "--script", "ttft=1"], 2, "did you mean ttft_ms"),
        (["m", "--backend", "scripted", "--script", "tpot_ms=-1"], 2, "not negative"),
        (["m", "--backend", "scripted", "--capture", "text"], 2, "--events"),
        (["m", "--backend", "scripted", "--events", "/proc/nope/e.jsonl"], 2, "cannot write events"),
        (["m", "--backend", "scripted", "--port-file", "/no/such/folder/port"], 2, "/no/such/folder does not exist"),
        (["m", "--backend", "scripted", "--host", "192.0.2.1"], 3, "192.0.2.1"),
    ],
)
def test_wrong_use_is_one_clear_line(flags: list[str], code: int, says: str) -> None:
    done = subprocess.run([*SERVE, *flags, "--port", "0"], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert says in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


async def test_launch_spec_runs_under_the_process_runner(tmp_path: Path) -> None:
    spec = launch_spec("m", {"script": ["ttft_ms=1", "text=hello"], "metric_aliases": "vllm"}, backend="scripted")
    process = await ReplicaProcess.start_ready(spec, log_path=tmp_path / "log", replica_id="blue-1")
    try:
        client = HttpClient(process.url)
        response = await client.request("GET", "/metrics")
        assert response.header("x-inferloop-replica") == "blue-1"
        assert b"vllm:num_requests_running" in await response.read()
        await client.close()
    finally:
        await process.stop(10)
    assert process.returncode == 0
