"""The same workload on this engine and its peers, in turns, and one table.

    make peers                                           once: installs them below .peers/
    python -m lab.peers.run 4-bit                        one class of SmolLM2-135M; also int8, bf16
    python -m lab.peers.run bf16 --resume                goes on with what an earlier run did not get to
    python -m lab.peers.run 4-bit int8 bf16 --model llama-1.2b --streams 1 8
    python -m lab.peers.run 4-bit int8 bf16 --report     all that was measured so far, in one table

Each configuration of each engine is a process of its own that waits while others run. Round 0 warms everybody up with a
short form of the workload; of an engine's configurations only those within a tenth of its best there go on, point by
point. Round 1 measures these, the later ones what came within 0.7 of the best peer at that point (a star marks what has
one sample). Engines take turns within a round, so that a slow minute of the machine hits all of them alike. Prompts
are random ids, new in each round and the same for all. Every sample is appended to .peers/results/MODEL-CLASS.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.peers.configs import CLASSES, Config, configs, points, scout_of
from lab.peers.models import prepare
from lab.peers.point import Point, Timing
from lab.peers.protocol import PeerError, Worker
from lab.peers.table import OURS, Sample, markdown, measures

FOLDER = Path(".peers")
ENGINES = (OURS, "llama-cpp", "openvino", "vllm", "transformers")
VOCAB = {"smollm2": 49152, "llama-1.2b": 128256}
NEAR_ITS_BEST, NEAR_THE_BEST = 0.9, 0.7
GRACE_S = 20.0
"""Longer than the deadline a sample that has begun may take."""
FIRST = Point(1, 16, 1)
"""What a start ends with: the first token of a short prompt."""


def speed(sample: Sample) -> float:
    """By which configurations are chosen: more is better."""
    return sample.timing.prefill_tok_s(sample.point) if sample.point.output == 1 else sample.timing.output_tok_s


@dataclass(slots=True)
class Running:
    """A configuration that is loaded, and what it told."""

    config: Config
    worker: Worker
    told: dict[str, Any]
    start_s: float

    def sample(self, point: Point, round_number: int, timeout_s: float) -> Sample:
        timing, peak_rss_mib = self.worker.run(point, round_number, timeout_s)
        config = self.config
        load = os.getloadavg()[0]
        return Sample(config.weights, config.engine, config.name, point, round_number, timing, peak_rss_mib, load)


def is_wanted(sample: tuple[Config, Point, int], so_far: list[Sample]) -> bool:
    """Whether a configuration is measured at a point in a round, by what the rounds before told."""
    config, point, round_number = sample
    of_class = [s for s in so_far if s.weights == config.weights]
    scout = scout_of(point)
    of_engine = {s.config: speed(s) for s in of_class if s.engine == config.engine and s.point == scout}
    if config.engine == OURS:
        return True
    if of_engine.get(config.name, 0.0) < NEAR_ITS_BEST * max(of_engine.values(), default=0.0):
        return False
    if round_number <= 1:
        return True
    first = {(s.engine, s.config): speed(s) for s in of_class if s.point == point and s.round_number == 1}
    best = max((value for (engine, _), value in first.items() if engine != OURS), default=0.0)
    return first.get((config.engine, config.name), 0.0) >= NEAR_THE_BEST * best


class Record:
    """Samples on disk, one line each, so that nothing is lost and a run can go on."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        if not resume:
            path.unlink(missing_ok=True)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.told: dict[str, dict[str, Any]] = {}
        self.samples: list[Sample] = []
        for row in lines:
            if "told" in row:
                self.told[row["key"]] = row["told"]
            else:
                row |= {"point": Point(**row["point"]), "timing": Timing(**row["timing"])}
                self.samples.append(Sample(**row))

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self._append(asdict(sample))

    def tell(self, key: str, told: dict[str, Any]) -> None:
        self.told[key] = told
        self._append({"key": key, "told": told})

    def _append(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, config: Config, point: Point, round_number: int) -> bool:
        key = (config.engine, config.name, point, round_number)
        return any((s.engine, s.config, s.point, s.round_number) == key for s in self.samples)


def start(config: Config, log: Path, timeout_s: float) -> Running:
    """Load a configuration up to its first token."""
    command = [str(config.python()), "-m", f"lab.peers.workers.{config.worker}"]
    worker = Worker(command, log=log, env=config.env)
    try:
        told = worker.load(config.spec, timeout_s)
        worker.run(FIRST, 0, timeout_s)
    except BaseException:
        worker.close()
        raise
    start_s = (time.monotonic_ns() - worker.started_ns) / 1e9
    print(f"  {config.key}: first token after {start_s:.2f} s", file=sys.stderr)
    return Running(config, worker, told, start_s)


