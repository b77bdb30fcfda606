"""From samples to one table: medians, ratios to the best peer, Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from lab.peers.point import Point, Timing
from lab.peers.quality import Key, Qualities

OURS = "inferloop"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one point."""

    weights: str
    engine: str
    config: str
    point: Point
    round_number: int
    timing: Timing
    peak_rss_mib: float
    load_average: float

    @property
    def key(self) -> Key:
        return self.weights, self.engine, self.config


@dataclass(frozen=True, slots=True)
class Measure:
    """A column: what is read off the samples of one point."""

    title: str
    point: Point
    read: Callable[[Sample], float]
    less_is_better: bool = False
    digits: int = 0

    def better(self, values: Iterable[float]) -> float:
        return min(values) if self.less_is_better else max(values)

    def ratio(self, value: float, other: float) -> str:
        """How many times `value` is of `other`: above 1 is better, save for times, where it is below."""
        return f"x{value / other:.2f}"


def measures(points: Sequence[Point]) -> list[Measure]:
    found = []
    for point in points:
        if point.output == 1:
            found.append(Measure(f"prefill {point.prompt} tok/s", point, lambda s: s.timing.prefill_tok_s(s.point)))
            continue
        if point.streams == 1:
            ttft = Measure("TTFT x1 ms", point, lambda s: s.timing.ttft_ms, less_is_better=True, digits=1)
            found += [ttft, Measure("decode x1 tok/s", point, lambda s: s.timing.decode_tok_s)]
            continue
        found.append(Measure(f"output x{point.streams} tok/s", point, lambda s: s.timing.output_tok_s))
        found.append(Measure(f"decode x{point.streams} tok/s each", point, lambda s: s.timing.decode_tok_s, digits=1))
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: a value for each measure, None where nothing was measured, and how many samples it is of."""

    weights: str
    engine: str
    config: str
    values: tuple[float | None, ...]
    nums: tuple[int, ...]

    @property
    def is_ours(self) -> bool:
        return self.engine == OURS

    @property
    def key(self) -> Key:
        return self.weights, self.engine, self.config


def rows(samples: Sequence[Sample], columns: Sequence[Measure]) -> list[Row]:
    """In the order in which the configurations first came; medians over the rounds."""
    found = []
    for key in dict.fromkeys(s.key for s in samples):
        mine = [s for s in samples if s.key == key]
        values: list[float | None] = []
        nums = []
        for column in columns:
            read = [column.read(s) for s in mine if s.point == column.point]
            values.append(median(read) if read else None)
            nums.append(len(read))
        found.append(Row(*key, tuple(values), tuple(nums)))
    return found


@dataclass(frozen=True, slots=True)
class Best:
    value: float
    name: str


def best_peer(found: Sequence[Row], columns: Sequence[Measure], i: int) -> Best | None:
    """Of column i, whichever its configuration; None where no peer was measured."""
    peers = [(row.values[i], f"{row.engine} {row.config}") for row in found if not row.is_ours]
    known = {value: name for value, name in peers if value is not None}
    if not known:
        return None
    value = columns[i].better(known)
    return Best(value, known[value])


def markdown(samples: Sequence[Sample], columns: Sequence[Measure], qualities: Qualities) -> str:
    """For each class its rows, then our ratios to the best peer of the class and of all classes: first of those that
    are equal in quality, then of any."""
    everything = rows(samples, columns)
    lines = [line("class", "engine", "configuration", "top-1", "KL", *(c.title for c in columns))]
    lines.append(line(*["---"] * (5 + len(columns))))
    classes = list(dict.fromkeys(row.weights for row in everything))
    for weights in classes:
        of_class = [row for row in everything if row.weights == weights]
        lines += [line(*row.key, *quality(row, qualities), *cells(row, columns)) for row in of_class]
        compared = [("class", of_class), ("all classes", everything)][: min(2, len(classes))]
        for whose, of in compared:
            equals = [row for row in of if qualities.is_enough(row.key)]
            for what, peers in (("equal quality", equals), ("any quality", of)):
                best = [best_peer(peers, columns, i) for i in range(len(columns))]
                name = f"best peer of {whose}, {what}"
                lines.append(line(weights, name, "", "", "", *(b.name if b else "" for b in best)))
                ours = [row for row in of_class if row.is_ours]
                lines += [line(weights, "ratio to it", row.config, "", "", *ratios(row, columns, best)) for row in ours]
    return "\n".join(lines)


def quality(row: Row, qualities: Qualities) -> tuple[str, str]:
    """A question mark where nobody measured it."""
    found = qualities.of(row.key)
    return (f"{found.top1:.3f}", f"{found.kl:.4f}") if found else ("?", "?")


def cells(row: Row, columns: Sequence[Measure]) -> list[str]:
    """A star marks a single sample."""
    shown = zip(row.values, row.nums, columns, strict=True)
    return ["" if v is None else f"{v:,.{c.digits}f}{'*' if num == 1 else ''}" for v, num, c in shown]


def ratios(row: Row, columns: Sequence[Measure], best: Sequence[Best | None]) -> list[str]:
    shown = zip(row.values, columns, best, strict=True)
    return ["" if v is None or b is None else c.ratio(v, b.value) for v, c, b in shown]


def line(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"
