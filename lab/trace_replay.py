"""How exactly a recorded trace is replayed: when each request was sent against when the trace says.

    python -m lab.trace_replay --seconds 4 --rounds 3

A trace of each format that can be read is written with the published names of fields, then takes the way of any other:
read, sampled, rendered and sent to a server that costs next to nothing, which streams a token 20 ms after a request and
one every 5 ms then. Senders and this process share one core, the server has the other. The instants that count are
those of the file; a turn of a conversation without times is due when the one before has ended and its user has paused.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from lab.load_generator import poisson
from lab.null_server import null_server

from inferloop.bench.drive import DriveOptions, Endpoint, drive
from inferloop.bench.render import RenderedRequest, Renderer, RenderOptions
from inferloop.contract.load import parse
from inferloop.contract.sample import sample_workload
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.quantiles import quantile
from inferloop.measure.timing import Chunk, RequestTiming, schedule_delay_ms
from inferloop.records.bench import RequestRow, to_parquet
from inferloop.records.event import ReplicaEvent

_RATE = 50.0
_INPUT, _OUTPUT = 120, 8


class Words:
    """A tokenizer in which each word is a token."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(hash(word) & 0xFFFFFF for word in text.split(" "))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        text = "".join(f"<{m['role']}> {m['content']} </> " for m in messages)
        return self.encode_text(text + "<assistant>")


@dataclass(frozen=True, slots=True)
class Format:
    """`write` makes a trace of requests at instants, in seconds; `is_timed` says that it tells them."""

    write: Callable[[Path, Sequence[float]], Path]
    is_timed: bool = True


