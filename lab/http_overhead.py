"""What a streamed token costs over HTTP: CPU of the server and of the client, apart, when the model costs nothing.

    python lab/http_overhead.py --streams 32 --step-ms 10 --rounds 5
    python lab/http_overhead.py --against ../other/src

A server process runs everything but the model: its runner has one token of ordinary text for every sequence at the next
multiple of `--step-ms`. Until then, without the interpreter lock, it sleeps, or with `--busy` as many threads walk
through memory as a real step would: then caches are not warm, and cores not free, when the host's turn comes. Clients
are the load generator (bench) and a protocol that only counts bytes (raw), in a process of their own, taking turns with
each server. Printed are medians over rounds, in microseconds of CPU per token as the kernel counts it per thread: of
the server's event loop, of its engine's thread, and of the client. `--against` serves from another source tree too, in
every round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import cast

import numpy as np
import uvloop

from inferloop.backends.http import HttpClient
from inferloop.backends.native import NativeGenerator
from inferloop.bench.drive import DriveOptions, drive
from inferloop.bench.render import RenderedRequest
from inferloop.core.request import TimedRequest
from inferloop.engine.compute.runner import GiveUp, RunnerInfo, never
from inferloop.engine.config import EngineConfig
from inferloop.engine.schedule.step import Float64, StepPlan, StepResult
from inferloop.engine.text.codec import Codec
from inferloop.models.identity import ServingIdentity
from inferloop.models.resolve import resolve
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import bind, serve

CHAT = "/v1/chat/completions"
_TEXT = Path(__file__).with_name("LOG.md").read_text()


class PacedRunner:
    """Answers at a steady pace with the tokens of one text, whatever it is asked."""

    def __init__(self, tokens: list[int], step_ms: float, max_sequences: int, num_busy: int) -> None:
        self._tokens, self._step_s = np.array(tokens, np.int32), step_ms / 1000
        self._memory = [np.zeros(1 << 19) for _ in range(num_busy)]
        self._busy = ThreadPoolExecutor(max(1, num_busy))
        self._plan: StepPlan | None = None
        blocks = 64 * max_sequences
        self._info = RunnerInfo("paced", "1", "cpu", "int", True, 49152, 1024, 16, blocks)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        self._plan = plan

    def wait(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None, "nothing was submitted"
        end_s = (time.monotonic() // self._step_s + 1) * self._step_s
        if self._memory:
            wait([self._busy.submit(_walk, memory, end_s) for memory in self._memory])
        else:
            time.sleep(max(0.0, end_s - time.monotonic()))
        sampled = plan.sample_rows >= 0
        offsets = np.zeros(plan.num_sequences + 1, np.int32)
        np.cumsum(sampled, out=offsets[1:])
        places = (plan.first_positions + 7 * plan.slots)[sampled] % len(self._tokens)
        return StepResult(plan.step_id, offsets, self._tokens[places])


def _walk(memory: Float64, end_s: float) -> None:
    while time.monotonic() < end_s:
        memory.sum()


def _tid_file(port_file: Path) -> Path:
    return port_file.with_suffix(".tid")


def run_server(step_ms: float, max_sequences: int, num_busy: int, port_file: Path) -> None:
    """The process under test."""
    codec = Codec(resolve("smollm2-135m-instruct"))
    runner = PacedRunner(codec.tokenizer.encode(_TEXT, allow_special=False), step_ms, max_sequences, num_busy)
    identity = ServingIdentity("demo", "0" * 64, "none", "lab", "1", codec.tokenizer.digest, codec.template_digest)
    config = EngineConfig(max_sequences=max_sequences)
    generator = NativeGenerator(codec, runner, config, identity, answer_style=codec.answer_style)
    generator.start()
    _tid_file(port_file).write_text(str(generator._engine._thread.native_id))
    try:
        serve(build_app(generator, ServeConfig(), DropSink()), bind("127.0.0.1", 0), port_file=port_file)
    finally:
        generator.stop()


class Raw(asyncio.Protocol):
    """Sends one request and counts what comes back, until the server says that it was all."""

    def __init__(self, body: bytes) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._body, self._num_reads = body, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self._body)}\r\n\r\n"
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        self._num_reads += 1
        if data.endswith(b"0\r\n\r\n"):
            self.done.set_result(self._num_reads)
            self._transport.close()


def _thread_ns(pid: int) -> dict[int, int]:
    """CPU time of every thread, by its id."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return found


