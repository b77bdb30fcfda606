"""What is measured: one batch of random prompts, and the moments at which its tokens came. Standard library only, as
this is read in every engine's own environment."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Point:
    """`streams` prompts of `prompt` random tokens each, handed in together; greedy, exactly `output` tokens back."""

    streams: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"{self.streams} x ({self.prompt} + {self.output})"

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """The same for every engine, different with every seed, so that no prefix cache can help."""
        rng = random.Random(f"{seed} {self.name}")
        return [[rng.randrange(vocab_size) for _ in range(self.prompt)] for _ in range(self.streams)]


@dataclass(frozen=True, slots=True)
class Timing:
    """Per stream: seconds from handing in the batch to its first and its last token, and how many came."""

    first_s: list[float]
    last_s: list[float]
    counts: list[int]

    def check(self, point: Point) -> Timing:
        """Raises ValueError for an engine that did something else than it was asked."""
        if self.counts != [point.output] * point.streams:
            raise ValueError(f"{point.name}: the streams have {self.counts} tokens")
        return self

    @property
    def output_tok_s(self) -> float:
        """Of all streams together, prefill included."""
        return sum(self.counts) / max(self.last_s)

    @property
    def decode_tok_s(self) -> float:
        """Of one stream after its first token."""
        rows = zip(self.first_s, self.last_s, self.counts, strict=True)
        return median((num - 1) / (last - first) for first, last, num in rows)

    @property
    def ttft_ms(self) -> float:
        return median(self.first_s) * 1e3

    def prefill_tok_s(self, point: Point) -> float:
        return point.streams * point.prompt / max(self.first_s)
