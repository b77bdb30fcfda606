"""How close every class of arithmetic stays to fp32: teacher-forced on two texts of 512 tokens.

    python -m lab.quality
    python -m lab.quality --resume                     goes on with what an earlier run did not get to
    python -m lab.quality --modes native-stored native-stored/int8 --no-peers

The texts of lab/texts are a page of documentation, and a chat whose answers SmolLM2-135M gave itself, greedily and in
fp32. At each position: is the likeliest next token that of fp32 (top-1), how far is the distribution from
that of fp32 (KL of ours from the truth, in nats), how likely is the token that really follows (perplexity). The truth
is torch in fp32 on the very weights of the file. Of the peers those take part that are installed and tell logits. Every
row is appended to .peers/results/smollm2-quality.jsonl, where lab.peers.run finds it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lab.modes import Mode, logits
from lab.peers.configs import CLASSES, MODES_OF, Config, configs, points
from lab.peers.models import ModelSet, prepare
from lab.peers.protocol import PeerError, Worker
from lab.peers.quality import Distance, Told, read
from lab.peers.run import FOLDER, quality_path
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


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    token_ids: list[int]


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


def of_mode(name: str, files: ModelFiles, found: list[Text], num_threads: int) -> list[Float32]:
    runner = Mode(name).load(files, num_threads=num_threads, num_tokens=NUM_POSITIONS)
    told = [logits(runner, text.token_ids) for text in found]
    del runner
    gc.collect()
    return told


def of_peer(config: Config, found: list[Text]) -> list[Float32]:
    """Raises PeerError."""
    command = [str(config.python()), "-m", f"lab.peers.workers.{config.worker}"]
    told: list[Float32] = []
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "logits.npy"
        with Worker(command, log=FOLDER / f"{config.worker}.log", env=config.env) as worker:
            worker.load(config.spec)
            for text in found:
                worker.logits(text.token_ids, to)
                told.append(np.load(to))
    return told


def peers(models: ModelSet, num_threads: int) -> list[Config]:
    """Those that are installed and tell logits, once for all configurations that compute the same."""
    asked = configs(list(CLASSES), models, 0, points([1], [NUM_POSITIONS]), num_threads)
    return [c for c in asked if c.engine in PEERS and c.python().exists() and c.numbers_of is None]


def table(rows: Sequence[Told], found: list[Text]) -> str:
    names = [f"{text.name} {what}" for text in found for what in ("top-1", "KL", "perplexity")]
    lines = [f"| class | top-1 | KL | {' | '.join(names)} |", f"|{'---|' * (3 + len(names))}"]
    for row in rows:
        cells = [f"{d.top1:.3f} | {d.kl:.4f} | {d.perplexity:.3f}" for d in row.texts]
        lines.append(f"| {row.name} | {row.top1:.4f} | {row.kl:.4f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", default=MODES, metavar="MODE", help="see lab.modes")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep earlier rows and add what is missing")
    options = parser.parse_args()
    models = prepare("smollm2")
    files = resolve(str(models.stored))
    found = texts(files)
    path = quality_path("smollm2")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        path.unlink(missing_ok=True)
    rows = read(path)
    known = {(row.weights, row.engine, row.config) for row in rows}
    truth = of_mode(TRUTH, files, found, options.threads)

    def add(key: tuple[str, str, str], told: list[Float32]) -> None:
        three = zip(told, truth, found, strict=True)
        row = Told(*key, tuple(distance(mine, true, text.token_ids) for mine, true, text in three))
        rows.append(row)
        with path.open("a") as file:
            file.write(row.line())
        print(f"{row.name}: top-1 {row.top1:.4f}, KL {row.kl:.5f}", file=sys.stderr)

    class_of = {f"native-{kind}": weights for weights, kind in MODES_OF.items()}
    for name in [TRUTH, *options.modes]:
        key = (class_of.get(name.split("/")[0], ""), OURS, name)
        if key not in known:
            add(key, truth if name == TRUTH else of_mode(name, files, found, options.threads))
    for config in [] if options.no_peers else peers(models, options.threads):
        key = (config.weights, config.engine, config.name)
        if key in known:
            continue
        try:
            add(key, of_peer(config, found))
        except PeerError as error:
            print(f"{config.key}: {error}", file=sys.stderr)
    print(f"{files.path.name}, {NUM_POSITIONS} positions of each text, {options.threads} threads.\n")
    print(table(rows, found))


if __name__ == "__main__":
    main()
