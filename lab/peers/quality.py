"""What quality a configuration computes with, as lab.quality measured it: beside speed, and to tell who is an equal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ENOUGH_KL = 0.006
"""Nats from fp32 that an engine may lose and still count as an equal: the bound for a class that is a default here.
Top-1 agreement is shown, but decides nothing: of 1,024 positions near .96 its standard error alone is .006."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one set of logits from those of fp32, over the positions of one text."""

    top1: float
    kl: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Told:
    """Of one configuration, text by text; `weights` is empty for what no class of the comparison computes in."""

    weights: str
    engine: str
    config: str
    texts: tuple[Distance, ...]

    @property
    def top1(self) -> float:
        return sum(text.top1 for text in self.texts) / len(self.texts)

    @property
    def kl(self) -> float:
        return sum(text.kl for text in self.texts) / len(self.texts)

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.engine, self.weights, self.config) if part)

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read(path: Path) -> list[Told]:
    """Of a file of lines; nothing where there is none."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [Told(**{**row, "texts": tuple(Distance(**text) for text in row["texts"])}) for row in rows]


Key = tuple[str, str, str]
"""Class, engine, configuration."""


class Qualities:
    """Looked up by configuration. `same`: configurations that compute what another one does."""

    def __init__(self, told: list[Told], same: dict[Key, Key] | None = None) -> None:
        self._told = {(each.weights, each.engine, each.config): each for each in told}
        self._same = same or {}

    def of(self, key: Key) -> Told | None:
        return self._told.get(self._same.get(key, key))

    def is_enough(self, key: Key) -> bool:
        """An engine whose quality nobody measured has the benefit of the doubt."""
        found = self.of(key)
        return found is None or found.kl <= ENOUGH_KL