def _body(num_tokens: int, i: int) -> bytes:
    messages = [{"role": "user", "content": f"Say a few words about number {i}."}]
    asked = {"model": "demo", "messages": messages, "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    return json.dumps(asked).encode()


class Client:
    """Sends `num_streams` streamed chats at once and reads them to their ends."""

    def __init__(self, url: str, num_streams: int, num_tokens: int) -> None:
        self._url, self._num_streams, self._num_tokens = url, num_streams, num_tokens

    async def bench(self) -> dict[str, float]:
        client = HttpClient(self._url)
        timed = [TimedRequest(i, 0.0, 20, self._num_tokens, -1, 0, i) for i in range(self._num_streams)]
        plan = [RenderedRequest(t, CHAT, _body(self._num_tokens, i), 20, 0, False) for i, t in enumerate(timed)]
        result = await drive(plan, client, "burst", DriveOptions())
        await client.close()
        assert all(t.ok and t.num_output_tokens == self._num_tokens for t in result.timings), result.details
        gaps = sorted(
            (b.t_ns - a.t_ns) / 1e6 for t in result.timings for a, b in zip(t.chunks, t.chunks[1:], strict=False)
        )
        return {"itl_p50": statistics.median(gaps), "itl_p99": gaps[len(gaps) * 99 // 100]}

    async def raw(self) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        port = int(self._url.rpartition(":")[2])
        made = [
            await loop.create_connection(lambda i=i: Raw(_body(self._num_tokens, i)), "127.0.0.1", port)  # type: ignore[misc]
            for i in range(self._num_streams)
        ]
        reads = [await protocol.done for _, protocol in made]
        return {"reads_per_token": statistics.mean(reads) / self._num_tokens}


def _measure(name: str, url: str, pid: int, engine_tid: int, num_streams: int, num_tokens: int) -> dict[str, float]:
    """One run of one client against one server, whose event loop is its first thread."""
    client = Client(url, num_streams, num_tokens)
    before, client_before = _thread_ns(pid), time.process_time_ns()
    begun = time.monotonic()
    found = uvloop.run({"bench": client.bench, "raw": client.raw}[name]())
    seconds = time.monotonic() - begun
    client_ns, after = time.process_time_ns() - client_before, _thread_ns(pid)
    spent = {tid: ns - before.get(tid, 0) for tid, ns in after.items()}
    total = num_streams * num_tokens
    per_token = {"loop": spent[pid], "engine": spent[engine_tid], "client": client_ns}
    return {**{key: ns / 1000 / total for key, ns in per_token.items()}, "tok_s": total / seconds, **found}


@contextlib.contextmanager
def _server(source: Path | None, options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """URL, process id and id of the engine's thread of a server of its own; it serves from `source`, if given."""
    port_file = Path(f"/tmp/http_overhead.{os.getpid()}.{'other' if source else 'this'}.json")
    port_file.unlink(missing_ok=True)
    env = dict(os.environ) if source is None else {**os.environ, "PYTHONPATH": str(source.resolve())}
    argv = [sys.executable, __file__, "--serve", str(port_file)]
    argv += ["--step-ms", str(options.step_ms), "--streams", str(options.streams), "--busy", str(options.busy)]
    process = subprocess.Popen(argv, env=env)
    try:
        while not port_file.exists():
            assert process.poll() is None, "the server did not start"
            time.sleep(0.05)
        told = json.loads(port_file.read_text())
        yield f"http://127.0.0.1:{told['port']}", told["pid"], int(_tid_file(port_file).read_text())
    finally:
        process.terminate()
        process.wait()
        port_file.unlink(missing_ok=True)
        _tid_file(port_file).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--busy", type=int, default=0, help="threads that are busy while a step lasts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", nargs="+", default=["bench", "raw"], choices=["bench", "raw"])
    parser.add_argument("--against", type=Path, help="src folder of another tree, served from in every round too")
    options = parser.parse_args()
    if options.serve is not None:
        run_server(options.step_ms, options.streams, options.busy, options.serve)
        return
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        servers = {"this": stack.enter_context(_server(None, options))}
        if options.against is not None:
            servers["other"] = stack.enter_context(_server(options.against, options))
        for i in range(-1, options.rounds):  # round -1 warms up
            for which, server in servers.items():
                for name in options.clients:
                    found = _measure(name, *server, options.streams, options.tokens)
                    if i >= 0:
                        samples.setdefault((which, name), []).append(found)
    for (which, name), rows in samples.items():
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(f"{which:6} {name:6} " + "  ".join(f"{key} {value:.2f}" for key, value in medians.items()))


if __name__ == "__main__":
    main()
