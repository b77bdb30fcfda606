"""What a batch costs those who ask beside it, and whether it survives kills.

    python -m lab.batch_beside --rows 1000 --minutes 12 [--backend scripted]

One request every --period-s seconds measures the time to first token, in phases that alternate: A, a server without
batch jobs, and B, one that works off a batch of --rows. The first two B phases end with a kill -9 in the middle of the
batch, the last one when the batch has ended. Prints p50 and p95 of every phase, the A/A band (how far A phases lie from
each other) and whether B lies within it, and exits 1 when it does not, when a request beside the batch failed, or when
any row was not answered exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferloop.backends.http import HttpClient, HttpError
from inferloop.backends.protocols import LaunchSpec
from inferloop.backends.serve_process import Value, launch_spec
from inferloop.bench.stream import StreamReader
from inferloop.cli.batch_client import RUNNING, BatchClient, BatchView
from inferloop.core.clock import RealClock
from inferloop.core.units import ns_to_ms
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.measure.quantiles import quantile

MODEL = "smollm2-135m-instruct"
PHASES = "ABABAB"
NUM_WARM_UP = 3
URL = "/v1/chat/completions"


@dataclass(slots=True)
class Phase:
    kind: str
    ttfts_ms: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_rows: int = 0
    seconds: float = 0.0

    def line(self, number: int) -> str:
        batch = f"  {self.num_rows / self.seconds:6.2f} rows/s" if self.kind == "B" else ""
        quantiles = "  ".join(f"{p} {_quantile(self.ttfts_ms, q):7.1f}" for p, q in QUANTILES.items())
        return f"{self.kind}{number}  n {len(self.ttfts_ms):3}  {quantiles}  failed {self.num_failed}{batch}"


QUANTILES = {"p50": 0.5, "p95": 0.95}


def _quantile(values: list[float], q: float) -> float:
    return quantile(sorted(values), q) if values else float("nan")


def rows(num: int) -> bytes:
    lines = []
    for i in range(num):
        text = f"Write a short sentence about the number {i} and one about {7 * i}."
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4 + i % 13}
        lines.append(json.dumps({"custom_id": f"row-{i}", "method": "POST", "url": URL, "body": body}))
    return "\n".join(lines).encode()


class Asker:
    """One streamed request every `period_s` seconds, each with a prompt that no cache knows."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._num = period_s, 0

    async def ask(self, client: HttpClient) -> float:
        """TTFT in ms. Raises HttpError, ValueError for an answer that is none."""
        self._num += 1
        content = f"{self._num} apples and {self._num * 31} pears: which are more, and why? Answer in one sentence."
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, "stream": True}
        clock, reader = RealClock(), StreamReader()
        t_send_ns = clock.now_ns()
        response = await client.request("POST", URL, body=json.dumps(body).encode(), timeout_s=120)
        if response.status != 200:
            raise ValueError(await response.read())
        async for t_ns, piece in response.pieces():
            reader.feed(t_ns, piece)
        result = reader.finish()
        if result.error is not None or not result.chunks:
            raise ValueError(result.error)
        return ns_to_ms(result.chunks[0].t_ns - t_send_ns)

    async def measure(self, url: str, phase: Phase, seconds: float) -> None:
        """Fills `phase`; the schedule is absolute, so that a slow answer does not thin out those after it."""
        client, loop = HttpClient(url), asyncio.get_running_loop()
        try:
            for _ in range(NUM_WARM_UP):
                await self.ask(client)
            async with asyncio.TaskGroup() as group:
                start_s = loop.time()
                for i in range(round(seconds / self._period_s)):
                    await asyncio.sleep(max(0.0, start_s + i * self._period_s - loop.time()))
                    group.create_task(self._count(client, phase))
            phase.seconds = loop.time() - start_s
        finally:
            await client.close()

    async def _count(self, client: HttpClient, phase: Phase) -> None:
        try:
            phase.ttfts_ms.append(await self.ask(client))
        except (HttpError, ValueError) as error:
            phase.num_failed += 1
            print(f"a request beside the batch failed: {error}", file=sys.stderr)


async def num_done(client: BatchClient, batch_id: str) -> int:
    counts = (await client.batch(batch_id)).request_counts
    return 0 if counts is None else counts.completed + counts.failed


