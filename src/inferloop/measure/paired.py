"""Differences between two services that were sent the same requests, and whether chance explains them.

Windows are compared in pairs: both services got the same requests at the same offsets, one soon after the other. Two
things must hold before a difference is called one. The interval of the paired difference, by a block bootstrap that
resamples the same requests on both sides, excludes zero: that is the chance within the windows. And the difference
exceeds the noise floor: that is the chance between windows, which no resampling inside of them can see. Its variance is
pooled from how a service differs from itself between paired windows (there the true difference is known to be zero)
and from how the differences under test scatter about their mean; the floor is Student's t of it, shared out among all
that is compared (Bonferroni), so that the whole comparison of equals calls no difference with the confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from inferloop.core.slo import Slo
from inferloop.measure.bootstrap import BlockBootstrap, Interval
from inferloop.measure.columns import Columns, Floats
from inferloop.measure.quantiles import min_samples, quantile
from inferloop.measure.samples import collect
from inferloop.measure.students_t import t_quantile
from inferloop.measure.summary import achieved_rate, token_rate
from inferloop.measure.timing import RequestTiming
from inferloop.measure.verdict import judge

CONFIDENCE = 0.95
LEAST_SHARE = 0.01
"""A difference of less than this share of the first value is called none, however certain it is."""
Window = Sequence[RequestTiming]
Pair = tuple[Window, Window]
"""The measured requests of two windows: request i of both is the same request."""
Call = Literal["more", "less", "none"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that services are compared by. `quantile` None: a rate of the whole window."""

    metric: str
    quantile: float | None
    more_is_better: bool = False
    from_intended: bool = False

    @property
    def percentile(self) -> str | None:
        return None if self.quantile is None else f"p{self.quantile * 100:g}"

    @property
    def name(self) -> str:
        """As in summary.json: `ttft_ms p95`, `response_ttft_ms p95`, `output_tok_s`."""
        metric = f"response_{self.metric}" if self.from_intended else self.metric
        return metric if self.quantile is None else f"{metric} {self.percentile}"


