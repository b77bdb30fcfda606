"""The engine of this project by itself, in this process and without HTTP.

Spec: model, mode (see lab.modes), threads, num_tokens (that the KV memory holds), step_tokens, max_sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from lab.modes import Mode, logits
from lab.offline import Bench
from lab.peers.point import Timing
from lab.peers.protocol import Spec, serve

from inferloop.engine.config import EngineConfig
from inferloop.models.resolve import resolve


class Inferloop:
    def __init__(self, spec: Spec) -> None:
        files = resolve(spec["model"])
        self._runner = Mode(spec["mode"]).load(files, num_threads=spec["threads"], num_tokens=spec["num_tokens"])
        config = EngineConfig(max_step_tokens=spec["step_tokens"], max_sequences=spec["max_sequences"])
        self._bench = Bench(self._runner, config)
        info = self._runner.info
        self.version = f"inferloop {info.name} {info.revision}"
        self.flags = f"{spec['mode']}, {spec['step_tokens']} tokens a step, {spec['threads']} threads"
        self.vocab_size = info.vocab_size
        block_tokens = info.block_size
        self.memory = {"weight_bytes": info.weight_bytes, "block_bytes": info.block_bytes, "block_tokens": block_tokens}

    def run(self, prompts: Sequence[Sequence[int]], num_output: int) -> Timing:
        return self._bench.run(prompts, num_output)

    def logits(self, token_ids: Sequence[int], to: Path) -> None:
        np.save(to, logits(self._runner, list(token_ids)))


if __name__ == "__main__":
    serve(Inferloop)