def azure(folder: Path, times_s: Sequence[float]) -> Path:
    start = datetime.datetime(2024, 5, 10, tzinfo=datetime.UTC)
    rows = [f"{start + datetime.timedelta(seconds=t)},{_INPUT},{_OUTPUT}" for t in times_s]
    return _written(folder / "azure.csv", "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))


def burstgpt(folder: Path, times_s: Sequence[float]) -> Path:
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = [f"{t:.6f},ChatGPT,{_INPUT},{_OUTPUT},{_INPUT + _OUTPUT},Conversation log" for t in times_s]
    return _written(folder / "burstgpt.csv", "\n".join([head, *rows]))


def mooncake(folder: Path, times_s: Sequence[float]) -> Path:
    """Half of the blocks of each prompt are those of one of ten others."""
    rows = [
        {"timestamp": round(t * 1000), "input_length": 1024, "output_length": _OUTPUT, "hash_ids": [i % 10, 100 + i]}
        for i, t in enumerate(times_s)
    ]
    return _written(folder / "mooncake.jsonl", "\n".join(map(json.dumps, rows)))


def sharegpt(folder: Path, times_s: Sequence[float]) -> Path:
    """Conversations of four questions."""
    said = [{"from": "human", "value": "word " * 40}, {"from": "gpt", "value": "word " * _OUTPUT}] * 4
    talks = [{"id": f"talk_{i}", "conversations": said} for i in range(max(1, len(times_s) // 4))]
    return _written(folder / "sharegpt.json", json.dumps(talks))


def run(folder: Path, times_s: Sequence[float]) -> Path:
    rows = []
    for i, t in enumerate(times_s):
        at = 10**12 + round(t * NS_PER_S)
        timing = RequestTiming(f"r{i}", at, at, at, at + NS_PER_MS, (Chunk(at + 9, _OUTPUT),), _INPUT, _OUTPUT)
        rows.append(RequestRow("peak", False, timing))
    (folder / "run").mkdir()
    (folder / "run" / "requests.parquet").write_bytes(to_parquet(rows))
    return folder / "run"


def events(folder: Path, times_s: Sequence[float]) -> Path:
    rows = [
        ReplicaEvent(
            event_id=f"e{i}",
            trace_id="t",
            span_id="s",
            request_id="r",
            identity_digest="d",
            model_id="m",
            t_engine_in_ns=0,
            t_wall_ns=10**18 + round(t * NS_PER_S),
            finish_reason="length",
            num_input_tokens=_INPUT,
            num_output_tokens=_OUTPUT,
        )
        for i, t in enumerate(times_s)
    ]
    table = pa.Table.from_pylist([{name: getattr(e, name) for name in ReplicaEvent.__slots__} for e in rows])
    pq.write_table(table, folder / "events.parquet")
    return folder / "events.parquet"


FORMATS = {
    "azure": Format(azure),
    "burstgpt": Format(burstgpt),
    "mooncake": Format(mooncake),
    "sharegpt": Format(sharegpt, is_timed=False),
    "run": Format(run),
    "events": Format(events),
}


def _written(path: Path, text: str) -> Path:
    path.write_text(text + "\n")
    return path


def prepare(path: Path, seed: int) -> list[RenderedRequest]:
    traffic = {"model": "m", "qps": _RATE, "input_tokens": _INPUT, "output_tokens": _OUTPUT, "turns": 4}
    arrivals = {"process": "trace", "file": str(path)}
    contract = parse({**traffic, "think_ms": 100, "arrivals": arrivals}, base=path.parent)
    codec = Words()
    workload = sample_workload(contract, seed=seed, count_tokens=lambda text: len(codec.encode_text(text)))
    rendered = Renderer(codec, RenderOptions("null")).render(workload.requests)
    return [
        RenderedRequest(r.timed, f"/paced{r.path}", r.body, r.num_input_tokens, r.num_shared_tokens, r.clipped)
        for r in rendered
    ]


async def errors_ms(plan: list[RenderedRequest], url: str, core: int, times_s: Sequence[float] | None) -> list[float]:
    """By how much each send was late, in the order of the sends. `times_s`: the instants that the file tells."""
    options = DriveOptions(sender_cores=(core,), cut_off_s=10.0)
    result = await drive(plan, Endpoint(url), options)
    if len(result.timings) != len(plan) or not all(t.ok for t in result.timings):
        raise SystemExit(f"{len(plan)} requests, {len(result.timings)} ended: {result.details}")
    sent = sorted(result.timings, key=lambda t: t.t_send_ns)
    if times_s is None:
        return [schedule_delay_ms(t) or 0.0 for t in sent]
    start_ns = (sent[0].t_intended_ns or 0) - round(plan[0].timed.at_s * NS_PER_S)
    return [(t.t_send_ns - start_ns) / NS_PER_MS - s * 1e3 for t, s in zip(sent, times_s, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each replay")
    parser.add_argument("--only", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    asked = parser.parse_args()
    ours, theirs = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {ours})
    found: dict[str, list[float]] = {name: [] for name in asked.only}
    worst: dict[str, tuple[float, int]] = {}
    with null_server(theirs) as server, tempfile.TemporaryDirectory(prefix="inferloop-lab-") as folder:
        for number in range(asked.rounds):
            for name in random.Random(number).sample(asked.only, len(asked.only)):
                times_s = [round(t, 3) for t in poisson(_RATE, asked.seconds, number)]
                times_s = [round(t - times_s[0], 3) for t in times_s]
                place = Path(folder) / f"{name}-{number}"
                place.mkdir()
                form = FORMATS[name]
                plan = prepare(form.write(place, times_s), number)
                errors = asyncio.run(errors_ms(plan, server.url, ours, times_s if form.is_timed else None))
                found[name] += errors
                worst[name] = max(worst.get(name, (-1.0, 0)), (max(errors), errors.index(max(errors))))
    for name, late in found.items():
        p50, p99 = (quantile(sorted(late), q) for q in (0.5, 0.99))
        most, where = worst[name]
        print(f"{name:9} n {len(late):4}  p50 {p50:.2f}  p99 {p99:.2f}  max {most:.2f} ms (send {where} of its window)")


if __name__ == "__main__":
    main()
