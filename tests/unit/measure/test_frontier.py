"""Capacity is bracketed by measured rates, never read beyond them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from inferloop.measure.balance import Balance
from inferloop.measure.crossing import Crossing, Level, crossing
from inferloop.measure.frontier import Frontier, FrontierPoint
from inferloop.measure.sustained import Sustained
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


def level(qps: float, verdict: Verdict, margin: float) -> FrontierPoint:
    return FrontierPoint(qps, qps, None, verdict, margin, margin - 0.02, margin + 0.02)


def test_a_verdict_that_contradicts_the_line_leaves_the_capacity_uncertain_on_both_sides() -> None:
    """The line through all levels crosses zero below a rate that passed, or above one that failed."""
    for odd, word in ((level(2.7, "pass", 0.02), "passed"), (level(1.6, "fail", -0.02), "failed")):
        levels = [level(1.0, "pass", 0.5), level(2.0, "inconclusive", 0.02), level(3.0, "fail", -0.5)]
        frontier = Frontier.of([*levels, odd])
        edge, c = frontier.edge(), frontier.capacity()
        assert edge is not None and c.interval is not None
        at = odd.offered_qps
        assert c.qps == c.interval.qps == min(at, edge.qps), "a pass of one level is no reason to promise more"
        assert (at > edge.qps, c.low > c.qps) == (word == "passed",) * 2
        apart = abs(at - edge.qps)
        assert c.interval.low <= at - apart and c.interval.high >= at + apart
        assert f"{at:.3g} queries/s {word}; all levels together put the edge at {edge.qps:.3g}" in c.reason


def test_what_two_long_levels_kept_is_believed() -> None:
    """Of those that passed beyond the line the highest is the luckiest, and scouts are short."""
    levels = [level(1.0, "pass", 0.5), level(2.0, "inconclusive", 0.02), level(3.0, "fail", -0.5)]
    for others, believed in (((2.6, 2.7), 2.6), ((2.5, 2.6, 2.7), 2.6), ((2.7,), None)):
        passed = [level(qps, "pass", 0.02) for qps in others]
        scout = replace(level(2.65, "pass", 0.02), is_scout=True)
        frontier = Frontier.of([*levels, *passed, scout])
        edge, c = frontier.edge(), frontier.capacity()
        assert edge is not None and edge.qps < 2.5 and c.interval is not None
        assert c.qps == c.interval.qps == (believed or edge.qps)
        assert c.interval.low < c.qps < c.low == 2.7 < c.interval.high


def test_levels_that_keep_their_objectives_beyond_what_is_sustained_say_nothing_of_less() -> None:
    """By a short window's luck more came in time than is sustained in the long run: only completions end there."""
    most = Sustained(qps=22.0, error=0.5, dof=7, num_levels=6, drift=0.02)
    for levels in ([Level(25.6, 0.6, 0.5, 0.7)], [Level(24.0, 0.5, 0.4, 0.6), Level(27.0, 0.3, 0.2, 0.4)]):
        edge = crossing(levels, most)
        assert edge is not None and (edge.limit, edge.qps) == ("throughput", 22.0)
        assert 19.0 < edge.low < 21.5 and 22.5 < edge.high < 24.5


def test_a_lucky_long_level_does_not_make_the_edge_certain_from_below() -> None:
    full = Balance("saturated", 30.0, 22.0, 0.3, 0.2, 0.1, 0.3, 0.05, 1500, 60.0)
    points = [
        FrontierPoint(25.0, 25.0, None, "pass", 0.5, 0.45, 0.55),
        FrontierPoint(30.0, 22.0, None, "fail", -2.0, -3.0, -1.0, balance=full),
    ]
    edge = Frontier.of(points).edge()
    assert edge is not None and edge.low < 0.99 * edge.qps