async def kill(process: ReplicaProcess) -> None:
    """kill -9, nothing told."""
    await process.stop(0.0)


async def finished(client: BatchClient, batch_id: str, limit_s: float) -> BatchView:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while (view := await client.batch(batch_id)).status in RUNNING:  # noqa: ASYNC110  another side's state
                await asyncio.sleep(0.5)
            return view
    return await client.batch(batch_id)


async def problems_of(client: BatchClient, view: BatchView, num_rows: int, folder: Path) -> list[str]:
    if view.status != "completed" or view.output_file_id is None:
        return [f"the batch ended as {view.status}: {view.request_counts}"]
    await client.download(view.output_file_id, folder / "output.jsonl")
    answered = [json.loads(line) for line in (folder / "output.jsonl").read_text().splitlines()]
    if [line["custom_id"] for line in answered] != [f"row-{i}" for i in range(num_rows)]:
        return [f"{num_rows} rows, but the output has {len(answered)} lines, or others, or in another order"]
    return [f"{line['custom_id']} has no text" for line in answered if not _text(line)]


def _text(line: dict[str, Any]) -> bool:
    return line["response"]["status_code"] == 200 and bool(line["response"]["body"]["choices"])


async def run(args: argparse.Namespace, folder: Path) -> tuple[list[Phase], list[str]]:
    jobs, source = folder / "jobs", folder / "in.jsonl"
    source.write_bytes(rows(args.rows))
    asker, phases, problems = Asker(args.period_s), list[Phase](), list[str]()
    phase_s = args.minutes * 60 / (len(PHASES) + 1)
    batch_id, num_before = "", 0
    for number, kind in enumerate(PHASES):
        phase = Phase(kind)
        phases.append(phase)
        process = await ReplicaProcess.start_ready(_spec(args, jobs if kind == "B" else None), log_path=folder / "log")
        client = BatchClient(process.url)
        try:
            if kind == "B":
                if not batch_id:
                    batch_id = (await client.create(await client.upload(source), URL, {})).id
                num_before = await num_done(client, batch_id)
            await asker.measure(process.url, phase, phase_s)
            if kind == "B":
                done = await num_done(client, batch_id)
                phase.num_rows = done - num_before
                if done == args.rows and number + 1 < len(PHASES):
                    problems.append("the batch ended before its second kill: take more --rows or fewer --minutes")
            if number + 1 == len(PHASES):
                view = await finished(client, batch_id, limit_s=phase_s * 3)
                problems += await problems_of(client, view, args.rows, folder)
        finally:
            await client.close()
            await kill(process)
        print(phase.line(number // 2 + 1), flush=True)
    return phases, problems


def _spec(args: argparse.Namespace, jobs: Path | None) -> LaunchSpec:
    options: dict[str, Value] = {"batch_dir": None if jobs is None else str(jobs)}
    if args.backend == "scripted":
        options["script"] = ["ttft_ms=20", "tpot_ms=5", "max_concurrency=64"]
    else:
        options["threads"] = args.threads
    return launch_spec(MODEL, options, backend=args.backend)


def compare(phases: list[Phase]) -> list[str]:
    """Prints the band and the verdict; gives what is wrong."""
    problems = []
    a, b = ([p for p in phases if p.kind == kind] for kind in "AB")
    for name, q in QUANTILES.items():
        each = [_quantile(p.ttfts_ms, q) for p in a]
        band_ms = max(each) - min(each)
        alone_ms = statistics.median(each)
        beside_ms = statistics.median(_quantile(p.ttfts_ms, q) for p in b)
        within = beside_ms - alone_ms <= band_ms
        figures = f"A {alone_ms:.1f} ms, B {beside_ms:.1f} ms (x {beside_ms / alone_ms:.2f}), A/A band {band_ms:.1f} ms"
        print(f"{name}: {figures}: {'within' if within else 'beyond'}")
        if not within:
            problems.append(f"{name} beside the batch lies beyond the A/A band")
    if num_failed := sum(p.num_failed for p in phases):
        problems.append(f"{num_failed} requests beside the batch failed")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.batch_beside")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=12.0, help="of all phases together, about")
    parser.add_argument("--period-s", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", choices=("embedded", "scripted"), default="embedded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        phases, problems = asyncio.run(run(args, Path(folder)))
    problems += compare(phases)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
