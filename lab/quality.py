"""How close every class of arithmetic stays to fp32: teacher-forced on two texts of 512 tokens.

    python -m lab.quality
    python -m lab.quality --modes native-stored native-stored/int8 --no-peers

The texts of lab/texts are a page of documentation, and a chat whose answers SmolLM2-135M gave itself, greedily and in
fp32. At each position: is the likeliest next token that of fp32 (top-1), how far is the distribution from
that of fp32 (KL of ours from the truth, in nats), how likely is the token that really follows (perplexity). The truth
is torch in fp32 on the very weights of the file. Of the peers those take part that are installed and tell logits.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lab.modes import Mode, logits
from lab.peers.configs import CLASSES, configs, points
from lab.peers.models import ModelSet, prepare
from lab.peers.protocol import PeerError, Worker
from lab.peers.table import OURS
from numpy.typing import NDArray

from inferloop.engine.text.codec import Codec
from inferloop.models.resolve import ModelFiles, resolve

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

TRUTH = "torch-fp32"
MODES = [
    *("native-stored/bf16", "native-stored/int8", "native-int8/bf16", "native-int8/int8"),
    *("native-bf16/bf16", "native-bf16/int8", "native-fp32/bf16", "torch-bf16"),
]
NUM_POSITIONS = 512
PATHS = (Path("lab/texts/document.txt"), Path("lab/texts/chat.txt"))
PEERS = ("llama-cpp", "openvino", "transformers")
"""Those that tell their logits."""
SAME = ("unified", "2048 a step", "throughput", "latency, KV bf16")
"""Configurations that change no number of a text that is alone."""


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one set of logits from the truth, over the positions of one text."""

    top1: float
    kl: float
    perplexity: float


def log_softmax(values: Float32) -> Float64:
    shifted = values.astype(np.float64) - values.max(-1, keepdims=True)
    found: Float64 = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def distance(found: Float32, truth: Float32, token_ids: list[int]) -> Distance:
    """Rows are positions: row i is what follows token i, so the last one has no token to tell of."""
    if not (np.isfinite(found).all() and found.shape == truth.shape):
        raise ValueError(f"logits of shape {found.shape} for {truth.shape}, or not all of them numbers")
    kl, nll = [], []
    for i in range(len(truth)):  # a row at a time: all of them are hundreds of megabytes
        p, q = log_softmax(truth[i]), log_softmax(found[i])
        kl.append(float(np.exp(p) @ (p - q)))
        if i + 1 < len(token_ids):
            nll.append(-float(q[token_ids[i + 1]]))
    top1 = float((found.argmax(-1) == truth.argmax(-1)).mean())
    return Distance(top1, float(np.mean(kl)), float(np.exp(np.mean(nll))))


def texts(files: ModelFiles) -> list[Text]:
    codec = Codec(files)
    found = [Text(path.stem, list(codec.encode_text(path.read_text()))[:NUM_POSITIONS]) for path in PATHS]
    assert all(len(text.token_ids) == NUM_POSITIONS for text in found), "a text is too short"
    return found


def of_modes(
    modes: list[str], files: ModelFiles, found: list[Text], num_threads: int
) -> Iterator[tuple[str, list[Float32]]]:
    for name in modes:
        runner = Mode(name).load(files, num_threads=num_threads, num_tokens=NUM_POSITIONS)
        yield f"{OURS} {name}", [logits(runner, text.token_ids) for text in found]
        del runner
        gc.collect()


def of_peers(models: ModelSet, found: list[Text], num_threads: int) -> Iterator[tuple[str, list[Float32]]]:
    wanted = points([1], [NUM_POSITIONS])
    for config in configs(list(CLASSES), models, 0, wanted, num_threads):
        if config.engine not in PEERS or not config.python().exists() or any(what in config.name for what in SAME):
            continue
        command = [str(config.python()), "-m", f"lab.peers.workers.{config.worker}"]
        with tempfile.TemporaryDirectory() as folder:
            to = Path(folder) / "logits.npy"
            try:
                with Worker(command, log=Path(".peers") / f"{config.worker}.log", env=config.env) as worker:
                    worker.load(config.spec)
                    told: list[Float32] = []
                    for text in found:
                        worker.logits(text.token_ids, to)
                        told.append(np.load(to))
            except PeerError as error:
                print(f"{config.key}: {error}", file=sys.stderr)
                continue
        yield f"{config.engine} {config.weights}, {config.name}", told


def table(rows: list[tuple[str, list[Distance]]], found: list[Text]) -> str:
    names = [f"{text.name} {what}" for text in found for what in ("top-1", "KL", "perplexity")]
    lines = [f"| class | {' | '.join(names)} |", f"|{'---|' * (1 + len(names))}"]
    for name, distances in rows:
        cells = [f"{d.top1:.3f} | {d.kl:.4f} | {d.perplexity:.3f}" for d in distances]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", default=MODES, metavar="MODE", help="see lab.modes")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    models = prepare("smollm2")
    files = resolve(str(models.stored))
    found = texts(files)
    truth = next(of_modes([TRUTH], files, found, options.threads))[1]
    rows: list[tuple[str, list[Distance]]] = []

    def add(name: str, told: list[Float32]) -> None:
        three = zip(told, truth, found, strict=True)
        rows.append((name, [distance(mine, true, text.token_ids) for mine, true, text in three]))
        print(f"{name}: {rows[-1][1]}", file=sys.stderr)

    add(f"{OURS} {TRUTH} (the truth)", truth)
    for name, told in of_modes(options.modes, files, found, options.threads):
        add(name, told)
    if not options.no_peers:
        for name, told in of_peers(models, found, options.threads):
            add(name, told)
    print(f"{files.path.name}, {NUM_POSITIONS} positions of each text, {options.threads} threads.\n")
    print(table(rows, found))


if __name__ == "__main__":
    main()
