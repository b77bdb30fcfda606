"""What charts say in words, and which points they show."""

from __future__ import annotations

import re
from statistics import fmean
from typing import Any

import pytest

from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.pages.chart import DARK, LIGHT, Span, _joined, both_schemes
from inferloop.pages.charts import frontier_charts, over_time
from inferloop.pages.style import CSS
from inferloop.pages.waterfall import round_step

TTFT = [("ttft_ms", "TTFT p95 \u2264 300 ms", 300.0)]


def point(mode: str, qps: float, p50: float, p95: float | None) -> dict[str, Any]:
    return {"mode": mode, "achieved_qps": qps, "output_tok_s": 10 * qps, "ttft_ms": {"p50": p50, "p95": p95}}


def test_the_words_are_about_the_promised_percentile() -> None:
    certified = [point("open", 1, 100, 200), point("open", 2, 150, 290), point("open", 4, 250, 800)]
    words = frontier_charts(certified, TTFT)[0].words
    assert words == (
        "TTFT p95: 200 ms at 1 queries/s, 800 ms at 4 queries/s. The objective is TTFT p95 \u2264 300 ms; "
        "1 of 3 certified points exceed it."
    )


def test_a_percentile_that_nobody_certified_is_not_said_to_be_kept() -> None:
    words = frontier_charts([point("open", 1, 100, None), point("open", 2, 400, None)], TTFT)[0].words
    assert "exceeds it" not in words and words.endswith("no point has the requests to certify p95.")


def test_a_burst_is_not_a_rate_but_counts_as_throughput() -> None:
    points = [point("serial", 0.5, 50, None), point("open", 1, 100, 200), point("open", 2, 150, 290)]
    ttft, tokens = frontier_charts([*points, point("burst", 5, 4000, None)], TTFT)
    assert ttft.chart.series[0].x == (1.0, 2.0) and ttft.chart.series[0].connected
    assert [s.x for s in tokens.chart.series] == [(1.0, 2.0), (0.5, 5.0)]
    assert frontier_charts(points[:2], TTFT)[0].chart.series[0].x == (1.0,)
    closed = frontier_charts([points[0], point("burst", 5, 4000, None)], TTFT)[0]
    assert closed.chart.series[0].x == (0.5, 5.0) and not closed.chart.series[0].connected


def test_a_full_service_stands_at_the_rate_that_was_asked_for() -> None:
    """Achieved rates stand still beyond capacity and would fold the line back on itself."""
    offered = [(2.0, 2.0), (8.0, 6.0), (6.0, 6.1)]
    points = [{**point("open", got, 10 * asked, 20 * asked), "offered_qps": asked} for asked, got in offered]
    points[1]["balance"] = {"verdict": "saturated"}
    found: dict[str, Any] = {"qps": 6.5, "low": 6.0, "high": 8.0, "interval": {"low": 6.2, "high": 6.9}}
    ttft, tokens = frontier_charts(points, TTFT, found)
    assert ttft.chart.series[0].x == tokens.chart.series[0].x == (2.0, 6.0, 8.0)
    assert ttft.chart.series[0].crossed == (False, False, True) and "crossed out" in ttft.words
    assert ttft.chart.edge == Span("capacity 6.5/s (95 % 6.2 to 6.9)", 6.2, 6.9, 6.5)
    assert "the service fell behind" in str(ttft.html()) and "capacity 6.5/s (95 % 6.2 to 6.9)" in str(ttft.html())
    del found["interval"]
    edge = frontier_charts(points, TTFT, found)[0].chart.edge
    assert edge is not None and edge.name == "capacity 6.5/s (between 6 and 8)"


def test_a_level_fell_behind_when_certainly_less_was_completed_than_arrived() -> None:
    points = [point("open", qps, 10 * qps, 20 * qps) for qps in (30.0, 45.0, 48.0)]
    for p, arrived, high in zip(points, (29.3, 54.8, 50.0), (34.1, 49.5, None), strict=True):
        p |= {"arrival_qps": arrived, "achieved_interval": {"low": 20.0, "high": high}}
    assert frontier_charts(points, TTFT)[0].chart.series[0].crossed == (False, True, False)
    points[1]["balance"] = {"verdict": "sustained"}
    assert frontier_charts(points, TTFT)[0].chart.series[0].crossed == (False, False, False), "the balance knows better"


def test_scouts_and_certified_points_are_counted_apart() -> None:
    points = [point("open", 1, 100, 200), point("open", 2, 150, 400), point("open", 4, 250, 800)]
    points[1]["role"] = "scout"
    words = frontier_charts(points, TTFT)[0].words
    assert "1 of 2 certified points exceed it, 1 of 1 scouted points exceed it." in words


def test_the_page_has_the_colours_of_its_charts() -> None:
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")[:2]
    for css, palette in ((light, LIGHT), (dark, DARK)):
        assert re.findall(r"--s\d: (#\w+);", css) == list(palette.series)


@pytest.mark.parametrize(
    ("span", "step"), [(2.58, 1.0), (0.9, 0.2), (10.0, 2.0), (73.0, 20.0), (5.0, 1.0), (0.001, 0.0002)]
)
def test_axes_count_in_round_steps(span: float, step: float) -> None:
    assert round_step(span) == pytest.approx(step)


def test_points_of_load_have_grounds_of_their_own_over_time() -> None:
    def rows(at_s: float) -> list[RequestTiming]:
        sends = [int((at_s + k) * 1e9) for k in range(3)]
        return [RequestTiming(f"r{t}", t, t, t, t + 9, (Chunk(t + 5, 1),), 1, 1, finish_reason="length") for t in sends]

    early, late = rows(10.0), rows(20.0)
    made = over_time([*early, *late], {"scout-1": late, "serial": early})
    assert made is not None and made.chart.stages == (Span("serial", 0.0, 10.0), Span("scout-1", 10.0, 12.0))
    assert "in turn: serial, scout-1" in made.words


def test_points_without_numbers_make_no_chart() -> None:
    assert frontier_charts([{"mode": "open"}, {"mode": "open", "achieved_qps": float("inf")}], TTFT) == []


def test_intervals_become_bands_and_scouts_are_hollow() -> None:
    points = [point("open", 1, 100, 130), point("open", 2, 400, 500)]
    points[0]["ttft_ms"]["intervals"] = {"p95": {"low": 110.0, "high": None, "infinite": ["high"]}}
    points[1]["role"] = "scout"
    made = frontier_charts(points, TTFT)[0]
    p95 = next(s for s in made.chart.series if s.name == "p95")
    assert p95.band == ((110.0, float("inf")), None) and p95.faint == (False, True)
    assert "95 % interval" in made.words and "only scouted" in made.words
    assert "VArea" not in str(both_schemes(made.chart)), "one interval is a whisker"
    points[1]["ttft_ms"]["intervals"] = {"p95": {"low": 450.0, "high": 620.0}}
    assert "VArea" in str(both_schemes(frontier_charts(points, TTFT)[0].chart))


def test_a_line_does_not_go_up_and_down_at_one_rate() -> None:
    assert _joined([(1.0, 4.0), (2.0, 5.0), (2.0, 9.0), (3.0, 1.0)], max) == [(1.0, 4.0), (2.0, 9.0), (3.0, 1.0)]
    assert _joined([(2.0, 5.0), (2.0, 9.0)], fmean) == [(2.0, 7.0)]
    assert _joined([], min) == []
