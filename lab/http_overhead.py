"""What a streamed token costs over HTTP: CPU of the server and of the client, apart, when the model costs nothing.

    python -m lab.http_overhead --streams 32 --step-ms 10 --rounds 5
    python -m lab.http_overhead --against ../other/src

A server process runs everything but the model: its runner has one token of ordinary text for every sequence at the next
multiple of `--step-ms`. Until then, without the interpreter lock, it sleeps; with `--busy` it walks through memory, as
a real step would, with as many threads: then caches are not warm, and cores not free, when the host's turn comes.
Clients are the load generator (bench) and a protocol that only counts bytes (raw), in a process of their own, taking
turns with each server. Printed are medians over rounds, in microseconds of CPU per token as the kernel counts it per
thread: of the server's event loop, of its engine's thread beside the runner, and of the client. `--against` serves from
another source tree too, in every round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import uvloop
from lab.servers import serving

from inferloop.backends.native import NativeGenerator
from inferloop.bench.drive import DriveOptions, Endpoint, drive
from inferloop.bench.render import RenderedRequest
from inferloop.core.request import Segment, TimedRequest
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

    def __init__(self, tokens: list[int], step_ms: float, max_sequences: int, num_busy: int, cpu_file: Path) -> None:
        """`cpu_file` gets the CPU time that the runner itself takes of the engine's thread, in ns."""
        self._tokens, self._step_s = np.array(tokens, np.int32), step_ms / 1000
        self._memory = np.zeros(1 << 19) if num_busy else None
        for _ in range(num_busy - 1):
            threading.Thread(target=_walk, args=(np.zeros(1 << 19), math.inf), daemon=True).start()
        self._cpu_ns = np.memmap(cpu_file, np.int64, "w+", shape=1)
        self._plan: StepPlan | None = None
        self._info = RunnerInfo("paced", "1", "cpu", "int", True, 49152, 1024, 16, 64 * max_sequences)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        self._plan = plan

    def wait(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None, "nothing was submitted"
        begun_ns = time.thread_time_ns()
        end_s = (time.monotonic() // self._step_s + 1) * self._step_s
        if self._memory is None:
            time.sleep(max(0.0, end_s - time.monotonic()))
        else:
            _walk(self._memory, end_s)
        sampled = plan.sample_rows >= 0
        offsets = np.zeros(plan.num_sequences + 1, np.int32)
        np.cumsum(sampled, out=offsets[1:])
        places = (plan.first_positions + 7 * plan.slots)[sampled] % len(self._tokens)
        result = StepResult(plan.step_id, offsets, self._tokens[places])
        self._cpu_ns[0] += time.thread_time_ns() - begun_ns
        return result


def _walk(memory: Float64, end_s: float) -> None:
    while time.monotonic() < end_s:
        memory.sum()


def _tid_file(port_file: Path) -> Path:
    return port_file.with_suffix(".tid")


def run_server(step_ms: float, max_sequences: int, num_busy: int, port_file: Path) -> None:
    """The process under test."""
    codec = Codec(resolve("smollm2-135m-instruct"))
    cpu_file = port_file.with_suffix(".cpu")
    runner = PacedRunner(codec.tokenizer.encode(_TEXT, allow_special=False), step_ms, max_sequences, num_busy, cpu_file)
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

    def __init__(self, path: str, body: bytes) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._path, self._body, self._num_reads = path, body, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = f"POST {self._path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self._body)}\r\n\r\n"
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
    """Sends streamed requests for `num_tokens` tokens each, all at once, and reads them to their ends."""

    def __init__(self, url: str, path: str, bodies: Sequence[bytes], num_tokens: int) -> None:
        self._url, self._path, self._bodies, self._num_tokens = url, path, bodies, num_tokens

    async def bench(self) -> dict[str, float]:
        timed = [TimedRequest(i, 0.0, (Segment(i, 20),), self._num_tokens) for i in range(len(self._bodies))]
        plan = [RenderedRequest(t, self._path, body, 20, 0, False) for t, body in zip(timed, self._bodies, strict=True)]
        result = await drive(plan, Endpoint(self._url), DriveOptions(num_senders=0))
        assert all(t.ok and t.num_output_tokens == self._num_tokens for t in result.timings), result.details
        gaps = sorted(
            (b.t_ns - a.t_ns) / 1e6 for t in result.timings for a, b in zip(t.chunks, t.chunks[1:], strict=False)
        )
        return {"itl_p50": statistics.median(gaps), "itl_p99": gaps[len(gaps) * 99 // 100]}

    async def raw(self) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        port = int(self._url.rpartition(":")[2])
        made = [
            await loop.create_connection(functools.partial(Raw, self._path, body), "127.0.0.1", port)
            for body in self._bodies
        ]
        reads = [await protocol.done for _, protocol in made]
        return {"reads_per_token": statistics.mean(reads) / self._num_tokens}


def _runner_ns(port_file: Path) -> int:
    return int(np.fromfile(port_file.with_suffix(".cpu"), np.int64)[0])


def _measure(name: str, port_file: Path, num_streams: int, num_tokens: int) -> dict[str, float]:
    """One run of one client against one server, whose event loop is its first thread."""
    told, engine_tid = json.loads(port_file.read_text()), int(_tid_file(port_file).read_text())
    pid = told["pid"]
    bodies = [_body(num_tokens, i) for i in range(num_streams)]
    client = Client(f"http://127.0.0.1:{told['port']}", CHAT, bodies, num_tokens)
    before, client_before, runner_before = _thread_ns(pid), time.process_time_ns(), _runner_ns(port_file)
    begun = time.monotonic()
    found = uvloop.run({"bench": client.bench, "raw": client.raw}[name]())
    seconds = time.monotonic() - begun
    client_ns, after = time.process_time_ns() - client_before, _thread_ns(pid)
    spent = {tid: ns - before.get(tid, 0) for tid, ns in after.items()}
    total = num_streams * num_tokens
    engine_ns = spent[engine_tid] - (_runner_ns(port_file) - runner_before)
    per_token = {"loop": spent[pid], "engine": engine_ns, "client": client_ns}
    return {**{key: ns / 1000 / total for key, ns in per_token.items()}, "tok_s": total / seconds, **found}


@contextlib.contextmanager
def _server(source: Path | None, options: argparse.Namespace) -> Iterator[Path]:
    """The port file of a server of its own; it serves from `source`, if given."""
    env = dict(os.environ) if source is None else {**os.environ, "PYTHONPATH": str(source.resolve())}
    argv = [sys.executable, "-m", "lab.http_overhead", "--step-ms", str(options.step_ms)]
    argv += ["--streams", str(options.streams), "--busy", str(options.busy), "--serve"]
    with serving(argv, env=env) as port_file:
        yield port_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--busy", type=int, default=0, help="threads that are busy with steps, the engine's included")
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
            for which, port_file in servers.items():
                for name in options.clients:
                    found = _measure(name, port_file, options.streams, options.tokens)
                    if i >= 0:
                        samples.setdefault((which, name), []).append(found)
    for (which, name), rows in samples.items():
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(f"{which:6} {name:6} " + "  ".join(f"{key} {value:.2f}" for key, value in medians.items()))


if __name__ == "__main__":
    main()
