"""The same workload on this engine and its peers, in turns, and one table.

    make peers                                           once: installs them below .peers/
    python -m lab.peers.run 4-bit                        one class of SmolLM2-135M; also int8, bf16
    python -m lab.peers.run bf16 --resume                goes on with what an earlier run did not get to
    python -m lab.peers.run 4-bit int8 bf16 --model llama-1.2b --streams 1 8
    python -m lab.peers.run 4-bit --model gemma3-270m --streams 1 8 --prefill 512 --engines inferloop llama-cpp
    python -m lab.peers.run 4-bit int8 bf16 --report     all that was measured so far, in one table

Each configuration of each engine is a process of its own that waits while others run. Round 0 warms everybody up with a
short form of the workload; of an engine's configurations the two best there go on if they are within a tenth of each
other, point by point. Round 1 measures these; the later ones each engine's best and what is within a twentieth of it,
if that came within 0.7 of the best peer at that point, or of the best one that is equal in quality (a star marks what
has one sample). Engines take turns within a round, so that a slow minute of the machine hits all of them alike. Prompts
are random ids, new in each round and the same for all. Every sample is appended to .peers/results/MODEL-CLASS.jsonl.
Quality beside speed, and who is an equal, comes from lab.quality, which is to be run before.
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
from lab.peers.models import GEMMA, MOE, prepare
from lab.peers.point import Point, Timing
from lab.peers.protocol import PeerError, Worker
from lab.peers.quality import Qualities, read
from lab.peers.table import OURS, Sample, markdown, measures

from inferloop.core.units import MIB

FOLDER = Path(".peers")
ENGINES = (OURS, "llama-cpp", "openvino", "vllm", "transformers")
VOCAB = {"smollm2": 49152, "llama-1.2b": 128256, GEMMA: 262144, MOE: 49152}
NEAR_ITS_BEST, STILL_NEAR, NEAR_THE_BEST = 0.9, 0.95, 0.7
MOST_OF_AN_ENGINE = 2
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


def is_wanted(sample: tuple[Config, Point, int], so_far: list[Sample], qualities: Qualities) -> bool:
    """Whether a configuration is measured at a point in a round, by what the rounds before told."""
    config, point, round_number = sample
    of_class = [s for s in so_far if s.weights == config.weights]
    scout = scout_of(point)
    of_engine = {s.config: speed(s) for s in of_class if s.engine == config.engine and s.point == scout}
    if config.engine == OURS:
        return True
    mine = of_engine.get(config.name, 0.0)
    least = sorted(of_engine.values(), reverse=True)[:MOST_OF_AN_ENGINE][-1:]
    if mine < max(NEAR_ITS_BEST * max(of_engine.values(), default=0.0), *least, 0.0):
        return False
    if round_number <= 1:
        return True
    first = {s.key: speed(s) for s in of_class if s.point == point and s.round_number == 1 and s.engine != OURS}
    mine = first.get((config.weights, config.engine, config.name), 0.0)
    if mine < STILL_NEAR * max((v for (_, engine, _), v in first.items() if engine == config.engine), default=0.0):
        return False
    of_equals = max((v for key, v in first.items() if qualities.is_enough(key)), default=0.0)
    if qualities.is_enough((config.weights, config.engine, config.name)):
        return mine >= NEAR_THE_BEST * of_equals
    return mine >= NEAR_THE_BEST * max(first.values(), default=0.0)


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


class Field:
    """The configurations of one class: each starts when it is first wanted, and leaves when it fails."""

    def __init__(self, asked: list[Config], record: Record, stack: ExitStack) -> None:
        self.asked, self._record, self._stack = asked, record, stack
        self._running: dict[str, Running] = {}
        self.seconds: dict[str, float] = {}
        """That each engine took, starting and measuring."""

    def sample(self, config: Config, point: Point, round_number: int, deadline: float) -> None:
        begun = time.monotonic()
        left = max(deadline - begun, 1.0)
        try:
            if config.key not in self._running:
                found = start(config, FOLDER / f"{config.worker}.log", left)
                self._stack.enter_context(found.worker)
                self._running[config.key] = found
                self._record.tell(config.key, {**found.told, "start_s": found.start_s})
            self._record.add(self._running[config.key].sample(point, round_number, left + GRACE_S))
        except PeerError as error:
            print(f"  {config.key} leaves: {error}", file=sys.stderr)
            self.asked.remove(config)
        self.seconds[config.engine] = self.seconds.get(config.engine, 0.0) + time.monotonic() - begun


def measure(options: argparse.Namespace, weights: str, wanted: list[Point], deadline: float) -> Record:
    """All rounds of one class; what is not done by the deadline stays undone."""
    models = prepare(options.model)
    (FOLDER / "results").mkdir(parents=True, exist_ok=True)
    record = Record(result_path(options.model, weights), resume=options.resume)
    asked = configs([weights], models, VOCAB[options.model], wanted, options.threads, few=options.model != "smollm2")
    qualities = qualities_of(options.model, asked)
    with ExitStack() as stack:
        field = Field([c for c in asked if c.engine in options.engines and c.python().exists()], record, stack)
        for round_number in range(options.rounds + 1):
            in_round = wanted if round_number else list(dict.fromkeys(map(scout_of, wanted)))
            for point in in_round:
                before = [s for s in record.samples if s.round_number < round_number]
                for config in list(field.asked):
                    if record.has(config, point, round_number):
                        continue
                    if round_number and not is_wanted((config, point, round_number), before, qualities):
                        continue
                    if time.monotonic() > deadline:
                        print("  out of time: --resume goes on from here", file=sys.stderr)
                        return record
                    field.sample(config, point, round_number, deadline)
            spent = ", ".join(f"{engine} {seconds:.0f} s" for engine, seconds in field.seconds.items())
            print(f"  {weights}: round {round_number} done, so far {spent}", file=sys.stderr)
    return record


def qualities_of(model: str, asked: list[Config]) -> Qualities:
    same = {(c.weights, c.engine, c.name): (c.weights, c.engine, c.numbers_of) for c in asked if c.numbers_of}
    return Qualities(read(quality_path(model)), same)


def quality_path(model: str) -> Path:
    return FOLDER / "results" / f"{model}-quality.jsonl"


def result_path(model: str, weights: str) -> Path:
    return FOLDER / "results" / f"{model}-{weights}.jsonl"


def report(options: argparse.Namespace, records: list[Record], wanted: list[Point]) -> str:
    """The table, and below it who took part with what."""
    threads, vocab_size = options.threads, VOCAB[options.model]
    asked = configs(options.classes, prepare(options.model), vocab_size, wanted, threads)
    qualities = qualities_of(options.model, asked)
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
        markdown(samples, measures(wanted), qualities),
        "",
        "| class | engine | configuration | start to first token s | peak RSS MiB | weights + KV + 200 MB, MiB |",
        "|---|---|---|---|---|---|",
    ]
    most = max(wanted, key=lambda point: point.streams)
    for key in dict.fromkeys(s.key for s in samples):
        rss = max(s.peak_rss_mib for s in samples if s.key == key)
        about = told[" | ".join(key)]
        due = f"{due_mib(about['memory'], most):,.0f}" if about.get("memory") else ""
        text.append(f"| {' | '.join(key)} | {about['start_s']:.2f} | {rss:,.0f} | {due} |")
    text += ["", *dict.fromkeys(f"- {value['version']}" for value in told.values())]
    text += [f"- {key.replace(' | ', ', ')}: {value['flags']}" for key, value in told.items()]
    return "\n".join(text)


def due_mib(memory: dict[str, int], point: Point) -> float:
    """Mapped weights, the KV blocks of all streams of a point, and 200 MB for everything else."""
    blocks = -(-(point.prompt + point.output) // memory["block_tokens"]) * point.streams
    return (memory["weight_bytes"] + blocks * memory["block_bytes"] + 200e6) / MIB


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
    parser.add_argument("--minutes", type=float, default=9.5, help="stop a class after this, and print what there is")
    parser.add_argument("--resume", action="store_true", help="keep earlier samples and add what is missing")
    parser.add_argument("--report", action="store_true", help="measure nothing, print what was measured before")
    options = parser.parse_args()
    if options.model in (GEMMA, MOE) and options.classes != ["4-bit"]:
        parser.error(f"{options.model} is there as it is stored alone, which is 4-bit")
    wanted = points(options.streams, options.prefill)
    if options.report:
        records = [Record(result_path(options.model, weights), resume=True) for weights in options.classes]
    else:
        seconds = 60 * options.minutes
        records = [measure(options, weights, wanted, time.monotonic() + seconds) for weights in options.classes]
    text = report(options, records, wanted)
    print(text)
    (FOLDER / "results").mkdir(parents=True, exist_ok=True)
    (FOLDER / "results" / f"{options.model}-{'-'.join(options.classes)}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