def measure(options: argparse.Namespace, weights: str, wanted: list[Point], deadline: float) -> Record:
    """All rounds of one class; what is not done by the deadline stays undone."""
    models = prepare(options.model)
    (FOLDER / "results").mkdir(parents=True, exist_ok=True)
    record = Record(result_path(options.model, weights), resume=options.resume)
    asked = configs([weights], models, VOCAB[options.model], wanted, options.threads, few=options.model != "smollm2")
    asked = [c for c in asked if c.engine in options.engines and c.python().exists()]
    with ExitStack() as stack:
        running: list[Running] = []
        for config in asked:
            try:
                found = start(config, FOLDER / f"{config.worker}.log", max(deadline - time.monotonic(), 1.0))
            except PeerError as error:
                print(f"  {config.key} does not run: {error}", file=sys.stderr)
                continue
            stack.enter_context(found.worker)
            running.append(found)
            record.tell(config.key, {**found.told, "start_s": found.start_s})
        for round_number in range(options.rounds + 1):
            in_round = wanted if round_number else list(dict.fromkeys(map(scout_of, wanted)))
            for point in in_round:
                before = [s for s in record.samples if s.round_number < round_number]
                for each in list(running):
                    if time.monotonic() > deadline:
                        print("  out of time: --resume goes on from here", file=sys.stderr)
                        return record
                    if record.has(each.config, point, round_number):
                        continue
                    if round_number and not is_wanted((each.config, point, round_number), before):
                        continue
                    try:
                        record.add(each.sample(point, round_number, max(deadline - time.monotonic(), 1.0) + GRACE_S))
                    except PeerError as error:
                        print(f"  {each.config.key} leaves: {error}", file=sys.stderr)
                        running.remove(each)
            print(f"  {weights}: round {round_number} done", file=sys.stderr)
    return record


def result_path(model: str, weights: str) -> Path:
    return FOLDER / "results" / f"{model}-{weights}.jsonl"


def report(options: argparse.Namespace, records: list[Record], wanted: list[Point]) -> str:
    """The table, and below it who took part with what."""
    samples = [s for record in records for s in record.samples if s.round_number > 0]
    told = {key: value for record in records for key, value in record.told.items()}
    if not samples:
        return "nothing was measured"
    loads = [s.load_average for s in samples]
    text = [
        f"{options.model}, {options.threads} threads on {machine()}; medians of up to {options.rounds} rounds (*: 1). "
        f"{wanted[0].prompt} tokens in and {wanted[0].output} out where nothing else is said. "
        f"Load average {min(loads):.1f} to {max(loads):.1f}.",
        "",
        markdown(samples, measures(wanted)),
        "",
        "| class | engine | configuration | start to first token s | peak RSS MiB |",
        "|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((s.weights, s.engine, s.config) for s in samples):
        rss = max(s.peak_rss_mib for s in samples if (s.weights, s.engine, s.config) == key)
        text.append(f"| {' | '.join(key)} | {told[' | '.join(key)]['start_s']:.2f} | {rss:,.0f} |")
    text += ["", *dict.fromkeys(f"- {value['version']}" for value in told.values())]
    text += [f"- {key.replace(' | ', ', ')}: {value['flags']}" for key, value in told.items()]
    return "\n".join(text)


def machine() -> str:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((row.split(":")[1].strip() for row in flags.splitlines() if row.startswith("model name")), "")
    levels = [name for name in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    return f"{model or platform.machine()} ({os.cpu_count()} cores, {', '.join(levels)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="+", choices=CLASSES)
    parser.add_argument("--model", default="smollm2", choices=VOCAB)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 1500])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.5, help="stop measuring after this, and print what there is")
    parser.add_argument("--resume", action="store_true", help="keep earlier samples and add what is missing")
    parser.add_argument("--report", action="store_true", help="measure nothing, print what was measured before")
    options = parser.parse_args()
    wanted = points(options.streams, options.prefill)
    deadline = time.monotonic() + 60 * options.minutes
    if options.report:
        records = [Record(result_path(options.model, weights), resume=True) for weights in options.classes]
    else:
        records = [measure(options, weights, wanted, deadline) for weights in options.classes]
    text = report(options, records, wanted)
    print(text)
    (FOLDER / "results").mkdir(parents=True, exist_ok=True)
    (FOLDER / "results" / f"{options.model}-{'-'.join(options.classes)}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
