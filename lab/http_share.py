"""How much of the engine's speed arrives over HTTP when server and client have the same cores, and how to share them.

    python -m lab.http_share --mode native-stored/int8 --variants plain one-thread nice batch --rounds 5

Every round lets the engine alone (in this process, no HTTP) and then a server of each variant answer prompts of random
tokens, all sent at once; the client only counts bytes, or with `--client bench` is the load generator. Printed are
output tokens per second, prefill included, and medians over rounds of each round's ratio to the engine alone. What a
variant does with the server's threads:

    plain        as many step threads as cores, and all threads alike
    one-thread   one step thread, so that a core is left for HTTP
    nice         the step threads are nice, so that the event loop goes first
    batch        the step threads are scheduled as batch work
    switch       the interpreter's lock changes hands after 0.5 ms instead of 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop
from lab.http_overhead import Client
from lab.modes import Mode
from lab.offline import Bench
from lab.peers.point import Point
from lab.servers import serving

from inferloop.backends.native import NativeGenerator
from inferloop.engine.compute.runner import Runner
from inferloop.engine.config import EngineConfig
from inferloop.engine.text.codec import Codec
from inferloop.models.identity import ServingIdentity
from inferloop.models.resolve import ModelFiles, resolve
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import bind, serve

VARIANTS = ("plain", "one-thread", "nice", "batch", "switch")
MODEL = "smollm2-135m-instruct"
NICENESS = 5
NUM_CPUS = len(os.sched_getaffinity(0))


def load(files: ModelFiles, options: argparse.Namespace, num_threads: int) -> tuple[Runner, EngineConfig]:
    num_tokens = options.streams * (options.prompt + options.output + 64)
    runner = Mode(options.mode).load(files, num_threads=num_threads, num_tokens=num_tokens)
    return runner, EngineConfig(max_sequences=options.streams, max_step_tokens=options.budget, share_prefixes=False)


def run_server(variant: str, port_file: Path, options: argparse.Namespace) -> None:
    files = resolve(MODEL)
    codec = Codec(files)
    runner, config = load(files, options, 1 if variant == "one-thread" else NUM_CPUS)
    identity = ServingIdentity("demo", "0" * 64, "none", "lab", "1", codec.tokenizer.digest, codec.template_digest)
    generator = NativeGenerator(codec, runner, config, identity, answer_style=codec.answer_style)
    generator.start()
    for tid in (int(task.name) for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()):
        if variant == "nice":
            os.setpriority(os.PRIO_PROCESS, tid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        elif variant == "batch":
            os.sched_setscheduler(tid, os.SCHED_BATCH, os.sched_param(0))
    if variant == "switch":
        sys.setswitchinterval(0.0005)
    try:
        serve(build_app(generator, ServeConfig(), DropSink()), bind("127.0.0.1", 0), port_file=port_file)
    finally:
        generator.stop()


@contextlib.contextmanager
def server(variant: str) -> Iterator[str]:
    """The URL of a server of its own, which gets the arguments of this process."""
    argv = [sys.executable, "-m", "lab.http_share", *sys.argv[1:], "--serve", variant, "--port-file"]
    with serving(argv) as port_file:
        yield f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"


def over_http(url: str, prompts: list[list[int]], options: argparse.Namespace) -> float:
    """Output tokens per second."""
    asked = {"model": "demo", "stream": True, "max_tokens": options.output, "ignore_eos": True, "temperature": 0}
    bodies = [json.dumps({**asked, "prompt": prompt}).encode() for prompt in prompts]
    client = Client(url, "/v1/completions", bodies, options.output)
    begun = time.monotonic()
    uvloop.run({"raw": client.raw, "bench": client.bench}[options.client]())
    seconds = time.monotonic() - begun
    return len(prompts) * int(options.output) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--port-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="native-stored")
    parser.add_argument("--variants", nargs="+", default=["plain"], choices=VARIANTS)
    parser.add_argument("--client", default="raw", choices=["raw", "bench"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--budget", type=int, default=256, help="tokens per step")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.serve is not None:
        run_server(options.serve, options.port_file, options)
        return
    alone = Bench(*load(resolve(MODEL), options, NUM_CPUS))
    point, rng = Point(options.streams, options.prompt, options.output), random.Random(0)
    samples: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        urls = {variant: stack.enter_context(server(variant)) for variant in options.variants}
        for i in range(-1, options.rounds):  # round -1 warms up
            prompts = point.prompts(alone.engine.info.vocab_size, rng.getrandbits(32))
            found: dict[str, float] = {"alone": alone.run(prompts, options.output).check(point).output_tok_s}
            found |= {variant: over_http(url, prompts, options) for variant, url in urls.items()}
            print(f"round {i}", *(f"{name} {value:.0f}" for name, value in found.items()), flush=True)
            for name, value in found.items():
                if i >= 0:
                    samples.setdefault(name, []).append(value)
    alone.engine.stop()
    for name, values in samples.items():
        ratios = sorted(a / b for a, b in zip(values, samples["alone"], strict=True))
        spread = f"[{ratios[0]:.2f} .. {ratios[-1]:.2f}]"
        print(f"{name:12} {statistics.median(values):8.0f} tok/s   x{statistics.median(ratios):.2f} {spread}")


if __name__ == "__main__":
    main()