FIGURES = (
    Figure("ttft_ms", 0.5),
    Figure("ttft_ms", 0.95),
    Figure("ttft_ms", 0.95, from_intended=True),
    Figure("tpot_ms", 0.5),
    Figure("tpot_ms", 0.95),
    Figure("ttlt_ms", 0.5),
    Figure("ttlt_ms", 0.95),
    Figure("output_tok_s", None, more_is_better=True),
    Figure("achieved_qps", None, more_is_better=True),
    Figure("goodput_qps", None, more_is_better=True),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One figure of paired windows before it is judged. `interval` is of the difference; None for too few requests.
    `scatter` are the differences pair by pair, `self_scatter` those of a service with itself."""

    figure: Figure
    a: float
    b: float
    interval: Interval | None
    scatter: tuple[float, ...]
    self_scatter: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """`b` against `a`. `called` more | less | none: what is beyond chance; `better` then says whether b is the better
    one. `noise_floor` is infinite where too little is known of chance."""

    figure: Figure
    a: float
    b: float
    interval: Interval | None
    noise_floor: float
    called: Call
    num_pairs: int

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def better(self) -> bool | None:
        return None if self.called == "none" else (self.called == "more") == self.figure.more_is_better

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: what is infinite is null and named in `infinite`."""
        numbers = {"a": self.a, "b": self.b, "difference": self.difference, "noise_floor": self.noise_floor}
        return {
            "figure": self.figure.name,
            "metric": self.figure.name.partition(" ")[0],
            "percentile": self.figure.percentile,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "infinite": [name for name, value in numbers.items() if not math.isfinite(value)],
            "interval": self.interval.as_json() if self.interval else None,
            "called": self.called,
            "better": self.better,
            "num_pairs": self.num_pairs,
        }


def see(pairs: Sequence[Pair], self_pairs: Sequence[Pair], slo: Slo) -> list[Seen]:
    """Every figure that both sides have, of all pairs together. A percentile that the requests cannot certify is left
    out, and goodput where no objective is declared. Raises ValueError for a pair of unequal length."""
    a = [r for first, _ in pairs for r in first]
    b = [r for _, second in pairs for r in second]
    if len(a) != len(b) or any(len(x) != len(y) for x, y in pairs):
        raise ValueError("the windows of a pair hold the same requests")
    if not pairs:
        return []
    bootstrap = BlockBootstrap.of(range(len(a)))
    sides = Columns.of(a), Columns.of(b)
    found = []
    for figure in FIGURES:
        if figure.metric == "goodput_qps" and not slo.objectives:
            continue
        scatter = _scatter(figure, pairs, slo)
        if figure.quantile is None:
            one, other = (_mean([_rate(figure, pair[i], slo) for pair in pairs]) for i in (0, 1))
            interval = _t_interval(scatter)
        else:
            certain = _pooled(figure, sides[0]), _pooled(figure, sides[1])
            if certain[0] is None or certain[1] is None:
                continue
            one, other = certain[0], certain[1]
            interval = None if bootstrap is None else difference_interval(figure, *sides, bootstrap, bootstrap)
        if math.isnan(one) or math.isnan(other) or (math.isinf(one) and math.isinf(other)):
            continue
        found.append(Seen(figure, one, other, interval, scatter, _scatter(figure, self_pairs, slo)))
    return found


def decide(seen: Sequence[Seen], *, num_compared: int | None = None) -> list[Difference]:
    """`num_compared`: the figures that are judged together, at all rates; default: those given."""
    risk = (1.0 - CONFIDENCE) / max(1, len(seen) if num_compared is None else num_compared)
    out = []
    for s in seen:
        floor = noise_floor(s.scatter, s.self_scatter, risk)
        change = s.b - s.a
        certain = s.interval is not None and not s.interval.low <= 0.0 <= s.interval.high
        beyond = abs(change) > floor and (math.isinf(change) or abs(change) > LEAST_SHARE * abs(s.a))
        called: Call = ("more" if change > 0 else "less") if certain and beyond else "none"
        out.append(Difference(s.figure, s.a, s.b, s.interval, floor, called, len(s.scatter)))
    return out


def noise_floor(scatter: Sequence[float], self_scatter: Sequence[float], risk: float) -> float:
    """What the mean of the differences in `scatter` exceeds by chance with probability `risk`, either way. Infinite
    where nothing is known of a service against itself, or it failed."""
    if not scatter or not self_scatter or not all(map(math.isfinite, self_scatter)):
        return math.inf
    usable = [d for d in scatter if math.isfinite(d)]
    mean = sum(usable) / len(usable) if usable else 0.0
    squares = sum(d * d for d in self_scatter) + sum((d - mean) ** 2 for d in usable)
    dof = len(self_scatter) + max(0, len(usable) - 1)
    return t_quantile(1.0 - risk / 2.0, dof) * math.sqrt(squares / dof / len(scatter))


def difference_interval(
    figure: Figure, a: Columns, b: Columns, of_a: BlockBootstrap, of_b: BlockBootstrap
) -> Interval | None:
    """Of a percentile of b less that of a. With one bootstrap for both the same requests are resampled on both sides;
    with two of different seeds the sides are independent. None where neither side bounds it."""
    assert figure.quantile is not None
    ours = [
        bootstrap.quantile(
            *collect(figure.metric, c, from_intended=figure.from_intended).pessimistic(), figure.quantile
        )
        for c, bootstrap in ((a, of_a), (b, of_b))
    ]
    with np.errstate(invalid="ignore"):
        change: Floats = ours[1] - ours[0]
    if np.isnan(change).all():
        return None
    return of_a.interval(change, CONFIDENCE)


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else math.nan


def _scatter(figure: Figure, pairs: Sequence[Pair], slo: Slo) -> tuple[float, ...]:
    """The difference of each pair; pairs that have none are left out."""
    found = []
    for pair in pairs:
        a, b = (_value(figure, window, slo) for window in pair)
        if a is not None and b is not None and not (math.isinf(a) and math.isinf(b)):
            found.append(b - a)
    return tuple(found)


def _value(figure: Figure, window: Window, slo: Slo) -> float | None:
    """Of one window, certifiable or not: its scatter is what counts."""
    if figure.quantile is None:
        return _rate(figure, window, slo)
    ordered = collect(figure.metric, window, from_intended=figure.from_intended).adjusted()
    return quantile(ordered, figure.quantile) if len(ordered) else None


def _pooled(figure: Figure, c: Columns) -> float | None:
    assert figure.quantile is not None
    samples = collect(figure.metric, c, from_intended=figure.from_intended)
    if not samples.num_total or samples.num_requests < min_samples(figure.quantile):
        return None
    return quantile(samples.adjusted(), figure.quantile)


def _rate(figure: Figure, window: Window, slo: Slo) -> float | None:
    if figure.metric == "output_tok_s":
        return token_rate(window)
    if figure.metric == "achieved_qps":
        return achieved_rate(window)[0]
    return judge(slo, window).goodput_qps


def _t_interval(scatter: Sequence[float]) -> Interval | None:
    """Of the mean of differences of independent pairs. None for fewer than two."""
    n = len(scatter)
    if n < 2 or not all(map(math.isfinite, scatter)):
        return None
    mean = sum(scatter) / n
    deviation = math.sqrt(sum((d - mean) ** 2 for d in scatter) / (n - 1))
    half = t_quantile((1.0 + CONFIDENCE) / 2.0, n - 1) * deviation / math.sqrt(n)
    return Interval(mean - half, mean + half, CONFIDENCE, n)
