"""Capacity is bracketed by measured rates, never read beyond them."""

from __future__ import annotations

import math
import re

import pytest

from inferloop.measure.crossing import Crossing, Level, crossing
from inferloop.measure.frontier import Frontier, FrontierPoint
from inferloop.measure.verdict import Verdict


def point(qps: float, verdict: Verdict, margin: float | None = None) -> FrontierPoint:
    return FrontierPoint(qps, qps, qps * 10, verdict, margin)


def test_interpolates_where_the_margin_crosses_zero() -> None:
    c = Frontier.of([point(4, "fail", -0.25), point(1, "pass", 0.9), point(2, "pass", 0.75)]).capacity()
    assert (c.low, c.high, c.method) == (2.0, 4.0, "interpolated")
    assert c.qps == pytest.approx(2 + 2 * 0.75)


def test_an_infinite_margin_is_not_interpolated() -> None:
    c = Frontier.of([point(2, "pass", 0.5), point(4, "fail", -math.inf)]).capacity()
    assert (c.qps, c.low, c.high, c.method) == (2.0, 2.0, 4.0, "measured")


def test_nothing_fails_gives_a_lower_bound() -> None:
    c = Frontier.of([point(2, "pass", 0.5), point(4, "inconclusive", 0.01)]).capacity()
    assert (c.qps, c.low, c.high) == (2.0, 2.0, None)


def test_nothing_passes_gives_zero() -> None:
    c = Frontier.of([point(2, "fail", -1.0)]).capacity()
    assert (c.qps, c.low, c.high, c.method) == (0.0, 0.0, 2.0, "none")
    assert "certified" in Frontier.of([point(2, "inconclusive")]).capacity().reason
    assert Frontier.of([]).capacity().qps == 0.0


def test_doubt_below_a_failure_is_doubt() -> None:
    c = Frontier.of([point(1, "inconclusive", 0.1), point(2, "fail", -1.0)]).capacity()
    assert (c.qps, c.high, c.method) == (0.0, 2.0, "undecided")


def test_what_is_not_certified_is_still_estimated() -> None:
    levels = [(1.0, "inconclusive", 0.5), (2.0, "inconclusive", 0.2), (4.0, "fail", -0.5)]
    points = [FrontierPoint(q, q, None, v, m, m - 0.1, m + 0.1) for q, v, m in levels]  # type: ignore[arg-type]
    c = Frontier.of(points).capacity()
    assert (c.qps, c.low, c.high, c.interval) == (0.0, 0.0, 4.0, None), "nothing is sized by it"
    told = re.search(r"all levels together put it at ([\d.]+) \(([\d.]+) to ([\d.]+)\)", c.reason)
    assert told is not None
    qps, low, high = map(float, told.groups())
    assert low < qps < high and 2.0 < qps < 4.0


def test_a_pass_above_a_failure_is_not_believed() -> None:
    c = Frontier.of([point(1, "pass", 0.5), point(2, "fail", -0.1), point(4, "pass", 0.2)]).capacity()
    assert (c.low, c.high, c.monotone) == (1.0, 2.0, False)


def test_a_pass_above_a_failure_is_told_when_nothing_below_passes() -> None:
    c = Frontier.of([point(1, "fail", -0.1), point(2, "pass", 0.5)]).capacity()
    assert (c.qps, c.method, c.monotone) == (0.0, "none", False)
    assert "2 queries/s passed" in c.reason


def test_a_short_window_flatters_and_is_less_certain() -> None:
    """The same margins from few turnovers of what is in flight, from many, and where they are not known."""

    def found(turnovers: float | None) -> Crossing:
        levels = [Level(q, m, m - 0.1, m + 0.1, turnovers=turnovers) for q, m in ((2.0, 0.5), (4.0, -0.5))]
        edge = crossing(levels)
        assert edge is not None
        return edge

    short, long, unknown = found(20.0), found(2000.0), found(None)
    assert short.qps < long.qps == pytest.approx(unknown.qps, rel=0.01)
    assert long.half_width < short.half_width
    assert long.half_width < unknown.half_width
